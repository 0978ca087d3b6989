"""The page as HTML: well formed, self-contained, and nothing from a run becomes code."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path

import pytest

from offload.prices import built_in
from offload.report.page.html import rendered, write_report
from offload.report.page.page_view import page_of
from offload.report.page.records import read_run
from offload.report.run_dir import RunDirectory
from tests.report.runs import Writer, eventful, gpu_node, plain

VOID = {"meta", "br", "link", "img", "hr"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' onfocus=alert(3) {{ 7 * 7 }} \u202e&lt;"


class Page(html.parser.HTMLParser):
    """The texts by element, whether elements close in order, and whatever a browser could load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.text.setdefault(self.open[-1], []).append(data.strip())


def page_of_runs(*paths: Path) -> str:
    return rendered(page_of([read_run(path) for path in paths], built_in(), {}))


def check_self_contained(text: str) -> Page:
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base", "form"), tag
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")  # type: ignore[union-attr]
        assert "src" not in attributes
    assert "url(" not in text
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    return page


def test_the_page_of_a_run(tmp_path: Path) -> None:
    page = check_self_contained(page_of_runs(eventful(tmp_path / "vit")))
    assert page.text["h1"] == ["vit"]
    assert {
        "Rates",
        "Where each second of a step goes",
        "Size and decisions",
        "Nodes",
        "Loss and metrics",
        "Cost",
        "Checkpoints",
        "Faults",
        "Skipped samples",
        "Events",
        "Setup",
    } == set(page.text["h2"])
    marks = [attributes["aria-label"] for tag, attributes in page.elements if tag == "button"]
    assert any("a larger batch computes faster" in (mark or "") for mark in marks)


@pytest.mark.parametrize("runs", [2, 10])
def test_the_page_of_several_runs(tmp_path: Path, runs: int) -> None:
    paths = [plain(tmp_path / f"run-{n}", cpu_nodes=n % 3, seed=n, intervals=60, samples=9_000) for n in range(runs)]
    text = page_of_runs(*paths)
    page = check_self_contained(text)
    assert len(text) < 5_000_000
    assert {"Comparison", "All runs over time", "Metrics of all runs", "Each run"} == set(page.text["h2"])


def test_a_run_writes_its_page_into_its_directory(tmp_path: Path) -> None:
    plain(tmp_path, intervals=30)
    write_report(RunDirectory(tmp_path, overwrite=True))
    check_self_contained((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_names_that_are_not_unicode_show_as_question_marks(tmp_path: Path) -> None:
    name = "na\udcefve 🙂.jpg"  # as os.listdir gives a name in Latin-1
    run = Writer(tmp_path)
    run.begin()
    run.event("report", epoch=0, step=1, metrics={name: 1.0})
    run.directory.skipped({"sample_id": 3, "dataset": "train", "reason": f"ValueError: {name} has no label"})
    run.end("failed", f"RunError: {name} has no label")
    write_report(run.directory)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "ValueError: na?ve 🙂.jpg has no label" in page
    assert "RunError: na?ve 🙂.jpg has no label" in page


def hostile_run(path: Path) -> Path:
    """A run in which every text comes from an enemy."""
    run = Writer(path / HOSTILE.replace("/", "∕")[:60])
    run.nodes[0] = gpu_node(name=HOSTILE, instance_type=HOSTILE, gpu_type=HOSTILE)
    run.begin()
    run.event(
        "run_resumed",
        nodes=[{"name": HOSTILE, "node_id": HOSTILE}],
        datasets={HOSTILE: {"source": HOSTILE}},
        workers=HOSTILE,
    )
    run.train(40, preprocessing={HOSTILE: {"cores": 2, "busy_s": 1.0}})
    run.event("decided", decision="resize", reason=HOSTILE, workers=2, local_batch_size=3, accum_steps=0)
    run.event("worker_lost", reason=HOSTILE)
    run.event(HOSTILE, **{HOSTILE: HOSTILE})
    run.event("report", epoch=0, step=1, metrics={HOSTILE: 1.0})
    run.event("report", epoch=1, step=2, metrics={HOSTILE: 2.0})
    run.event("checkpoint", reason=HOSTILE, step=1, seconds=1.0)
    run.directory.skipped({"sample_id": HOSTILE, "dataset": HOSTILE, "reason": HOSTILE})
    run.end("failed", HOSTILE)
    summary = json.loads((run.path / "summary.json").read_text())
    summary["versions"] = {HOSTILE: HOSTILE}
    run.directory.summary(summary)
    return run.path


def test_nothing_from_a_run_becomes_code(tmp_path: Path) -> None:
    path = hostile_run(tmp_path)
    for text in (page_of_runs(path), page_of_runs(path, plain(tmp_path / "b", intervals=5))):
        page = check_self_contained(text)
        scripts = [attributes for tag, attributes in page.elements if tag == "script"]
        assert [s for s in scripts if s != {"type": "application/json"}] == [{}]
        assert "<img" not in text
        assert "alert(1)</script>" not in text
        assert "49" not in re.sub(r"[^{]*", "", text)
    assert any("<script>alert(1)</script>" in each for each in page.text["td"])  # it shows as text


def test_the_policy_allows_the_pages_own_script_alone(tmp_path: Path) -> None:
    import base64
    import hashlib

    text = page_of_runs(plain(tmp_path / "run", intervals=3))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in policy or f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
