"""A Trainer without a cluster, and the same trainings on Ray: equal results, whatever fails, and state that moves between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path

import pytest

from offload.train.cluster.reaper import marked
from tests.helpers import eventually

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "programs" / "on_one_machine.py"
SAMPLES, EPOCHS = 96, 3
DEADLINE_S = 800.0

pytestmark = pytest.mark.slow


def command(folder: Path, fault: str, engine: str) -> list[str]:
    return [sys.executable, str(PROGRAM), str(folder), fault, *(["local"] if engine == "ray" else [])]


def environment(mark: str = "") -> dict[str, str]:
    """``mark``: in all processes of the program, as :func:`marked` finds them."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OFFLOAD_RAY": mark, "RAY_ADDRESS": ""}


def run(folder: Path, fault: str = "none", engine: str = "this machine") -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        command(folder, fault, engine),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def outcome(done: subprocess.CompletedProcess[str]) -> tuple[str, str, str]:
    """The status, whether Ray was imported, and the checksum of the model."""
    assert done.returncode == 0, done.stderr
    status, *ray, digest = done.stdout.splitlines()[-1].split()
    return status, " ".join(ray), digest


def trained(folder: Path) -> dict[int, Counter[int]]:
    """How often each sample was trained, by epoch."""
    counts: dict[int, Counter[int]] = {}
    for line in (folder / "batches").read_text().splitlines():
        epoch, *samples = map(int, line.split())
        counts.setdefault(epoch, Counter()).update(samples)
    return counts


def kinds(folder: Path) -> set[str]:
    events = (folder / "run" / "events.jsonl").read_text().splitlines()
    return {json.loads(line)["event"] for line in events}


ONCE = {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checksum of the model after a run without faults, without Ray."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run(folder)
    status, ray, digest = outcome(done)
    assert (status, ray) == ("finished", "no ray")
    assert trained(folder) == ONCE
    assert "without Ray" in done.stderr
    assert "--address" in done.stderr
    return digest


def test_processes_that_die_are_replaced_and_training_goes_on_from_the_last_checkpoint(
    undisturbed: str, tmp_path: Path
) -> None:
    done = run(tmp_path, "kill")
    assert outcome(done) == ("finished", "no ray", undisturbed)
    counts = trained(tmp_path)
    assert (counts[0], counts[2]) == (ONCE[0], ONCE[2])
    assert set(counts[1]) == set(range(SAMPLES))
    assert "preprocessing_lost" in kinds(tmp_path)
    assert "was ended by signal 9 (SIGKILL)" in done.stderr


def test_the_number_of_workers_changes_and_each_sample_is_trained_once(tmp_path: Path) -> None:
    done = run(tmp_path, "resize")
    assert outcome(done)[:2] == ("finished", "no ray")
    assert trained(tmp_path) == ONCE
    assert "1 worker trains, 2 before" in done.stderr
    assert "2 workers train, 1 before" in done.stderr


@pytest.mark.ray
def test_an_exception_ends_the_run_with_its_place_and_it_goes_on_on_either_engine_with_equal_weights(
    undisturbed: str, tmp_path: Path
) -> None:
    done = run(tmp_path, "raise")
    assert done.returncode == 1
    assert "training failed: ValueError: a mistake in the loop" in done.stderr
    assert "on_one_machine.py" in done.stderr
    assert "Traceback" in (tmp_path / "run" / "error.txt").read_text()
    for engine in ("ray", "this machine"):
        done = run(tmp_path, "raise", engine)
        assert done.returncode == (1 if engine == "ray" else 0), done.stderr
        assert "resuming the run" in done.stderr
    assert outcome(done)[::2] == ("finished", undisturbed)
    assert trained(tmp_path)[2] == ONCE[2]


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind_and_the_run_resumes(ended_by: signal.Signals, undisturbed: str, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with (tmp_path / "stderr").open("w") as errors:
        program = subprocess.Popen(
            command(tmp_path, "wait", "this machine"),
            cwd=tmp_path, env=environment(mark), stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
        eventually((tmp_path / "waits").exists)
        assert len(marked(mark)) >= 4, "the program, two starters, a worker, preprocessing"
        program.send_signal(ended_by)
        (tmp_path / "go").touch()
        program.wait(DEADLINE_S)
    eventually(lambda: not marked(mark))
    if ended_by != signal.SIGKILL:
        assert "committing a checkpoint" in (tmp_path / "stderr").read_text()
    assert outcome(run(tmp_path, "wait"))[::2] == ("finished", undisturbed)
