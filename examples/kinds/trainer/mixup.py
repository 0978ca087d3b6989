"""Mixup in collate_fn, and an exponential average of the weights."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, default_collate

import offload


class Patches:
    def __len__(self):
        return 48

    def __getitem__(self, i):
        random = torch.Generator().manual_seed(i)
        return torch.rand(3, 16, 16, generator=random) + (i % 4) / 4, i % 4


def mixup(samples):
    """Each image and label mixed with its neighbour's. The share depends on the batch, so that every loader mixes alike."""
    images, labels = default_collate(samples)
    share = torch.rand(len(labels), generator=torch.Generator().manual_seed(int(labels.sum())))
    hot = torch.nn.functional.one_hot(labels, 4).float()
    mixed = images.lerp(images.roll(1, 0), share[:, None, None, None])
    return mixed, hot.lerp(hot.roll(1, 0), share[:, None])


def train(ctx):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(392, 4)
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model, average, optimizer = ctx.prepare(model, average, optimizer)
    for _ in ctx.epochs(2):
        for images, labels in ctx.batches("train"):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                ctx.report(loss=loss, loss_of_average=torch.nn.functional.cross_entropy(average(images), labels))


def build():
    loader = DataLoader(Patches(), batch_size=8, shuffle=True, collate_fn=mixup)
    return offload.Trainer(train, datasets={"train": loader})


if __name__ == "__main__":
    build().fit()
