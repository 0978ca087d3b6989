"""A cluster of unequal hosts: what offload makes of them, over what plain loops do at the same time on each.

    python benchmarks/mixed_cluster.py [--repeats 3] [-o benchmarks/results/mixed_cluster.json]

Three emulated hosts with quotas of 1, 0.75 and 0.25 of a core, of which the second is half as fast (it blurs every image twice).
The *ideal* is the sum of the plain loops, which run before and after every run of offload; the consumer counts.
"""

import json
import shlex
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # to be started as a script, too

from benchmarks import side_by_side
from benchmarks.rows.protocol import Task
from benchmarks.side_by_side import Row
from benchmarks.workloads import HALF_AS_FAST
from offload.testing import HostSpec

CPUS = {"gpu-1": 1.0, "cpu-slow": 0.75, "cpu-small": 0.25}
SLOW = "cpu-slow"
SPECS = {name: HostSpec(cpus=cpus, shm_bytes=side_by_side.SHM_BYTES) for name, cpus in CPUS.items()}
ENV = {SLOW: {HALF_AS_FAST: "1"}}
PLAIN = Row(name="plain", module="plain", hosts=tuple(CPUS), on_each=True)
OFFLOAD = Row(name="offload", module="offload_row", hosts=tuple(CPUS), ray=True)
BATCH_SIZE = 64
PLAIN_SAMPLES = 4 * BATCH_SIZE
TIMEOUT_S = 400.0


@click.command(help=__doc__)
@click.option("--repeats", default=3, show_default=True)
@click.option("--samples", default=4096, show_default=True, help="Of one run of offload.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(repeats: int, samples: int, output: Path | None) -> None:
    log = Console(stderr=True)
    task = Task(workload="blur", samples=samples, batch_size=BATCH_SIZE)
    plain_task = replace(task, samples=PLAIN_SAMPLES, batch_size=16)
    ratios: list[float] = []
    runs = []
    before = side_by_side.run(PLAIN, plain_task, timeout_s=TIMEOUT_S, specs=SPECS, env=ENV)
    for repeat in range(repeats):
        run = side_by_side.run(OFFLOAD, task, timeout_s=TIMEOUT_S, specs=SPECS, env=ENV)
        after = side_by_side.run(PLAIN, plain_task, timeout_s=TIMEOUT_S, specs=SPECS, env=ENV)
        ideal = statistics.mean((before.samples_per_s, after.samples_per_s))
        ratios.append(run.samples_per_s / ideal)
        runs.append(
            {"delivered_over_ideal": ratios[-1], "offload": asdict(run), "plain": [asdict(before), asdict(after)]}
        )
        log.print(
            f"{repeat + 1}/{repeats}: {run.samples_per_s:.1f} of {ideal:.1f} samples/s, {ratios[-1]:.3f} of the ideal; "
            f"plain by host {before.samples_per_s_by_host}",
            markup=False,
        )
        before = after
    document = {
        "hosts": {name: {"cpus": cpus, "half_as_fast": name == SLOW} for name, cpus in CPUS.items()},
        "delivered_over_ideal": statistics.median(ratios),
        "runs": runs,
        "command": shlex.join(["python", "benchmarks/mixed_cluster.py", *sys.argv[1:]]),
        "machine": side_by_side.machine(),
        "versions": side_by_side.versions(),
    }
    text = json.dumps(document, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    print(f"{document['delivered_over_ideal']:.3f} of the ideal")


if __name__ == "__main__":
    main()
