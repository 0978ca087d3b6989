"""Finds the test modules of other libraries: in folders, in source archives, or in what pip downloads."""

import importlib.metadata
import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

PIP_TIMEOUT_S = 600.0


class NotFound(Exception):
    """A suite, or a package that its tests import, is not there; the text says what to do."""


def modules(given: Path, names: Sequence[str], unpacked: Path) -> list[Path]:
    """Return the files of these names in a folder or a source archive, or the file itself.

    Raises: NotFound if one of them is missing, or is there more than once.
    """
    if not given.exists():
        raise NotFound(f"{given} does not exist.")
    if given.suffix == ".py":
        if given.name not in names:
            raise NotFound(f"{given.name} is not the suite's {' or '.join(names)}.")
        return [given]
    folder = given if given.is_dir() else _unpack(given, unpacked)
    return [_only(folder, name, given) for name in names]


def _only(folder: Path, name: str, given: Path) -> Path:
    found = sorted(folder.rglob(name))
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(f"{given} holds no {name}. Give a checkout or a source archive with the tests.")
    places = " and ".join(str(path.relative_to(folder)) for path in found[:3])
    raise NotFound(f"{given} holds {name} {len(found)} times ({places}). Give the file or its folder.")


def _unpack(archive: Path, to: Path) -> Path:
    to.mkdir(parents=True, exist_ok=True)
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(to)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(to, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, OSError) as error:
        raise NotFound(
            f"{archive} is neither a folder, a Python file nor a readable source archive: {error}."
        ) from None
    return to


def download(package: str, to: Path) -> Path:
    """Return the source archive of a package's installed version, as pip finds it. Raises NotFound if there is none."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise NotFound(f"{package} is not installed.") from None
    _pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(to), f"{package}=={version}")
    return to / f"{package}-{version}.tar.gz"


def add_packages(packages: Sequence[str], to: Path) -> None:
    """Let pip install packages, without what they require, into a folder of their own."""
    _pip("install", "--no-deps", "--target", str(to), *packages)


def missing(packages: Sequence[str]) -> list[str]:
    """Return those packages that this Python lacks."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotFound(f"pip {arguments[0]} {arguments[-1]} took longer than {PIP_TIMEOUT_S:.0f} s.") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise NotFound(f"pip {arguments[0]} {arguments[-1]} failed: {said[-1] if said else 'it said nothing'}")
