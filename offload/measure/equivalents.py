"""What would make preprocessing cheaper: faster equivalents of stages, and a cache for the part that draws no random numbers.

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


READ_S = 100e-6
READ_S_PER_BYTE = 0.8e-9
"""The CPU time to find a sample in a node's cache: benchmarks/cached_samples.py measures both."""
WORTH_SAYING = 0.2  # share of the core-seconds whose saving is worth a sentence


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The stages before the first one that draws random numbers.

    Args:
        until: that stage; None if no stage draws any.
        share: the share of the core-seconds of the stages before it, between 0 and 1.
        bytes_out: the bytes of their result for one sample.
    """

    until: str | None
    share: float
    bytes_out: float

    def saved(self, core_seconds_per_sample: float) -> float:
        """The share of the core-seconds that a found sample saves. It is negative if finding it takes longer than making it."""
        return self.share - (READ_S + READ_S_PER_BYTE * self.bytes_out) / core_seconds_per_sample


def advice(constant: Constant | None, core_seconds_per_sample: float) -> str | None:
    """A sentence for the user; None if a cache would save little."""
    if constant is None or (saved := constant.saved(core_seconds_per_sample)) < WORTH_SAYING:
        return None
    what = "Nothing" if constant.until is None else f"Nothing before {constant.until}"
    return (
        f"{what} draws random numbers. If each node keeps that part on its disk (offload.cached), later epochs take {saved:.0%} fewer "
        f"core-seconds, and a sample takes {constant.bytes_out / 1000:,.1f} kB there."
    )
