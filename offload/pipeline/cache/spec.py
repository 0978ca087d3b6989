"""The user's description of a cache, such as ``"ssd:/mnt/nvme/cache:200GB"``, and its checks on a node."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.model.checks import shown
from offload.pipeline.cache.space import Ledger

KINDS = ("ssd",)
FOLDER = "offload-cache"
"""The name of the folder that holds a cache, in the folder that the user names: nothing else there is touched."""
LEDGER = "used"

SANE = '"ssd:/mnt/nvme/cache:200GB"'
_UNITS = {f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T", "P"))}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate(("", "K", "M", "G", "T", "P")) if prefix}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_MOST = 2**60  # bytes


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """A description of each node's cache: its folder, its limit in bytes, and the user's text. It creates nothing."""

    path: Path
    limit_bytes: int
    text: str

    @property
    def folder(self) -> Path:
        """The folder that holds the cache."""
        return self.path / FOLDER


def parse_cache(name: str, value: Any) -> CacheSpec | None:
    """The cache that a user describes as ``ssd:PATH:SIZE``; None for None. ``name`` is the argument's, for errors.

    Raises ConfigError for another kind, a path that is not absolute, and a size that is missing, zero or not a size.
    """
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be text such as {SANE}, found {shown(value)}.")
    kind, _, rest = value.partition(":")
    if kind not in KINDS or not rest:
        raise ConfigError(f'{name} must begin with the kind of cache, "ssd:", as in {SANE}, found {shown(value)}.')
    path, colon, size = rest.rpartition(":")
    if not colon or "/" in size:
        raise ConfigError(f"{name} must end with the size of the cache, as in {SANE}, found {shown(value)}.")
    if not os.path.isabs(path) or "\0" in path:
        raise ConfigError(
            f"{name} must name an absolute path, the same on every node, as in {SANE}, found {shown(path)}."
        )
    return CacheSpec(path=Path(os.path.normpath(path)), limit_bytes=_bytes(name, size), text=value)


def _bytes(name: str, size: str) -> int:
    match = _SIZE.fullmatch(size)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigError(
            f"{name} must end with a size: a number and one of kB, MB, GB, TB, KiB, MiB, GiB, TiB, as in {SANE}, found "
            f"{shown(size)}."
        )
    number = int(Decimal(match[1]) * _UNITS[unit])
    if not 0 < number <= _MOST:
        raise ConfigError(f"{name} must have a size above 0 and below an exbibyte, as in {SANE}, found {shown(size)}.")
    return number


def in_units(size_bytes: int) -> str:
    """A size as ``parse_cache`` reads it, rounded down: ``149.9GB``."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = 0
    while size_bytes >= 1000 ** (power + 1) and power < len(units) - 1:
        power += 1
    tenths = size_bytes * 10 // 1000**power
    return f"{tenths / 10:g}{units[power]}"


def make_folder(spec: CacheSpec) -> None:
    """Make the folder of a cache, for this user alone.

    Raises OSError. A missing parent is an error, too: if a disk is not mounted, the cache must not fill another one.
    """
    for folder in (spec.path, spec.folder):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
    owner = os.stat(spec.folder).st_uid
    if os.geteuid() not in (0, owner):
        raise PermissionError(0, "it belongs to another user")


def obstacle_here(spec: CacheSpec) -> str | None:
    """The reason why this machine cannot hold the cache, with a remedy; None if it can."""
    try:
        make_folder(spec)
        with tempfile.TemporaryFile(dir=spec.folder) as file:
            file.write(b"0")
            file.flush()
        ledger = Ledger(spec.folder / LEDGER)
        with ledger.held():
            used = ledger.used
        free = shutil.disk_usage(spec.folder).free
    except FileNotFoundError:
        return f"{spec.path.parent} does not exist. Make it, mount its disk, or name another path"
    except OSError as error:
        return f"{spec.path} cannot be written ({error.strerror or error}). Name a folder that this user can write to"
    if free + used < spec.limit_bytes:
        return f"the disk of {spec.path} has {in_units(free + used)} free for it. Free space, or name a size that every node has"
    return None
