"""Contrastive learning: each sample is two views of an image, in a list beside a dict."""

import torch
from torch.utils.data import DataLoader

import offload


class Views:
    """Two noisy crops of a pattern, and where they come from."""

    def __len__(self):
        return 48

    def __getitem__(self, i):
        random = torch.Generator().manual_seed(i)
        pattern = torch.rand(3, 24, 24, generator=random)
        offsets = torch.randint(0, 8, (2, 2), generator=random).tolist()
        views = [pattern[:, y : y + 16, x : x + 16] + 0.1 * torch.rand(3, 16, 16, generator=random) for y, x in offsets]
        return views, {"index": i, "name": f"pattern {i}"}


def train(ctx):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(392, 16)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = ctx.prepare(model, optimizer)
    for _ in ctx.epochs(2):
        for (first, second), about in ctx.batches("train"):
            assert len(about["name"]) == len(about["index"]) == len(first)
            a, b = (torch.nn.functional.normalize(model(view)) for view in (first, second))
            loss = torch.nn.functional.cross_entropy(a @ b.T / 0.2, torch.arange(len(a), device=a.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss)


def build():
    loader = DataLoader(Views(), batch_size=8, shuffle=True)
    return offload.Trainer(train, datasets={"train": loader})


if __name__ == "__main__":
    build().fit()
