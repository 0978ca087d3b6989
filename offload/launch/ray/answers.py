"""The answers of a Ray dashboard, checked and as values: pure.

Another server may answer in the dashboard's place: a proxy, a login page, or whatever has the port. So each function takes the bytes that
came and returns a value, or raises :class:`UnexpectedAnswer`. It requires only what offload uses: fields may be absent, which differ from
version to version of Ray. Where it stops: :mod:`offload.launch.ray.job_api` asks, and handles answers with an error's status.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from offload.errors import ConfigError
from offload.launch.ray.job import NAME, RUN_DIR, STOP_WAIT, STOP_WAIT_OF_RAY_S

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
REMEDY = "Check that this is the address of a Ray dashboard (usually port 8265), and that no proxy and no login page answers in its place"
SHOWN = 80  # characters of what came
REASON = 300  # characters of why a request failed
_LATEST_MS = 253_402_300_799_000  # the last second of the year 9999, the last that Python's dates know
_EXIT_CODES = range(-(1 << 31), 1 << 32)  # exit codes, of Linux, of signals and of Windows

T = TypeVar("T")


class UnexpectedAnswer(ConfigError):
    """What came is not what a Ray dashboard answers. ``found``: what came, in a few words."""

    def __init__(self, text: str, found: str) -> None:
        super().__init__(text)
        self.found = found


def unexpected(url: str, asked: str, found: str, wanted: str) -> UnexpectedAnswer:
    """The error for an answer.

    Args:
        url: the address that was asked.
        asked: the request, such as ``GET /api/jobs/``.
        found: what came, in a few words.
        wanted: what a dashboard answers.
    """
    method, _, path = asked.partition(" ")
    see = f": curl {url}{path} shows the answer" if method == "GET" else ""
    return UnexpectedAnswer(
        f"the server at {url} answered {asked} with {found} instead of {wanted}. {REMEDY}{see}.", found
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as the dashboard describes it.

    Args:
        job_id: its submission id; for a driver that was not submitted, Ray's own id.
        status: Ray's word, such as ``RUNNING``.
        driver_exit_code: of its driver, negative for a signal; None if it has not ended, or Ray does not know.
        error_type, message: why it failed, in Ray's words.
        began_ms, ended_ms: milliseconds since 1970.
        name, run_dir: of a job that offload has launched.
        stop_wait_s: the time that Ray gives it to stop, in seconds.
    """

    job_id: str
    status: str
    driver_exit_code: int | None = None
    error_type: str | None = None
    message: str | None = None
    began_ms: int | None = None
    ended_ms: int | None = None
    name: str | None = None
    run_dir: str | None = None
    stop_wait_s: int = STOP_WAIT_OF_RAY_S

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.status in ENDED


def ray_version(url: str, body: bytes) -> str:
    """The version of the cluster's Ray, such as ``2.60.0``."""

    def read(answer: Any) -> str:
        version = _required(_object(answer), "ray_version")
        if not re.match(r"\d{1,9}\.\d{1,9}(\D|$)", version):
            raise _Odd(f"a ray_version of {_shown(version)}")
        return version

    return _read(url, "GET /api/version", body, "Ray's version", read)


def jobs(url: str, body: bytes) -> Sequence[Job]:
    """All jobs of the cluster."""

    def read(answer: Any) -> Sequence[Job]:
        if not isinstance(answer, list):
            raise _Odd(_kind(answer))
        return [_job(entry) for entry in answer]

    return _read(url, "GET /api/jobs/", body, "a list of jobs", read)


def job(url: str, body: bytes, job_id: str) -> Job:
    """The job with this id."""
    return _read(url, f"GET /api/jobs/{job_id}", body, "a job", lambda answer: _job(answer, job_id))


def log(url: str, body: bytes, job_id: str) -> str:
    """The output of a job."""

    def read(answer: Any) -> str:
        fields = _object(answer)
        if "logs" not in fields:
            raise _Odd(_kind(answer))
        return _text(fields, "logs") or ""

    return _read(url, f"GET /api/jobs/{job_id}/logs", body, "a job's log", read)


def submitted(url: str, body: bytes) -> str:
    """The id of a job that the cluster has taken."""
    return _read(url, "POST /api/jobs/", body, "the job's id", lambda answer: _id(_object(answer), answer))


