"""The number of cores that costs the least, from the rates of both sides and from prices. Pure.

More cores than the accelerators need on average keep them busy while the rates vary. How many more depends on how much the rates
vary, and on what a core costs beside an accelerator that waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOST = 0.01  # share of the rate that a run without prices, or for time alone, leaves to waiting
LOGISTIC = math.pi / math.sqrt(3)  # standard deviation of the standard logistic distribution


@dataclass(frozen=True, kw_only=True)
class CorePrice:
    """Dollars per hour.

    Args:
        core: of one more core.
        rest: of all that the run pays for besides, such as the workers' nodes.
        free: the cores that ``rest`` includes.
    """

    core: float
    rest: float
    free: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CoreCosts:
    """The cost of a sample as a function of the number of cores.

    The rate of ``n`` cores is that of the accelerators times ``(1 + x^-delta)^(-1/delta)``, with ``x`` the input's rate over theirs, as
    in the joint model of :mod:`offload.model.goodput`. Let the logarithm of ``x`` follow a logistic distribution. Then this is the mean
    of the slower side, to first order, and ``delta`` is pi/sqrt(3) over the standard deviation.

    Args:
        overlap: delta of the queue between both sides, for constant rates.
        spread: standard deviation of the logarithm of ``x`` from interval to interval.
        price: None if a price is unknown, or only time counts.
    """

    overlap: float
    spread: float = 0.0
    price: CorePrice | None = None

    @property
    def delta(self) -> float:
        """The joint model's exponent with both causes of waiting."""
        return LOGISTIC / math.hypot(LOGISTIC / self.overlap, self.spread)

    def per_sample(self, cores: float, needed: float) -> float:
        """Dollars, or seconds without a price, of a sample over those of accelerators that never wait. ``needed``: the cores whose rate
        is the accelerators'."""
        log = math.log(needed / cores)
        slower: float = math.exp(max(log, 0.0)) * (1 + math.exp(-self.delta * abs(log))) ** (1 / self.delta)
        if self.price is None:
            return slower
        return slower * (self.price.rest + self.price.core * max(cores - self.price.free, 0.0))

    def best(self, needed: float) -> int:
        """The cores of the least cost; without a price, the fewest at which waiting costs at most ``LOST``."""
        delta, price = self.delta, self.price
        if price is None:
            # (1 + x^-delta)^(1/delta) = 1 / (1 - LOST)
            waits: float = math.expm1(-delta * math.log1p(-LOST))
            spare: float = waits ** (-1 / delta)
            return max(math.ceil(needed * max(spare, 1.0) - 1e-9), 1)
        rest = price.rest - price.core * price.free  # the rest, if free cores had the price of the others
        # The derivative is 0 where core · needed · x^(delta + 1) = rest.
        at: float = needed * (rest / (price.core * needed)) ** (1 / (delta + 1)) if rest > 0 else 0.0
        least = max(math.floor(max(at, price.free)), 1)
        return min((least, least + 1), key=lambda cores: self.per_sample(cores, needed))
