"""Synchronisation that nobody measured: a wide prior from the gradient's bytes and the links that carry them.

A ring all-reduce sends every gradient ``2·(N − 1)/N`` times over the slowest link: between one and two times, whatever N is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.model.catalog import NodeType
from offload.model.input_rate import BYTES_PER_GIGABIT
from offload.model.step_time import StepTime

# A prior is a median and a factor: 95 % of its values lie between median ÷ factor and median · factor.
RING = math.sqrt(2)  # the middle of one and two
NETWORK_SHARE = (
    0.5  # of its nominal rate that a network carries gradients at; all-reduces over TCP are far from the wire's rate
)
NETWORK_FACTOR = 4.0  # rings of 2 to many nodes (√2 either way), latency, and networks that deliver a third
INTRA_BYTES_PER_S, INTRA_FACTOR = 10e9, 5.0  # from slow PCIe through the host's memory to NVLink
GRADIENT_BYTES, GRADIENT_FACTOR = 1e8, 10.0  # a model of unknown size: 25 million float32 parameters, such as ResNet-50
GAMMA, GAMMAS = 4.0, (1.0, 10.0)  # how well backward hides an unknown synchronisation, and all of gamma's range
INTER_OVER_INTRA = 1.1  # several nodes are not faster than one: Pollux' prior for an unseen regime


@dataclass(frozen=True, kw_only=True)
class Synchronisation:
    """What a profile knows about synchronisation.

    Args:
        intra, inter: whether the step's terms within a node, and between nodes, come from a measurement.
        gradient_bytes: bytes of the gradients of one worker; None: unknown.
    """

    intra: bool = True
    inter: bool = True
    gradient_bytes: float | None = None

    def on(self, host: NodeType, step_time: StepTime) -> Assumed:
        """The step time on nodes of type ``host``: terms without a measurement take the prior's median."""
        size, size_factor = self.gradient_bytes or GRADIENT_BYTES, 1.0 if self.gradient_bytes else GRADIENT_FACTOR
        median, ends = step_time, []
        if not (self.intra or self.inter):
            median = replace(median, gamma=GAMMA)
        if not self.intra:
            within = RING * size / INTRA_BYTES_PER_S
            if self.inter:  # one node is not slower than several
                within = min(within, median.alpha_inter)
            median = replace(median, alpha_intra=within, beta_intra=0.0)
        if not self.inter:
            wire = RING * size / (NETWORK_SHARE * BYTES_PER_GIGABIT * host.network_gbps)
            median = replace(median, alpha_inter=median.alpha_intra + wire, beta_inter=median.beta_intra)
            factor = _both(size_factor, NETWORK_FACTOR)
            ends.append(_ends(median, "alpha_inter", median.alpha_intra, wire, factor))
        if not self.intra:
            ends.append(_ends(median, "alpha_intra", 0.0, median.alpha_intra, _both(size_factor, INTRA_FACTOR)))
        if not (self.intra or self.inter):
            ends.append((replace(median, gamma=GAMMAS[1]), replace(median, gamma=GAMMAS[0])))
        return Assumed(step_time=median, ends=tuple(ends))

    def said(self, shapes: Sequence[tuple[int, int]]) -> list[str]:
        """Sentences about the priors behind these (GPU nodes, workers)."""
        inter = not self.inter and any(nodes > 1 and workers > 1 for nodes, workers in shapes)
        intra = not self.intra and any(nodes == 1 and workers > 1 for nodes, workers in shapes)
        where = " and ".join(
            [*(["between nodes"] if inter else []), *(["between the workers of a node"] if intra else [])]
        )
        if not where:
            return []
        size = (
            f"{self.gradient_bytes / 1e6:,.3g} MB of gradients"
            if self.gradient_bytes
            else f"gradients of {GRADIENT_BYTES / GRADIENT_FACTOR / 1e6:g} MB to {GRADIENT_BYTES * GRADIENT_FACTOR / 1e6:,g} MB"
        )
        over = "the nodes' network" if inter else "the links between GPUs"
        return [
            f"synchronisation {where} was not measured: its time is a guess from {size} and {over}, and the ranges are wide. "
            "Probe there for narrower ones."
        ]


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """A step time of which parts are priors. Each of ``ends`` holds the fast and the slow end (95 %) of one of them."""

    step_time: StepTime
    ends: tuple[tuple[StepTime, StepTime], ...] = ()


def _ends(median: StepTime, name: str, sure: float, guessed: float, factor: float) -> tuple[StepTime, StepTime]:
    fast, slow = {name: sure + guessed / factor}, {name: sure + guessed * factor}
    return replace(median, **fast), replace(median, **slow)


def _both(one: float, other: float) -> float:
    """The factor of a product of two independent log-normal values."""
    return math.exp(math.hypot(math.log(one), math.log(other)))
