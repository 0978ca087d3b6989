"""Detection: images of different sizes, each with a different number of boxes."""

import torch
from torch.utils.data import DataLoader

import offload


class Scenes:
    """Bright rectangles on noise."""

    def __len__(self):
        return 48

    def __getitem__(self, i):
        random = torch.Generator().manual_seed(i)
        height, width = (int(torch.randint(40, 64, (), generator=random)) for _ in "hw")
        image = torch.rand(3, height, width, generator=random)
        corners = torch.rand(1 + i % 3, 2, generator=random) * torch.tensor([width - 20, height - 20])
        boxes = torch.cat([corners, corners + 15], dim=1).round()
        for left, top, right, bottom in boxes.int().tolist():
            image[:, top:bottom, left:right] += 1
        return image, {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.long)}


def collate(samples):
    """Images and targets of a batch, as lists: their shapes differ."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def train(ctx):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5, 4, 2), torch.nn.ReLU(), torch.nn.Conv2d(8, 1, 3, 2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = ctx.prepare(model, optimizer)
    for _ in ctx.epochs(2):
        for images, targets in ctx.batches("train"):
            loss = 0
            for image, target in zip(images, targets, strict=True):
                heat = model(image[None])[0, 0]
                wanted = torch.zeros_like(heat)
                for left, top, right, bottom in (target["boxes"] // 8).int().tolist():
                    wanted[top : bottom + 1, left : right + 1] = 1
                loss = loss + torch.nn.functional.binary_cross_entropy_with_logits(heat, wanted) / len(images)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss)


def build():
    loader = DataLoader(Scenes(), batch_size=8, shuffle=True, collate_fn=collate)
    return offload.Trainer(train, datasets={"train": loader})


if __name__ == "__main__":
    build().fit()
