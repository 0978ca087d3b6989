"""Plan the decoding of an image for the first step of its transform: a crop needs no pixels outside it.

The plan draws its crop with the step's own method, so it draws the same random numbers. The step itself then resizes the region, which
lies in memory row by row: torch resizes that 1.5 times as fast as a part of a larger image. At full scale, the result of a tensor's step
is bit for bit that of the step on the decoded image.

A step on Pillow images gets its result from torch's kernel, which takes a quarter of Pillow's time. The two round differently.

Where it stops: it knows exact classes of torchvision and timm, by module and name. All other transforms get the whole image.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.pipeline.images.decode import Image
from offload.pipeline.images.region_decode import EncodedImage

AsInput = Callable[[np.ndarray[Any, Any]], Any]

LEAST = 2
"""A scaled crop keeps at least this many times the rows and columns of its result: a median PSNR of 39 dB on photographs, not 34."""
_SCALES = (8, 4, 2)
_SMOOTH = {"bilinear", "bicubic", "lanczos", "box", "hamming"}
_LIKE_PILLOW = {"bilinear", "bicubic"}
"""Interpolations that torch computes with antialiasing as Pillow does."""
_V1, _V2, _TIMM = "torchvision.transforms.transforms", "torchvision.transforms.v2._geometry", "timm.data.transforms"
_BEFORE = {"ToImage", "PILToTensor"}
"""Conversions that treat every pixel by itself, so they may follow the crop."""


@dataclass(frozen=True)
class _RegionPlan:
    """A region to decode, and the rest of the step. ``target``: the size of the result, if a scaled region will do."""

    top: int
    left: int
    height: int
    width: int
    finish: Callable[[Any], Any]
    target: tuple[int, int] | None = None

    def crop(self, image: Any) -> Any:
        """The region of a decoded CHW tensor whose memory is HWC, as one piece of such memory."""
        rows, columns = slice(self.top, self.top + self.height), slice(self.left, self.left + self.width)
        return image[:, rows, columns].permute(1, 2, 0).contiguous().permute(2, 0, 1)

    def scale(self) -> int:
        if self.target is None:
            return 1
        rows, columns = (LEAST * size for size in self.target)
        return next((s for s in _SCALES if self.height >= s * rows and self.width >= s * columns), 1)


def region_first(steps: Sequence[Any], as_input: AsInput, *, tensors: bool) -> list[Any]:
    """The steps, whose first ones also take an :class:`EncodedImage` if they can. ``as_input`` makes the steps' input from pixels."""
    before = 0
    while before < len(steps) and _name(steps[before]) in _BEFORE and _is_from(steps[before], "torchvision.transforms"):
        before += 1
    planner = _planner(steps[before], tensors or before > 0) if before < len(steps) else None
    if planner is None:
        return list(steps)
    return [RegionFirst(steps[:before], steps[before], planner, as_input), *steps[before + 1 :]]


def takes_encoded(steps: Sequence[Any]) -> bool:
    """Return whether the first step decodes images itself."""
    return bool(steps) and isinstance(steps[0], RegionFirst)


class RegionFirst:
    """The first step of a transform. It decodes only the region of an encoded image that the step needs, or cuts it out of a tensor."""

    def __init__(self, before: Sequence[Any], step: Any, planner: _Planner, as_input: AsInput) -> None:
        self.before, self.step, self.planner, self.as_input = tuple(before), step, planner, as_input
        self.__name__ = f"decode, {_name(step)}"  # a probe shows it as the name of a stage

    def __call__(self, image: Any) -> Any:
        finish = self.step
        if isinstance(image, EncodedImage):
            plan = self.planner(image.height, image.width)
            if plan is None:
                image = self.as_input(image.pixels())
            else:
                finish = plan.finish
                region = image.region(plan.top, plan.left, plan.height, plan.width, plan.scale())
                if self.planner.kernel is not None and plan.target is not None:
                    return self.as_input(_resized(region, plan.target, self.planner.kernel))
                image = self.as_input(region)
        elif _is_hwc(image) and (plan := self.planner(*image.shape[1:])) is not None:
            finish, image = plan.finish, plan.crop(image)
        for step in self.before:
            image = step(image)
        return finish(image)


class _Planner:
    """A function from an image's height and width to a plan; None: decode the whole image.

    ``kernel``: the name of torch's interpolation that stands in for the step's, which is Pillow's; None: the step itself resizes.
    """

    def __init__(self, step: Any, *, tensors: bool) -> None:
        self.step = step
        self.scales = _is_smooth(step, tensors=tensors)
        mode = _value(getattr(step, "interpolation", None))
        self.kernel: str | None = mode if not tensors and isinstance(mode, str) and mode in _LIKE_PILLOW else None

    def __call__(self, height: int, width: int) -> _RegionPlan | None:
        raise NotImplementedError


class _ResizedCrop(_Planner):
    """RandomResizedCrop of torchvision v1, and timm's, which may also draw the interpolation."""

    def __init__(self, step: Any, *, tensors: bool) -> None:
        super().__init__(step, tensors=tensors)
        self.rest = copy.copy(step)
        # The crop is drawn already. A second draw would crop again, and use up random numbers.
        self.rest.get_params = _all_of

    def __call__(self, height: int, width: int) -> _RegionPlan:
        top, left, rows, columns = self.step.get_params(_shaped(height, width), self.step.scale, self.step.ratio)
        return _RegionPlan(top, left, rows, columns, self.rest, _pair(self.step.size) if self.scales else None)


