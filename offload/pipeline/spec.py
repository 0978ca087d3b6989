"""What a user says about a data set: where it comes from, how it is transformed, what happens on the device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.errors import ConfigError
from offload.model.checks import (
    check_callable,
    check_choice,
    check_flag,
    check_names,
    check_number,
    check_path,
    check_text,
    shown,
)
from offload.pipeline.recipe import Kind, OnError, Recipe
from offload.pipeline.sources.base import Index, Lister, silent
from offload.pipeline.sources.files import Path
from offload.pipeline.sources.from_torch import DEFAULT_COLUMNS, list_torch_dataset
from offload.pipeline.sources.image_folder import list_image_folder
from offload.pipeline.sources.parquet import list_parquet
from offload.pipeline.sources.webdataset import list_webdataset
from offload.pipeline.split import is_image_transform, split_transform

if TYPE_CHECKING:
    import ray.data

OnDevice = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A data set and its preprocessing, as :func:`image_folder` and its siblings return it. Nothing is read yet."""

    name: str
    list: Lister | None = None
    dataset: ray.data.Dataset | None = None
    id_column: str | None = None
    transform: Any = None
    kind: Kind = "none"
    on_device: tuple[OnDevice, ...] = ()
    on_error: OnError = "raise"
    shuffle: bool | None = None
    sample_timeout_s: float | None = None
    notes: tuple[str, ...] = ()
    aside: bool = True
    """Whether ``list`` may be called on another thread: code of the user's may be bound to the one that made it."""

    def recipe(self, index: Index | None, *, seed: int, dataset: str = "") -> Recipe:
        """What the tasks of this pipeline run. ``dataset``: its name, for messages."""
        return Recipe(
            transform=self.transform,
            kind=self.kind,
            seed=seed,
            on_error=self.on_error,
            reader=index.reader if index is not None else None,
            dataset=dataset,
            sample_timeout_s=self.sample_timeout_s,
        )


def image_folder(
    path: Path,
    transform: Any = None,
    *,
    per_sample: bool = False,
    on_device: OnDevice | None = None,
    on_error: OnError = "raise",
    shuffle: bool | None = None,
    sample_timeout_s: float | None = None,
    filesystem: Any = None,
) -> Pipeline:
    """Images in class folders, ``PATH/<class>/<name>.jpg``.

    Gives ``batch["image"]``, a list of decoded HWC uint8 arrays, and ``batch["label"]``, int64: the number of the class
    in sorted order.

    Args:
        path: a local folder, ``s3://...``, or any path that pyarrow or fsspec opens.
        transform: a callable from a batch (dict of columns) to a batch with as many rows, per sample with
            ``per_sample=True``; a class of such a callable, constructed once per preprocessing actor; or a torchvision or
            timm transform of one image, whose converting and normalising tail then runs on the device.
        per_sample: whether ``transform`` takes one sample (a dict of values) instead of a batch.
        on_device: runs on each batch of tensors on the worker's device, such as :class:`offload.Normalize`.
        on_error: ``"raise"`` ends the run at a file that cannot be decoded; ``"skip"`` counts it, lists it in the run
            directory and goes on.
        shuffle: whether an epoch's order is random (a function of the seed and the epoch). None: only for ``"train"``.
        sample_timeout_s: the longest that reading or transforming one sample may take, to about a second. One that takes
            longer is interrupted and treated as ``on_error`` says. None: training waits for it, and the run names it after a minute.
        filesystem: a pyarrow or fsspec file system to use instead of the path's own.

    Raises:
        ConfigError: for options that contradict each other; for what is wrong with the path, when the run starts.
    """
    check_path("image_folder: path", path, sane="a folder, or a URI such as s3://bucket/train")
    return _pipeline(
        f"image_folder({path})",
        lambda tell=silent: list_image_folder(path, filesystem=filesystem, tell=tell),
        transform,
        per_sample=per_sample,
        on_device=on_device,
        on_error=on_error,
        shuffle=shuffle,
        sample_timeout_s=sample_timeout_s,
    )


