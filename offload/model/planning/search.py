"""Evaluate many shapes at once: for each, the workers and batch that give the highest goodput.

Small spaces are enumerated. Large ones (thousands of nodes) are sampled on geometric grids that close in on the best
shapes found, down to single nodes: goodput per dollar has one broad optimum per pair of node types.

Where it stops: it evaluates and narrows; :mod:`offload.model.planning.planner` recommends a shape under the user's limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.model.catalog import NodeType, Shape
from offload.model.input_rate import BOTTLENECKS, InputRate
from offload.model.noise import GradientNoise
from offload.model.overlap import MOST_OVERLAP, Floats, overlapped
from offload.model.step_time import StepTime

Ints = NDArray[np.int64]

BATCHES = 50  # global batches tried for each worker count, spaced geometrically
MORE_MICRO_BATCHES = 3  # extra micro-batches, beyond those needed, that the search also tries
FULL_BATCHES = 20  # further global batches, at which every micro-batch is as large as memory allows
# Nanoseconds that an enumeration may take, the cost of each (GPU nodes, workers, batch), and the cost of each of these with
# each kind and number of CPU nodes; measured on one core.
WORK_NS, BATCH_NS, COLUMN_NS = 4e8, 150.0, 4.0
GRID = 24  # points per axis of a large space
CLOSER = 9  # points per axis between the neighbours of a good one
ROUNDING = 1e-9
BOTTLENECK_NAMES = ("gpu", *BOTTLENECKS)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The search's view of a job; ``step_time`` is that of the evaluated GPU type.

    Global batches lie in ``batch_range``; without ``noise`` both ends are the same.
    """

    input: InputRate
    step_time: StepTime
    overlap: float
    noise: GradientNoise | None
    batch_range: tuple[int, int]
    max_local_batch_size: float


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Shapes of one GPU type and their best configuration, one entry of each array per shape.

    ``cpu_type`` is an index into the CPU types (-1: no CPU nodes), ``bottleneck`` one into ``BOTTLENECK_NAMES``.
    """

    gpu_nodes: Ints
    cpu_type: Ints
    cpu_nodes: Ints
    workers: Ints
    batch_size: Ints
    local_batch_size: Ints
    accum_steps: Ints
    gpu_time_s: Floats
    input_samples_per_s: Floats
    bottleneck: Ints
    step_time_s: Floats
    goodput: Floats

    def take(self, where: Any) -> Evaluated:
        """The shapes selected by an index, a slice or a mask."""
        return Evaluated(**{f.name: np.atleast_1d(getattr(self, f.name)[where]) for f in fields(self)})

    @staticmethod
    def join(parts: Iterable[Evaluated]) -> Evaluated:
        """All shapes of several evaluations, each shape once."""
        parts = list(parts)
        whole = Evaluated(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Evaluated)})
        # The best configuration of a shape that was evaluated more than once comes first.
        order = np.lexsort((-whole.goodput, whole.cpu_nodes, whole.cpu_type, whole.gpu_nodes))
        whole = whole.take(order)
        keys = np.stack([whole.gpu_nodes, whole.cpu_type, whole.cpu_nodes])
        new = np.ones(keys.shape[1], dtype=bool)
        new[1:] = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
        return whole.take(new)


@dataclass(frozen=True, kw_only=True)
class Space:
    """The shapes to consider: nodes of one GPU type, and nodes of at most one of the CPU types, both ends included."""

    gpu_type: NodeType
    gpu_nodes: tuple[int, int]
    cpu_types: Sequence[NodeType]
    cpu_nodes: tuple[int, int]

    @property
    def shapes(self) -> int:
        """The number of shapes."""
        (first, last), (least, most) = self.gpu_nodes, self.cpu_nodes
        kinds = len(self.cpu_types)
        per_kind = most - max(least, 1) + 1 if kinds else 0
        return (last - first + 1) * (kinds * max(per_kind, 0) + (1 if least == 0 or not kinds else 0))


Score = Callable[[Evaluated], Floats]


def search(space: Space, workload: Workload, scores: Sequence[Score], most: int) -> Evaluated:
    """Evaluate ``space``: every shape if there are at most ``most``, otherwise a grid.

    For each CPU type and each of ``scores``, finer and finer grids then close in on the best shape. A lower score is better;
    infinity rules a shape out.
    """
    points = None if space.shapes <= most else GRID
    axes = _Axes(
        gpu_nodes=_integers(*space.gpu_nodes, points),
        cpu_nodes=_integers(*space.cpu_nodes, points),
        workers=_shares(space, workload, points),
    )
    kinds = list(range(len(space.cpu_types)))
    evaluated = _evaluate(space, workload, axes, _with_none(kinds, axes))
    for kind in _with_none(kinds, axes):
        for score in scores:
            evaluated = _close_in(space, workload, evaluated, axes, kind, score)
    return evaluated


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """The values to try: GPU nodes, CPU nodes, and workers as a share of the GPUs."""

    gpu_nodes: Ints
    cpu_nodes: Ints
    workers: Floats

    def around(self, shape: Evaluated, gpus_per_node: int) -> _Axes | None:
        """Finer axes between the neighbours of one shape's values; None if no values lie between them."""
        gpus = int(shape.gpu_nodes[0]) * gpus_per_node
        nearest = int(np.argmin(np.abs(np.ceil(self.workers * gpus) - shape.workers[0])))
        low, high = self.workers[max(nearest - 1, 0)], self.workers[min(nearest + 1, len(self.workers) - 1)]
        # Shares that differ by less than one worker, or by next to nothing, are the same.
        finer = (high - low) * gpus > max(2.0, 0.005 * float(shape.workers[0]))
        axes = _Axes(
            gpu_nodes=_between(self.gpu_nodes, int(shape.gpu_nodes[0])),
            cpu_nodes=_between(self.cpu_nodes, int(shape.cpu_nodes[0])),
            workers=np.linspace(low, high, CLOSER) if finer else self.workers[nearest : nearest + 1],
        )
        known = np.isin(axes.gpu_nodes, self.gpu_nodes).all() and np.isin(axes.cpu_nodes, self.cpu_nodes).all()
        return axes if finer or not known else None


