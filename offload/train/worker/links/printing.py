"""Forward what the user's function prints in a worker to the driver, standard output and standard error each to its own."""

from __future__ import annotations

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
