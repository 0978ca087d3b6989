"""Packages that this Python lacks, from a wheel or a folder of wheels, without an index and without a change to the environment."""

import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click


def install(given: Path, folder: Path) -> list[str]:
    """Install the missing ones of these wheels into ``folder``; return the folders to put on the path.

    What is installed already stays in use. Raises ClickException if the wheels cannot be installed.
    """
    wheels = [given] if given.is_file() else sorted(given.glob("*.whl"))
    if not wheels:
        raise click.ClickException(f"--wheel: {given} holds no wheels (*.whl).")
    missing = [wheel for wheel in wheels if not _installed(wheel)]
    if not missing:
        return []
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--disable-pip-version-check",
    ]
    ran = subprocess.run(
        [*command, "--target", str(folder), *map(str, missing)], capture_output=True, text=True, check=False
    )
    if ran.returncode != 0:
        raise click.ClickException(f"--wheel: pip cannot install {_names(missing)}: {_last(ran.stderr)}")
    sys.path.insert(1, str(folder))  # for the versions of the document
    importlib.invalidate_caches()
    return [str(folder)]


def _installed(wheel: Path) -> bool:
    name = wheel.name.partition("-")[0].replace("_", "-")
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _names(wheels: Sequence[Path]) -> str:
    return ", ".join(wheel.name for wheel in wheels)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
