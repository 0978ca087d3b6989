"""Language modelling: windows of tokens, trained for a number of steps."""

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

TEXT = torch.tensor([(7 * i * i + 3 * i) % 31 for i in range(5000)])
WINDOW, STEPS = 16, 20


class Windows(IterableDataset):
    """Windows at random places, forever. Each worker draws its own."""

    def __iter__(self):
        info = get_worker_info()
        random = torch.Generator().manual_seed(0 if info is None else info.id)
        while True:
            start = int(torch.randint(len(TEXT) - WINDOW - 1, (), generator=random))
            yield TEXT[start : start + WINDOW], TEXT[start + 1 : start + WINDOW + 1]


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(31, 24), torch.nn.Linear(24, 31))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Windows(), batch_size=8, num_workers=2)
    losses = []
    for _, (tokens, targets) in zip(range(STEPS), loader, strict=False):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