def _close_in(
    space: Space, workload: Workload, evaluated: Evaluated, axes: _Axes, kind: int, score: Score
) -> Evaluated:
    while True:
        own = evaluated.take(evaluated.cpu_type == kind)
        scored = score(own)
        if not np.isfinite(scored).any():
            return evaluated
        closer = axes.around(own.take(int(np.argmin(scored))), space.gpu_type.gpus)
        if closer is None:
            return evaluated
        axes = closer
        evaluated = Evaluated.join([evaluated, _evaluate(space, workload, axes, [kind])])


def _with_none(kinds: list[int], axes: _Axes) -> list[int]:
    """The CPU types to try; -1 stands for no CPU nodes."""
    some = [kind for kind in kinds if axes.cpu_nodes[-1] > 0]
    return [*some, -1] if axes.cpu_nodes[0] == 0 or not some else some


def _integers(first: int, last: int, points: int | None) -> Ints:
    """All integers from ``first`` to ``last``, or about ``points`` of them, spaced geometrically."""
    if points is None or last - first < points:
        return np.arange(first, last + 1)
    start = max(first, 1)
    spaced = np.unique(np.round(np.geomspace(start, last, points)).astype(np.int64))
    return spaced if first == start else np.concatenate([[first], spaced])


def _between(axis: Ints, value: int) -> Ints:
    """Integers from the point before ``value`` to the one after it."""
    at = int(np.searchsorted(axis, value))
    # The optimum lies between the neighbours of the best point, since goodput per dollar has one peak there.
    low, high = int(axis[max(at - 1, 0)]), int(axis[min(at + 1, len(axis) - 1)])
    return np.unique(np.concatenate([np.round(np.linspace(low, high, CLOSER)).astype(np.int64), [value]]))


