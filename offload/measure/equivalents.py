"""Faster equivalents of stages.

The sentences are measurements on one core. :data:`DROP_INS` names the equivalents that ``offload probe --apply`` can put into a script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_APPLY = "offload probe --apply measures it here and shows the change"
FASTER = {
    # benchmarks/results/equivalents.json
    "GaussianBlur": f"offload.transforms.GaussianBlur takes a sixth of the time at 11 pixels, a fourteenth at 23; {_APPLY}",
    "ColorJitter": f"offload.transforms.ColorJitter takes less than a third of the time on tensors; {_APPLY}",
    "RandomResizedCrop": "on channels-last uint8 tensors it takes half the time of contiguous ones",
    "Resize": "on channels-last uint8 tensors it takes half the time of contiguous ones",
    "ToTensor": "leave it to the device: ship uint8 and normalise there (on_device=offload.Normalize(mean, std))",
    "Normalize": "leave it to the device: ship uint8 and normalise there (on_device=offload.Normalize(mean, std))",
    "ToDtype": "leave it to the device: ship uint8 and convert there (on_device=offload.Normalize(mean, std))",
    "ImageFolder": "offload.image_folder decodes JPEGs at 1.6 times Pillow's speed (simplejpeg)",
}


@dataclass(frozen=True)
class DropIn:
    """A class of ``offload.transforms`` that takes the arguments and the inputs of a class of torchvision, and computes the same.

    Args:
        name: the name of both.
        replaces: the names by which scripts import the other.
    """

    name: str
    replaces: Sequence[str]

    @property
    def path(self) -> str:
        """The full name of the equivalent."""
        return f"offload.transforms.{self.name}"


DROP_INS = tuple(
    DropIn(
        name,
        tuple(f"torchvision.transforms.{module}{name}" for module in ("", "transforms.", "v2.", f"v2.{defined_in}.")),
    )
    for name, defined_in in (("GaussianBlur", "_misc"), ("ColorJitter", "_color"))
)


def faster_equivalent(stage: str) -> str | None:
    """A faster way to do the work of ``stage`` (the name of a class or function); None if none is known."""
    return FASTER.get(stage)
