"""Forward what the user's function prints in a worker to the driver, standard output and standard error each to its own.

Where it stops: what Ray Train's own loggers say stays in its log files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

from offload.pipeline.program.output_tail import Output
from offload.report.events.training import WorkerPrinted
from offload.train.worker.links.reporter import Reporter


@contextmanager
def printing_to_driver(reporter: Reporter) -> Iterator[None]:
    """A context in which what this process prints, C libraries and started programs included, becomes events ``print``."""
    _as_in_any_process()
    output, telling, over = Output(), threading.Lock(), threading.Event()

    def tell(*, last: bool = False) -> None:
        with telling:  # pushes come from several threads
            if over.is_set():
                return
            for stream, lines in groupby(output.read(last=last), key=lambda line: line.stream):
                reporter.event(WorkerPrinted(stream=stream, text="\n".join(line.text for line in lines)))

    reporter.before_push = tell
    try:
        yield
    finally:
        reporter.before_push = None
        tell(last=True)
        with telling:
            over.set()
            output.close()


def _as_in_any_process() -> None:
    """Let loggers do what they do in any process of Python. Ray Train lets all of them write from level INFO on, and its own write to
    standard error as well."""
    root, rays_own = logging.getLogger(), logging.getLogger("ray.train")
    if of_ray := [handler for handler in root.handlers if type(handler).__module__.startswith("ray.")]:
        root.setLevel(logging.WARNING)
    for handler in of_ray:
        root.removeHandler(handler)
    for handler in list(rays_own.handlers):
        if isinstance(handler, logging.StreamHandler):
            rays_own.removeHandler(handler)
