"""The job of `benchmarks/sagemaker.py --emulate`: the published workload's preprocessing, and a paced accelerator instead of training.

224² images of noise, ToTensor, ten Gaussian blurs of 11 pixels, float32 (602 kB a sample), as in examples/vit_blur.py, whose ViT needs a
GPU. The accelerator occupies the worker for a given time per sample and computes nothing.
"""

import argparse
import time
from typing import Any

import numpy as np
import ray.train
import torch
from torchvision import transforms

import offload
from offload.paced import PacedAccelerator

SIDE = 224


class Images(torch.utils.data.Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.transform = transforms.Compose([transforms.ToTensor()] + [transforms.GaussianBlur(11)] * 10)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, item: int) -> tuple[torch.Tensor, np.int64]:
        image = np.random.randn(SIDE, SIDE, 3).astype(np.float32)
        return self.transform(image), np.int64(item % 1000)


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(1, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator = PacedAccelerator(0.0, 1 / ctx.config["rate"])
    first = True
    for _ in ctx.epochs(1):
        for image, _label in ctx.batches("train", "image", "label"):
            if first:
                print(f"first batch at {time.time()}", flush=True)
                first = False
            accelerator.step(len(image))
            ctx.backward(model(torch.ones(1, 1)).sum())
            ctx.step()


def build() -> offload.Trainer:
    args = parsed()
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Images(args.samples))},
        batch_size=args.batch_size,
        train_loop_config={"rate": args.rate},
        # The worker runs where the GPU would be. The accelerator uses no CPU of its host.
        scaling_config=ray.train.ScalingConfig(
            resources_per_worker={"CPU": 0} | ({} if args.any_host else {"group_gpu": 1})
        ),
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rate", type=float, default=200.0, help="samples/s of the paced accelerator")
    parser.add_argument(
        "--any-host", action="store_true", help="Outside a SageMaker job, for a probe: hosts belong to no group there."
    )
    return parser.parse_args()
