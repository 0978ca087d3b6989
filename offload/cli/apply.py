"""``--apply`` of ``offload probe``, which changes a script so that it uses faster equivalents of its transforms.

Where it stops: :mod:`offload.probe.edits` edits the source, and :mod:`offload.probe.replacing` measures.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offload.errors import ConfigError, OffloadError
from offload.files import write_text
from offload.measure.findings import Findings
from offload.measure.replacement import Replacement, document, sentences

if TYPE_CHECKING:
    from offload.measure.equivalents import DropIn
    from offload.probe.work import SampleWork

SECONDS = 8.0
NOTHING = "--apply found nothing to replace: the data set uses no transform of which offload has a faster equivalent."
NOT_MAP_STYLE = "--apply found nothing to measure: it repeats single samples, and a ray.data.Dataset or an iterable data set offers none."
INSTALL = "pip install 'offload[opencv]'"
BOM = "\ufeff"


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """The change of one file. ``before``: its bytes when it was read."""

    path: Path
    before: bytes
    text: str
    diff: str


class Applying:
    """The changes of a script and of the modules beside it, from the measurement to the files.

    ``yes``: write them without asking. ``seconds``: the time to measure. Raises ConfigError if OpenCV is missing, or with ``yes`` if the
    script cannot be written.
    """

    def __init__(self, script: Path, *, yes: bool, seconds: float = SECONDS) -> None:
        try:
            importlib.import_module("cv2")
        except ImportError as error:
            raise ConfigError(
                f"--apply measures transforms that OpenCV computes, and cv2 cannot be imported ({error}). Install it: {INSTALL}."
            ) from None
        self._script, self._yes, self._seconds = script, yes, seconds
        there = os.path.isfile(script)  # if not, loading it raises the right error
        if yes and there and not _writable(script):
            raise ConfigError(f"{script} cannot be written: it is read-only. Make it writable, or leave out --yes.")
        self._first = {script.resolve(): script.read_bytes()} if there and os.access(script, os.R_OK) else {}
        self._work: SampleWork | None = None
        self._changes: list[FileChange] = []
        self._written = False

    def keep(self, work: SampleWork | None) -> None:
        """Take the work of some samples from the probe."""
        self._work = work

    def result(self, findings: Findings) -> tuple[dict[str, Any], str]:
        """Measure and edit, and write with ``yes``. Returns the findings for ``--json``, and the text."""
        from offload.probe.replacing import measure

        said: list[str] = []
        by_hand: list[str] = []
        replacement: Replacement | None = None
        if self._work is None:
            said.append(NOT_MAP_STYLE)
        else:
            try:
                replacement = measure(self._work, seconds=self._seconds)
            except (Exception, SystemExit) as error:  # the user's code
                text = str(error) if isinstance(error, OffloadError) else f"{type(error).__name__}: {error}"
                said.append(f"--apply could not repeat samples in this process: {text}.")
            else:
                said += [NOTHING] if replacement is None else sentences(findings, replacement)
        if replacement is not None and replacement.chosen:
            by_hand = self._edit(replacement.chosen)
            said += by_hand
        if self._changes and self._yes:
            self._write()
            said.append(self._done())
        facts = {
            **({} if replacement is None else document(findings, replacement)),
            "says": said,
            "diff": "".join(change.diff for change in self._changes),
            "files": [str(change.path) for change in self._changes],
            "by_hand": by_hand,
            "written": self._written,
        }
        return facts, "\n".join(said) + "".join(f"\n\n{change.diff.rstrip()}" for change in self._changes)

    def offer(self) -> None:
        """Ask on a terminal whether to write the changes, unless they are written."""
        if not self._changes or self._written:
            return
        locked = [change.path for change in self._changes if not _writable(change.path)]
        if locked:
            click.echo(f"{_shown(locked[0])} is read-only, so nothing was written.", err=True)
        elif not (sys.stdin.isatty() and sys.stdout.isatty()):
            click.echo("Nothing was written; --apply --yes writes this change.", err=True)
        elif click.confirm("Write this change?", default=False, err=True):
            self._write()
            click.echo(self._done(), err=True)

    def _edit(self, drop_ins: Any) -> list[str]:
        """Edit the sources. Returns sentences about what is left to the user."""
        said: list[str] = []
        replaced: set[str] = set()
        for path in _sources(self._script):
            change, by_hand, names = self._edited(path, drop_ins)
            said += by_hand
            replaced |= names
            if change is not None:
                self._changes.append(change)
        named = {name for name in (drop_in.name for drop_in in drop_ins) if any(f" {name} " in text for text in said)}
        said += [
            f"No file of this script makes a {drop_in.name} that can be replaced. Find the place, and make {drop_in.path} there: it "
            "takes the same arguments."
            for drop_in in drop_ins
            if drop_in.name not in replaced | named
        ]
        return said

    def _edited(self, path: Path, drop_ins: list[DropIn]) -> tuple[FileChange | None, list[str], set[str]]:
        from offload.probe.edits import edit, unified_diff

        content = self._first.get(path) or path.read_bytes()
        try:
            text = content.decode()
            mark = BOM if text.startswith(BOM) else ""
            edited = edit(text.removeprefix(BOM), drop_ins)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            return None, [f"{_shown(path)} cannot be edited: it is not Python in UTF-8."], set()
        name = {drop_in.name: drop_in for drop_in in drop_ins}
        said = []
        for use in edited.by_hand:
            ours = next((drop_in for key, drop_in in name.items() if key in use.text), drop_ins[0])
            said.append(
                f"{_shown(path)}, line {use.line}: {ours.name} is used as {use.text}, which is not a call of an imported name. Write "
                f"{ours.path} there by hand: it takes the same arguments."
            )
        if not edited.replaced:
            return None, said, set()
        after = mark + edited.text
        diff = unified_diff(text, after, _shown(path))
        written = {key for key in name if f"transforms.{key}" in diff}
        return FileChange(path=path, before=content, text=after, diff=diff), said, written

    def _write(self) -> None:
        for change in self._changes:
            if change.path.read_bytes() != change.before:
                raise ConfigError(
                    f"{_shown(change.path)} has changed since the probe read it. Nothing was written: probe again."
                )
            if not _writable(change.path):
                raise ConfigError(f"{_shown(change.path)} cannot be written: it is read-only. Nothing was written.")
        for change in self._changes:
            write_text(change.path, change.text)
        self._written = True

    def _done(self) -> str:
        files = ", ".join(_shown(change.path) for change in self._changes)
        return f"Wrote {files}. Each machine that preprocesses needs OpenCV now: {INSTALL}."


def _writable(path: Path) -> bool:
    """Return whether the user may write this file. A file that nobody may write stays as it is, for root as well."""
    return os.access(path, os.W_OK) and bool(path.stat().st_mode & 0o222)


def _sources(script: Path) -> list[Path]:
    """The script, and the loaded modules that lie in its folder."""
    script = script.resolve()
    folder = script.parent
    sources = {script}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] == "offload" or not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        if path.is_relative_to(folder) and "site-packages" not in path.parts and path.is_file():
            sources.add(path)
    return [script, *sorted(sources - {script})]


def _shown(path: Path) -> str:
    """The path as a user in this folder would write it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name
