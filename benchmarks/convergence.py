"""Accuracy while workers come and go: the four experiments of Uber's article on elastic Horovod, scaled to two cores.

    python benchmarks/convergence.py -o benchmarks/results/convergence.json [--plot benchmarks/results/convergence.png]

A small ResNet learns handwritten digits on photographs in 15 epochs, with 8 workers, with 2, with a change by one worker every 60 emulated
seconds, by three every 180, and with 2, 4 and 8 workers in turn. Three programs do so:

    offload     the project's training loop, with ranks as threads of this process (benchmarks/thread_ranks.py). The global batch is fixed.
    horovod     elastic Horovod: its sampler, a fixed local batch, a learning rate in proportion to the workers, a commit after each step
    restarted   DistributedDataParallel, restarted from a checkpoint of every fifth step, which skips as many batches as that had seen.
                The local batch and the learning rate are fixed.

Training is real, and so is the accuracy on held-out images. Time is emulated: workers share this machine's cores, so a step counts as
long as it would on a device of its own (benchmarks/worker_schedules.py). A change costs what benchmarks/elastic.py measured: 3.4 s for
offload, 20 s for a restart. Horovod's was not measured, and counts as offload's. Its resets are assumed to keep every step.

``--real`` also trains on a Ray cluster of this machine, with 2 and 1 workers in turn, and compares the weights with those of the threads.

Rows that the output file holds are not trained again.
"""

from __future__ import annotations

import datetime
import json
import logging
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks.cluster_sharing import Results
from benchmarks.other_resizes import Semantics, train_elsewhere
from benchmarks.paired import no_worse
from benchmarks.rows.pasted_digits import PastedDigits, accuracy, pasted_digits, resnet, set_rate, sgd
from benchmarks.side_processes import in_processes
from benchmarks.thread_ranks import ThreadRanks, make_way
from benchmarks.worker_schedules import MOST, NAMES, Change, Ledger, Name, Schedule, step_s
from offload.train.config import BatchSize
from offload.train.worker.context import Context

EPOCHS = 15
BATCH = 96  # of eight workers
RATE = 0.2  # at that batch
LAST = 2  # epochs after the last decay of the learning rate, whose mean accuracy counts as final
MARGIN = 0.01  # of accuracy: a smaller loss counts as none
TARGET = 0.8
OFFLOAD_RESTART_S, RESTART_S = 3.4, 20.0  # results/elastic.json
OTHERS = {
    semantics.name: semantics
    for semantics in (
        Semantics(name="horovod", restart_s=OFFLOAD_RESTART_S, scales_rate=True),
        Semantics(name="restarted", restart_s=RESTART_S, scales_rate=False, checkpoint_steps=5),
    )
}
PROGRAMS = ("offload", *OTHERS)
REAL_SCHEDULE = {0: 2, 1: 1, 2: 2, 3: 1}
REAL_EPOCHS = 4
FIXED: Name = "8 fixed"


@click.command(help=__doc__)
@click.option("--seeds", type=click.IntRange(min=2), default=5, show_default=True, help="Runs of each row.")
@click.option("--program", "programs", multiple=True, type=click.Choice(PROGRAMS), help="Default: all.")
@click.option("--schedule", "names", multiple=True, type=click.Choice(NAMES), help="Default: all.")
@click.option("--processes", type=click.IntRange(min=1), default=2, show_default=True, help="Trainings at a time.")
@click.option(
    "--minutes", type=click.FloatRange(min=0), help="Begin no training after so long; the same command goes on."
)
@click.option("--real", is_flag=True, help="Also train on a Ray cluster of this machine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result there as JSON.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw it there (*.png or *.svg).")
def main(
    seeds: int, programs: Sequence[str], names: Sequence[Name], processes: int, minutes: float | None, real: bool, as_json: bool,
    output: Path | None, plot: Path | None,
) -> None:  # fmt: skip
    console = Console(stderr=True, width=150)
    command = ["python", "benchmarks/convergence.py", *sys.argv[1:]]
    results = Results(output, command, described(seeds), lambda rows: {"summary": summary(rows)}, show=lambda row: None)
    wanted = [
        {"program": program, "schedule": name, "seed": seed}
        for seed in range(seeds)
        for name in names or NAMES
        for program in programs or PROGRAMS
    ]
    missing = [key for key in wanted if not results.has(key)]
    for key, row in in_processes(row_of, missing, processes, minutes):
        results.add(key, row)
        done = len(wanted) - len([each for each in wanted if not results.has(each)])
        console.print(
            f"{done}/{len(wanted)} {key['program']}, {key['schedule']}, seed {key['seed']}: {final(row):.1%}, "
            f"{row['seconds']:.0f} emulated s, {row['resizes']} changes, lost {row['lost']}, repeated {row['repeated']}, "
            f"undone {row['undone']} steps"
        )
    if real and not results.has({"program": "offload on Ray"}):
        row = on_ray(seed=0)
        results.add({"program": "offload on Ray"}, row)
        console.print(f"on Ray: {row}")
    results.write()
    document = results.document()
    if plot is not None:
        draw(document, plot)
    if as_json:
        print(json.dumps(document))
    else:
        console.print(table(document["summary"]))


