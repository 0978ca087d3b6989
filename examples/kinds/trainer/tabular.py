"""Tabular data: rows of numbers and categories, some of them missing, read a batch at a time."""

import numpy as np
import torch
from torch.utils.data import DataLoader

import offload


class Rows:
    """A table in memory. __getitems__ takes all rows of a batch at once."""

    def __init__(self, n=200):
        random = np.random.default_rng(0)
        self.numbers = random.normal(size=(n, 3)).astype(np.float32)
        self.numbers[random.random((n, 3)) < 0.1] = np.nan
        self.colours = random.choice(["red", "green", "blue"], n)
        self.prices = np.nansum(self.numbers, axis=1) + (self.colours == "red")

    def __len__(self):
        return len(self.prices)

    def __getitems__(self, indices):
        return list(zip(self.numbers[indices], self.colours[indices], self.prices[indices], strict=True))


def collate(rows):
    numbers, colours, prices = zip(*rows, strict=True)
    numbers = torch.from_numpy(np.stack(numbers))
    red = torch.tensor([[float(colour == "red")] for colour in colours])
    features = torch.cat([numbers.nan_to_num(), numbers.isnan().float(), red], dim=1)
    return features, torch.tensor(prices, dtype=torch.float32)


def train(ctx):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = ctx.prepare(model, optimizer)
    for _ in ctx.epochs(2):
        for features, price in ctx.batches("train"):
            loss = torch.nn.functional.mse_loss(model(features)[:, 0], price)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss)


def build():
    loader = DataLoader(Rows(), batch_size=32, shuffle=True, collate_fn=collate)
    return offload.Trainer(train, datasets={"train": loader})


if __name__ == "__main__":
    build().fit()
