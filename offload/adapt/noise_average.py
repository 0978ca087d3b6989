"""The exponential mean of gradient noise over many steps, for each parameter group.

Source of the smoothing: Qiao et al., "Pollux", OSDI'21 (AdaptDL's ``gradient_noise_scale.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.model.noise import GradientNoise

MEMORY = 0.999  # slowest decay per step at the initial batch; a step of k times that batch decays like k steps
PRECISE = 0.2  # relative error of |G|² at which older estimates are forgotten: the noise drifts during training
FEWEST = 4.0  # estimates that always count
SPREAD_MEMORY = 0.95  # decay, per estimate, of the measured spread
LEAST_VAR = 1e-6
NUMBERS = ("weight", "weight_squares", "newest", "spread", "spread_weight")  # plain numbers in the saved state


@dataclass(frozen=True, kw_only=True)
class NoiseAverage:
    """Bias-corrected exponential means of ``|G|²`` and ``tr(Σ)`` at the initial global batch, over as few steps as tell them.

    Args:
        batch_size: the initial global batch M0.
        sqr, var: weighted sums of the estimates, by parameter group; an estimate may be negative, a mean is cut at 0.
        weight, weight_squares: the weight of the sums, and the sum of the squared weights; 0 before the first estimate.
        newest: the newest estimate of ``|G|²`` of all parameters.
        spread, spread_weight: a weighted sum of half the squared differences between estimates in a row, which drift hardly enlarges,
            and its weight.
        paired: whether the estimates compare gradients of consecutive steps, which differ by more than noise. The first estimate
            from gradients of the same step replaces them.
    """

    batch_size: int
    sqr: tuple[float, ...] = ()
    var: tuple[float, ...] = ()
    weight: float = 0.0
    weight_squares: float = 0.0
    newest: float = 0.0
    spread: float = 0.0
    spread_weight: float = 0.0
    paired: bool = True

    def updated(
        self, sqr: Sequence[float], var: Sequence[float], *, scale: float, steps: int = 1, paired: bool = False
    ) -> NoiseAverage:
        """The mean with one more estimate, made at ``scale`` times the initial batch, ``steps`` steps after the last one.

        Infinite estimates, and paired ones where better ones exist, change nothing.
        """
        if not all(map(math.isfinite, (*sqr, *var))) or (paired and not self.paired):
            return self
        # Estimates of another kind, or of other parameter groups, cannot be averaged with these.
        anew = not self.weight or self.paired != paired or len(sqr) != len(self.sqr)
        old = NoiseAverage(batch_size=self.batch_size, sqr=(0.0,) * len(sqr), var=(0.0,) * len(var)) if anew else self
        longest = float(MEMORY ** (scale * steps))
        # A mean with decay d covers about 1 / (1 - d) estimates. No more of them are kept than precision needs.
        kept, new, whole = min(longest, 1 - 1 / old._needed), 1 - longest, math.fsum(sqr)
        spread, spread_weight = old.spread, old.spread_weight
        if not anew:
            spread = SPREAD_MEMORY * spread + (whole - old.newest) ** 2 / 2
            spread_weight = SPREAD_MEMORY * spread_weight + 1
        return NoiseAverage(
            batch_size=self.batch_size,
            sqr=tuple(kept * before + new * x for before, x in zip(old.sqr, sqr, strict=True)),
            var=tuple(kept * before + new * x for before, x in zip(old.var, var, strict=True)),
            weight=kept * old.weight + new,
            weight_squares=kept**2 * old.weight_squares + new**2,
            newest=whole,
            spread=spread,
            spread_weight=spread_weight,
            paired=paired,
        )

    @property
    def groups(self) -> tuple[GradientNoise, ...]:
        """The noise of each parameter group; empty before the first estimate."""
        if not self.weight:
            return ()
        return tuple(self._noise(s, v) for s, v in zip(self.sqr, self.var, strict=True))

    @property
    def whole(self) -> GradientNoise | None:
        """The noise of all parameters together, with its error; None before the first estimate."""
        if not self.weight:
            return None
        noise = self._noise(sum(self.sqr), sum(self.var))
        if not self.spread_weight:  # a single estimate says nothing about its error
            return replace(noise, sqr_error=noise.sqr + noise.var)
        return replace(noise, sqr_error=math.sqrt(self._variance * self.weight_squares) / self.weight)

    @property
    def _variance(self) -> float:
        """The variance of one estimate of ``|G|²``."""
        return self.spread / self.spread_weight

    @property
    def _needed(self) -> float:
        """The estimates that make the mean of ``|G|²`` precise."""
        sqr = max(sum(self.sqr), 0.0)
        if not self.spread_weight or not sqr:
            return math.inf
        return max(self._variance / (PRECISE * sqr / self.weight) ** 2, FEWEST)

    def _noise(self, sqr: float, var: float) -> GradientNoise:
        return GradientNoise(
            sqr=max(sqr / self.weight, 0.0), var=max(var / self.weight, LEAST_VAR), batch_size=self.batch_size
        )

    def to_state(self) -> dict[str, Any]:
        """The state as plain numbers and lists."""
        return {
            "batch_size": self.batch_size,
            "sqr": list(self.sqr),
            "var": list(self.var),
            "paired": self.paired,
            **{name: getattr(self, name) for name in NUMBERS},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], batch_size: int) -> NoiseAverage:
        """The inverse of :meth:`to_state`, at the initial global batch ``batch_size``, which may have changed. What an older state lacks is
        0: its error is then unknown until the next estimates."""
        scale = float(state.get("batch_size", batch_size)) / batch_size
        return cls(
            batch_size=batch_size,
            sqr=tuple(map(float, state["sqr"])),
            var=tuple(scale * float(var) for var in state["var"]),
            weight=float(state["weight"]),
            paired=bool(state["paired"]),
            **{name: float(state.get(name, 0.0)) for name in NUMBERS if name != "weight"},
        )
