"""Drop-in replacements for transforms of torchvision that are slow on CPUs, computed by OpenCV.

Each class takes the arguments of the torchvision class of its name, accepts the same inputs and draws the same random numbers in the same
order: equal seeds give equal parameters. ``offload probe SCRIPT --apply`` finds where a script can use one, and measures the gain.

Where it stops: OpenCV computes CPU tensors of uint8 and float32, and for some classes Pillow images. Torchvision computes all others.
The extra ``offload[opencv]`` installs OpenCV; each machine that preprocesses needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from offload.errors import ConfigError

__all__ = ["ColorJitter", "GaussianBlur"]

_DTYPES = (torch.uint8, torch.float32)
_IMAGES = (torch.Tensor, tv_tensors.Image, tv_tensors.Video)
_PIL_MODES = ("L", "RGB", "RGBA")  # eight bits a channel, and a channel is a channel
_MOST_CHANNELS = 128  # the most channels of an image in OpenCV; 512 before OpenCV 5
_HUES = 360.0  # range of hues in OpenCV's float images
_TO_UINT8 = 255.999  # torchvision converts float to uint8 by this factor, and truncates


class _WithOpenCV(v2.Transform):  # type: ignore[misc]
    """A transform that needs OpenCV. It imports OpenCV where it is made or unpickled: preprocessing processes then limit OpenCV to one
    thread before they start."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        _opencv(type(self).__name__)
        super().__setstate__(state)


class GaussianBlur(_WithOpenCV, v2.GaussianBlur):  # type: ignore[misc]
    """:class:`torchvision.transforms.v2.GaussianBlur`, computed by OpenCV as two one-dimensional filters.

    It also replaces the class of ``torchvision.transforms`` (v1). Tensors have the shape ``[..., C, H, W]``. Results differ from
    torchvision's by rounding: at most one level of uint8, and about 1e-6 of the largest value of float32.

    Args:
        kernel_size: the width of the kernel in pixels, odd, or a pair (width, height).
        sigma: the standard deviation in pixels, or a range (least, most) from which each call draws one from torch's global generator.

    Raises:
        ConfigError: OpenCV is not installed.
        ValueError: from the constructor, as torchvision's.
    """

    def __init__(self, kernel_size: int | Sequence[int], sigma: float | Sequence[float] = (0.1, 2.0)) -> None:
        _opencv("GaussianBlur")
        super().__init__(kernel_size, sigma)

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Return the blurred image. Other inputs, such as masks, pass as in torchvision."""
        width, height = self.kernel_size
        pil = isinstance(inpt, PIL.Image.Image) and inpt.mode in _PIL_MODES
        if not pil and not _computable(inpt):
            return super().transform(inpt, params)
        columns, rows = inpt.size if pil else (inpt.shape[-1], inpt.shape[-2])
        if columns <= width // 2 or rows <= height // 2:  # too small to reflect: torchvision's error
            return super().transform(inpt, params)
        sigma_x, sigma_y = params["sigma"]
        kernels = _gaussian(width, sigma_x), _gaussian(height, sigma_y)
        if pil:
            return PIL.Image.fromarray(_filtered(np.asarray(inpt), *kernels))
        image = inpt.as_subclass(torch.Tensor)
        few = image.ndim == 3 and image.shape[0] <= _MOST_CHANNELS
        if few and not image.is_contiguous() and image.permute(1, 2, 0).is_contiguous():
            blurred = torch.from_numpy(_filtered(image.permute(1, 2, 0).numpy(), *kernels)).permute(2, 0, 1)
        else:
            planes = np.ascontiguousarray(image.reshape(-1, rows, columns).numpy())
            out = np.empty_like(planes)
            for plane, to in zip(planes, out, strict=True):
                _filtered(plane, *kernels, to)
            blurred = torch.from_numpy(out).view(image.shape)
        return _like(blurred, inpt)


class ColorJitter(_WithOpenCV, v2.ColorJitter):  # type: ignore[misc]
    """:class:`torchvision.transforms.v2.ColorJitter`, whose change of hue OpenCV computes.

    It also replaces the class of ``torchvision.transforms`` (v1). Brightness, contrast and saturation are torchvision's own, and so are
    all changes of Pillow images. Tensors have the shape ``[..., C, H, W]``. Results differ from torchvision's by rounding: at most one
    level of uint8 for the change of hue alone, and about 1e-5 of float32.

    Args:
        brightness: how much to change brightness: a number ≥ 0, or a range of factors.
        contrast: how much to change contrast: a number ≥ 0, or a range of factors.
        saturation: how much to change saturation: a number ≥ 0, or a range of factors.
        hue: how much to turn the hue: a number from 0 to 0.5, or a range within (-0.5, 0.5), in turns of the colour circle.

    Raises:
        ConfigError: OpenCV is not installed.
        ValueError: from the constructor, as torchvision's.
    """

    def __init__(
        self,
        brightness: float | Sequence[float] | None = None,
        contrast: float | Sequence[float] | None = None,
        saturation: float | Sequence[float] | None = None,
        hue: float | Sequence[float] | None = None,
    ) -> None:
        _opencv("ColorJitter")
        super().__init__(brightness, contrast, saturation, hue)

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Return the image with other colours. Other inputs, such as masks, pass as in torchvision."""
        if params["hue_factor"] is None or not _computable(inpt) or inpt.shape[-3] != 3:
            return super().transform(inpt, params)
        for number in params["fn_idx"].tolist():
            name = ("brightness", "contrast", "saturation", "hue")[number]
            factor = params[f"{name}_factor"]
            if name == "hue":
                inpt = _turned(inpt, factor)
            elif factor is not None:
                inpt = getattr(F, f"adjust_{name}")(inpt, factor)
        return inpt


