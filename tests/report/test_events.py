"""The events of a run: the law that holds for every kind, and what readers make of events that they do not know."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from offload.report.events import DRIVER, GROUPS, HUB, KINDS, RunEvent, UnknownEvent, read_event
from offload.report.run_dir import to_json
from tests.report.runs import write_event

OFFLOAD = Path(__file__).parents[2] / "offload"
# Those of a run. A probe has two of its own, which are known once it is imported.
OF_RUNS = [kind for kind, event in KINDS.items() if event.__module__.startswith("offload.report.")]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(0, 10**6),
    "float": st.floats(0, 1e9),
    "str": st.text(max_size=8),
    "bool": st.booleans(),
    "Sequence[str]": st.lists(st.text(max_size=8), max_size=3),
    "Sequence[int]": st.lists(st.integers(0, 99), min_size=2, max_size=2),
    "Sequence[Mapping[str, Any]]": st.lists(st.just({"name": "10.0.0.1"}), max_size=2),
    "Mapping[str, float]": st.dictionaries(st.text(max_size=4), st.floats(0, 1e9), max_size=3),
    "Mapping[str, str]": st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
    "Mapping[str, Sequence[float]]": st.just({"CPU": [1.0, 4.0]}),
    "Mapping[str, Mapping[str, Any]]": st.just({"train": {"source": "a folder", "samples": None}}),
}
"""A strategy for each type of a field. An event with another type needs one here: JSON has to carry it."""


@st.composite
def run_events(draw: st.DrawFn, kind: str) -> RunEvent:
    values = {}
    for field in fields(KINDS[kind]):
        if field.name not in ("at", "by"):
            values[field.name] = draw(VALUES[str(field.type).removesuffix(" | None")])
    if kind == "short_of_memory":  # a number of cores for each node
        values["nodes"] = ["10.0.0.1", "10.0.0.2"]
    if kind == "decided":
        values["decision"] = draw(st.sampled_from(["keep", "rebatch", "resize"]))
    at = draw(st.floats(1, 2e9))
    return KINDS[kind](at=at, by=draw(st.sampled_from([DRIVER, HUB, 0, 3])), **values)


@settings(max_examples=10 * len(OF_RUNS))
@given(st.sampled_from(OF_RUNS).flatmap(run_events))
def test_every_event_goes_through_json_and_has_words_and_a_group(event: RunEvent) -> None:
    line = to_json(event.to_json())
    again = read_event(json.loads(line))
    assert again == event
    assert to_json(again.to_json()) == line
    assert list(json.loads(line))[:2] == ["event", "at"]
    assert event.GROUP in GROUPS
    assert event.sentence({}) or event.kind == "cluster_changed", "no node has changed: another event has the words"
    assert event.words({})
    assert all(event.live_lines())


@settings(max_examples=10 * len(OF_RUNS))
@given(kind=st.sampled_from(OF_RUNS), data=st.data())
def test_a_line_that_lacks_values_or_has_wrong_ones_is_read_and_shown(kind: str, data: st.DataObject) -> None:
    document = data.draw(run_events(kind)).to_json()
    for name in data.draw(
        st.sets(st.sampled_from([name for name in document if name not in ("event", "at")] or ["-"]))
    ):
        document[name] = data.draw(st.sampled_from([None, "?", -1, [], {}, [{}]]))
        if data.draw(st.booleans()):
            del document[name]
    event = read_event(document)
    assert isinstance(event, KINDS[kind])
    assert event.words({})


@given(
    st.text().filter(lambda kind: kind not in KINDS),
    st.dictionaries(st.text(), st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers()))),
)
def test_an_event_of_an_unknown_kind_is_shown_with_its_values(kind: str, values: dict[str, Any]) -> None:
    document = {**values, "event": kind, "at": 3.0}
    event = read_event(document)
    assert isinstance(event, UnknownEvent)
    assert event.GROUP == "other"
    shown = event.words({})
    assert shown.startswith(kind.replace("_", " "))
    assert all(
        name in shown for name, value in values.items() if name not in ("event", "at", "rank") and value is not None
    )


def test_a_value_that_is_none_is_written_unless_none_is_its_default() -> None:
    finished = KINDS["run_finished"](at=1.0, status="finished", error=None, samples=3, steps=1)
    assert finished.to_json() == {
        "event": "run_finished",
        "at": 1.0,
        "status": "finished",
        "error": None,
        "samples": 3,
        "steps": 1,
    }
    kept = KINDS["decided"](at=1.0, decision="keep", reason="no gain", samples_per_s=1.0, stall=0.0)
    assert list(kept.to_json()) == ["event", "at", "decision", "reason", "samples_per_s", "stall"]


def test_who_reported_an_event_is_its_rank() -> None:
    lost = KINDS["worker_lost"](reason="killed")
    assert "rank" not in lost.reported(1.0, DRIVER).to_json()
    assert [list(lost.reported(1.0, by).to_json().items())[2] for by in (HUB, 3)] == [("rank", None), ("rank", 3)]


def reports(path: Path) -> Iterator[ast.expr]:
    """What is passed to those methods that report events."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            receiver = ast.unparse(node.func.value)
            if (receiver.split(".")[-1], node.func.attr) in (
                ("reporter", "event"), ("_reporter", "event"), ("hub", "note"), ("_hub", "note"), ("log", "tell"), ("directory", "event"),
            ):  # fmt: skip
                yield node.args[0]


def test_nobody_reports_an_event_as_text() -> None:
    """A type checker sees classes; a kind as text, or values by name, would pass it by."""
    passed = [argument for path in OFFLOAD.rglob("*.py") for argument in reports(path)]
    assert len(passed) > 15
    assert not [ast.unparse(argument) for argument in passed if isinstance(argument, ast.Constant | ast.Dict)]


def test_events_of_another_version_stand_on_the_page(tmp_path: Path) -> None:
    from offload.prices import built_in
    from offload.report.page.page_view import page_of
    from offload.report.page.records import read_run

    write_event(tmp_path, "run_started", workers=1)
    write_event(tmp_path, "gone_fishing", rank=0, where="the lake")
    write_event(tmp_path, "checkpoint", step=3)
    groups = {
        group.title: [words for _, words in group.rows]
        for group in page_of([read_run(tmp_path)], built_in(), {}).runs[0].events
    }
    assert groups["Other events"] == ["gone fishing: where the lake"]
    assert groups["Checkpoints"] == ["checkpoint: step 3, waited true"]
