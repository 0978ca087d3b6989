"""What Ray prints in a program that has started it: the output of its processes, and its own messages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from offload.ray_private.part import Part

PART = Part(
    name="forwarded output",
    purpose="keep the output of a run's processes from appearing twice in a program that has started Ray itself",
    without="Ray prints everything, too",
    cost="such a program shows output twice, and tracebacks of offload's processes beside their report",
    needs=(
        "ray._private.ray_logging:global_worker_stdstream_dispatcher.emit(data)",
        "ray._private.worker:print_to_stdstream(data)",
        "ray._private.worker:global_worker_stdstream_dispatcher",
    ),
)


def filter_forwarded(hides_output: Callable[[Any], bool], hides_message: Callable[[Any], bool]) -> None:
    """Keep from the terminal what these functions hide: the output of processes, and messages. Later calls change nothing."""

    def private() -> None:
        import ray._private.worker
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        emit, show = dispatcher.emit, ray._private.worker.print_to_stdstream
        if getattr(emit, "func", None) is not _unless:
            dispatcher.emit = functools.partial(_unless, hides_output, emit)  # type: ignore[method-assign]
            ray._private.worker.print_to_stdstream = functools.partial(_unless, hides_message, show)

    PART.use(private, otherwise=lambda: None)


def _unless(hides: Callable[[Any], bool], show: Callable[..., None], data: Any, *args: Any, **named: Any) -> None:
    if not hides(data):
        show(data, *args, **named)
