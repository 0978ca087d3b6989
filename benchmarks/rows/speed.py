"""How many samples of a workload one core makes per second, in a plain loop: says when it is ready, begins when told."""

import argparse
import sys
import time
from pathlib import Path

from benchmarks import workloads
from offload.pipeline.malloc import keep_freed_memory

LEAD_S = 10.0  # a core that was idle runs faster at first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--data", type=Path)
    given = parser.parse_args()
    keep_freed_memory()  # as preprocessing does: with memory taken anew for each image a loop is a third slower, or not
    workload = workloads.get(given.workload, given.data)
    workload.make(0)
    print("ready", flush=True)
    sys.stdin.readline()
    _run(workload, LEAD_S)
    print(_run(workload, given.seconds), flush=True)


def _run(workload: workloads.Workload, seconds: float) -> float:
    """Samples/s."""
    began, made = time.monotonic(), 0
    while (spent := time.monotonic() - began) < seconds:
        workloads.stack([workload.make(made)])
        made += 1
    return made / spent


if __name__ == "__main__":
    main()
