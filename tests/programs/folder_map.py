"""Writes docs/map.md: every module of the package in a line, from the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = """# Map of the package

Every module in a line, from its docstring. `make map` writes this page; a test holds that it is current.
"""


def first_sentence(path: Path) -> str:
    """What a module says of itself first."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    sentence = re.match(r"(.*?[.:])(?:\s|$)", text)
    return (sentence[1] if sentence else text).rstrip(".:").replace("|", "\\|")


def written() -> str:
    """The page."""
    parts = [HEAD]
    for folder in sorted({path.parent for path in (ROOT / "offload").rglob("*.py")}):
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        package = folder / "__init__.py"
        title = f"\n## {folder.relative_to(ROOT)}\n"
        said = first_sentence(package) if package.exists() else ""
        parts.append(title + (f"\n{said}.\n" if said else "") + ("\n| module | |\n|---|---|\n" if modules else ""))
        parts += [f"| `{path.name}` | {first_sentence(path)} |\n" for path in modules]
    return "".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "map.md").write_text(written(), encoding="utf-8")
