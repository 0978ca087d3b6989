"""Learning rates that follow the batch, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.errors import RunError
from offload.train.config import Adaptation, BatchSize
from offload.train.worker.steps.batch_scaling import BatchScaling


def scaling(rule: Any) -> BatchScaling:
    return BatchScaling(BatchSize(initial=8, max=64), Adaptation(learning_rate=rule), workers=1)


class Own(torch.optim.Optimizer):
    """An optimizer that finds the length of its steps itself."""

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, defaults)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1))


def test_rates_are_scaled_for_a_step_and_then_as_before() -> None:
    optimizer = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()], "lr": torch.tensor(0.5)}], lr=0.1)
    scaled = scaling("linear")
    scaled.adopt([optimizer])
    with scaled.scaled_rates(32, 0.0):
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.4, 2.0])
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.5])


@pytest.mark.parametrize("defaults", [{}, {"lr": None}])
def test_an_optimizer_without_a_rate_needs_the_rule_that_leaves_rates_alone(defaults: dict[str, Any]) -> None:
    optimizer = Own([parameter()], **defaults)
    with pytest.raises(
        RunError, match=r"but Own has a parameter group without a learning rate.*learning_rate=\"none\""
    ):
        scaling("auto").adopt([optimizer])
    alone = scaling("none")
    alone.adopt([optimizer])
    with alone.scaled_rates(32, 0.0):
        assert optimizer.param_groups[0].get("lr") is None
