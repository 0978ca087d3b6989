"""Row `litdata`: chunks that `optimize` has written, read from S3 by a StreamingDataLoader with one worker process."""

import os
from typing import Any

import litdata
from litdata.streaming import downloader

from benchmarks.rows.s3 import common


def same(record: dict[str, Any]) -> dict[str, Any]:
    return record


def preprocessed(record: dict[str, Any]) -> Any:
    return common.sample(record["image"])


def write(place: common.Place) -> None:
    records = [record for shard in place.shards() for record in shard]
    litdata.optimize(
        same, records, str(place.bucket / "litdata"), chunk_size=common.SHARD, num_workers=1, keep_data_ordered=True,
        start_method="spawn", verbose=False,
    )  # fmt: skip


def batches(place: common.Place) -> Any:
    stored = {} if place.local else {
        "cache_dir": str(place.scratch),
        "storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    }  # fmt: skip
    data = litdata.StreamingDataset(
        place.url("litdata"), shuffle=True, drop_last=False, transform=preprocessed, **stored
    )
    # The benchmark's server speaks plain HTTP. Workers start by a fork, as is LitData's default, and thus know of it.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    return litdata.StreamingDataLoader(data, batch_size=common.BATCH, num_workers=1)


if __name__ == "__main__":
    common.run(write, batches)
