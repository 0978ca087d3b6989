"""Any map-style ``torch.utils.data.Dataset``: its ``__getitem__`` runs on every CPU of the cluster, unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import ConfigError
from offload.pipeline.sources.base import At, Index, Samples, nowhere
from offload.pipeline.wire import Column, as_array

DEFAULT_COLUMNS = ("image", "label")


def list_torch_dataset(dataset: Any, columns: Sequence[str] = DEFAULT_COLUMNS) -> Index:
    """The index of a map-style data set: the numbers from 0 to its length."""
    # torch's own base class has a __getitem__ that only raises, for iterable data sets too.
    iterable = any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)
    if iterable or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"from_torch takes a map-style data set (__getitem__ and __len__), found {type(dataset).__name__}. For an "
            "iterable one use offload.webdataset, offload.parquet or a ray.data.Dataset."
        )
    name = f"from_torch({type(dataset).__name__})"
    if len(dataset) == 0:
        raise ConfigError(f"{name} is empty: len() is 0.")
    table = pa.table({"item": np.arange(len(dataset), dtype=np.int64)})
    return Index(name=name, table=table, reader=TorchReader(dataset, tuple(columns)), classes=_classes(dataset))


def _classes(dataset: Any) -> tuple[str, ...]:
    classes = getattr(dataset, "classes", ())
    return tuple(str(c) for c in classes) if isinstance(classes, list | tuple) else ()


class TorchReader:
    """Calls the data set; names the parts of a tuple by ``columns``."""

    def __init__(self, dataset: Any, columns: tuple[str, ...]) -> None:
        self.dataset, self.columns = dataset, columns

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        items = rows.column("item").to_pylist()
        if hasattr(self.dataset, "__getitems__"):
            samples = [self._name(s) for s in self.dataset.__getitems__(items)]
        else:
            samples = []
            for row, item in enumerate(items):
                at(row)
                samples.append(self._name(self.dataset[item]))
        columns: dict[str, Column] = {key: [_plain(s[key]) for s in samples] for key in samples[0]}
        return Samples(columns)

    def describe(self, rows: pa.Table, row: int) -> str:
        return f"item {rows.column('item')[row].as_py()} of {type(self.dataset).__name__}"

    def _name(self, sample: Any) -> Mapping[str, Any]:
        if isinstance(sample, Mapping):
            return sample
        parts = sample if isinstance(sample, tuple | list) else (sample,)
        if len(parts) > len(self.columns):
            raise ValueError(
                f"__getitem__ returned {len(parts)} values and columns={self.columns} names {len(self.columns)}: "
                "pass from_torch(..., columns=(...)) with one name each"
            )
        return dict(zip(self.columns, parts, strict=False))


def _plain(value: Any) -> Any:
    module = type(value).__module__
    if module.startswith(("torch", "torchvision", "PIL")):
        return as_array(value)
    return value
