"""The functions by which users name a data set's source: a folder of images, a torch data set, Parquet files, tar shards, a Ray Dataset.

Each checks its arguments and returns a :class:`Pipeline`. Nothing is read yet. Where it stops: :mod:`offload.pipeline.sources` lists and
reads the samples.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offload.errors import ConfigError
from offload.model.checks import check_callable, check_names, check_path, check_text, shown
from offload.pipeline.cache.spec import parse_cache
from offload.pipeline.describe.pipeline import CollateFn, OnDevice, Pipeline, build_pipeline, missing_arguments
from offload.pipeline.images.region_decode import Decode
from offload.pipeline.images.split import is_image_transform
from offload.pipeline.index.source import silent
from offload.pipeline.preprocessing.recipe import OnError
from offload.pipeline.sources.from_torch import (
    DEFAULT_COLUMNS,
    factory_name,
    is_factory,
    list_torch_dataset,
    list_torch_factory,
)
from offload.pipeline.sources.image_folder import list_image_folder
from offload.pipeline.sources.parquet import list_parquet
from offload.pipeline.sources.storage_paths import PathLike
from offload.pipeline.sources.webdataset import list_webdataset

if TYPE_CHECKING:
    import ray.data

SOURCES = ("image_folder", "from_torch", "parquet", "webdataset")
"""The functions below whose samples offload lists and reads itself: their number and order are known before a pass."""
ANY_SOURCE = f"offload.{', '.join(SOURCES[:-1])} or {SOURCES[-1]}"
"""The sources as messages name them."""


def image_folder(
    path: PathLike,
    transform: Any = None,
    *,
    per_sample: bool = False,
    collate_fn: CollateFn | None = None,
    on_device: OnDevice | None = None,
    on_error: OnError = "raise",
    shuffle: bool | None = None,
    sample_timeout_s: float | None = None,
    decode: Decode = "auto",
    cache: str | None = None,
    filesystem: Any = None,
) -> Pipeline:
    """Images in class folders, ``PATH/<class>/<name>.jpg``.

    The transform gets ``batch["image"]``, a list of decoded HWC uint8 arrays, and ``batch["label"]``, int64: the number of the
    class in sorted order.

    Args:
        path: a local folder, ``s3://...``, or any path that pyarrow or fsspec opens.
        transform: a callable from a batch (dict of columns) to a batch with as many rows, each a function of its own row and random
            numbers (batches of a transform are not those of training, and their size varies); or from sample to sample with
            ``per_sample=True``; a generator function of one sample, which yields any number of samples for it; a class of such
            callables, constructed once per preprocessing actor; or a torchvision or timm transform of one image, whose converting
            and normalising tail then runs on the device.
        per_sample: whether ``transform`` takes one sample (a dict of values) instead of a batch.
        collate_fn: a callable from a list of samples to a batch of any structure, as a DataLoader has it. It runs in the worker, where
            the local batch is cut. Samples may then differ in shape and structure.
        on_device: a callable for each batch of tensors on the worker's device, such as :class:`offload.Normalize`.
        on_error: ``"raise"`` ends the run at a file that cannot be decoded; ``"skip"`` counts it, lists it in the run
            directory and goes on.
        shuffle: whether each pass has a random order, a function of the seed, the epoch and the number of the pass within it. None: only
            for ``"train"``. A data set that keeps its order gets the same random numbers in each pass, except for ``"train"``.
        sample_timeout_s: the longest time for reading or transforming one sample, to about a second. The run interrupts a slower
            sample and treats it as ``on_error`` says. None: training waits for it, and the run names it after a minute.
        decode: ``"auto"`` decodes only the region that a transform's first step needs (torchvision's RandomResizedCrop, CenterCrop and
            Resize, timm's RandomResizedCropAndInterpolation), with equal results. It decodes regions of at least four times the size
            of the result at 1/2, 1/4 or 1/8, and resizes Pillow images with torch, with close results. ``"exact"`` always decodes
            whole images, and Pillow resizes its own.
        cache: ``"ssd:/mnt/nvme/cache:200GB"``: a folder that each node has, and the most bytes there. What a node has read from
            ``path`` comes from that folder in later epochs and runs, unless the file has changed. It pays for ``s3://`` and other
            remote or mounted file systems.
        filesystem: a pyarrow or fsspec file system to use instead of the path's own.

    Raises:
        ConfigError: if options contradict each other; and, when the run starts, if the path is unusable.
    """
    check_path("image_folder: path", path, sane="a folder, or a URI such as s3://bucket/train")
    cached = parse_cache("image_folder: cache", cache)
    return build_pipeline(
        f"image_folder({path})",
        lambda tell=silent, encoded=False: list_image_folder(
            path, encoded=encoded, filesystem=filesystem, cache=cached, tell=tell
        ),
        transform,
        per_sample=per_sample,
        collate_fn=collate_fn,
        on_device=on_device,
        on_error=on_error,
        shuffle=shuffle,
        sample_timeout_s=sample_timeout_s,
        decode=decode,
        cache=cached,
    )


def from_torch(
    dataset: Any,
    transform: Any = None,
    *,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    per_sample: bool = False,
    collate_fn: CollateFn | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    on_device: OnDevice | None = None,
    on_error: OnError = "raise",
    shuffle: bool | None = None,
    sample_timeout_s: float | None = None,
) -> Pipeline:
    """Any map-style ``torch.utils.data.Dataset``: its ``__getitem__`` (or ``__getitems__``) runs on every CPU.

    Args:
        dataset: the data set, or a callable that constructs it: a class, a function, or ``lambda: MyData("train.h5")``. Every
            preprocessing process then constructs its own, once, so that it may hold open files, connections and locks. The driver
            constructs one too, for its length and classes.
        columns: names of the parts of the tuple that an item is. A dict keeps its keys, which must be the same for every item.
        transform, per_sample, on_device, on_error, shuffle, sample_timeout_s: as in :func:`image_folder`. A transform of torchvision or
            timm gets the image as the data set returned it. An array becomes an image if the transform's first step takes no arrays.
        collate_fn: as in :func:`image_folder`. Without a transform, samples reach it exactly as the data set returned them.
        worker_init_fn: a function that each preprocessing process calls once with its number, before it reads, as DataLoader's workers do.

    Raises:
        ConfigError: for invalid options, a callable that needs arguments, or a table; and, when the run starts, for a data set without a
            length or one that cannot be sent.
    """
    names = check_names("from_torch: columns", columns, sane="such as ('image', 'label')")
    if worker_init_fn is not None:
        check_callable("from_torch: worker_init_fn", worker_init_fn, sane="a function of the process's number")
    if (rows := _rows_of_table(dataset)) is not None:
        raise ConfigError(
            f"from_torch takes samples by their place, and a {type(dataset).__name__} gives columns instead. Pass its rows: {rows}."
        )
    made_there = is_factory(dataset)
    if made_there and (needed := missing_arguments(dataset)) is not None:
        name = factory_name(dataset)
        raise ConfigError(
            f"every preprocessing process calls {name} without arguments, and it {needed}. Write from_torch(lambda: {name}(...)), "
            "or pass a data set."
        )
    pipeline = build_pipeline(
        f"from_torch({factory_name(dataset) if made_there else type(dataset).__name__})",
        lambda tell=silent: (list_torch_factory if made_there else list_torch_dataset)(
            dataset,
            names,
            whole=collate_fn is not None and transform is None,
            changed=transform is not None,
            # The user's functions get arrays.
            typed=collate_fn is None and (transform is None or is_image_transform(transform)),
            images=is_image_transform(transform),
            worker_init_fn=worker_init_fn,
        ),
        transform,
        from_dataset=True,
        per_sample=per_sample,
        collate_fn=collate_fn,
        on_device=on_device,
        on_error=on_error,
        shuffle=shuffle,
        sample_timeout_s=sample_timeout_s,
    )
    return dataclasses.replace(pipeline, aside=False)


def parquet(
    path: PathLike,
    transform: Any = None,
    *,
    columns: Sequence[str] | None = None,
    images: Sequence[str] = (),
    per_sample: bool = False,
    collate_fn: CollateFn | None = None,
    on_device: OnDevice | None = None,
    on_error: OnError = "raise",
    shuffle: bool | None = None,
    sample_timeout_s: float | None = None,
    decode: Decode = "auto",
    cache: str | None = None,
    filesystem: Any = None,
) -> Pipeline:
    """Parquet files: one file, or all files below a folder.

    A sample is a row: a dict with a value for each column. A missing float is NaN, as in pandas. Any other missing value is None. A column
    of integers or bools is an array where none is missing, and a list otherwise: fill it in the transform, or write floats. Where a file
    lacks a column of the others, its values are missing.

    Folders named ``KEY=VALUE`` below the given one are columns too (Hive partitions): int64 if all their values are whole numbers, text
    otherwise. Other folders whose names begin with ``_``, such as Delta's ``_delta_log``, are left out. Shuffling reorders row groups, and
    rows within each. Files that a Delta table no longer holds are read, too: take ``ray.data.read_delta`` for tables that change.

    Args:
        path: a local file or folder, ``s3://...``, or any path that pyarrow or fsspec opens.
        columns: the columns to read. None: all.
        images: columns of encoded images to decode, to HWC uint8. Each file must have them.
        transform, per_sample, collate_fn, on_device, on_error, shuffle, sample_timeout_s, decode, cache, filesystem: as in
            :func:`image_folder`.

    Raises:
        ConfigError: for invalid options; and, when the run starts, if the path is unusable, holds no rows or lacks a column.
    """
    check_path("parquet: path", path, sane="a file or folder, or a URI such as s3://bucket/rows")
    sane = "such as ('image', 'label')"
    names = None if columns is None else check_names("parquet: columns", columns, sane=sane)
    pictures = check_names("parquet: images", images, sane=sane)
    cached = parse_cache("parquet: cache", cache)
    return build_pipeline(
        f"parquet({path})",
        lambda tell=silent, encoded=False: list_parquet(
            path, columns=names, images=pictures, encoded=encoded, filesystem=filesystem, cache=cached, tell=tell
        ),
        transform,
        per_sample=per_sample,
        collate_fn=collate_fn,
        on_device=on_device,
        on_error=on_error,
        shuffle=shuffle,
        sample_timeout_s=sample_timeout_s,
        decode=decode,
        cache=cached,
    )


def webdataset(
    shards: PathLike | Sequence[PathLike],
    transform: Any = None,
    *,
    per_sample: bool = False,
    collate_fn: CollateFn | None = None,
    on_device: OnDevice | None = None,
    on_error: OnError = "raise",
    shuffle: bool | None = None,
    sample_timeout_s: float | None = None,
    decode: Decode = "auto",
    cache: str | None = None,
    filesystem: Any = None,
) -> Pipeline:
    """WebDataset tar shards: a folder, ``name-*.tar``, ``name-{000..019}.tar``, or a list.

    Braces expand as webdataset expands them, and ``::`` joins several patterns. A path that exists is no pattern.

    A sample is the files of one key, the name up to its first dot. Its image becomes ``image``, HWC uint8, and ``.cls`` becomes
    ``label``, int64. Other files become columns named by their extension: ``.json`` parsed, ``.txt`` as text, and the rest as bytes, such
    as ``.npy`` and ``.left.png``. A function of a sample can decode them. A sample that lacks a file that others have gets None in its
    column. Of a ``.jpg`` and a ``.png`` with one key, the ``.jpg`` is the image. Shuffling reorders shards, and samples within each.

    Args:
        shards: the shards, on local paths, ``s3://...``, or any path that pyarrow or fsspec opens. Metadata (``__NAME__/...``) and hidden
            files are left out.
        transform, per_sample, collate_fn, on_device, on_error, shuffle, sample_timeout_s, decode, cache, filesystem: as in
            :func:`image_folder`.

    Raises:
        ConfigError: for invalid options; and, when the run starts, if a shard is missing, is no tar file, or holds a file twice.
    """
    sane = "a folder, name-{000..019}.tar, a URI, or a list of these"
    if isinstance(shards, list | tuple):
        shards = [check_path(f"webdataset: shards[{i}]", shard, sane=sane) for i, shard in enumerate(shards)]
    else:
        check_path("webdataset: shards", shards, sane=sane)
    cached = parse_cache("webdataset: cache", cache)
    return build_pipeline(
        f"webdataset({shards})",
        lambda tell=silent, encoded=False: list_webdataset(
            shards, encoded=encoded, filesystem=filesystem, cache=cached, tell=tell
        ),
        transform,
        per_sample=per_sample,
        collate_fn=collate_fn,
        on_device=on_device,
        on_error=on_error,
        shuffle=shuffle,
        sample_timeout_s=sample_timeout_s,
        decode=decode,
        cache=cached,
    )


def from_ray(
    dataset: ray.data.Dataset,
    transform: Any = None,
    *,
    id_column: str | None = None,
    per_sample: bool = False,
    collate_fn: CollateFn | None = None,
    on_device: OnDevice | None = None,
    on_error: OnError = "raise",
    shuffle: bool | None = None,
) -> Pipeline:
    """A ``ray.data.Dataset``: its source and its own steps, such as ``map_batches``, then ``transform``.

    The preprocessing processes run the Dataset's read tasks and steps themselves, if these work on rows and batches (maps, filters,
    ``flat_map``, projections, limits, unions, stored blocks). Shuffling reorders read tasks, and the rows of each. A resumed run trains
    each sample exactly once.

    Ray Data executes Datasets with other steps (sorts, joins, shuffles, GPUs), in their own order; the run says so.

    A missing number is NaN, a missing time NaT, and any other missing value None, whatever kind of block Ray has.

    Args:
        dataset: the Dataset. A sample is a row.
        id_column: for Datasets that Ray Data executes: a column of unique int64 ids that are equal in every epoch and run. It lets a
            resumed run train each sample once. Without it, an interrupted epoch starts again.
        transform, per_sample, collate_fn, on_device, on_error, shuffle: as in :func:`image_folder`.

    Raises:
        ConfigError: for something else than a Dataset, and invalid options; and, when the run starts, for ``shuffle=True`` or
            ``on_error="skip"`` with a Dataset that Ray Data has to execute.
    """
    data = sys.modules.get("ray.data")  # a program with a Dataset has imported it
    if data is None or not isinstance(dataset, data.Dataset):
        raise ConfigError(f"from_ray takes a ray.data.Dataset, found {shown(dataset)}.")
    if id_column is not None:
        check_text("from_ray: id_column", id_column, sane="the name of a column of integers")
    pipeline = build_pipeline(
        "ray.data.Dataset",
        None,
        transform,
        per_sample=per_sample,
        collate_fn=collate_fn,
        on_device=on_device,
        on_error=on_error,
        shuffle=shuffle,
    )
    return dataclasses.replace(pipeline, dataset=dataset, id_column=id_column)


def as_pipeline(name: str, value: object) -> Pipeline:
    """The pipeline of ``datasets={name: value}``: a Pipeline, a ray.data.Dataset, a torch data set, or a list of samples."""
    if isinstance(value, Pipeline):
        return value
    module = type(value).__module__
    if module.startswith("ray.data"):
        return from_ray(value)  # type: ignore[arg-type]
    if isinstance(value, list | tuple) and any(isinstance(item, Pipeline) for item in value):
        raise ConfigError(
            f"datasets[{name!r}] is a {type(value).__name__} of data sets. Join them: offload.mix({{'a': ..., 'b': ...}})."
        )
    if (
        hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, str | bytes | Mapping | type)
    ):
        return from_torch(value)
    raise ConfigError(
        f"datasets[{name!r}] is a {type(value).__name__}. Give the result of {ANY_SOURCE}, a ray.data.Dataset, a map-style torch data "
        "set, or a list of samples."
    )


_TABLES = {
    "pandas": "ray.data.from_pandas(table), or table.to_dict('records')",
    "polars": "ray.data.from_arrow(table.to_arrow()), or table.to_dicts()",
    "pyarrow": "ray.data.from_arrow(table), or table.to_pylist()",
}


def _rows_of_table(dataset: object) -> str | None:
    """An expression for the rows of a table, whose items are columns. None if this is no table."""
    tables = (base for base in type(dataset).__mro__ if base.__name__ in {"DataFrame", "Table"})
    return next((rows for base in tables if (rows := _TABLES.get(base.__module__.partition(".")[0]))), None)