def described(seeds: int) -> dict[str, Any]:
    """What the result says beside its rows."""
    return {
        "date": datetime.date.today().isoformat(),
        "seeds": list(range(seeds)),
        "accelerator": "paced accelerator, emulated time",
        "margin": MARGIN,
        "target": TARGET,
    }


def row_of(key: dict[str, Any]) -> dict[str, Any]:
    """Train for one row."""
    torch.set_num_threads(1)
    if key["program"] == "offload":
        return train_offload(key["schedule"], key["seed"])
    local = BATCH // MOST
    return train_elsewhere(OTHERS[key["program"]], key["schedule"], key["seed"], epochs=EPOCHS, rate=RATE, local=local)


# -- offload -------------------------------------------------------------------------------------------------------


def train_loop(
    ctx: Context,
    seed: int,
    epochs: int,
    *,
    stepped: Callable[[Any, int], None] = lambda batch, rows: None,
    ended: Callable[[int, torch.nn.Module], None] = lambda epoch, model: None,
) -> torch.nn.Module:
    """The training function, the same on Ray and in threads.

    Args:
        stepped: called on every rank after a step, with its batch and the samples of all ranks.
        ended: called on every rank after an epoch, with its number from 0.
    """
    data = pasted_digits(held_out=False)
    model = resnet(seed)
    model, optimizer = ctx.prepare(model, sgd(model), ddp=False)
    model.train()
    for epoch in ctx.epochs(epochs):
        set_rate(optimizer, RATE, epoch / epochs)
        for batch in ctx.batches("train"):
            # The threads' batches hold ids alone.
            if "image" in batch:
                images, labels = batch["image"], batch["label"]
            else:
                ids = torch.as_tensor(batch["sample_id"], dtype=torch.int64)
                images, labels = data.images[ids], data.labels[ids]
            ctx.backward(torch.nn.functional.cross_entropy(model(images), labels))
            current = ctx._loop.stepper.batch
            rows = 0 if current is None else current.all_rows
            ctx.step()
            stepped(batch, rows)
        ended(epoch, model)
    return model


