"""Measures the samples/s of a plain loop on one core. The script says when it is ready, and begins at a line on standard input."""

import argparse
import sys
import time
from pathlib import Path

from benchmarks import workloads
from offload.pipeline.preprocessing.environment import keep_freed_memory

LEAD_S = 10.0  # a core that was idle runs faster at first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--data", type=Path)
    given = parser.parse_args()
    keep_freed_memory()  # as preprocessing does: a loop that allocates anew for each image may be a third slower
    workload = workloads.get(given.workload, given.data)
    workload.make(0)
    print("ready", flush=True)
    sys.stdin.readline()
    _run(workload, LEAD_S)
    print(_run(workload, given.seconds), flush=True)


def _run(workload: workloads.Workload, seconds: float) -> float:
    """Return samples/s."""
    began, made = time.monotonic(), 0
    while (spent := time.monotonic() - began) < seconds:
        workloads.stack([workload.make(made)])
        made += 1
    return made / spent


if __name__ == "__main__":
    main()
