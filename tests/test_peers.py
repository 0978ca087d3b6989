"""The benchmark of other libraries: what its table says, which rows are in it, and what it does when one of them fails."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks import environments, peers, reference, side_by_side
from benchmarks.environments import EnvironmentFailed
from benchmarks.peers import PEERS, WORKLOADS, Peer
from benchmarks.reference import Beside
from benchmarks.rows import protocol
from benchmarks.rows.peers import common
from benchmarks.rows.protocol import Task
from benchmarks.side_by_side import Measurement, Row, RowFailed
from tests.helpers import ROOT

pytestmark = pytest.mark.soak  # the harness of a benchmark, which no user runs

WORKS = Peer(name="works", about="", module="none")
FAILS = Peer(name="fails", about="", module="none", no_second_host="it has one host")
LACKS = Peer(name="lacks", about="", module="none", environment="missing")


def measurement(rate: float, hosts: tuple[str, ...], **changed: Any) -> Measurement:
    given: dict[str, Any] = {
        "samples_per_s": rate * len(hosts), "first_batch_s": 1.0, "cpu_ms_per_sample": 2.0, "daemon_cpu_ms_per_sample": 0.0,
        "stall": 0.0, "busy_cores": float(len(hosts)), "samples_per_s_by_host": dict.fromkeys(hosts, rate),
        "busy_cores_by_host": {}, "preprocessing_cores_by_host": {}, "start_to_first_batch_s": 3.0,
        "wire_bytes_per_sample": 5.0, "peak_memory_bytes": 7e6, "batch": {"label": "int64 64"}, "label_sum": 0, "extra": {},
    }  # fmt: skip
    return Measurement(**{**given, **changed})


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The runs, by row and samples, in place of real ones."""
    runs: list[tuple[str, int]] = []

    def run(row: Row, task: Task, **_: Any) -> Measurement:
        runs.append((row.name, task.samples))
        if row.name.startswith("fails"):
            raise RowFailed("Traceback\nValueError: broken, see https://example.org/help\nit goes on")
        rate = 100.0 if row.name == "plain" else 50.0
        return measurement(rate, row.hosts, label_sum=peers.label_sum("blur", Path(), task.samples))

    monkeypatch.setattr(side_by_side, "run", run)
    return runs


def workload(lost: Mapping[str, str] | None = None, seconds: float = 40.0) -> peers._Workload:
    return peers._Workload("blur", seconds, {}, lost or {}, Console(quiet=True), {})


def test_every_row_is_measured_beside_two_plain_loops_and_keeps_its_repeats(ran: list[tuple[str, int]]) -> None:
    runs = workload()
    ran.clear()  # of the calibration
    for repeat in range(2):
        runs.run([(WORKS, 1), (WORKS, 2)], repeat, 2)
    names = [name for name, _ in ran]
    once = ["plain", "works-1-host", "plain", "works-2-hosts", "plain"]
    first = ["works-1-host", "plain", "works-1-host", "plain", "works-2-hosts", "plain", "works-2-hosts", "plain"]
    assert names == first + once
    plain, one, two = runs.lines([(WORKS, 1), (WORKS, 2)])
    assert plain["name"] == "plain"
    assert plain["delivered_over_ideal"] == 1.0
    assert one["delivered_over_ideal"] == two["delivered_over_ideal"] == 0.5
    assert one["spread"]["delivered_over_ideal"] == [0.5, 0.5]
    assert len(two["repeats"]) == 2
    assert two["samples_per_s"] == 100.0
    assert one["notes"] == []


def test_a_first_run_finds_how_many_samples_take_the_wanted_time(ran: list[tuple[str, int]]) -> None:
    runs = workload(seconds=400.0)
    runs.run([(WORKS, 1)], 0, 1)
    short, full = [samples for name, samples in ran if name == "works-1-host"]
    assert full >= 400 * 50 > short
    assert full % common.SHARD == full % reference.BATCH_SIZE == 0


