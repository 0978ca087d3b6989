"""The columns that folders named ``KEY=VALUE`` stand for (Hive partitions), as Spark, pandas and Ray Data write them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

import pyarrow as pa

from offload.pipeline.sources.walking import below

_NOTHING = "__HIVE_DEFAULT_PARTITION__"  # Hive's name for a missing value
_WHOLE = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class Partitions:
    """The columns of the folders below ``folder``, and their types: int64 if all values are whole numbers, text otherwise."""

    folder: str = ""
    types: dict[str, pa.DataType] = field(default_factory=dict)

    def only(self, columns: Sequence[str] | None) -> Partitions:
        """Those of these columns. None: all."""
        kept = {name: kind for name, kind in self.types.items() if columns is None or name in columns}
        return dataclasses.replace(self, types=kept)

    def add(self, table: pa.Table, file: str) -> pa.Table:
        """The rows of a file, with the columns of its folders behind its own. A column of the file itself goes first."""
        values = _values(self.folder, file) if self.types else {}
        for name, kind in self.types.items():
            if name not in table.column_names:
                text = values.get(name)
                value = int(text) if text is not None and pa.types.is_integer(kind) else text
                table = table.append_column(name, pa.repeat(pa.scalar(value, kind), table.num_rows))
        return table


def partitions_of(folder: str, files: Sequence[str]) -> Partitions:
    """The columns of the folders between ``folder`` and these files."""
    texts: dict[str, set[str]] = {}
    for file in files:
        for name, text in _values(folder, file).items():
            texts.setdefault(name, set()).update(() if text is None else (text,))
    types = {
        name: pa.int64() if found and all(map(_WHOLE.fullmatch, found)) else pa.string()
        for name, found in texts.items()
    }
    return Partitions(folder=folder, types=types)


def _values(folder: str, file: str) -> dict[str, str | None]:
    parts = (part.partition("=") for part in below(folder, file).split("/")[:-1])
    return {unquote(name): None if text == _NOTHING else unquote(text) for name, sign, text in parts if name and sign}
