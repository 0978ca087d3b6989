"""Offload's requirements on other machines, besides those in a user's requirements.txt.

Where it stops: :mod:`offload.launch.sagemaker.resolve` finds out whether both can be installed together.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from offload.errors import ConfigError
from offload.launch.uploaded_files import FOLDERS_LEFT_OUT, bytes_of, uploaded

IN_IMAGE = ("torch", "torchvision")
"""Packages that are never installed over an image's own, which fit its CUDA."""
_INCLUDES = re.compile(r"\s*(?:-r|--requirement)[= ]?\s*([^\s#]+)")
_OPTION = re.compile(r"(-[rcef]|--(?:requirement|constraint|editable|find-links)(?=[\s=]|$))[\s=]*(.*)")
_INCLUDED = re.compile(r"\s*(-[rc]|--(requirement|constraint))")
_FIND_LINKS = re.compile(r"\s*(-f|--find-links)")
_ADDRESS = re.compile(r"https?://")
_OF_VERSION_CONTROL = re.compile(r"(git|hg|svn|bzr)\+(?!file:)[a-z+]+://")
_NAMES = re.compile(r"\s*([A-Za-z0-9][\w.-]*)")


def requirement(name: str) -> Requirement:
    """Offload's own requirement of a package."""
    return next(needed for needed in requirements_of_offload() if canonicalize_name(needed.name) == name)


def requirements_of_offload() -> list[Requirement]:
    """All of offload's own requirements, without its extras, sorted by name."""
    parsed = map(Requirement, importlib.metadata.requires("offload") or [])
    return sorted((needed for needed in parsed if "extra" not in str(needed.marker)), key=lambda needed: needed.name)


def requirements(own: Path | None = None, ray: str | None = None) -> list[str]:
    """The packages that offload needs and images lack, as version ranges, so that they are compatible with a user's pins.

    Only Ray is pinned, since the machines of a cluster need the same one: to the version ``ray``, or else to the one installed here. If
    the file ``own`` names Ray, its requirement decides, within offload's range.
    """
    named = set() if own is None else names_in(own)
    return [
        f"{_bare(needed)}=={ray or importlib.metadata.version('ray')}"
        if needed.name == "ray" and "ray" not in named
        else str(needed)
        for needed in requirements_of_offload()
        if needed.name not in IN_IMAGE
    ]


def own_requirements(path: Path) -> str:
    """The text of a user's requirements.txt. Raises ConfigError if pip would not accept it together with offload's."""
    try:
        text = bytes_of(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}.") from None
    if re.search(r"^[^#]*--hash[= ]", text, re.MULTILINE):
        raise ConfigError(
            f"{path} holds hashes (--hash): pip would then demand them of offload's requirements too. Export it without hashes."
        )
    return text


def names_in(path: Path) -> set[str]:
    """The packages that a requirements.txt names, itself or in files that it includes (``-r other.txt``)."""
    matches = (_NAMES.match(line) for _, line in _lines(path) if not _INCLUDES.match(line))
    return {canonicalize_name(name[1]) for name in matches if name is not None}


def check_targets(path: Path) -> None:
    """Raise ConfigError for a line of a requirements.txt that names what is not uploaded with its folder."""
    folder = path.parent.resolve()
    files = uploaded(folder)
    if folder / path.name not in files:
        raise ConfigError(f"{path} is a link to {path.resolve()}, which is not uploaded with {folder}: copy it there.")
    travel = files.union(*(file.parents for file in files))
    for file, line in _lines(folder / path.name):
        if (target := local_target(line)) is None:
            continue
        named = _place_of(target, file, line, folder)
        there = named.resolve()
        said = f"{file} has the line {line.strip()!r}, and {there} is not uploaded with {folder}"
        if not there.is_relative_to(folder) or not there.exists():
            raise ConfigError(f"{said}: copy it there, or name its packages here.")
        if Path(os.path.normpath(named)) not in travel:
            raise ConfigError(
                f"{said}: hidden files, links to folders, virtual environments, and folders called {', '.join(FOLDERS_LEFT_OUT)} "
                "are not. Move it elsewhere in the folder."
            )
        if there == folder and folder / "pyproject.toml" not in files and not _FIND_LINKS.match(line):
            raise ConfigError(
                f"{file} has the line {line.strip()!r}, and the setup.py of {folder} is not uploaded: the training toolkit would run it "
                "instead of the script. Drop the line if the script imports only modules beside it, or write a pyproject.toml."
            )


def _place_of(target: str, file: Path, line: str, folder: Path) -> Path:
    """Where pip, which runs in ``folder``, looks for what a line of ``file`` names: packages there, other files beside ``file``."""
    beside = file.parent / target
    if _INCLUDED.match(line) or (_FIND_LINKS.match(line) and beside.exists()):
        return beside
    return folder / target


def local_target(line: str) -> str | None:
    """The file or folder of this machine that a line of a requirements file names; None for packages and addresses."""
    text = re.sub(r"(^|\s+)#.*", "", line).strip()
    if "file:" in text.lower():
        return text[text.lower().index("file:") :].removeprefix("file:").removeprefix("//")
    if option := _OPTION.match(text):
        name, value = option.groups()
        if name in ("-e", "--editable"):
            return None if _OF_VERSION_CONTROL.match(value) else value.partition("[")[0]  # without extras
        return None if _ADDRESS.match(value) else value
    what = text.partition(";")[0].strip()
    local = "://" not in what and ("/" in what or what.startswith(".") or what.endswith((".whl", ".zip", ".tar.gz")))
    return what.partition("[")[0] if local else None


def _lines(path: Path) -> Iterator[tuple[Path, str]]:
    """Each line of a requirements file, and of those that it includes, with its file.

    For pip, the lines of a link name files beside the link, not beside its target.
    """
    waiting, seen = [path], set[Path]()
    while waiting:
        path = Path(os.path.abspath(waiting.pop()))
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        for line in own_requirements(path).splitlines():
            yield path, line
            if more := _INCLUDES.match(line):
                waiting.append(path.parent / more[1])


def _bare(needed: Requirement) -> str:
    """The name and extras of a requirement."""
    return f"{needed.name}[{','.join(sorted(needed.extras))}]" if needed.extras else needed.name
