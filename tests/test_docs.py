"""The documents name what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.programs.folder_map import written
from tests.programs.markdown import PAGES


def test_the_map_is_current() -> None:
    assert (ROOT / "docs" / "map.md").read_text(encoding="utf-8") == written(), "make map writes it anew"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|json|toml))`", text)
    places = (ROOT, ROOT / "offload", ROOT / "offload" / "train" / "driver", page.parent)
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_users_are_sent_to_pages_that_exist_by_their_titles() -> None:
    """The files of the documentation do not come with an installed package."""
    titles = {
        page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for page in (ROOT / "docs").glob("*.md")
    }
    named = set()
    for path in sorted((ROOT / "offload").rglob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        for each in ast.walk(module):
            if (
                isinstance(each, ast.Constant)
                and isinstance(each.value, str)
                and each.value != ast.get_docstring(module, clean=False)
            ):
                assert not re.search(r"docs/\w+\.md", each.value), (
                    f"{path.relative_to(ROOT)}:{each.lineno}: {each.value}"
                )
                named |= {title for _, title in re.findall(r"offload's page (['\"])(.+?)\1", each.value)}
    assert named
    assert named <= titles
