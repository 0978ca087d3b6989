"""The exponential mean of gradient noise over many steps, for each parameter group.

Source of the smoothing: Qiao et al., "Pollux", OSDI'21 (AdaptDL's ``gradient_noise_scale.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.model.noise import GradientNoise

MEMORY = 0.999  # decay per step at the initial batch; a step of k times that batch decays like k steps
LEAST_VAR = 1e-6


@dataclass(frozen=True, kw_only=True)
class NoiseAverage:
    """Bias-corrected exponential means of ``|G|²`` and ``tr(Σ)`` at the initial global batch.

    Args:
        batch_size: the initial global batch M0.
        sqr, var: weighted sums of the estimates, by parameter group; an estimate may be negative, a mean is cut at 0.
        weight: the weight of the sums; 0 before the first estimate.
        paired: whether the estimates compare gradients of consecutive steps, which differ by more than noise. The first estimate
            from gradients of the same step replaces them.
    """

    batch_size: int
    sqr: tuple[float, ...] = ()
    var: tuple[float, ...] = ()
    weight: float = 0.0
    paired: bool = True

    def updated(
        self, sqr: Sequence[float], var: Sequence[float], *, scale: float, steps: int = 1, paired: bool = False
    ) -> NoiseAverage:
        """The mean with one more estimate, made at ``scale`` times the initial batch, ``steps`` steps after the last one.

        Infinite estimates, and paired ones where better ones exist, change nothing.
        """
        if not all(map(math.isfinite, (*sqr, *var))) or (paired and not self.paired):
            return self
        anew = not self.weight or self.paired != paired or len(sqr) != len(self.sqr)
        kept = 0.0 if anew else float(MEMORY ** (scale * steps))
        new = 1 - float(MEMORY ** (scale * steps))
        before_sqr, before_var = ((0.0,) * len(sqr), (0.0,) * len(var)) if anew else (self.sqr, self.var)
        return NoiseAverage(
            batch_size=self.batch_size,
            sqr=tuple(kept * old + new * x for old, x in zip(before_sqr, sqr, strict=True)),
            var=tuple(kept * old + new * x for old, x in zip(before_var, var, strict=True)),
            weight=kept * self.weight + new if not anew else new,
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
        """The noise of all parameters together; None before the first estimate."""
        return self._noise(sum(self.sqr), sum(self.var)) if self.weight else None

    def _noise(self, sqr: float, var: float) -> GradientNoise:
        return GradientNoise(
            sqr=max(sqr / self.weight, 0.0), var=max(var / self.weight, LEAST_VAR), batch_size=self.batch_size
        )

    def to_state(self) -> dict[str, Any]:
        """The state as plain numbers and lists."""
        return {"sqr": list(self.sqr), "var": list(self.var), "weight": self.weight, "paired": self.paired}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], batch_size: int) -> NoiseAverage:
        """The inverse of :meth:`to_state`."""
        return cls(
            batch_size=batch_size,
            sqr=tuple(map(float, state["sqr"])),
            var=tuple(map(float, state["var"])),
            weight=float(state["weight"]),
            paired=bool(state["paired"]),
        )
