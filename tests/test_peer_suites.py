"""The benchmark of other libraries' own tests: how it finds, rewrites and runs them, and what it says of their outcomes."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import offload
from benchmarks import peer_suites
from benchmarks.peer_suites import SUITES
from benchmarks.suites import finding, recorder, running, shards
from benchmarks.suites.finding import NotFound
from benchmarks.suites.rewriting import rewritten
from benchmarks.suites.stateful import Stateful, StatefulDataLoader
from benchmarks.suites.verdicts import KINDS, Expectation, Outcome, counts, expectations, verdicts
from tests.helpers import ROOT
from tests.loader.test_like_torch_page import answers

pytestmark = pytest.mark.soak  # the harness of a benchmark, which no user runs

EXPECTED = expectations(peer_suites.EXPECTED.read_text(encoding="utf-8"))

# -- finding --------------------------------------------------------------------------------------------------------------


def test_modules_are_found_in_folders_archives_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    module = folder / "test" / "inner" / "test_a.py"
    module.parent.mkdir(parents=True)
    module.write_text("a = 1\n")
    with tarfile.open(tmp_path / "sources.tar.gz", "w:gz") as tar:
        tar.add(folder, "sources-1.0")
    with zipfile.ZipFile(tmp_path / "sources.zip", "w") as packed:
        packed.write(module, "sources-1.0/test_a.py")
    for place in (folder, module, tmp_path / "sources.tar.gz", tmp_path / "sources.zip"):
        (found,) = finding.modules(place, ["test_a.py"], tmp_path / f"unpacked-{place.name}")
        assert found.read_text() == "a = 1\n"


def test_an_archive_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        member = tarfile.TarInfo("../outside.py")
        tar.addfile(member, io.BytesIO())
    with pytest.raises(NotFound, match=r"neither a folder"):
        finding.modules(tmp_path / "bad.tar", ["outside.py"], tmp_path / "unpacked")
    assert not (tmp_path / "outside.py").exists()


def refusals(tmp_path: Path) -> dict[str, list[str]]:
    """Command lines that cannot run, by what the command answers."""
    (tmp_path / "empty").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / name).mkdir(parents=True)
        (tmp_path / "two" / name / "test_dataloader.py").touch()
    (tmp_path / "other.py").touch()
    (tmp_path / "text.txt").write_text("no archive")
    return {
        "No tests are given. Pass --torchdata, --torch or --webdataset": [],
        "does not exist": ["--torch", str(tmp_path / "missing")],
        "holds no test_state_dict.py. Give a checkout": ["--torchdata", str(tmp_path / "empty")],
        "holds test_dataloader.py 2 times (a/test_dataloader.py and b/test_dataloader.py)": ["--torch", str(tmp_path / "two")],
        "other.py is not the suite's test_dataloader.py": ["--torch", str(tmp_path / "other.py")],
        "neither a folder, a Python file nor a readable source archive": ["--torch", str(tmp_path / "text.txt")],
        "Invalid value for '--cores'": ["--torch", str(tmp_path / "two"), "--cores", "0"],
        "text.txt is no result of this benchmark": ["--torch", str(tmp_path / "two"), "-o", str(tmp_path / "text.txt")],
        "Invalid value for '--timeout'": ["--torch", str(tmp_path / "two"), "--timeout", "0"],
    }  # fmt: skip


def test_what_cannot_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for words, arguments in refusals(tmp_path).items():
        done = CliRunner().invoke(peer_suites.main, arguments)
        assert done.exit_code == 2, done.output
        assert words in " ".join(done.output.split())


def test_a_package_that_the_tests_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_dataloader.py").touch()
    monkeypatch.setattr(finding, "missing", lambda packages: ["expecttest"])
    done = CliRunner().invoke(peer_suites.main, ["--torch", str(tmp_path)])
    assert done.exit_code == 2
    assert "pip install expecttest" in done.output


def test_a_source_archive_that_pip_cannot_get_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Path:
        raise NotFound("pip download torchdata failed: ERROR: none")

    monkeypatch.setattr(finding, "download", refuse)
    done = CliRunner().invoke(peer_suites.main, ["--download"])
    assert done.exit_code == 2
    assert "webdataset is left out: pip download" in done.output
    assert "pip found no tests. Pass --torchdata" in " ".join(done.output.split())


# -- rewriting ------------------------------------------------------------------------------------------------------------


def test_a_test_module_gets_offloads_classes() -> None:
    source = """
    import torch.utils.data
    from torch.utils.data import Dataset, DataLoader as Loader
    def inner():
        from torchdata.stateful_dataloader import StatefulDataLoader
        return StatefulDataLoader, Loader, torch.utils.data.DataLoader, 'a.tgz'
    """
    stand_ins = {"torch.utils.data.DataLoader": "offload.DataLoader"}
    stand_ins["torchdata.stateful_dataloader.StatefulDataLoader"] = "benchmarks.suites.stateful.StatefulDataLoader"
    text = rewritten(textwrap.dedent(source), stand_ins, {".tgz": ".tar"})
    names: dict[str, Any] = {}
    exec(compile(text, "module", "exec"), names)
    assert names["inner"]() == (StatefulDataLoader, offload.DataLoader, torch.utils.data.DataLoader, "a.tar")
    assert names["Dataset"] is torch.utils.data.Dataset


def test_programs_that_a_test_starts_get_them_too() -> None:
    program = "from torch.utils.data import DataLoader\nprint(DataLoader.__module__)"
    stand_ins = {"torch.utils.data.DataLoader": "offload.DataLoader"}
    (written,) = ast.parse(rewritten(f"run({program!r})", stand_ins)).body
    assert isinstance(written, ast.Expr)
    assert isinstance(written.value, ast.Call)
    text = ast.literal_eval(written.value.args[0])
    assert text == "from offload import DataLoader\nprint(DataLoader.__module__)\n"
    told = "Write: from torch.utils.data import DataLoader, and so on"
    assert rewritten(f"told = {told!r}", stand_ins).strip() == f"told = {told!r}"


def test_other_text_stays() -> None:
    source = (ROOT / "benchmarks" / "peer_suites.py").read_text(encoding="utf-8")
    assert rewritten(source, {}) == ast.unparse(ast.parse(source)) + "\n"


def test_the_state_of_a_loader_in_torchdatas_place_needs_no_snapshots() -> None:
    loader = StatefulDataLoader([1, 2], snapshot_every_n_steps=5)
    assert isinstance(loader, Stateful)


# -- verdicts -------------------------------------------------------------------------------------------------------------


def test_a_test_is_called_by_its_outcome_and_by_what_is_expected() -> None:
    expected = [
        Expectation(tests=("TestA.test_*",), kind="private", why="it looks at _workers"),
        Expectation(tests=("TestB.test_x",), kind="open", why="wrong", sometimes=True),
    ]
    called = {
        ("TestA.test_a", "failed"): "private",
        ("TestA.test_a", "crashed"): "private",
        ("TestA.test_a", "passed"): "unexpected",
        ("TestB.test_x", "passed"): "same",
        ("TestB.test_x", "hung"): "open",
        ("TestB.test_y", "failed"): "unexpected",
        ("TestB.test_y", "passed"): "same",
        ("TestB.test_y", "skipped"): "skipped",
    }
    found = verdicts([Outcome(test=test, outcome=outcome, why="why") for test, outcome in called], expected)
    assert [verdict.called for verdict in found] == list(called.values())
    assert counts(found) == {"private": 2, "unexpected": 2, "same": 2, "open": 1, "skipped": 1}


@given(st.lists(st.sampled_from(["passed", "failed", "skipped"])))
def test_one_failure_of_its_parts_fails_a_test(outcomes: list[Any]) -> None:
    reports = [
        pytest.TestReport("a.py::A::test", ("a.py", 1, "test"), {}, outcome, longrepr=outcome, when="call")
        for outcome in outcomes
    ]
    outcome, why = recorder.ended(reports)
    assert outcome == ("failed" if "failed" in outcomes else "skipped" if "skipped" in outcomes else "passed")
    assert why == ("" if outcome == "passed" else outcome)


def test_expectations_name_their_suite_and_their_kind() -> None:
    assert set(EXPECTED) <= {suite.name for suite in SUITES}
    entries = [entry for suite in EXPECTED.values() for entry in suite]
    assert all(entry.tests and entry.why.endswith(".") for entry in entries)
    with pytest.raises(ValueError, match="kind must be one of"):
        expectations('[[torch]]\ntests = ["TestA.test_a"]\nkind = "purpose"\nwhy = "."')


def test_what_is_expected_to_fail_has_a_row_that_says_why() -> None:
    states = {
        "on purpose": {"different on purpose"},
        # The row says whether what the test is about holds.
        "private": {"same", "different on purpose", "not applicable"},
        "environment": {"same", "different on purpose", "not applicable", "needs a GPU"},
        "open": {"open"},
    }
    assert set(states) == set(KINDS)
    rows = {name: row for suite in answers().values() for name, row in suite.items()}
    for suite, entries in EXPECTED.items():
        for entry in entries:
            # Sets of parameters have numbers.
            concerned = {
                name: row.state for name, row in rows.items() if entry.concerns(name) or entry.concerns(f"{name}_0")
            }
            assert len(concerned) >= len(entry.tests), f"{suite}: {entry.tests} names tests without a row"
            assert set(concerned.values()) <= states[entry.kind], concerned


# -- running --------------------------------------------------------------------------------------------------------------


def test_a_record_tells_what_ended_and_what_did_not() -> None:
    lines = [
        {"collected": ["a.b", "a.c"]},
        {"begins": "a.b"},
        {"ends": "a.b", "outcome": "failed", "why": "no", "seconds": 0.5},
        {"begins": "a.c"},
    ]
    found = running.progress(map(json.dumps, lines))
    assert found.collected == ("a.b", "a.c")
    assert found.outcomes == (Outcome(test="a.b", outcome="failed", why="no", seconds=0.5),)
    assert found.running == "a.c"


def test_names_lack_the_values_of_parameters() -> None:
    assert recorder.name_of("tests/test_a.py::TestB::test_c[x-1]") == "TestB.test_c"
    assert recorder.name_of("tests/test_a.py::test_c") == "test_a.test_c"


SUITE = """
import os, signal, unittest
from torchdata.stateful_dataloader import Stateful, StatefulDataLoader
from torch.utils.data import Dataset

