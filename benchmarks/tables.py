"""The workloads whose samples are rows of Parquet files: `tabular` and `text`.

Every row of the benchmark reads the same files by row group, in random order, and applies the same function to batches of columns.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NAMES = ("tabular", "text")
BATCH_SIZES = {"tabular": 4096, "text": 256}
ROWS_PER_FILE = {"tabular": 1 << 19, "text": 1 << 15}
GROUPS_PER_FILE = 8
NUMBERS, CATEGORIES, BUCKETS = 10, 4, 1 << 14
TOKENS = 128
WORDS = tuple(f"{first}{middle}{last}" for first in "bcdfgklmnprst" for middle in "aeiou" for last in "bdgklmnprstx")
VOCABULARY = {word: number for number, word in enumerate(WORDS, start=1)}

Columns = Mapping[str, Any]


def tabular(batch: Columns) -> dict[str, Any]:
    """Numbers on a logarithmic scale, without gaps, and with a flag for each gap; categories hashed into buckets."""
    numbers = np.stack([batch[f"number_{i}"] for i in range(NUMBERS)], axis=1)
    gaps = np.isnan(numbers)
    numbers = np.nan_to_num(numbers)
    numbers = np.sign(numbers) * np.log1p(np.abs(numbers))
    features = np.concatenate([numbers, gaps.astype(np.float32)], axis=1)
    categories = np.stack([batch[f"category_{i}"] for i in range(CATEGORIES)], axis=1)
    hashed = (categories * 0x9E3779B1 + np.arange(CATEGORIES) * 0x85EBCA77) % BUCKETS
    return {"features": features, "categories": hashed, "label": batch["label"].astype(np.float32)}


def text(batch: Columns) -> dict[str, Any]:
    """Words as tokens, padded to a fixed length."""
    tokens = np.zeros((len(batch["text"]), TOKENS), np.int32)
    for row, line in zip(tokens, batch["text"], strict=True):
        found = [VOCABULARY.get(word, 0) for word in line.lower().split()[:TOKENS]]
        row[: len(found)] = found
    return {"tokens": tokens, "label": batch["label"]}


TRANSFORMS = {"tabular": tabular, "text": text}


def files(name: str, folder: Path, rows: int) -> Path:
    """A folder of `rows` rows, a multiple of the rows of a file. It holds links to a single file: each is read as a file of its own."""
    kept = folder / f"{name}.parquet"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(_table(name), kept, row_group_size=ROWS_PER_FILE[name] // GROUPS_PER_FILE)
    count = rows // ROWS_PER_FILE[name]
    linked = folder / f"{name}-{count}"
    linked.mkdir(exist_ok=True)
    for number in range(count):
        if not (link := linked / f"{number:04}.parquet").exists():
            link.hardlink_to(kept)
    return linked


def _table(name: str) -> pa.Table:
    random, rows = np.random.default_rng(0), ROWS_PER_FILE[name]
    label = pa.array(random.integers(0, 2, rows))
    if name == "text":
        lengths = random.integers(20, 160, rows)
        words = np.array(WORDS)[random.integers(0, len(WORDS), int(lengths.sum()))]
        lines = [" ".join(part) for part in np.split(words, np.cumsum(lengths)[:-1])]
        return pa.table({"text": lines, "label": label})
    numbers = random.lognormal(size=(NUMBERS, rows)).astype(np.float32)
    numbers[random.random(numbers.shape) < 0.05] = np.nan
    columns = {f"number_{i}": pa.array(row) for i, row in enumerate(numbers)}
    columns |= {f"category_{i}": pa.array(random.integers(0, 100_000, rows)) for i in range(CATEGORIES)}
    return pa.table({**columns, "label": label})


@dataclass(frozen=True)
class Batches:
    """Batches of the files' rows: row groups in random order, and rows in random order within each."""

    name: str
    folder: Path
    batch_size: int

    def groups(self) -> list[tuple[Path, int]]:
        """The row groups, in the order of the pass."""
        groups = [(path, group) for path in sorted(self.folder.glob("*.parquet")) for group in range(GROUPS_PER_FILE)]
        return [groups[i] for i in np.random.default_rng(0).permutation(len(groups))]

    def of(self, groups: list[tuple[Path, int]]) -> Iterator[dict[str, Any]]:
        """The batches of these row groups."""
        random = np.random.default_rng(0)
        for path, group in groups:
            table = pq.ParquetFile(path).read_row_group(group)
            table = table.take(pa.array(random.permutation(table.num_rows)))
            columns: dict[str, Any] = {
                column: table[column].to_pylist() if column == "text" else table[column].to_numpy()
                for column in table.column_names
            }
            for start in range(0, table.num_rows, self.batch_size):
                rows = slice(start, start + self.batch_size)
                yield TRANSFORMS[self.name]({column: values[rows] for column, values in columns.items()})
