"""The joint model of accelerators and their input, and the planner that uses it. Pure: no clock, no I/O, no torch, no ray.

A map: :mod:`step_time` and :mod:`fit` (the accelerators), :mod:`noise` (the value of a larger batch), :mod:`input_rate` and
:mod:`catalog` (the input side of a shape), :mod:`goodput` (both together), :mod:`profile` (the result of a probe),
:mod:`planner` with :mod:`search` (which shape to rent), :mod:`placement` (where workers fit on a cluster that exists),
:mod:`allocation` (who holds what of a cluster that many runs share).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.model.catalog import Catalog, NodeType, Shape
    from offload.model.fit import StepTimeFit, fit_step_time
    from offload.model.goodput import JointGoodput
    from offload.model.input_rate import InputRate
    from offload.model.noise import GradientNoise
    from offload.model.planning.planner import plan
    from offload.model.planning.plans import Candidate, Plan
    from offload.model.profile import Profile
    from offload.model.step_time import StepTime

# Imported at first use: a DataLoader checks its arguments with a module of this package, and needs no planner for it.
_HOMES = {
    "Candidate": "planning.plans",
    "Catalog": "catalog",
    "GradientNoise": "noise",
    "InputRate": "input_rate",
    "JointGoodput": "goodput",
    "NodeType": "catalog",
    "Plan": "planning.plans",
    "Profile": "profile",
    "Shape": "catalog",
    "StepTime": "step_time",
    "StepTimeFit": "fit",
    "fit_step_time": "fit",
    "plan": "planning.planner",
}

__all__ = [
    "Candidate",
    "Catalog",
    "GradientNoise",
    "InputRate",
    "JointGoodput",
    "NodeType",
    "Plan",
    "Profile",
    "Shape",
    "StepTime",
    "StepTimeFit",
    "fit_step_time",
    "plan",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"offload.model.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'offload.model' has no attribute {name!r}")
