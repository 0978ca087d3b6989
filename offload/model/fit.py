"""Learn the step time's parameters from few measurements, and say how far its predictions can be trusted.

A handful of points does not identify the parameters (a long, well-hidden sync looks like a short one). It does identify the
predictions, so compare those. Where it stops: the caller leaves out measurements in which a rank waited for data, its own or a
peer's; the fit would take that wait for computing or synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # loads scipy.optimize at first use: placing workers does not pay for it
from numpy.typing import ArrayLike

from offload.errors import ConfigError
from offload.model.overlap import Floats, plain
from offload.model.step_time import BOUNDS, PARAMETERS, StepTime
from offload.model.synchronisation import INTER_OVER_INTRA

# In the order of PARAMETERS.
ALPHA_C, BETA_C, ALPHA_INTRA, BETA_INTRA, ALPHA_INTER, BETA_INTER, GAMMA = range(7)
SYNC = ((ALPHA_INTRA, BETA_INTRA), (ALPHA_INTER, BETA_INTER))

LOWER, UPPER = np.array([BOUNDS[name] for name in PARAMETERS]).T

NOISE = 0.05  # prior relative error of one measured step, until the residuals tell better
NOISE_WEIGHT = 1  # weight of this prior, in measurements: a few measurements tell a noisy machine from a quiet one
OUTLIER = 2.0  # standard deviations beyond which a residual counts linearly, not squared
GAMMA_SPREAD = 4.0  # standard deviation of gamma's prior around 1: it decides only where the data do not
BETA_OVER_ALPHA = 0.25  # standard deviation of the prior of a further worker's share of the first two workers' sync
GAMMAS = (1.2, 3.0, 8.0)  # where the search starts: the objective has a valley along gamma


@dataclass(frozen=True, eq=False)
class StepTimeFit:
    """A fitted :class:`StepTime` and its uncertainty.

    ``residual`` is the root mean square of the measurements' relative errors. Each row of ``directions`` is a change of the
    parameters, in the order of ``PARAMETERS``, that reaches the edge of what the measurements allow (95 %). The rows are
    independent of each other.

    ``best_case`` is the step time for somebody who may try more workers: where a single batch size was measured, all of its time depends
    on the size, so that smaller shares of a batch take as little time as they possibly can.
    """

    step_time: StepTime
    best_case: StepTime
    residual: float
    directions: Floats

    def uncertainty(
        self, nodes: ArrayLike, workers: ArrayLike, local_batch_size: ArrayLike, accum_steps: ArrayLike = 0
    ) -> Any:
        """Relative 95 % half-width of ``step_time.predict(…)``: 0.05 means ± 5 %. Wide where nothing was measured."""
        at = (nodes, workers, local_batch_size, accum_steps)
        expected = np.asarray(self.step_time.predict(*at))
        squares = np.zeros(expected.shape)
        for direction in self.directions:
            either_way = [
                np.abs(np.asarray(self.step_time.moved(sign * direction).predict(*at)) - expected) for sign in (1, -1)
            ]
            squares += np.maximum(*either_way) ** 2
        return plain(np.asarray(np.sqrt(squares) / expected))


def fit_step_time(
    nodes: ArrayLike,
    workers: ArrayLike,
    local_batch_size: ArrayLike,
    compute_time_s: ArrayLike,
    last_micro_batch_time_s: ArrayLike,
    *,
    noise: float = NOISE,
    noise_weight: float = NOISE_WEIGHT,
) -> StepTimeFit:
    """Fit the step time to measurements, one for each entry of the arrays.

    Args:
        nodes, workers: N and K of each measurement.
        local_batch_size: m.
        compute_time_s: seconds of one micro-batch's forward and backward, without synchronisation.
        last_micro_batch_time_s: seconds of the last micro-batch, with synchronisation.
        noise: relative standard deviation of a measurement as known beforehand, for example from repeated steps.
        noise_weight: the weight of this knowledge, in measurements.

    Errors are relative (a step of 10 ms counts as much as one of 10 s) and outliers are damped. The fit is optimistic about unseen
    regimes, so that the run tries them: synchronisation over several nodes costs little more than within one, and half the time
    of a single measured batch size is independent of the size.

    Raises:
        ConfigError: if the arrays differ in length or are empty, or if an entry is impossible for a step.
    """
    data = _Measured.of(nodes, workers, local_batch_size, compute_time_s, last_micro_batch_time_s)
    free = data.identifiable()
    best: Any = None
    for gamma in GAMMAS if free[GAMMA] else (1.0,):
        start = data.guess(gamma)
        solution = scipy.optimize.least_squares(
            lambda x, start=start: _residuals(_with(start, free, x), data),
            start[free],
            bounds=(LOWER[free], UPPER[free]),
            # Linear beyond OUTLIER: one step beside a garbage collection must not bend the curve.
            loss="soft_l1",
            f_scale=OUTLIER,
            # Parameters differ by orders of magnitude, even in these units.
            x_scale=np.maximum(start[free], 0.1),
        )
        if best is None or solution.cost < best[0].cost:
            best = solution, start
    solution, start = best
    scaled = _with(start, free, solution.x)
    errors = _errors(scaled, data)
    # The prior and the residuals together: a scaled inverse chi-squared distribution, whose predictions are Student's.
    # Degrees of freedom: each fitted parameter uses up one measurement.
    known = noise_weight + max(errors.size - int(np.sum(free)), 0)
    spread = (noise_weight * noise**2 + np.sum(errors**2)) / known
    student = float(scipy.special.stdtrit(known, 0.975))
    directions = _free_directions(solution.jac, free, student * float(np.sqrt(spread)) / NOISE)
    directions += _unseen_directions(scaled, free, data)
    if not data.seen(inter=True):
        for intra, inter in zip(*SYNC, strict=True):
            scaled[inter] = INTER_OVER_INTRA * scaled[intra]
    best_case = scaled.copy()
    if not free[ALPHA_C]:
        best_case[ALPHA_C], best_case[BETA_C] = 0.0, scaled[BETA_C] + scaled[ALPHA_C] / data.sizes[0]
    return StepTimeFit(
        step_time=_step_time(scaled * data.unit()),
        best_case=_step_time(best_case * data.unit()),
        residual=float(np.sqrt(np.mean(errors**2))),
        directions=np.array(directions).reshape(-1, 7) * data.unit(),
    )


@dataclass(frozen=True, eq=False)
class _Measured:
    """Checked measurements, with times and sizes relative to the typical ones."""

    nodes: Floats
    workers: Floats
    sizes: Floats
    compute: Floats
    last: Floats
    time_unit: float
    size_unit: float

    @staticmethod
    def of(nodes: Any, workers: Any, sizes: Any, compute: Any, last: Any) -> _Measured:
        names = ("nodes", "workers", "local_batch_size", "compute_time_s", "last_micro_batch_time_s")
        columns = [np.atleast_1d(np.asarray(a, dtype=float)) for a in (nodes, workers, sizes, compute, last)]
        lengths = {len(a) for a in columns}
        if lengths != {len(columns[0])} or columns[0].ndim != 1 or len(columns[0]) == 0:
            raise ConfigError(
                "step-time measurements must be arrays of one length, at least one entry each, found "
                + ", ".join(f"{name}: {a.size}" for name, a in zip(names, columns, strict=True))
            )
        for name, values in zip(names, columns, strict=True):
            bad = ~(np.isfinite(values) & (values > 0))
            if bad.any():
                raise ConfigError(
                    f"{name} must be positive and finite, found {values[bad][0]} in entry {int(np.argmax(bad))}."
                )
        n, k, m, grad, final = columns
        if (n > k).any():
            entry = int(np.argmax(n > k))
            raise ConfigError(f"a node without a worker: entry {entry} has {n[entry]:g} nodes, {k[entry]:g} workers.")
        time_unit, size_unit = float(np.median(grad)), float(np.median(m))
        return _Measured(n, k, m / size_unit, grad / time_unit, final / time_unit, time_unit, size_unit)

    def unit(self) -> Floats:
        """The factors that turn scaled parameters into seconds."""
        units = np.full(7, self.time_unit)
        units[BETA_C] = self.time_unit / self.size_unit
        units[GAMMA] = 1.0
        return units

    def seen(self, *, inter: bool, further: bool = False) -> bool:
        """Return whether sync was measured in this regime, with ``further`` for more than two workers."""
        here = (self.nodes > 1) if inter else (self.nodes == 1) & (self.workers > 1)
        return bool(np.any(here & (self.workers > 2) if further else here))

    def identifiable(self) -> Any:
        """A mask of the parameters that the measurements determine."""
        free = np.zeros(7, dtype=bool)
        # One size cannot tell a constant time from one per sample, and two workers cannot tell what a third one adds.
        free[BETA_C] = True
        free[ALPHA_C] = len(np.unique(self.sizes)) > 1
        for inter, (alpha, beta) in enumerate(SYNC):
            free[alpha] = self.seen(inter=bool(inter))
            free[beta] = self.seen(inter=bool(inter), further=True)
        free[GAMMA] = free[ALPHA_INTRA] or free[ALPHA_INTER]
        return free

    def guess(self, gamma: float) -> Floats:
        """A starting point, strictly within the bounds."""
        start = np.zeros(7)
        start[GAMMA] = gamma
        if len(np.unique(self.sizes)) > 1:
            design = np.stack([np.ones_like(self.sizes), self.sizes], axis=1) / self.compute[:, None]
            start[[ALPHA_C, BETA_C]] = np.maximum(scipy.optimize.nnls(design, np.ones_like(self.sizes))[0], 1e-3)
        else:
            start[ALPHA_C] = np.mean(self.compute) / 2
            start[BETA_C] = start[ALPHA_C] / self.sizes[0]
        # The equation of T_gpu, solved for T_sync.
        synced = np.maximum(self.last**gamma - self.compute**gamma, 0) ** (1 / gamma)
        for inter, (alpha, beta) in enumerate(SYNC):
            here = (self.nodes > 1) if inter else (self.nodes == 1) & (self.workers > 1)
            if here.any():
                start[alpha] = max(float(np.mean(synced[here])), 1e-2)
                start[beta] = 0.01 * start[alpha] if self.seen(inter=bool(inter), further=True) else 0.0
        return start


def _with(start: Floats, free: Any, values: Floats) -> Floats:
    whole = start.copy()
    whole[free] = values
    return whole


def _step_time(vector: Floats) -> StepTime:
    """The parameters clipped to their bounds; a step always takes some time."""
    inside = np.clip(vector, LOWER, UPPER)
    inside[BETA_C] = max(inside[BETA_C], 1e-12)
    return StepTime(*map(float, inside))


def _errors(scaled: Floats, data: _Measured) -> Floats:
    """Relative errors (differences of logarithms) of both kinds of measurement. Without synchronisation, both measure the same."""
    model = _step_time(scaled)
    compute = np.log(np.asarray(model.compute_time_s(data.sizes)) / data.compute)
    last = np.log(np.asarray(model.predict(data.nodes, data.workers, data.sizes)) / data.last)
    alone = data.workers == 1
    return np.concatenate([np.where(alone, (compute + last) / 2, compute), last[~alone]])


def _residuals(scaled: Floats, data: _Measured) -> Floats:
    """Errors in standard deviations, followed by the priors that hold where the data are silent."""
    beliefs = [(scaled[GAMMA] - 1) / GAMMA_SPREAD]
    beliefs += [scaled[beta] / (scaled[alpha] + 1e-3) / BETA_OVER_ALPHA for alpha, beta in SYNC]
    return np.concatenate([_errors(scaled, data) / NOISE, beliefs])


def _free_directions(jacobian: Floats, free: Any, spread: float) -> list[Floats]:
    """Principal axes of the fitted parameters' covariance. ``spread``: how many standard deviations to go, over those of the residuals."""
    information = jacobian.T @ jacobian
    # A direction without data is bounded by the parameter's own size: the ridge keeps the matrix regular.
    values, axes = np.linalg.eigh(information + 1e-4 * np.eye(len(information)))
    directions = []
    for value, axis in zip(values, axes.T, strict=True):
        whole = np.zeros(7)
        whole[free] = spread * axis / np.sqrt(value)
        directions.append(whole)
    return directions


def _unseen_directions(scaled: Floats, free: Any, data: _Measured) -> list[Floats]:
    """The possible errors of parameters that were assumed, not measured."""
    directions = []
    if not free[ALPHA_C]:
        # All of the time may depend on the size, or none: both agree at the size that was seen.
        swap = np.zeros(7)
        swap[ALPHA_C], swap[BETA_C] = scaled[ALPHA_C], -scaled[ALPHA_C] / data.sizes[0]
        directions.append(swap)
    for alpha, beta in SYNC:
        for parameter in (alpha, beta):
            if not free[parameter]:
                # A sync as long as the computing; each further worker, as much as the prior allows.
                typical = np.zeros(7)
                typical[parameter] = 1.0 if parameter == alpha else BETA_OVER_ALPHA * max(scaled[alpha], 0.1)
                directions.append(typical)
    return directions
