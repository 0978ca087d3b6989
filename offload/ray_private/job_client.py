"""Ray's client of a cluster's job API, with a deadline for every request.

By itself, the client waits for ever for an answer, and prefers an address from the environment to its argument.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from offload.ray_private.part import Part

COMES_FIRST = "RAY_API_SERVER_ADDRESS"
OK = 200

PART = Part(
    name="deadlines of the job client",
    purpose="give each request to a cluster's job API a deadline, and check each answer",
    without="Ray's client waits as long as it takes",
    cost="offload launch ray hangs where a dashboard is reached and does not answer",
    needs=("ray.job_submission:JobSubmissionClient._do_request(method, endpoint, data)",),
)


Look = Callable[[str, Any, str], None]
"""Looks at an answer: the dashboard's URL, the response, and the request in words, such as ``GET /api/version``."""


def job_client(url: str, *, reach_s: float, send_s: float, receive: Look, check: Look) -> Any:
    """A client of the dashboard at ``url``. Its attribute ``answer_s`` is the time for an answer.

    Args:
        reach_s: the time to connect, and the first ``answer_s``.
        send_s: the time to send a body.
        receive: reads the body of each answer.
        check: looks at each answer before Ray's client does.
    """
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        answer_s = reach_s

    class ClientWithDeadlines(Client):
        def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
            # urllib3 applies the connect timeout while it sends the whole body, in one call.
            to_send_s = reach_s if more.get("data") is None else send_s
            asked = f"{method} {endpoint}"
            ours = {
                "timeout": (to_send_s, self.answer_s),
                "stream": True,
                "hooks": {"response": lambda response, **_: receive(url, response, asked)},
            }
            response = super()._do_request(method, endpoint, **{**ours, **more})
            check(url, response, asked)
            return response

    for name in ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it logs each upload
    before = os.environ.get(COMES_FIRST)
    os.environ[COMES_FIRST] = url
    try:
        return ClientWithDeadlines(url) if PART.available() else Client(url)
    finally:
        os.environ.pop(COMES_FIRST)
        if before is not None:
            os.environ[COMES_FIRST] = before


def content(client: Any, url: str, method: str, endpoint: str) -> bytes:
    """The content of the answer to a request. Raises RuntimeError, as Ray's client does, with the status of a request that failed.

    Without Ray's client, the request has no deadline and no token.
    """

    def private() -> bytes:
        response = client._do_request(method, endpoint)
        if response.status_code != OK:
            client._raise_error(response)
        return bytes(response.content)

    def public() -> bytes:
        import requests

        response = requests.request(method, url + endpoint, timeout=None)  # as Ray's client
        if response.status_code != OK:
            raise RuntimeError(f"Request failed with status code {response.status_code}: {response.text}.")
        return bytes(response.content)

    return PART.use(private, otherwise=public)


def version_of(client: Any) -> str:
    """The version of Ray that the cluster runs."""
    known = getattr(client, "_server_ray_version", None)  # of the answer to the client's first request
    return str(known or client.get_version())
