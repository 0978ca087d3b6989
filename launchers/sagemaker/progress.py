"""A run's progress in a job's log: lines that the console's metrics are read from (:data:`launchers.sagemaker.job.METRICS`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.report.run_dir import METRICS, read_lines

LOOK_S = 2.0


class ProgressLines:
    """Prints a line for each interval that a run adds to its ``metrics.jsonl``. ``with`` it: at the end all are printed."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        earlier = read_lines(self._path)  # of before a restart
        self._printed, self._last = len(earlier), earlier[-1] if earlier else None
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
        lines = read_lines(self._path)
        for values in lines[self._printed :]:
            print(progress_line(values, self._last), flush=True)
            self._last = values
        self._printed = max(self._printed, len(lines))


def progress_line(values: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """One interval of ``metrics.jsonl``, and the one before it::

        offload: epoch=0 step=1200 samples/s=84.5 stall=0.020 goodput=81.3 loss=2.31 workers=2 batch=64

    Goodput is the progress since then in samples as useful as those of initial batches, a second of stepping.
    """
    found = {
        "epoch": values["epoch"],
        "step": values["step"],
        "samples/s": values["samples_per_s"],
        "stall": values["stall"],
        "goodput": _goodput(values, before),
        "loss": values["metrics"].get("loss"),
        "workers": values["workers"],
        "batch": values["global_batch_size"],
    }
    return "offload: " + " ".join(f"{name}={_number(value)}" for name, value in found.items() if value is not None)


def _goodput(values: Mapping[str, Any], before: Mapping[str, Any] | None) -> float | None:
    stepped_s = values.get("step_time_s", 0.0) / values["workers"]  # of all workers together
    useful = (values.get("useful") or 0.0) - ((before or {}).get("useful") or 0.0)
    return useful / stepped_s if stepped_s > 0 and useful > 0 else None


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
