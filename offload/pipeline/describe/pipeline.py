"""The user's description of a data set: its source, its transform, and the conversion on the device.

Where it stops: :mod:`offload.pipeline.describe.sources` holds the functions that users call.
"""

from __future__ import annotations

import functools
import inspect
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from offload.errors import ConfigError
from offload.model.checks import check_callable, check_choice, check_flag, check_number
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.images.region_decode import DECODE, Decode
from offload.pipeline.images.split import is_image_transform, split_transform, takes_one_image, unsplit_transform
from offload.pipeline.index.source import Index, Lister
from offload.pipeline.preprocessing.processing import IndexRecipe
from offload.pipeline.preprocessing.recipe import Kind, OnError

if TYPE_CHECKING:
    import ray.data

OnDevice = Callable[[dict[str, Any]], dict[str, Any]]
CollateFn = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class CachedAs:
    """The samples that nodes keep in this folder under this name, and the data set that makes them."""

    name: str
    folder: pathlib.Path
    made_by: Pipeline


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A data set and its preprocessing, the result of :func:`offload.image_folder` and its siblings. Nothing is read yet."""

    name: str
    list: Lister | None = None
    dataset: ray.data.Dataset | None = None
    id_column: str | None = None
    transform: Any = None
    kind: Kind = "none"
    collate_fn: CollateFn | None = None
    on_device: tuple[OnDevice, ...] = ()
    on_error: OnError = "raise"
    shuffle: bool | None = None
    sample_timeout_s: float | None = None
    notes: tuple[str, ...] = ()
    aside: bool = True
    """Whether ``list`` may run on another thread. The user's code may be bound to the thread that made it."""
    caches: tuple[CacheSpec, ...] = ()
    """The caches of its sources, on each node."""
    kept: tuple[CachedAs, ...] = ()
    """The samples that :func:`offload.cached` keeps."""
    parts: Mapping[str, Pipeline] = field(default_factory=dict)
    """The data sets that :func:`offload.mix` joined."""
    drawn: bool = False
    """Whether a pass draws samples by weight (:func:`offload.weighted`) instead of visiting each once."""
    batch_size: int | None = None
    """The batch size of the torch DataLoader that described it; None for other descriptions."""
    drop_last: bool = False
    """Whether training passes leave out their last batches, which are not full, unless the loop says otherwise."""

    @property
    def yields(self) -> bool:
        """Whether its transform yields any number of samples for one."""
        return self.kind == "generator" or any(part.yields for part in self.parts.values())

    @property
    def decodes_regions(self) -> bool:
        """Whether its source leaves JPEG files encoded, so that the transform decodes only what it needs."""
        return isinstance(self.list, functools.partial) and bool(self.list.keywords.get("encoded"))

    def recipe(self, index: Index | None, *, seed: int, dataset: str = "") -> IndexRecipe:
        """The recipe that the tasks of this pipeline run. ``dataset``: its name, for messages."""
        return IndexRecipe(
            transform=self.transform,
            kind=self.kind,
            seed=seed,
            on_error=self.on_error,
            seeded_by=SAMPLE_ID if index is None or index.draws is None else POSITION,
            reader=index.reader if index is not None else None,
            dataset=dataset,
            sample_timeout_s=self.sample_timeout_s,
            whole=self.collate_fn is not None or self.kind == "generator",
        )


def _check_transform(transform: Any, argument: str) -> None:
    """Raise ConfigError if a transform cannot be called with one argument, or its class not constructed without any.

    ``argument``: what it is called with, in words.
    """
    check_callable("transform", transform, sane="a function of a batch, or a class of such functions")
    name = getattr(transform, "__qualname__", type(transform).__name__)
    call = transform
    if isinstance(transform, type):
        if takes_one_image(transform):
            raise ConfigError(
                f"the transform class {name} takes an image, not {argument}. Pass an instance: {name}(...)."
            )
        if (needed := missing_arguments(transform)) is not None:
            raise ConfigError(
                f"every node constructs the transform class {name} without arguments, and it {needed}. Pass "
                f"an instance ({name}(...)), or give its arguments defaults."
            )
        if not any("__call__" in base.__dict__ for base in transform.__mro__):
            raise ConfigError(
                f"instances of the transform class {name} cannot be called: define __call__(self, batch)."
            )
        call = functools.partial(transform.__call__, None)
    if (needed := missing_arguments(call, object())) is not None:
        raise ConfigError(
            f"offload calls the transform {name} with one argument, {argument} as a dict of columns, and it {needed}."
        )


