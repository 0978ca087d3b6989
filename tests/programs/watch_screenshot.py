"""Write the picture of docs/live.md of the full-screen view: a made-up run (tests/report/runs.py), as a terminal of 100 columns shows it.

python -m tests.programs.watch_screenshot
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI

from offload.prices import built_in
from offload.report.page.records import read_run
from offload.report.page.story import Story
from offload.report.terminal.watched import screen, watched
from tests.helpers import ROOT
from tests.report.browser import browser, opened
from tests.report.runs import eventful

PICTURE = ROOT / "docs" / "images" / "watch.png"
COLORS = 64
COLUMNS = 100
OUTPUT = ("epoch 9  step 4,659  accuracy 0.866  loss 0.401", "the learning rate is now 0.0005")
PAGE = """<!doctype html><meta charset="utf-8"><style>{stylesheet} body {{ margin: 0; background: {background}; color: {foreground} }}
pre {{ display: inline-block; margin: 12px; font: 14px/16px "DejaVu Sans Mono", monospace }}</style><pre>{code}</pre>"""


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, browser() as started:
        run = read_run(eventful(Path(scratch) / "vit-blur", ends=False))
        state = watched(Story(run, built_in(), {}), run.events[-1]["at"] + 1)
        console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True)
        console.print(screen(state, OUTPUT))
        page = Path(scratch) / "screen.html"
        page.write_text(console.export_html(theme=MONOKAI, code_format=PAGE), encoding="utf-8")
        with opened(started, page) as tab, Image.open(io.BytesIO(tab.locator("pre").screenshot())) as picture:
            small = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    small.save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
