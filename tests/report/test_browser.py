"""The page in a real browser: it renders without errors, on a laptop and a phone, in light and dark, by keyboard and screen reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from offload.prices import built_in
from offload.report.page.html import rendered
from offload.report.page.page_view import page_of
from offload.report.page.records import read_run
from tests.report.browser import LAPTOP, PHONE, browser, opened
from tests.report.runs import Writer, eventful, plain
from tests.report.test_html import hostile_run

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with browser() as each:
        yield each


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by what they show."""
    folder = tmp_path_factory.mktemp("pages")
    empty = folder / "empty"
    empty.mkdir()
    (empty / "events.jsonl").touch()
    several = [plain(folder / f"run-{n}", cpu_nodes=n % 3, seed=n, intervals=40, samples=9_000) for n in range(10)]
    shown = {
        "one": [eventful(folder / "one")],
        "two": several[:2],
        "ten": several,
        "empty": [empty],
        "crashed": [eventful(folder / "crashed", ends=False)],
        "hostile": [hostile_run(folder)],
    }
    found = {}
    for name, paths in shown.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(rendered(page_of([read_run(path) for path in paths], built_in(), {})), encoding="utf-8")
    return found


@pytest.mark.parametrize("name", ["one", "two", "ten", "empty", "crashed", "hostile"])
@pytest.mark.parametrize(("width", "scheme"), [(LAPTOP, "light"), (PHONE, "dark")])
def test_it_renders_without_errors_and_fits(
    started: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    with opened(started, pages[name], width=width, scheme=scheme) as page:
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        root = "document.documentElement"
        assert page.evaluate(f"{root}.scrollWidth - {root}.clientWidth") == 0
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(251, 251, 252)") == (scheme == "light")
        for frame in page.query_selector_all(".frame"):
            assert frame.bounding_box()["width"] > 150


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("one", LAPTOP, "light"),
        pytest.param("two", PHONE, "dark", marks=pytest.mark.soak),
        ("empty", PHONE, "dark"),
    ],
)
def test_axe_finds_nothing(started: Any, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    with opened(started, pages[name], width=width, scheme=scheme, bypass_csp=True) as page:
        page.set_default_timeout(600_000)
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        page.evaluate(axe)
        found = page.evaluate(f"axe.run(document, {{runOnly: {json.dumps(RULES)}}})")
        assert [(v["id"], [node["html"][:200] for node in v["nodes"][:3]]) for v in found["violations"]] == []
        assert len(found["passes"]) > 10


def test_marks_explain_themselves_by_keyboard_and_pointer(started: Any, pages: dict[str, Path]) -> None:
    with opened(started, pages["one"]) as page:
        mark = page.locator(".mark.decision").first
        tip = mark.locator(".tip")
        assert not tip.is_visible()
        mark.focus()
        assert "a larger batch computes faster" in tip.inner_text()
        page.keyboard.press("Escape")
        assert not tip.is_visible()
        page.mouse.move(0, 0)
        mark.hover()
        assert tip.is_visible()
        box = tip.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= LAPTOP


def test_the_tips_of_marks_stay_on_a_phone(started: Any, pages: dict[str, Path]) -> None:
    with opened(started, pages["one"], width=PHONE) as page:
        for mark in page.locator(".mark").all():
            mark.focus()
            box = mark.locator(".tip").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= PHONE


def test_a_chart_reads_its_values_by_pointer_and_keys(started: Any, pages: dict[str, Path]) -> None:
    with opened(started, pages["one"]) as page:
        plot = page.locator(".plot").first
        frame, readout = plot.locator(".frame"), plot.locator(".readout")
        assert not readout.is_visible()
        frame.hover(position={"x": 300, "y": 50})
        said = readout.inner_text()
        assert all(name in said for name in ("measured", "input ceiling", "GPU ceiling"))
        page.mouse.move(0, 0)
        frame.focus()
        page.keyboard.press("End")
        last = readout.inner_text()
        page.keyboard.press("ArrowLeft")
        assert readout.inner_text() != last
        page.keyboard.press("ArrowRight")
        assert readout.inner_text() == last
        page.keyboard.press("Escape")
        assert not readout.is_visible()


def test_a_hundred_thousand_intervals_open_soon(started: Any, tmp_path: Path) -> None:
    """The page has as many points as a screen shows, whatever the run's length, so that it opens at once."""
    run = Writer(tmp_path / "run", cpu_nodes=2, samples=600_000)
    run.begin()
    run.train(500)
    run.end()
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    documents = [json.loads(line) for line in lines]
    with open(run.path / "metrics.jsonl", "w") as file:
        for turn in range(200):
            later = [
                {**each, "at": each["at"] + 1000 * turn, "step": each["step"] + 10_000 * turn} for each in documents
            ]
            file.writelines(json.dumps(each) + "\n" for each in later)
    records = read_run(run.path)
    assert len(records.intervals) == 100_000
    target = tmp_path / "long.html"
    target.write_text(rendered(page_of([records], built_in(), {})), encoding="utf-8")
    assert target.stat().st_size < 1_000_000
    with opened(started, target) as page:
        assert page.evaluate("document.querySelectorAll('*').length") < 5_000


def test_without_scripts_the_page_shows_everything(started: Any, pages: dict[str, Path]) -> None:
    with opened(started, pages["one"], java_script_enabled=False) as page:
        mark = page.locator(".mark").first
        mark.focus()
        assert mark.locator(".tip").is_visible()
        assert page.locator("svg path.line").count() > 10
