"""A heavy preprocessing workload on random images: timm's VisionTransformer, 224² images, ten Gaussian blurs of 11 pixels.

The workload comes from a published experiment on SageMaker heterogeneous clusters, which compares one ml.g5.xlarge with the same
instance plus an ml.c5.4xlarge. It has two variants:

    offload run examples/vit_blur.py                                   # as published: ships float32 images, 602 kB each
    offload run examples/vit_blur.py --run-dir runs/mine -- --uint8    # as offload recommends: ships uint8 images, 151 kB each

``--depth`` and ``--samples`` make the workload small enough for a machine without a GPU: ``-- --depth 1 --samples 64``.

Claim: the second instance raises the price efficiency by 23 %. Measured (``benchmarks/sagemaker.py --emulate``, emulated hosts, paced
accelerator): 45 samples/s become 86 at 1.58 times the price, which is 22 % more samples per dollar.
"""

import argparse

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torchvision import transforms

import offload

SIDE = 224


class RandomImages(torch.utils.data.Dataset):
    """Random images and labels, as published: ``randn``, ToTensor, ten GaussianBlur(11)."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.transform = transforms.Compose([transforms.ToTensor()] + [transforms.GaussianBlur(11)] * 10)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, item: int):
        image = np.random.randn(SIDE, SIDE, 3).astype(np.float32)
        return self.transform(image), np.int64(item % 1000)


class RandomImagesUint8(RandomImages):
    """The same work on bytes: a quarter of the data travels, and the device converts and normalises."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.transform = transforms.Compose([transforms.GaussianBlur(11)] * 10)

    def __getitem__(self, item: int):
        image = torch.from_numpy(np.random.randint(0, 256, (3, SIDE, SIDE), dtype=np.uint8))
        return self.transform(image), np.int64(item % 1000)


def train(ctx: offload.Context) -> None:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(depth=ctx.config["depth"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    model, optimizer = ctx.prepare(model, optimizer)
    for _epoch in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            with ctx.autocast():
                loss = cross_entropy(model(batch["image"]), batch["label"])
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss)


def build() -> offload.Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uint8", action="store_true", help="ship uint8 and normalise on the device")
    parser.add_argument("--samples", type=int, default=64_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--depth", type=int, default=12, help="transformer blocks (12: as published)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    args = parser.parse_args()
    source = RandomImagesUint8(args.samples) if args.uint8 else RandomImages(args.samples)
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(source, on_device=offload.Normalize(0.5, 0.25) if args.uint8 else None)},
        batch_size=args.batch_size,
        precision=args.precision,
        train_loop_config={"depth": args.depth, "epochs": args.epochs},
    )


if __name__ == "__main__":
    print(build().fit().summary())
