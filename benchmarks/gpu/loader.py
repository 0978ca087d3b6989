"""Batches of `offload.DataLoader` in pinned memory, and on the device."""

from typing import Any

import torch

import offload
from benchmarks.gpu import training
from benchmarks.gpu.place import Found, Place, expect

BATCH, SAMPLES = 16, 64


def loader(place: Place) -> Found:
    """With ``pin_memory``, batches lie in pinned memory; with ``on_device``, they come on the GPU. All equal the data set's samples."""
    data = training.Stripes(SAMPLES)
    pinned: list[bool] = []
    devices: list[str] = []
    with place.ray():
        plain: offload.DataLoader[Any] = offload.DataLoader(data, batch_size=BATCH, pin_memory=place.device == "cuda")
        for number, batch in enumerate(plain):
            pinned.append(batch["image"].is_pinned())
            _equal(data, number, batch["image"].to(place.device, non_blocking=True))
        moved: offload.DataLoader[Any] = offload.DataLoader(data, batch_size=BATCH, on_device=_doubled)
        for number, batch in enumerate(moved):
            devices.append(batch["image"].device.type)
            _equal(data, number, batch["image"] / 2)
    figures: dict[str, Any] = {"batches": len(pinned), "pinned": sum(pinned), "devices": sorted(set(devices))}
    place.so_far(figures)
    expect(set(devices) == {place.device}, f"batches with on_device came on {', '.join(figures['devices'])}")
    if place.device == "cpu":
        return Found(said="batches equal the data set; without a GPU nothing is pinned", figures=figures)
    expect(all(pinned), f"{len(pinned) - sum(pinned)} of {len(pinned)} batches do not lie in pinned memory")
    return Found(said=f"{len(pinned)} batches in pinned memory, {len(devices)} on the GPU, all equal", figures=figures)


def _doubled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "image": batch["image"] * 2}


def _equal(data: training.Stripes, number: int, images: torch.Tensor) -> None:
    expected = torch.stack([torch.from_numpy(data[number * BATCH + i]["image"]) for i in range(len(images))])
    expect(torch.equal(images.cpu(), expected), f"batch {number} differs from the data set's samples")
