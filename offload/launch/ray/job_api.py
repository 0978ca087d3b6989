"""A cluster's job API, through Ray's own client, with deadlines and actionable errors.

Where it stops: :mod:`offload.launch.ray.job` makes the request, :mod:`offload.ray_private.job_client` is Ray's client, and
:mod:`offload.launch.ray.answers` reads the answers.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, argument
from offload.launch.archives import unzipped
from offload.launch.launcher import Unreachable
from offload.launch.ray import answers
from offload.launch.ray.address import dashboard_url
from offload.launch.ray.answers import Job, UnexpectedAnswer
from offload.launch.ray.job import RayJob
from offload.ray_private.job_client import content, job_client, version_of
from offload.ray_private.library_settings import refused_tokens
from offload.versions import LOWEST_RAY, is_too_old, ray_range

REACH_S = 5.0
ANSWER_S = 60.0
SEND_S = 900.0
"""The time to send a request to a cluster that was reached: the archive may be large and the link slow."""
NEEDS = (
    "The head needs ray[default] (pip install 'ray[default]'), and its dashboard must be reachable: through ssh (ssh -L "
    f"8265:127.0.0.1:8265 head, and {argument('address', 'http://127.0.0.1:8265')}), or RAY_AUTH_MODE=token ray start "
    "--head --dashboard-host=0.0.0.0."
)
ANSWER_BYTES = 256 << 20
"""The largest answer: a job's log, or a list of many jobs. A server may send without end."""
OK = 200
IGNORING = (".gitignore", ".rayignore")
"""Files by which Ray's client would leave out others of a folder. Which files a job needs is decided by then."""
TAKE_JOB = "POST /api/jobs/"
_STATUS = re.compile(r"Request failed with status code (\d+): (.*)", re.DOTALL)


_REASONS = (r"\[Errno -?\d+\] ([^'\")]+)", r"(timed out)", r"(CERTIFICATE_VERIFY_FAILED[^)(]*)", r"(BadStatusLine)")


class JobApi:
    """A cluster that takes jobs.

    Args:
        address: the address of its dashboard.

    Raises:
        ConfigError: if the token's file cannot be read, no dashboard answers there, it refuses the token, or the cluster's Ray is too
            old.
    """

    def __init__(self, address: str) -> None:
        self.url = dashboard_url(address)
        _check_token_file()
        self.client: Any = self._connected()
        self.ray_version = version_of(self.client)
        self._check_version()
        self.client.answer_s = ANSWER_S

    def submit(self, job: RayJob, job_id: str, archive: bytes) -> None:
        """Upload the archive, unless the cluster has it, and start the job.

        Raises ConfigError if the cluster refuses, and Unreachable if it may have taken the job.
        """
        from ray.exceptions import RuntimeEnvSetupError

        with tempfile.TemporaryDirectory() as folder, self._asking("take the job"):
            path = Path(folder) / "working_dir.zip"
            path.write_bytes(archive)
            try:
                self.client.submit_job(**job.request(job_id, str(path)))
            except RuntimeEnvSetupError:  # before the cluster hears of the job: older clients upload folders alone
                unpacked = Path(folder) / "working_dir"
                unzipped(archive, unpacked, without=IGNORING)
                self.client.submit_job(**job.request(job_id, str(unpacked)))

    def running_in(self, run_dir: str) -> Sequence[str]:
        """The running jobs that write to a run directory. Raises ConfigError if the cluster has no job API."""
        jobs = answers.jobs(self.url, self._answer("list its jobs", "GET", "/api/jobs/"))
        return [job.job_id for job in jobs if job.run_dir == run_dir and not job.ended]

    def describe(self, job_id: str) -> Job:
        """A job's state. Raises ConfigError for an unknown id and an unexpected answer, Unreachable if the cluster does not answer."""
        return answers.job(
            self.url, self._answer(f"describe the job {job_id}", "GET", f"/api/jobs/{job_id}", job_id), job_id
        )

    def stop(self, job_id: str) -> None:
        """Ask a job to stop. Raises as :meth:`describe` does."""
        answers.stopped(
            self.url, self._answer(f"stop the job {job_id}", "POST", f"/api/jobs/{job_id}/stop", job_id), job_id
        )

    def log_so_far(self, job_id: str) -> str:
        """The output of a job so far. Raises as :meth:`describe` does."""
        return answers.log(
            self.url, self._answer(f"show the log of {job_id}", "GET", f"/api/jobs/{job_id}/logs", job_id), job_id
        )

    async def log(self, job_id: str) -> AsyncIterator[str]:
        """Yield a job's output from its beginning to its end. Raises Unreachable if the connection breaks earlier."""
        import aiohttp

        try:
            async for text in self.client.tail_job_logs(job_id):
                yield text
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            raise Unreachable(f"the log of {job_id} at {self.url} broke off: {error}.") from None

    def _answer(self, what: str, method: str, endpoint: str, job_id: str | None = None) -> bytes:
        with self._asking(what, job_id):
            return content(self.client, self.url, method, endpoint)

    def _connected(self) -> Any:
        import requests

        found = ""
        try:
            return job_client(self.url, reach_s=REACH_S, send_s=SEND_S, receive=_receive, check=_check)
        except UnexpectedAnswer as error:
            found = f" It answered GET /api/version with {error.found}."
        except refused_tokens() as error:
            raise ConfigError(self._on_the_token(str(error))) from None
        except (ConnectionError, requests.exceptions.Timeout) as error:
            reason = _reason(error)
            if "BadStatusLine" not in reason:
                raise ConfigError(
                    f"no Ray dashboard can be reached at {self.url}: {reason} (after {REACH_S:.0f} s at most). {NEEDS} Check the "
                    "port (usually 8265), and that it is open for this machine."
                ) from None
        except (requests.exceptions.RequestException, RuntimeError, ValueError, KeyError, TypeError):
            pass
        raise ConfigError(
            f"the server at {self.url} is not a Ray dashboard, or it takes no jobs.{found} Check the port (usually 8265). {NEEDS}"
        )

    def _on_the_token(self, text: str) -> str:
        variable = next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)), None)
        mode = os.environ.get("RAY_AUTH_MODE", "unset")
        state = f"here RAY_AUTH_MODE is {mode}, and the token comes from {variable or 'the file ~/.ray/auth_token, if there is one'}"
        refused = "refuses the token" if "Authentication failed" in text else "asks for a token, and got none"
        return (
            f"the Ray cluster at {self.url} {refused}: {state}. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the "
            "cluster's token."
        )

    def _check_version(self) -> None:
        """A job runs with the cluster's Ray. Raise ConfigError if that one cannot work."""
        if is_too_old(self.ray_version):
            raise ConfigError(
                f"the Ray cluster at {self.url} runs Ray {self.ray_version}, and offload needs {ray_range()}: start a cluster with one of "
                f"these, such as that of an image or an environment with ray[data,default]>={LOWEST_RAY}."
            )

    @contextmanager
    def _asking(self, what: str, job_id: str | None = None) -> Iterator[None]:
        import requests
        from ray.exceptions import RayError

        try:
            yield
        except (ConnectionError, requests.exceptions.RequestException) as error:
            raise Unreachable(f"the Ray cluster at {self.url} did not {what}: {_reason(error)}.") from None
        except refused_tokens() as error:
            raise ConfigError(self._on_the_token(str(error))) from None
        except (RuntimeError, ValueError, RayError) as error:
            status, text = match.groups() if (match := _STATUS.search(str(error))) else (None, str(error))
            if job_id is not None and status == "404":
                raise ConfigError(
                    f"there is no job {job_id} at {self.url}: `ray job list` shows the existing ones."
                ) from None
            # The head, or a proxy, is restarting. Ray also answers 500 to a job that it refuses.
            if status is not None and status.startswith("5") and (job_id is not None or status != "500"):
                raise Unreachable(f"the Ray cluster at {self.url} did not {what}: it answered with {status}.") from None
            last = answers.last_line(text)
            hint = f" {NEEDS}" if status in ("404", "405") or "agent" in last else ""
            raise ConfigError(f"the Ray cluster at {self.url} did not {what}: {last}.{hint}") from None


