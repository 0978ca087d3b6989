"""Split a torchvision or timm image transform into a part for CPUs that ends in uint8 and a part for the device.

Shipping uint8 takes a quarter of the network traffic of float32, and reached three times its throughput in a measurement. So a
tail that only converts and normalises (ToTensor, ToDtype, Normalize, ...) runs on the worker's device.

Where it stops: it moves only a tail of known conversions. Steps that mix pixels or are random stay on the CPUs; the transform then
ships its usual result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from offload.pipeline.blocks.values import own
from offload.pipeline.blocks.whole_samples import is_nested
from offload.pipeline.blocks.wire import Array, as_array, is_pillow, is_tensor
from offload.pipeline.images import on_device as device
from offload.pipeline.images.region_decode import EncodedImage
from offload.pipeline.images.region_first import region_first, takes_encoded

_CONVERSIONS = {"ToTensor", "PILToTensor", "ToImage", "ToPureTensor", "MaybeToTensor", "MaybePILToTensor"}
_DTYPES = {"ToDtype", "ConvertImageDtype"}
_V1 = "torchvision.transforms.transforms"
_V2 = ("torchvision.transforms.v2", "offload.transforms")
_SEVERAL = {"FiveCrop", "TenCrop"}  # these make several images of one, so the result is not HWC
_FROM_OR_TO_PIL = {"Lambda", "ToTensor", "PILToTensor", "ToPILImage"}
_OF_ARRAYS = {"ToTensor", "MaybeToTensor", "ToPILImage", "ToImage"}  # these take arrays as HWC
_PLAIN = {"L", "RGB"}  # modes of Pillow that transforms of v2 treat as they treat tensors


@dataclass(frozen=True)
class SplitTransform:
    """The two parts of a transform, and a sentence about them.

    Args:
        cpu: a function from an image, such as HWC uint8 pixels, to an array, or to a list or tuple of several.
        on_device: a function that finishes a batch. None: nothing to do.
        says: where each step runs, for the user.
    """

    cpu: Callable[[Any], Any]
    on_device: Callable[[dict[str, Any]], dict[str, Any]] | None
    says: str


def is_image_transform(transform: object) -> bool:
    """Return whether this is a transform of torchvision, timm or offload, or a subclass that is called like one.

    Such a transform takes one image, not a batch.
    """
    if takes_one_image(type(transform)):
        return True
    steps = _steps(transform) if type(transform).__module__.startswith("torch.nn") else []
    return bool(steps) and all(map(is_image_transform, steps))


def takes_one_image(kind: type) -> bool:
    """Return whether instances of this class are such transforms, see :func:`is_image_transform`."""
    # Given a batch of arrays, a subclass of v2.Transform would silently change nothing. One with its own call may take anything.
    called = _owner(kind, "__call__")
    if called.__module__.startswith("torch.nn"):
        called = _owner(kind, "forward")
    return _is_theirs(kind) or _is_theirs(called)


def _is_theirs(kind: type) -> bool:
    return kind.__module__.startswith(
        ("torchvision.transforms", "timm.data.transforms", "timm.data.auto_augment", "offload.transforms")
    )


def _owner(kind: type, method: str) -> type:
    """The class that defines a method of a class, or else ``object``."""
    return next((base for base in kind.__mro__ if method in vars(base)), object)


def split_transform(transform: object, *, from_dataset: bool = False) -> SplitTransform:
    """Split an image transform (see the module). The worker receives the same values; the tail's input was already rounded to
    uint8. ``from_dataset``: images come as a data set of torch returned them."""
    steps = _steps(transform) or [transform]
    cut = len(steps)
    while cut > 0 and _is_tail(steps[cut - 1]):
        cut -= 1
    head, tail = steps[:cut], steps[cut:]
    within = [inner for step in head for inner in _walk(step)]
    several = any(_name(inner) in _SEVERAL for inner in within)
    if several or not _converts_uint8(tail) or any(map(_makes_float, within)):
        says = f"{_names(steps)} runs on the CPUs and ships its result (it does not end with a conversion to move)"
        if _takes_tensors(steps) and not several:
            return SplitTransform(
                CpuPart(steps, tensors=True, from_dataset=from_dataset), OnUint8(device.ToChannelsFirst()), says
            )
        return SplitTransform(CpuPart(steps, tensors=False, as_returned=True, from_dataset=from_dataset), None, says)
    preset = transform if _is_preset(transform) else None
    return SplitTransform(
        CpuPart(head, tail, tensors=_takes_tensors(head), preset=preset, from_dataset=from_dataset),
        OnUint8(_device_part(tail)),
        f"CPUs: {_names(head) or 'decode only'}, shipping uint8; device: {_names(tail)}",
    )


def unsplit_transform(transform: object, *, from_dataset: bool = False) -> Callable[[Any], Any]:
    """An image transform that runs on the CPUs as a whole, for a ``collate_fn`` that expects the transform's own results.

    ``from_dataset``: as for :func:`split_transform`.
    """
    steps = _steps(transform) or [transform]
    preset = transform if _is_preset(transform) else None
    return CpuPart(
        steps, tensors=_takes_tensors(steps), as_returned=True, preset=preset, plain=False, from_dataset=from_dataset
    )


_IN_PLACE = frozenset(
    {
        "AutoContrast", "ClampBoundingBoxes", "ColorJitter", "Compose", "ConvertImageDtype", "GaussianBlur", "GaussianNoise",
        "Grayscale", "Identity", "JPEG", "Lambda", "MaybeToTensor", "Normalize", "PILToTensor", "RGB", "RandomAdjustSharpness",
        "RandomApply", "RandomAutocontrast", "RandomChannelPermutation", "RandomChoice", "RandomEqualize", "RandomErasing",
        "RandomGrayscale", "RandomInvert", "RandomOrder", "RandomPhotometricDistort", "RandomPosterize", "RandomSolarize",
        "SanitizeBoundingBoxes", "Sequential", "ToDtype", "ToImage", "ToNumpy", "ToPILImage", "ToPureTensor", "ToTensor",
    }
)  # fmt: skip
"""Transforms that leave each pixel at its place."""


class CpuPart:
    """The steps that run in a preprocessing task on one image.

    A uint8 image leaves as HWC, one layout on the wire, unless ``as_returned``. If ``steps`` make something else (floats, or several
    images), ``tail`` runs here too, and its result leaves unchanged.

    Args:
        steps, tail: the steps before the cut, and those after it.
        tensors: whether the steps take uint8 tensors. Otherwise they get images of Pillow.
        as_returned: whether the result keeps the layout in which the last step returned it.
        preset: the transform from which the steps come. It handles float input, which its steps do not.
        plain: whether the result leaves as an array or a structure of arrays.
        from_dataset: whether images are what a torch data set returned, of any type. Otherwise they are arrays: decoded by a source, or
            once images or tensors, so their layout is a guess. It is also a guess for a data set's arrays that torchvision would refuse
            or leave unchanged.
    """

    def __init__(
        self,
        steps: Sequence[Any],
        tail: Sequence[Any] = (),
        *,
        tensors: bool,
        as_returned: bool = False,
        preset: Callable[[Any], Any] | None = None,
        plain: bool = True,
        from_dataset: bool = False,
    ) -> None:
        self._says = _names([*steps, *tail])
        first = next(iter((*steps, *tail)), None)
        self._from_arrays = _reads_arrays(first)
        self._floats_stay = type(first).__module__ == _V1 and _name(first) == "ToTensor"  # it takes no tensors
        # Steps of v2 pass arrays through unchanged, until one of them takes arrays.
        self._of_v2 = type(first).__module__.startswith(_V2)
        taking = (*steps, *tail) if self._of_v2 else (first,)
        drop_in = type(first).__module__.startswith(
            "offload.transforms"
        )  # it stands in for a step of v1, which takes no arrays
        self._arrays_stay = (
            from_dataset and not drop_in and any(_takes_anything(inner) for step in taking for inner in _walk(step))
        )
        """Whether the steps get a data set's arrays unchanged."""
        self._several = any(_name(inner) in _SEVERAL for step in steps for inner in _walk(step))
        # These refuse tensors, or leave them as uint8, which Normalize then refuses. It must fail here as it does in torchvision.
        self._tail_takes_tensors = preset is not None or not any(
            _name(step) in {"ToTensor", "MaybeToTensor"} for step in tail
        )
        self.moves_pixels = any(_name(inner) not in _IN_PLACE for step in steps for inner in _walk(step))
        """Whether pixels may move, so boxes and masks of the image would no longer fit."""
        as_input = _as_tensor_image if tensors else _as_pil_image
        self.steps, self.tail = tuple(region_first(steps, as_input, tensors=tensors)), tuple(tail)
        self.preset, self.plain, self.from_dataset = preset, plain, from_dataset
        self.tensors, self.as_returned = tensors, as_returned
        self.takes_encoded = takes_encoded(self.steps)
        """Whether sources may pass on encoded images. The first step then decodes only what it needs."""

    def __call__(self, image: Any) -> Any:
        if isinstance(image, EncodedImage):
            return self._finished(self.steps[0](image), self.steps[1:])
        of_pixels = isinstance(image, np.ndarray) and not self._arrays_stay and (self._of_v2 or _fits_pillow(image))
        if self.from_dataset and not of_pixels:
            return self._of_dataset_image(image)
        return self._of_pixels(own(image) if self.from_dataset else image)

    def _of_dataset_image(self, image: Any) -> Any:
        """The result for an image of a data set. The data set may keep the image and a step may write to it, so it is copied."""
        if self.preset is not None and (self.as_returned or not _is_bytes(image)):
            return self._sent(self.preset(own(image)))
        if not self.steps and is_pillow(image):
            return self._finished(image, ())  # conversions only read it
        if self.tensors and self.plain and is_pillow(image) and image.mode in _PLAIN:
            return self._finished(_as_tensor_image(np.array(image)), self.steps)
        image = own(image)
        if isinstance(image, np.ndarray):
            image = np.require(image, requirements="W")  # a read-only one is still the data set's
        to_image = self.steps and self.tensors and self.plain and self._from_arrays
        if to_image and isinstance(image, np.ndarray) and _is_bytes(image):
            return self._finished(_view_of_hwc(image), self.steps)  # as ToImage reads it, without a copy
        return self._finished(image, self.steps, exact=True)

    def _of_pixels(self, pixels: Array) -> Any:
        of_bytes = pixels.dtype == np.uint8 and pixels.ndim in (2, 3)
        if not of_bytes and self.preset is not None:
            return self._sent(self.preset(_as_tensor(pixels)))
        if not of_bytes:
            # A data set's own floats, or clips, in its own layout.
            image = np.require(pixels, requirements="W") if self._floats_stay else _as_tensor(pixels)
        elif not self.steps:
            return _channels_last(pixels)
        elif self.tensors:
            image = _as_tensor_image(pixels)
        elif self._from_arrays:
            # Pillow has no mode for some numbers of channels, and ToPILImage takes none of its images.
            image = np.require(_channels_last(pixels), requirements="W")
        else:
            image = _as_pil_image(pixels)
        return self._finished(image, self.steps)

    def _finished(self, image: Any, steps: Sequence[Any], *, exact: bool = False) -> Any:
        """The image after these steps. ``exact``: the steps get what they would get without offload, so a tensor is the user's own."""
        for step in steps:
            image = step(image)
        refused = exact and is_tensor(image) and not self._tail_takes_tensors
        if not self.as_returned and (refused or not _is_bytes(image)):
            for step in self.tail:
                image = step(image)
        return self._sent(image)

    def _sent(self, image: Any) -> Any:
        """Convert a result to the form in which it leaves this process."""
        if not self.plain:
            return image
        if isinstance(image, list | tuple | Mapping):
            # The crops of FiveCrop and TenCrop travel as one array; other views stay the list or tuple that the transform returned.
            stacks = self._several and type(image) is tuple and len({getattr(e, "shape", None) for e in image}) == 1
            if not stacks and (is_nested([image]) or not image):
                return _as_arrays(image)
        array = as_array(image)
        if self.as_returned or array.dtype != np.uint8:
            return array
        if is_tensor(image):
            return array.transpose(1, 2, 0) if array.ndim == 3 else array
        return array[..., np.newaxis] if array.ndim == 2 else array

    def __repr__(self) -> str:
        return self._says


