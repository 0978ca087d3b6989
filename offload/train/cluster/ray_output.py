"""In a program that has started Ray itself, keep Ray from printing the logs of this package's processes.

Ray forwards the logs of all processes to the program's terminal. A run already shows what the user's code prints, and reports failures
in a sentence, so both would appear twice, with tracebacks of this package. Ray's log files still hold them, and the output of the user's
own tasks and actors appears as before.

Where it stops: a Ray that this package starts or joins forwards nothing at all. :mod:`offload.ray_private.log_forwarding` stands between
Ray and the terminal.
"""

from __future__ import annotations

import re
from typing import Any

from offload.ray_private.actor_ends import classes_of
from offload.ray_private.log_forwarding import filter_forwarded

LOADER = ("preprocessing", "DataLoader feed", "DataLoader reader", "block sender")
"""The names that a DataLoader's processes and senders of blocks give themselves."""
OF_RUN = ("hub", "feed", "worker", "preprocessing")
CLASSES = (
    "RayHub", "RayFeed", "Preprocessor", "LoaderFeed", "IterableReader", "BlockSender", "TrainingWorker",
)  # fmt: skip
_DIED = re.compile(r"Worker PID: (\d+)")

_ours = set(LOADER)


def keep_to_logs(run: str = "") -> None:
    """Stop Ray from printing the output of loaders' processes, and of this run's. This outlives the run, since Ray forwards output late."""
    _ours.update(f"{run} {process}" for process in OF_RUN if run)
    filter_forwarded(_is_of_ours, _says_our_death)


def _is_of_ours(data: Any) -> bool:
    return data.get("actor_name") in _ours


def _says_our_death(data: Any) -> bool:
    """Return whether a message of Ray announces the death of a process of ours, which a run or a loader reports itself."""
    deaths = [_DIED.search(line) for line in data.get("lines", ())] if data.get("pid") == "raylet" else []
    return any(death is not None and _is_process_of_ours(int(death[1])) for death in deaths)


def _is_process_of_ours(pid: int) -> bool:
    try:
        return not classes_of(pid).isdisjoint(CLASSES)
    except Exception:  # Ray is about to end
        return False
