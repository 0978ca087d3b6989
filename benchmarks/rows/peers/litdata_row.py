"""Row `litdata`: chunks that `optimize` has written, read by a StreamingDataLoader; tables through LitData's own reader of Parquet."""

import json
from pathlib import Path

import litdata
import torch
from litdata.streaming.item_loader import ParquetLoader

from benchmarks import tables
from benchmarks.rows import protocol
from benchmarks.rows.peers import common
from benchmarks.rows.peers.images import Images, Record


def same(record: Record) -> Record:
    return record


def write(images: Images, folder: Path) -> None:
    records = [record for shard in images.shards() for record in shard]
    litdata.optimize(
        same, records, str(folder / "chunks"), chunk_size=common.SHARD, num_workers=1, keep_data_ordered=True,
        start_method="spawn", verbose=False,
    )  # fmt: skip


def repeat(task: protocol.Task, folder: Path) -> Path:
    """Make a folder with as many links to chunks as the task has samples, and the index of these."""
    index = json.loads((folder / "chunks" / "index.json").read_text())
    chunks = [folder / "chunks" / chunk["filename"] for chunk in index["chunks"]]
    links = common.repeated(task, chunks, folder / "all")
    index["chunks"] = [
        {**index["chunks"][number % len(chunks)], "filename": link.name} for number, link in enumerate(links)
    ]
    (folder / "all" / "index.json").write_text(json.dumps(index))
    return folder / "all"


def main() -> None:
    task = protocol.parse()
    torch.set_num_threads(1)
    if task.workload in tables.NAMES:
        # In a folder of its own: LitData writes an index beside the files.
        stored = sorted(protocol.folder(task).glob("*.parquet"))
        folder = protocol.folder(task).parent / f"as-litdata-{task.workload}"
        common.repeated(task, stored, folder, tables.ROWS_PER_FILE[task.workload])
        litdata.index_parquet_dataset(str(folder), num_workers=1)
        data = litdata.StreamingDataset(str(folder), item_loader=ParquetLoader(), shuffle=True, drop_last=False)
        rows = litdata.StreamingDataLoader(
            data,
            batch_size=task.batch_size,
            num_workers=common.cores(),
            collate_fn=common.Rows(task.workload, torch.from_numpy),
            multiprocessing_context="spawn",
        )
        common.answer(task, lambda: rows)
        return
    images = Images(task)
    folder, conversion_s = common.converted(task, "litdata", lambda folder: write(images, folder))
    samples = litdata.StreamingDataset(
        str(repeat(task, folder)), shuffle=True, drop_last=False, transform=images.sample
    )
    images.sample(next(images.shards())[0])
    loader = litdata.StreamingDataLoader(
        samples, batch_size=task.batch_size, num_workers=common.cores(), multiprocessing_context="spawn"
    )
    common.answer(task, lambda: loader, conversion_s)


if __name__ == "__main__":
    main()
