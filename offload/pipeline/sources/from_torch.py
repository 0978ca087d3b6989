"""Any map-style ``torch.utils.data.Dataset``: its ``__getitem__`` runs unchanged on every CPU of the cluster.

Open files, h5py and lmdb handles and database connections belong to the process that opened them. A data set with such handles comes from a
factory, which every preprocessing process calls for itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import FAILURES, ConfigError, RunError
from offload.model.checks import shown
from offload.pipeline.blocks.values import annotated_parts, own
from offload.pipeline.blocks.whole_samples import SAMPLES
from offload.pipeline.blocks.wire import Column, UnsendableError, as_array, is_pillow, is_tensor, torch_only
from offload.pipeline.index.rows import Runs
from offload.pipeline.index.source import At, Index, Reader, Samples, nowhere
from offload.pipeline.preprocessing.environment import here
from offload.pipeline.preprocessing.wording import say
from offload.pipeline.program.remedies import remedy

DEFAULT_COLUMNS = ("image", "label")
MOST_SAMPLES = 2**32  # 32 GiB of numbers; the largest image data sets have a tenth of these samples
_INIT_SEED = 0  # for worker_init_fn: each sample gets a seed of its own later


def list_torch_dataset(
    dataset: Any,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    *,
    whole: bool = False,
    changed: bool = False,
    typed: bool = False,
    images: bool = False,
    worker_init_fn: Callable[[int], None] | None = None,
) -> Index:
    """The index of a map-style data set: the numbers from 0 to its length.

    Args:
        columns: names for the parts of a sample that is a tuple.
        whole, changed, typed, images: see :class:`TorchReader`.
        worker_init_fn: a function that each process calls once, as torch's DataLoader does.

    Raises:
        ConfigError: for anything else than a map-style data set of at least one sample.
    """
    if not is_map_style(dataset):
        raise ConfigError(
            f"from_torch takes a map-style data set (__getitem__ and __len__), found {type(dataset).__name__}. For an "
            "iterable one use offload.webdataset, offload.parquet or a ray.data.Dataset."
        )
    name = f"from_torch({type(dataset).__name__})"
    rows = Runs(pa.table({"data set": [0]}), np.array([_length(name, dataset)]), number="item")
    reader = TorchReader(
        dataset,
        tuple(columns),
        whole=whole,
        changed=changed,
        typed=typed,
        images=images,
        worker_init_fn=worker_init_fn,
    )
    return Index(name=name, rows=rows, reader=reader, classes=_classes(dataset))


def is_map_style(dataset: object) -> bool:
    """Return whether ``dataset`` has an index and a length."""
    # torch's own base class has a __getitem__ that only raises; iterable data sets inherit it too.
    iterable = any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)
    return (
        not iterable
        and hasattr(dataset, "__len__")
        and (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"))
    )


def _length(name: str, dataset: Any) -> int:
    if isinstance(dataset, type):
        raise ConfigError(f"from_torch takes a data set, found the class {dataset.__name__}: construct one.")
    try:
        samples = len(dataset)
    except OverflowError:
        samples = MOST_SAMPLES + 1
    except (Exception, SystemExit) as error:  # the user's code, or Python's error for an invalid length
        raise ConfigError(
            f"the length of {name} cannot be determined: {type(error).__name__}: {error}. Correct its __len__."
        ) from None
    if samples == 0:
        raise ConfigError(f"{name} is empty: len() is 0.")
    if samples > MOST_SAMPLES:
        raise ConfigError(
            f"{name} says that it has more than {MOST_SAMPLES:,} samples, and offload holds the order of an epoch in memory. "
            "Correct its __len__."
        )
    return samples


def _classes(dataset: Any) -> tuple[str, ...]:
    # Data sets of torchvision name their classes so. Of another data set, the attribute may be missing or mean something else.
    classes = getattr(dataset, "classes", ())
    return tuple(str(c) for c in classes) if isinstance(classes, list | tuple) else ()


class TorchReader(Reader):
    """A reader that calls the data set.

    While it reads, ``torch.utils.data.get_worker_info()`` answers as in a worker of torch: ``id`` and ``num_workers`` are the
    number of this process and of the run's processes (:class:`offload.pipeline.preprocessing.environment.Ordinal`), and ``seed`` is that of
    the rows' random numbers.

    Args:
        columns: names for the parts of a sample that is a tuple.
        whole: whether samples stay as the data set returns them.
        changed: whether a transform may change samples in place. It then gets copies, since the data set may keep its own.
        typed: whether torchvision's boxes, masks and key points keep their type instead of becoming arrays. It tells a cache what they are.
        images: whether the column ``image`` stays as returned, without a copy. The transform of images converts and copies it.
    """

    def __init__(
        self,
        dataset: Any,
        columns: tuple[str, ...],
        *,
        whole: bool = False,
        changed: bool = False,
        typed: bool = False,
        images: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self.dataset, self.columns = dataset, columns
        self._whole, self._changed, self._typed, self._images = whole, changed, typed, images
        self._worker_init_fn = worker_init_fn

    @property
    def pickled_dataset(self) -> Any:
        return self.dataset

    def prepare(self) -> None:
        """Call ``worker_init_fn`` in this process, before it reads. Raises RunError if that raises."""
        if self._worker_init_fn is None:
            return
        from offload.pipeline.preprocessing.worker_role import in_role, once

        me = here()
        try:
            with in_role(me.number, me.of, _INIT_SEED, self.dataset):
                once(self._worker_init_fn, me.number, _INIT_SEED, set())
        except FAILURES as error:
            name = getattr(self._worker_init_fn, "__qualname__", type(self._worker_init_fn).__name__)
            raise RunError(
                f"worker_init_fn ({name}) raised {say(error)} in preprocessing process {me.number}. Correct it: every process calls it "
                "once, with its number."
            ) from None

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        with _as_worker(self.dataset):
            return self._read(rows, at)

    def _read(self, rows: pa.Table, at: At) -> Samples:
        items = rows.column("item").to_pylist()
        # As in torch: a subclass may set it to None, so that its own __getitem__ is called.
        if (getitems := getattr(self.dataset, "__getitems__", None)) is not None:
            returned = getitems(items)
            if not isinstance(returned, Sequence) or len(returned) != len(items):
                got = len(returned) if isinstance(returned, Sequence) else type(returned).__name__
                raise ValueError(
                    f"__getitems__ was asked for {len(items)} samples and returned {got}: return a list of as many"
                )
        else:
            returned = []
            for row, item in enumerate(items):
                at(row)
                returned.append(self.dataset[item])
        if self._whole:
            return Samples({SAMPLES: [[sample] for sample in returned]})
        samples = [self._name(sample) for sample in returned]
        names = list(samples[0])
        for item, sample in zip(items, samples, strict=True):
            if sample.keys() != samples[0].keys():
                raise RunError(
                    f"item {items[0]} of {type(self.dataset).__name__} has the columns {_listed(names)}, and item {item} has "
                    f"{_listed(sample)}. Return the same columns for every item; a value may be None."
                )
        annotated = annotated_parts(samples[0])
        stay = annotated if self._typed else ()
        columns: dict[str, Column] = {
            name: [_loaded(s[name]) for s in samples]
            if self._images and name == "image"
            else [self._value(name, s[name], stays=name in stay) for s in samples]
            for name in names
        }
        return Samples(columns, annotated=annotated)

    def _value(self, name: str, value: Any, *, stays: bool) -> Any:
        converted = value if stays else plain(value, colours=name == "image")
        if not self._changed or (converted is not value and is_pillow(value)):  # its pixels are a copy already
            return converted
        return own(converted)

    def describe(self, rows: pa.Table, row: int) -> str:
        return f"item {rows.column('item')[row].as_py()} of {type(self.dataset).__name__}"

    def _name(self, sample: Any) -> Mapping[str, Any]:
        if isinstance(sample, Mapping):
            return sample
        if sample is None or isinstance(sample, Iterator | type):
            type_name = "None" if sample is None else f"a {type(sample).__name__}"
            raise ValueError(f"__getitem__ returned {type_name}: return a dict, a tuple or an array")
        parts = sample if isinstance(sample, tuple | list) else (sample,)
        if len(parts) > len(self.columns):
            # The option is wrong, not the sample, so on_error="skip" does not skip it.
            raise RunError(
                f"__getitem__ of the data set returned {len(parts)} values, and columns={self.columns} names {len(self.columns)}. "
                "Pass from_torch(..., columns=(...)) with one name each."
            )
        return dict(zip(self.columns, parts, strict=False))


def _as_worker(dataset: Any) -> AbstractContextManager[None]:
    """A context in which this process has the role of one of torch's workers, if torch is loaded: importing it costs seconds."""
    if (torch := sys.modules.get("torch")) is None:
        return nullcontext()
    from offload.pipeline.preprocessing.worker_role import in_role

    me = here()
    return in_role(me.number, me.of, torch.initial_seed() - me.number, dataset)


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names)) or "none"