def _shares(space: Space, workload: Workload, points: int | None) -> Floats:
    """Workers as shares of the GPUs: every count where that is affordable."""
    first, last = space.gpu_nodes
    gpus = last * space.gpu_type.gpus
    batches = 1 if workload.batch_range[0] == workload.batch_range[1] else BATCHES + FULL_BATCHES
    nodes = last - first + 1
    affordable = GRID
    if points is None:
        affordable = int(WORK_NS / (nodes * batches * (BATCH_NS + COLUMN_NS * space.shapes / nodes)))
    if gpus <= max(affordable, GRID):
        return np.arange(1, gpus + 1) / gpus
    whole_nodes = np.arange(1, space.gpu_type.gpus + 1) / space.gpu_type.gpus
    return np.unique(np.concatenate([np.geomspace(1 / gpus, 1, max(affordable, GRID)), whole_nodes]))


def _evaluate(space: Space, workload: Workload, axes: _Axes, kinds: Sequence[int]) -> Evaluated:
    """The best configuration of every shape on the axes with nodes of each of these CPU types."""
    none, some = np.zeros(1, dtype=np.int64), axes.cpu_nodes[axes.cpu_nodes > 0]
    parts = []
    for nodes in axes.gpu_nodes:
        gpus = int(nodes) * space.gpu_type.gpus
        workers = np.unique(np.clip(np.ceil(axes.workers * gpus - ROUNDING), 1, gpus).astype(np.int64))
        # No more workers than samples in a batch.
        workers = np.unique(np.minimum(workers, workload.batch_range[1]))
        columns = []
        for kind in kinds:
            counts: dict[NodeType, Any] = {space.gpu_type: int(nodes)}
            if kind >= 0:
                counts[space.cpu_types[kind]] = some
            columns.append(_Column.of(workload, Shape(counts), workers, kind, some if kind >= 0 else none))
        parts.append(_best(workload, int(nodes), workers, _Column.join(columns)))
    return Evaluated.join(parts)


@dataclass(frozen=True, kw_only=True)
class _Column:
    """The input side of some shapes: rates and bottlenecks, with a row for each worker count."""

    kind: Ints
    cpu_nodes: Ints
    rate: Floats
    bottleneck: Ints

    @staticmethod
    def of(workload: Workload, shape: Shape, workers: Ints, kind: int, cpu_nodes: Ints) -> _Column:
        size = (len(workers), len(cpu_nodes))
        local = first_local_batch(workers, workload)
        rate, binding = workload.input.ceiling(shape, workers[:, None], local[:, None])
        return _Column(
            kind=np.full(len(cpu_nodes), kind),
            cpu_nodes=cpu_nodes,
            rate=np.broadcast_to(rate, size),
            bottleneck=np.broadcast_to(binding + 1, size),  # 0 is the GPU
        )

    @staticmethod
    def join(columns: Sequence[_Column]) -> _Column:
        return _Column(
            **{f.name: np.concatenate([getattr(c, f.name) for c in columns], axis=-1) for f in fields(_Column)}
        )


def first_local_batch(workers: Ints, workload: Workload) -> Floats:
    """The local batch with which the hub's blocks are counted, before a batch is chosen: that of the least global batch."""
    share = np.ceil(workload.batch_range[0] / workers)
    return np.asarray(np.ceil(share / np.maximum(np.ceil(share / workload.max_local_batch_size), 1)))


def _best(workload: Workload, nodes: int, workers: Ints, columns: _Column) -> Evaluated:
    """The best workers and batch for each column."""
    batches = _batches(workers, workload)
    gpu_time = np.asarray(workload.step_time.predict(nodes, workers, batches.local, batches.accum))
    efficiency = np.ones(gpu_time.shape) if workload.noise is None else workload.noise.efficiency(batches.whole)
    with np.errstate(divide="ignore"):  # without a core to preprocess there is no rate
        wait = 1 / columns.rate
    chosen = _fastest(gpu_time / (batches.whole * efficiency), 1 / efficiency, wait, workload.overlap)
    # From (batch, workers) to (workers, column).
    whole, local, accum, gpu_s, useful = (
        np.take_along_axis(values.T, chosen, axis=1)
        for values in (batches.whole, batches.local, batches.accum, gpu_time, efficiency)
    )
    step_time = overlapped(gpu_s, whole * wait, workload.overlap)
    goodput = whole / step_time * useful
    # Prefer more workers among equals: take the last one.
    row = len(workers) - 1 - np.argmax(goodput[::-1], axis=0)
    at = (row, np.arange(len(columns.kind)))
    return Evaluated(
        gpu_nodes=np.full(len(columns.kind), nodes),
        cpu_type=columns.kind,
        cpu_nodes=columns.cpu_nodes,
        workers=workers[row],
        batch_size=whole[at],
        local_batch_size=local[at],
        accum_steps=accum[at],
        gpu_time_s=gpu_s[at],
        input_samples_per_s=columns.rate[at],
        bottleneck=np.where(gpu_s >= whole * wait, 0, columns.bottleneck)[at],
        step_time_s=step_time[at],
        goodput=goodput[at],
    )


