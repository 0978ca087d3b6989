"""Describe failures of a run to users."""

from __future__ import annotations

import traceback

from offload.errors import OffloadError, RunError, causes, find_offload_error
from offload.report.run_dir import to_json
from offload.train.driver.losses import is_broken_connection
from offload.train.driver.supervisor import WorkerError
from offload.train.group.in_worker import RestatedError

_LONG = 500  # characters


def describe_failure(error: BaseException, what: str, remedy: str) -> OffloadError:
    """Turn an error from Ray into one for users: the offload error that caused it, or else ``what`` with the innermost cause and the
    remedy, and with the user's frames as a note."""
    offload_error = find_offload_error(error)
    if offload_error is not None:
        return type(offload_error)(str(offload_error))
    bases = [e for e in causes(error) if not isinstance(e, WorkerError)]
    # A broken connection to a worker explains nothing if another error gives the reason.
    telling = [e for e in bases if not is_broken_connection(e)]
    inner = [e for e in telling if not type(e).__module__.startswith("ray.")]
    base = (inner or telling[1:] or bases)[-1]
    name, said = type(base).__name__, str(base)
    if isinstance(base, RestatedError):
        name, said = base.name, base.text
    failure = RunError(f"{what}: {name}: {_shortened(said)}. {remedy}")
    for note in getattr(base, "__notes__", ()):
        failure.add_note(note)
    return failure


def _shortened(said: str) -> str:
    """A message on one line; only its first and last line if it is long."""
    if "find_unused_parameters" in said:  # torch's half a page, which recommends a setting that offload has elsewhere
        return (
            "some parameters got no gradient on some worker. If that is meant, pass "
            "ctx.prepare(..., ddp={'find_unused_parameters': True})"
        )
    if "outside of a Ray Train training function" in said:
        return (
            f"{said.partition(' outside of ')[0]} in offload's workers, which are not Ray Train's: ctx has what takes its place "
            "(ctx.report, ctx.rank, ctx.world_size, ctx.prepare, ctx.batches)"
        )
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()] or ["no message"]
    whole = " ".join(lines)
    return (whole if len(whole) <= _LONG else " … ".join(dict.fromkeys((lines[0], lines[-1])))).rstrip(".")


def whole_story(error: BaseException) -> str:
    """The content of ``error.txt``: all tracebacks, including those that Ray carries as text."""
    parts = ["".join(traceback.format_exception(error))]
    parts += [str(e) for e in causes(error) if isinstance(e, WorkerError)]
    return "\n\n".join(parts) + "\n\n" + to_json({"type": type(error).__name__})
