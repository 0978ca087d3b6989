"""The step time on a planned type of node, from the profile's, the relative speeds of GPUs, and priors for what nobody measured.

The data sheets of GPUs give a prior for one that nobody probed. Arithmetic or memory bounds a step, so the ratios of the two
bound its speed. Software, clocks and power add a factor either way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offload.errors import ConfigError, argument
from offload.model.catalog import NodeType
from offload.model.checks import check_number
from offload.model.profile import Profile
from offload.model.step_ranges import StepRange
from offload.model.step_time import PARAMETERS, TIMES

# Dense FP16 tensor TFLOPS and memory bandwidth in GB/s, from NVIDIA's data sheets: T4 (2019), V100 SXM2 (2020), A10G as on
# AWS's page of EC2 G5 with half of the A10's tensor rate, L4 and L40S (2023, sparse figures halved), A100 SXM 40 GB (2020),
# H100 SXM (2023) and H200 SXM (2024).
DATA_SHEETS: Mapping[str, tuple[float, float]] = {
    "T4": (65.0, 320.0),
    "V100": (125.0, 900.0),
    "A10G": (70.0, 600.0),
    "L4": (121.0, 300.0),
    "L40S": (362.0, 864.0),
    "A100": (312.0, 1555.0),
    "H100": (989.0, 3350.0),
    "H200": (989.0, 4800.0),
}
BEYOND = 1.5  # how far the speed may lie outside the two ratios


@dataclass(frozen=True, kw_only=True)
class RelativeSpeed:
    """A GPU's speed relative to another one, with its 95 % range."""

    speed: float
    least: float
    most: float


def relative_speed(device: str, model: str | None) -> RelativeSpeed | None:
    """The speed of a GPU ``model`` relative to the probed ``device``; None if the table does not hold both."""
    base, other = _sheet(device), _sheet(model or "")
    if base is None or other is None:
        return None
    ratios = [there / here for here, there in zip(base, other, strict=True)]
    return RelativeSpeed(speed=math.sqrt(math.prod(ratios)), least=min(ratios) / BEYOND, most=max(ratios) * BEYOND)


def _sheet(name: str) -> tuple[float, float] | None:
    words = re.split(r"[\s-]+", name.upper())
    return next((sheet for model, sheet in DATA_SHEETS.items() if model in words), None)


COMPUTE = TIMES[:2]  # alpha and beta of the computation: these scale with the GPU's speed


@dataclass(frozen=True, kw_only=True)
class DeviceSpeeds:
    """What the user said about the planned GPUs: ``by_type`` and ``of_all`` relative to the profile's device, or ``step``, the compute
    terms of all of them."""

    profile: Profile
    by_type: Mapping[str, float]
    of_all: float | None
    step: tuple[float, float] | None

    @staticmethod
    def of(
        profile: Profile,
        gpu_speed: float | Mapping[str, float] | None,
        step: tuple[float, float] | None,
        gpu_types: Sequence[str],
    ) -> DeviceSpeeds:
        """Raises ConfigError for a speed out of its range, of a type that is not planned, or beside a step."""
        if step is not None and gpu_speed:
            raise ConfigError(
                f"{argument('gpu_speed')} and {argument('step')} both say how fast the planned GPU is: drop one of them."
            )
        speeds = gpu_speed if isinstance(gpu_speed, Mapping) else {}
        for name in speeds:
            if name not in gpu_types:
                raise ConfigError(
                    f"{argument('gpu_speed')} names {name}, which is none of the GPU types {', '.join(gpu_types)}. Name one of these."
                )
        return DeviceSpeeds(
            profile=profile,
            by_type={name: _speed(f"gpu_speed of {name}", value) for name, value in speeds.items()},
            of_all=None if gpu_speed is None or isinstance(gpu_speed, Mapping) else _speed("gpu_speed", gpu_speed),
            step=step,
        )

    def step_on(self, host: NodeType, gpu_of: NodeType) -> StepRange:
        """The step time on nodes of type ``host``, whose GPU is that of ``gpu_of``.

        Raises ConfigError if nobody knows its speed.
        """
        known = self.profile.synchronisation.on(host, self.profile.step_time)
        speed = self._speed_of(gpu_of)
        # A prior of the terms, or the user's own, replaces what a fit left open about them.
        assumed = [name for name, sure in self._sure().items() if not sure]
        compute = 0.0 if self.step is not None else 1 / speed.speed
        scales = [0.0 if name in assumed else compute if name in COMPUTE else 1.0 for name in PARAMETERS]
        uncertainty = replace(
            self.profile.uncertainty,
            step_directions=tuple(
                tuple(scale * value for scale, value in zip(scales, row, strict=True))
                for row in self.profile.uncertainty.step_directions
            ),
        )
        if self.step is not None:
            alpha, beta = self.step
            step_time = replace(known.step_time, alpha_compute=alpha, beta_compute=beta)
            ends = [tuple(replace(e, alpha_compute=alpha, beta_compute=beta) for e in pair) for pair in known.ends]
        else:
            step_time = known.step_time.on_faster_device(speed.speed)
            ends = [tuple(e.on_faster_device(speed.speed) for e in pair) for pair in known.ends]
            if speed.least < speed.most:
                ends.append(tuple(known.step_time.on_faster_device(factor) for factor in (speed.most, speed.least)))
        return StepRange(step_time=step_time, ends=tuple((fast, slow) for fast, slow in ends), uncertainty=uncertainty)

    def from_data_sheets(self, hosts: Sequence[NodeType]) -> dict[str, RelativeSpeed]:
        """The speeds of those ``hosts`` that only data sheets tell, by name."""
        if self.step is not None:
            return {}
        speeds = {host.name: self._speed_of(host) for host in hosts}
        return {name: speed for name, speed in speeds.items() if speed.least < speed.most}

    def _sure(self) -> dict[str, bool]:
        known = self.profile.synchronisation
        return {
            **dict.fromkeys(("alpha_intra", "beta_intra"), known.intra),
            **dict.fromkeys(("alpha_inter", "beta_inter"), known.inter),
            "gamma": known.intra or known.inter,
        }

    def _speed_of(self, host: NodeType) -> RelativeSpeed:
        """What the user said, then the catalog, then the data sheets."""
        device, said = self.profile.device, self.by_type.get(host.name, self.of_all)
        if self.step is not None:
            return _exactly(1.0)
        if said is not None:
            return _exactly(said)
        if device is not None and host.is_model_of(device):
            return _exactly(1.0)
        if host.gpu_speed is not None:
            return _exactly(host.gpu_speed)
        if device is None:
            return _exactly(1.0)
        by_sheet = relative_speed(device, host.gpu_model)
        if by_sheet is not None:
            return by_sheet
        gpu = host.gpu_model or "a GPU of unknown model"
        raise ConfigError(
            f"the profile's step was measured on {device}, and {host.name} has {gpu}: give its speed relative to {device} "
            f"({argument('gpu_speed', 40)}: 40 times as fast) or its own step "
            f"({argument('step', 'ALPHA,BETA', python='step=(ALPHA, BETA)')}: seconds per micro-batch and per sample), or "
            "probe there."
        )


def _exactly(speed: float) -> RelativeSpeed:
    return RelativeSpeed(speed=speed, least=speed, most=speed)


def _speed(name: str, value: float) -> float:
    return check_number(name, value, least=1e-4, most=1e4, sane="such as 1.5")
