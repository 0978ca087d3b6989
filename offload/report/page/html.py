"""``report.html``, which shows one or several runs on one page that opens without a network.

Where it stops: :mod:`offload.report.page.page_view` decides what the page shows.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import Any

import jinja2

from offload.prices import built_in
from offload.report.page.charts.svg import plot
from offload.report.page.page_view import SHOWN_METRICS, PageView, page_of
from offload.report.page.records import read_run
from offload.report.run_dir import REPORT, RunDirectory


def write_report(directory: RunDirectory) -> None:
    """Write the page of a run into its directory."""
    directory.write(REPORT, rendered(page_of([read_run(directory.path)], built_in(), {})))


def rendered(page: PageView) -> str:
    """The page as HTML. A content security policy allows its own script alone: nothing from a run can become code."""
    script = _asset("page.js")
    return from_template(
        "page.html.j2",
        page=page,
        plot=plot,
        shown_metrics=SHOWN_METRICS,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def from_template(name: str, **values: Any) -> str:
    """A page from one of the templates, in the style that all pages share. It escapes what ``values`` hold."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("offload.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Macros see globals alone.
    environment.globals.update(values)
    return environment.get_template(name).render(style=_asset("page.css"))


def _asset(name: str) -> str:
    return resources.files("offload.report").joinpath("templates", name).read_text(encoding="utf-8")
