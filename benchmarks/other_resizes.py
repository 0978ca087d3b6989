"""Trainings whose worker count changes as it does elsewhere: with elastic Horovod, and with a restart of DistributedDataParallel.

One process stands for all ranks: their local batches are equal, so the mean of their gradients is the gradient of one forward pass, in
which each rank normalises its own part (:class:`benchmarks.rows.pasted_digits.RankNorm`). In both, the local batch is fixed, so that the
global batch follows the workers.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from benchmarks.rows.pasted_digits import RankNorm, accuracy, pasted_digits, resnet, set_rate, sgd
from benchmarks.worker_schedules import MOST, Change, Ledger, Name, Schedule, step_s


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """What a change of the worker count means.

    Args:
        name: as in the results.
        restart_s: emulated seconds of a change.
        scales_rate: whether the learning rate follows the workers.
        checkpoint_steps: steps between two checkpoints; 0: a change loses none.
    """

    name: str
    restart_s: float
    scales_rate: bool
    checkpoint_steps: int = 0


@dataclass
class _Training:
    """A training under way."""

    semantics: Semantics
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    rate: float
    local: int
    epochs: int
    workers: int
    ledger: Ledger = field(default_factory=Ledger)
    epoch: int = 0
    batches: int = 0  # of this epoch that are trained, or skipped
    trained: list[int] = field(default_factory=list)  # of this epoch

    def step(self, ids: Sequence[int]) -> None:
        """Train one global batch: ``ids`` are those of the ranks, one rank after the other, equally many of each."""
        data = pasted_digits(held_out=False)
        for module in self.model.modules():
            if isinstance(module, RankNorm):
                module.ranks = self.workers
        rate = self.rate * (self.workers / MOST if self.semantics.scales_rate else 1.0)
        set_rate(self.optimizer, rate, self.epoch / self.epochs)
        where = torch.tensor(ids)
        torch.nn.functional.cross_entropy(self.model(data.images[where]), data.labels[where]).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.batches += 1
        self.trained += ids
        self.ledger.steps += 1
        self.ledger.seconds += step_s(self.workers, len(ids) // self.workers)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "batches": self.batches,
            "trained": list(self.trained),
            "steps": self.ledger.steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.batches, self.trained = state["batches"], list(state["trained"])
        self.ledger.undone += self.ledger.steps - state["steps"]
        self.ledger.steps = state["steps"]


def horovod_batches(order: Sequence[int], done: int, workers: int, local: int) -> Iterator[list[int]]:
    """The global batches of the rest of an epoch, as Horovod's ElasticSampler deals it out after a reset (Horovod 0.21 and later).

    Args:
        order: the epoch's order.
        done: the samples at its beginning that are processed.

    It repeats samples until the workers' parts are equal, and fails if fewer samples than workers are left. Here it repeats these further.
    """
    rest = list(order[done:])
    each = math.ceil(len(rest) / workers)
    rest += (rest * workers)[: each * workers - len(rest)]
    parts = [rest[rank::workers] for rank in range(workers)]
    for start in range(0, each, local):
        yield [sample for part in parts for sample in part[start : start + local]]


def distributed_batches(samples: int, epoch: int, workers: int, local: int, seed: int) -> list[list[int]]:
    """The global batches of an epoch, as torch's DistributedSampler deals them out. It repeats samples until parts are equal."""
    parts = []
    for rank in range(workers):
        data: Any = range(samples)
        sampler: DistributedSampler[int] = DistributedSampler(data, num_replicas=workers, rank=rank, seed=seed)
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
    return [
        [sample for part in parts for sample in part[start : start + local]] for start in range(0, len(parts[0]), local)
    ]


def train_elsewhere(
    semantics: Semantics, name: Name, seed: int, *, epochs: int, rate: float, local: int
) -> dict[str, Any]:
    """Train under a schedule. Return the ledger's figures and a line for each epoch.

    Args:
        rate: the learning rate at first, of eight workers.
        local: the local batch.
    """
    schedule = Schedule(name, seed, epochs)
    model = resnet(seed, RankNorm)
    run = _Training(semantics, model, sgd(model), rate, local, epochs, schedule.first)
    change = schedule.next_change(run.workers, 0.0)
    lines = []
    while run.epoch < epochs:
        if semantics.checkpoint_steps:
            change = _restarted_epoch(run, schedule, change, seed)
        else:
            change = _elastic_epoch(run, schedule, change, seed)
        run.ledger.count(run.trained, len(pasted_digits(held_out=False)))
        run.epoch += 1
        run.batches, run.trained = 0, []
        lines.append(
            {
                "epoch": run.epoch,
                "seconds": round(run.ledger.seconds, 2),
                "workers": run.workers,
                "accuracy": accuracy(model),
            }
        )
    return {**vars(run.ledger), "lines": lines}


def _due(run: _Training, change: Change | None) -> bool:
    samples = len(pasted_digits(held_out=False))
    return change is not None and change.due(run.ledger.seconds, run.epoch + min(len(run.trained) / samples, 1.0))


def _change(run: _Training, schedule: Schedule, change: Change) -> Change | None:
    """Change the worker count. Return the change after this one."""
    run.ledger.seconds += run.semantics.restart_s
    run.ledger.resizes += 1
    run.workers = change.workers
    return schedule.next_change(run.workers, run.ledger.seconds)


def _elastic_epoch(run: _Training, schedule: Schedule, change: Change | None, seed: int) -> Change | None:
    """An epoch in which a change keeps every step, and deals out the rest anew. Return the next change."""
    order = list(range(len(pasted_digits(held_out=False))))
    random.Random(seed + run.epoch).shuffle(order)
    done = 0
    while done < len(order):
        for ids in horovod_batches(order, done, run.workers, run.local):
            run.step(ids)
            done += run.local * run.workers  # as Horovod's examples count, also a batch that is not full
            if change is not None and _due(run, change):
                change = _change(run, schedule, change)
                break
    return change


def _restarted_epoch(run: _Training, schedule: Schedule, change: Change | None, seed: int) -> Change | None:
    """An epoch in which a change goes back to the last checkpoint, and skips as many batches of the epoch as that had seen. Return the
    next change."""
    samples = len(pasted_digits(held_out=False))
    state = run.state()
    batches = distributed_batches(samples, run.epoch, run.workers, run.local, seed)
    while run.batches < len(batches):
        run.step(batches[run.batches])
        if run.batches % run.semantics.checkpoint_steps == 0:
            state = run.state()
        if change is not None and _due(run, change):
            run.restore(state)
            change = _change(run, schedule, change)
            batches = distributed_batches(samples, run.epoch, run.workers, run.local, seed)
    return change
