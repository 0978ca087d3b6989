"""A Python or a Ray that cannot work is refused in one sentence when offload is imported, and by its command."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from offload import versions
from offload.errors import ConfigError, VersionError
from offload.versions import LOWEST_RAY, PYTHONS, TESTED_RAY, installed_ray, python_refusal, ray_refusal
from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEADLINE_S = 800.0
OLD = "Ray 2.49.2 is installed, and offload needs Ray 2.50 or newer (tested: 2.50 to 2.60): pip install 'ray[data]>=2.50'."
ABSENT = OLD.replace("Ray 2.49.2 is installed", "Ray is not installed")


@pytest.fixture
def old_ray(tmp_path: Path) -> Path:
    """A folder with a Ray of another version, which comes first on the path and fails if it is imported."""
    (tmp_path / "ray-2.49.2.dist-info").mkdir()
    (tmp_path / "ray-2.49.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.49.2\n")
    (tmp_path / "ray.py").write_text("raise AssertionError('Ray was imported')\n")
    return tmp_path


def python(*arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a Python that finds ``path`` first, and this checkout."""
    environment = {"PYTHONPATH": f"{path}:{ROOT}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False)


# --- the sentence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "sentence"), [("2.49.2", OLD), (None, ABSENT), ("2.50.0", None), ("2.50.0rc1", None), ("2.99", None)]
)
def test_a_ray_that_cannot_work_is_refused_in_one_sentence(version: str | None, sentence: str | None) -> None:
    assert ray_refusal(version) == sentence


def test_a_version_that_says_nothing_is_not_refused() -> None:
    assert ray_refusal("") is None
    assert ray_refusal("built-here") is None


@pytest.mark.parametrize(("version", "refused"), [((3, 10), True), ((3, 11), False), ((3, 14), False), ((3, 15), True)])
def test_a_python_outside_the_range_is_refused(version: tuple[int, int], refused: bool) -> None:
    sentence = python_refusal(version)
    assert (sentence is not None) == refused
    if sentence is not None:
        found = ".".join(map(str, version))
        assert sentence.startswith(f"Python {found} runs this program, and offload needs Python 3.11 to 3.14")
        assert len(re.findall(r"[.]( |$)", sentence)) == 1


def test_the_package_asks_for_the_same_ranges() -> None:
    (ray,) = [Requirement(text) for text in PROJECT["dependencies"] if text.startswith("ray")]
    assert ray.specifier == SpecifierSet(f">={LOWEST_RAY}")
    lowest, limit = (".".join(map(str, version)) for version in PYTHONS)
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={lowest},<{limit}")
    assert TESTED_RAY[0] == LOWEST_RAY


def test_every_requirement_has_a_lowest_version() -> None:
    bounds = {Requirement(text).name: str(Requirement(text).specifier) for text in PROJECT["dependencies"]}
    assert {name: bound for name, bound in bounds.items() if not bound.startswith(">=")} == {}


# --- which Ray is installed -------------------------------------------------------------------------------------------


def test_the_version_of_an_imported_ray_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "__version__", "2.49.9")
    assert installed_ray() == "2.49.9"
    with pytest.raises(VersionError, match=r"^Ray 2\.49\.9 is installed"):
        versions.check_versions()


def test_a_ray_without_metadata_is_there_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata
    import importlib.util

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", absent)
    for origin, version in (("/somewhere/ray/__init__.py", ""), (None, None)):  # None: only a folder called ray
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, at=origin: ModuleSpec(name, None, origin=at))
        assert installed_ray() == version


# --- the import and the command ---------------------------------------------------------------------------------------


def test_the_import_is_refused_without_importing_ray(old_ray: Path) -> None:
    done = python("-c", "import offload", path=old_ray)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"offload.errors.VersionError: {OLD}"
    assert "offload/__init__.py" not in done.stderr  # no frames of this package


@pytest.mark.parametrize("kind", ["ImportError", "Exception"])
def test_a_program_may_catch_the_refusal(old_ray: Path, kind: str) -> None:
    done = python("-c", f"try: import offload\nexcept {kind} as error: print(error)", path=old_ray)
    assert (done.returncode, done.stdout) == (0, f"{OLD}\n")
    assert issubclass(VersionError, ConfigError)


def test_an_absent_ray_is_refused() -> None:
    done = python("-S", "-c", "import offload")  # without site-packages
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"offload.errors.VersionError: {ABSENT}"


@pytest.mark.parametrize(
    "arguments", [("plan",), ("run", "train.py"), ("report", "runs/a"), ("launch", "ray", "--help")]
)
def test_the_command_says_the_sentence_alone(old_ray: Path, arguments: tuple[str, ...]) -> None:
    done = python("-m", "offload", *arguments, path=old_ray)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"offload: {OLD}\n")


def test_the_command_tells_its_version_and_the_doctor_reports(old_ray: Path) -> None:
    assert python("-m", "offload", "--version", path=old_ray).returncode == 0
    done = python("-m", "offload", "doctor", "--json", path=old_ray)
    assert done.returncode == 2
    assert OLD.rstrip(".") in done.stdout


def test_an_installed_ray_is_not_imported() -> None:
    done = python("-c", "import sys, offload; print('ray' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n")
