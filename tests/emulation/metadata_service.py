"""An emulation of an AWS instance's metadata service (IMDSv2) for spot notices, to test runs on spot capacity.

    with MetadataService() as service:
        os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = service.url  # where Ray is started on the node
        ...
        service.give_notice(in_s=120)

Where it stops: it knows nothing else of the instance, and reclaims nothing.
"""

import json
import secrets
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

TOKEN = "/latest/api/token"
INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
LONGEST_TTL_S = 21_600


class MetadataService:
    """The service of one instance. A context manager: it listens inside the ``with`` block, at ``address`` on a free port."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._documents: dict[str, str] = {}
        self._tokens: set[str] = set()
        self.asked: list[str] = []
        """The methods and paths of all requests."""
        self._server = ThreadingHTTPServer((address, 0), _handler(self))
        self._serving = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://{address}:{self._server.server_port}"
        """The value for AWS_EC2_METADATA_SERVICE_ENDPOINT."""

    def __enter__(self) -> "MetadataService":
        self._serving.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._serving.join()
        self._server.server_close()

    def give_notice(self, *, in_s: float = 120.0, action: str = "terminate") -> None:
        """Give notice that AWS will reclaim the instance."""
        at = datetime.now(UTC) + timedelta(seconds=in_s)
        self.answer(INSTANCE_ACTION, json.dumps({"action": action, "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"}))

    def recommend_rebalance(self) -> None:
        """Report that an interruption of the instance is more likely than usual."""
        self.answer(REBALANCE, json.dumps({"noticeTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}))

    def answer(self, path: str, text: str) -> None:
        """Serve this text at a path from now on."""
        self._documents[path] = text

    def expire_tokens(self) -> None:
        """Invalidate all tokens given so far."""
        self._tokens.clear()

    def reply_to(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        """The status and text of the answer to a request."""
        self.asked.append(f"{method} {path}")
        if method == "PUT":
            ttl = headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if path != TOKEN or not (ttl.isdecimal() and 1 <= int(ttl) <= LONGEST_TTL_S):
                return 400, ""
            token = secrets.token_urlsafe(40)
            self._tokens.add(token)
            return 200, token
        if headers.get("X-aws-ec2-metadata-token") not in self._tokens:
            return 401, ""
        text = self._documents.get(path)
        return (404, "") if text is None else (200, text)


def _handler(service: MetadataService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET")

        def do_PUT(self) -> None:
            self._answer("PUT")

        def _answer(self, method: str) -> None:
            status, text = service.reply_to(method, self.path, self.headers)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    return Handler
