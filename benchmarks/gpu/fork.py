"""Processes that are forked with torch imported use the GPU."""

import psutil
import torch

import offload
from benchmarks.gpu import training
from benchmarks.gpu.place import Found, Place, expect


def train(ctx: offload.Context) -> None:
    """A step on the device, and where this process comes from."""
    parent = psutil.Process().parent()
    forked = parent is not None and any("preload" in part and "server.py" in part for part in parent.cmdline())
    model = training.network()
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for batch in ctx.steps(2):
        ctx.backward(model(batch["image"]).square().mean())
        ctx.step()
    training.answer(ctx, {"forked": forked, "device": ctx.device.type, "sum": float(training.weights(model).sum())})


def fork(place: Place) -> Found:
    """A worker that offload's preload server forked after ``import torch`` trains on the device."""
    with place.ray():
        told, _ = training.fit(
            place,
            train,
            name="fork",
            datasets={"train": offload.from_torch(training.Stripes(64))},
            batch_size=16,
            workers=1,
        )
    expect(told["forked"], "the worker was not forked from offload's preload server, so that nothing was checked")
    expect(told["device"] == place.device, f"the forked worker trained on {told['device']}")
    where = "the GPU" if place.device == "cuda" else "the CPU"
    return Found(said=f"a forked worker trains on {where}", figures=told)
