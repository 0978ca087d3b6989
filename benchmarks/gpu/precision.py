"""Training in fp32, fp16 and bf16 through the Trainer."""

import math
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import offload
from benchmarks.gpu import training
from benchmarks.gpu.place import Found, Place, expect

PRECISIONS = {"fp32": "torch.float32", "fp16": "torch.float16", "bf16": "torch.bfloat16"}


def train(ctx: offload.Context) -> None:
    """A few steps. With a scaler, one of them overflows: its weights must stay, and its scale must shrink."""
    steps = ctx.config["steps"]
    model = training.network()
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    scaler = ctx._loop.state.scaler
    losses, dtype, forced = [], "", None
    for number, batch in enumerate(ctx.steps(steps)):
        with ctx.autocast():
            made = model(batch["image"])
            loss = cross_entropy(made, batch["label"])
        dtype = str(made.dtype)
        losses.append(loss.item())
        if scaler is None or number != steps // 2:
            ctx.backward(loss)
            ctx.step()
            continue
        before, scale = training.weights(model), scaler.get_scale()
        ctx.backward(loss * float("inf"))
        ctx.step()
        kept = bool(torch.equal(before, training.weights(model)))
        forced = {"weights_kept": kept, "scale_before": scale, "scale_after": scaler.get_scale()}
    training.answer(ctx, {"losses": losses, "dtype": dtype, "overflow": forced, "device": ctx.device.type})


def precision(place: Place) -> Found:
    """The loss is finite and falls in every precision; the forced overflow of fp16 skips one step, and training goes on."""
    figures: dict[str, Any] = {}
    with place.ray():
        for name, dtype in PRECISIONS.items():
            told, _ = training.fit(
                place,
                train,
                name=name,
                datasets={"train": offload.from_torch(training.Stripes(place.pick(2048, 256)))},
                batch_size=place.pick(64, 16),
                workers=1,
                precision=name,
                train_loop_config={"steps": place.pick(60, 24)},
            )
            losses = told["losses"]
            quarter = len(losses) // 4
            first, last = (sum(part) / quarter for part in (losses[:quarter], losses[-quarter:]))
            figures[name] = {
                "steps": len(losses),
                "first_loss": first,
                "last_loss": last,
                "dtype": told["dtype"],
                "overflow": told["overflow"],
            }
            place.so_far(figures)
            expect(told["device"] == place.device, f"{name} trained on {told['device']}")
            expect(all(map(math.isfinite, losses)), f"a loss of {name} is not finite")
            expect(last < 0.9 * first, f"the loss of {name} does not fall: {first:.3f}, then {last:.3f}")
            expect(told["dtype"] == dtype, f"under {name}, the model computed in {told['dtype']}")
    forced = figures["fp16"]["overflow"]
    expect(forced is not None, "fp16 trained without a GradScaler")
    expect(forced["weights_kept"], "the step that overflowed changed the weights")
    expect(forced["scale_after"] < forced["scale_before"], "the overflow did not shrink the scale")
    said = ", ".join(f"{name} {each['first_loss']:.2f} → {each['last_loss']:.2f}" for name, each in figures.items())
    return Found(said=f"loss {said}; the fp16 overflow skipped its step", figures=figures)
