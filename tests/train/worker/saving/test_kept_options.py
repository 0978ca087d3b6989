"""A run that goes on from another one's checkpoint keeps its own options, at the same place of its schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from offload.train.worker.saving.kept_options import KeptOptions

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "warmup": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: min(epoch / 3, 1.0)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=7),
}


def made(rate: float, schedule: str) -> tuple[torch.optim.Optimizer, Any]:
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))]
    groups = [{"params": [weights[0]], "lr": rate}, {"params": [weights[1]], "lr": rate / 2}]
    optimizer = torch.optim.SGD(groups, momentum=rate / 10)
    return optimizer, SCHEDULES[schedule](optimizer)


def trained(optimizer: torch.optim.Optimizer, scheduler: Any, epochs: int) -> list[list[float]]:
    rates = []
    for _ in range(epochs):
        optimizer.step()
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(theirs=st.floats(1e-4, 1.0), ours=st.floats(1e-4, 1.0), before=st.integers(0, 6), after=st.integers(1, 6))
def test_a_schedule_goes_on_with_the_rates_of_the_new_run(
    schedule: str, theirs: float, ours: float, before: int, after: int
) -> None:
    donor, donors = made(theirs, schedule)
    trained(donor, donors, before)
    states = copy.deepcopy((donor.state_dict(), donors.state_dict()))
    whole = trained(*made(ours, schedule), before + after)

    optimizer, scheduler = made(ours, schedule)
    kept = KeptOptions([optimizer], [scheduler])
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    kept.apply()
    assert optimizer.param_groups[0]["momentum"] == ours / 10
    rest = trained(optimizer, scheduler, after)
    assert rest == [pytest.approx(rates, rel=1e-6, abs=1e-12) for rates in whole[before:]]


def test_without_a_schedule_the_new_rate_counts() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    donor, optimizer = torch.optim.Adam([weight], lr=0.1), torch.optim.Adam([weight], lr=0.3)
    kept = KeptOptions([optimizer], [object()])
    optimizer.load_state_dict(donor.state_dict())
    kept.apply()
    assert optimizer.param_groups[0]["lr"] == 0.3
