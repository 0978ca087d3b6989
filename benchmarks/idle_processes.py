"""The cost of idle Ray worker processes for preprocessing on the same core.

    python benchmarks/idle_processes.py [--processes 5] [-o benchmarks/results/idle_processes.json]

Every Ray worker process looks for signals a hundred times a second; no setting changes that. A run of offload has five such processes on
the worker's host that do little else: the hub, the worker, Ray Train's controller and synchronisation actor, and the driver. Here a plain
loop blurs images on one core that it shares with the same number of idle Ray actors. The benchmark stops and continues the actors in turn.
"""

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import ray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side
from benchmarks.mixed_cluster import KEEP_FREED
from offload.train.cluster.connection import connected

LOOP = """
import sys, time
from benchmarks.workloads import BlurUint8
workload, sample = BlurUint8(), 0
for line in sys.stdin:
    began, spent, until = time.perf_counter(), time.process_time(), time.perf_counter() + float(line)
    first = sample
    while time.perf_counter() < until:
        workload.make(sample)
        sample += 1
    made = sample - first
    print((time.perf_counter() - began) / made, (time.process_time() - spent) / made, flush=True)
"""


class Idle:
    """An actor that is idle after its first call."""

    def pid(self) -> int:
        return os.getpid()


@click.command(help=__doc__)
@click.option("--processes", default=5, show_default=True)
@click.option("--pairs", default=24, show_default=True, help="Pairs of windows: one with the processes, one without.")
@click.option("--window-s", default=1.5, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(processes: int, pairs: int, window_s: float, output: Path | None) -> None:
    machine = side_by_side.machine()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # child processes inherit it
    env = {**os.environ, **side_by_side.ENVIRONMENT, **KEEP_FREED}
    with connected("local"):
        actor: Any = ray.remote(Idle)
        actors = [actor.options(num_cpus=0).remote() for _ in range(processes)]
        pids = ray.get([each.pid.remote() for each in actors])
        with subprocess.Popen(
            [sys.executable, "-c", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        ) as loop:
            to_loop, from_loop = loop.stdin, loop.stdout
            assert to_loop is not None
            assert from_loop is not None

            def window(*, beside: bool) -> tuple[float, float]:
                """Measure one window: seconds and CPU seconds per sample."""
                for pid in pids:
                    os.kill(pid, signal.SIGCONT if beside else signal.SIGSTOP)
                to_loop.write(f"{window_s}\n")
                to_loop.flush()
                wall_s, cpu_s = map(float, from_loop.readline().split())
                return wall_s, cpu_s

            window(beside=True)
            seen = []
            for number in range(pairs):
                pair = {beside: window(beside=beside) for beside in ((True, False) if number % 2 else (False, True))}
                seen.append((pair[True], pair[False]))
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            to_loop.close()
    rates = [alone[0] / beside[0] for beside, alone in seen]
    costs = [beside[1] / alone[1] for beside, alone in seen]
    document = {
        "processes": processes,
        "rate_beside_over_alone": statistics.median(rates),
        "cpu_per_sample_beside_over_alone": statistics.median(costs),
        "quartiles": {"rate": statistics.quantiles(rates, n=4), "cpu_per_sample": statistics.quantiles(costs, n=4)},
        "ms_per_sample_alone": 1e3 * statistics.median(alone[0] for _, alone in seen),
        "pairs": pairs,
        "window_s": window_s,
        "command": shlex.join(["python", "benchmarks/idle_processes.py", *sys.argv[1:]]),
        "machine": machine,
        "versions": side_by_side.versions(),
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"beside {processes} idle Ray processes a core makes {document['rate_beside_over_alone']:.3f} of the samples, each for "
        f"{document['cpu_per_sample_beside_over_alone']:.3f} times the CPU time"
    )


if __name__ == "__main__":
    main()
