"""Read and write a user's files as a whole; read only regular files.

A named pipe may wait for a writer forever, and a device may have no end.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

MOST_BYTES = 64 << 20
MOST_DIGITS = 300  # the most digits of a whole number: a float holds no more
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_text(path: Path, what: str) -> str:
    """Read the text of a file. ``what`` names it in errors: ``the profile``.

    Raises ConfigError if the file is missing, not readable, not an ordinary file, larger than 64 MiB, or not text.
    """
    named = f"{what} {path}"
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not an ordinary file")
            raise ConfigError(f"{named} cannot be read: it is {kind}. Name an ordinary file.")
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(
                f"{named} cannot be read: it is larger than {MOST_BYTES >> 20} MiB. Did you mean another file?"
            )
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{named} cannot be read: it is not UTF-8 text. Did you mean another file?") from None
    except ValueError as error:  # an impossible path
        raise ConfigError(f"{named} cannot be read: {error}.") from None


def is_file(path: Path, what: str) -> bool:
    """Return whether this is an ordinary file, or a link to one. ``what`` names it in errors: ``the script``. Raises ConfigError where
    nobody may look."""
    try:
        return path.is_file()
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror or error}.") from None


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all. A file that exists keeps its permissions, and a link stays one. A device, such as
    ``/dev/null``, gets the text. Raises ConfigError if that is impossible."""
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.part")
    try:
        if path.is_char_device():  # to put a file in its place would break other programs
            path.write_text(text, encoding="utf-8", newline="")
            return
        if path.exists() and not path.is_file():
            kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode), "not an ordinary file")
            raise ConfigError(f"{path} cannot be written: it is {kind}. Name an ordinary file.")
        part.write_text(text, encoding="utf-8", newline="")
        if target.exists():
            part.chmod(stat.S_IMODE(target.stat().st_mode))
        part.replace(target)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from None


def read_json(path: Path, what: str, remedy: str) -> Any:
    """Read the document in a JSON file.

    Raises ConfigError as :func:`read_text` does, and if it is not JSON, or holds a number that no float can hold, text that is not
    Unicode, or lists within lists without end.
    """
    text = read_text(path, what)
    try:
        document = json.loads(text, parse_int=_number)
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{what} {path} holds text that is not Unicode (half of a surrogate pair). {remedy}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} {path} is not JSON: {error}. {remedy}") from None
    return document


def _number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, {digits[:20]}…")
    return int(digits)
