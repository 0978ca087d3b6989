"""What travels to the instances: the user's folder, this very version of offload, the entry, and pinned requirements.

The archive is the same, byte for byte, for the same files and token. Where it stops: it is uploaded by others.
"""

from __future__ import annotations

import fnmatch
import gzip
import importlib.metadata
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import launchers
import offload
from offload.errors import ConfigError

LARGEST_BYTES = 200 << 20
TOKEN = ".offload-token"
PLAN = ".offload-plan.json"
LEFT_OUT = (".*", "__pycache__", "*.pyc")
"""Files and folders that stay at home: hidden ones (``.git``, ``.env``, ``.aws``), and what Python makes again."""
FOLDERS_LEFT_OUT = ("runs", "checkpoints", "venv", "node_modules", "build", "dist", "*.egg-info")
"""Folders of the user's that do as well."""
SECRET = ("*.pem", "*.key", "id_rsa*", "id_ed25519*", "credentials*", "secrets*", "*.p12", "*.pfx")
"""Those that nobody means to upload: they are refused, not left out, since the script may need them."""
OURS = ("offload", "launchers")
IN_IMAGE = ("torch", "torchvision")
"""Never installed over an image's own, which fit its CUDA."""


def requirements() -> list[str]:
    """What offload needs beside what images hold, at the versions that are installed here."""
    found = []
    for line in importlib.metadata.requires("offload") or []:
        name = line.split(";")[0].strip()
        if "extra ==" in line:
            continue
        package = name.split(">")[0].split("=")[0].split("[")[0].strip()
        if package in IN_IMAGE:
            continue
        extras = name[name.index("[") : name.index("]") + 1] if "[" in name else ""
        found.append(f"{package}{extras}=={importlib.metadata.version(package)}")
    return sorted(found)


def pack(script: Path, entry: str, token: str, plan: Path | None = None) -> bytes:
    """The archive (tar.gz) for a script, with its folder and everything below.

    ``entry``: the name under which the container starts; ``token``: that the job's Ray cluster authenticates with; ``plan``: that
    the job was launched from.

    Raises ConfigError for a script that is not there, files that look like keys, or too many bytes.
    """
    script = script.resolve()
    if not script.is_file():
        raise ConfigError(f"there is no script {script}.")
    files = dict(_of_user(script.parent))
    for package in (offload, launchers):
        root = Path(str(package.__file__)).resolve().parent
        files |= {f"{root.name}/{name}": path for name, path in _below(root)}
    total = sum(path.stat().st_size for path in files.values())
    if total > LARGEST_BYTES:
        largest = sorted(files, key=lambda name: files[name].stat().st_size, reverse=True)[:3]
        raise ConfigError(
            f"{script.parent} holds {total / 2**20:,.0f} MiB to upload with the script, at most {LARGEST_BYTES >> 20} MiB are: put "
            f"data into S3 and pass it with --input, or move the script to a folder of its own. Largest: {', '.join(largest)}."
        )
    made = {entry: _ENTRY, "requirements.txt": _merged(files.pop("requirements.txt", None)), TOKEN: token}
    if plan is not None:
        made[PLAN] = plan.read_text(encoding="utf-8")
    taken = sorted(made.keys() & files.keys())
    if taken:
        raise ConfigError(f"{script.parent} holds {', '.join(taken)}, which the launcher makes itself: rename it.")
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for name in sorted({*files, *made}):
            content = made[name].encode() if name in made else _bytes_of(files[name])
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = (
                0o600 if name == TOKEN else 0o755 if name not in made and os.access(files[name], os.X_OK) else 0o644
            )
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


_ENTRY = """\
import os
import sys

try:
    from launchers.sagemaker.entry import main
except ImportError as error:
    text = f"{error}: what requirements.txt names is not installed on this host. Without a network take an image that holds it."
    with open(os.path.join(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "output", "failure"), "w") as file:
        file.write(text)
    sys.exit(text)

if __name__ == "__main__":
    main()
"""


def _of_user(folder: Path) -> Iterator[tuple[str, Path]]:
    for name, path in _below(folder, FOLDERS_LEFT_OUT):
        if name.split("/")[0] in OURS:
            if path.resolve().is_relative_to(Path(str(offload.__file__)).resolve().parents[1]):
                continue  # these very packages: they are packed anyway
            raise ConfigError(
                f"{folder} holds a package {name.split('/')[0]!r}, as offload's own is called: rename it."
            )
        if name == "setup.py":
            continue  # with it the training toolkit would install the folder as a package, and run that
        if _is(path.name.lower(), SECRET):
            raise ConfigError(
                f"{path} looks like a key or a password, and would be uploaded with the script: move it elsewhere, and let the "
                "script fetch what it needs from AWS Secrets Manager."
            )
        yield name, path


def _below(folder: Path, but: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """(name in the archive, path) of every file that travels; links that lead out of the folder do not."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is(name, LEFT_OUT + but))
        for name in sorted(names):
            file = Path(path, name)
            if not _is(name, LEFT_OUT) and file.is_file() and file.resolve().is_relative_to(folder):
                yield file.relative_to(folder).as_posix(), file


def _is(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _merged(own: Path | None) -> str:
    """The user's requirements behind offload's."""
    text = "\n".join(requirements()) + "\n"
    try:
        return text if own is None else f"{text}\n{_bytes_of(own).decode()}"
    except UnicodeDecodeError as error:
        raise ConfigError(f"{own} is not UTF-8 text: {error.reason}.") from None


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read, and would be uploaded with the script: {error.strerror}.") from None