class _Run:
    """A run of the project's loop in threads, under a schedule."""

    def __init__(self, name: Name, seed: int) -> None:
        self.seed = seed
        self.schedule = Schedule(name, seed, EPOCHS)
        self.ledger = Ledger()
        self.trained: list[list[int]] = [[] for _ in range(EPOCHS)]
        self.lines: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def group(self, workers: int, change: Change | None) -> Callable[[Context], None]:
        """The function of a group, which makes way when the change is due."""
        samples, before_s = len(pasted_digits(held_out=False)), self.ledger.seconds

        def train(ctx: Context) -> None:
            seconds = before_s

            def stepped(batch: Any, rows: int) -> None:
                nonlocal seconds
                # Every rank counts the same seconds, so that all make way after the same step.
                seconds += step_s(workers, -(-rows // workers))
                progress = ctx._loop.state.progress
                with self._lock:
                    self.trained[ctx.epoch] += [int(sample) for sample in batch["sample_id"][: ctx.rows]]
                    self.ledger.seconds, self.ledger.steps = seconds, progress.step
                if change is not None and change.due(seconds, progress.samples / samples):
                    make_way(ctx)

            def ended(epoch: int, model: torch.nn.Module) -> None:
                if ctx.rank == 0:
                    self.lines[epoch] = {
                        "epoch": epoch + 1,
                        "seconds": round(seconds, 2),
                        "workers": workers,
                        "accuracy": accuracy(model),
                    }

            train_loop(ctx, self.seed, EPOCHS, stepped=stepped, ended=ended)

        return train


def train_offload(name: Name, seed: int) -> dict[str, Any]:
    """Train under a schedule with the project's loop. Return the ledger's figures and a line for each epoch."""
    run, samples = _Run(name, seed), len(pasted_digits(held_out=False))
    workers = run.schedule.first
    with tempfile.TemporaryDirectory() as folder:
        ranks = ThreadRanks(Path(folder), samples=samples, sizes=BatchSize(initial=BATCH), seed=seed)
        while True:
            change = run.schedule.next_change(workers, run.ledger.seconds)
            if ranks.train(run.group(workers, change), workers):
                break
            assert change is not None
            workers = change.workers
            run.ledger.resizes += 1
            run.ledger.seconds += OFFLOAD_RESTART_S
    for of_epoch in run.trained:
        run.ledger.count(of_epoch, samples)
    return {**vars(run.ledger), "lines": [run.lines[epoch] for epoch in range(EPOCHS)]}


def on_ray(seed: int) -> dict[str, Any]:
    """Train on a Ray cluster of this machine, with real resizes, and in threads, with the same worker counts. Compare the weights.

    Both runs are deterministic. With two workers, the sum of their gradients does not depend on its order. Batch normalisation sees the
    part of a worker, so the threads resize after the very steps after which the cluster did.
    """
    import ray.train

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ray.init(address="local", num_cpus=4, log_to_driver=False, logging_level=logging.ERROR)
        try:
            offload.Trainer(
                _train_on_ray,
                datasets={"train": offload.from_torch(PastedDigits())},
                batch_size=BATCH,
                workers=(1, 2),
                adaptation=offload.Adaptation(schedule=REAL_SCHEDULE),
                deterministic=True,
                seed=seed,
                scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5}),
                train_loop_config={"seed": seed, "weights": str(folder / "weights")},
            ).fit(run_dir=folder / "run", quiet=True)
        finally:
            ray.shutdown()
        lines = (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        real = torch.load(folder / "weights", weights_only=True)
        emulated: dict[str, torch.Tensor] = {}
        ranks = ThreadRanks(
            folder / "threads", samples=len(PastedDigits()), sizes=BatchSize(initial=BATCH), seed=seed,
            deterministic=True,
        )  # fmt: skip
        counts = [REAL_SCHEDULE[0], *(event["workers"] for event in events if event["event"] == "resized")]
        # Every rank, and the hub, may report the same commit.
        resized_after = sorted({event["step"] for event in events if event["event"] == "ready_to_resize"})
        for workers, last in zip(counts, [*resized_after, None], strict=True):
            ranks.train(_until(seed, last, emulated), workers)
    model = resnet(seed)
    model.load_state_dict(real)
    return {
        "schedule": " → ".join(map(str, counts)),
        "resized_after_steps": resized_after,
        "seed": seed,
        "resizes": len(counts) - 1,
        "accuracy": accuracy(model),
        "equal": all(torch.equal(real[name], emulated[name]) for name in real),
        "largest_difference": max(float((real[n].double() - emulated[n].double()).abs().max()) for n in real),
    }


def _train_on_ray(ctx: offload.Context) -> None:
    torch.set_num_threads(1)
    model = train_loop(ctx, ctx.config["seed"], REAL_EPOCHS)
    if ctx.rank == 0:
        torch.save(model.state_dict(), ctx.config["weights"])


def _until(seed: int, last: int | None, weights: dict[str, torch.Tensor]) -> Callable[[Context], None]:
    """The function of a group in threads that makes way after the step ``last``, or gives its weights if that is None."""

    def train(ctx: Context) -> None:
        torch.set_num_threads(1)

        def stepped(batch: Any, rows: int) -> None:
            if ctx._loop.state.progress.step == last:
                make_way(ctx)

        model = train_loop(ctx, seed, REAL_EPOCHS, stepped=stepped)
        if ctx.rank == 0:
            weights.update(model.state_dict())

    return train


# -- results -------------------------------------------------------------------------------------------------------


def final(row: dict[str, Any]) -> float:
    """The final accuracy of a run."""
    return statistics.fmean(line["accuracy"] for line in row["lines"][-LAST:])


def seconds_to(row: dict[str, Any], target: float) -> float | None:
    """Emulated seconds until the first epoch that ended with this accuracy; None if none did."""
    return next((line["seconds"] for line in row["lines"] if line["accuracy"] >= target), None)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each program and schedule, over the seeds that it shares with the program's run of eight fixed workers."""
    lines = []
    for program in PROGRAMS:
        of_program = {(row["schedule"], row["seed"]): row for row in rows if row["program"] == program}
        for name in NAMES:
            seeds = sorted(s for n, s in of_program if n == name and (FIXED, s) in of_program)
            if len(seeds) < 2:
                continue
            mine = [of_program[name, seed] for seed in seeds]
            finals = [final(row) for row in mine]
            base = [final(of_program[FIXED, seed]) for seed in seeds]
            reached = [seconds_to(row, TARGET) for row in mine]
            test = no_worse(finals, base, MARGIN)
            lines.append(
                {
                    "program": program,
                    "schedule": name,
                    "runs": len(seeds),
                    "accuracy": statistics.fmean(finals),
                    "accuracy_deviation": statistics.stdev(finals),
                    "accuracy_range": [min(finals), max(finals)],
                    "over_8_fixed": vars(test) | {"no_worse": test.shown},
                    "seconds": statistics.fmean(row["seconds"] for row in mine),
                    "seconds_to_target": None if None in reached else statistics.fmean(r for r in reached if r),
                    "changes": statistics.fmean(row["resizes"] for row in mine),
                    **{
                        f"{what}_per_epoch": statistics.fmean(row[what] for row in mine) / EPOCHS
                        for what in ("lost", "repeated")
                    },
                    "undone_steps_per_change": sum(row["undone"] for row in mine)
                    / max(sum(row["resizes"] for row in mine), 1),
                }
            )
    return lines


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """The summary for a terminal."""
    shown = Table(title=f"final accuracy after {EPOCHS} epochs; emulated time on paced accelerators")
    for column in (
        "program", "schedule", "runs", "accuracy ± deviation", "over 8 fixed (lower bound)", "no worse", "p", "emulated s",
        f"s to {TARGET:.0%}", "changes", "lost, repeated an epoch", "steps undone a change",
    ):  # fmt: skip
        shown.add_column(column)
    for line in lines:
        test, reached = line["over_8_fixed"], line["seconds_to_target"]
        fixed = line["schedule"] == FIXED
        shown.add_row(
            line["program"], line["schedule"], str(line["runs"]),
            f"{line['accuracy']:.1%} ± {line['accuracy_deviation']:.1%}",
            "" if fixed else f"{test['difference']:+.1%} ({test['lower']:+.1%})",
            "" if fixed else "yes" if test["no_worse"] else "not shown",
            "" if fixed else f"{test['p']:.2g}",
            f"{line['seconds']:,.0f}", "-" if reached is None else f"{reached:,.0f}", f"{line['changes']:.1f}",
            f"{line['lost_per_epoch']:.1f}, {line['repeated_per_epoch']:.1f}", f"{line['undone_steps_per_change']:.1f}",
        )  # fmt: skip
    return shown


COLOURS = dict(zip(NAMES, ("#4c78a8", "#2ca05a", "#8e6bbf", "#f58518", "#9aa0a6"), strict=True))


def draw(document: dict[str, Any], output: Path) -> None:
    """Draw accuracy over epochs and over emulated time, the means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(PROGRAMS), figsize=(12, 6.4), sharey=True, constrained_layout=True)
    for column, program in enumerate(PROGRAMS):
        for name in NAMES:
            rows = [r for r in document["rows"] if r["program"] == program and r["schedule"] == name]
            if not rows:
                continue
            curves = [[line["accuracy"] for line in row["lines"]] for row in rows]
            times = [[line["seconds"] for line in row["lines"]] for row in rows]
            mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            low, high = ([pick(values) for values in zip(*curves, strict=True)] for pick in (min, max))
            epochs = range(1, EPOCHS + 1)
            axes[0, column].plot(epochs, mean, color=COLOURS[name], label=name, lw=1.5)
            axes[0, column].fill_between(epochs, low, high, color=COLOURS[name], alpha=0.12, lw=0)
            seconds = [statistics.fmean(values) for values in zip(*times, strict=True)]
            axes[1, column].plot(seconds, mean, color=COLOURS[name], lw=1.5)
        axes[0, column].set_title(program, fontsize=10)
        axes[0, column].set_xlabel("epoch", fontsize=8)
        axes[1, column].set_xlabel("emulated seconds", fontsize=8)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    for row in axes:
        row[0].set_ylabel("accuracy", fontsize=8)
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.suptitle(
        f"ResNet on digits; means and ranges over {len(document['seeds'])} seeds; time emulated on paced accelerators",
        fontsize=9,
    )
    figure.savefig(output, dpi=130)


if __name__ == "__main__":
    main()
