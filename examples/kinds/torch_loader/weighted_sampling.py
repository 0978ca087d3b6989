"""Weighted sampling: the rare class is drawn as often as the common one, and batches with a loss that is not finite are skipped."""

import torch
from torch.utils.data import DataLoader, WeightedRandomSampler


class Unbalanced:
    """One sample in eight is of the rare class; sample 13 is broken."""

    labels = tuple(int(i % 8 == 0) for i in range(64))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        features = torch.rand(8, generator=torch.Generator().manual_seed(i)) + self.labels[i]
        return features * (float("nan") if i == 13 else 1.0), self.labels[i]


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-1)
    dataset = Unbalanced()
    weights = [1 / dataset.labels.count(label) for label in dataset.labels]
    loader = DataLoader(dataset, batch_size=8, sampler=WeightedRandomSampler(weights, len(dataset)))
    losses = []
    for _ in range(3):
        for features, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(features), labels)
            if not loss.isfinite():
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
