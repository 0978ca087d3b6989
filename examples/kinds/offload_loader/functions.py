"""Functions that take a loader: one trains an epoch, one evaluates, and a learning rate that falls with the epochs."""

import torch

from offload import DataLoader


class Reviews:
    """Sentences of eight words, good if most of their words are."""

    def __init__(self, first, count):
        words = torch.randint(100, (first + count, 8), generator=torch.Generator().manual_seed(0))
        self.words = words[first:]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], int((self.words[i] < 50).sum() > 4)


def train_epoch(loader, model, optimizer):
    losses = []
    model.train()
    for words, label in loader:
        loss = torch.nn.functional.cross_entropy(model(words), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(loader)


def accuracy(loader, model):
    right = count = 0
    model.eval()
    with torch.no_grad():
        for words, label in loader:
            right += (model(words).argmax(1) == label).sum().item()
            count += len(label)
    return right / count


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train_loader = DataLoader(Reviews(0, 64), batch_size=8, shuffle=True)
    test_loader = DataLoader(Reviews(64, 36), batch_size=8)
    losses = []
    for _ in range(3):
        losses += [train_epoch(train_loader, model, optimizer), accuracy(test_loader, model)]
        scheduler.step()
    return losses


if __name__ == "__main__":
    print(main())
