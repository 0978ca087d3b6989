"""Time and dollars to an accuracy: adaptation against fixed batches, and against AdaptDL's policy, which lacks the input term.

    python benchmarks/adaptation.py [--json] [-o benchmarks/results/adaptation.json]

scikit-learn's digits on a *paced accelerator*: training is real, but its time is the accelerator's. With a slow input, preprocessing is
paced as well: each sample occupies its core for a while without using the CPU, so that two real cores stand for more. The benchmark
charges a worker as one GPU instance and a preprocessing core as its share of a CPU instance, for as long as the run holds them.

    statistics      one worker, input to spare: adaptive batches against fixed ones, the initial among them; 3 seeds, CNN and ViT
    input-bound     one to four workers, an input slower than one accelerator: joint policy against AdaptDL's
    device-bound    one to four workers, input to spare: the joint policy's choice against AdaptDL's
    midway          one to four workers, an input whose nodes join and leave while it runs
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import ray
import ray.train
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks.rows.digits import Digits, train
from benchmarks.side_by_side import machine, versions
from offload.adapt.observe import Seen
from offload.prices import built_in
from offload.report.run_dir import read_lines

GPU, CPU = "ml.g5.xlarge", "ml.c5.4xlarge"
ALPHA_S = 0.05  # of the paced accelerator, per step
INITIAL, LARGEST = 16, 256
FIXED = (16, 64, 256)
TARGET = {"cnn": 0.96, "vit": 0.92}
SEEDS = {"input-bound": 2, "device-bound": 2, "midway": 1, "statistics": 3}
WORKERS = 4
PACED_SAMPLE_S = 0.06  # of a core: 17 samples/s
SAME = ("case", "model", "policy", "seed")
CASES = ("input-bound", "device-bound", "midway", "statistics")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run.

    Args:
        beta_s: the accelerator's seconds per sample.
        repeats: how often a pass holds each sample.
        pace_s: seconds of a core per sample that preprocessing takes.
        cores: logical cores that preprocess.
        interval_s: seconds between two decisions.
        changes: pairs of a time in seconds and the number of cores that join (+) or leave (-) then.
    """

    case: str
    policy: str
    model: str = "cnn"
    seed: int = 0
    batch: int | offload.BatchSize = INITIAL
    workers: tuple[int, int] = (1, 1)
    epochs: int = 12
    repeats: int = 1
    beta_s: float = 0.0004
    pace_s: float = 0.0
    cores: int = 4
    interval_s: float = 5.0
    changes: tuple[tuple[float, int], ...] = ()


def settings(case: str, seeds: int) -> list[Setting]:
    """Return the runs of a case."""
    adaptive = offload.BatchSize(initial=INITIAL, max=LARGEST)
    if case == "statistics":
        runs = [
            Setting(case=case, policy=f"fixed {size}", model=model, seed=seed, batch=size, epochs=epochs)
            for model, epochs in (("cnn", 12), ("vit", 16))
            for seed in range(seeds)
            for size in FIXED
        ]
        adapted = [
            dataclasses.replace(run, policy="adaptive", batch=adaptive, interval_s=2.0)
            for run in runs if run.policy == f"fixed {INITIAL}"
        ]  # fmt: skip
        return adapted + runs
    both = ("joint", "without input term")
    if case == "midway":
        return [
            Setting(
                case=case, policy="joint", batch=adaptive, workers=(1, WORKERS), epochs=4, repeats=8, beta_s=0.004,
                pace_s=PACED_SAMPLE_S / 3, cores=4, changes=((45.0, 10), (105.0, -10)),
            )
        ]  # fmt: skip
    pace, epochs, repeats = (PACED_SAMPLE_S, 4, 1) if case == "input-bound" else (0.0, 6, 8)
    return [
        Setting(
            case=case,
            policy=policy,
            batch=adaptive,
            workers=(1, WORKERS),
            epochs=epochs,
            repeats=repeats,
            pace_s=pace,
            seed=seed,
        )
        for seed in range(seeds)
        for policy in both
    ]


