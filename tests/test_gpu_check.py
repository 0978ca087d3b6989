"""`make gpu-check` without a GPU: its stand-ins, its supervision, and what it says where it cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner

from benchmarks import gpu_check, offload_vs_single_gpu
from benchmarks.gpu import supervise
from benchmarks.gpu.checks import CHECKS, NAMES
from benchmarks.gpu.child import answer_of
from benchmarks.gpu.place import Place
from benchmarks.gpu.supervise import Check, Outcome
from benchmarks.gpu.wheels import install
from offload.cli.doctor_checks import TorchFacts
from tests.helpers import ROOT, eventually

DEADLINE_S = 800.0
LONG = ("fork", "precision", "memory", "nccl", "loader", "busy")  # whole trainings, which other tests run too
NEEDS = {"sync_batch_norm": "needs two GPUs", "decode": "needs a GPU"}


def bad(name: str) -> Check:
    return Check(name=name, function=f"tests.programs.bad_checks:{name}", least_s=0.0)


def outcome(name: str, deadline_s: float = DEADLINE_S) -> Outcome:
    return supervise.run_one(bad(name), device="cpu", gpus=0, deadline_s=deadline_s)


@pytest.fixture
def threads() -> Iterator[None]:
    """The benchmarks' workloads use one thread of torch; other tests of this process need not."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    "check",
    [pytest.param(check, marks=[pytest.mark.soak] if check.name in LONG else []) for check in CHECKS],
    ids=NAMES,
)
def test_a_check_runs_on_a_cpu_or_says_what_it_needs(
    check: Check, ray_cluster: None, threads: None, tmp_path: Path
) -> None:
    kept: dict[str, Any] = {}
    told = answer_of(check.function, Place(device="cpu", gpus=0, folder=tmp_path, so_far=kept.update))
    if check.name in NEEDS:
        assert told == {"status": "not applicable", "reason": NEEDS[check.name]}
        return
    assert told["status"] == "passed", told
    assert told["said"]
    assert kept.keys() <= told["figures"].keys()


def test_two_gpus_are_needed_where_there_is_one(tmp_path: Path) -> None:
    one = Place(device="cuda", gpus=1, folder=tmp_path)
    for name in ("nccl", "sync_batch_norm"):
        told = answer_of(f"benchmarks.gpu.workers:{name}", one)
        assert told == {"status": "not applicable", "reason": "needs two GPUs"}


# -- supervision ---------------------------------------------------------------------------------------------------------


def test_what_a_check_finds_is_told() -> None:
    found = outcome("passes")
    assert (found.status, found.said, found.reason) == ("passed", "all is well", "")
    assert found.figures == {"answer": 42, "infinite": None}
    assert found.device == "cpu"


def test_a_crash_fails_its_check_alone_and_keeps_its_figures() -> None:
    found = outcome("crashes")
    assert (found.status, found.reason) == ("failed", "its process died from SIGSEGV")
    assert found.figures == {"before": 1}
    assert any("Segmentation fault" in line for line in found.output)


