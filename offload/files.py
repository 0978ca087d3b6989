"""Files that a user names: read whole, but only where that ends.

A named pipe waits for a writer without an end, and a device may have none.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

MOST_BYTES = 64 << 20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_text(path: Path, what: str) -> str:
    """The text of a file. ``what`` is it called in an error: ``the profile``.

    Raises ConfigError for one that is missing, may not be read, is no ordinary file, is larger than 64 MiB or no text.
    """
    named = f"{what} {path}"
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no ordinary file")
            raise ConfigError(f"{named} cannot be read: it is {kind}. Name an ordinary file.")
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(
                f"{named} cannot be read: it is larger than {MOST_BYTES >> 20} MiB. Is another file meant?"
            )
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{named} cannot be read: it is not UTF-8 text. Is another file meant?") from None
    except ValueError as error:  # a path that none can have
        raise ConfigError(f"{named} cannot be read: {error}.") from None


def read_json(path: Path, what: str, remedy: str) -> Any:
    """The document in a JSON file. Raises ConfigError as :func:`read_text` does, and for what is not JSON."""
    text = read_text(path, what)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} {path} is not JSON: {error}. {remedy}") from None