def plain(value: Any, *, colours: bool) -> Any:
    """The value as an array if it is a tensor or an image. Other values stay: a transform may take them, or an error names them later.

    ``colours``: whether an image becomes its colours. A mask of Pillow's mode P holds class numbers instead.
    """
    if is_pillow(value):
        # A copy: Pillow's own memory is read-only, and a transform may write to its sample.
        return np.array(_of_colours(value) if colours else value)
    if type(value).__module__.startswith(("torch", "torchvision")) and is_tensor(value):
        try:
            array = as_array(value)
        except UnsendableError:
            return value
        return value if torch_only(array.dtype) else array
    return value


_NUMBERS = {"1", "L", "LA", "RGB", "RGBA", "I", "F"}
"""Modes of Pillow whose numbers are brightness or red, green and blue."""


def _of_colours(image: Any) -> Any:
    """The image, converted to colours if its array would hold something else, such as indices into a palette."""
    if image.mode in _NUMBERS or image.mode.startswith("I;"):
        return image
    if image.mode == "LAB":  # Pillow cannot convert it
        return image
    if image.mode == "La":
        return image.convert("LA")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _loaded(value: Any) -> Any:
    """The value, with the pixels loaded if it is a Pillow image: a broken file must fail here, while it is read."""
    if is_pillow(value):
        value.load()
    return value


