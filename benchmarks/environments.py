"""The Python environments of other libraries, for the benchmark `peers`: which packages each needs, and how it is made.

Each library has an environment of its own, since their requirements contradict each other. uv links the files of its cache, so that a
further copy of torch takes neither time nor disk space.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

DEFAULT_FOLDER = Path("~/.cache/offload-peers").expanduser()

_TORCH = ("torch", "torchvision", "simplejpeg", "pyarrow")
# A package without a version is the one that the project itself has, as the plain loop beside the row.
REQUIREMENTS = {
    "spdl": (*_TORCH, "spdl==0.8.0"),
    "litdata": (*_TORCH, "litdata==0.2.76", "polars==2.1.0"),
    "streaming": (*_TORCH, "mosaicml-streaming==0.13.0"),
    "webdataset": (*_TORCH, "webdataset==1.0.2"),
    "grain": (*_TORCH, "grain==0.2.18"),
    "dali": ("pyarrow", "nvidia-dali-cuda130==2.4.0"),
    "tensorflow": ("pyarrow", "tensorflow-cpu==2.21.0"),
}
MAKE_TIMEOUT_S = 1800.0
_MADE_FROM = "requirements.txt"


class EnvironmentFailed(Exception):
    """An environment could not be made; the text says why."""


def requirements(name: str) -> list[str]:
    """Return the pinned requirements of an environment."""
    return [
        required if "==" in required else f"{required}=={importlib.metadata.version(required)}"
        for required in REQUIREMENTS[name]
    ]


def make(name: str, folder: Path) -> Path:
    """Return the interpreter of an environment. Makes the environment first, unless it exists with these requirements.

    Raises: EnvironmentFailed with the end of uv's output.
    """
    at, wanted = folder / name, requirements(name)
    python, made_from = at / "bin" / "python", at / _MADE_FROM
    if made_from.exists() and made_from.read_text().splitlines() == wanted:
        return python
    _uv("venv", "--clear", "--python", sys.executable, str(at))
    # Compiled now: with PYTHONDONTWRITEBYTECODE in the environment, each row would compile its library as it starts.
    _uv("pip", "install", "--compile-bytecode", "--python", str(python), *wanted)
    made_from.write_text("\n".join(wanted) + "\n")
    return python


def versions(name: str, folder: Path) -> dict[str, str]:
    """Return the versions of the packages that an environment was made for, and of numpy."""
    listed = json.loads(_uv("pip", "list", "--format=json", "--python", str(folder / name / "bin" / "python")))
    named = {required.partition("==")[0] for required in REQUIREMENTS[name]} | {"numpy"}
    return {package["name"]: package["version"] for package in listed if package["name"] in named}


def _uv(*arguments: str) -> str:
    program = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if program is None:
        raise EnvironmentFailed("uv, which makes environments, is missing: pip install uv")
    try:
        done = subprocess.run(
            [program, *arguments, "--quiet"], capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(f"uv {arguments[0]} took longer than {MAKE_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise EnvironmentFailed(f"uv {arguments[0]} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout
