"""Nodes join and leave one run again and again: what do they leave behind?

    python benchmarks/churn.py [--events 50] [-o benchmarks/results/churn.json]

A run trains on a Ray cluster of several raylets on this machine. A node joins, preprocesses, and leaves; every second node leaves
without notice. Whenever the cluster is small again, the benchmark counts processes, memory and the bytes of the object store. The result
has the counts after a fifth of the events and at the end. Each finished pass must contain every sample once.
"""

import contextlib
import json
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil
import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks.side_by_side import machine, versions
from tests.emulation.history import each_pass, log_batch, read_history
from tests.emulation.numbers import Numbers

SAMPLES, BATCH = 600, 16
STEP_S = 0.05
ROW = 4096  # numbers in a sample, so that blocks have some size
DEADLINE_S = 60.0  # of one event
KINDS = {"ray::Hub": "run's actor", "ray::TrainingWorker": "worker"}


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(ROW, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    for _ in ctx.epochs(10_000):
        if Path(ctx.config["stop"]).exists():
            return
        for batch in ctx.batches("train"):
            log_batch(ctx, batch, Path(ctx.config["log"]))
            time.sleep(STEP_S)
            ctx.backward(model(batch["x"]).mean())
            ctx.step()


@click.command(help=__doc__)
@click.option("--events", default=50, show_default=True, help="Joins and leaves together.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(events: int, output: Path | None) -> None:
    log = Console(stderr=True)
    with tempfile.TemporaryDirectory() as name:
        document = _run(Path(name), events, log)
    document |= {
        "command": shlex.join(["python", "benchmarks/churn.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
    }
    text = json.dumps(document, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    print(text)


def _run(folder: Path, events: int, log: Console) -> dict[str, Any]:
    (folder / "log").mkdir()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"place": 1}})
    ray.init(address=cluster.address, log_to_driver=False)
    outcome: list[Any] = []

    def fit() -> None:
        try:
            trainer = offload.Trainer(
                train,
                datasets={"train": offload.from_torch(Numbers(SAMPLES, width=ROW, seconds=0.002))},
                workers=1,
                batch_size=BATCH,
                checkpoints=offload.Checkpoints(every_s=None, every_epochs=1000),
                scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5, "place": 1}),
                train_loop_config={"log": str(folder / "log"), "stop": str(folder / "stop")},
            )
            outcome.append(trainer.fit(run_dir=folder / "run", quiet=True))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    told = folder / "run" / "events.jsonl"

    def count(kind: str) -> int:
        if outcome and isinstance(outcome[0], BaseException):
            raise outcome[0]
        return told.read_text().count(f'"event": "{kind}"') if told.exists() else 0

    _until(lambda: count("first_step") > 0, "the first step")
    seen: list[dict[str, Any]] = []
    for number in range(events // 2):  # on the main thread: Ray starts nodes only from there
        works, changed = count("node_preprocesses"), count("cluster_changed")
        node = cluster.add_node(num_cpus=1)
        _until(lambda works=works: count("node_preprocesses") > works, "the node that joined to preprocess")  # type: ignore[misc]
        cluster.remove_node(node, allow_graceful=number % 2 == 0)
        _until(lambda changed=changed: count("cluster_changed") > changed + 1, "the node's leaving to be seen")  # type: ignore[misc]
        seen.append(_what_there_is())
        log.print(f"{2 * number + 2} events: {seen[-1]}", markup=False)
    (folder / "stop").touch()
    thread.join()
    passes = each_pass(read_history(folder / "log"))
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]
    left = [process.name() for process in _descendants()]
    early = seen[max(len(seen) // 5 - 1, 0)]
    return {
        "events": events,
        "right": all(each == Counter(range(SAMPLES)) for each in passes.values()),
        "passes": len(passes),
        "status": outcome[0].status,
        "after_a_fifth": early,
        "at_the_end": seen[-1],
        "grown": {name: round(seen[-1][name] - early[name], 1) for name in early},
        "processes_left": left,
        "each": seen,
    }


def _what_there_is() -> dict[str, float]:
    """Return the counts, once a node's remaining processes have had time to end."""
    processes = _settled()
    found: dict[str, float] = {"processes": len(processes), "driver_mib": psutil.Process().memory_info().rss / 2**20}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            title = "".join(process.cmdline()[:1])
            for begins, name in KINDS.items():
                if title.startswith(begins):
                    found[f"{name}_mib".replace(" ", "_")] = process.memory_info().rss / 2**20
    # Only the first node is left, so the cluster's numbers are its own. Ray counts what something still refers to.
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    found["object_store_mib"] = (total["object_store_memory"] - free["object_store_memory"]) / 2**20
    return {name: round(value, 1) for name, value in found.items()}


def _settled() -> list[psutil.Process]:
    """Return this run's processes, once their number has not changed for two seconds."""
    before, since = -1, time.monotonic()
    while True:
        found = _descendants()
        if len(found) != before:
            before, since = len(found), time.monotonic()
        if time.monotonic() - since > 2.0:
            return found
        time.sleep(0.1)


def _descendants() -> list[psutil.Process]:
    """Return the cluster's processes, and those that its nodes' preload servers have forked."""
    found = psutil.Process().children(recursive=True)
    own = {str(process.pid) for process in found}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if any(part.endswith("preload/server.py") for part in command) and own.intersection(command):
            found += [process, *process.children(recursive=True)]
    return [process for process in {p.pid: p for p in found}.values() if process.status() != psutil.STATUS_ZOMBIE]


def _until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > until:
            raise click.ClickException(f"{what} took more than {DEADLINE_S:.0f} s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
