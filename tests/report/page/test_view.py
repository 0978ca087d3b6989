"""The page as a value: events in words, tables, comparisons, and runs of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.prices import built_in
from offload.report.events import GROUPS, read_event
from offload.report.page.charts.metric_charts import points_of
from offload.report.page.compare import batch_rates, names_of, speed_up
from offload.report.page.page_view import RunView, document_of, page_of
from offload.report.page.records import read_run
from offload.report.page.story import Story
from offload.report.run_dir import RunDirectory, to_json
from tests.report.runs import START, Writer, eventful, plain


def story_of(path: Path) -> Story:
    return Story(read_run(path), built_in(), {})


def view_of(*paths: Path) -> RunView:
    return page_of([read_run(path) for path in paths], built_in(), {}).runs[0]


# --- events in words --------------------------------------------------------------------------------------------------


def test_every_event_of_a_run_is_a_sentence(tmp_path: Path) -> None:
    story = story_of(eventful(tmp_path / "run"))
    for worded in story.worded_events:
        assert worded.event.GROUP in GROUPS
        assert worded.event.GROUP != "other", worded
        assert "{" not in worded.words
        assert worded.words[0].isupper() or worded.words[0].isdigit(), worded.words


@given(
    st.sampled_from(
        ["run_started", "decided", "checkpoint", "report", "resumed", "training_nodes", "cluster_changed", "new_kind"]
    ),
    st.dictionaries(
        st.sampled_from(
            ["workers", "nodes", "step", "metrics", "decision", "epoch", "seconds", "reason", "left", "joined_nodes"]
        ),
        st.one_of(
            st.none(),
            st.text(max_size=5),
            st.integers(),
            st.floats(),
            st.lists(st.integers(), max_size=2),
            st.just({"a": 1}),
        ),
    ),
)
def test_an_event_with_any_values_has_words(kind: str, values: dict[str, Any]) -> None:
    assert read_event({"event": kind, "at": 3.0, **values}).words({})


def test_the_same_words_again_and_again_are_one_row(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    for _ in range(500):
        run.at += 1
        run.event("decided", decision="keep", reason="no gain above 5%", samples_per_s=1.0, stall=0.1)
    run.end()
    (group,) = [each for each in view_of(tmp_path).events if each.title == "Decisions"]
    assert [words for _, words in group.rows] == ["Keeps its size: no gain above 5% (500 times)"]
    assert page_of([read_run(tmp_path)], built_in(), {}).runs[0].throughput is None


def test_very_many_events_are_cut_in_the_middle(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    for number in range(3000):
        run.event("checkpoint", rank=0, reason="interval", epoch=0, step=number, seconds=0.1, waited=False)
    run.end()
    view = view_of(tmp_path)
    (group,) = [each for each in view.events if each.title == "Checkpoints"]
    assert len(group.rows) + group.left_out == 3000
    assert len(group.rows) == 60
    assert len(view.raw) + view.raw_left_out == len(read_run(tmp_path).events)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_checkpoints_cost_only_what_training_waited_for(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.train(30)
    for waited in (True, False, False):
        run.event("checkpoint", rank=0, reason="interval", epoch=0, step=run.step, seconds=2.0, waited=waited)
    run.end()
    table = view_of(tmp_path).checkpoints
    assert table is not None
    assert table.rows == (("interval", "3", "2.0 s", "2.0 s", "$0.0012"),)
    assert table.note.startswith("Training waited 2.0 s for checkpoints: ")


def test_a_fault_costs_the_time_without_steps_and_the_steps_made_again(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.train(60)
    run.lose_worker()
    run.train(10)
    run.end()
    table = view_of(tmp_path).faults
    assert table is not None
    ((_, what, without, again, cost),) = table.rows
    assert what.startswith("A worker died (the worker on 10.0.0.1 was killed by SIGKILL)")
    assert (without, again) == ("18 s", "120")
    assert cost == "$0.011"


def test_skipped_samples_are_grouped_by_reason(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.skip(20)
    run.directory.skipped({"dataset": "val", "sample_id": "x.jpg", "reason": "too slow"})
    run.end()
    table = view_of(tmp_path).skipped
    assert table is not None
    assert [row[:2] for row in table.rows] == [("20", "train"), ("1", "val")]
    assert table.note.startswith("21 samples were skipped.")


def test_predictions_stand_beside_measurements(tmp_path: Path) -> None:
    found = view_of(eventful(tmp_path / "run")).comparisons
    assert [each.error for each in found] == ["−6%", "−6%"]
    assert all(0 < each.measured_at < each.predicted_at < 1 for each in found)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_run_against_epochs_time_and_dollars(tmp_path: Path) -> None:
    view = view_of(plain(tmp_path / "run", intervals=200, samples=20_000))
    (accuracy, loss) = view.metrics
    assert (accuracy.name, loss.name) == ("accuracy", "loss")
    assert [chart.title for chart in loss.charts] == [
        "loss against epochs",
        "loss against time",
        "loss against dollars",
    ]
    epochs = loss.charts[0].lines[0]
    assert epochs.x[:3] == (1.0, 2.0, 3.0)
    values = [value for value in epochs.y if value is not None]
    assert values == sorted(values, reverse=True)
    dollars = [value for value in loss.charts[2].lines[0].x if value is not None]
    assert dollars == sorted(dollars)


def test_reports_within_an_epoch_are_shares_of_it(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    for epoch, step in ((0, 10), (0, 20), (0, 40), (1, 60), (1, 80), (2, 90)):
        run.at += 1
        run.event("report", rank=0, epoch=epoch, step=step, metrics={"loss": 1.0})
    assert list(points_of(story_of(tmp_path))["loss"].epochs) == [0.25, 0.5, 1.0, 1.5, 2.0, 2.25]


def test_a_run_without_prices_has_no_dollars(tmp_path: Path) -> None:
    run = Writer(tmp_path, samples=2_000)
    run.nodes = []
    run.begin()
    run.train(30)
    run.end()
    view = view_of(tmp_path)
    assert [chart.title for chart in view.metrics[0].charts] == ["accuracy against epochs", "accuracy against time"]
    assert view.cost is None
    assert view.cost_note == "The run directory names no nodes, so the cost is unknown."


def test_metrics_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    for value in (float("nan"), "x", None, float("inf")):
        run.event("report", rank=0, epoch=0, step=1, metrics={"loss": value})
    run.train(3)
    assert view_of(tmp_path).metrics == ()


# --- several runs -----------------------------------------------------------------------------------------------------


def test_the_interval_of_a_speed_up_covers_the_truth(tmp_path: Path) -> None:
    """In nearly all of many pairs of noisy runs, as a 95% interval should."""
    covered = 0
    for seed in range(20):
        a = story_of(plain(tmp_path / f"{seed}a", seed=2 * seed, intervals=60, core_seconds=0.2))
        b = story_of(plain(tmp_path / f"{seed}b", seed=2 * seed + 1, intervals=60, core_seconds=0.1))
        found = speed_up(a, b)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low < found.ratio < found.high
        covered += found.low <= 2.0 <= found.high
    assert covered >= 16  # 19 expected; fewer than 16 have a probability of 0.3%


def test_a_run_against_itself_is_1(tmp_path: Path) -> None:
    story = story_of(plain(tmp_path / "run"))
    found = speed_up(story, story_of(tmp_path / "run"))
    assert found is not None
    assert found.ratio == pytest.approx(1.0)


@pytest.mark.parametrize("intervals", [0, 1, 2, 3, 5, 6, 20, 21, 100])
def test_batches_cover_the_run_without_its_start(tmp_path: Path, intervals: int) -> None:
    rates = batch_rates(read_run(plain(tmp_path / "run", intervals=intervals)).intervals)
    assert len(rates) == (0 if intervals < 3 else 10 if intervals >= 23 else len(rates))
    assert len(rates) in range(3, 11) or intervals < 3
    assert np.isfinite(rates).all()


def test_the_table_of_the_article(tmp_path: Path) -> None:
    paths = [plain(tmp_path / str(n), cpu_nodes=n, core_seconds=0.05, intervals=60) for n in (0, 1)]
    page = page_of([read_run(path) for path in paths], built_in(), {})
    assert page.comparison is not None
    alone, both = (dict(zip(page.comparison.head, row, strict=True)) for row in page.comparison.rows)
    assert (alone["$ per hour"], both["$ per hour"]) == ("$1.41", "$2.22")
    assert (alone["price efficiency"], alone["speed-up over the first (95%)"]) == ("reference", "reference")
    assert both["price efficiency"].startswith("+")
    assert "×" in both["speed-up over the first (95%)"]
    document = document_of(page, [read_run(path) for path in paths], built_in(), {})
    ratio = document["runs"][1]["speed_up"]["ratio"]
    per_dollar = document["runs"][0]["usd_per_million_samples"] / document["runs"][1]["usd_per_million_samples"]
    assert per_dollar == pytest.approx(ratio * 1.408 / 2.224, rel=0.05)
    assert to_json(document)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    paths = [plain(tmp_path / name / "run", intervals=2) for name in ("a", "b")]
    paths.append(plain(tmp_path / "c", intervals=2))
    assert names_of([story_of(path) for path in paths]) == ["a/run", "b/run", "c"]


# --- runs of every kind -----------------------------------------------------------------------------------------------


def empty(path: Path) -> None:
    RunDirectory(path)
    (path / "events.jsonl").touch()


def only_a_summary(path: Path) -> None:
    RunDirectory(path).summary({"status": "finished"})


def before_the_first_step(path: Path) -> None:
    Writer(path).begin()


def one_interval(path: Path) -> None:
    plain(path, intervals=1)


def only_metrics(path: Path) -> None:
    Writer(path).train(30)


def crashed(path: Path) -> None:
    eventful(path, ends=False)


def failed(path: Path) -> None:
    run = Writer(path)
    run.begin()
    run.train(5)
    run.end("failed", "a worker ran out of memory")


def idle(path: Path) -> None:
    run = Writer(path)
    run.begin()
    run.train(5, samples_per_s=0.0, step_time_s=0.0, goodput=0.0)
    run.end()


def backwards(path: Path) -> None:
    run = Writer(path)
    run.begin()
    run.train(20)
    run.at = START - 5000  # the host's clock was set
    run.train(20)
    run.end()


@pytest.mark.parametrize(
    "make",
    [
        empty,
        only_a_summary,
        before_the_first_step,
        one_interval,
        only_metrics,
        crashed,
        failed,
        idle,
        backwards,
        eventful,
    ],
)
def test_every_kind_of_run_has_a_page(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "run")
    view = view_of(tmp_path / "run")
    assert view.verdict
    assert view.cost_note
    two = plain(tmp_path / "two", intervals=20)
    page = page_of([read_run(tmp_path / "run"), read_run(two)], built_in(), {})
    assert page.comparison is not None
    assert len(page.comparison.rows) == 2


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    failed(tmp_path / "run")
    view = view_of(tmp_path / "run")
    assert (view.status, view.error) == ("failed", "a worker ran out of memory")


def test_a_crashed_run_shows_what_it_spent_and_will_spend(tmp_path: Path) -> None:
    crashed(tmp_path / "run")
    view = view_of(tmp_path / "run")
    assert view.status == "unfinished"
    assert {"cost so far", "run time"} <= {tile.name for tile in view.tiles}


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.lists(st.integers(), max_size=2)
)


def test_a_fault_while_the_clock_was_set_back_has_no_duration_and_no_cost(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.train(10)
    run.event("worker_lost", reason="killed")
    run.at -= 15
    run.event("first_step", rank=0, step=run.step, workers=1)
    run.train(3)
    run.end()
    table = view_of(tmp_path).faults
    assert table is not None
    assert [row[2:] for row in table.rows] == [("–", "–", "–")]


@pytest.mark.parametrize("written", [None, 3, [1], {}, {"blocked": None}, {"blocked": "x"}])
def test_a_summary_that_does_not_tell_how_long_reading_took(tmp_path: Path, written: Any) -> None:
    run = Writer(tmp_path, cpu_nodes=0)
    run.begin()
    run.train(10, blocked=None)  # as in intervals of earlier versions
    run.directory.summary({"status": "finished", "input": {"train": written}})
    assert view_of(tmp_path).verdict.startswith("Preprocessing was the bottleneck for 8")


def test_an_interval_that_names_no_worker_is_left_out(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.train(4)
    run.end()
    first, *others = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([json.dumps({**json.loads(first), "workers": 0}), *others, ""]))
    assert view_of(tmp_path).verdict


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_page_of_any_documents(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """One field after the other of real documents takes another value: there is a page all the same."""
    path = tmp_path_factory.mktemp("run")
    run = Writer(path)
    run.begin()
    run.train(4)
    run.rebatch(128)
    run.lose(0, notice=True)
    run.end()
    for name in ("events.jsonl", "metrics.jsonl"):
        documents = [json.loads(line) for line in (path / name).read_text().splitlines()]
        chosen = data.draw(st.sampled_from(documents))
        chosen[data.draw(st.sampled_from(sorted(chosen)))] = data.draw(values)
        (path / name).write_text("".join(json.dumps(each) + "\n" for each in documents))
    assert view_of(path).verdict
