"""YAML files with comments that give reasons. PyYAML writes no comments, so each top-level part carries its own."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

WIDTH = 118


@dataclass(frozen=True, kw_only=True)
class YamlPart:
    """Some of the document's top-level keys, and the reasons for their values."""

    why: str = ""
    content: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class YamlFile:
    """One YAML document: an introduction for people, then its parts."""

    head: str
    parts: tuple[YamlPart, ...]

    def document(self) -> dict[str, Any]:
        """The document that a program reads from the file."""
        return {key: value for part in self.parts for key, value in part.content.items()}

    def text(self) -> str:
        """The file."""
        return "\n".join(
            [_comment(self.head), *(f"{_comment(_wrapped(part.why))}{_dumped(part.content)}" for part in self.parts)]
        )


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write out repeated values, without YAML anchors: people edit these files."""
        return True


def _dumped(content: Mapping[str, Any]) -> str:
    # A command must stay on its line.
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def _comment(text: str) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())
