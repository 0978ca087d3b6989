"""A ResNet from timm on a folder of JPEGs, with validation accuracy.

    offload run examples/image_classification.py -- DATA --model resnet18 --epochs 10

DATA holds train/<class>/<name>.jpg and val/<class>/<name>.jpg: a local folder or any path that offload.image_folder takes
(s3://bucket/data). Without DATA the script generates a small data set. The transforms are torchvision's own: their final conversion
and normalisation move to the device, the rest runs on every CPU of the cluster.
"""

import argparse
from pathlib import Path

import timm
import torch
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2

import offload

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def transform(pixels: int, *, training: bool) -> v2.Compose:
    geometry = (
        [v2.RandomResizedCrop(pixels, scale=(0.5, 1.0), antialias=True), v2.ColorJitter(0.3, 0.3, 0.3)]
        if training
        else [v2.Resize(pixels, antialias=True), v2.CenterCrop(pixels)]
    )
    return v2.Compose([*geometry, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def train(ctx: offload.Context) -> None:
    args = ctx.config
    model = timm.create_model(args["model"], num_classes=len(ctx.info().class_names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args["lr"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args["epochs"])
    model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
    for _epoch in ctx.epochs(args["epochs"]):
        model.train()
        for batch in ctx.batches("train"):
            with ctx.autocast():
                loss = cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.05)
            ctx.backward(loss)
            ctx.step(clip_norm=1.0)
        schedule.step()
        ctx.report(loss=loss, val_accuracy=accuracy(ctx, model))


@torch.no_grad()
def accuracy(ctx: offload.Context, model: torch.nn.Module) -> float:
    """Return the accuracy over all workers; each sees its own part of the validation set."""
    model.eval()
    right = seen = 0
    for batch in ctx.batches("val"):
        with ctx.autocast():
            right += int((model(batch["image"]).argmax(1) == batch["label"]).sum())
        seen += len(batch["label"])
    return ctx.sum(right) / ctx.sum(seen)


def build() -> offload.Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="a folder with train/ and val/")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    args = parser.parse_args()
    if args.data is None:
        from offload.demo_data import make_demo_data

        made = make_demo_data(Path("runs/image-classification-data"))
        folders = {"train": str(made.train), "val": str(made.val)}
    else:
        folders = {split: f"{args.data.rstrip('/')}/{split}" for split in ("train", "val")}
    return offload.Trainer(
        train,
        datasets={
            split: offload.image_folder(folder, transform(args.pixels, training=split == "train"), on_error="skip")
            for split, folder in folders.items()
        },
        workers=args.workers,
        batch_size=args.batch_size,
        precision=args.precision,
        checkpoints=offload.Checkpoints(keep=2, best="val_accuracy"),
        train_loop_config=vars(args),
    )


if __name__ == "__main__":
    print(build().fit().summary())
