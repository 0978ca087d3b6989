"""A server on loopback that answers like an AWS service with the JSON protocol, such as SageMaker."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]


@contextmanager
def aws_json_server(answer: Answer) -> Iterator[str]:
    """Serve inside the ``with`` block; yield the endpoint's URL.

    ``answer`` takes an action (``CreateTrainingJob``) and its document, and returns a status and the answer's document. A refusal is
    400 and ``{"__type": "ResourceLimitExceeded", "message": …}``. Several threads call it.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = answer(self.headers["X-Amz-Target"].split(".")[1], document)
            body = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
