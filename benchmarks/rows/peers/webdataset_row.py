"""Row `webdataset`: tar shards read by a WebLoader, as in its documentation, and decoded by the plain loop's function."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import webdataset as wds

from benchmarks import workloads
from benchmarks.rows import protocol
from benchmarks.rows.peers import common
from benchmarks.rows.peers.images import Images

SHUFFLED = 1000  # samples in the shuffle buffer, as in the documentation's examples


def write(images: Images, folder: Path) -> None:
    for number, records in enumerate(images.shards()):
        with wds.TarWriter(str(folder / f"{number:05}.tar")) as shard:
            for i, record in enumerate(records):
                shard.write({"__key__": f"{i:06}", "jpg": record["image"], "cls": record["number"]})


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of tensors, which reach another process in shared memory. WebDataset has added a key to each sample."""
    batch = workloads.stack({"image": sample["image"], "label": sample["label"]} for sample in samples)
    return {name: torch.from_numpy(column) for name, column in batch.items()}


def main() -> None:
    task = protocol.parse()
    torch.set_num_threads(1)
    images = Images(task)
    folder, conversion_s = common.converted(task, "webdataset", lambda folder: write(images, folder))
    shards = [str(link) for link in common.repeated(task, sorted(folder.glob("*.tar")), folder / "all")]

    def sample(stored: Mapping[str, Any]) -> workloads.Sample:
        return images.sample({"image": stored["jpg"], "number": int(stored["cls"])})

    images.sample(next(images.shards())[0])  # does the imports of the first sample
    data = wds.WebDataset(shards, shardshuffle=len(shards), workersplitter=wds.split_by_worker)
    data = data.shuffle(SHUFFLED).map(sample).batched(task.batch_size, collation_fn=collate)
    # The sample function is no module's, so that workers start by a fork, as is WebLoader's default.
    loader = wds.WebLoader(data, batch_size=None, num_workers=common.cores())
    common.answer(task, lambda: loader, conversion_s)


if __name__ == "__main__":
    main()
