"""What users see of an arbiter, as text, as a page and as JSON, and what they are told where there is none."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import arbiter as sharing
from offload.arbiter.arbiter import Arbiter
from offload.arbiter.page import lanes, status_page
from offload.arbiter.status import Status
from offload.arbiter.text import status_text
from offload.arbiter.values import REPORT_S, Report
from offload.cli.main import main
from offload.errors import ConfigError
from offload.model.allocation.allocate import allocate
from offload.model.allocation.values import Holding, Rules
from offload.model.allocation.what_if import MORE_CORES, what_if
from tests.arbiter.test_arbiter import NODES, Clock
from tests.arbiter.test_ledger import START, a_job


def a_status() -> Status:
    """Of a run that is to give up workers, one that is to get them, and another program."""
    clock = Clock()
    arbiter = Arbiter(Rules(usd_per_hour=9.0), clock)
    arbiter.see(NODES, {"b": {"CPU": 3.0}})
    held = Holding(kind="A", workers={"a": 2, "b": 2}, cores={"a": 6})
    arbiter.report(Report(job=a_job("vit", present=held, core_seconds_per_sample=0.02), since=START))
    clock.now += REPORT_S
    arbiter.tick()
    arbiter.report(Report(job=a_job("<b>urgent</b>", priority=1, workers=(2, 2)), since=clock.now))
    clock.now += 20.0
    return arbiter.status()


def test_the_text_and_the_page_say_who_has_what_why_and_what_more_would_bring() -> None:
    status = a_status()
    text = status_text(status)
    for words in (
        "4 × A + 6 cores",
        "2 nodes with 16 CPUs and 4 GPUs",
        "fairness -1",
        "at most $9.00 an hour",
        "10.0.0.1",
    ):
        assert words in text
    assert [run.doing for run in status.runs] == [
        "waits until others let go of the rest",
        "gives back what it may no longer hold",
    ]
    vit = next(run for run in status.runs if run.name == "vit")
    assert vit.reason in text
    assert vit.what_if is not None
    assert vit.what_if.one_more_worker is None, "four are the most that it allows"
    assert vit.what_if.more_cores is not None
    assert re.search(rf"\(1\.\d+×\)|\({vit.what_if.more_cores / vit.what_if.now:.2f}×\)", text)
    page = status_page(status)
    assert "<b>urgent" not in page
    assert "&lt;b&gt;urgent" in page
    assert "prefers-color-scheme: dark" in page
    assert re.findall(r"(?:src|href)=\"(?!#)", page) == [], "it loads nothing"
    assert page.count('class="bar training"') == 1


def test_lanes_lie_within_the_page_and_within_their_height() -> None:
    for lane in lanes(a_status()):
        for block in lane.blocks:
            assert 0 <= block.low <= block.high <= 1
            assert 0 <= block.workers <= 1
            assert 0 <= block.cores <= 1
            assert block.words in lane.words


def test_an_arbiter_without_runs_and_cluster_is_shown_too() -> None:
    empty = Arbiter(Rules(), Clock()).status()
    assert "not seen yet" in status_text(empty)
    assert "No run has reported" in status_page(empty)
    assert empty.next_decision_at is None


@settings(max_examples=30, deadline=None)
@given(
    workers=st.integers(1, 4),
    cores=st.integers(1, 12),
    cost=st.sampled_from([0.0, 0.002, 0.05]),
    most=st.sampled_from([4, 5]),
)
def test_more_cores_never_make_a_run_slower_and_now_is_what_its_allotment_predicts(
    workers: int, cores: int, cost: float, most: int
) -> None:
    held = Holding(kind="A", workers={"a": min(workers, 2), "b": max(workers - 2, 0)}, cores={"a": cores})
    job = a_job("run", present=held, core_seconds_per_sample=cost, workers=(1, most))
    seen = what_if(job, NODES)
    assert seen is not None
    assert seen.now > 0
    assert (seen.one_more_worker is None) == (workers == most)
    assert (seen.more_cores is None) == (not cost)
    assert seen.more_cores is None or seen.more_cores >= seen.now
    assert what_if(dataclasses.replace(job, cores=(1, cores + MORE_CORES - 1)), NODES).more_cores is None  # type: ignore[union-attr]
    assert what_if(dataclasses.replace(job, step_times={}), NODES) is None
    nodes = [dataclasses.replace(node, name=node.node_id) for node in NODES]
    allotment = allocate([job], nodes, Rules())["run"]
    after = what_if(dataclasses.replace(job, present=allotment.holding), nodes)
    assert after is not None
    assert after.now == pytest.approx(allotment.goodput)


def test_the_command_prints_one_document_and_writes_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = a_status()
    monkeypatch.setattr(sharing, "status", lambda address: status)
    done = CliRunner().invoke(main, ["arbiter", "status", "--page", str(tmp_path / "page.html")])
    assert done.exit_code == 0
    assert status_text(status) in done.output
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == status_page(status)
    document = json.loads(json.dumps(dataclasses.asdict(status)))
    assert document["runs"][1]["holding"] == {"kind": "A", "workers": {"a": 2, "b": 2}, "cores": {"a": 6}}
    assert all(math.isfinite(run["since"]) for run in document["runs"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("start", "--fairness", "2"), "--fairness must be"),
        (("start", "--shorter-first", "2"), "--shorter-first must be at most 1"),
        (("start", "--growth", "0.5"), "--growth must be"),
        (("start", "--first-cores", "-1"), "--first-cores must be"),
        (("start", "--usd-per-gpu-hour", "3.2"), "such as A100=3.2, found '3.2'"),
        (("start", "--usd-per-gpu-hour", "A100=cheap"), "such as A100=3.2, found 'A100=cheap'"),
        (("start", "--usd-per-gpu-hour", "A100=-1"), "--usd-per-gpu-hour of A100"),
        (("status", "--address", "127.0.0.1:1"), "no Ray cluster"),
        (("stop", "--address", "127.0.0.1:1"), "no Ray cluster"),
        (("start", "--address", "local"), "found --address local"),
    ],
)
def test_a_wrong_input_is_refused_in_a_sentence(arguments: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(main, ["arbiter", *arguments])
    assert isinstance(done.exception, ConfigError | SystemExit)
    assert words in (str(done.exception) if isinstance(done.exception, ConfigError) else done.output)
    assert done.exit_code != 0


def test_a_page_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sharing, "status", lambda address: a_status())
    done = CliRunner().invoke(main, ["arbiter", "status", "--page", str(tmp_path / "missing" / "page.html")])
    assert "No such file or directory" in done.output + str(done.exception)