class OnUint8:
    """A device step for images that travelled as uint8; the CPUs have finished all others."""

    def __init__(self, step: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.step = step

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import torch

        images = batch["image"]
        # Clips have more dimensions, and several views of an image are a list.
        travelled = isinstance(images, torch.Tensor) and images.dtype == torch.uint8 and images.ndim == 4
        return self.step(batch) if travelled else batch

    def __repr__(self) -> str:
        return repr(self.step)


def _as_tensor_image(pixels: np.ndarray[Any, Any]) -> Any:
    return _view_of_hwc(_channels_last(pixels))


def _view_of_hwc(pixels: np.ndarray[Any, Any]) -> Any:
    # A channels-last view of the decoded pixels: in this layout, resizing uint8 is 1.9 times as fast as in contiguous CHW.
    return _as_tensor(pixels[..., np.newaxis] if pixels.ndim == 2 else pixels).permute(2, 0, 1)


def _as_pil_image(pixels: np.ndarray[Any, Any]) -> Any:
    import PIL.Image

    pixels = _channels_last(pixels)
    return PIL.Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _as_tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(np.require(array, requirements="W"))


def _channels_last(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The uint8 pixels as HWC, whether decoded or from a data set that gives HW (greyscale) or CHW (tensors)."""
    if pixels.ndim == 2:
        return pixels[..., np.newaxis]
    if pixels.shape[0] in (1, 3, 4) and pixels.shape[2] not in (1, 3, 4):
        return pixels.transpose(1, 2, 0)
    return pixels


def _is_bytes(image: Any) -> bool:
    """Return whether this is one uint8 image, which may travel as HWC: a CHW tensor, or an HW or HWC array or Pillow image.

    A conversion to a tensor reads only a Pillow image's bytes, whatever its mode.
    """
    if is_tensor(image):
        return str(image.dtype) == "torch.uint8" and image.ndim == 3
    if is_pillow(image):
        # Bits are uint8 for torchvision, and bool for NumPy.
        return image.mode not in {"1", "I", "F"} and not image.mode.startswith("I;")
    return isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3)


def _fits_pillow(pixels: np.ndarray[Any, Any]) -> bool:
    """Return whether a Pillow image can hold this array of HW, HWC or CHW."""
    return _is_bytes(pixels) and _channels_last(pixels).shape[2] <= 4


def _as_arrays(value: Any) -> Any:
    """The structure with arrays in place of Pillow's images."""
    if isinstance(value, Mapping):
        return {key: _as_arrays(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = map(_as_arrays, value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return np.array(value) if is_pillow(value) else value


def _takes_anything(step: object) -> bool:
    """Return whether a step takes arrays as well as images: a user's function, or a conversion of arrays."""
    if not takes_one_image(type(step)):
        return True
    return _reads_arrays(step) or (_is_theirs(type(step)) and _name(step) == "Lambda")


def _reads_arrays(step: object) -> bool:
    """Return whether this is a conversion that takes arrays as HWC. timm's ToTensor takes no arrays."""
    timm = type(step).__module__.startswith("timm") and _name(step) == "ToTensor"
    return _is_theirs(type(step)) and _name(step) in _OF_ARRAYS and not timm


def _steps(transform: Any) -> list[Any]:
    """The steps of a Compose or Sequential, including nested ones, or of a preset of torchvision's models
    (``weights.transforms()``)."""
    if _name(transform) == "Compose":
        inner = list(transform.transforms)
    elif _is_preset(transform):
        from torchvision.transforms import CenterCrop, Normalize, Resize, ToTensor

        resize = Resize(transform.resize_size, interpolation=transform.interpolation, antialias=transform.antialias)
        return [resize, CenterCrop(transform.crop_size), ToTensor(), Normalize(transform.mean, transform.std)]
    elif _name(transform) == "Sequential":
        inner = list(transform)
    else:
        return []
    return [step for part in inner for step in (_steps(part) or [part])]


def _is_preset(transform: object) -> TypeGuard[Any]:
    return _name(transform) == "ImageClassification" and type(transform).__module__.startswith("torchvision.")


def _walk(step: Any) -> Iterator[Any]:
    """Yield a step and the steps that it wraps (RandomApply, RandomChoice, ...)."""
    yield step
    inner = getattr(step, "transforms", ())
    try:
        wrapped = list(inner)
    except TypeError:
        return
    for part in wrapped:
        yield from _walk(part)


def _takes_tensors(steps: Sequence[Any]) -> bool:
    """Return whether all steps treat a uint8 tensor like a PIL image. All steps of torchvision v2 do, except conversions of PIL images,
    which leave tensors unchanged. A user's functions may not."""
    return all(
        type(inner).__module__.startswith(_V2) and _name(inner) not in _FROM_OR_TO_PIL
        for step in steps
        for inner in _walk(step)
    )


def _name(step: object) -> str:
    return type(step).__name__


def _names(steps: Sequence[object]) -> str:
    return ", ".join(_name(s) for s in steps)


def _is_tail(step: Any) -> bool:
    if not _is_theirs(type(step)):
        return False
    if _name(step) in _DTYPES:
        return bool(getattr(step.dtype, "is_floating_point", False))
    return _name(step) in _CONVERSIONS or _name(step) == "Normalize"


def _converts_uint8(tail: Sequence[Any]) -> bool:
    """Return whether a tail makes sense for uint8 images: a step that makes floats precedes Normalize."""
    makers = [_name(step) for step in tail if _makes_float(step)]
    return bool(tail) and (not makers or makers[0] != "Normalize")


def _makes_float(step: Any) -> bool:
    name = _name(step)
    if name in _DTYPES:
        return bool(getattr(step.dtype, "is_floating_point", False))
    return name in {"ToTensor", "MaybeToTensor", "Normalize"}


def _device_part(tail: Sequence[Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    scale, dtype = 1.0, ""
    mean, std = [0.0], [1.0]
    for step in tail:
        name = _name(step)
        if name in {"ToTensor", "MaybeToTensor"}:
            if not dtype:
                scale, dtype = 1 / 255, "float32"
        elif name in _DTYPES:
            # ToDtype scales only on request; ConvertImageDtype always does. Neither scales from float to float.
            if not dtype and getattr(step, "scale", True):
                scale = 1 / 255
            dtype = str(step.dtype).removeprefix("torch.")
        elif name == "Normalize":
            step_mean, step_std = _floats(step.mean), _floats(step.std)
            channels = max(len(mean), len(step_mean))
            mean, std = _widen(mean, channels), _widen(std, channels)
            step_mean, step_std = _widen(step_mean, channels), _widen(step_std, channels)
            # ((x − m)/s − m')/s' = (x − (m + s·m')) / (s·s')
            mean = [m + s * m2 for m, s, m2 in zip(mean, std, step_mean, strict=True)]
            std = [s * s2 for s, s2 in zip(std, step_std, strict=True)]
    if not dtype:
        return device.ToChannelsFirst()
    return device.NormalizeHWC(mean, std, dtype=dtype, scale=scale)


def _floats(values: Any) -> list[float]:
    if isinstance(values, int | float):
        return [float(values)]
    flat = values.flatten().tolist() if hasattr(values, "flatten") else values
    return [float(v) for v in flat]


def _widen(values: list[float], channels: int) -> list[float]:
    return values * channels if len(values) == 1 else values