class Hanging(subprocess.Popen[bytes]):
    """A check whose deadline passes as soon as it has told what it started."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout == DEADLINE_S:
            assert isinstance(self.args, list)
            answer = Path(self.args[4])
            eventually(lambda: answer.exists() and "pids" in answer.read_text())
            timeout = 0.01
        return super().wait(timeout)


@pytest.mark.soak
def test_a_hang_fails_its_check_and_ends_all_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.5)
    monkeypatch.setattr(subprocess, "Popen", Hanging)
    found = outcome("hangs")
    assert (found.status, found.reason) == ("failed", "it was not done within 300 s")
    for pid in found.figures["pids"]:
        eventually(lambda pid=pid: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("raises", "failed", "ValueError: no such colour"),
        ("disproves", "failed", "weights differ"),
        ("exits", "failed", "its process ended with exit code 1: enough"),
        ("lacks", "not applicable", "needs the package no_such_package_at_all, which is not installed"),
    ],
)
def test_the_reason_of_a_check_that_does_not_pass(name: str, status: str, reason: str) -> None:
    found = outcome(name)
    assert (found.status, found.reason) == (status, reason)


@pytest.mark.soak
def test_a_check_that_raises_keeps_its_figures() -> None:
    assert outcome("raises").figures == {"before": 1}


def test_checks_that_no_longer_fit_are_not_run() -> None:
    found = supervise.run_all(CHECKS, device="cpu", gpus=0, until=time.monotonic())
    assert [each.name for each in found] == list(NAMES)
    assert {(each.status, each.reason) for each in found} == {("not run", "the budget is spent")}


# -- the command ---------------------------------------------------------------------------------------------------------


def test_the_document_and_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "stand-in.json"
    ran = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py", "--cpu", "--json", "--only", "devices", "--only", "clocks", "-o", path],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    document = json.loads(path.read_text())
    assert json.loads(ran.stdout) == document
    assert {
        "benchmark",
        "claim",
        "command",
        "at",
        "machine",
        "versions",
        "gpus",
        "budget_s",
        "seconds",
    } <= document.keys()
    assert document["outcomes"] == {"passed": 2}
    assert document["device"] == "cpu"
    assert "no figure here is a GPU's" in document["note"]
    for check in document["checks"]:
        assert {"name", "status", "reason", "device", "seconds", "said", "figures"} <= check.keys()
        assert check["device"] == "cpu"


def code_of(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        gpu_check.run(arguments)
    return ended.value.code


def test_a_failed_check_gives_exit_code_1_and_the_table_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "CHECKS", (bad("disproves"), bad("passes")))
    assert code_of("--cpu", "-o", str(tmp_path / "found.json")) == 1
    told = capsys.readouterr().out
    assert "weights differ" in told
    assert "all is well" in told
    assert json.loads((tmp_path / "found.json").read_text())["outcomes"] == {"failed": 1, "passed": 1}


def test_a_resumed_command_keeps_what_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setattr(gpu_check, "CHECKS", (bad("disproves"), bad("passes")))
    assert code_of("--cpu", "-o", str(path), "--resume") == 1
    before = json.loads(path.read_text())["checks"]
    monkeypatch.setattr(gpu_check, "CHECKS", (Check(name="disproves", function=bad("passes").function), bad("passes")))
    assert code_of("--cpu", "-o", str(path), "--resume") == 0
    after = json.loads(path.read_text())
    assert after["outcomes"] == {"passed": 2}
    assert after["checks"][1] == before[1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "is no result of this command"),
        ("[1", "is no result of this command"),
        ('{"gpus": ["Some GPU"], "checks": []}', "was measured on Some GPU, and this machine has no GPU"),
    ],
)
def test_a_file_that_cannot_be_resumed_is_named(
    content: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    path.write_text(content)
    assert code_of("--cpu", "-o", str(path), "--resume") == 2
    assert said in capsys.readouterr().err
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resume", "--cpu"], "name it with -o"),
        (["--budget-s", "0"], "--budget-s"),
        (["--budget-s", "soon"], "--budget-s"),
        (["--only", "everything"], "--only"),
        (["--wheel", "no-such-folder"], "--wheel"),
        (["--wheel", "tests"], "holds no wheels"),
        (["-o", "no/such/folder/gpu.json"], "not a writable folder"),
        (["--cpu", "-o", "gpu.json"], "--cpu yields no GPU figures"),
        (["--gpu"], "--gpu"),
    ],
)
def test_a_bad_option_gives_one_sentence(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert code_of(*arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.strip().splitlines()) == 1
    assert said in told.err


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (TorchFacts(torch="2.8.0", cuda="12.8"), "torch finds no GPU"),
        (TorchFacts(torch="2.8.0"), "built for CPUs only"),
        (TorchFacts(), "torch cannot be imported"),
    ],
)
def test_without_a_gpu_it_says_what_to_do(
    facts: TorchFacts, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "torch_facts", lambda: facts)
    assert code_of() == 2
    told = capsys.readouterr().err
    assert said in told
    assert "--cpu" in told
    assert len(told.strip().splitlines()) == 1


# -- one GPU host, alone and with a CPU host -----------------------------------------------------------------------------


@pytest.mark.hosts
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 1, "torch finds no GPU: run this on a machine with one, or pass --cpu"),
        (["--cpu", "--cores", "4096"], 1, "--cores 4096 leaves no core for the CPU host"),
        (["--cores", "0"], 2, "--cores"),
        (["--workload", "text"], 2, "--workload"),
    ],
)
def test_offload_vs_single_names_what_it_lacks(
    arguments: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_vs_single_gpu, "torch_facts", lambda: TorchFacts(torch="2.8.0"))
    ended = CliRunner().invoke(offload_vs_single_gpu.main, arguments)
    assert ended.exit_code == code
    assert said in ended.output
    assert "Traceback" not in ended.output


def test_a_run_is_compared_with_the_loader_the_device_and_its_prediction() -> None:
    rows: dict[str, dict[str, Any]] = {
        "device": {"samples_per_s": 4000.0},
        "dataloader, GPU host": {"samples_per_s": 2000.0},
        "predicted": {"samples_per_s": 2200.0, "samples_per_s_with_cpu_host": 3600.0},
        "offload, both hosts": {"samples_per_s": 3000.0},
    }
    offload_vs_single_gpu.compare(rows)
    both = rows["offload, both hosts"]
    assert (both["over_dataloader"], both["over_device"]) == (1.5, 0.75)
    assert both["prediction_error"] == pytest.approx(0.2)


# -- wheels --------------------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str) -> Path:
    """A wheel with one module."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "VALUE = 42\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def test_only_missing_packages_come_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    wheels.mkdir()
    wheel(wheels, "missing_from_here")
    wheel(wheels, "click")
    assert install(wheels, target) == [str(target)]
    assert (target / "missing_from_here.py").exists()
    assert not (target / "click.py").exists()
    assert install(wheels / "click-1.0-py3-none-any.whl", tmp_path / "other") == []


def test_a_wheel_that_cannot_be_installed_gives_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "missing_from_here-1.0-py3-none-any.whl"
    broken.write_text("no zip file")
    assert code_of("--cpu", "--wheel", str(broken)) == 2
    told = capsys.readouterr().err
    assert "pip cannot install missing_from_here" in told
    assert len(told.strip().splitlines()) == 1
