"""Row `streaming`: MosaicML's StreamingDataset over MDS shards, in torch's DataLoader, as its documentation shows it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from benchmarks import tables, workloads
from benchmarks.rows import protocol
from benchmarks.rows.peers import common
from benchmarks.rows.peers.images import Images

IMAGES = {"image": "bytes", "number": "int"}
TABLES = {
    "text": {"text": "str", "label": "int64"},
    "tabular": {f"number_{i}": "float32" for i in range(tables.NUMBERS)}
    | {f"category_{i}": "int64" for i in range(tables.CATEGORIES)}
    | {"label": "int64"},
}


def write(folder: Path, shards: Iterable[Iterable[dict[str, Any]]], columns: dict[str, str]) -> None:
    """Write each shard to a folder of its own: MDSWriter ends a shard at a number of bytes, not of samples."""
    for number, records in enumerate(shards):
        with MDSWriter(out=str(folder / f"{number:05}"), columns=columns, size_limit=None) as writer:
            for record in records:
                writer.write(record)


def repeat(task: protocol.Task, folder: Path, per_shard: int) -> Path:
    """Make a folder with as many links to shards as the task has samples, and the index of these."""
    parts = sorted(path.parent for path in folder.glob("[0-9]*/index.json"))
    entries = [json.loads((part / "index.json").read_text())["shards"][0] for part in parts]
    files = [part / entry["raw_data"]["basename"] for part, entry in zip(parts, entries, strict=True)]
    links = common.repeated(task, files, folder / "all", per_shard)
    shards = []
    for number, link in enumerate(links):
        entry = entries[number % len(entries)]
        shards.append({**entry, "raw_data": {**entry["raw_data"], "basename": link.name}})
    (folder / "all" / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder / "all"


class Samples(StreamingDataset):
    """The stored records, preprocessed."""

    def __init__(self, images: Images, folder: Path, batch_size: int) -> None:
        super().__init__(local=str(folder), shuffle=True, batch_size=batch_size)
        self._images = images

    def __getitem__(self, index: Any) -> workloads.Sample:
        return self._images.sample(super().__getitem__(index))


def main() -> None:
    task = protocol.parse()
    torch.set_num_threads(1)
    collate: Any = None
    if task.workload in tables.NAMES:
        rows = tables.ROWS_PER_FILE[task.workload]
        folder, conversion_s = common.converted(
            task, "mds", lambda folder: write(folder, [common.rows_of(task)], TABLES[task.workload])
        )
        data = StreamingDataset(local=str(repeat(task, folder, rows)), shuffle=True, batch_size=task.batch_size)
        collate = common.Rows(task.workload, torch.from_numpy)
    else:
        images = Images(task)
        folder, conversion_s = common.converted(task, "mds", lambda folder: write(folder, images.shards(), IMAGES))
        data = Samples(images, repeat(task, folder, common.SHARD), task.batch_size)
        images.sample(next(images.shards())[0])
    loader = StreamingDataLoader(
        data, batch_size=task.batch_size, num_workers=common.cores(), collate_fn=collate,
        multiprocessing_context="spawn",
    )  # fmt: skip
    common.answer(task, lambda: loader, conversion_s)


if __name__ == "__main__":
    main()
