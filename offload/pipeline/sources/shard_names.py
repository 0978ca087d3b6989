"""The names that a pattern of shards stands for: braces as bash and webdataset expand them, and patterns joined by ``::``.

Pure text. Where it stops: :mod:`offload.pipeline.sources.webdataset` looks the names up, and knows globs and folders.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator

from offload.errors import ConfigError

MOST_SHARDS = 1_000_000

_NUMBERS = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?(\d{1,18}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d{1,18}))?")
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase
# "::" also chains file systems of fsspec, as in simplecache::s3://bucket/a.tar or zip://a.tar::s3://bucket/b.zip.
_CHAINED = re.compile(r"(simplecache|filecache|blockcache|zip|tar|libarchive|reference)(::|://)")


def joined(pattern: str) -> list[str]:
    """The patterns that ``::`` joins."""
    return [pattern] if _CHAINED.match(pattern) else pattern.split("::")


def expanded(pattern: str) -> list[str]:
    """The names that a pattern with braces stands for, in their order. A backslash before a character makes it part of the name.

    Raises ConfigError for a brace without a partner, and for more than ``MOST_SHARDS`` names.
    """
    _check_braces(pattern)
    if _count(pattern) > MOST_SHARDS:
        raise ConfigError(f"{pattern!r} names more than {MOST_SHARDS:,} shards. Correct the range.")
    return list(_names(pattern))


def _check_braces(pattern: str) -> None:
    depth = 0
    for _, character in _meaningful(pattern):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    if depth:
        raise ConfigError(
            f"the braces of {pattern!r} do not match, and no shard has this very name. Correct them, or write \\{{ for a brace of a name."
        )


def _meaningful(text: str) -> Iterator[tuple[int, str]]:
    """The braces and commas of a text that no backslash hides, with their places."""
    return ((match.start(), match[0]) for match in re.finditer(r"\\.|[{},]", text) if match[0][0] != "\\")


def _outer_braces(text: str) -> tuple[int, int] | None:
    """The places of the first pair of braces that lies in no other; None if there is none."""
    depth = opening = 0
    for at, character in _meaningful(text):
        if character == "{":
            opening = opening if depth else at
            depth += 1
        elif character == "}":
            depth -= 1
            if not depth:
                return opening, at
    return None


def _count(text: str) -> int:
    """The number of names, without making them: a range may be far too large."""
    if (pair := _outer_braces(text)) is None:
        return 1
    inside = text[pair[0] + 1 : pair[1]]
    numbers = _range(inside)
    return (sum(map(_count, _parts(inside))) if numbers is None else len(numbers[0])) * _count(text[pair[1] + 1 :])


def _names(text: str) -> Iterator[str]:
    """The names of a text whose braces match."""
    if (pair := _outer_braces(text)) is None:
        yield _plain(text)
        return
    before, rest = _plain(text[: pair[0]]), list(_names(text[pair[1] + 1 :]))
    for middle in _alternatives(text[pair[0] + 1 : pair[1]]):
        for after in rest:
            yield f"{before}{middle}{after}"


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _alternatives(inside: str) -> Iterator[str]:
    """The texts that a pair of braces stands for. Braces around neither a range nor a list are part of the name."""
    if (counted := _range(inside)) is not None:
        numbers, name = counted
        yield from map(name, numbers)
        return
    parts = _parts(inside)
    for part in parts:
        yield from _names(part) if len(parts) > 1 else (f"{{{name}}}" for name in _names(part))


def _range(inside: str) -> tuple[range, Callable[[int], str]] | None:
    """The numbers of a range, and a function from a number to its name. None if this is no range."""
    if numbers := _NUMBERS.fullmatch(inside):
        first, last, step = numbers.groups()
        padded = any(re.match(r"-?0.", bound) for bound in (first, last))
        width = max(len(first), len(last)) if padded else 0
        return _steps(int(first), int(last), step), lambda number: f"{number:0{width}d}"
    if letters := _LETTERS.fullmatch(inside):
        first, last, step = letters.groups()
        return _steps(_ALPHABET.index(first), _ALPHABET.index(last), step), _ALPHABET.__getitem__
    return None


def _steps(first: int, last: int, step: str | None) -> range:
    size = int(step or 1) or 1
    return range(first, last + 1, size) if first < last else range(first, last - 1, -size)


def _parts(inside: str) -> list[str]:
    """The parts of a list between commas, which other braces may hide."""
    parts, depth, start = [], 0, 0
    for at, character in _meaningful(inside):
        depth += (character == "{") - (character == "}")
        if character == "," and not depth:
            parts.append(inside[start:at])
            start = at + 1
    return [*parts, inside[start:]]
