"""The run's clock, its nodes and their cost."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.prices import built_in
from offload.report.page.clock import RunClock, Session
from offload.report.page.node_history import nodes_of
from offload.report.page.records import read_run
from offload.report.page.story import Story
from tests.report.runs import START, Writer, cpu_node, eventful, gpu_node, plain


def story_of(path: Path, **given: float) -> Story:
    return Story(read_run(path), built_in(), given)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5)), min_size=1, max_size=8), st.data())
def test_the_clock_never_runs_back_and_stands_still_between_sessions(
    parts: list[tuple[float, float]], data: st.DataObject
) -> None:
    sessions, at = [], 0.0
    for pause_s, length_s in parts:
        at += pause_s + 1
        sessions.append(Session(began=at, ended=at + length_s, status=None))
        at += length_s
    clock = RunClock(tuple(sessions))
    times = sorted(data.draw(st.lists(st.floats(0, 2 * at), min_size=2, max_size=20)))
    seconds = clock.seconds(times)
    assert (np.diff(seconds) >= 0).all()
    assert (seconds >= 0).all()
    assert seconds.max() <= clock.length_s * (1 + 1e-9)
    for before, after in itertools.pairwise(sessions):
        assert clock.seconds(before.ended) == pytest.approx(float(clock.seconds(after.began)))


def test_a_resumed_run_has_two_sessions_and_does_not_count_the_pause(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.train(30)  # and then it is killed
    killed_at = run.at
    run.at += 86_400
    run.begin(resumed=True)
    run.train(30)
    run.end()
    clock = story_of(tmp_path).clock
    assert [session.status for session in clock.sessions] == [None, "finished"]
    assert clock.length_s == pytest.approx(run.at - START - 86_400)
    ((at_s, gap_s),) = clock.resumed_at_s
    assert at_s == pytest.approx(killed_at - START)
    assert gap_s == pytest.approx(86_400)


def test_a_run_that_has_just_resumed_does_not_pay_for_the_nodes_of_both_sessions(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.train(30)  # and then it is killed
    before = story_of(tmp_path)
    run.at += 86_400
    run.nodes = [gpu_node(node_id="another"), cpu_node(node_id="of another Ray")]
    run.begin(resumed=True)
    after = story_of(tmp_path)
    assert before.usd_per_hour == pytest.approx(1.408 + 0.816)
    assert after.usd_per_hour == pytest.approx(1.408 + 0.816)
    assert after.usd_per_million == pytest.approx(before.usd_per_million)
    assert not isinstance(after.model, str)
    assert after.model.now == {"ml.g5.xlarge": 1, "ml.c5.4xlarge": 1}


@pytest.mark.parametrize(
    ("end", "status"),
    [("finished", "finished"), ("failed", "failed"), ("interrupted", "interrupted"), (None, "unfinished")],
)
def test_the_status_is_that_of_the_last_session(tmp_path: Path, end: str | None, status: str) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.train(3)
    if end:
        run.end(end)
    assert story_of(tmp_path).status == status
    run.at += 10
    run.begin(resumed=True)
    assert story_of(tmp_path).status == "unfinished"  # summary.json is that of the session before


def test_nodes_join_get_notice_leave_and_are_lost(tmp_path: Path) -> None:
    run = Writer(tmp_path, cpu_nodes=2)
    run.begin()
    run.train(10)
    run.join(7)
    joined_at = run.at - 3
    run.train(10)
    run.lose(0, notice=True)
    run.train(10)
    run.lose(1, notice=False)
    run.train(10)
    run.end()
    records = read_run(tmp_path)
    clock = RunClock.of(records)
    nodes = {node.node_id: node for node in nodes_of(records, clock)}
    gpu, left, lost, late = (nodes[n.node_id] for n in (gpu_node(), cpu_node(0), cpu_node(1), cpu_node(7)))
    assert gpu.there == [(0.0, clock.length_s)]
    assert len(gpu.training) == 1
    assert not any(node.training for node in (left, lost, late))
    assert [h.kind for h in left.happenings] == ["notice", "left"]
    assert [h.kind for h in lost.happenings] == ["lost"]
    assert [h.kind for h in late.happenings] == ["joined"]
    assert late.there[0][0] == pytest.approx(joined_at - START)
    assert left.there[0][1] < lost.there[0][1] < clock.length_s
    for node in nodes.values():
        for spans in (node.preprocessing, node.training):
            assert all(any(b <= began and ended <= e for b, e in node.there) for began, ended in spans)


def test_a_run_of_an_earlier_version_trains_on_its_gpu_nodes(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.train(3)
    run.end()
    events = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if "training_nodes" not in line]
    (tmp_path / "events.jsonl").write_text("\n".join(events) + "\n")
    gpu, cpu = story_of(tmp_path).nodes
    assert gpu.training
    assert not cpu.training


def test_the_cost_counts_each_node_while_it_is_there(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.train(30)
    run.join(1)
    joined_at = run.at - 3
    run.train(30)
    run.end()
    story = story_of(tmp_path)
    length_s, late_s = story.clock.length_s, run.at - joined_at
    assert story.usd == pytest.approx(((1.408 + 0.816) * length_s + 0.816 * late_s) / 3600)
    assert story.usd_per_hour == pytest.approx(1.408 + 2 * 0.816)
    assert story.spending is not None
    spent = story.spending.up_to(np.linspace(0, length_s, 50))
    assert (np.diff(spent) > 0).all()


def test_the_pause_of_a_resumed_run_costs_nothing(tmp_path: Path) -> None:
    story = story_of(eventful(tmp_path / "run"))
    assert story.usd is not None
    most = sum(1.408 if node.gpus else 0.816 for node in story.nodes) * story.clock.length_s / 3600
    assert story.usd < most


def test_prices_given_by_type_or_name_count_first(tmp_path: Path) -> None:
    path = plain(tmp_path / "run", intervals=5)
    hour = story_of(path).clock.length_s / 3600
    assert story_of(path, **{"ml.g5.xlarge": 10.0}).usd == pytest.approx((10 + 0.816) * hour)
    assert story_of(path, **{"10.0.1.1": 5.0}).usd == pytest.approx((1.408 + 5) * hour)


def test_a_spot_node_costs_the_catalogs_spot_price(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.nodes[1] = cpu_node(spot=True)
    run.begin()
    run.train(3)
    run.end()
    catalog = built_in()
    kind = dataclasses.replace(catalog["ml.c5.4xlarge"], spot_usd_per_hour=0.3)
    catalog = dataclasses.replace(catalog, nodes={**catalog.nodes, kind.name: kind})
    story = Story(read_run(tmp_path), catalog, {})
    assert story.usd_per_hour == pytest.approx(1.408 + 0.3)


def test_a_node_of_unknown_price_makes_the_cost_unknown(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.nodes[1] = cpu_node(instance_type=None)
    run.begin()
    run.train(3)
    run.end()
    assert story_of(tmp_path).usd is None
    assert story_of(tmp_path, **{"10.0.1.1": 0.5}).usd is not None


def test_the_expected_cost_of_an_unfinished_run(tmp_path: Path) -> None:
    run = Writer(tmp_path, noise=0.0)
    run.begin()
    run.train(100)
    story = story_of(tmp_path)
    assert story.progress is not None
    done, left_s = story.progress
    assert done == pytest.approx(run.trained / (4 * run.samples))
    assert left_s == pytest.approx((4 * run.samples - run.trained) / (run.trained / 200), rel=0.01)
    assert story.usd is not None
    assert story.usd_at_end == pytest.approx(story.usd + (1.408 + 0.816) * left_s / 3600)
    run.end()
    assert story_of(tmp_path).usd_at_end is None
