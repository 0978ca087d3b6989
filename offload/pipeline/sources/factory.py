"""A map-style data set that every preprocessing process constructs itself, for handles that cannot travel between processes.

Open files, h5py and lmdb handles and database connections belong to the process that opened them. Where it stops: reading is
the work of :mod:`offload.pipeline.sources.from_torch`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from offload.errors import ConfigError, RunError
from offload.model.checks import shown
from offload.pipeline.sources.base import At, Index, Samples, nowhere
from offload.pipeline.sources.from_torch import TorchReader, is_map_style, list_torch_dataset

FAILURES = (Exception, SystemExit)


def is_factory(value: object) -> bool:
    """Whether ``value`` constructs a data set: a class, or a callable that is no data set itself."""
    return isinstance(value, type) or (callable(value) and not hasattr(value, "__getitem__"))


def factory_name(factory: Any) -> str:
    """The user's name for it."""
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
    """The index of the data set that ``factory`` returns. It is constructed here once, for its length and classes, and dropped. The other
    arguments are those of :func:`list_torch_dataset`.

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


class FactoryReader:
    """A reader that constructs its data set once in each process, with :meth:`prepare` or at the first read. ``options``: those of its
    :class:`TorchReader`."""

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
                    "Correct it: it worked on the driver, and every node must reach the same files."
                ) from None
        return self._reader
