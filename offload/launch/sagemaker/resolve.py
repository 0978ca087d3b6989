"""Ask uv beforehand whether a user's requirements.txt and offload's own can be installed together in a job's image.

Where it stops: nothing is installed, and only the image's Python and torch are known. uv ignores upper bounds that packages set on
Python. If uv is missing or cannot reach the package index, a note says that nothing was checked.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError
from offload.launch.requirements import IN_IMAGE, own_requirements, requirement, requirements
from offload.launch.sagemaker.images import Contents

DEADLINE_S = 60.0
PYTHONS = ("3.12", "3.11", "3.13", "3.14")
"""Versions to try, in this order, if the image's Python is unknown; most of AWS's images have 3.12."""
_PATIENCE = {"UV_HTTP_TIMEOUT": "10", "UV_HTTP_RETRIES": "1"}
_OPTIONS = (
    *("--python-platform", "linux", "--index-strategy", "unsafe-best-match"),  # as pip chooses among several indexes
    *("--no-python-downloads", "--no-config", "--no-header", "--no-annotate", "--no-progress", "--color", "never"),
)
_MISTAKES = ("Couldn't parse requirement", "Error parsing included file", "Distribution not found at: file://{folder}/")
_CONTRADICTION = "No solution found"
_WIDE = {"COLUMNS": "10000"}  # uv breaks its lines to fit the terminal
_DRAWN = re.compile(r"[×╰─▶│├]+|^\s*cause:|^error:", re.MULTILINE)
_WHERE_FROM = re.compile(r"\s*(-i|-f|--(extra-)?index-url|--find-links|--no-index)\b")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """uv's answer. ``refused``: whether pip would refuse the requirements, too. If uv could not tell, ``said`` has the reason."""

    solved: bool = False
    refused: bool = False
    said: str = ""


def check_requirements(own: Path, image: Contents, deadline_s: float = DEADLINE_S) -> str:
    """Resolve the requirements in the file ``own`` together with offload's, for the Python and torch of an image.

    Return a note on the result. Raises ConfigError for a file that pip would refuse in the job's containers.
    """
    uv = _uv()
    if uv is None:
        return _unchecked(own, "uv is not installed: pip install 'offload[sagemaker]'")
    if os.environ.get("UV_OFFLINE", "0").lower() not in ("", "0", "false"):
        return _unchecked(own, "UV_OFFLINE is set")
    until = time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory() as folder:
        question = _Question(uv, own, Path(folder), image, until)
        pythons = (image.python,) if image.python else PYTHONS
        answers = []
        for python in pythons:
            answer = question.ask(python)
            if answer.solved:
                return f"{own.name}: can be installed with offload on Python {python}{_assumed(image)}."
            if not answer.refused:
                return _unchecked(own, answer.said)
            answers.append(answer)
        alone = question.ask(pythons[0], with_own=False)
    if not alone.solved:
        return _unchecked(own, f"offload's requirements alone: {alone.said}")
    raise ConfigError(
        f"{own} cannot be installed with offload on Python {' or '.join(pythons)}{_assumed(image)}: {answers[0].said}. "
        f"Change {own.name}{_advice(answers[0].said, image)}."
    )


class _Question:
    """The files and the command of a question to uv."""

    def __init__(self, uv: str, own: Path, folder: Path, image: Contents, until: float) -> None:
        self._uv, self._own, self._until = uv, own.parent.resolve() / own.name, until
        self._offload, self._constraints, self._indexes = (folder / name for name in ("offload", "image", "indexes"))
        _write(self._offload, [*requirements(own), *IN_IMAGE])
        _write(self._constraints, [f"torch{_torch_of(image)}"])
        _write(self._indexes, [line for line in own_requirements(own).splitlines() if _WHERE_FROM.match(line)])

    def ask(self, python: str, *, with_own: bool = True) -> Answer:
        files = (self._offload, self._own if with_own else self._indexes)
        command = [
            self._uv,
            "pip",
            "compile",
            *map(str, files),
            "-c",
            str(self._constraints),
            "--python-version",
            python,
        ]
        return _run([*command, "--python", sys.executable, *_OPTIONS], self._own.parent, self._until)


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run(command: Sequence[str], folder: Path, until: float) -> Answer:
    process = subprocess.Popen(
        command, cwd=folder, env={**_PATIENCE, **os.environ, **_WIDE}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=max(until - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return Answer(said="the package index was too slow")
    finally:
        if process.poll() is None:  # with the processes that it started to build a package
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return read_answer(process.returncode, said, folder)


def read_answer(code: int, said: str, folder: Path) -> Answer:
    """Interpret uv's answer in ``folder``. An unexpected answer counts as unknown: the job may be fine."""
    if code == 0:
        return Answer(solved=True)
    _, contradicts, why = said.partition(_CONTRADICTION)
    if contradicts and "network was disabled" not in said:
        return Answer(refused=True, said=_in_a_line(why.partition("\n")[2]))
    errors = [line for line in said.splitlines() if not line.startswith("warning:")]
    mistaken = any(mistake.format(folder=folder) in " ".join(said.split()) for mistake in _MISTAKES)
    return Answer(refused=mistaken, said="; ".join(map(_in_a_line, errors[:3])) or f"uv ended with {code}")


def _in_a_line(said: str) -> str:
    """uv's message on one line, without its drawings, hints and full stop."""
    text = " ".join(_DRAWN.sub(" ", said).split())
    return text.partition(" hint: ")[0].rstrip(".")


def _uv() -> str | None:
    try:
        from uv import find_uv_bin
    except ImportError:
        return shutil.which("uv")
    try:
        return str(find_uv_bin())
    except FileNotFoundError:
        return shutil.which("uv")


def _torch_of(image: Contents) -> str:
    """The image's torch as a specifier, as far as known."""
    if image.torch is None:
        return str(requirement("torch").specifier)
    return f"=={image.torch}" if image.torch.count(".") > 1 else f"=={image.torch}.*"


def _assumed(image: Contents) -> str:
    return "" if image.python else " (assumed, since the image's tag does not say)"


def _advice(said: str, image: Contents) -> str:
    if re.search(r"\btorch(vision)?\b", said):
        return f", or take another image: torch{_torch_of(image)} is the image's own"
    if "not found in the package registry" in said:
        return ": correct the name, name its index there (--extra-index-url), or leave out packages that the image has already"
    if re.search(r"depends on ray[\[<>=!~]", said):
        return ": if it names a version of Ray (ray==...), offload uses that version"
    return ""


def _unchecked(own: Path, why: str) -> str:
    return f"{own.name}: not checked whether it can be installed with offload ({why})."