def test_a_lost_row_stays_in_the_table_with_its_reason(ran: list[tuple[str, int]]) -> None:
    runs = workload(lost={"missing": "its environment could not be made: no index"})
    chosen = [(FAILS, 1), (FAILS, 2), (LACKS, 1), (WORKS, 1)]
    for repeat in range(5):
        runs.run(chosen, repeat, 5)
    lines = {line["name"]: line for line in runs.lines(chosen)}
    assert lines["fails-1-host"]["reason"] == "ValueError: broken, see …"
    assert lines["fails-2-hosts"]["reason"] == "it has one host"
    assert lines["lacks-1-host"]["reason"] == "its environment could not be made: no index"
    assert "samples_per_s" in lines["works-1-host"]
    assert [name for name, _ in ran].count("fails-1-host") == peers.TRIES
    json.dumps(list(lines.values()), allow_nan=False)
    printed = io.StringIO()
    Console(width=peers.PLAIN_WIDTH, file=printed).print(peers.table_of(list(lines.values()), "blur"))
    assert all(name in printed.getvalue() for name in lines)
    assert "it has one host" in printed.getvalue()


def test_a_resumed_table_keeps_the_versions_of_the_libraries_of_its_earlier_rows(
    ran: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "unavailable", lambda: None)
    monkeypatch.setattr(peers, "PEERS", (WORKS,))
    monkeypatch.setattr(side_by_side, "machine", dict)
    output, earlier = tmp_path / "peers.json", {"spdl": {"spdl": "0.8.0"}}
    output.write_text(json.dumps({"rows": [], "versions_of_peers": earlier}))
    arguments = ["--workload", "blur", "--hosts", "1", "--repeats", "1", "--resume", "-o", str(output)]
    done = CliRunner().invoke(peers.main, arguments)
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    assert [row["name"] for row in document["rows"]] == ["plain", "works-1-host"]
    assert document["versions_of_peers"] == earlier


def test_a_resumed_table_runs_the_repeats_that_a_row_lacks(
    ran: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "unavailable", lambda: None)
    monkeypatch.setattr(peers, "PEERS", (WORKS, FAILS))
    monkeypatch.setattr(side_by_side, "machine", dict)
    output = tmp_path / "peers.json"

    def rows(repeats: int) -> dict[str, dict[str, Any]]:
        ran.clear()
        arguments = ["--workload", "blur", "--repeats", str(repeats), "--resume", "-o", str(output)]
        done = CliRunner().invoke(peers.main, arguments)
        assert done.exit_code == 0, done.output
        return {row["name"]: row for row in json.loads(output.read_text())["rows"]}

    once = rows(1)
    assert len(once["works-1-host"]["repeats"]) == len(once["works-2-hosts"]["repeats"]) == 1
    thrice = rows(3)
    measured = [name for name, _ in ran if name.startswith("works")]
    assert measured.count("works-1-host") == 3, "a first run, and two repeats"
    assert not [name for name, _ in ran if name.startswith("fails")], "it could not run at all"
    assert len(thrice["works-1-host"]["repeats"]) == 3
    assert thrice["works-1-host"]["delivered_over_ideal"] == 0.5
    assert len(thrice["plain"]["repeats"]) == len(once["plain"]["repeats"]) + 4
    assert set(thrice) == set(once)
    assert thrice["fails-1-host"] == once["fails-1-host"]
    rows(3)
    assert not ran


def test_notes_tell_of_samples_that_differ() -> None:
    plain = measurement(100.0, ("gpu-1",), label_sum=8)
    same = Beside(row=WORKS.row(1), run=plain, plain=(plain, plain))
    assert peers.notes([same], 8) == []
    other = measurement(50.0, ("gpu-1",), label_sum=9, batch={"label": "int32 64"})
    assert peers.notes([same, Beside(row=WORKS.row(1), run=other, plain=(plain, plain))], 8) == [
        "it lost or repeated samples"
    ]
    assert peers.notes([Beside(row=WORKS.row(1), run=other, plain=(plain, plain))], 9) == [
        "its batches are label int32 64"
    ]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_runs_somewhere_and_its_parts_exist(peer: Peer) -> None:
    assert any(peer.reason(workload, 1) is None for workload in WORKLOADS)
    assert set(peer.cannot) <= set(WORKLOADS)
    assert peer.environment is None or peer.environment in environments.REQUIREMENTS
    for module in filter(None, (peer.module, peer.helper)):
        assert importlib.util.find_spec(f"benchmarks.rows.{module}") is not None


def test_modules_of_peers_do_not_need_offload() -> None:
    """Their environments lack it."""
    for path in (ROOT / "benchmarks" / "rows" / "peers").glob("*.py"):
        assert "offload" not in [line.split()[1].split(".")[0] for line in imports(path)], path
    code = "import sys, benchmarks.rows.peers.images; print(any(m.split('.')[0] == 'offload' for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, timeout=800
    )
    assert done.stdout.strip() == "False"


