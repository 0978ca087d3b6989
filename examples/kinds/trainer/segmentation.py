"""Segmentation: image and mask go through the same random crop, and come as named tuples."""

from typing import NamedTuple

import torch
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2

import offload


class Sample(NamedTuple):
    image: torch.Tensor
    mask: torch.Tensor


class Discs:
    """Discs on noise. The crop depends on the sample alone, so that every loader makes the same."""

    def __init__(self):
        self.crop = v2.RandomResizedCrop(32, antialias=True)

    def __len__(self):
        return 48

    def __getitem__(self, i):
        with torch.random.fork_rng():
            torch.manual_seed(i)
            y, x = torch.meshgrid(torch.arange(48), torch.arange(48), indexing="ij")
            mask = ((y - 10 - i % 28) ** 2 + (x - 24) ** 2 < 120).to(torch.uint8)
            image, mask = self.crop(tv_tensors.Image(torch.rand(3, 48, 48) + mask), tv_tensors.Mask(mask))
        return Sample(image, mask)


def train(ctx):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 1, 1), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 3, 1, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = ctx.prepare(model, optimizer)
    for _ in ctx.epochs(2):
        for batch in ctx.batches("train"):
            loss = torch.nn.functional.cross_entropy(model(batch.image), batch.mask.long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss)


def build():
    loader = DataLoader(Discs(), batch_size=8, shuffle=True)
    return offload.Trainer(train, datasets={"train": loader})


if __name__ == "__main__":
    build().fit()