def stopped(url: str, body: bytes, job_id: str) -> bool:
    """Whether a job was running when it was asked to stop."""

    def read(answer: Any) -> bool:
        found = _object(answer).get("stopped")
        if not isinstance(found, bool):
            raise _Odd(_kind(answer))
        return found

    return _read(url, f"POST /api/jobs/{job_id}/stop", body, "whether the job stops", read)


def last_line(text: str) -> str:
    """The reason in the text of an error, whose traceback it ends. For a page of HTML, say so."""
    text = _printable(text).strip()
    if text.startswith("<"):
        return f"it answered with an HTML page. {REMEDY}"
    line = (text.splitlines() or ["it gave no reason"])[-1].rstrip(".")
    return line if len(line) <= REASON else f"{line[: REASON - 1]}…"


class _Odd(Exception):
    """What came, in a few words."""


def _read(url: str, asked: str, body: bytes, wanted: str, read: Callable[[Any], T]) -> T:
    try:
        return read(_document(body))
    except _Odd as odd:
        raise unexpected(url, asked, str(odd), wanted) from None


def _document(body: bytes) -> Any:
    start = body[: 4 * SHOWN].decode(errors="replace").strip()
    if not start:
        raise _Odd("nothing")
    if start.startswith("<"):
        raise _Odd("an HTML page")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise _Odd(f"{len(body):,} bytes that are no JSON ({_shown(start)})") from None


def _object(answer: Any) -> Mapping[str, Any]:
    if not isinstance(answer, dict):
        raise _Odd(_kind(answer))
    return answer


def _job(answer: Any, job_id: str | None = None) -> Job:
    fields = _object(answer)
    status = _required(fields, "status")
    if not re.fullmatch(r"[A-Z][A-Z_]{0,39}", status):
        raise _Odd(f"a job whose status is {_shown(status)}")
    metadata = _fields(fields, "metadata")
    environment = _fields(fields, "runtime_env").get("env_vars")
    wait = str(environment.get(STOP_WAIT, "")) if isinstance(environment, dict) else ""
    return Job(
        job_id=job_id or _id(fields, answer),
        status=status,
        driver_exit_code=_number(fields, "driver_exit_code", _EXIT_CODES),
        error_type=_text(fields, "error_type"),
        message=_text(fields, "message"),
        began_ms=_number(fields, "start_time", range(_LATEST_MS)),
        ended_ms=_number(fields, "end_time", range(_LATEST_MS)),
        # Other launchers may put anything there.
        name=_text_or_none(metadata.get(NAME)),
        run_dir=_text_or_none(metadata.get(RUN_DIR)),
        stop_wait_s=int(wait) if re.fullmatch(r"[0-9]{1,9}", wait) else STOP_WAIT_OF_RAY_S,
    )


def _id(fields: Mapping[str, Any], answer: Any) -> str:
    """``submission_id``; a driver that was not submitted has only ``job_id``."""
    found = _text(fields, "submission_id") or _text(fields, "job_id")
    if not found:
        raise _Odd(_kind(answer))
    return found


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    """A text; None if it is absent or null."""
    return None if fields.get(name) is None else _required(fields, name)


def _required(fields: Mapping[str, Any], name: str) -> str:
    if name not in fields:
        raise _Odd(_kind(fields))
    if not isinstance(value := fields[name], str):
        raise _Odd(f"{name} as {_kind(value)}")
    return _printable(value)


def _text_or_none(value: Any) -> str | None:
    return _printable(value) if isinstance(value, str) else None


def _fields(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object; empty if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _Odd(f"{name} as {_kind(value)}")
    return value


def _number(fields: Mapping[str, Any], name: str, accepted: range) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or value not in accepted:
        raise _Odd(f"{name} as {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    """A value of JSON in a few words."""
    if isinstance(value, dict):
        return f"an object with {_shown(', '.join(value))}" if value else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value):,}" if value else "an empty list"
    if isinstance(value, str):
        return f"the text {_shown(value)}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"the number {value:.6g}" if abs(value) < 1e300 else "a number"


def _shown(text: str) -> str:
    """The beginning of a text, between quotation marks and on one line."""
    return repr(_printable(text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"))


def _printable(text: str) -> str:
    """Replace halves of characters, which JSON can hold and no terminal can show."""
    return text.encode(errors="replace").decode()