@dataclass(frozen=True, kw_only=True)
class _Batches:
    """Ways to split a global batch, a row each, with a column for each worker count: ``whole`` samples in ``accum + 1``
    micro-batches of at most ``local`` samples for each worker."""

    whole: Ints
    local: Ints
    accum: Ints


def _batches(workers: Ints, workload: Workload) -> _Batches:
    """The global batches to try.

    A batch has as few micro-batches as memory allows: each further one costs a constant and hides no synchronisation. Between the
    ends of the range, all local batches are equal, so that no worker waits for another's last sample. The search also tries the
    first batch with a few more micro-batches, which may fill them better.
    """
    least, most = workload.batch_range
    limit = workload.max_local_batch_size
    first, last = np.maximum(least, workers), np.maximum(most, workers)
    per_worker = [np.ceil(first / workers)[None]]
    if most > least:
        full = np.floor(np.geomspace(1, np.maximum(most / (limit * workers), 1), FULL_BATCHES))
        per_worker.append(np.ceil(last / workers)[None])
        per_worker.append(np.floor(np.geomspace(first, last, BATCHES) / workers))
        per_worker.append(full * limit if np.isfinite(limit) else full)
    filled = range(1, MORE_MICRO_BATCHES + 1) if np.isfinite(limit) else range(0)
    per_worker += [per_worker[0] for _ in filled]
    batches = np.concatenate(per_worker)
    accum = np.maximum(np.ceil(batches / limit) - 1, 0)
    for more in filled:
        accum[-more] += np.where(accum[-more] > 0, more, 0)
    local = np.ceil(batches / (accum + 1))
    whole = local * (accum + 1) * workers
    for row in (0, *(-more for more in filled)):
        whole[row] = first
    if most > least:
        whole[1] = last
    # Rounding may leave the range: repeat the first batch there.
    allowed = (whole >= first) & (whole <= last)
    return _Batches(
        **{
            name: np.where(allowed, values, values[0]).astype(np.int64)
            for name, values in (("whole", whole), ("local", local), ("accum", accum))
        }
    )


def _fastest(gpu: Floats, weight: Floats, wait: Floats, overlap: float) -> Ints:
    """The index of the batch that minimises ``(gpu^d + (weight·wait)^d)^(1/d)``, seconds per useful sample.

    ``gpu`` and ``weight`` have shape (batch, workers); ``wait`` and the result have shape (workers, column). The sum under the root
    is a line in ``wait^d``, so two powers per batch and one per column are enough.
    """
    if overlap > MOST_OVERLAP:
        lines = [np.maximum(g[:, None], w[:, None] * x) for g, w, x in zip(gpu.T, weight.T, wait, strict=True)]
        return np.stack([np.argmin(line, axis=0) for line in lines])
    unit = np.min(gpu, axis=0)
    with np.errstate(over="ignore"):
        # An overflow means that the input binds by orders of magnitude: all are infinite, and the first, the smallest
        # batch, is indeed the best.
        own, slope, by = (gpu / unit) ** overlap, weight**overlap, (wait / unit[:, None]) ** overlap
        return np.stack(
            [np.argmin(o[:, None] + s[:, None] * x, axis=0) for o, s, x in zip(own.T, slope.T, by, strict=True)]
        )