class _ResizedCropV2(_Planner):
    """RandomResizedCrop of torchvision v2."""

    def __call__(self, height: int, width: int) -> _RegionPlan:
        box = self.step.make_params([_shaped(height, width)])
        target = _pair(self.step.size) if self.scales else None
        return _RegionPlan(box["top"], box["left"], box["height"], box["width"], self._finish, target)

    def _finish(self, image: Any) -> Any:
        top, left, height, width = _all_of(image)
        return self.step.transform(image, {"top": top, "left": left, "height": height, "width": width})


class _CenterCrop(_Planner):
    """CenterCrop of torchvision. It pads a smaller image, so such an image is decoded as a whole."""

    def __call__(self, height: int, width: int) -> _RegionPlan | None:
        rows, columns = _pair(self.step.size)
        if rows > height or columns > width:
            return None
        # Round as torchvision does. The step then gets an image of exactly its size.
        return _RegionPlan(round((height - rows) / 2.0), round((width - columns) / 2.0), rows, columns, self.step)


class _Resize(_Planner):
    """Resize of torchvision. It needs the whole image, but a large one at a smaller scale will do."""

    def __call__(self, height: int, width: int) -> _RegionPlan | None:
        target = self._target(height, width) if self.scales else None
        if target is None:
            return None
        # The scaled image has rounded sides, from which the step would compute another size than from the original.
        rest = copy.copy(self.step)
        rest.size, rest.max_size = list(target), None
        plan = _RegionPlan(0, 0, height, width, rest, target)
        return plan if plan.scale() > 1 or self.kernel is not None else None

    def _target(self, height: int, width: int) -> tuple[int, int] | None:
        size = self.step.size
        if isinstance(size, int):
            size = [size]
        if size is None or self.step.max_size is not None:
            return None
        if len(size) == 2:
            return int(size[0]), int(size[1])
        short, long = min(height, width), max(height, width)
        wide = int(size[0] * long / short)
        return (size[0], wide) if height <= width else (wide, size[0])


_PLANNERS: dict[tuple[str, str], type[_Planner]] = {
    (_V1, "RandomResizedCrop"): _ResizedCrop,
    (_TIMM, "RandomResizedCropAndInterpolation"): _ResizedCrop,
    (_V2, "RandomResizedCrop"): _ResizedCropV2,
    (_V1, "CenterCrop"): _CenterCrop,
    (_V2, "CenterCrop"): _CenterCrop,
    (_V1, "Resize"): _Resize,
    (_V2, "Resize"): _Resize,
}


def _planner(step: Any, tensors: bool) -> _Planner | None:
    kind = _PLANNERS.get((type(step).__module__, _name(step)))
    if kind is _ResizedCropV2 and not all(hasattr(step, name) for name in ("make_params", "transform")):
        return None  # a torchvision before 0.21
    return None if kind is None else kind(step, tensors=tensors)


def _is_smooth(step: Any, *, tensors: bool) -> bool:
    """Return whether the step averages over pixels when it shrinks an image.

    If it picks single pixels, its result for a scaled image would look different.
    """
    modes = getattr(step, "interpolation", None)
    modes = modes if isinstance(modes, tuple | list) else (modes,)
    averages = not tensors or getattr(step, "antialias", True) is True
    return averages and all(_value(mode) in _SMOOTH for mode in modes)


def _value(mode: Any) -> Any:
    """The name of an interpolation, which torchvision has as a member of an enumeration."""
    return getattr(mode, "value", mode)


def _resized(pixels: Image, size: tuple[int, int], mode: str) -> Image:
    """HWC uint8 pixels, resized as Pillow does: within two levels of 255 for ``bilinear``, and six for ``bicubic`` on photographs."""
    import torch
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import resize

    image = torch.from_numpy(pixels).permute(2, 0, 1)
    resized: Image = resize(image, list(size), InterpolationMode(mode), antialias=True).permute(1, 2, 0).numpy()
    return resized


def _is_hwc(image: Any) -> bool:
    """Return whether this is a CHW view of a decoded colour image in HWC memory. With one channel, both layouts are the same."""
    if not hasattr(image, "stride") or image.ndim != 3 or image.shape[0] == 1:
        return False
    return str(image.dtype) == "torch.uint8" and image.stride()[::2] == (1, image.shape[0])


def _shaped(height: int, width: int) -> Any:
    """A stand-in for an image of this size, without memory for its pixels, for methods that only look at the size."""
    import torch

    return torch.empty(1, 1, 1).expand(3, height, width)


def _all_of(image: Any, *unused: Any) -> tuple[int, int, int, int]:
    """A crop that is the whole image."""
    height, width = image.shape[-2:] if hasattr(image, "shape") else (image.height, image.width)
    return 0, 0, height, width


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def _is_from(step: Any, module: str) -> bool:
    return type(step).__module__.startswith(module)


def _name(step: object) -> str:
    return type(step).__name__
