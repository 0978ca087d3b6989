"""In a program that has started Ray itself, keep Ray from printing the logs of this package's processes.

Ray forwards the logs of all processes to the program's terminal. A run already shows what the user's code prints, and reports failures
in a sentence, so both would appear twice, with tracebacks of this package. Ray's log files still hold them, and the output of the user's
own tasks and actors appears as before. Only this module touches Ray's private state of forwarded logs.

Where it stops: a Ray that this package starts or joins forwards nothing at all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import ray
import ray._private.worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
from ray._private.state import actors

LOADER = ("preprocessing", "DataLoader feed", "DataLoader reader", "block sender")
"""The names that a DataLoader's processes and senders of blocks give themselves."""
OF_RUN = ("hub", "worker", "preprocessing")
CLASSES = (
    "Hub", "Preprocessor", "LoaderFeed", "IterableReader", "BlockSender", "TrainingWorker",
)  # fmt: skip
_DIED = re.compile(r"Worker PID: (\d+)")

_ours = set(LOADER)


def keep_to_logs(run: str = "") -> None:
    """Stop Ray from printing the output of loaders' processes, and of this run's. This outlives the run, since Ray forwards output late."""
    _ours.update(f"{run} {process}" for process in OF_RUN if run)
    emit, show = dispatcher.emit, ray._private.worker.print_to_stdstream
    if getattr(emit, "func", None) is not _unless_ours:
        dispatcher.emit = functools.partial(_unless_ours, emit)  # type: ignore[method-assign]
        ray._private.worker.print_to_stdstream = functools.partial(_unless_death, show)


def _unless_ours(emit: Callable[[Any], None], data: Any) -> None:
    if data.get("actor_name") not in _ours:
        emit(data)


def _unless_death(show: Callable[..., None], data: Any, *args: Any, **named: Any) -> None:
    """Print a message of Ray unless it announces the death of a process of ours, which a run or a loader reports itself."""
    deaths = [_DIED.search(line) for line in data.get("lines", ())] if data.get("pid") == "raylet" else []
    if not any(death is not None and _is_ours(int(death[1])) for death in deaths):
        show(data, *args, **named)


def _is_ours(pid: int) -> bool:
    try:
        known: Any = actors()
    except Exception:  # Ray is about to end
        return False
    return any(actor["Pid"] == pid and actor["ActorClassName"] in CLASSES for actor in known.values())