def from_torch(
    dataset: Any,
    transform: Any = None,
    *,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    per_sample: bool = False,
    on_device: OnDevice | None = None,
    on_error: OnError = "raise",
    shuffle: bool | None = None,
    sample_timeout_s: float | None = None,
) -> Pipeline:
    """Any map-style ``torch.utils.data.Dataset``: its ``__getitem__`` (or ``__getitems__``) runs on every CPU.

    ``columns`` names the parts of the tuple it returns; a dict is taken as it is, with the same keys for every item. Other
    arguments as in :func:`image_folder`.
    """
    names = check_names("from_torch: columns", columns, sane="such as ('image', 'label')")
    pipeline = _pipeline(
        f"from_torch({type(dataset).__name__})",
        lambda tell=silent: list_torch_dataset(dataset, names),
        transform,
        per_sample=per_sample,
        on_device=on_device,
        on_error=on_error,
        shuffle=shuffle,
        sample_timeout_s=sample_timeout_s,
    )
    return _replace(pipeline, aside=False)


def parquet(
    path: Path,
    transform: Any = None,
    *,
    columns: Sequence[str] | None = None,
    images: Sequence[str] = (),
    per_sample: bool = False,
    on_device: OnDevice | None = None,
    on_error: OnError = "raise",
    shuffle: bool | None = None,
    sample_timeout_s: float | None = None,
    filesystem: Any = None,
) -> Pipeline:
    """Parquet files: a file, or all below a folder. ``columns`` limits what is read; ``images`` are columns of encoded
    images to decode. Shuffling reorders row groups, and rows within each. Other arguments as in :func:`image_folder`."""
    check_path("parquet: path", path, sane="a file or folder, or a URI such as s3://bucket/rows")
    sane = "such as ('image', 'label')"
    names = None if columns is None else check_names("parquet: columns", columns, sane=sane)
    encoded = check_names("parquet: images", images, sane=sane)
    return _pipeline(
        f"parquet({path})",
        lambda tell=silent: list_parquet(path, columns=names, images=encoded, filesystem=filesystem, tell=tell),
        transform,
        per_sample=per_sample,
        on_device=on_device,
        on_error=on_error,
        shuffle=shuffle,
        sample_timeout_s=sample_timeout_s,
    )


def webdataset(
    shards: Path | Sequence[Path],
    transform: Any = None,
    *,
    per_sample: bool = False,
    on_device: OnDevice | None = None,
    on_error: OnError = "raise",
    shuffle: bool | None = None,
    sample_timeout_s: float | None = None,
    filesystem: Any = None,
) -> Pipeline:
    """WebDataset tar shards: a folder, a glob, ``name-{000..019}.tar``, or a list. Images become ``image``, ``.cls`` becomes
    ``label``. Shuffling reorders shards, and samples within each. Other arguments as in :func:`image_folder`."""
    sane = "a folder, name-{000..019}.tar, a URI, or a list of these"
    if isinstance(shards, list | tuple):
        shards = [check_path(f"webdataset: shards[{i}]", each, sane=sane) for i, each in enumerate(shards)]
    else:
        check_path("webdataset: shards", shards, sane=sane)
    return _pipeline(
        f"webdataset({shards})",
        lambda tell=silent: list_webdataset(shards, filesystem=filesystem, tell=tell),
        transform,
        per_sample=per_sample,
        on_device=on_device,
        on_error=on_error,
        shuffle=shuffle,
        sample_timeout_s=sample_timeout_s,
    )


def from_ray(
    dataset: ray.data.Dataset,
    transform: Any = None,
    *,
    id_column: str | None = None,
    per_sample: bool = False,
    on_device: OnDevice | None = None,
) -> Pipeline:
    """A ``ray.data.Dataset`` with its own pipeline, in its own order.

    ``id_column`` names an int64 column that tells samples apart, the same in every epoch and run; with it the guarantee
    that each sample is trained exactly once holds over a resumed run too. Without it samples are numbered as they
    come: each is delivered once per epoch, but an epoch that was interrupted starts again.
    """
    if not all(hasattr(type(dataset), name) for name in ("map_batches", "iter_internal_ref_bundles")):
        raise ConfigError(f"from_ray takes a ray.data.Dataset, found {shown(dataset)}.")
    if id_column is not None:
        check_text("from_ray: id_column", id_column, sane="the name of a column of integers")
    pipeline = _pipeline(
        "ray.data.Dataset",
        None,
        transform,
        per_sample=per_sample,
        on_device=on_device,
        on_error="raise",
        shuffle=False,
    )
    note = () if id_column else ("no id_column: an interrupted epoch of this data set starts again from its beginning",)
    return _replace(pipeline, dataset=dataset, id_column=id_column, notes=pipeline.notes + note)


