"""Row `webdataset`: tar shards, read by WebDataset's WebLoader with one worker process, through `curl` as its documentation shows."""

import os
from typing import Any

import torch
import webdataset as wds

from benchmarks.rows.s3 import common


def write(place: common.Place) -> None:
    folder = place.bucket / "tar"
    folder.mkdir()
    for number, records in enumerate(place.shards()):
        with wds.TarWriter(str(folder / f"{number:05}.tar")) as shard:
            for i, record in enumerate(records):
                shard.write({"__key__": f"{number:05}{i:06}", "jpg": record["image"]})


def preprocessed(stored: dict[str, Any]) -> Any:
    return common.sample(stored["jpg"])


def batches(place: common.Place) -> Any:
    shards = [str(path) for path in sorted((place.bucket / "tar").iterdir())]
    if not place.local:
        server = f"{os.environ['AWS_ENDPOINT_URL']}/{common.BUCKET}/tar"
        shards = [f"pipe:curl -s -f {server}/{os.path.basename(shard)}" for shard in shards]
    data = wds.WebDataset(shards, shardshuffle=len(shards), workersplitter=wds.split_by_worker)
    data = data.map(preprocessed).batched(common.BATCH, collation_fn=torch.stack)
    return wds.WebLoader(data, batch_size=None, num_workers=1)


if __name__ == "__main__":
    common.run(write, batches)
