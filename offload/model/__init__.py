"""The joint model of accelerators and their input, and the planner that uses it. Pure: no clock, no I/O, no torch, no ray.

A map: :mod:`step_time` and :mod:`fit` (the accelerators), :mod:`noise` (the value of a larger batch), :mod:`input_rate` and
:mod:`catalog` (the input side of a shape), :mod:`goodput` (both together), :mod:`profile` (the result of a probe),
:mod:`planner` with :mod:`search` (which shape to rent), :mod:`placement` (where workers fit on a cluster that exists).
"""

from __future__ import annotations

from offload.model.catalog import Catalog, NodeType, Shape
from offload.model.fit import StepTimeFit, fit_step_time
from offload.model.goodput import JointGoodput
from offload.model.input_rate import InputRate
from offload.model.noise import GradientNoise
from offload.model.planning.planner import plan
from offload.model.planning.plans import Candidate, Plan
from offload.model.profile import Profile
from offload.model.step_time import StepTime

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
