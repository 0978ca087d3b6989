"""How a container of a SageMaker job begins: its process 1, and what is installed in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError
from offload.launch.sagemaker.container import installing
from offload.launch.sagemaker.container.entry import _leave, _tell_pid
from offload.launch.sagemaker.container.installing import code_artifact_index, install, reason_of
from offload.launch.sagemaker.container.process_one import ENTRY_PID
from offload.launch.sagemaker.job import RUN_LINES, program
from offload.launch.sagemaker.settings import TO_INSTALL
from tests.helpers import eventually

# --- process 1 ----------------------------------------------------------------------------------------------------------

TOOLKIT = """\
import os, signal, sys, time
from pathlib import Path
folder = Path(os.environ["SEEN"])
(folder / "command").write_text(" ".join(sys.argv[1:]))
def stop(signum, frame):
    (folder / "stopped").touch()
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
"""
WAITS = f"""{TOOLKIT}
from offload.launch.sagemaker.container.entry import _tell_pid
_tell_pid()
(folder / 'begun').touch()
time.sleep(60)
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The folder of an image's commands, with its Python."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "python3").symlink_to(sys.executable)
    return commands


def command(path: Path, python: str) -> None:
    path.write_text(f"#!{sys.executable}\n{python}")
    path.chmod(0o755)


def container(image: Path, seen: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RUN_LINES, *program()], text=True, stderr=subprocess.DEVNULL,
        env={"PATH": f"{image}:/usr/bin:/bin", "SEEN": str(seen), "SAGEMAKER_BASE_DIR": str(seen), "PYTHONPATH": os.getcwd()},
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> int:
    return process.wait(800)


def test_the_toolkit_runs_and_its_exit_code_is_the_containers(image: Path, tmp_path: Path) -> None:
    command(image / "train", f"{TOOLKIT}\nsys.exit(3)")
    assert ended(container(image, tmp_path)) == 3


def test_aws_own_start_is_kept_where_an_image_has_it(image: Path, tmp_path: Path) -> None:
    """It gives the container the host name that the job knows it by."""
    command(image / "train", "raise SystemExit(1)")
    (image / "start_with_right_hostname.sh").write_text('echo "$@" > $SEEN/command; exit 4')
    (image / "start_with_right_hostname.sh").chmod(0o755)
    assert ended(container(image, tmp_path)) == 4
    assert (tmp_path / "command").read_text() == "train\n"


def test_sigterm_reaches_the_entry(image: Path, tmp_path: Path) -> None:
    command(image / "train", WAITS)
    process = container(image, tmp_path)
    eventually((tmp_path / "begun").exists)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 7
    assert (tmp_path / "stopped").exists()


def test_sigterm_before_the_entry_has_begun_ends_the_container(image: Path, tmp_path: Path) -> None:
    command(image / "train", "import os, time\nopen(os.environ['SEEN'] + '/begun', 'w')\ntime.sleep(5)\n")
    process = container(image, tmp_path)
    eventually((tmp_path / "begun").exists)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 143


def test_an_image_without_the_toolkit_is_named(image: Path, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    assert ended(container(image, tmp_path)) == 1
    assert "cannot run `train`" in (tmp_path / "output" / "failure").read_text()


def test_the_entry_tells_nobody_where_it_was_started_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENTRY_PID, raising=False)
    _tell_pid()


def test_a_failure_file_holds_any_reason(tmp_path: Path) -> None:
    """A script's error may quote text of its data, which need not be Unicode."""
    _leave("ValueError: half a pair, '\ud83d'", tmp_path / "output" / "failure")
    assert (tmp_path / "output" / "failure").read_text() == r"ValueError: half a pair, '\ud83d'"


# --- requirements -------------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> None:
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as file:
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        needed = "".join(f"Requires-Dist: {each}\n" for each in requires)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All packages there are: two versions of a library, and something that needs the newer."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "needs-it", "1.0", ["the-library>=2"])
    wheel(wheels, "the-library", "1.0")
    wheel(wheels, "the-library", "2.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "site"))
    return tmp_path


def test_requirements_that_contradict_each_other_are_named(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (index / TO_INSTALL).write_text("needs-it==1.0\nthe-library<2\n")
    with pytest.raises(ConfigError) as error:
        install(index)
    text = str(error.value)
    assert text.startswith("pip could not install the requirements: Cannot install")
    assert "The user requested the-library<2\n    needs-it 1.0 depends on the-library>=2" in text
    assert "loosen the range" not in text
    assert "loosen the range" in capfd.readouterr().out  # the log has all


def test_requirements_are_installed(index: Path) -> None:
    (index / TO_INSTALL).write_text("needs-it\n")
    install(index)
    assert (index / "site" / "the_library-2.0.dist-info").exists()


def test_an_installation_ends_where_the_job_does(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def over() -> None:
        began.set()
        raise ConfigError("algo-3: no")

    (index / TO_INSTALL).write_text("needs-it\n")
    with pytest.raises(ConfigError, match="algo-3: no"):
        install(index, over)
    assert began.is_set()


def test_an_image_without_pip_and_one_without_a_network_say_so() -> None:
    assert reason_of(["/usr/bin/python: No module named pip"]) == "/usr/bin/python: No module named pip"
    lines = [
        "WARNING: Retrying (Retry(total=4, ...)) after connection broken by 'NewConnectionError(...)': /simple/ray/",
        "ERROR: Could not find a version that satisfies the requirement ray==2.60.0 (from versions: none)",
        "ERROR: No matching distribution found for ray==2.60.0",
    ]
    assert reason_of(lines).splitlines() == [
        "Could not find a version that satisfies the requirement ray==2.60.0 (from versions: none)",
        "No matching distribution found for ray==2.60.0",
        "No package index was reached: without a network, use an image that has the requirements.",
    ]
    assert reason_of([]) == "it said nothing"


class CodeArtifact:
    """AWS's client, for one repository."""

    def __init__(self, service: str, region_name: str) -> None:
        assert (service, region_name) == ("codeartifact", "eu-west-1")

    def get_authorization_token(self, domain: str, domainOwner: str) -> dict[str, Any]:
        return {"authorizationToken": f"token-of-{domain}-{domainOwner}"}

    def get_repository_endpoint(self, **asked: str) -> dict[str, Any]:
        return {
            "repositoryEndpoint": f"https://d-1.codeartifact.amazonaws.com/{asked['format']}/{asked['repository']}/"
        }


def test_a_code_artifact_repository_is_the_index() -> None:
    arn = "arn:aws:codeartifact:eu-west-1:1:repository/d/mine"
    expected = "https://aws:token-of-d-1@d-1.codeartifact.amazonaws.com/pypi/mine/simple/"
    assert code_artifact_index(arn, CodeArtifact) == expected
    with pytest.raises(ConfigError, match="'mine', which is not the ARN of a CodeArtifact repository"):
        code_artifact_index("mine")


def test_the_bundle_names_what_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without requirements nothing is started."""
    monkeypatch.setattr(installing.subprocess, "Popen", None)
    install(tmp_path)
