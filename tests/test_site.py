"""The documentation site builds without warnings, holds the public names, and needs no other host."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import offload
from offload import arbiter, collate, notebook, runs, transforms, tune
from tests.helpers import ROOT

OPTIONS = ("--fail-on-warning", "--keep-going", "--quiet", "-c", "docs")
LOADING = {"src", "srcset", "poster", "data"}
"""Attributes whose address a browser loads by itself. It loads ``href`` of a link element, too, but not of an anchor."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it. Sphinx checks links between pages, to headings, and the names in docstrings."""
    folder = tmp_path_factory.mktemp("site")
    assert f"sphinx-build {' '.join(OPTIONS)} " in (ROOT / "Makefile").read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *OPTIONS, "-d", str(folder / "doctrees"), ".", str(folder / "html")],
        cwd=ROOT, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "html"


class Loads(HTMLParser):
    """Collects the addresses that a browser loads with a page, the identifiers in it, and its links."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in LOADING or (name == "href" and tag == "link"):
                self.loads.append(value or "")
            elif name == "href" and tag == "a":
                self.links.append(value or "")
            elif name == "id":
                self.ids.add(value or "")


def pages(site: Path) -> Iterator[Path]:
    return (page for page in site.rglob("*.html") if "_static" not in page.parts)


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    there = {page.relative_to(site): Loads(page).loads for page in pages(site)}
    assert len(there) > 30
    assert {page: found for page, loads in there.items() if (found := [at for at in loads if "//" in at])} == {}
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"']+", styles) == []
    scripts = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.js"))
    assert re.findall(r"(?:fetch|import|importScripts|sendBeacon)\(\s*[\"'](?:https?:)?//[^\"']+", scripts) == []


def test_every_link_within_the_site_leads_somewhere(site: Path) -> None:
    parsed = {page: Loads(page) for page in pages(site)}
    broken = []
    for page, found in parsed.items():
        for link in found.links:
            path, _, place = link.partition("#")
            if "//" in link or link.startswith("mailto:"):
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (place and target in parsed and place not in parsed[target].ids):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_the_first_page_is_the_readme(site: Path) -> None:
    assert (site / "index.html").read_bytes() == (site / "README.html").read_bytes()


def test_equations_are_mathml(site: Path) -> None:
    concepts = (site / "docs" / "concepts.html").read_text(encoding="utf-8")
    assert concepts.count("<math ") == (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").count("```math")


def test_the_reference_holds_every_public_name(site: Path) -> None:
    parsed = [Loads(page) for page in (site / "docs" / "reference").glob("*.html")]
    ids = set().union(*(each.ids for each in parsed))
    names = {
        f"offload.{name}"
        for name in offload.__all__
        if name not in ("__version__", "arbiter", "collate", "notebook", "runs", "transforms", "tune")
    }
    names |= {
        f"offload.{part.__name__.split('.')[1]}.{name}"
        for part in (arbiter, collate, notebook, runs, transforms, tune)
        for name in part.__all__
    }
    assert sorted(names - ids) == []
    methods = [name for name in vars(offload.Context) if not name.startswith("_")]
    assert [name for name in methods if f"offload.Context.{name}" not in ids] == []


def test_the_reference_holds_every_command(site: Path) -> None:
    page = (site / "docs" / "reference" / "command_line.html").read_text(encoding="utf-8")
    for words in (
        "run",
        "demo",
        "doctor",
        "predict",
        "probe",
        "plan",
        "watch",
        "report",
        "launch sagemaker",
        "launch ray",
    ):
        assert f"offload {words}" in page
