"""Listings that a later start of the same user on this machine finds again, in the user's cache folder.

The caller names everything that a listing depends on, such as path, size and time of modification. A small listing is a file; the rows of
a large one (:class:`offload.pipeline.index.stored_rows.StoredRows`) are a folder, which a later start maps. Where it stops: it does not
know what is listed. A cache that cannot be read or written costs time alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import pyarrow as pa

from offload.pipeline.index.stored_rows import OwnedFolder, StoredRows, remove_left

KEPT_S = 90 * 24 * 3600  # an unused listing is removed after this time

_ABOUT = "about.json"

Known = Sequence[str | int]

Fits = Callable[[Mapping[str, Any]], bool]
"""Whether a listing with these facts is still right. One that is not counts as unused."""


def folder() -> Path:
    """The folder of all listings."""
    return Path(platformdirs.user_cache_dir("offload")) / "listings"


def _always(facts: Mapping[str, Any]) -> bool:
    return True


def facts_of(table: pa.Table) -> dict[str, str]:
    """The facts that belong to a small listing."""
    return {name.decode(): fact.decode() for name, fact in (table.schema.metadata or {}).items()}


def cached(known: Known, fits: Fits = _always) -> pa.Table | None:
    """The listing of what is known, or None."""
    path = _path(known)
    try:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        if not fits(facts_of(table)):
            return None
        os.utime(path)
    except (OSError, pa.ArrowException):
        return None
    return table


def cache(known: Known, table: pa.Table) -> None:
    """Keep a listing, as a whole or not at all. An earlier one of what is known goes."""
    path = _path(known)
    with contextlib.suppress(OSError, pa.ArrowException):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            try:
                options = pa.ipc.IpcWriteOptions(compression="zstd")
                with pa.ipc.new_file(file, table.schema, options=options) as writer:
                    writer.write_table(table)
                # Renamed at the end: another start sees the old listing or the whole new one.
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        _remove(_folders(known))


def new_folder() -> OwnedFolder:
    """A folder for the rows of a large listing: among the listings, or among temporary files if nobody can write there. Raises OSError."""
    remove_left(folder())
    try:
        folder().mkdir(parents=True, exist_ok=True)
        return OwnedFolder(folder())
    except OSError:
        temporary = Path(tempfile.gettempdir())
        remove_left(temporary)
        return OwnedFolder(temporary)


def cached_rows(
    known: Known, fits: Fits, dictionaries: Mapping[str, pa.Array] | None = None
) -> tuple[StoredRows, dict[str, Any]] | None:
    """The rows of a large listing of what is known, and the facts that belong to them; None if there are none. ``dictionaries``: the
    values of their columns of numbers."""
    for path in _folders(known):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            about = json.loads((path / _ABOUT).read_bytes())
            rows = StoredRows(
                folder=path,
                columns=about["columns"],
                rows=about["rows"],
                sizes=about["sizes"],
                dictionaries=dictionaries or {},
            )
            whole = all((path / name).stat().st_size == size for name, size in rows.sizes.items())
            if whole and fits(about["facts"]):
                os.utime(path)
                return rows, about["facts"]
    return None


def cache_rows(known: Known, rows: StoredRows, facts: Mapping[str, Any]) -> StoredRows:
    """Keep the rows of a large listing for later starts, with facts in JSON. Return the rows at their new place, or as they were if they
    cannot be kept. An earlier listing of what is known goes."""
    if rows.owned is None or rows.folder.parent != folder():
        return rows
    earlier, path = _folders(known), folder() / f"{_name(known)}.{secrets.token_hex(8)}"
    try:
        about = {"columns": rows.columns, "rows": rows.rows, "sizes": rows.sizes, "facts": facts}
        (rows.folder / _ABOUT).write_text(json.dumps(about))
        rows.owned.give(path)
    except OSError:
        return rows
    _remove([*earlier, _path(known)])
    return replace(rows, folder=path, owned=None)


def remove_unused() -> None:
    """Remove listings that nobody used for long."""
    with contextlib.suppress(OSError):
        for path in folder().iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > KEPT_S:
                    _remove([path])


def _remove(listings: Iterable[Path]) -> None:
    for path in listings:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _folders(known: Known) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder().glob(f"{_name(known)}.{'?' * 16}"))
    return []


def _path(known: Known) -> Path:
    return folder() / f"{_name(known)}.arrow"


def _name(known: Known) -> str:
    return hashlib.sha256(json.dumps(list(known)).encode()).hexdigest()
