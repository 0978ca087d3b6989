"""A headless Chromium, to look at pages as people do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAPTOP, PHONE = 1280, 390


def chromium() -> str:
    """The browser's program. Skips the test where there is none; with CI=true there must be one."""
    found = next(filter(None, (shutil.which(name) for name in NAMES)), None)
    if found is None:
        reason = f"no browser: install one of {', '.join(NAMES)}"
        if os.environ.get("CI") == "true":
            pytest.fail(f"with CI=true pages must be looked at: {reason}")
        pytest.skip(reason)
    return found


@contextmanager
def browser() -> Iterator[Any]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    program = chromium()
    with sync_playwright() as playwright:
        # As root, Chromium has no sandbox of its own. It opens only pages of these tests.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(started: Any, path: Path, *, width: int = LAPTOP, scheme: str = "light", **context: Any) -> Iterator[Any]:
    """A page from a file, in a browser that has no network. Fails on any message of its console, and on any request beyond the file."""
    with started.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, **context
    ) as tab:
        page = tab.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: said.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        yield page
        assert said == []
