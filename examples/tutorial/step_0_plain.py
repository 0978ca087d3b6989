"""Step 0: a plain PyTorch script. It runs as one process, whose DataLoader workers share the few CPUs of the GPU's host.

The next steps turn it into an offloaded script. Each line that a step adds or changes is marked with the step's number.
"""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from offload.demo_data import make_demo_data

DATA = Path("runs/tutorial-data")
TRANSFORM = transforms.Compose(
    [transforms.Resize((96, 96)), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)]
)


def dataset():
    return ImageFolder(str(make_demo_data(DATA, images=1000).train), TRANSFORM)


def build_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 5, 2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 5, 2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(1024, 10),
    )


def train():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        for images, labels in DataLoader(dataset(), batch_size=64, shuffle=True, num_workers=2):
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}  loss {loss.item():.3f}")


if __name__ == "__main__":
    train()
