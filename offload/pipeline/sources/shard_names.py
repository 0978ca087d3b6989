"""The names that a pattern of shards stands for: braces as bash and webdataset expand them, and patterns joined by ``::``.

Pure text. Where it stops: :mod:`offload.pipeline.sources.webdataset` looks the names up, and knows globs and folders.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator

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
    names = list(itertools.islice(_names(pattern), MOST_SHARDS + 1))
    if len(names) > MOST_SHARDS:
        raise ConfigError(f"{pattern!r} names more than {MOST_SHARDS:,} shards. Correct the range.")
    return names


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
    return ((found.start(), found[0]) for found in re.finditer(r"\\.|[{},]", text) if found[0][0] != "\\")


def _names(text: str) -> Iterator[str]:
    """The names of a text whose braces match. They come one by one: a range may be far too large."""
    depth = opening = 0
    for at, character in _meaningful(text):
        if character == "{":
            opening = opening if depth else at
            depth += 1
        elif character == "}":
            depth -= 1
            if not depth:
                before = _plain(text[:opening])
                for middle in _alternatives(text[opening + 1 : at]):
                    for after in _names(text[at + 1 :]):
                        yield f"{before}{middle}{after}"
                return
    yield _plain(text)


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _alternatives(inside: str) -> Iterator[str]:
    """What a pair of braces stands for, by the text between them. Braces around neither a range nor a list belong to the name."""
    if numbers := _NUMBERS.fullmatch(inside):
        first, last, step = numbers.groups()
        padded = any(re.match(r"-?0.", each) for each in (first, last))
        width = max(len(first), len(last)) if padded else 0
        for number in _steps(int(first), int(last), step):
            yield f"{number:0{width}d}"
    elif letters := _LETTERS.fullmatch(inside):
        first, last, step = letters.groups()
        for number in _steps(_ALPHABET.index(first), _ALPHABET.index(last), step):
            yield _ALPHABET[number]
    else:
        parts = _parts(inside)
        for part in parts:
            yield from _names(part) if len(parts) > 1 else (f"{{{name}}}" for name in _names(part))


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
