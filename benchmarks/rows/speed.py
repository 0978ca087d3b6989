"""Measures the samples/s of a plain loop on one core, by the clock and by CPU time. The script says when it is ready, and measures once for
each line on standard input."""

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
    parser.add_argument("--lead", type=float, default=LEAD_S, help="seconds of the loop before it counts")
    parser.add_argument("--data", type=Path)
    given = parser.parse_args()
    keep_freed_memory()  # as preprocessing does: a loop that allocates anew for each image may be a third slower
    workload = workloads.get(given.workload, given.data)
    workload.make(0)
    print("ready", flush=True)
    for _ in sys.stdin:
        _run(workload, given.lead)
        print(*_run(workload, given.seconds), flush=True)


def _run(workload: workloads.Workload, seconds: float) -> tuple[float, float]:
    """Return samples/s by the clock, and samples per second of CPU time."""
    began, cpu_began, made = time.monotonic(), time.process_time(), 0
    while (spent := time.monotonic() - began) < seconds:
        workloads.stack([workload.make(made)])
        made += 1
    return made / spent, made / (time.process_time() - cpu_began)


if __name__ == "__main__":
    main()
