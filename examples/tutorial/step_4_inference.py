"""Step 4: use the trained model. A checkpoint is a folder with `model.pt`, a plain state_dict that loads without offload.

python examples/tutorial/step_4_inference.py runs/step_3_validation/checkpoints/checkpoint_*
"""

import sys
from pathlib import Path

import torch


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


if __name__ == "__main__":
    model = build_model()
    model.load_state_dict(torch.load(Path(sys.argv[-1]) / "model.pt", weights_only=True))
    model.eval()
    print("class of a grey image:", model(torch.zeros(1, 3, 96, 96)).argmax(1).item())
