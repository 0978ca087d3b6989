"""Edit a script's source so that it makes other transforms: replace the names of classes in calls, and nothing else. Pure.

Where it stops: it replaces a call if imports alone bind its name. All other uses of a class are left to the user, with their lines.
"""

from __future__ import annotations

import ast
import difflib
import io
from collections.abc import Sequence
from dataclasses import dataclass

from offload.measure.equivalents import DropIn
from offload.probe.bound_names import STAR, bindings, dotted, nodes_in_scopes, resolve

PACKAGE = "offload"
ALIAS = "offload_transforms"  # where a script calls something else `offload`


@dataclass(frozen=True, order=True)
class Use:
    """A use of a class in a source. ``line``: counted from 1. ``text``: as the source spells it."""

    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Edit:
    """An edited source.

    Args:
        text: the source with its replacements.
        replaced: the calls that were replaced.
        by_hand: uses that only the user can replace.
    """

    text: str
    replaced: tuple[Use, ...] = ()
    by_hand: tuple[Use, ...] = ()


def edit(text: str, drop_ins: Sequence[DropIn]) -> Edit:
    """Replace the calls of the classes for which ``drop_ins`` stand. Raises SyntaxError if ``text`` is not Python."""
    source = text.encode()
    tree = ast.parse(source)
    calls, by_hand = _uses(source, tree, drop_ins)
    if calls:
        name, insert = _our_name(tree, min(node.lineno for node, _ in calls))
        starts = _line_starts(source)
        edited = source
        for node, drop_in in sorted(calls, key=lambda call: (call[0].lineno, call[0].col_offset), reverse=True):
            start, end = _span(node, starts)
            edited = edited[:start] + f"{name}.{drop_in.name}".encode() + edited[end:]
        if insert is not None:
            edited = _with_import(edited, tree, insert)
        text = edited.decode()
    return Edit(
        text=text,
        replaced=tuple(sorted(Use(node.lineno, _spelled(node)) for node, _ in calls)),
        by_hand=tuple(sorted(set(by_hand))),
    )


def unified_diff(before: str, after: str, name: str) -> str:
    """The change of a file, in the form that ``git apply`` and ``patch -p1`` take; empty if there is none."""
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    return io.StringIO(text, newline="\n").readlines()


def _uses(
    source: bytes, tree: ast.Module, drop_ins: Sequence[DropIn]
) -> tuple[list[tuple[ast.expr, DropIn]], list[Use]]:
    """The calls to replace, and the uses that are left to the user."""
    replaces = {name: drop_in for drop_in in drop_ins for name in drop_in.replaces}
    names = {drop_in.name for drop_in in drop_ins}
    starts = _line_starts(source)
    called: set[int] = set()
    parts: set[int] = set()
    calls: list[tuple[ast.expr, DropIn]] = []
    by_hand: list[Use] = []
    module = bindings(tree)
    for node, scopes in nodes_in_scopes(tree, [module]):
        if isinstance(node, ast.Call):
            called.add(id(node.func))
            by_hand += [
                Use(node.lineno, f'getattr(…, "{value.value}")')
                for value in node.args
                if dotted(node.func) == ["getattr"] and isinstance(value, ast.Constant) and value.value in names
            ]
        name = dotted(node) if isinstance(node, ast.Name | ast.Attribute) and id(node) not in parts else None
        if name is None or not isinstance(node, ast.Name | ast.Attribute):
            continue
        if isinstance(node, ast.Attribute):
            parts.add(id(node.value))  # `a.b` of `a.b.c`
        targets = resolve(name, scopes)
        equivalents = {None if target is None else replaces.get(target) for target in targets}
        drop_in = next(iter(equivalents)) if len(equivalents) == 1 else None
        start, end = _span(node, starts)
        if drop_in is not None and id(node) in called and source[start:end].decode() == ".".join(name):
            calls.append((node, drop_in))
        elif any(equivalents) or (name[-1] in names and _unknown(targets, module) and isinstance(node.ctx, ast.Load)):
            by_hand.append(Use(node.lineno, ".".join(name)))
    return calls, by_hand


def _unknown(targets: set[str | None], module: dict[str, set[str | None]]) -> bool:
    """Return whether a name may be one of torchvision's, for all that imports tell."""
    stars = {
        module_name for module_name in module.get(STAR, set()) if module_name and module_name.startswith("torchvision")
    }
    return None in targets or (not targets and bool(stars))


def _our_name(tree: ast.Module, first_use: int) -> tuple[str, str | None]:
    """The name of ``offload.transforms`` in this source, and the import that it needs (None: none)."""
    bound = [bindings(node) for node in ast.walk(tree) if isinstance(node, ast.Module) or hasattr(node, "body")]
    bound = [scope for scope in bound if scope]

    def means_offload(name: str) -> bool:
        return all(scope[name] == {PACKAGE} for scope in bound if name in scope)

    for statement in tree.body:
        if isinstance(statement, ast.Import) and statement.lineno < first_use:
            for alias in statement.names:
                if alias.name.partition(".")[0] == PACKAGE and (alias.asname is None or alias.name == PACKAGE):
                    name = alias.asname or PACKAGE
                    if means_offload(name):
                        return f"{name}.transforms", None
    if means_offload(PACKAGE):
        return f"{PACKAGE}.transforms", f"import {PACKAGE}"
    return ALIAS, f"from {PACKAGE} import transforms as {ALIAS}"


def _with_import(source: bytes, tree: ast.Module, statement: str) -> bytes:
    """The source with an import after its first imports. ``tree``: of the source before calls on its lines were edited."""
    lines = source.splitlines(keepends=True)
    after = 0
    for number, node in enumerate(tree.body):
        docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (docstring or isinstance(node, ast.Import | ast.ImportFrom)):
            break
        following = tree.body[number + 1] if number + 1 < len(tree.body) else None
        if following is None or following.lineno > (node.end_lineno or 0):  # no `;` after it
            after = node.end_lineno or 0
    if after == 0 and tree.body:
        first = tree.body[0]
        decorators = getattr(first, "decorator_list", [])
        after = min([first.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    newline = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    return b"".join([*lines[:after], statement.encode() + newline, *lines[after:]])


def _line_starts(source: bytes) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _span(node: ast.expr, starts: Sequence[int]) -> tuple[int, int]:
    return starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or node.lineno) - 1] + (
        node.end_col_offset or 0
    )


def _spelled(node: ast.expr) -> str:
    return ".".join(dotted(node) or [])