class Numbers(Dataset, Stateful):
    def __len__(self):
        return 10
    def __getitem__(self, i):
        return i

class TestKinds(unittest.TestCase):
    def test_a_passes(self):
        loader = StatefulDataLoader(Numbers(), batch_size=5, snapshot_every_n_steps=3)
        iteration = iter(loader)
        next(iteration)
        loader.load_state_dict(loader.state_dict())
        self.assertEqual([batch.tolist() for batch in loader], [[5, 6, 7, 8, 9]])
    def test_b_a_part_fails(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)
    def test_c_ends_its_process(self):
        os._exit(7)
    @unittest.skip("no need")
    def test_d_is_skipped(self):
        pass
    def test_e_fails(self):
        StatefulDataLoader(Numbers())._workers
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_suite_runs_as_a_whole_behind_a_test_that_ends_its_process(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_state_dict.py").write_text(SUITE)
    stand_ins = tmp_path / "packages"  # the real ones are not needed by these tests
    for package in ("expecttest", "parameterized"):
        (stand_ins / package).mkdir(parents=True)
        (stand_ins / package / "__init__.py").touch()
    path = os.pathsep.join([str(stand_ins), *filter(None, [os.environ.get("PYTHONPATH")])])
    output = tmp_path / "result.json"
    output.write_text(json.dumps({"suites": {"webdataset": {"tests": 3}}}))  # another run's
    command = [sys.executable, "benchmarks/peer_suites.py", "--torchdata", str(tmp_path / "test"), "-o", str(output)]
    command += ["--timeout", "400"]  # no test fails because the machine is slow
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert output.exists(), done.stderr
    text = output.read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["suites"]["webdataset"] == {"tests": 3}
    result = json.loads(text)["suites"]["torchdata"]
    assert result["tests"] == 5
    assert result["counts"] == {"same": 1, "skipped": 1, "unexpected": 3}
    found = {
        name.removeprefix("TestKinds.test_"): (each["outcome"], each["why"])
        for name, each in result["not_same"].items()
    }
    assert found["c_ends_its_process"][0] == "crashed"
    assert found["d_is_skipped"] == ("skipped", "no need")
    assert "_workers" in found["e_fails"][1]
    assert found["b_a_part_fails"][0] == "failed"
    assert "TestKinds.test_e_fails: failed: " in done.stdout


def test_tar_shards_are_read_by_offload_and_found_by_their_names(tmp_path: Path) -> None:
    shards.write(tmp_path)
    code = """
import io, webdataset as wds
from PIL import Image
from benchmarks.suites import shards, tar_reading
tar_reading.install()
def read(urls, **options):
    return list(wds.WebDataset(urls, shardshuffle=False, **options))
found = read(shards.local_data)
assert len(found) == shards.SAMPLES
assert set(found[0]) == {"__key__", "__url__", "png", "cls", "wnid", "xml"}
assert Image.open(io.BytesIO(found[0]["png"])).size == shards.FIRST_SIZE
assert [sample["cls"] for sample in found[8:11]] == [b"8", b"9", b"0"]
assert len(read(shards.remote_loc + shards.remote_shards)) == shards.ELSEWHERE_SHARDS * shards.ELSEWHERE_SAMPLES
assert set(read(shards.local_data, select_files=lambda name: name.endswith("cls"))[0]) == {"__key__", "__url__", "cls"}
"""
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=800
    )
