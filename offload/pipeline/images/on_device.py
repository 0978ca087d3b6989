"""Conversion and normalisation on a worker's device, after the transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from offload.errors import ConfigError
from offload.model.checks import check_choice, check_number, check_text

if TYPE_CHECKING:
    import torch


_DTYPES = ("float32", "float16", "bfloat16", "float64")


class Normalize:
    """A conversion of uint8 images to normalised floats on the device: ``(x / 255 - mean) / std`` per channel.

    It takes ``batch[column]`` of shape NHWC or NCHW, uint8, and leaves NCHW of ``dtype`` (channels-last in memory if the input
    was NHWC, the faster layout for convolutions).

    Args:
        mean, std: in units of the 0..1 range, one per channel or one for all.
        column: the images' column.
        dtype: ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"float64"``.
        scale: the factor that brings values to 0..1. Floats need ``scale=1``.

    Raises:
        ConfigError: for invalid values.
        ValueError: from a call, for images of another shape, of another number of channels, or of floats with a scale.

    Example::

        normalize = offload.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        offload.image_folder("train/", augment, on_device=normalize)
    """

    def __init__(
        self,
        mean: Sequence[float] | float = 0.0,
        std: Sequence[float] | float = 1.0,
        *,
        column: str = "image",
        dtype: str = "float32",
        scale: float = 1 / 255,
    ) -> None:
        means, stds = _per_channel("mean", mean), _per_channel("std", std)
        if any(s == 0 for s in stds):
            raise ConfigError(f"Normalize: std must not contain 0, found {stds}.")
        if len(means) != len(stds):
            means, stds = means * (len(stds) if len(means) == 1 else 1), stds * (len(means) if len(stds) == 1 else 1)
        if len(means) != len(stds):
            raise ConfigError(
                f"Normalize: mean has {len(means)} channels and std {len(stds)}; give one value per channel in both."
            )
        self.mean, self.std = tuple(means), tuple(stds)
        self.column = check_text("Normalize: column", column, sane='such as "image"')
        self.dtype = check_choice("Normalize: dtype", dtype, _DTYPES)
        self.scale = check_number("Normalize: scale", scale, above=0.0, sane="such as 1 / 255")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import torch

        images: torch.Tensor = batch[self.column]
        channels = len(self.mean)
        if images.ndim != 4:
            raise ValueError(f"Normalize takes images of shape NHWC or NCHW, found {tuple(images.shape)}")
        if images.is_floating_point() and self.scale != 1:
            raise ValueError(
                f"Normalize takes uint8 images and scales them to 0..1, found {images.dtype}: ship uint8, or pass scale=1"
            )
        if not self._is_channels_first(images.shape):
            images = images.permute(0, 3, 1, 2)
        dtype: torch.dtype = getattr(torch, self.dtype)
        shape = (1, channels, 1, 1)
        # One multiply and one add: (x·scale − mean) / std = x·(scale/std) + (−mean/std).
        biases = [-m / s for m, s in zip(self.mean, self.std, strict=True)]
        gain = torch.tensor([self.scale / s for s in self.std], dtype=torch.float32, device=images.device).view(shape)
        bias = torch.tensor(biases, dtype=torch.float32, device=images.device).view(shape)
        return {**batch, self.column: torch.addcmul(bias, images.to(torch.float32), gain).to(dtype)}

    def _is_channels_first(self, shape: Sequence[int]) -> bool:
        """Guess the layout: NCHW if only the second dimension looks like channels. Raises ValueError if none fits the mean."""
        channels = len(self.mean)
        if channels > 1 and channels not in (shape[1], shape[3]):
            raise ValueError(f"mean and std have {channels} channels; images of shape {tuple(shape)} do not")
        usual = (channels,) if channels > 1 else (1, 3, 4)
        first, last = shape[1] in usual, shape[3] in usual
        if first != last:
            return first
        return not last and shape[1] < shape[3]  # images travel as NHWC

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean}, std={self.std})"


class NormalizeHWC(Normalize):
    """The same for images that are known to be NHWC, with any number of channels, so nothing is guessed."""

    def _is_channels_first(self, shape: Sequence[int]) -> bool:
        if len(self.mean) not in (1, shape[3]):
            raise ValueError(f"mean and std have {len(self.mean)} channels; images of shape {tuple(shape)} do not")
        return False


def _per_channel(name: str, values: Any) -> list[float]:
    """The numbers of one value for all channels, or of a sequence, an array or a tensor with one per channel."""
    sane = "one per channel, such as (0.485, 0.456, 0.406)"
    plain = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(plain, list | tuple) and plain:
        return [check_number(f"Normalize: {name}[{i}]", v, least=-math.inf, sane=sane) for i, v in enumerate(plain)]
    return [check_number(f"Normalize: {name}", plain, least=-math.inf, sane=sane)]


class ToChannelsFirst:
    """A conversion of NHWC images to an NCHW view (channels-last in memory), the layout of torch's layers."""

    def __init__(self, column: str = "image") -> None:
        self.column = column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, self.column: batch[self.column].permute(0, 3, 1, 2)}

    def __repr__(self) -> str:
        return "ToChannelsFirst()"
