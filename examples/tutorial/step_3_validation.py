"""Step 3: validation, a faster transform, and which checkpoints to keep. Changed lines are marked `# 3`.

torchvision's v2 transforms resize uint8 tensors faster than PIL images. Validation has a data set of its own: each worker
sees its part, and `ctx.sum` adds the parts up. The run keeps the best checkpoints and the newest one.

    offload run examples/tutorial/step_3_validation.py
"""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2  # 3

import offload
from offload.demo_data import make_demo_data

DATA = Path("runs/tutorial-data")
TRANSFORM = v2.Compose(  # 3
    [v2.Resize((96, 96)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]  # 3
)  # 3


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


def train(ctx):
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ctx.prepare(model, optimizer)
    for _epoch in ctx.epochs(3):
        for batch in ctx.batches("train"):
            loss = cross_entropy(model(batch["image"]), batch["label"])
            ctx.backward(loss)
            ctx.step()
        right = seen = 0  # 3
        with torch.no_grad():  # 3
            for batch in ctx.batches("val"):  # 3
                right += int((model(batch["image"]).argmax(1) == batch["label"]).sum())  # 3
                seen += len(batch["label"])  # 3
        ctx.report(loss=loss, val_accuracy=ctx.sum(right) / ctx.sum(seen))  # 3


def build():
    data = make_demo_data(DATA, images=1000)
    return offload.Trainer(
        train,
        datasets={
            "train": offload.image_folder(data.train, TRANSFORM),
            "val": offload.image_folder(data.val, TRANSFORM),  # 3
        },
        batch_size=64,
        checkpoints=offload.Checkpoints(keep=2, best="val_accuracy"),  # 3
    )


if __name__ == "__main__":
    print(build().fit().summary())
