"""Listings that a later start of the same user on this machine finds again, in the user's cache folder.

The caller names everything that a listing depends on, such as path, size and time of modification. Where it stops: it does not know what
is listed. A cache that cannot be read or written costs time alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import platformdirs
import pyarrow as pa

KEPT_S = 90 * 24 * 3600  # an unused listing is removed after this time

Known = Sequence[str | int]


def folder() -> Path:
    """The folder of all listings."""
    return Path(platformdirs.user_cache_dir("offload")) / "listings"


def cached(known: Known) -> pa.Table | None:
    """The listing of what is known, or None."""
    path = _path(known)
    try:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        os.utime(path)
    except (OSError, pa.ArrowException):
        return None
    return table


def cache(known: Known, table: pa.Table) -> None:
    """Keep a listing, as a whole or not at all."""
    path = _path(known)
    with contextlib.suppress(OSError, pa.ArrowException):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            try:
                options = pa.ipc.IpcWriteOptions(compression="zstd")
                with pa.ipc.new_file(file, table.schema, options=options) as writer:
                    writer.write_table(table)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise


def remove_unused() -> None:
    """Remove listings that nobody used for long."""
    with contextlib.suppress(OSError):
        for path in folder().iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > KEPT_S:
                    path.unlink()


def _path(known: Known) -> Path:
    return folder() / f"{hashlib.sha256(json.dumps(list(known)).encode()).hexdigest()}.arrow"
