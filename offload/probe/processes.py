"""The CPU time of the processes beside this worker on its host: the raylet, preprocessing, and the rest of the run.

The raylet's time counts for every sample, wherever it is preprocessed. The time of the worker and the run's actors reduces the
host's cores for preprocessing.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

PREPROCESSING = "ray::Preprocessor"


@dataclass(frozen=True, kw_only=True)
class CpuSeconds:
    """CPU seconds since the processes started; 0 if they cannot be read."""

    raylet_s: float = 0.0
    beside_s: float = 0.0

    def since(self, before: CpuSeconds) -> CpuSeconds:
        """The difference to an earlier reading."""
        return CpuSeconds(raylet_s=self.raylet_s - before.raylet_s, beside_s=self.beside_s - before.beside_s)


def cpu_seconds() -> CpuSeconds:
    """CPU seconds of the raylet that started this process, and of its processes that do not preprocess, including this one."""
    try:
        raylet = psutil.Process().parent()
        if raylet is None or "raylet" not in raylet.name():
            return CpuSeconds()
        beside = [p for p in raylet.children() if not _title(p).startswith(PREPROCESSING)]
        return CpuSeconds(raylet_s=_spent(raylet), beside_s=sum(map(_spent, beside)))
    except psutil.Error:
        return CpuSeconds()


def _title(process: psutil.Process) -> str:
    try:
        return "".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def _spent(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # the process has ended
        return 0.0
    return float(times.user + times.system)
