"""timm: its model and its transform, with the images decoded and augmented on every CPU of the cluster.

python examples/frameworks/timm_train.py FOLDER        # FOLDER has a sub-folder of images for each class
"""

import sys

import timm
import torch
from timm.data import create_transform, resolve_model_data_config
from timm.optim import create_optimizer_v2
from torchvision.datasets import ImageFolder

import offload


def main(folder, loader_class=offload.DataLoader, **loader_arguments):
    torch.manual_seed(0)
    dataset = ImageFolder(folder)
    model = timm.create_model("test_resnet", num_classes=len(dataset.classes))
    dataset.transform = create_transform(**resolve_model_data_config(model), is_training=True)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    loader = loader_class(dataset, batch_size=32, shuffle=True, drop_last=True, **loader_arguments)
    losses = []
    for _ in range(2):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main(sys.argv[1])
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps")
