"""Charts as values."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.prices import built_in
from offload.report.page.charts.chart import POINTS, Axis, Bins, ChartLine, Mark, merged, value_axis
from offload.report.page.charts.run_charts import bins_of, busy, marks_of, sizes, step_parts, throughput
from offload.report.page.records import read_run
from offload.report.page.story import Story
from tests.report.runs import Writer, eventful, plain

finite = st.floats(-1e9, 1e9)


def line(*y: float | None) -> ChartLine:
    return ChartLine(name="x", role="a", x=tuple(float(n) for n in range(len(y))), y=y)


@given(st.lists(finite, min_size=1, max_size=1500))
def test_bins_keep_the_extremes_and_the_order(values: list[float]) -> None:
    x = np.cumsum(np.abs(values))
    drawn = Bins.of(x).line("x", "a", values)
    assert len(drawn.x) <= POINTS
    places = [each for each in drawn.x if each is not None]
    assert places == sorted(places)
    low = [v for v in drawn.low or drawn.y if v is not None]
    high = [v for v in drawn.high or drawn.y if v is not None]
    assert min(low) == pytest.approx(min(values))
    assert max(high) == pytest.approx(max(values))


@given(st.lists(st.one_of(st.just(math.nan), finite), max_size=600))
def test_what_is_not_finite_is_left_out(values: list[float]) -> None:
    drawn = Bins.of(np.arange(len(values), dtype=float)).line("x", "a", values)
    assert any(v is not None for v in drawn.y) == any(math.isfinite(v) for v in values)


def test_a_break_between_groups_breaks_every_line() -> None:
    drawn = Bins.of(np.array([0.0, 1, 2, 3]), np.array([0.0, 0, 1, 1])).line("x", "a", [5, 6, 7, 8])
    assert drawn.y == (5.0, 6.0, None, 7.0, 8.0)
    assert drawn.x == (0.0, 1.0, None, 2.0, 3.0)


@given(st.lists(st.lists(st.floats(0, 1e9), min_size=1, max_size=5), min_size=1, max_size=4))
def test_every_value_is_inside_the_frame(columns: list[list[float]]) -> None:
    lines = [line(*column) for column in columns]
    axis = value_axis("y", lines)
    for each in (value for column in columns for value in column):
        assert axis.low <= each <= axis.high
        assert 0.0 <= axis.place(each) <= 1.0


def test_an_axis_is_logarithmic_where_the_lines_are_far_apart() -> None:
    assert not value_axis("y", [line(90, 100), line(300, 310)]).log
    assert value_axis("y", [line(90, 100), line(187_000, 190_000)]).log
    assert value_axis("y", [line(90, 100, 95), line(300, 310, 150_000)]).log  # a spike would flatten both
    assert not value_axis("y", [line(0, 100), line(187_000, 190_000)]).log  # nothing is at 0 on a logarithmic axis
    assert value_axis("y", [line(0.0, 0.0)]).high > 0


@given(st.floats(0, 1e7), st.floats(1e-6, 1e7), st.sampled_from(["", "s", "share", "usd", "count"]), st.booleans())
def test_ticks_are_few_and_within_the_axis(low: float, span: float, unit: str, log: bool) -> None:
    axis = Axis(
        label="y", low=low if not log else low + 1e-6, high=low + span + 2e-6, unit=unit, log=log and unit == ""
    )
    ticks = axis.ticks()
    assert len(ticks) <= 22
    for value, label in ticks:
        assert axis.low - 1e-6 * axis.high - 1e-9 <= value <= axis.high * (1 + 1e-3) + 1e-9
        assert label
    if unit == "count":
        assert all(value == int(value) for value, _ in ticks)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_marks_stand_apart_and_none_is_lost(places: list[float]) -> None:
    axis = Axis(label="x", low=0, high=100)
    found = merged([Mark(x=x, kind="decision", words=(str(n),)) for n, x in enumerate(places)], axis)
    assert sum(len(mark.words) for mark in found) == len(places)
    assert all(b.x - a.x >= 6.5 - 1e-9 for a, b in itertools.pairwise(found))


def test_a_fault_shows_in_a_merged_mark() -> None:
    axis = Axis(label="x", low=0, high=100)
    marks = [Mark(x=1, kind="decision", words=("a",)), Mark(x=2, kind="fault", words=("b",))]
    assert [(mark.kind, mark.words) for mark in merged(marks, axis)] == [("fault", ("a", "b"))]


def story_of(path: Path) -> Story:
    return Story(read_run(path), built_in(), {})


def test_both_ceilings_are_inside_the_frame(tmp_path: Path) -> None:
    for nodes in (0, 1, 8):
        story = story_of(plain(tmp_path / str(nodes), cpu_nodes=nodes, intervals=40))
        chart = throughput(story, bins_of(story))
        assert [each.name for each in chart.lines] == ["measured", "input ceiling", "GPU ceiling"]
        for each in chart.lines:
            assert all(chart.y.low <= value <= chart.y.high for value in each.y if value is not None)


def test_busy_shares_are_by_kind_of_node_and_between_0_and_1(tmp_path: Path) -> None:
    story = story_of(plain(tmp_path / "run", intervals=40))
    chart = busy(story, bins_of(story))
    assert [each.name for each in chart.lines] == [
        "stall",
        "GPUs busy",
        "preprocessing cores of ml.g5.xlarge busy",
        "preprocessing cores of ml.c5.4xlarge busy",
    ]
    assert all(0 <= value <= 1 for each in chart.lines for value in each.y if value is not None)


def test_the_parts_of_a_step_fill_it(tmp_path: Path) -> None:
    story = story_of(plain(tmp_path / "run", intervals=40))
    chart = step_parts(story, bins_of(story))
    assert [each.name for each in chart.lines] == ["waiting for data", "compute", "rest of the loop"]
    for heights in zip(*(each.y for each in chart.lines), strict=True):
        assert sum(each or 0.0 for each in heights) == pytest.approx(1.0, abs=0.002)


def test_sizes_follow_decisions_and_nodes(tmp_path: Path) -> None:
    story = story_of(eventful(tmp_path / "run"))
    charts = {chart.key: chart.lines[0] for chart in sizes(story, bins_of(story))}
    assert set(charts) == {"workers", "global-batch-size", "accum-steps", "preprocessing-cores"}
    batches = [value for value in charts["global-batch-size"].y if value is not None]
    assert (batches[0], batches[-1]) == (64, 192)
    assert {19.0, 35.0} <= set(charts["preprocessing-cores"].y)
    words = [word for mark in marks_of(story) for word in mark.words]
    assert any("a larger batch computes faster" in word for word in words)
    assert any("A worker died" in word for word in words)
    assert any("The run was resumed here, 1 h 30 min later" in word for word in words)


def test_a_line_breaks_where_nothing_was_measured(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.train(10)
    run.lose_worker()
    run.train(10)
    story = story_of(tmp_path)
    assert throughput(story, bins_of(story)).lines[0].y.count(None) == 1
