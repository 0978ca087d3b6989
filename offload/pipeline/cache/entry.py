"""A cached content on disk: a file with its version, its length and its checksum before it."""

from __future__ import annotations

import os
import struct
import zlib

BLOCK = 4096
_HEADER = struct.Struct("<4sIqq")
_MAGIC = b"OFC1"  # the last character counts versions of the format


class DamagedError(Exception):
    """An entry is not what was written."""


def disk_bytes(file_bytes: int) -> int:
    """The bytes that a file of this size takes on disk."""
    return -(-file_bytes // BLOCK) * BLOCK


def entry_bytes(content_bytes: int) -> int:
    """The bytes that the entry of a content of this size takes on disk."""
    return disk_bytes(_HEADER.size + content_bytes)


def write(fd: int, version: int, content: bytes) -> None:
    """Write an entry. Raises OSError."""
    left = memoryview(_HEADER.pack(_MAGIC, zlib.crc32(content), version, len(content)))
    for part in (left, memoryview(content)):
        while part:
            part = part[os.write(fd, part) :]


def read(path: str) -> tuple[int, bytes, float]:
    """The version and the content of an entry, and the time of its last use.

    Raises DamagedError, and OSError if there is no such entry.
    """
    with open(path, "rb", buffering=0) as file:
        header, content = file.read(_HEADER.size), file.readall()
        used = os.fstat(file.fileno()).st_mtime
    if len(header) < _HEADER.size:
        raise DamagedError
    magic, checksum, version, size = _HEADER.unpack(header)
    if magic != _MAGIC or size != len(content) or zlib.crc32(content) != checksum:
        raise DamagedError
    return version, content, used
