"""Which files travel to other machines with a script: those of the user's folder, and this very version of offload.

Where it stops: what is made of them, an archive or anything else, is each launcher's.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import launchers
import offload
from offload.errors import ConfigError

LEFT_OUT = (".*", "__pycache__", "*.pyc")
"""Files and folders that stay at home: hidden ones (``.git``, ``.env``, ``.aws``), and what Python makes again."""
FOLDERS_LEFT_OUT = ("runs", "checkpoints", "venv", "node_modules", "build", "dist", "*.egg-info")
"""Folders of the user's that do as well."""
SECRET = ("*.pem", "*.key", "id_rsa*", "id_ed25519*", "credentials*", "secrets*", "*.p12", "*.pfx")
"""Those that nobody means to upload: they are refused, not left out, since the script may need them."""
OURS = ("offload", "launchers")
LARGEST_SHOWN = 3


def files_of(folder: Path, *, instead_of_keys: str) -> dict[str, Path]:
    """Everything that travels, by its name there: the user's folder with all below it, and offload's packages.

    ``instead_of_keys``: where the script gets its secrets from, for whoever has them in the folder.

    Raises ConfigError for files that look like keys, and for a package of the user's that is called as offload's are.
    """
    files = dict(_of_user(folder.resolve(), instead_of_keys))
    for package in (offload, launchers):
        root = Path(str(package.__file__)).resolve().parent
        files |= {f"{root.name}/{name}": path for name, path in _below(root)}
    return files


def check_size(folder: Path, files: Mapping[str, Path], most_bytes: int, remedy: str) -> None:
    """Raise ConfigError for more bytes than are to travel, with the largest files. ``remedy``: where else data belong."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    if total > most_bytes:
        raise ConfigError(
            f"{folder} holds {total / 2**20:,.0f} MiB to upload with the script, at most {most_bytes >> 20} MiB are: {remedy}. "
            f"Largest: {largest(sizes)}."
        )


def largest(sizes: Mapping[str, int]) -> str:
    """The largest of some files, in words. ``sizes``: bytes, by name."""
    names = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:LARGEST_SHOWN]
    return ", ".join(f"{name} ({sizes[name] / 2**20:,.1f} MiB)" for name in names)


def bytes_of(path: Path) -> bytes:
    """What a file holds. Raises ConfigError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read, and would be uploaded with the script: {error.strerror}.") from None


def _of_user(folder: Path, instead_of_keys: str) -> Iterator[tuple[str, Path]]:
    for name, path in _below(folder, FOLDERS_LEFT_OUT):
        if name.split("/")[0] in OURS:
            if path.resolve().is_relative_to(Path(str(offload.__file__)).resolve().parents[1]):
                continue  # these very packages: they travel anyway
            raise ConfigError(
                f"{folder} holds a package {name.split('/')[0]!r}, as offload's own is called: rename it."
            )
        if _is(path.name.lower(), SECRET):
            raise ConfigError(
                f"{path} looks like a key or a password, and would be uploaded with the script: move it elsewhere, and "
                f"{instead_of_keys}."
            )
        yield name, path


def _below(folder: Path, but: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """(name on the other machine, path) of every file that travels; links that lead out of the folder do not."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not _is(name, LEFT_OUT + but) and not _is_environment(path, name)
        )
        for name in sorted(names):
            file = Path(path, name)
            if not _is(name, LEFT_OUT) and file.is_file() and file.resolve().is_relative_to(folder):
                yield file.relative_to(folder).as_posix(), file


def _is_environment(path: str, name: str) -> bool:
    """Whether a folder is a virtual environment, whatever it is called."""
    return os.path.exists(os.path.join(path, name, "pyvenv.cfg"))


def _is(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
