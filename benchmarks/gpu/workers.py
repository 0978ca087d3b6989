"""Two workers on two GPUs."""

from typing import Any

import ray.train
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import offload
from benchmarks.gpu import training
from benchmarks.gpu.place import Found, Place, expect

MOMENTUM = 0.1  # of the running mean


def train(ctx: offload.Context) -> None:
    """A few steps; then all workers' weights, as one vector each."""
    model = training.network()
    if ctx.config["sync"]:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    norm = next(each for each in model.modules() if isinstance(each, torch.nn.modules.batchnorm._BatchNorm))
    seen: list[tuple[torch.Tensor, int]] = []
    means: list[torch.Tensor] = []

    def note(module: torch.nn.Module, given: tuple[torch.Tensor], made: torch.Tensor) -> None:
        if not seen:
            seen.append((given[0].detach().mean((0, 2, 3)).cpu(), len(given[0])))
            means.append(norm.running_mean.detach().cpu().clone())  # type: ignore[union-attr]

    norm.register_forward_hook(note)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    losses = []
    for batch in ctx.steps(ctx.config["steps"]):
        loss = cross_entropy(model(batch["image"]), batch["label"])
        losses.append(loss.item())
        ctx.backward(loss)
        ctx.step()
    vectors, parts, norms = ctx.gather(training.weights(model)), ctx.gather(seen[0]), ctx.gather(means[0])
    rows = sum(count for _, count in parts)
    expected = MOMENTUM * sum(mean * (count / rows) for mean, count in parts)
    document = {
        "backend": dist.get_backend(),
        "workers": ctx.world_size,
        "devices": ctx.gather(str(ctx.device)),
        "largest_difference": max(float((each - vectors[0]).abs().max()) for each in vectors),
        # Without SyncBatchNorm, each worker has the mean of its own part.
        "norm_difference": max(float((each - expected).abs().max()) for each in norms) if ctx.config["sync"] else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    training.answer(ctx, document)


def _two(place: Place, *, sync: bool) -> dict[str, Any]:
    with place.ray():
        told, _ = training.fit(
            place,
            train,
            name="two",
            datasets={"train": offload.from_torch(training.Stripes(place.pick(2048, 256)))},
            batch_size=place.pick(128, 16),
            workers=2,
            # The stand-in has few cores, and preprocessing needs one of them.
            scaling_config=place.pick(None, ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5})),
            train_loop_config={"sync": sync, "steps": place.pick(40, 8)},
        )
    figures: dict[str, Any] = told
    place.so_far(figures)
    expect(figures["workers"] == 2, f"{figures['workers']} workers trained")
    expect(figures["largest_difference"] == 0.0, f"weights differ by {figures['largest_difference']:g} between workers")
    return figures


def nccl(place: Place) -> Found:
    """Two workers exchange gradients, and have the same weights. With NCCL on GPUs; with gloo in the stand-in."""
    if place.device == "cuda":
        place.need_two_gpus()
    figures = _two(place, sync=False)
    wanted = place.pick("nccl", "gloo")
    expect(wanted in figures["backend"], f"the workers talk through {figures['backend']}")
    return Found(said=f"two workers have equal weights after training through {figures['backend']}", figures=figures)


def sync_batch_norm(place: Place) -> Found:
    """After the first batch, each worker's SyncBatchNorm has the mean of the global batch."""
    place.need_two_gpus()
    figures = _two(place, sync=True)
    expect(
        figures["norm_difference"] < 1e-4,
        f"a worker's running mean differs from the global batch's by {figures['norm_difference']:g}",
    )
    return Found(said="both workers' running means are those of the global batch", figures=figures)
