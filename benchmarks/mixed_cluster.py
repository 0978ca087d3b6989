"""A cluster of unequal hosts: offload's rate relative to that of plain loops that run on all of them at the same time.

    python benchmarks/mixed_cluster.py [--repeats 3] [-o benchmarks/results/mixed_cluster.json]

Three emulated hosts have quotas of 1, 0.75 and 0.25 of a core. The second is half as fast: it blurs every image twice. The *ideal* is the
sum of the plain loops, which run before and after every run of offload. The consumer only counts. The result also has the plain loops'
rate beside an idle Ray cluster, since such small hosts carry the daemons of a whole host. The *bound* is the rate of plain loops in as
much CPU time as the preprocessing processes had on each host. Every process keeps the memory that it frees. Otherwise the plain loops
would pay for pages that offload's processes keep, and lose up to half their rate.
"""

import json
import shlex
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side
from benchmarks.rows.protocol import Task
from benchmarks.side_by_side import GPU_HOST, Measurement, Row
from benchmarks.workloads import HALF_AS_FAST, NAMES
from tests.emulation import HostSpec

CPUS = {GPU_HOST: 1.0, "cpu-slow": 0.75, "cpu-small": 0.25}
SLOW = "cpu-slow"
KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": str(256 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}  # glibc, in bytes
ENV = {name: {**KEEP_FREED, **({HALF_AS_FAST: "1"} if name == SLOW else {})} for name in CPUS}
PLAIN = Row(name="plain", module="plain", hosts=tuple(CPUS), on_each=True)
BESIDE_RAY = replace(PLAIN, name="plain beside Ray", ray=True)
OFFLOAD = Row(name="offload", module="offload_row", hosts=tuple(CPUS), ray=True)
BATCH_SIZE = 64
PLAIN_BATCH_SIZE = 16
PLAIN_SAMPLES = {GPU_HOST: 1536, "cpu-slow": 608, "cpu-small": 320}  # so that all take about the same time
TIMEOUT_S = 400.0


@click.command(help=__doc__)
@click.option("--repeats", default=3, show_default=True)
@click.option("--samples", default=4096, show_default=True, help="Samples of one run of offload.")
@click.option(
    "--workload", type=click.Choice([name for name in NAMES if name != "jpeg"]), default="blur-uint8", show_default=True
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(repeats: int, samples: int, workload: str, output: Path | None) -> None:
    log = Console(stderr=True)
    task = Task(workload=workload, samples=samples, batch_size=BATCH_SIZE)
    plain_task = replace(task, batch_size=PLAIN_BATCH_SIZE)
    specs = hosts()

    def plain(row: Row = PLAIN) -> Measurement:
        return side_by_side.run(row, plain_task, timeout_s=TIMEOUT_S, specs=specs, env=ENV, samples=PLAIN_SAMPLES)

    ratios: dict[str, list[float]] = {
        "delivered_over_ideal": [],
        "bound_over_ideal": [],
        "beside_ray_over_ideal": [],
    }
    runs = []
    before = plain()
    for repeat in range(repeats):
        beside = plain(BESIDE_RAY)
        run = side_by_side.run(OFFLOAD, task, timeout_s=TIMEOUT_S, specs=specs, env=ENV)
        after = plain()
        ideal = statistics.mean((before.samples_per_s, after.samples_per_s))
        bound = statistics.mean(bound_of(run, plain_run) for plain_run in (before, after))
        for each, rate in zip(ratios.values(), (run.samples_per_s, bound, beside.samples_per_s), strict=True):
            each.append(rate / ideal)
        runs.append(
            {
                **{name: each[-1] for name, each in ratios.items()},
                "offload": asdict(run),
                "plain": [asdict(before), asdict(after)],
                "beside_ray": asdict(beside),
            }
        )
        log.print(
            f"{repeat + 1}/{repeats}: {run.samples_per_s:.1f} of {ideal:.1f} samples/s: "
            f"{ {name: round(each[-1], 3) for name, each in ratios.items()} }",
            markup=False,
        )
        before = after
    document = {
        "workload": workload,
        "hosts": {name: {"cpus": cpus, "half_as_fast": name == SLOW} for name, cpus in CPUS.items()},
        **{name: statistics.median(each) for name, each in ratios.items()},
        "runs": runs,
        "command": shlex.join(["python", "benchmarks/mixed_cluster.py", *sys.argv[1:]]),
        "machine": side_by_side.machine(),
        "versions": side_by_side.versions(),
    }
    text = json.dumps(document, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    print(
        f"{document['delivered_over_ideal']:.3f} of the ideal; plain loops make {document['bound_over_ideal']:.3f} in the CPU "
        f"time that preprocessing had, and {document['beside_ray_over_ideal']:.3f} beside an idle Ray cluster"
    )


def hosts() -> dict[str, HostSpec]:
    """Return the hosts. The first has a core to itself, and the quotas of the others fill the second core."""
    try:
        whole, shared = side_by_side.cores()
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
    return {
        name: HostSpec(core=whole if name == GPU_HOST else shared, cpus=cpus, shm_bytes=side_by_side.SHM_BYTES)
        for name, cpus in CPUS.items()
    }


def bound_of(run: Measurement, plain: Measurement) -> float:
    """Samples/s that plain loops make in the CPU time that the run's preprocessing processes had."""
    return sum(
        rate * run.preprocessing_cores_by_host[host] / plain.busy_cores_by_host[host]
        for host, rate in plain.samples_per_s_by_host.items()
    )


if __name__ == "__main__":
    main()