def is_factory(value: object) -> bool:
    """Return whether ``value`` constructs a data set: a class, or a callable that is no data set itself."""
    return isinstance(value, type) or (callable(value) and not hasattr(value, "__getitem__"))


def factory_name(factory: Any) -> str:
    """The user's name for a factory."""
    if isinstance(factory, functools.partial):
        return factory_name(factory.func)
    return str(getattr(factory, "__qualname__", type(factory).__name__)).rpartition("<locals>.")[2]


def list_torch_factory(
    factory: Callable[[], Any],
    columns: Sequence[str],
    *,
    whole: bool = False,
    changed: bool = False,
    typed: bool = False,
    images: bool = False,
    worker_init_fn: Callable[[int], None] | None = None,
) -> Index:
    """The index of the data set that ``factory`` returns. It is constructed here once, for its length and classes, and dropped.

    The other arguments are those of :func:`list_torch_dataset`.

    Raises ConfigError if the factory raises or returns no map-style data set.
    """
    name = factory_name(factory)
    try:
        dataset = factory()
    except FAILURES as error:
        raise ConfigError(
            f"from_torch({name}) raised {type(error).__name__}: {error}. Correct it: the driver and every preprocessing process "
            "call it without arguments."
        ) from None
    if not is_map_style(dataset):
        raise ConfigError(
            f"from_torch({name}) must return a map-style data set (__getitem__ and __len__), found {shown(dataset)}. Return "
            "the data set that you construct."
        )
    index = list_torch_dataset(dataset, columns)
    options = {"whole": whole, "changed": changed, "typed": typed, "images": images, "worker_init_fn": worker_init_fn}
    return replace(index, reader=FactoryReader(factory, tuple(columns), type(dataset).__name__, **options))


class FactoryReader(Reader):
    """A reader that constructs its data set once in each process, with :meth:`prepare` or at the first read.

    ``options``: the options of its :class:`TorchReader`.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        columns: tuple[str, ...],
        name: str,
        **options: Any,
    ) -> None:
        self.factory, self.columns, self.name, self._options = factory, columns, name, options
        self._reader: TorchReader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    @property
    def dataset(self) -> Any:
        """The data set of this process."""
        return self._opened().dataset

    def prepare(self) -> None:
        """Construct the data set. Raises RunError if the factory or ``worker_init_fn`` raises."""
        self._opened().prepare()

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        return self._opened().read(rows, at)

    def describe(self, rows: pa.Table, row: int) -> str:
        return f"item {rows.column('item')[row].as_py()} of {self.name}"

    def _opened(self) -> TorchReader:
        if self._reader is None:
            try:
                self._reader = TorchReader(self.factory(), self.columns, **self._options)
            except FAILURES as error:
                raise RunError(
                    f"from_torch({factory_name(self.factory)}) raised {type(error).__name__}: {error} on a preprocessing process. "
                    f"Correct it: it worked on the driver, and every node must reach the same files.{remedy(error)}"
                ) from None
        return self._reader
