"""The joint model of goodput, for accelerators with an input side of finite speed.

Without an input rate it is the goodput of Qiao et al., "Pollux", OSDI'21 (reference implementation: AdaptDL's
``goodput.py``), which predicts several times the real throughput on a job that waits for its data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from offload.errors import ConfigError
from offload.model.checks import check_number
from offload.model.noise import GradientNoise
from offload.model.overlap import Floats, overlapped, plain
from offload.model.step_time import StepTime

OVERLAP = 8.0  # delta for an unknown prefetch: several batches are ready at any time
CANDIDATES = 50  # global batches that a search tries, spaced geometrically
ROUNDING = 1e-8


@dataclass(frozen=True)
class JointGoodput:
    """Step time, throughput and goodput of K workers on N nodes with global batches ``M = K·m·(s+1)``::

        T_in   = M / X
        T_iter = (T_gpu^delta + T_in^delta)^(1/delta)
        goodput = M / T_iter · efficiency(M)

    Args:
        step_time: T_gpu.
        noise: efficiency(M); None: every sample counts the same in any batch.
        input_samples_per_s: X, a number or a function of the worker count; None: infinitely fast.
        overlap: delta. 1: a batch is fetched only when it is needed; large: fetching hides entirely behind computing.

    Raises:
        ConfigError: for a value out of its range.
    """

    step_time: StepTime
    noise: GradientNoise | None
    input_samples_per_s: float | Callable[[int], float] | None = None
    overlap: float = OVERLAP

    def __post_init__(self) -> None:
        check_number("overlap", self.overlap, least=1.0, infinite=True)
        if self.input_samples_per_s is not None and not callable(self.input_samples_per_s):
            check_number("input_samples_per_s", self.input_samples_per_s, above=0.0, infinite=True)

    def step_time_s(
        self, nodes: ArrayLike, workers: ArrayLike, local_batch_size: ArrayLike, accum_steps: ArrayLike
    ) -> Any:
        """T_iter: seconds of one optimizer step, over broadcast arrays."""
        gpu = self.step_time.predict(nodes, workers, local_batch_size, accum_steps)
        if self.input_samples_per_s is None:
            return gpu
        waiting = _global_batch(workers, local_batch_size, accum_steps) / self._input_rate(workers)
        return plain(overlapped(gpu, waiting, self.overlap))

    def throughput(
        self, nodes: ArrayLike, workers: ArrayLike, local_batch_size: ArrayLike, accum_steps: ArrayLike
    ) -> Any:
        """Samples per second."""
        batch = _global_batch(workers, local_batch_size, accum_steps)
        return plain(np.asarray(batch / self.step_time_s(nodes, workers, local_batch_size, accum_steps)))

    def goodput(self, nodes: ArrayLike, workers: ArrayLike, local_batch_size: ArrayLike, accum_steps: ArrayLike) -> Any:
        """Throughput × efficiency, in samples/s as useful as those of the initial batch.

        Raises ConfigError for a global batch below the initial one.
        """
        rate = self.throughput(nodes, workers, local_batch_size, accum_steps)
        if self.noise is None:
            return rate
        efficiency = self.noise.efficiency(_global_batch(workers, local_batch_size, accum_steps))
        return plain(np.asarray(rate * efficiency))

    def optimize(
        self,
        nodes: ArrayLike,
        workers: ArrayLike,
        max_batch_size: float | None = None,
        local_batch_size_range: tuple[int | None, int | None] | None = None,
        accumulate: bool = False,
        worth: Callable[[Floats, Floats], Floats] | None = None,
    ) -> tuple[Any, Any, Any]:
        """The best ``(goodput, local_batch_size, accum_steps)`` for each entry of ``nodes`` and ``workers``.

        Searches global batches from the initial one to ``max_batch_size`` (None: the initial one alone) whose local batch
        lies in the range; a goodput of 0 means that none does. A single worker accumulates at least once to grow its batch:
        otherwise its gradient noise could be measured only from step to step, and moving weights make it look larger. Without
        ``accumulate``, a single worker stays at the initial batch. ``worth``: what to maximise instead of goodput, as a function of
        goodput and throughput, both of shape (batches, entries).

        Raises ConfigError without gradient noise, or if the range is empty or the maximum is below the initial batch.
        """
        n, k = np.broadcast_arrays(np.asarray(nodes), np.asarray(workers))
        goodput, local, accum = self._candidates(n, k, max_batch_size, local_batch_size_range, accumulate)
        value = goodput
        if worth is not None:
            value = worth(goodput, np.asarray(self.throughput(n, k, local, accum)))
        best = np.argmax(value, axis=0)[None]
        return (
            plain(np.take_along_axis(goodput, best, axis=0)[0]),
            plain(np.take_along_axis(local, best, axis=0)[0]),
            plain(np.take_along_axis(accum, best, axis=0)[0]),
        )

    def best_at_rates(
        self,
        nodes: ArrayLike,
        workers: ArrayLike,
        rates: ArrayLike,
        max_batch_size: float | None = None,
        local_batch_size_range: tuple[int | None, int | None] | None = None,
    ) -> tuple[Floats, Floats]:
        """The best goodput, and its throughput, of every entry of ``nodes`` and ``workers`` (one dimension) at each of its input ``rates``.

        ``rates`` and both results have the shape (rates, entries). They replace ``input_samples_per_s``, which must be None. The search is
        that of :meth:`optimize` with ``accumulate``; it evaluates each batch once for all rates.
        """
        n, k = np.broadcast_arrays(np.asarray(nodes), np.asarray(workers))
        goodput, throughput = _tried(self, tuple(n.tolist()), tuple(k.tolist()), max_batch_size, local_batch_size_range)
        limits = np.asarray(rates, dtype=float)[:, None, :]
        # The p-norm of both times, relative to the accelerators' time.
        ratio = throughput / limits
        slowed = 1 / overlapped(np.ones_like(ratio), ratio, self.overlap)
        value = goodput * slowed
        best = np.argmax(value, axis=1)[:, None, :]
        return (
            np.take_along_axis(value, best, axis=1)[:, 0],
            np.take_along_axis(throughput * slowed, best, axis=1)[:, 0],
        )

    def _candidates(
        self,
        n: Any,
        k: Any,
        max_batch_size: float | None,
        local_batch_size_range: tuple[int | None, int | None] | None,
        accumulate: bool,
    ) -> tuple[Floats, Any, Any]:
        """Goodput, local batch and accumulation steps of the batches that a search tries, each of shape (batches, entries)."""
        initial, largest, (least, most) = self._search_range(max_batch_size, local_batch_size_range)
        if np.any(~((n >= 1) & (n <= k))):
            raise ConfigError(f"each node needs a worker: found {n} nodes with {k} workers.")
        # Geometric steps: goodput depends on the ratio of batches, so they are equally dense everywhere.
        per_worker = np.geomspace(np.maximum(initial, least * k), largest, CANDIDATES) / k
        if accumulate:
            # As few micro-batches as fit, since each costs a launch. ROUNDING keeps 64.0000001 samples from needing
            # another one.
            accum = np.ceil(per_worker / most - ROUNDING) - 1
            alone = (k == 1) & (per_worker > initial + ROUNDING)
            accum = np.where(alone, np.maximum(accum, 1), accum).astype(int)
            local = _within(np.ceil(per_worker / (accum + 1) - ROUNDING), k * (accum + 1), largest, initial)
        else:
            accum = np.zeros(per_worker.shape, dtype=int)
            local = np.where(k == 1, initial, _within(np.ceil(per_worker - ROUNDING), k, largest, initial)).astype(int)
        goodput = np.asarray(self.goodput(n, k, local, accum))
        # Batches that do not fit stay in the arrays, as worth nothing.
        return np.where((least <= local) & (local <= most), goodput, 0.0), local, accum

    def _search_range(
        self, max_batch_size: float | None, local_range: tuple[int | None, int | None] | None
    ) -> tuple[float, float, tuple[float, float]]:
        if self.noise is None:
            raise ConfigError("a batch size cannot be chosen without gradient noise: larger batches would seem free.")
        initial = self.noise.batch_size
        largest = initial if max_batch_size is None else max_batch_size
        if not largest >= initial:
            raise ConfigError(f"max_batch_size must be at least the initial batch {initial:g}, found {largest:g}.")
        low, high = local_range or (None, None)
        least, most = low or 1, high or largest
        if not 1 <= least <= most:
            raise ConfigError(
                f"local_batch_size_range must be (least, most) with 1 ≤ least ≤ most, found {local_range}."
            )
        return initial, largest, (least, most)

    def _input_rate(self, workers: ArrayLike) -> Any:
        rate = self.input_samples_per_s
        if not callable(rate):
            return rate
        # The function may be slow (a placement of workers), and the arrays hold the same few counts many times.
        counts, where = np.unique(np.asarray(workers), return_inverse=True)
        rates = np.array([float(rate(int(count))) for count in counts])
        return rates[where].reshape(np.shape(workers))


@lru_cache(maxsize=256)  # who shares a cluster asks for the same workers at other rates, and again while no fit changes
def _tried(
    model: JointGoodput,
    nodes: tuple[int, ...],
    workers: tuple[int, ...],
    max_batch_size: float | None,
    local_range: tuple[int | None, int | None] | None,
) -> tuple[Floats, Floats]:
    """Goodput and throughput of the batches that a search tries, each of shape (batches, entries); not to be written to."""
    n, k = np.array(nodes), np.array(workers)
    goodput, local, accum = model._candidates(n, k, max_batch_size, local_range, accumulate=True)
    return goodput, np.asarray(model.throughput(n, k, local, accum))


def _within(local: Floats, groups: Any, largest: float, initial: float) -> Any:
    """Whole local batches of ``groups`` micro-batches, one sample fewer where they would exceed the ``largest`` global batch, unless that
    leaves less than the ``initial`` one."""
    exceeds = (local * groups > largest + ROUNDING) & ((local - 1) * groups >= initial - ROUNDING)
    return np.where(exceeds, local - 1, local).astype(int)


def _global_batch(workers: ArrayLike, local_batch_size: ArrayLike, accum_steps: ArrayLike) -> Floats:
    return np.asarray(np.asarray(workers, dtype=float) * np.asarray(local_batch_size) * (np.asarray(accum_steps) + 1))
