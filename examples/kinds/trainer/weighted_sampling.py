"""Weighted sampling: the rare class is drawn as often as the common one, and batches with a loss that is not finite are skipped."""

import torch

import offload


class Unbalanced:
    """One sample in eight is of the rare class; sample 13 is broken."""

    labels = tuple(int(i % 8 == 0) for i in range(64))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        features = torch.rand(8, generator=torch.Generator().manual_seed(i)) + self.labels[i]
        return features * (float("nan") if i == 13 else 1.0), self.labels[i]


def train(ctx):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-1)
    model, optimizer = ctx.prepare(model, optimizer)
    for _ in ctx.epochs(3):
        for features, labels in ctx.batches("train", "features", "label"):
            loss = torch.nn.functional.cross_entropy(model(features), labels)
            if not loss.isfinite():
                ctx.skip()
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss)


def build():
    weights = [1 / Unbalanced.labels.count(label) for label in Unbalanced.labels]
    data = offload.weighted(offload.from_torch(Unbalanced(), columns=("features", "label")), weights)
    return offload.Trainer(train, datasets={"train": data}, batch_size=8)


if __name__ == "__main__":
    build().fit()