def as_pipeline(name: str, value: object) -> Pipeline:
    """What ``datasets={name: value}`` means: a Pipeline, a ray.data.Dataset, or a torch data set."""
    if isinstance(value, Pipeline):
        return value
    module = type(value).__module__
    if module.startswith("ray.data"):
        return from_ray(value)  # type: ignore[arg-type]
    if (
        hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, str | bytes | list | tuple | Mapping | type)
    ):
        return from_torch(value)
    raise ConfigError(
        f"datasets[{name!r}] is a {type(value).__name__}. Give what offload.image_folder, from_torch, parquet or webdataset "
        "return, a ray.data.Dataset, or a map-style torch data set."
    )


def _replace(pipeline: Pipeline, **changes: Any) -> Pipeline:
    import dataclasses

    return dataclasses.replace(pipeline, **changes)


def _check_transform(transform: Any, given: str) -> None:
    """Raise ConfigError for what cannot be called with one argument, and for a class that cannot be constructed with none."""
    check_callable("transform", transform, sane="a function of a batch, or a class of such functions")
    name = getattr(transform, "__qualname__", type(transform).__name__)
    call = transform
    if isinstance(transform, type):
        if (needed := _missing(transform)) is not None:
            raise ConfigError(
                f"the transform class {name} is constructed without arguments on every node, and it {needed}. Pass "
                f"an instance ({name}(...)), or give its arguments defaults."
            )
        if not any("__call__" in base.__dict__ for base in transform.__mro__):
            raise ConfigError(
                f"instances of the transform class {name} cannot be called: define __call__(self, batch)."
            )
        call = functools.partial(transform.__call__, None)
    if (needed := _missing(call, object())) is not None:
        raise ConfigError(
            f"the transform {name} is called with one argument, {given} as a dict of columns, and it {needed}."
        )


def _missing(call: Any, *arguments: Any) -> str | None:
    """What keeps ``call`` from being called so: ``misses a required argument: 'size'``. None where nothing does, or it is
    not known."""
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError as error:
        text = str(error)
        return (
            text.replace("missing a", "misses a", 1) if text.startswith("missing") else f"takes no such call ({text})"
        )
    except Exception:  # written in C without a signature, or one that lies
        return None
    return None


def _pipeline(
    name: str,
    lister: Lister | None,
    transform: Any,
    *,
    per_sample: bool,
    on_device: OnDevice | None,
    on_error: OnError,
    shuffle: bool | None,
    sample_timeout_s: float | None = None,
) -> Pipeline:
    check_choice("on_error", on_error, ("raise", "skip"))
    check_flag("per_sample", per_sample)
    if shuffle is not None:
        check_flag("shuffle", shuffle)
    if sample_timeout_s is not None:
        sample_timeout_s = check_number("sample_timeout_s", sample_timeout_s, above=0.0, sane="seconds, such as 60")
    if on_device is not None:
        check_callable("on_device", on_device, sane="from a batch of tensors to such a batch")
    if transform is not None:
        _check_transform(transform, "a sample" if per_sample else "a batch")
    finish: tuple[OnDevice, ...] = (on_device,) if on_device is not None else ()
    kind: Kind
    notes: tuple[str, ...] = ()
    if transform is None:
        kind = "none"
    elif is_image_transform(transform):
        split = split_transform(transform)
        kind, transform, notes = "image", split.cpu, (split.says,)
        finish = ((split.on_device,) if split.on_device is not None else ()) + finish
    else:
        kind = "sample" if per_sample else "batch"
    return Pipeline(
        name=name,
        list=lister,
        transform=transform,
        kind=kind,
        on_device=finish,
        on_error=on_error,
        shuffle=shuffle,
        sample_timeout_s=sample_timeout_s,
        notes=notes,
    )
