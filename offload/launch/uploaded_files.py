"""Choose the files to upload with a script: those of the user's folder, and the installed offload.

Where it stops: each launcher packs them.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import offload
from offload.errors import ConfigError

LEFT_OUT = (".*", "__pycache__", "*.pyc")
"""Files and folders that are not uploaded: hidden ones (``.git``, ``.env``, ``.aws``), and those that Python makes again."""
FOLDERS_LEFT_OUT = ("runs", "checkpoints", "venv", "node_modules", "build", "dist", "*.egg-info")
"""Folders of the user that are not uploaded either, unless they are packages of Python."""
SECRET = (
    *("*.pem", "*.key", "id_rsa*", "id_ed25519*", "credentials*", "secrets*", "*.p12", "*.pfx"),
    *("*auth_token*", "service-account*.json", "service_account*.json", "kubeconfig*"),
)
"""Files that nobody means to upload. They are refused, not left out, since the script may need them. Modules such as
``secrets_manager.py`` may travel."""
MODULES = ("secrets?*.py", "credentials?*.py")
CLUSTER_TOKEN = "RAY_AUTH_TOKEN_PATH"
"""The variable with the path of a file that is always refused, whatever its name."""
OURS = "offload"
LARGEST_SHOWN = 3


def files_of(folder: Path, *, instead_of_keys: str) -> dict[str, Path]:
    """All files to upload, by their names on the other machine: those below the user's folder, and offload's package.

    ``instead_of_keys``: a remedy for users with secrets in the folder.

    Raises ConfigError for files that look like keys or hold the cluster's token, for names that an archive cannot hold, and for a
    user's package that is named like offload's.
    """
    files = dict(_of_user(folder.resolve(), instead_of_keys))
    package = Path(str(offload.__file__)).resolve().parent
    return files | {f"{OURS}/{name}": path for name, path in _below(package)}


def left_behind(folder: Path) -> list[str]:
    """What a user may miss among the uploaded files, in words: links, folders with names of results, and those that cannot be read."""
    folder = folder.resolve()
    notes = []
    if links := links_left(folder):
        notes.append(f"links out of the folder, or to folders, are not uploaded: {', '.join(map(ascii, links))}")
    skipped_paths: list[str] = []
    unread: list[OSError] = []
    for path, folders, _ in os.walk(folder, onerror=unread.append):
        skipped = [name for name in folders if _is_left_out(path, name, FOLDERS_LEFT_OUT)]
        skipped_paths += [
            Path(path, name).relative_to(folder).as_posix() for name in skipped if _is(name, FOLDERS_LEFT_OUT)
        ]
        folders[:] = [name for name in folders if name not in skipped]
    if skipped_paths:
        notes.append(f"folders of these names are not uploaded: {', '.join(map(ascii, sorted(skipped_paths)))}")
    if unread:
        names = sorted(Path(error.filename).relative_to(folder).as_posix() for error in unread)
        notes.append(f"folders that cannot be read are not uploaded: {', '.join(map(ascii, names))}")
    return notes


def uploaded(folder: Path) -> set[Path]:
    """The files below a folder that are uploaded."""
    return {path for _, path in _below(folder.resolve(), FOLDERS_LEFT_OUT)}


def links_left(folder: Path) -> list[str]:
    """The links below a folder that are not uploaded: those that lead out of it, to a folder, or to nothing."""
    folder = folder.resolve()
    travel = uploaded(folder)
    return [
        path.relative_to(folder).as_posix()
        for path in _walked(folder, FOLDERS_LEFT_OUT)
        if path.is_symlink() and path not in travel
    ]


def check_size(folder: Path, files: Mapping[str, Path], most_bytes: int, remedy: str) -> None:
    """Raise ConfigError, with the largest files, if the files exceed ``most_bytes``. ``remedy``: the right place for data."""
    sizes = {name: _size_of(path) for name, path in files.items()}
    total = sum(sizes.values())
    if total > most_bytes:
        raise ConfigError(
            f"{folder} holds {total / 2**20:,.0f} MiB to upload with the script, and at most {most_bytes >> 20} MiB are allowed: {remedy}. "
            f"Largest: {largest(sizes)}."
        )


def largest(sizes: Mapping[str, int]) -> str:
    """The largest files, in words. ``sizes``: bytes by name."""
    names = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:LARGEST_SHOWN]
    return ", ".join(f"{name} ({sizes[name] / 2**20:,.1f} MiB)" for name in names)


def bytes_of(path: Path) -> bytes:
    """The content of a file. Raises ConfigError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:  # it existed when the folder was listed
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be read, and would be uploaded with the script: {error.strerror}.")


def _of_user(folder: Path, instead_of_keys: str) -> Iterator[tuple[str, Path]]:
    token = os.environ.get(CLUSTER_TOKEN)
    for name, path in _below(folder, FOLDERS_LEFT_OUT):
        if not _is_utf8(name):
            raise ConfigError(f"the name of {name!r} in {folder} is not UTF-8, and cannot be uploaded: rename it.")
        if name.split("/")[0] == OURS:
            if path.resolve().is_relative_to(Path(str(offload.__file__)).resolve().parents[1]):
                continue  # offload itself, which is uploaded anyway
            raise ConfigError(f"{folder} holds a package {OURS!r}, which is the name of offload's own: rename it.")
        if (_is(path.name.lower(), SECRET) and not _is(path.name.lower(), MODULES)) or (
            token and path.resolve() == Path(token).resolve()
        ):
            raise ConfigError(
                f"{path} looks like a key or a password, and would be uploaded with the script: move it elsewhere, and "
                f"{instead_of_keys}."
            )
        yield name, path


def _below(folder: Path, but: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Yield (name on the other machine, path) of every file to upload, without links that lead out of the folder."""
    for path in _walked(folder, but):
        if _is_file(path) and path.resolve().is_relative_to(folder):
            yield path.relative_to(folder).as_posix(), path


def _is_file(path: Path) -> bool:
    """Return whether this is an ordinary file, or a link to one. Raises ConfigError where nobody may look, except behind a link, which is
    left out."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or os.path.islink(path):
            return False
        raise _unreadable(path, error) from None


def _walked(folder: Path, but: tuple[str, ...]) -> Iterator[Path]:
    """Yield everything to upload below a folder except folders. It does not follow links: a link to a folder is an entry itself."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_left_out(path, name, but))
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        for name in sorted([*names, *links]):
            if not _is(name, LEFT_OUT):
                yield Path(path, name)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_left_out(path: str, name: str, but: tuple[str, ...]) -> bool:
    """Return whether a folder is not uploaded. A package of the user may be called ``build`` or ``checkpoints``."""
    package = os.path.exists(os.path.join(path, name, "__init__.py"))
    return _is(name, LEFT_OUT) or (_is(name, but) and not package) or _is_environment(path, name)


def _is_environment(path: str, name: str) -> bool:
    """Return whether a folder is a virtual environment, whatever its name."""
    return os.path.exists(os.path.join(path, name, "pyvenv.cfg"))


def _is(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