def is_generator(transform: Any) -> bool:
    """Return whether the transform yields samples: a generator function, or an object or class with such a ``__call__``."""
    if isinstance(transform, functools.partial):
        return is_generator(transform.func)
    kind = transform if isinstance(transform, type) else type(transform)
    return inspect.isgeneratorfunction(transform) or inspect.isgeneratorfunction(getattr(kind, "__call__", None))  # noqa: B004


def missing_arguments(call: Any, *arguments: Any) -> str | None:
    """The reason why ``call`` cannot take these arguments: ``misses a required argument: 'size'``.

    None if it can take them, or if nobody knows.
    """
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError as error:
        text = str(error)
        return (
            text.replace("missing a", "misses a", 1) if text.startswith("missing") else f"takes no such call ({text})"
        )
    except Exception:  # a C function without a signature, or with a wrong one
        return None
    return None


def build_pipeline(
    name: str,
    lister: Callable[..., Index] | None,
    transform: Any,
    *,
    per_sample: bool,
    collate_fn: CollateFn | None,
    on_device: OnDevice | None,
    on_error: OnError,
    shuffle: bool | None,
    sample_timeout_s: float | None = None,
    decode: Decode = "exact",
    cache: CacheSpec | None = None,
    from_dataset: bool = False,
) -> Pipeline:
    """The pipeline of these arguments, as :func:`offload.image_folder` describes them.

    ``from_dataset``: images come as a torch data set returned them. Raises ConfigError for invalid arguments.
    """
    check_choice("on_error", on_error, ("raise", "skip"))
    check_choice("decode", decode, DECODE)
    check_flag("per_sample", per_sample)
    if shuffle is not None:
        check_flag("shuffle", shuffle)
    if sample_timeout_s is not None:
        sample_timeout_s = check_number("sample_timeout_s", sample_timeout_s, above=0.0, sane="seconds, such as 60")
    if on_device is not None:
        check_callable("on_device", on_device, sane="from a batch of tensors to such a batch")
    if collate_fn is not None:
        check_callable(
            "collate_fn", collate_fn, sane="from a list of samples to a batch, such as offload.collate.pad()"
        )
    if transform is not None:
        _check_transform(transform, "a sample" if per_sample or is_generator(transform) else "a batch")
    finish: tuple[OnDevice, ...] = (on_device,) if on_device is not None else ()
    kind: Kind
    notes: tuple[str, ...] = ()
    if transform is None:
        kind = "none"
    elif is_image_transform(transform) and collate_fn is not None:
        kind, transform = "image", unsplit_transform(transform, from_dataset=from_dataset)
    elif is_image_transform(transform):
        split = split_transform(transform, from_dataset=from_dataset)
        kind, transform, notes = "image", split.cpu, (split.says,)
        finish = ((split.on_device,) if split.on_device is not None else ()) + finish
    elif is_generator(transform):
        kind = "generator"
    else:
        kind = "sample" if per_sample else "batch"
    if kind == "image" and decode == "auto" and lister is not None and transform.takes_encoded:
        lister = functools.partial(lister, encoded=True)
    return Pipeline(
        name=name,
        list=lister,
        transform=transform,
        kind=kind,
        collate_fn=collate_fn,
        on_device=finish,
        on_error=on_error,
        shuffle=shuffle,
        sample_timeout_s=sample_timeout_s,
        notes=notes,
        caches=() if cache is None else (cache,),
    )
