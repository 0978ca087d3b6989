"""Progress lines in a job's log, from which the console reads its metrics (:data:`offload.launch.sagemaker.job.METRICS`)."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.report.run_dir import METRICS

LOOK_S = 2.0
_BEGINS = "offload: epoch="


class ProgressLines:
    """A printer of a line for each interval that a run adds to its ``metrics.jsonl``. At the end of a ``with``, all are printed."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._offset = 0
        for _ in self._new():  # lines from before a restart are not printed again
            pass
        self._done = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> ProgressLines:
        self._looking.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._looking.join()

    def _look(self) -> None:
        while not self._done.wait(LOOK_S):
            self._print_new()
        self._print_new()

    def _print_new(self) -> None:
        for values in self._new():
            print(progress_line(values), flush=True)

    def _new(self) -> Iterator[dict[str, Any]]:
        """Yield the lines added since the last call. It reads on from there: over a day, the file grows long."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0  # the run has restarted with a new file
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            self._offset = 0
            return
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # a crash cut the line off
                yield json.loads(line)


def progress_line(values: Mapping[str, Any]) -> str:
    """Format one interval of ``metrics.jsonl``::

    offload: epoch=0 step=1200 samples/s=84.5 stall=0.02 goodput=81.3 loss=2.31 workers=2 batch=64
    """
    words = {
        "epoch": values["epoch"],
        "step": values["step"],
        "samples/s": values["samples_per_s"],
        "stall": values["stall"],
        "goodput": values["goodput"],
        "loss": values["metrics"].get("loss"),
        "workers": values["workers"],
        "batch": values["global_batch_size"],
    }
    return _BEGINS.removesuffix("epoch=") + " ".join(
        f"{name}={_number(value)}" for name, value in words.items() if value is not None
    )


def read_progress(text: str) -> dict[str, float] | None:
    """The numbers of a progress line, after any prefix; None if ``text`` is not such a line."""
    _, mark, rest = text.partition(_BEGINS)
    if not mark:
        return None
    try:
        return {name: float(number) for name, _, number in (part.partition("=") for part in ("epoch=" + rest).split())}
    except ValueError:
        return None


def over_all(lines: Sequence[Mapping[str, float]], since: Mapping[str, float] | None = None) -> dict[str, float]:
    """Merge consecutive progress lines, by the names of the console's metrics: averages over the time spent stepping, and the newest
    loss, batch and number of workers.

    ``since``: the line before them. Without it, the first line has no beginning, and is ignored if there are others.
    Intervals have uneven lengths: if the input binds, samples come in bursts, and most lines describe bursts.
    """
    if since is None:
        since, lines = (lines[0], lines[1:]) if len(lines) > 1 else ({"step": 0.0}, lines)
    rows = [  # the seconds that each line describes, and its numbers
        ((line["step"] - before["step"]) * line["batch"] / line["samples/s"], line)
        for before, line in zip([since, *lines], lines, strict=False)
        if line.get("samples/s") and line["step"] > before["step"]
    ]
    means = {}
    for word, name in (("samples/s", "samples_per_s"), ("stall", "stall"), ("goodput", "goodput")):
        known = [(seconds, line[word]) for seconds, line in rows if word in line]
        if known:
            means[name] = sum(seconds * value for seconds, value in known) / sum(seconds for seconds, _ in known)
    last = {name: line[name] for _, line in rows for name in ("loss", "workers", "batch") if name in line}
    names = {"loss": "loss", "workers": "workers", "batch": "global_batch_size"}
    return {**means, **{names[name]: value for name, value in last.items()}}


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
