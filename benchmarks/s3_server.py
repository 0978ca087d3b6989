"""A small S3 server for benchmarks, with a delay of each request and a limit on its rate.

It serves a folder, whose sub-folders are buckets, and speaks what readers need: ListObjectsV2, HeadBucket, HeadObject and GetObject with
ranges. Where it stops: it stores nothing, checks no signature, and listens on the loopback interface alone. It runs on a core of its own
and counts its requests.
"""

import asyncio
import contextlib
import email.utils
import hashlib
import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from aiohttp import web

BUCKET = "benchmark"
PART = 64 << 10  # bytes that one turn of a limited rate sends
PAGE = 1000  # keys of a listing's page, as S3's
_RANGE = re.compile(r"bytes=(\d*)-(\d*)$")
_COUNTED = ("HEAD", "GET", "LIST")


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    _counts: Any

    def requests(self) -> dict[str, int]:
        """The requests since the server's start: HEAD, GET (of an object), LIST (of a bucket)."""
        return dict(zip(_COUNTED, self._counts, strict=True))

    def environment(self) -> dict[str, str]:
        """The variables that lead clients to this server."""
        known = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true",
                 "AWS_DEFAULT_REGION": "us-east-1", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}  # fmt: skip
        return {**known, "AWS_ENDPOINT_URL": self.url, "S3_ENDPOINT_URL": self.url}


@contextlib.contextmanager
def slow_s3(folder: Path, delay_s: float, core: int, bytes_per_s: float | None = None) -> Iterator[Server]:
    """Serve a folder's sub-folders as buckets."""
    context = multiprocessing.get_context("spawn")
    ports, counts = context.Queue(), context.Array("q", len(_COUNTED))
    process = context.Process(target=_serve, args=(folder, core, delay_s, bytes_per_s, ports, counts), daemon=True)
    process.start()
    try:
        yield Server(f"http://127.0.0.1:{ports.get(timeout=120)}", counts)
    finally:
        process.terminate()
        process.join()


def linked(files: Mapping[str, Path], folder: Path) -> None:
    """Lay out a bucket: files by their keys."""
    for key, path in files.items():
        place = folder / BUCKET / key
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path.resolve())


def _serve(folder: Path, core: int, delay_s: float, bytes_per_s: float | None, ports: Any, counts: Any) -> None:
    os.sched_setaffinity(0, {core})
    asyncio.run(_run(_Objects(folder.resolve(), delay_s, bytes_per_s, counts), ports))


async def _run(objects: "_Objects", ports: Any) -> None:
    runner = web.ServerRunner(web.Server(objects.answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    ports.put(runner.addresses[0][1])
    await asyncio.Event().wait()


class _Objects:
    """The answers to requests."""

    def __init__(self, folder: Path, delay_s: float, bytes_per_s: float | None, counts: Any) -> None:
        self._folder, self._delay_s, self._bytes_per_s, self._counts = folder, delay_s, bytes_per_s, counts
        self._free_at = 0.0  # the time at which the limited link has sent what it was given

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        bucket, _, key = request.path.lstrip("/").partition("/")
        listing = request.method == "GET" and not key
        self._counts[_COUNTED.index("LIST" if listing else request.method)] += 1
        await asyncio.sleep(self._delay_s)
        if listing:
            return web.Response(text=self._listed(bucket, request.query), content_type="application/xml")
        path = (self._folder / bucket / key).absolute()
        if ".." in request.path or not (path.is_file() if key else path.is_dir()):
            return _error(404, "NoSuchKey" if key else "NoSuchBucket")
        if not key:
            return web.Response()
        return await self._object(request, path, path.stat())

    async def _object(self, request: web.BaseRequest, path: Path, found: os.stat_result) -> web.StreamResponse:
        first, stop = 0, found.st_size
        headers = {"Accept-Ranges": "bytes", "Last-Modified": email.utils.formatdate(found.st_mtime, usegmt=True),
                   "ETag": _etag(found)}  # fmt: skip
        if asked := _RANGE.match(request.headers.get("Range", "")):
            first, stop = _part(asked, found.st_size)
            if first >= stop:
                return _error(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{found.st_size}"
        response = web.StreamResponse(status=206 if asked else 200, headers=headers)
        response.content_length, response.content_type = stop - first, "binary/octet-stream"
        await response.prepare(request)
        if request.method != "HEAD":
            with path.open("rb") as file:
                file.seek(first)
                part = stop - first if self._bytes_per_s is None else PART
                while first < stop:
                    content = file.read(min(part, stop - first))
                    first += len(content)
                    await self._turn(len(content))
                    await response.write(content)
        await response.write_eof()
        return response

    async def _turn(self, size: int) -> None:
        """Wait until the link is free for these bytes."""
        if self._bytes_per_s is not None:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._bytes_per_s
            await asyncio.sleep(self._free_at - time.monotonic())

    def _listed(self, bucket: str, query: Mapping[str, str]) -> str:
        """A page of ListObjectsV2."""
        root = self._folder / bucket
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after") or ""
        entries: dict[str, Path | None] = {}  # None: a common prefix
        for parent, _, names in os.walk(root, followlinks=True):
            for name in names:
                path = Path(parent, name)
                key = path.relative_to(root).as_posix()
                if not key.startswith(prefix):
                    continue
                inner = key[len(prefix) :].find(delimiter) if delimiter else -1
                if inner < 0:
                    entries[key] = path
                else:
                    entries[key[: len(prefix) + inner + len(delimiter)]] = None
        page = [key for key in sorted(entries) if key > after][: int(query.get("max-keys", PAGE)) + 1]
        more = len(page) > int(query.get("max-keys", PAGE))
        page = page[: int(query.get("max-keys", PAGE))]
        parts = [_contents(key, found) if (found := entries[key]) is not None else
                 f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>" for key in page]  # fmt: skip
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{PAGE}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(parts)}"
            "</ListBucketResult>"
        )


def _part(asked: re.Match[str], size: int) -> tuple[int, int]:
    """The first byte of a range, and the one behind its last."""
    first, last = asked.groups()
    if not first:
        return max(0, size - int(last or 0)), size
    return int(first), min(int(last) + 1, size) if last else size


def _contents(key: str, path: Path) -> str:
    found = path.stat()
    when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.st_mtime))
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified><ETag>{escape(_etag(found))}</ETag>"
        f"<Size>{found.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def _etag(found: os.stat_result) -> str:
    return f'"{hashlib.md5(f"{found.st_size} {found.st_mtime_ns}".encode(), usedforsecurity=False).hexdigest()}"'


def _error(status: int, code: str) -> web.Response:
    return web.Response(status=status, text=f"<Error><Code>{code}</Code></Error>", content_type="application/xml")
