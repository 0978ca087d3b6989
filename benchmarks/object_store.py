"""Ten epochs over more data than the object store holds: how full does it get, and does Ray spill anything to disk?

    python benchmarks/object_store.py --json -o result.json

The jpeg workload runs on one emulated host with one core and a small object store. The store's memory is a file on the host's own
tmpfs. Every page that was ever written counts there, so its size at the end is the high-water mark.
"""

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side
from benchmarks.side_by_side import ENVIRONMENT, ROOT
from tests.emulation import Hosts, HostSpec, unavailable

MIB = 1 << 20

SCRIPT = """
import json, os, sys
from pathlib import Path
import ray, ray.train, torch
import offload
from benchmarks import workloads
from benchmarks.rows.dataloader import Samples
from benchmarks.rows.protocol import Task

def train(ctx):
    ctx.prepare(torch.nn.Linear(1, 1))
    for _ in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            ctx.backward(torch.zeros((), requires_grad=True))
            ctx.step()

samples, epochs, data, run_dir = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
result = offload.Trainer(
    train,
    datasets={"train": offload.from_torch(Samples(Task(workload="jpeg", samples=samples, data=data)))},
    workers=1,
    batch_size=64,
    scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0}),
    train_loop_config={"epochs": epochs},
).fit(run_dir=run_dir, quiet=True)
print(json.dumps({"samples": result.document["samples"], "samples_per_s": result.document["samples_per_s"]}))
"""


@click.command()
@click.option("--store-mib", default=256, show_default=True, help="Size of the object store.")
@click.option("--samples", default=6400, show_default=True, help="Samples of an epoch; each is 150 kB in the store.")
@click.option("--epochs", default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def main(store_mib: int, samples: int, epochs: int, as_json: bool, output: Path | None) -> None:
    """Show that the object store stays under its cap, and that Ray spills nothing."""
    if (reason := unavailable()) is not None:
        raise click.ClickException(reason)
    from benchmarks.workloads import jpeg_files

    data = jpeg_files(Path(tempfile.gettempdir()) / "offload-benchmark-jpeg")
    core = min(os.sched_getaffinity(0))
    with Hosts({"gpu-1": HostSpec(core=core, shm_bytes=2 * store_mib * MIB)}) as hosts:
        hosts.start_ray(head="gpu-1", env=ENVIRONMENT, object_store_memory=store_mib * MIB)
        host = hosts["gpu-1"]
        with tempfile.TemporaryDirectory() as folder:
            argv = [sys.executable, "-c", SCRIPT, str(samples), str(epochs), str(data), folder]
            ran = host.run(argv, env=ENVIRONMENT, cwd=ROOT, timeout=900)
        if ran.returncode:
            raise click.ClickException(f"the run failed: {ran.stderr[-2000:]}")
        used = host.run(["df", "--block-size=1", "--output=used", "/dev/shm"], timeout=30).stdout.split()[-1]
        find = ["sh", "-c", "find /tmp/ray/ -path '*spilled*' -type f | wc -l"]
        spilled = int(host.run(find, timeout=30).stdout.split()[-1])
        run = json.loads(ran.stdout.strip().splitlines()[-1])
    result: dict[str, Any] = {
        "store_mib": store_mib,
        "high_water_mib": round(int(used) / MIB, 1),
        "spilled_files": spilled,
        "epochs": epochs,
        "samples": run["samples"],
        "data_mib": round(run["samples"] * 150_528 / MIB),
        "samples_per_s": round(run["samples_per_s"], 1),
        "command": shlex.join(["python", "benchmarks/object_store.py", *sys.argv[1:]]),
        "machine": side_by_side.machine(),
        "versions": side_by_side.versions(),
    }
    text = json.dumps(result, indent=1)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
    if as_json:
        print(text)
    else:
        print(
            f"{result['data_mib']:,} MiB went through an object store of {store_mib} MiB in {epochs} epochs: "
            f"it held at most {result['high_water_mib']} MiB, and Ray spilled {spilled} files."
        )


if __name__ == "__main__":
    main()
