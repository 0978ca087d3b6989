"""Puts offload's reading of tar shards in the place of webdataset's, for webdataset's tests.

offload names and lists the shards, and reads the members of each sample. What follows a raw sample is webdataset's own: decoders, filters,
shuffling, batches. Compressed shards are refused on purpose, so that the tests get plain ones (:mod:`benchmarks.suites.shards`).
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import webdataset
from webdataset import cache, compat, filters, shardlists, tariterators

import offload
from offload.pipeline.sources.webdataset import list_webdataset

Stage = dict[str, Any]


def samples(
    data: Iterable[Stage],
    handler: Callable[[Exception], bool] = filters.reraise_exception,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[Stage]:
    """Yield the raw samples of shards, as webdataset does: ``__key__``, ``__url__``, and the bytes of each member."""
    for shard in data:
        try:
            table = list_webdataset([shard.get("local_path") or shard["url"]]).table
            for key, path, members in zip(
                *(table.column(name).to_pylist() for name in ("key", "shard", "members")), strict=True
            ):
                sample = {"__key__": key, "__url__": shard["url"]}
                if "local_path" in shard:
                    sample["__local_path__"] = shard["local_path"]
                with open(path, "rb") as stream:
                    for extension, (offset, size) in json.loads(members).items():
                        name = f"{key}.{extension}"
                        name = name if rename_files is None else rename_files(name)
                        if select_files is None or select_files(name):
                            stream.seek(offset)
                            sample[name.removeprefix(f"{key}.")] = stream.read(size)
                yield sample
        except Exception as error:
            if not handler(error):
                return


def passed_on(data: Iterable[Stage], **_: Any) -> Iterator[Stage]:
    """Yield what comes: members are already grouped."""
    yield from data


class Unopened:
    """A stage in the place of the one that opens shards."""

    def __init__(self, **_: Any) -> None:
        pass

    def __call__(self, data: Iterable[Stage]) -> Iterator[Stage]:
        yield from data


_their_names = shardlists.expand_urls


def shard_names(urls: str) -> list[str]:
    """Return the shards of a pattern. Where none exists, the test is about names alone, and webdataset expands them."""
    names = list(_their_names(urls))
    if not any(map(os.path.exists, names)):
        return names
    index = list_webdataset(urls)
    assert index.groups is not None
    # A group for each shard, so that one which is named twice counts twice.
    return list(dict(zip(index.groups.tolist(), index.table.column("shard").to_pylist(), strict=True)).values())


def install() -> None:
    """Change webdataset in this process."""
    webdataset.tarfile_samples = tariterators.tarfile_samples = samples
    webdataset.tarfile_to_samples = tariterators.tarfile_to_samples = filters.pipelinefilter(samples)
    cache.StreamingOpen = Unopened
    compat.tar_file_expander, compat.group_by_keys = samples, passed_on
    compat.DataLoader = offload.DataLoader
    shardlists.expand_urls = shard_names
