"""The charts as pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from offload.prices import built_in
from offload.report.page.charts.pictures import COLORS, draw_page
from offload.report.page.page_view import page_of
from offload.report.page.records import read_run
from tests.report.runs import Writer, eventful, plain


def test_every_chart_becomes_a_picture(tmp_path: Path) -> None:
    page = page_of([read_run(eventful(tmp_path / "run"))], built_in(), {})
    written = draw_page(page, tmp_path / "new" / "folder")
    assert {path.stem for path in written} == {chart.key for chart in page.runs[0].charts}
    assert {"throughput", "busy", "step", "workers", "cost", "metric-0-dollars"} <= {path.stem for path in written}
    for path in written:
        with Image.open(path) as picture:
            assert min(picture.size) > 200
            # Each line's colour is there.
            seen = {color for _, color in picture.convert("RGB").getcolors(1 << 24) or []}
            chart = next(each for each in page.runs[0].charts if each.key == path.stem)
            for line in chart.lines:
                value = COLORS[line.role].removeprefix("#")
                assert tuple(int(value[n : n + 2], 16) for n in (0, 2, 4)) in seen, (path, line.name)


def test_several_runs_have_pictures_together_and_each(tmp_path: Path) -> None:
    paths = [plain(tmp_path / name, intervals=30, samples=5_000) for name in ("a", "b")]
    written = draw_page(page_of([read_run(path) for path in paths], built_in(), {}), tmp_path / "png")
    names = {path.name for path in written}
    assert {"all-throughput.png", "all-stall.png", "1-throughput.png", "2-throughput.png"} <= names
    assert len(names) == len(written)


@pytest.mark.parametrize("name", ["$x^2$", "$\\frac{", "$", "_", "\u202e🙂"])
def test_a_metric_of_any_name_has_a_picture(tmp_path: Path, name: str) -> None:
    run = Writer(tmp_path / "run")
    run.begin()
    for step in range(3):
        run.at += 1
        run.event("report", rank=0, epoch=step, step=step + 1, metrics={name: float(step)})
    run.train(3)
    assert draw_page(page_of([read_run(run.path)], built_in(), {}), tmp_path / "png")