def _check_token_file() -> None:
    """Raise ConfigError if the token's file does not hold a token."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not path or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"RAY_AUTH_TOKEN_PATH is {path}, which cannot be read: {error.strerror}. Set it to the file that holds the cluster's token."
        ) from None
    if not token:
        raise ConfigError(f"RAY_AUTH_TOKEN_PATH is {path}, which is empty: put the cluster's token there.")


def check_installed() -> None:
    """Raise ConfigError if a package that Ray's job client needs is not installed here."""
    try:
        import aiohttp  # noqa: F401
        import requests  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"launching on a Ray cluster needs {error.name}: pip install 'offload[ray]'.") from None


def _check(url: str, response: Any, asked: str) -> None:
    """Check an answer that Ray's client reads itself, and takes as it is. Raises UnexpectedAnswer, or Unreachable if the cluster may have
    taken a job."""
    if response.status_code != OK:
        return
    if asked == "GET /api/version":
        answers.ray_version(url, response.content)
    if asked == TAKE_JOB:
        try:
            job_id = answers.submitted(url, response.content)
        except UnexpectedAnswer as error:
            raise Unreachable(str(error)) from None
        response._content = json.dumps({"job_id": job_id, "submission_id": job_id}).encode()


def _receive(url: str, response: Any, asked: str) -> None:
    """Receive an answer up to the largest size. Raises UnexpectedAnswer beyond it, or Unreachable if the cluster may have taken a job."""
    parts, size = [], 0
    for part in response.iter_content(1 << 20):
        parts.append(part)
        size += len(part)
        if size > ANSWER_BYTES:
            response.close()
            error = answers.unexpected(url, asked, f"more than {ANSWER_BYTES:,} bytes", "a dashboard's answer")
            raise Unreachable(str(error)) if asked == TAKE_JOB else error
    response._content = b"".join(parts)  # the library itself knows no limit
    if response.encoding is None:  # or it would guess, for minutes if the answer is large
        response.encoding = "utf-8"


def _reason(error: BaseException) -> str:
    """The innermost cause, in a few words."""
    while error.__context__ is not None and type(error) is ConnectionError:  # Ray's, which only names the address
        error = error.__context__
    text = str(error)
    for pattern in _REASONS:
        if match := re.search(pattern, text):
            return match[1].strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
