"""The smallest complete program: a folder of JPEGs, an augmentation that runs on every CPU, a training loop that stays yours.

python examples/quickstart.py    # generates a small data set and trains on it; or on your own:
offload run examples/quickstart.py --run-dir runs/mine -- DATA/train    # DATA/train/<class>/<name>.jpg, of 96 pixels or more
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import offload


def augment(batch):
    """Crop a batch in a preprocessing task, on any CPU of the cluster. Returns one uint8 row for each input row."""
    crops = []
    for image in batch["image"]:  # HWC uint8, already decoded
        height, width = image.shape[:2]
        side = min(height, width)
        top, left = np.random.randint(0, height - side + 1), np.random.randint(0, width - side + 1)
        step = max(side // 96, 1)
        crops.append(image[top : top + side : step, left : left + side : step][:96, :96])
    return {"image": np.stack(crops), "label": batch["label"]}


def train(ctx: offload.Context) -> None:
    """Train the model. Each worker calls this once."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 5, 2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 5, 2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(1024, len(ctx.info().class_names)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ctx.prepare(model, optimizer)
    for _epoch in ctx.epochs(3):  # continues where it left off after a restart
        for batch in ctx.batches("train"):
            loss = cross_entropy(model(batch["image"]), batch["label"])
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss)


def build() -> offload.Trainer:
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    else:
        from offload.demo_data import make_demo_data

        folder = make_demo_data(Path("runs/quickstart-data"), images=1000).train
    return offload.Trainer(
        train,
        datasets={"train": offload.image_folder(folder, augment, on_device=offload.Normalize(0.5, 0.25))},
        batch_size=64,
    )


if __name__ == "__main__":
    print(build().fit().summary())
