"""Row `streaming`: MDS shards, read from S3 by MosaicML's StreamingDataset in its loader with one worker process."""

from typing import Any

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from benchmarks.rows.s3 import common


def write(place: common.Place) -> None:
    shards = list(place.shards())
    mean = sum(len(record["image"]) for shard in shards for record in shard) / sum(map(len, shards))
    with MDSWriter(
        out=str(place.bucket / "mds"), columns={"image": "bytes"}, size_limit=int(mean * common.SHARD)
    ) as writer:
        for shard in shards:
            for record in shard:
                writer.write({"image": record["image"]})


class Samples(StreamingDataset):  # type: ignore[misc]  # the library lives in an environment of its own
    """The stored records, preprocessed."""

    def __getitem__(self, index: Any) -> Any:
        return common.sample(super().__getitem__(index)["image"])


def batches(place: common.Place) -> Any:
    stored = {"local": place.url("mds")}
    if not place.local:
        stored = {"remote": place.url("mds"), "local": str(place.scratch / "mds")}
    data = Samples(shuffle=True, batch_size=common.BATCH, **stored)
    return StreamingDataLoader(data, batch_size=common.BATCH, num_workers=1)


if __name__ == "__main__":
    common.run(write, batches)
