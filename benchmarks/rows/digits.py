"""The training of `benchmarks/adaptation.py`: scikit-learn's handwritten digits (8 × 8), a small CNN and a small ViT, on a paced
accelerator. Some cases also pace the preprocessing."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.datasets
import torch
from timm.models.vision_transformer import VisionTransformer

import offload
from offload.paced import PacedAccelerator

HELD_OUT = 5  # every fifth sample is held out
EVALUATED_S = 2.0  # between two evaluations on the held-out samples


class Digits(torch.utils.data.Dataset[Any]):
    """The training part, ``repeats`` times in a pass. Each sample occupies its core for ``pace_s`` seconds without using the CPU."""

    def __init__(self, pace_s: float, repeats: int = 1) -> None:
        self._pace_s, self._repeats = pace_s, repeats
        self._images, self._labels = digits(held_out=False)

    def __len__(self) -> int:
        return self._repeats * len(self._labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        if self._pace_s:
            _occupy_core(self._pace_s)
        one = i % len(self._labels)
        return {"image": self._images[one], "label": self._labels[one]}


_process_time = time.process_time
_occupied_s = 0.0


def _occupy_core(seconds: float) -> None:
    """Sleep, and count the time as this process's CPU time. So offload measures it as the core's work, and it bounds the input's rate."""
    global _occupied_s
    time.sleep(seconds)
    _occupied_s += seconds
    time.process_time = lambda: _process_time() + _occupied_s


def digits(*, held_out: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return images (float32 of shape (n, 1, 8, 8), in [0, 1]) and labels."""
    found = sklearn.datasets.load_digits()
    chosen = (np.arange(len(found.target)) % HELD_OUT == 0) == held_out
    images = (found.images[chosen, None] / 16).astype(np.float32)
    return images, found.target[chosen].astype(np.int64)


def model(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model, and its optimizer with the learning rate for the initial batch."""
    if name == "vit":
        vit = VisionTransformer(
            img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=48, depth=3, num_heads=4
        )
        return vit, torch.optim.AdamW(vit.parameters(), lr=1e-3)
    cnn = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(32 * 16, 10),
    )  # fmt: skip
    return cnn, torch.optim.SGD(cnn.parameters(), lr=0.02, momentum=0.9)


def train(ctx: offload.Context) -> None:
    """Train. Every few seconds rank 0 writes a line with the time and the accuracy on the held-out samples."""
    config = ctx.config
    torch.set_num_threads(1)
    net, optimizer = model(config["model"])
    net, optimizer = ctx.prepare(net, optimizer)
    accelerator = PacedAccelerator(config["alpha_s"], config["beta_s"])
    plain = getattr(net, "module", net)
    images, labels = map(torch.from_numpy, digits(held_out=True))
    log = Path(config["log"])
    looked = time.monotonic()

    def look() -> None:
        nonlocal looked
        began = time.monotonic()
        plain.eval()
        with torch.no_grad():
            accuracy = float((plain(images).argmax(1) == labels).float().mean())
        plain.train()
        looked = time.monotonic()
        _write(ctx, log, {"accuracy": accuracy, "spent_s": looked - began})

    _write(ctx, log, {"began": True})
    net.train()
    for _ in ctx.epochs(config["epochs"]):
        for batch in ctx.batches("train"):
            if ctx.rank == 0 and time.monotonic() - looked >= EVALUATED_S:
                look()
            accelerator.step(len(batch["label"]))
            ctx.backward(torch.nn.functional.cross_entropy(net(batch["image"]), batch["label"]))
            ctx.step()
    if ctx.rank == 0:
        look()


def _write(ctx: offload.Context, log: Path, values: dict[str, Any]) -> None:
    if ctx.rank == 0:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.time(), "workers": ctx.world_size, **values}) + "\n")
