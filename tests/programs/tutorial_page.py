"""Writes docs/tutorial.md: what each step of examples/tutorial changes, as diffs, with the words of the step's docstring."""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = sorted((ROOT / "examples" / "tutorial").glob("step_*.py"))
HEAD = """# Tutorial

Five scripts turn a plain PyTorch loop into an offloaded one. The page shows each change as a diff. The scripts are in
`examples/tutorial`; they make a small data set first. `make map` writes this page from them; a test holds that it is current.
"""
COMMAND = re.compile(r"^\s*((?:offload run|python examples/).*)$", re.MULTILINE)
MARKS = re.compile(
    r" ?\(marked `# \d`\)|Changed lines are marked `# \d`\.|Each line that a step adds or changes is marked [^.]*\."
)


def words(path: Path) -> tuple[str, str]:
    """The heading of a step, and the rest of its docstring, with commands as code and without words about the marks."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    heading, rest = re.match(r"(Step \d: .*?)\. (.*)", " ".join(text.split("\n\n")[0].split())).groups()  # type: ignore[union-attr]
    paragraphs = [MARKS.sub("", each).strip() for each in (textwrap.fill(rest, 120), *text.split("\n\n")[1:])]
    return heading, "\n\n".join(COMMAND.sub(r"```console\n$ \1\n```", each) for each in paragraphs if each)


def code(path: Path) -> list[str]:
    """The lines below a script's docstring, without the marks of changes."""
    text = path.read_text(encoding="utf-8").split('"""\n', 2)[1].strip("\n")
    return [re.sub(r"  # \d$", "", line) for line in text.splitlines()]


def changes(before: Path, after: Path) -> list[str]:
    """The diff of two scripts, with ``...`` for what stays."""
    lines = list(difflib.unified_diff(code(before), code(after), n=2, lineterm=""))[3:]  # without names and first place
    return [" ..." if line.startswith("@@") else line for line in lines]


def block(kind: str, lines: list[str]) -> str:
    """Lines as a fenced block."""
    return "\n".join([f"```{kind}", *lines, "```", ""])


def written() -> str:
    """The page."""
    parts = [HEAD]
    for at, path in enumerate(STEPS):
        heading, text = words(path)
        name = f"[`{path.name}`](../examples/tutorial/{path.name})"
        parts.append(f"\n## {heading}\n\n{text}\n\n{name}:\n\n")
        whole = at in (0, len(STEPS) - 1)
        parts.append(block("python", code(path)) if whole else block("diff", changes(STEPS[at - 1], path)))
    parts.append("\nNext: [samples and loops](loops.md), [elastic training](elastic.md).\n")
    return "".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "tutorial.md").write_text(written(), encoding="utf-8")
