"""The largest local batch that fits: as the probe finds it, and as a run finds it that ran out of memory."""

from typing import Any

import torch

import offload
from benchmarks.gpu.place import Found, Place, expect, read_lines
from offload.measure.sizes import largest_that_fits
from offload.probe.driver import probe
from offload.report.run_dir import EVENTS
from tests.emulation.numbers import Line

LAYERS = 8
ROWS_THAT_FIT = 128  # about so many samples fill the GPU, whatever its memory
FEW = 4  # as many "fit" in the stand-in


class Hungry(torch.nn.Module):
    """A model of one parameter whose samples each take a share of the GPU's memory."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (x * self.scale)[:, None].expand(-1, self.numbers)
        for _ in range(LAYERS):
            wide = wide.sin()  # each keeps its input for backward
        return wide.mean(1)


def train(ctx: offload.Context) -> None:
    """One epoch. In the stand-in, more than a few samples raise what torch raises on a GPU."""
    numbers, few = 16, ctx.config.get("few")
    if ctx.device.type == "cuda":
        total = torch.cuda.get_device_properties(ctx.device).total_memory
        numbers = total // (ROWS_THAT_FIT * (LAYERS + 2) * 4)
    model: torch.nn.Module = Hungry(numbers)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _epoch in ctx.epochs(1):
        for batch in ctx.batches("train"):
            if few is not None and len(batch["x"]) > few:
                raise torch.OutOfMemoryError("CUDA out of memory, says the stand-in")
            ctx.backward(model(batch["x"][:, 0]).mean())
            ctx.step()


def memory(place: Place) -> Found:
    """A batch of the probe's bound fits. Twice as much does not: the run halves it, and trains every sample."""
    with place.ray():
        figures = _bound(place)
        bound = figures["largest_local_batch"] or FEW
        if place.device == "cuda":
            figures["at_the_bound"] = _run(place, "bound", bound)
            place.so_far(figures)
            expect(not figures["at_the_bound"]["out_of_memory"], f"the probe's bound of {bound} samples does not fit")
        figures["over_the_bound"] = over = _run(place, "over", 2 * bound, few=place.pick(None, FEW))
    figures["out_of_memory_raised_by"] = place.pick("the GPU", "the stand-in")
    place.so_far(figures)
    expect(bool(over["out_of_memory"]), f"{2 * bound} samples fit, twice the probe's bound of {bound}")
    expect(over["local_batch_size"] <= bound, f"the run went on with {over['local_batch_size']} samples, over {bound}")
    expect(over["trained"] == over["samples"], f"{over['trained']} of {over['samples']} samples were trained")
    halved = " → ".join(str(each) for each in [over["out_of_memory"][0][0], *(to for _, to in over["out_of_memory"])])
    if place.device == "cpu":
        return Found(said=f"the stand-in's error halves the batch: {halved}; no bound without a GPU", figures=figures)
    return Found(said=f"{bound} samples fit, as probed; out of memory above: {halved}", figures=figures)


def _trainer(samples: int, batch_size: int, **config: Any) -> offload.Trainer:
    data = offload.from_torch(Line(samples, noise=1.0))
    return offload.Trainer(train, datasets={"train": data}, workers=1, batch_size=batch_size, train_loop_config=config)


def _bound(place: Place) -> dict[str, Any]:
    """What the probe measures, and the largest batch that it concludes; None on a CPU, whose memory it does not fill."""
    wanted = place.pick(ROWS_THAT_FIT // 2, 2 * FEW)
    known = {"workload": "gpu_check", "measured": {}}
    found = probe(_trainer(1024, wanted), address=None, quiet=True, known=known)
    expect(found is not None, "the probe was interrupted")
    assert found is not None
    steps = [{"size": each.size, "peak_bytes": each.peak_bytes, "step_s": each.step_s} for each in found.steps]
    figures = {
        "device_memory_bytes": found.device_memory_bytes,
        "probed": steps,
        "largest_local_batch": largest_that_fits(found.steps, found.device_memory_bytes),
    }
    place.so_far(figures)
    expect(figures["largest_local_batch"] is not None or place.device == "cpu", "the probe found no bound")
    return figures


def _run(place: Place, name: str, batch_size: int, *, few: int | None = None) -> dict[str, Any]:
    """A run of four such batches: which ones ran out of memory, with the size that followed, and what was trained."""
    samples = 4 * batch_size
    result = _trainer(samples, batch_size, few=few).fit(run_dir=place.folder / name, quiet=True)
    events = [each for each in read_lines(result.run_dir / EVENTS) if each["event"] == "out_of_memory"]
    return {
        "batch_size": batch_size,
        "samples": samples,
        "trained": result.document["samples"],
        "local_batch_size": result.document["local_batch_size"],
        "out_of_memory": [(each["did_not_fit"], each["local_batch_size"]) for each in events],
    }
