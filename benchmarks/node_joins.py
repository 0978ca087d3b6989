"""A host joins while an epoch runs: how soon does it preprocess, and does the rate reach the prediction?

    python benchmarks/node_joins.py [--repeats 3] [-o benchmarks/results/node_joins.json]

Two emulated hosts run on two pinned cores. The first trains and preprocesses the blur workload. The second starts Ray during the epoch,
cold: no process of offload ran there before. The result has the seconds until the node's first block, counted from the moment when the
cluster knows the node and from `ray start`. It also has the rates before and after the join, over the last two thirds of each phase, and
the ratio to the prediction. By the joint model, a second core like the first one doubles the input's rate. The consumer only counts.
"""

import json
import shlex
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import ray
import ray.train
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks import side_by_side
from benchmarks.rows.dataloader import Samples
from benchmarks.rows.protocol import Task
from benchmarks.side_by_side import CPU_HOST, ENVIRONMENT, GPU_HOST, SHM_BYTES
from offload.report.run_dir import read_lines
from tests.emulation import Hosts, HostSpec

BATCH_SIZE = 16
BEFORE_S, AFTER_S = 45.0, 75.0
TRAIN_RESOURCE = "train_host"


@click.command(help=__doc__)
@click.option("--repeats", default=3, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(repeats: int, output: Path | None) -> None:
    log = Console(stderr=True)
    runs = []
    for repeat in range(repeats):
        runs.append(_run())
        log.print(f"{repeat + 1}/{repeats}: {runs[-1]}", markup=False)
    document = {
        **{name: statistics.median(run[name] for run in runs) for name in runs[0]},
        "runs": runs,
        "command": shlex.join(["python", "benchmarks/node_joins.py", *sys.argv[1:]]),
        "machine": side_by_side.machine(),
        "versions": side_by_side.versions(),
    }
    text = json.dumps(document, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    print(text)


def _run() -> dict[str, float]:
    first, second = side_by_side.cores()
    specs = {GPU_HOST: HostSpec(core=first, shm_bytes=SHM_BYTES), CPU_HOST: HostSpec(core=second, shm_bytes=SHM_BYTES)}
    with Hosts(specs) as hosts:
        hosts.start_ray(
            head=GPU_HOST,
            workers=[],
            env=ENVIRONMENT,
            extra_args={GPU_HOST: [f'--resources={{"{TRAIN_RESOURCE}": 1}}']},
        )
        folder = hosts.folder / "join"
        folder.mkdir()
        driver = hosts[GPU_HOST].popen(
            [sys.executable, str(Path(__file__).resolve()), "driver", str(folder)],
            env=ENVIRONMENT,
            cwd=side_by_side.ROOT,
            stderr=(folder / "stderr").open("w"),
        )
        try:
            _wait_for(folder / "began", driver, folder)
            time.sleep(BEFORE_S)
            started_at = time.time()
            hosts.join_ray(CPU_HOST, env=ENVIRONMENT)
            _wait_for(folder / "ended", driver, folder)
        finally:
            driver.kill()
            driver.wait()
        return _told(folder, started_at)


def _told(folder: Path, started_at: float) -> dict[str, float]:
    """The figures, from the run's files."""
    events = read_lines(folder / "run" / "events.jsonl")
    alive_at = float((folder / "joined").read_text())
    works_at = [event["at"] for event in events if event["event"] == "node_preprocesses"][-1]
    arrived = np.array([[line["at"], line["samples"]] for line in read_lines(folder / "arrived.jsonl")])
    before = _rate(arrived, started_at - BEFORE_S * 2 / 3, started_at)
    after = _rate(arrived, works_at + AFTER_S / 3, works_at + AFTER_S)
    return {
        "alive_to_first_block_s": works_at - alive_at,
        "ray_start_to_first_block_s": works_at - started_at,
        "rate_before": before,
        "rate_after": after,
        "after_over_predicted": after / (2 * before),
    }


def _rate(arrived: Any, since: float, until: float) -> float:
    within = arrived[(arrived[:, 0] >= since) & (arrived[:, 0] <= until)]
    return float(np.polyfit(within[:, 0], within[:, 1], 1)[0])


def _wait_for(path: Path, driver: Any, folder: Path) -> None:
    while not path.exists():
        if driver.poll() is not None:
            raise click.ClickException((folder / "stderr").read_text()[-3000:])
        time.sleep(0.1)


# --- in the driver's host ---


def _train(ctx: offload.Context) -> None:
    nothing = torch.zeros((), requires_grad=True)
    ctx.prepare(torch.nn.Linear(1, 1))
    folder = Path(ctx.config["folder"])
    (folder / "began").touch()
    received, works_at = 0, None
    with (folder / "arrived.jsonl").open("w") as file:
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                received += len(batch["label"])
                file.write(json.dumps({"at": time.time(), "samples": received}) + "\n")
                ctx.backward(nothing)
                ctx.step()
                if works_at is None and (folder / "joined").exists():
                    works_at = time.time()
                if works_at is not None and time.time() > works_at + AFTER_S + 15:
                    break
    (folder / "ended").touch()


def _driver(folder: Path) -> None:
    def watch() -> None:
        while sum(node["Alive"] for node in ray.nodes()) < 2:  # type: ignore[no-untyped-call]
            time.sleep(0.05)
        (folder / "joined.part").write_text(str(time.time()))
        (folder / "joined.part").rename(folder / "joined")

    ray.init(address="auto", log_to_driver=False)
    threading.Thread(target=watch, daemon=True).start()
    task = Task(workload="blur", samples=40_000, batch_size=BATCH_SIZE)
    offload.Trainer(
        _train,
        datasets={"train": offload.from_torch(Samples(task))},
        workers=1,
        batch_size=BATCH_SIZE,
        scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0, TRAIN_RESOURCE: 1}),
        train_loop_config={"folder": str(folder)},
    ).fit(run_dir=folder / "run", quiet=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["driver"]:
        _driver(Path(sys.argv[2]))
    else:
        main()
