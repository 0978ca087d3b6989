"""Time and dollars to an accuracy, on emulated clusters of spot nodes: fixed clusters, AdaptDL's policy, and offload's.

    python benchmarks/accuracy_cost.py -o benchmarks/results/accuracy_cost.json [--plot benchmarks/results/accuracy_cost.png]

The article on AdaptDL on Ray compares fixed clusters of 4, 16 and 64 nodes with AdaptDL, and finds 2 to 20 times fewer dollars and 10 to 30
times less time to an accuracy. Here a small ResNet learns handwritten digits on photographs under these policies:

    4, 16, 64 fixed           8 images a node, and the learning rate of 4 nodes: the script as it is
    16, 64 fixed, rate scaled the learning rate follows the nodes
    AdaptDL                   its rule for workers, batches from goodput without an input, AdaScale; no CPU nodes
    offload, cost | time      this project's decisions for either objective, with CPU nodes where they are worth their price

Real: training, gradient noise, the learning-rate rule, the accuracy on held-out images, and both policies' decisions. Emulated: time, by
the joint model with variation (benchmarks/spot_clusters.py), where one image stands for 500; dollars, at spot prices; interruptions, a
Poisson process. One process trains the batches of all workers. The gradients that tell the noise come from at most eight parts of a batch.

A GPU-bound and an input-bound workload differ in the time of preprocessing alone. Rows that the output file holds are not trained again.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.cluster_policies import INITIAL, LARGEST, LOCAL, AdaptDL, Offload, Seeing
from benchmarks.cluster_sharing import Results
from benchmarks.paired import ratio_interval
from benchmarks.rows.pasted_digits import RankNorm, accuracy, pasted_digits, resnet, sgd
from benchmarks.side_processes import in_processes
from benchmarks.spot_clusters import CORE_USD, GPU_NODE, GPU_USD, SPOT, STEP, WORKLOADS, Cluster, Workload
from offload.adapt.observe import StepInterval
from offload.model.batch_split import BatchSplit
from offload.model.planning.planner import INTERRUPTIONS_PER_HOUR
from offload.pipeline.order.shuffling import epoch_permutation
from offload.train.config import Adaptation, BatchSize
from offload.train.worker.links.agreement import Mailbox, NoiseMeasurement, NoisePart
from offload.train.worker.steps.batch_scaling import BatchScaling
from offload.train.worker.steps.gradient_noise import EAGER, EVERY

STANDS_FOR = 500  # emulated images of one
RATE = 0.05  # of batches of INITIAL
TARGET = 0.8
SMOOTHED = 3  # evaluations whose mean counts
EVALUATED = 1000  # images trained between two evaluations
MOST_EPOCHS = 40
GOAL_EPOCHS = 12  # what the run is told to train, in epochs of initial batches
INTERVAL_S = 120.0  # emulated, between two decisions
PARTS = 8  # of a batch, whose gradients are compared
OFFLOAD_RESTART_S, RESTART_S = 3.4, 20.0  # results/elastic.json
LOCAL_FIXED = 8  # images of a node of a fixed cluster


@dataclass(frozen=True, kw_only=True)
class Policy:
    """``workers``: at first, or always; ``scaled``: whether the learning rate of a fixed cluster follows its nodes; ``decides``: makes
    what decides, None: nothing does."""

    name: str
    workers: int = 1
    scaled: bool = False
    restart_s: float = RESTART_S
    decides: Callable[[], AdaptDL | Offload] | None = None


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(name="4 fixed", workers=4),
        Policy(name="16 fixed", workers=16),
        Policy(name="64 fixed", workers=64),
        Policy(name="16 fixed, rate scaled", workers=16, scaled=True),
        Policy(name="64 fixed, rate scaled", workers=64, scaled=True),
        Policy(name="AdaptDL", decides=AdaptDL),
        Policy(name="offload, cost", restart_s=OFFLOAD_RESTART_S, decides=lambda: Offload("cost")),
        Policy(name="offload, time", restart_s=OFFLOAD_RESTART_S, decides=lambda: Offload("time")),
    )
}
COMPARED = ("offload, cost", "offload, time", "AdaptDL")


@click.command(help=__doc__)
@click.option("--seeds", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each row.")
@click.option("--policy", "names", multiple=True, type=click.Choice(list(POLICIES)), help="Default: all.")
@click.option("--processes", type=click.IntRange(min=1), default=2, show_default=True, help="Trainings at a time.")
@click.option(
    "--minutes", type=click.FloatRange(min=0), help="Begin no training after so long; the same command goes on."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result there as JSON.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw it there (*.png or *.svg).")
def main(
    seeds: int,
    names: Sequence[str],
    processes: int,
    minutes: float | None,
    as_json: bool,
    output: Path | None,
    plot: Path | None,
) -> None:
    console = Console(stderr=True, width=150)
    command = ["python", "benchmarks/accuracy_cost.py", *sys.argv[1:]]
    results = Results(
        output,
        command,
        described(seeds),
        lambda rows: {"summary": summary(rows), "ratios": ratios(rows)},
        show=lambda row: None,
    )
    keys = [key for seed in range(seeds) for name in names or POLICIES for key in _keys(name, seed)]
    missing = [key for key in keys if not all(results.has(row) for row in _rows(key))]
    for _, rows in in_processes(rows_of, missing, processes, minutes):
        for key, row in rows:
            results.add(key, row)
            reached = "never" if row["seconds"] is None else f"{row['seconds'] / 3600:.2f} h, ${row['usd']:.2f}"
            console.print(
                f"{key['workload']}, {key['policy']}, seed {key['seed']}: {reached} to {TARGET:.0%}, at the end "
                f"{row['lines'][-1]['workers']} workers, {row['lines'][-1]['cores']} cores, batch {row['lines'][-1]['batch']}, "
                f"{row['interruptions']} interruptions"
            )
    results.write()
    document = results.document()
    if plot is not None:
        draw(document, plot)
    if as_json:
        print(json.dumps(document))
    else:
        console.print(table(document["summary"]), ratio_table(document["ratios"]))


def described(seeds: int) -> dict[str, Any]:
    """What the result says beside its rows."""
    return {
        "date": datetime.date.today().isoformat(),
        "seeds": list(range(seeds)),
        "accelerator": "paced accelerator, emulated time",
        "target": TARGET,
        "prices_usd_per_hour": {GPU_NODE: GPU_USD, "CPU core": CORE_USD, "spot over on demand": SPOT},
        "interruptions_per_node_hour": INTERRUPTIONS_PER_HOUR,
    }


def _keys(name: str, seed: int) -> list[dict[str, Any]]:
    """The trainings of a policy. A fixed cluster trains the same batches in all workloads."""
    workloads = [workload.name for workload in WORKLOADS]
    together = [workloads] if POLICIES[name].decides is None else [[each] for each in workloads]
    return [{"workloads": each, "policy": name, "seed": seed} for each in together]


def _rows(key: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"workload": each, "policy": key["policy"], "seed": key["seed"]} for each in key["workloads"]]


Made = list[tuple[dict[str, Any], dict[str, Any]]]


def rows_of(key: dict[str, Any]) -> Made:
    """Train once, and return a row for each workload."""
    torch.set_num_threads(1)
    workloads = [workload for workload in WORKLOADS if workload.name in key["workloads"]]
    return list(zip(_rows(key), train(POLICIES[key["policy"]], workloads, key["seed"]), strict=True))


# -- a training ----------------------------------------------------------------------------------------------------


class _Noted(Mailbox):
    """Brings measurements straight to the average: one process needs no agreement."""

    def __init__(self, scaling: BatchScaling) -> None:
        super().__init__(0)
        self._scaling = scaling

    def post(self, step: int, part: NoisePart) -> None:
        self._scaling.add([NoiseMeasurement(step=step, parts=(part,))])


class Training:
    """A model in training, on batches of any size.

    Args:
        seed: of the initial weights and the order.
        adaptive: whether gradient noise is measured, and scales the learning rate.
        rate: the learning rate.
    """

    def __init__(self, seed: int, *, adaptive: bool, rate: float) -> None:
        self.model = resnet(seed, RankNorm)
        self.optimizer = sgd(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaling: BatchScaling | None = None
        if adaptive:
            self.scaling = BatchScaling(BatchSize(initial=INITIAL, max=LARGEST, local=LOCAL), Adaptation(), workers=1)
            self.scaling.adopt([self.optimizer])
            self.scaling.mail = _Noted(self.scaling)
        self.step = self.samples = 0
        self.useful = 0.0
        self._seed, self._order = seed, torch.zeros(0, dtype=torch.int64)

    def train(self, split: BatchSplit) -> int:
        """Make a step on the next batch of the pass, the last of which may be smaller. Return its size."""
        data = pasted_digits(held_out=False)
        if not len(self._order):
            order = epoch_permutation(len(data), seed=self._seed, epoch=self.samples // len(data))
            self._order = torch.from_numpy(order.astype("int64"))
        size = split.global_batch_size
        where, self._order = self._order[:size], self._order[size:]
        rows = len(where)
        parts, whole = parts_of(split), rows == size
        of_part = BatchSplit(workers=1, local_batch_size=size // parts, accum_steps=parts - 1)
        # Only some steps are measured. The others need one pass.
        measured = self.scaling is not None and whole and parts > 1 and (self.step < EAGER or self.step % EVERY == 0)
        if self.scaling is not None and whole:
            self.scaling.begin_step(self.step, of_part, None)
        # Each worker normalises its own micro-batch.
        micro_batches = split.workers * (split.accum_steps + 1) if whole else 1
        for module in self.model.modules():
            if isinstance(module, RankNorm):
                module.ranks = micro_batches // parts if measured else micro_batches
        pieces = torch.split(where, size // parts) if measured else (where,)
        for number, piece in enumerate(pieces):
            loss = torch.nn.functional.cross_entropy(self.model(data.images[piece]), data.labels[piece])
            (loss / len(pieces)).backward()  # type: ignore[no-untyped-call]
            if self.scaling is not None and number + 1 < len(pieces):
                self.scaling.micro_batch_done()
        if self.scaling is None:
            self.optimizer.step()
            self.useful += rows
        else:
            if whole:
                self.scaling.end_step(self.step, of_part, rows)
            with self.scaling.scaled_rates(rows, self.samples / len(data)):
                self.optimizer.step()
            self.useful += self.scaling.useful(rows)
        self.optimizer.zero_grad()
        self.step += 1
        self.samples += rows
        return rows


def parts_of(split: BatchSplit) -> int:
    """The parts of a batch whose gradients are compared: its micro-batches, or equal groups of them, at most ``PARTS``."""
    micro_batches = split.workers * (split.accum_steps + 1)
    return max(parts for parts in range(1, PARTS + 1) if micro_batches % parts == 0)


def train(policy: Policy, workloads: Sequence[Workload], seed: int) -> list[dict[str, Any]]:
    """Train under a policy until the accuracy is reached on every workload's cluster. Return a row for each workload.

    Several workloads share the training of a policy that decides nothing.
    """
    if policy.decides is None:
        split = BatchSplit(workers=policy.workers, local_batch_size=LOCAL_FIXED, accum_steps=0)
    else:
        split = BatchSplit.of(INITIAL, policy.workers, LOCAL[1])
    factor = split.global_batch_size / INITIAL if policy.scaled else 1.0
    training = Training(seed, adaptive=policy.decides is not None, rate=RATE * factor)
    clusters = [Cluster(each, policy.workers, policy.decides is not None, policy.restart_s, seed) for each in workloads]
    driver = _Driver(policy, clusters[0], training, split)
    lines: list[list[dict[str, Any]]] = [[] for _ in clusters]
    accuracies: list[float] = []
    evaluate_at = EVALUATED
    epoch = len(pasted_digits(held_out=False))
    while training.samples < MOST_EPOCHS * epoch:
        split = driver.split
        rows = training.train(split)
        # A smaller batch at the end of a pass takes its share of a step.
        steps = STANDS_FOR * rows / split.global_batch_size
        stepping_s = [cluster.run(split, steps) for cluster in clusters]
        driver.stepped(steps, stepping_s[0])
        if training.samples < evaluate_at:
            continue
        evaluate_at += EVALUATED
        accuracies.append(accuracy(training.model))
        smoothed = statistics.fmean(accuracies[-SMOOTHED:])
        for cluster, of_cluster in zip(clusters, lines, strict=True):
            of_cluster.append(
                {
                    "samples": training.samples, "seconds": round(cluster.seconds, 1), "usd": round(cluster.usd, 4),
                    "accuracy": round(smoothed, 4), "workers": cluster.workers, "cores": cluster.cores,
                    "batch": driver.split.global_batch_size,
                }
            )  # fmt: skip
        if smoothed >= TARGET and len(accuracies) >= SMOOTHED:
            break
    return [_row(cluster, of_cluster) for cluster, of_cluster in zip(clusters, lines, strict=True)]


def _row(cluster: Cluster, lines: list[dict[str, Any]]) -> dict[str, Any]:
    reached = len(lines) >= SMOOTHED and lines[-1]["accuracy"] >= TARGET
    return {
        "seconds": lines[-1]["seconds"] if reached else None,
        "usd": lines[-1]["usd"] if reached else None,
        "samples": lines[-1]["samples"],
        "interruptions": cluster.interruptions,
        "restarts": cluster.restarts,
        "lines": lines,
    }


class _Driver:
    """Collects what happened in an interval, and lets a policy decide at its end."""

    def __init__(self, policy: Policy, cluster: Cluster, training: Training, split: BatchSplit) -> None:
        self.split = split
        self._policy = policy.decides() if policy.decides is not None else None
        self._cluster, self._training = cluster, training
        self._steps = self._seconds = 0.0

    def stepped(self, steps: float, stepping_s: float) -> None:
        """Note emulated steps and their seconds."""
        self._steps += steps
        self._seconds += stepping_s
        if self._policy is None or self._seconds < INTERVAL_S:
            return
        scaling, samples = self._training.scaling, len(pasted_digits(held_out=False))
        split, cluster = self.split, self._cluster
        assert scaling is not None
        wanted, cores = self._policy.decide(
            Seeing(
                cluster=cluster, split=split, interval=interval_of(cluster, split, self._steps, self._seconds),
                noise=scaling.noise.whole,
                work_left=STANDS_FOR * max(GOAL_EPOCHS * samples - self._training.useful, samples),
            )
        )  # fmt: skip
        self._steps = self._seconds = 0.0
        if wanted.workers != cluster.workers or cores != cluster.cores:
            cluster.change(wanted.workers, cores)
        self.split = wanted


def interval_of(cluster: Cluster, split: BatchSplit, steps: float, seconds: float) -> StepInterval:
    """What a run would have measured in so many steps that took so long."""
    at = split.workers, split.workers, split.local_batch_size
    compute_s = float(STEP.compute_time_s(split.local_batch_size)) * (split.accum_steps + 1)
    device_s = float(STEP.predict(*at, split.accum_steps))
    # The same variation as that of the whole step.
    varied = seconds / (steps * cluster.step_s(split))
    of_all = max(round(steps), 1) * split.workers
    took_s = seconds / steps
    return StepInterval(
        nodes=split.workers, split=split, steps=of_all,
        samples=of_all * split.local_batch_size * (split.accum_steps + 1), step_time_s=of_all * took_s,
        data_wait_s=of_all * max(took_s - varied * device_s, 0.0), compute_s=of_all * varied * compute_s,
        sync_s=of_all * varied * (device_s - compute_s), busy_ceiling_samples_per_s=cluster.input_samples_per_s,
    )  # fmt: skip


# -- results -------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each workload and policy: medians over the seeds that reached the accuracy."""
    lines = []
    for workload in WORKLOADS:
        for name in POLICIES:
            mine = [row for row in rows if (row["workload"], row["policy"]) == (workload.name, name)]
            reached = [row for row in mine if row["seconds"] is not None]
            if not mine:
                continue
            lines.append(
                {
                    "workload": workload.name,
                    "policy": name,
                    "runs": len(mine),
                    "reached": len(reached),
                    **{
                        what: statistics.median(row[what] for row in reached) if reached else None
                        for what in ("seconds", "usd", "samples")
                    },
                    "seconds_range": _range(reached, "seconds"),
                    "usd_range": _range(reached, "usd"),
                    "final_accuracy": statistics.median(row["lines"][-1]["accuracy"] for row in mine),
                    "final_workers": statistics.median(row["lines"][-1]["workers"] for row in mine),
                    "final_cores": statistics.median(row["lines"][-1]["cores"] for row in mine),
                    "final_batch": statistics.median(row["lines"][-1]["batch"] for row in mine),
                    "interruptions": statistics.fmean(row["interruptions"] for row in mine),
                }
            )
    return lines


