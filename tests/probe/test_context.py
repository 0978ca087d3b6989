"""A probe compares the gradients of batches: one for each batch, over all parameters, whatever the loop does within it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.probe.probe_context import ProbeContext
from offload.train.worker.ends import StopRun


def probing(*models: torch.nn.Module) -> tuple[ProbeContext, torch.optim.Optimizer]:
    """A context that compares gradients of these models' parameters."""
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)

    def backward(loss: torch.Tensor, *, retain_graph: bool, exchanges: bool) -> None:
        loss.backward(retain_graph=retain_graph)

    loop: Any = SimpleNamespace(
        state=SimpleNamespace(optimizers=[optimizer], scaler=None),
        stepper=SimpleNamespace(joined=SimpleNamespace(backward=backward, begin_batch=lambda exchanges: None)),
    )
    ctx = ProbeContext(loop)
    ctx._comparing = True
    optimizer.register_step_pre_hook(ctx._before_step)
    return ctx, optimizer


def expected(gradients: list[torch.Tensor]) -> list[tuple[float, float]]:
    """Each gradient's squared norm, and its scalar product with the sum of those before it."""
    return [(float(g @ g), float(g @ sum(gradients[:at], torch.zeros_like(g)))) for at, g in enumerate(gradients)]


def flat(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The gradient of a loss as one vector, zero where the loss does not reach."""
    parameters = optimizer.param_groups[0]["params"]
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return torch.cat([(p * 0 if g is None else g).reshape(-1).detach() for p, g in zip(parameters, found, strict=True)])


@pytest.mark.parametrize("plain", [False, True])
def test_several_losses_of_a_batch_are_one_gradient(plain: bool) -> None:
    body, first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3), torch.nn.Linear(2, 5)
    ctx, optimizer = probing(body, first, second)
    before = [p.detach().clone() for p in body.parameters()]
    gradients = []
    for _ in range(3):
        ctx._open = True
        hidden = body(torch.randn(4, 2))
        losses = first(hidden).mean(), second(hidden).square().mean()
        gradients.append(flat(losses[0] + losses[1], optimizer))
        for loss in losses:
            ctx.backward(loss, retain_graph=True)
        if plain:
            optimizer.step()
        else:
            assert not ctx.step()
    assert [x for pair in ctx.gradients for x in pair] == pytest.approx(
        [x for pair in expected(gradients) for x in pair], rel=1e-5
    )
    assert all(map(torch.equal, before, body.parameters())), "gradients compare at equal parameters"


def test_layers_that_a_batch_leaves_out_have_no_gradient_there() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    ctx, optimizer = probing(layers)
    gradients = []
    for kept in ((0, 2), (0, 1, 2), (1, 2), (0, 1)):
        ctx._open = True
        hidden = torch.randn(4, 2)
        for number in kept:
            hidden = layers[number](hidden)
        gradients.append(flat(hidden.mean(), optimizer))
        ctx.backward(hidden.mean())
        ctx.step()
    assert [x for pair in ctx.gradients for x in pair] == pytest.approx(
        [x for pair in expected(gradients) for x in pair], rel=1e-5, abs=1e-7
    )


def test_a_skipped_batch_has_no_gradient() -> None:
    model = torch.nn.Linear(2, 2)
    ctx, _ = probing(model)
    ctx._open = True
    ctx.skip()
    ctx.step()
    assert ctx.gradients == []


def test_steps_count_so_that_a_loop_does_not_log_or_validate_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, _ = probing(torch.nn.Linear(2, 2))
    monkeypatch.setattr(ctx, "_replayed", lambda: iter([({}, 1)] * 3))
    seen = []

    def train() -> None:
        for _ in ctx._replays("train", ()):
            ctx.skip()
            seen.append(ctx.global_step)

    with pytest.raises(StopRun):
        train()
    assert seen == [1, 2, 3]
