"""The demo, which trains a ResNet on real JPEGs, preprocessed by every CPU of this machine.

It is the same program as ``examples/image_classification.py``, with generated data.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import offload
from offload.demo_data import DemoData, make_demo_data

PIXELS = 48
BATCH_SIZE = 32


def make_data(folder: Path, images: int, console: Console) -> DemoData:
    """Make the data set, unless it exists, and show how far it is. Raises ConfigError if it cannot be written."""
    words = f"drawing {images:,} JPEG files"
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(words, total=images)

        def tell(done: int, total: int) -> None:
            if done == 1 and not console.is_terminal:
                console.print(words)
            progress.update(task, completed=done, total=total)

        return make_demo_data(folder, images, progress=tell)


def build_demo(images_made: DemoData, *, epochs: int) -> offload.Trainer:
    """A Trainer for the data set."""
    return offload.Trainer(
        train,
        datasets={
            "train": offload.image_folder(images_made.train, training_transform()),
            "val": offload.image_folder(images_made.val, validation_transform()),
        },
        batch_size=BATCH_SIZE,
        checkpoints=offload.Checkpoints(keep=2),
        train_loop_config={
            "epochs": epochs,
            "classes": images_made.classes,
            "steps": epochs * -(-images_made.train_images // BATCH_SIZE),
        },
    )


def training_transform() -> Any:
    """Augmentation that keeps the digit complete: a small shift, and colours. The last two steps run on the device."""
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.Resize((PIXELS + 8, PIXELS + 8), antialias=True),
            v2.RandomCrop(PIXELS),
            v2.ColorJitter(0.3, 0.3, 0.3),
            v2.ToImage(),
            v2.ToDtype(_float32(), scale=True),
            v2.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )


def validation_transform() -> Any:
    """The same transform without randomness."""
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.Resize((PIXELS, PIXELS), antialias=True),
            v2.ToImage(),
            v2.ToDtype(_float32(), scale=True),
            v2.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )


def _float32() -> Any:
    import torch

    return torch.float32


def training_step(device: Any) -> Callable[[Any, Any], None]:
    """One step of a plain loop with the same model on ``device``: a function of images and labels on the CPU."""
    import torch
    from torch.nn.functional import cross_entropy

    model = small_resnet(classes=10).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    def step(images: Any, labels: Any) -> None:
        loss = cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch.cuda.synchronize(device)  # else the time of this step would count as waiting for the next batch

    return step


def small_resnet(classes: int) -> Any:
    """The demo's model, a ResNet of ten layers."""
    import timm

    # zero_init_last initialises each residual block as an identity: good for hundreds of epochs, slow for a few.
    return timm.create_model("resnet10t", num_classes=classes, zero_init_last=False)


def train(ctx: offload.Context) -> None:
    """Train and validate, on each worker."""
    import torch
    from torch.nn.functional import cross_entropy

    model = small_resnet(ctx.config["classes"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=ctx.config["steps"] + 1)
    model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
    for _epoch in ctx.epochs(ctx.config["epochs"]):
        model.train()
        for batch in ctx.batches("train"):
            loss = cross_entropy(model(batch["image"]), batch["label"])
            ctx.backward(loss)
            if ctx.step():
                schedule.step()
        model.eval()
        right = seen = 0
        with torch.no_grad():
            for batch in ctx.batches("val"):
                right += int((model(batch["image"]).argmax(1) == batch["label"]).sum())
                seen += len(batch["label"])
        ctx.report(loss=loss, val_accuracy=ctx.sum(right) / ctx.sum(seen))