def _range(rows: Sequence[dict[str, Any]], what: str) -> list[float] | None:
    return [min(row[what] for row in rows), max(row[what] for row in rows)] if rows else None


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times as much time and dollars another policy takes to the accuracy, over the seeds in which both reached it."""
    lines = []
    by = {(row["workload"], row["policy"], row["seed"]): row for row in rows if row["seconds"] is not None}
    for workload in WORKLOADS:
        for ours in COMPARED:
            for other in POLICIES:
                seeds = [s for w, n, s in by if (w, n) == (workload.name, ours) and (w, other, s) in by]
                if other == ours or not seeds:
                    continue
                line: dict[str, Any] = {"workload": workload.name, "policy": ours, "over": other, "runs": len(seeds)}
                for what in ("seconds", "usd"):
                    values = [by[workload.name, other, seed][what] for seed in seeds]
                    base = [by[workload.name, ours, seed][what] for seed in seeds]
                    ratio, low, high = ratio_interval(values, base)
                    line |= {what: ratio, f"{what}_interval": [low, high]}
                lines.append(line)
    return lines


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """The summary for a terminal."""
    shown = Table(
        title=f"to an accuracy of {TARGET:.0%}: medians over the runs that reached it; emulated time, spot prices"
    )
    for column in (
        "workload", "policy", "reached", "hours", "$", "images", "workers, cores, batch at the end", "accuracy at the end",
    ):  # fmt: skip
        shown.add_column(column)
    for line in lines:
        never = line["seconds"] is None
        shown.add_row(
            line["workload"], line["policy"], f"{line['reached']} of {line['runs']}",
            "-" if never else f"{line['seconds'] / 3600:.2f}", "-" if never else f"{line['usd']:.2f}",
            "-" if never else f"{line['samples']:,.0f}",
            f"{line['final_workers']:.0f}, {line['final_cores']:.0f}, {line['final_batch']:.0f}",
            f"{line['final_accuracy']:.1%}",
        )  # fmt: skip
    return shown


def ratio_table(lines: Sequence[dict[str, Any]]) -> Table:
    """The ratios for a terminal."""
    shown = Table(title="how many times as much another policy takes (95 % interval)")
    for column in ("workload", "policy", "beside", "runs", "time", "dollars"):
        shown.add_column(column)
    for line in lines:
        cells = [
            f"{line[what]:.2f} ({line[f'{what}_interval'][0]:.2f} to {line[f'{what}_interval'][1]:.2f})"
            for what in ("seconds", "usd")
        ]
        shown.add_row(line["workload"], line["policy"], line["over"], str(line["runs"]), *cells)
    return shown


COLOURS = dict(
    zip(
        POLICIES,
        ("#9aa0a6", "#4c78a8", "#1b3a5c", "#7fb1e0", "#5b6dc8", "#f6bd16", "#2ca05a", "#8fd19e"),
        strict=True,
    )
)


def draw(document: dict[str, Any], output: Path) -> None:
    """Draw the accuracy against dollars and against time, a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(WORKLOADS), figsize=(10, 7), sharey=True, constrained_layout=True)
    for column, workload in enumerate(WORKLOADS):
        for row_number, (what, unit, per) in enumerate(
            (("usd", "dollars", 1.0), ("seconds", "emulated hours", 3600.0))
        ):
            axis = axes[row_number, column]
            named: set[str] = set()
            for row in document["rows"]:
                if row["workload"] != workload.name:
                    continue
                name = row["policy"]
                axis.plot(
                    [line[what] / per for line in row["lines"]], [line["accuracy"] for line in row["lines"]],
                    color=COLOURS[name], lw=1, alpha=0.8, label=None if name in named else name,
                )  # fmt: skip
                named.add(name)
            axis.axhline(TARGET, color="#bbbbbb", lw=0.8, ls="--")
            axis.set_xscale("log")
            axis.set_xlabel(unit, fontsize=8)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0, column].set_title(workload.name, fontsize=10)
    for row in axes:
        row[0].set_ylabel("accuracy", fontsize=8)
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.suptitle("ResNet on digits; a line for each seed; time and dollars emulated, spot prices", fontsize=9)
    figure.savefig(output, dpi=130)


if __name__ == "__main__":
    main()
