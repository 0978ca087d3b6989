"""Write the pictures of docs/report.md: reports of made-up runs (tests/report/runs.py), as a browser shows them.

python -m tests.programs.report_screenshots
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from offload.prices import built_in
from offload.report.page.html import rendered
from offload.report.page.page_view import page_of
from offload.report.page.records import read_run
from tests.helpers import ROOT
from tests.report.browser import LAPTOP, PHONE, browser, opened
from tests.report.runs import eventful, plain

FOLDER = ROOT / "docs" / "images"
COLORS = 96  # of a palette: enough for lines and text, and a third of the size


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, browser() as started:
        folder = Path(scratch)
        one = _page(folder / "one.html", eventful(folder / "vit-blur", ends=False, core_seconds=0.055))
        runs = [
            plain(
                folder / name,
                cpu_nodes=nodes,
                seed=nodes,
                intervals=intervals,
                samples=6_000,
                core_seconds=0.05,
                epochs=10,
            )
            for name, nodes, intervals in (("g5", 0, 200), ("g5-and-1-c5", 1, 120), ("g5-and-2-c5", 2, 100))
        ]
        three = _page(folder / "three.html", *runs)
        with opened(started, one) as page:
            _shot(page, "report-run", 0, 1130)
            page.locator(".mark.fault").first.focus()
            _shot(page, "report-time", _top(page, "r0-rates"), _top(page, "r0-size"))
            page.locator("h1").first.click()
            _shot(page, "report-size", _top(page, "r0-size"), _top(page, "r0-metrics"))
            _shot(page, "report-money", _top(page, "r0-metrics"), _top(page, "r0-events"))
        with opened(started, one, scheme="dark") as page:
            _shot(page, "report-dark", 0, 1130)
        with opened(started, one, width=PHONE) as page:
            _shot(page, "report-phone", 0, 1500, width=PHONE)
        with opened(started, three) as page:
            _shot(page, "report-three", 0, _top(page, "each"))


def _page(target: Path, *runs: Path) -> Path:
    target.write_text(rendered(page_of([read_run(run) for run in runs], built_in(), {})), encoding="utf-8")
    return target


def _top(page: Any, name: str) -> int:
    return round(page.evaluate(f"document.getElementById('{name}').getBoundingClientRect().top + scrollY")) - 12


def _shot(page: Any, name: str, top: int, bottom: int, *, width: int = LAPTOP) -> None:
    margin = 80 if width == LAPTOP else 0
    clip = {"x": margin, "y": top, "width": width - 2 * margin, "height": bottom - top}
    with Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip))) as picture:
        small = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    FOLDER.mkdir(exist_ok=True)
    small.save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