@click.command(help=__doc__)
@click.option("--case", "cases", multiple=True, type=click.Choice(CASES), help="Default: all.")
@click.option("--seeds", type=int, help="Runs of each policy; default: 2, for statistics 3, for midway 1.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
@click.option("--resume", is_flag=True, help="Keep the runs in the output file, and run only the missing ones.")
def main(cases: tuple[str, ...], seeds: int | None, as_json: bool, output: Path | None, resume: bool) -> None:
    console = Console(stderr=True, width=140)
    rows: list[dict[str, Any]] = []
    if resume and output is not None and output.exists():
        rows = json.loads(output.read_text())["cases"]
    for case in cases or CASES:
        for setting in settings(case, seeds or SEEDS[case]):
            if any(all(row[name] == getattr(setting, name) for name in SAME) for row in rows):
                continue
            row = _run(setting)
            rows.append(row)
            console.print(
                f"{case} {setting.model} {setting.policy} seed {setting.seed}: to {row['target']:.0%} "
                f"{_or_dash(row['time_to_accuracy_s'])} s, {_or_dash(row['usd'])} $, "
                f"final {row['final_accuracy']:.1%}, batch {row['batches'][-1] if row['batches'] else INITIAL}, "
                f"workers {row['workers']}"
            )
            if output is not None:
                output.write_text(json.dumps(_document(rows), indent=1) + "\n")
    if as_json:
        print(json.dumps(_document(rows)))
    else:
        console.print(_table(rows))


def _document(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "cases": list(rows),
        "summary": _summary(rows),
        "accelerator": "paced accelerator",
        "prices": {"gpu": GPU, "cpu": CPU},
        "machine": machine(),
        "versions": versions(),
        "command": f"python {' '.join(sys.argv)}",
    }


def _summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over seeds."""
    keys = sorted({(row["case"], row["model"], row["policy"]) for row in rows})
    found = []
    for key in keys:
        mine = [row for row in rows if (row["case"], row["model"], row["policy"]) == key]
        values = {
            name: statistics.median(math.inf if row[name] is None else row[name] for row in mine)
            for name in ("time_to_accuracy_s", "usd", "final_accuracy", "total_s")
        }
        accuracies = [row["final_accuracy"] for row in mine]
        found.append(
            {
                **dict(zip(("case", "model", "policy"), key, strict=True)),
                **{name: value if math.isfinite(value) else None for name, value in values.items()},
                "final_accuracy_range": [min(accuracies), max(accuracies)],
                "runs": len(mine),
            }
        )
    return found


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="medians over seeds")
    for name in ("case", "model", "policy", "s to accuracy", "$ to accuracy", "final accuracy", "s to the end"):
        table.add_column(name)
    for each in _summary(rows):
        table.add_row(
            each["case"], each["model"], each["policy"], _or_dash(each["time_to_accuracy_s"]), _or_dash(each["usd"]),
            f"{each['final_accuracy']:.1%}", _or_dash(each["total_s"]),
        )  # fmt: skip
    return table


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _run(setting: Setting) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, _cluster(setting) as cluster, _policy(setting.policy):
        folder = Path(name)
        ended = threading.Event()
        failed: list[BaseException] = []
        trainer = offload.Trainer(
            train,
            datasets={"train": offload.from_torch(Digits(setting.pace_s, setting.repeats))},
            batch_size=setting.batch,
            workers=setting.workers,
            adaptation=offload.Adaptation(interval_s=setting.interval_s),
            checkpoints=offload.Checkpoints(every_epochs=1000, every_s=None),
            seed=setting.seed,
            scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.01, "gpu_instance": 1}),
            train_loop_config={
                "model": setting.model, "alpha_s": ALPHA_S, "beta_s": setting.beta_s, "epochs": setting.epochs,
                "log": str(folder / "log"),
            },
        )  # fmt: skip

        def fit() -> None:
            try:
                trainer.fit(run_dir=folder / "run", quiet=True)
            except BaseException as error:
                failed.append(error)
            ended.set()

        threading.Thread(target=fit, daemon=True).start()
        _change(cluster, setting, folder / "log", ended)  # Ray starts nodes from the main thread only
        ended.wait()
        if failed:
            raise failed[0]
        lines, events = read_lines(folder / "log"), read_lines(folder / "run" / "events.jsonl")
    decided = [e for e in events if e["event"] == "decided"]
    changed = [e["at"] for e in events if e["event"] == "cluster_changed"]
    return {
        **{k: v for k, v in dataclasses.asdict(setting).items() if k not in ("batch", "changes")},
        **_outcome(setting, lines),
        "batches": [e["global_batch_size"] for e in events if e["event"] == "rebatched"],
        "decisions": [
            {"at_s": round(e["at"] - lines[0]["at"], 1), **{k: e.get(k) for k in ("decision", "workers", "reason")}}
            for e in decided
        ],
        "followed_after_s": [
            next((round(e["at"] - at, 1) for e in decided if e["at"] > at and e["decision"] != "keep"), None)
            for at in changed
        ],
        "resizes": [
            {"at_s": round(e["at"] - lines[0]["at"], 1), "workers": e["workers"]} for e in events if e["event"] == "resized"
        ],
        "cluster": [
            {"at_s": round(e["at"] - lines[0]["at"], 1), "cores": e["preprocessing_cores"]}
            for e in events if e["event"] == "cluster_changed"
        ],
        "changes": setting.changes,
    }  # fmt: skip


def _outcome(setting: Setting, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return seconds and dollars from the first worker's start to the target, without the time of evaluation."""
    catalog = built_in().nodes
    per_worker = catalog[GPU].usd_per_hour / 3600
    per_core = catalog[CPU].usd_per_hour / 3600 / catalog[CPU].vcpus
    target = TARGET[setting.model]
    began, spent_s, usd = lines[0]["at"], 0.0, 0.0
    reached: tuple[float, float] | None = None
    accuracy = 0.0
    for before, line in itertools.pairwise(lines):
        # During a change, the old workers cost as much as the new ones.
        cores = setting.cores + sum(count for at_s, count in setting.changes if at_s <= before["at"] - began)
        evaluated_s = line.get("spent_s", 0.0)
        seconds = line["at"] - before["at"] - evaluated_s
        usd += seconds * (line["workers"] * per_worker + cores * per_core)
        spent_s += evaluated_s
        accuracy = line.get("accuracy", accuracy)
        if reached is None and accuracy >= target:
            reached = line["at"] - began - spent_s, usd
    return {
        "target": target,
        "time_to_accuracy_s": None if reached is None else reached[0],
        "usd": None if reached is None else reached[1],
        "final_accuracy": accuracy,
        "total_s": lines[-1]["at"] - began - spent_s,
        "total_usd": usd,
        "workers": lines[-1]["workers"],
    }


@contextlib.contextmanager
def _policy(name: str) -> Iterator[None]:
    """Use a policy by name. AdaptDL's is ours with an infinitely fast input."""
    known = Seen.input_samples_per_s
    if name == "without input term":
        Seen.input_samples_per_s = lambda self, cores: math.inf  # type: ignore[method-assign]
    try:
        yield
    finally:
        Seen.input_samples_per_s = known  # type: ignore[method-assign]


@contextlib.contextmanager
def _cluster(setting: Setting) -> Iterator[Cluster]:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": setting.cores, "resources": {"gpu_instance": WORKERS}}
    )
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def _change(cluster: Cluster, setting: Setting, log: Path, ended: threading.Event) -> None:
    """Let CPU nodes join and leave at the given seconds of training."""
    while not log.exists():
        if ended.wait(0.2):
            return
    began = time.monotonic()
    added: list[Any] = []
    for at_s, cores in setting.changes:
        if ended.wait(max(at_s - (time.monotonic() - began), 0.0)):
            return
        if cores > 0:
            added.append(cluster.add_node(num_cpus=cores))
        else:
            cluster.remove_node(added.pop())


if __name__ == "__main__":
    main()
