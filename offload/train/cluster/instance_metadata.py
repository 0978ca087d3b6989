"""Read an AWS instance's notices of its own end from its metadata service (IMDSv2).

It uses only the standard library, so that the process costs a node little. Where it stops: :mod:`offload.train.cluster.notices` decides
how often to ask, and acts on the answers.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # as boto3 calls it
ENDPOINT = "http://169.254.169.254"
TIMEOUT_S = 2.0  # the service is on the instance's own host
LARGEST_BYTES = 1 << 16
TOKEN_TTL_S = 21_600  # the longest lifetime that the service grants
NOTICE_S = 120.0  # AWS's notice period, used if a notice gives no time

TOKEN = "/latest/api/token"
INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

OK, UNAUTHORIZED, NOT_FOUND = 200, 401, 404


class MetadataError(Exception):
    """The service did not answer, or its answer was not AWS's; the text describes it."""


@dataclass(frozen=True, kw_only=True)
class SpotNotice:
    """A notice that AWS will reclaim the instance: ``action`` (terminate, stop, hibernate) at ``deadline_at``, in seconds since 1970."""

    action: str
    deadline_at: float


class InstanceMetadata:
    """The service at ``endpoint``, ``http://host[:port]``."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._token: str | None = None

    def notice(self, now_s: float) -> SpotNotice | None:
        """The instance's notice, if it has one. Raises MetadataError."""
        text = self._get(INSTANCE_ACTION)
        return None if text is None else parse_notice(text, now_s)

    def rebalance_recommended(self) -> bool:
        """Return whether AWS considers an interruption more likely than usual. Raises MetadataError."""
        return self._get(REBALANCE) is not None

    def _get(self, path: str) -> str | None:
        """The content at a path; None if there is none."""
        status, text = self._ask("GET", path, {"X-aws-ec2-metadata-token": self._token or self._new_token()})
        if status == UNAUTHORIZED:  # the token has expired
            status, text = self._ask("GET", path, {"X-aws-ec2-metadata-token": self._new_token()})
        if status == NOT_FOUND:
            return None
        if status != OK:
            raise MetadataError(f"GET {path} returned status {status}")
        return text

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        status, text = self._ask("PUT", TOKEN, headers)
        if status != OK:
            raise MetadataError(f"PUT {TOKEN} returned status {status}")
        self._token = text.strip()
        return self._token

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        # Not urllib, which would use a proxy: a proxy may even have a metadata service of its own.
        connection = None
        try:
            url = urlsplit(self.endpoint)
            if url.scheme != "http" or not url.hostname:
                raise MetadataError(f"{ENDPOINT_VARIABLE} must be http://host[:port]")
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=TIMEOUT_S)
            connection.request(method, url.path + path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(LARGEST_BYTES).decode()
        except (OSError, ValueError, http.client.HTTPException) as error:
            # ValueError: an invalid port, a token that is not a valid header, bytes that are not text.
            raise MetadataError(f"{method} {path}: {str(error) or type(error).__name__}") from None
        finally:
            if connection is not None:
                connection.close()


def parse_notice(text: str, now_s: float) -> SpotNotice:
    """The notice in an answer. A past time counts as now, an unreadable time as AWS's two minutes from now: the instance goes in
    either case. Raises MetadataError for any other answer."""
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    action = document.get("action") if isinstance(document, dict) else None
    if not isinstance(action, str):
        raise MetadataError(f"{INSTANCE_ACTION} does not hold a notice: {text[:100]!r}")
    try:
        deadline = datetime.fromisoformat(document["time"])
    except (KeyError, TypeError, ValueError):
        return SpotNotice(action=action, deadline_at=now_s + NOTICE_S)
    if deadline.tzinfo is None:
        deadline = deadline.replace(tzinfo=UTC)
    return SpotNotice(action=action, deadline_at=max(deadline.timestamp(), now_s))
