"""What tf.data service does, with offload: processes on other machines preprocess, and every sample comes once an epoch.

offload run examples/migrate/tf_data_service.py --address auto -- FOLDER
"""

import sys

import torch
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2

import offload

LOAD = v2.Compose(
    [
        v2.RandomResizedCrop(64),
        v2.RandomHorizontalFlip(),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
    ]
)


def train(ctx):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5, 4), torch.nn.Flatten(), torch.nn.LazyLinear(10))
    model(torch.zeros(1, 3, 64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ctx.prepare(model, optimizer)
    for _epoch in ctx.epochs(2):
        for images, labels in ctx.batches("train", "image", "label"):
            loss = cross_entropy(model(images), labels)
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss)


def build():
    return offload.Trainer(train, datasets={"train": offload.image_folder(sys.argv[1], LOAD)}, batch_size=64)


if __name__ == "__main__":
    print(build().fit().summary())
