"""The messages of errors in the package, as templates: text with ``…`` in the place of values. Tests hold pages against them."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "offload"
RAISED = (
    "ConfigError",
    "RunError",
    "AccessDenied",
    "ControlLostError",
    "DeviceMemoryError",
    "HeadLost",
    "NoCapacity",
    "UnexpectedAnswer",
    "Unreachable",
)


def template(node: ast.expr) -> str:
    """The text that an expression makes, with ``…`` for what is known only later. ``argument("name")`` is the name, and
    ``argument("name", value)`` is ``name=…``, as in Python."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(map(template, values))
        case ast.FormattedValue(value=ast.Call(func=ast.Name(id="argument"), args=[ast.Constant(value=name), *value])):
            return str(name) + ("=…" if value else "")
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return "…"


def messages() -> dict[str, str]:
    """Where each error is made (``folder/file.py:line``), and the template of its message."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISED and node.args:
                found[f"{path.relative_to(PACKAGE)}:{node.lineno}"] = template(node.args[0])
    return found


if __name__ == "__main__":
    for where, text in messages().items():
        print(f"{where}: {text}")
