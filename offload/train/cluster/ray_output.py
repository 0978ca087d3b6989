"""Keep Ray from printing, in a program that has started Ray itself, what processes of this package write to their logs.

Ray forwards the logs of all processes to the program's terminal. There, a run itself shows what the user's code prints, and tells its
failures in a sentence. So both would appear twice, with tracebacks of this package. Ray's log files still hold them, and what the user's
own tasks and actors print appears as before. Only this module touches Ray's private state of forwarded logs.

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
"""What the processes of a DataLoader, and senders of blocks, call themselves."""
OF_RUN = ("hub", "controller", "worker", "preprocessing")
CLASSES = (
    "Hub", "Preprocessor", "LoaderFeed", "IterableReader", "BlockSender", "TrainController", "RayTrainWorker",
)  # fmt: skip
_DIED = re.compile(r"Worker PID: (\d+)")

_ours = set(LOADER)


def keep_to_logs(run: str = "") -> None:
    """Let Ray no longer print what processes of loaders, and of this run, write. It stays so: Ray forwards late."""
    _ours.update(f"{run} {each}" for each in OF_RUN if run)
    emit, show = dispatcher.emit, ray._private.worker.print_to_stdstream
    if getattr(emit, "func", None) is not _unless_ours:
        dispatcher.emit = functools.partial(_unless_ours, emit)  # type: ignore[method-assign]
        ray._private.worker.print_to_stdstream = functools.partial(_unless_death, show)


def _unless_ours(emit: Callable[[Any], None], data: Any) -> None:
    if data.get("actor_name") not in _ours:
        emit(data)


def _unless_death(show: Callable[..., None], data: Any, *args: Any, **named: Any) -> None:
    """Print a message of Ray, unless it says that a process of ours has died: a run and a loader say so themselves."""
    died = [_DIED.search(line) for line in data.get("lines", ())] if data.get("pid") == "raylet" else []
    if not any(found is not None and _is_ours(int(found[1])) for found in died):
        show(data, *args, **named)


def _is_ours(pid: int) -> bool:
    try:
        known: Any = actors()
    except Exception:  # Ray is about to end
        return False
    return any(each["Pid"] == pid and each["ActorClassName"] in CLASSES for each in known.values())