def _opencv(asks: str) -> Any:
    try:
        import cv2
    except ImportError as error:
        raise ConfigError(
            f"offload.transforms.{asks} needs OpenCV, and cv2 cannot be imported here ({error}). Install it on each machine that "
            "preprocesses: pip install 'offload[opencv]'."
        ) from None
    return cv2


def _computable(inpt: Any) -> bool:
    """Return whether OpenCV can compute this tensor. Other subclasses of tensors, such as masks, have other rules."""
    return (
        type(inpt) in _IMAGES
        and inpt.dtype in _DTYPES
        and inpt.device.type == "cpu"
        and inpt.ndim >= 3
        and inpt.numel() > 0
        and not inpt.requires_grad
    )


def _like(image: torch.Tensor, inpt: Any) -> Any:
    return image if type(inpt) is torch.Tensor else tv_tensors.wrap(image, like=inpt)


def _gaussian(size: int, sigma: float) -> np.ndarray[Any, Any]:
    """The weights of a one-dimensional kernel of ``size`` pixels, as torchvision defines them."""
    with np.errstate(over="ignore"):
        weights = np.exp(-0.5 * ((np.arange(size) - (size - 1) / 2) / sigma) ** 2)
    return np.asarray(weights / weights.sum(), np.float32)


def _filtered(
    pixels: np.ndarray[Any, Any], across: Any, down: Any, to: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """Filter pixels (HW or HWC, uint8 or float32) in both directions, with reflected borders, into ``to`` if it is given."""
    cv2 = _opencv("GaussianBlur")
    border = cv2.BORDER_REFLECT_101
    if pixels.dtype == np.float32:
        return np.asarray(cv2.sepFilter2D(pixels, cv2.CV_32F, across, down, dst=to, borderType=border))
    # In float32: with uint8 results, OpenCV may round the weights to eight bits.
    exact = cv2.sepFilter2D(pixels, cv2.CV_32F, across, down, borderType=border)
    return np.asarray(cv2.convertScaleAbs(exact, dst=to))  # rounds half to even, as torch does


def _turned(image: Any, turns: float) -> Any:
    """The image ``[..., 3, H, W]`` with its hue turned by ``turns`` of the colour circle."""
    plain = image.as_subclass(torch.Tensor)
    if plain.dtype == torch.float32 and not (float(plain.min()) >= 0 and float(plain.max()) <= 1):
        return F.adjust_hue(image, turns)  # torchvision clips such colours
    pixels = np.ascontiguousarray(plain.numpy()).reshape(-1, *plain.shape[-3:])
    out = np.empty_like(pixels)
    for one, to in zip(pixels, out, strict=True):
        _turn(one, turns, to)
    return _like(torch.from_numpy(out).view(plain.shape), image)


def _turn(planes: np.ndarray[Any, Any], turns: float, to: np.ndarray[Any, Any]) -> None:
    """Turn the hue of one image (CHW) into ``to``."""
    cv2 = _opencv("ColorJitter")
    whole = planes.dtype == np.uint8
    colours = cv2.merge(tuple(planes))
    if whole:
        colours = colours.astype(np.float32)
        colours *= np.float32(1 / 255)
    hsv = cv2.cvtColor(colours, cv2.COLOR_RGB2HSV)
    hue = hsv[..., 0]
    hue += np.float32(turns * _HUES)
    np.subtract(hue, _HUES, out=hue, where=hue >= _HUES)
    np.add(hue, _HUES, out=hue, where=hue < 0)
    colours = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    if whole:
        colours *= np.float32(_TO_UINT8)
        colours = colours.astype(np.uint8)
    cv2.split(colours, list(to))
