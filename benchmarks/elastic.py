"""Elasticity: losses through random kills, drains and resizes, and the seconds without steps of a resize.

    python benchmarks/elastic.py [--json] [-o benchmarks/results/elastic.json]

Most schedules are rehearsed in threads, with the real feed, batches, agreement and progress (`tests.emulation.rehearsal`). Some run on
real processes, in a Ray cluster on this machine. There the benchmark kills workers and preprocessing processes at random times, while
the number of workers follows a random schedule. A pass is correct if the history of the final state holds each sample once.

The same run also times Ray Train's own elastic resize, on the same machine and with the same imports.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import psutil
import ray
import ray.train
import torch
import torchvision  # noqa: F401  # as a user's script would import it
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks.side_by_side import machine, versions
from offload.report.run_dir import read_lines
from tests.emulation.history import each_pass, log_batch, read_history
from tests.emulation.numbers import Numbers
from tests.emulation.rehearsal import Rehearsal

SAMPLES, EPOCHS = 400, 16
STEP_S = 0.02
LOGICAL_CPUS = 4
VICTIMS = ("ray::TrainingWorker", "ray::Preprocessor")
DEADLINE_S = 240.0


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(32, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in ctx.epochs(EPOCHS):
        for batch in ctx.batches("train"):
            log_batch(ctx, batch, Path(ctx.config["log"]))
            time.sleep(STEP_S)
            ctx.backward(model(batch["x"]).mean())
            ctx.step()


@click.command(help=__doc__)
@click.option("--schedules", default=100, show_default=True, help="Schedules rehearsed in threads.")
@click.option("--real", default=10, show_default=True, help="Schedules on real processes.")
@click.option("--resizes", default=3, show_default=True, help="Timed resizes, each of offload and of Ray Train.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(schedules: int, real: int, resizes: int, as_json: bool, output: Path | None) -> None:
    console = Console(stderr=True)
    counts: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    for seed in range(schedules):
        outcome = Rehearsal(seed).go()
        counts.update(lost=outcome.lost, repeated=outcome.repeated, hangs=int(outcome.hung))
        happened.update(outcome.happened)
    console.print(f"{schedules} schedules rehearsed: {dict(counts)}")
    os.environ.setdefault("RAY_TMPDIR", "/tmp")
    real_ones = [_real_schedule(seed, console) for seed in range(real)]
    for each in real_ones:
        counts.update({name: each[name] for name in ("lost", "repeated", "hangs")})
    ours = [_resize() for _ in range(resizes)]
    theirs = [_ray_train_resize() for _ in range(resizes)]
    document = {
        "schedules": schedules,
        "real_process_schedules": real,
        **{name: counts[name] for name in ("lost", "repeated", "hangs")},
        "resize": {
            "offload_s": statistics.median(ours) if ours else None,
            "ray_train_s": statistics.median(theirs) if theirs else None,
            "offload_each_s": ours,
            "ray_train_each_s": theirs,
        },
        "happened": {"rehearsed": dict(happened), "real": real_ones},
        "machine": machine(),
        "versions": versions(),
        "command": f"python {' '.join(sys.argv)}",
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        print(json.dumps(document))
    else:
        console.print_json(json.dumps({k: document[k] for k in ("lost", "repeated", "hangs", "resize")}))


def _trainer(folder: Path, workers: tuple[int, int], **given: Any) -> offload.Trainer:
    (folder / "log").mkdir()
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Numbers(SAMPLES, width=32))},
        batch_size=16,
        workers=workers,
        scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5}),
        train_loop_config={"log": str(folder / "log")},
        **given,
    )


def _real_schedule(seed: int, console: Console) -> dict[str, Any]:
    """Run once, and kill processes at random times."""
    chance = random.Random(seed)
    schedule = {epoch: chance.randint(1, 3) for epoch in sorted(chance.sample(range(EPOCHS), 3))}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, _ray():
        folder = Path(name)
        ended = threading.Event()
        kills: Counter[str] = Counter()
        killer = threading.Thread(target=_kill_at_random, args=(chance, ended, kills), daemon=True)
        killer.start()
        trainer = _trainer(
            folder,
            (1, 3),
            adaptation=offload.Adaptation(schedule=schedule),
            checkpoints=offload.Checkpoints(every_s=2.0),
        )
        result = trainer.fit(run_dir=folder / "run", quiet=True)
        ended.set()
        killer.join()
        events = read_lines(folder / "run" / "events.jsonl")
        passes = each_pass(read_history(folder / "log"))
    seconds = time.monotonic() - began
    found = {
        "lost": sum(SAMPLES - len(passes.get(epoch, {})) for epoch in range(EPOCHS)),
        "repeated": sum(sum(seen.values()) - len(seen) for seen in passes.values()),
        "hangs": int(seconds > DEADLINE_S or result.status != "finished"),
        "killed": dict(kills),
        "resized": sum(event["event"] == "resized" for event in events),
        "worker_groups": result.document["worker_groups"],
        "seconds": round(seconds, 1),
    }
    console.print(f"real schedule {seed}: {found}")
    return found


def _kill_at_random(chance: random.Random, ended: threading.Event, kills: Counter[str]) -> None:
    for _ in range(3):
        if ended.wait(chance.uniform(8, 20)):
            return
        wanted = chance.choice(VICTIMS)
        mine = [p for p in _ray_processes() if _title(p).startswith(wanted)]
        if mine:
            chance.choice(mine).send_signal(signal.SIGKILL)
            kills[wanted] += 1


def _ray_processes() -> list[psutil.Process]:
    """The processes of this process's cluster: its descendants, and those that the preload servers have forked for its raylet."""
    found = psutil.Process().children(recursive=True)
    own = {str(process.pid) for process in found}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if own.intersection(command) and any(part.endswith("preload/server.py") for part in command):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += process.children(recursive=True)
    return found


def _title(process: psutil.Process) -> str:
    try:
        return "".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


class _ray:  # lower case, since it is used like a function
    """A Ray cluster on this machine with more logical CPUs than it has."""

    def __enter__(self) -> None:
        from offload import machine
        from offload.train.cluster import connection as cluster

        self._cores = machine.usable_cores
        machine.usable_cores = lambda: LOGICAL_CPUS
        cluster._start_local()

    def __exit__(self, *error: object) -> None:
        from offload import machine

        ray.shutdown()
        machine.usable_cores = self._cores


def _resize() -> float:
    """Return the seconds without steps in one change from one worker to two."""
    with tempfile.TemporaryDirectory() as name, _ray():
        folder = Path(name)
        adaptation = offload.Adaptation(schedule={0: 1, 4: 2})
        _trainer(folder, (1, 2), adaptation=adaptation).fit(run_dir=folder / "run", quiet=True)
        (cost,) = [e for e in read_lines(folder / "run" / "events.jsonl") if e["event"] == "resize_cost"]
    return float(cost["without_steps_s"])


def _ray_train_resize() -> float:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rows.elastic_ray_train"], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["without_steps_s"])


if __name__ == "__main__":
    main()
