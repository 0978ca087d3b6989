"""Makes the Python environment of a row with uv, once: its folder is named after everything that is installed in it.

Where it stops: offload itself is not installed. The programs find it on their path.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.matrix.rows import Row

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_FOLDER = Path("~/.cache/offload-matrix").expanduser()
MAKE_TIMEOUT_S = 1200.0
SHOWN = ("ray", "torch", "numpy", "pyarrow", "pandas")
"""The packages whose versions the result names."""
OF_A_REFUSAL = ("click", "rich", "platformdirs", "numpy", "scipy", "jinja2", "fsspec", "psutil")
"""What the command imports before it can refuse. A row outside of the window has no other requirements of offload."""
_COMPLETE = "complete"


class EnvironmentFailed(Exception):
    """An environment could not be made; the text says why."""


class PythonMissing(EnvironmentFailed):
    """The Python of a row is not on this machine, and uv cannot download it."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An environment that is ready. ``refused_by``: what the installer says of offload in it, for a row outside of the window."""

    python: Path
    versions: dict[str, str]
    refused_by: str = ""


def make(row: Row, folder: Path) -> Environment:
    """Make the environment of a row, unless it exists.

    Raises PythonMissing, or EnvironmentFailed if a package cannot be had, or if the installer accepts what offload refuses.
    """
    interpreter = find_python(row.python)
    refused_by = ""
    if row.expects == "refused":
        refused_by = _refusal_of_installer(row, interpreter)
    resolved = _resolved(row, interpreter)
    key = hashlib.sha256("\n".join([str(interpreter), *resolved]).encode()).hexdigest()[:12]
    at = folder / f"{row.name}-{key}"
    python = at / "bin" / "python"
    if not (at / _COMPLETE).exists():
        _uv("venv", "--clear", "--python", str(interpreter), str(at))
        with _requirements(resolved) as path:
            _uv("pip", "install", "--no-deps", "--python", str(python), "-r", path)
        (at / _COMPLETE).touch()
    return Environment(python=python, versions=_versions(python, resolved), refused_by=refused_by)


def find_python(version: str) -> Path:
    """The interpreter of a minor version: one that uv finds, one of pyenv's, or else one that uv downloads. Raises PythonMissing."""
    find = ("python", "find", "--no-project", "--system", version)
    with contextlib.suppress(EnvironmentFailed):
        return Path(_uv(*find).strip())
    of_pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    if installed := sorted(of_pyenv.glob(f"{version}.*/bin/python")):
        return installed[-1]
    try:
        _uv("python", "install", version)
        return Path(_uv(*find).strip())
    except EnvironmentFailed:
        raise PythonMissing(f"there is no Python {version} here, and uv cannot download one") from None


def _resolved(row: Row, interpreter: Path) -> list[str]:
    """All packages of a row with their versions: offload's requirements and the row's own."""
    with _requirements(row.packages if row.expects == "works" else (*row.packages, *OF_A_REFUSAL)) as path:
        project = [str(ROOT / "pyproject.toml")] if row.expects == "works" else []
        text = _uv(
            *("pip", "compile", *project, path, "--python", str(interpreter), "--resolution", row.resolution),
            *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"),
        )
    return [line for line in text.splitlines() if "==" in line]


def _refusal_of_installer(row: Row, interpreter: Path) -> str:
    """What uv says when it should install offload beside the row's packages. Raises EnvironmentFailed if it would do so."""
    with _requirements((*row.packages, f"offload @ {ROOT.as_uri()}")) as path:
        try:
            _uv("pip", "compile", path, "--python", str(interpreter))
        except EnvironmentFailed as refusal:
            return re.sub(r"^uv .*?: |^.*╰─▶ | @ file:\S+", "", str(refusal).replace(str(ROOT), "."))
    raise EnvironmentFailed("the installer accepts these versions, which offload refuses")


def _versions(python: Path, resolved: list[str]) -> dict[str, str]:
    code = "import platform; print(platform.python_version())"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    pinned = dict(line.split(" ;")[0].strip().split("==") for line in resolved)
    return {"python": done.stdout.strip()} | {name: pinned[name] for name in SHOWN if name in pinned}


class _requirements:
    """A file with these requirements, as a context."""

    def __init__(self, lines: list[str] | tuple[str, ...]) -> None:
        self._lines = lines

    def __enter__(self) -> str:
        self._folder = tempfile.TemporaryDirectory(prefix="matrix-")
        path = Path(self._folder.name) / "requirements.in"
        path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")
        return str(path)

    def __exit__(self, *unused: object) -> None:
        self._folder.cleanup()


def _uv(*arguments: str) -> str:
    program = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if program is None:
        raise EnvironmentFailed("uv, which makes environments, is missing: pip install uv")
    command = [program, *arguments, "--no-progress", "--color", "never"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False, cwd="/")
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(f"uv {arguments[0]} took longer than {MAKE_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise EnvironmentFailed(f"uv {' '.join(arguments[:2])} failed: {' '.join(done.stderr.split())[-600:]}")
    return done.stdout
