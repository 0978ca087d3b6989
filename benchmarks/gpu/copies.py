"""Copies from the host to the GPU, as offload's delivery makes them."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.place import Found, Place, expect
from offload.pipeline.blocks.wire import Columns
from offload.pipeline.order.ranges import Ranges
from offload.train.worker.data.cutting import Cut
from offload.train.worker.data.delivery import Delivery

REPEATS = 5
LEAST_OVERLAP = 0.5
PIXELS = 224 * 224 * 3


def copies(place: Place) -> Found:
    """GB/s of pageable, pinned and delivered batches, and the share of a delivery's copy that runs beside computing."""
    rows = place.pick(2048, 8)
    blocks = [np.random.default_rng(i).integers(0, 256, (rows // 2, PIXELS), dtype=np.uint8) for i in range(2)]
    ids = [np.arange(rows // 2) + i * (rows // 2) for i in range(2)]
    pieces: tuple[Columns, ...] = tuple(
        {"image": block, "sample_id": each} for block, each in zip(blocks, ids, strict=True)
    )
    cut = Cut(pieces=pieces, rows=rows, weight=rows, positions=Ranges(((0, rows),)))
    delivery = Delivery(torch.device(place.device))
    delivered, event = delivery.deliver(cut)
    delivery.arrived(delivered, event)
    whole = np.concatenate(blocks)
    expect(bool((delivered["image"].cpu().numpy() == whole).all()), "a delivered batch differs from its blocks")
    expect(delivered["image"].device.type == place.device, f"a batch arrived on {delivered['image'].device}")
    gb = whole.nbytes / 1e9
    figures: dict[str, Any] = {"batch_mb": round(gb * 1000, 1), "repeats": REPEATS}
    if place.device == "cpu":
        return Found(said="a delivered batch equals its blocks; no copy to a GPU was made", figures=figures)
    pageable = torch.from_numpy(whole)
    pinned = pageable.pin_memory()
    figures["pageable_gb_per_s"] = gb / _seconds(lambda: pageable.to("cuda"))
    figures["pinned_gb_per_s"] = gb / _seconds(lambda: pinned.to("cuda", non_blocking=True))
    figures["delivered_gb_per_s"] = gb / _seconds(lambda: delivery.deliver(cut))  # joining in pinned memory included
    place.so_far(figures)
    figures |= _overlap(pinned)
    place.so_far(figures)
    expect(
        figures["overlap_share"] >= LEAST_OVERLAP,
        f"only {figures['overlap_share']:.0%} of a copy runs beside computing, under {LEAST_OVERLAP:.0%}",
    )
    return Found(
        said=f"pageable {figures['pageable_gb_per_s']:.1f}, pinned {figures['pinned_gb_per_s']:.1f}, delivered "
        f"{figures['delivered_gb_per_s']:.1f} GB/s; {figures['overlap_share']:.0%} of a copy overlaps computing",
        figures=figures,
    )


def _overlap(pinned: torch.Tensor) -> dict[str, float]:
    """The share of the shorter of copying and computing that is hidden by the longer. The copy is the one of a delivery whose batch
    is in pinned memory."""
    ready = Delivery(torch.device("cuda"), collate_fn=lambda samples: {"image": pinned})
    one = Cut(samples=(0,), ids=(0,), rows=1, weight=1, positions=Ranges(((0, 1),)))
    factors = torch.randn(2, 4096, 4096, device="cuda")

    def copy() -> None:
        for _ in range(4):
            ready.deliver(one)

    def compute() -> None:
        for _ in range(products):
            torch.mm(factors[0], factors[1])

    def both() -> None:
        compute()  # queued, and under way while the copies are
        copy()

    copy_s = _seconds(copy)
    products = 10
    products = max(round(10 * copy_s / _seconds(compute)), 1)  # about as long as the copies
    compute_s, both_s = _seconds(compute), _seconds(both)
    hidden = (copy_s + compute_s - both_s) / min(copy_s, compute_s)
    return {"copy_s": copy_s, "compute_s": compute_s, "both_s": both_s, "overlap_share": min(max(hidden, 0.0), 1.0)}


def _seconds(action: Callable[[], object]) -> float:
    """The median seconds of an action, until the GPU has done it."""
    seconds = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