def imports(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(("import ", "from "))]


def test_every_requirement_is_pinned() -> None:
    for name in environments.REQUIREMENTS:
        assert all(requirement.count("==") == 1 for requirement in environments.requirements(name))


def test_an_environment_is_made_once_and_again_when_its_requirements_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []

    def uv(*arguments: str) -> str:
        calls.append(arguments)
        (tmp_path / "spdl").mkdir(exist_ok=True)
        return ""

    monkeypatch.setattr(environments, "_uv", uv)
    python = environments.make("spdl", tmp_path)
    assert python == tmp_path / "spdl" / "bin" / "python"
    assert len(calls) == 2
    environments.make("spdl", tmp_path)
    assert len(calls) == 2
    monkeypatch.setitem(environments.REQUIREMENTS, "spdl", ("torch", "spdl==0.7.0"))
    environments.make("spdl", tmp_path)
    assert len(calls) == 4


def test_an_environment_that_cannot_be_made_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environments.REQUIREMENTS, "missing", ("no such requirement",))
    monkeypatch.setattr(environments, "requirements", lambda name: list(environments.REQUIREMENTS[name]))
    with pytest.raises(EnvironmentFailed, match="uv pip failed"):
        environments.make("missing", tmp_path)
    ready, lost = peers._environments([LACKS], tmp_path, Console(quiet=True))
    assert ready == {}
    assert lost["missing"].startswith("its environment could not be made: ")


def labels_of_ids(samples: int, tmp_path: Path) -> int:
    return sum(i % 1000 for i in range(samples))


def labels_of_files(samples: int, tmp_path: Path) -> int:
    for name, count in (("a", 2), ("b", 3)):
        (tmp_path / name).mkdir()
        for i in range(count):
            (tmp_path / name / f"{i}.jpg").touch()
    return sum((0, 0, 1, 1, 1)[i % 5] for i in range(samples))


@pytest.mark.parametrize(("name", "expected"), [("blur", labels_of_ids), ("jpeg", labels_of_files)])
def test_the_sum_of_labels_counts_each_sample_once(
    name: str, expected: Callable[[int, Path], int], tmp_path: Path
) -> None:
    wanted = expected(2017, tmp_path)
    assert peers.label_sum(name, tmp_path, 2017) == wanted


def test_a_conversion_runs_once_and_its_seconds_are_kept(tmp_path: Path) -> None:
    task = Task(workload="jpeg", samples=640, data=str(tmp_path / "train"))
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        (folder / "a.tar").write_text("a")
        (folder / "b.tar").write_text("b")

    folder, seconds = common.converted(task, "tar", write)
    assert common.converted(task, "tar", write) == (folder, seconds)
    assert len(written) == 1
    links = common.repeated(task, sorted(folder.glob("*.tar")), folder / "all", per_shard=128)
    assert [link.read_text() for link in links] == ["a", "b", "a", "b", "a"]


def test_batches_of_any_library_are_described_in_the_same_words() -> None:
    import torch

    arrays = {"image": np.zeros((2, 3), np.uint8), "label": np.zeros(2, np.int64)}
    described = {"image": "uint8 2×3", "label": "int64 2"}
    assert protocol.describe(arrays) == described
    assert protocol.describe({name: torch.from_numpy(array) for name, array in arrays.items()}) == described


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.hosts
def test_a_row_of_another_library_runs_in_its_own_environment(tmp_path: Path) -> None:
    """Needs a package index, or an environment that an earlier run has made."""
    output = tmp_path / "peers.json"
    command = [sys.executable, "benchmarks/peers.py", "--workload", "jpeg", "--row", "webdataset", "--repeats", "1"]
    subprocess.run([*command, "--seconds", "2", "-o", str(output)], cwd=ROOT, check=True, timeout=850)
    plain, one, two = json.loads(output.read_text())["rows"]
    assert plain["name"] == "plain"
    assert one["notes"] == []
    assert one["repeats"][0]["batch"] == {"image": "uint8 64×224×224×3", "label": "int64 64"}
    assert one["samples_per_s"] > 0
    assert one["peak_memory_bytes"] > 0
    assert two["reason"] == peers.ONE_PROCESS
