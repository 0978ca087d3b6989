"""The names in a source that imports bind, scope by scope. Pure.

Where it stops: it follows imports alone. A name that an assignment, a parameter or a loop binds stands for anything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

Scope = dict[str, set[str | None]]
"""The names that a scope binds, with the dotted names of what imports and definitions bind to them; None: something else."""

STAR = "*"
"""The key under which a scope holds the modules of which it imports everything."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)


def bindings(scope: ast.AST) -> Scope:
    """The names that a module, class, function or comprehension binds itself."""
    names: Scope = {}
    for node in _own(scope):
        for name, target in _bound_by(node):
            names.setdefault(name, set()).add(target)
    if isinstance(scope, ast.Module):
        for node in ast.walk(scope):
            if isinstance(node, ast.Global):  # a function may assign it
                for name in node.names:
                    names.setdefault(name, set()).add(None)
    return names


def resolve(name: Sequence[str], scopes: Sequence[Scope]) -> set[str | None]:
    """What a dotted name may stand for in nested scopes, the outermost first. Empty if no scope binds its first part."""
    first, *rest = name
    for scope in reversed(scopes):
        if first in scope:
            return {None if target is None else ".".join([target, *rest]) for target in scope[first]}
    return set()


def dotted(node: ast.AST) -> list[str] | None:
    """The parts of ``a.b.c``; None if this is no such expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (inner := dotted(node.value)) is not None:
        return [*inner, node.attr]
    return None


def nodes_in_scopes(node: ast.AST, scopes: Sequence[Scope]) -> Iterator[tuple[ast.AST, Sequence[Scope]]]:
    """Yield the nodes below ``node`` with the scopes in which Python looks up their names, the outermost first."""
    visible = [scope for scope in scopes if not isinstance(scope, _ClassScope)]
    inner = list(scopes)
    if isinstance(node, _FUNCTIONS):
        inner = [*visible, bindings(node)]
    elif isinstance(node, ast.ClassDef):
        inner = [*visible, _ClassScope(bindings(node))]
    elif isinstance(node, _COMPREHENSIONS):
        inner = [*scopes, bindings(node)]
    outside = set(map(id, _evaluated_outside(node)))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.arguments):
            for default in [*child.defaults, *filter(None, child.kw_defaults)]:
                yield default, scopes
                yield from nodes_in_scopes(default, scopes)
            continue
        at = scopes if id(child) in outside else inner
        yield child, at
        yield from nodes_in_scopes(child, at)


class _ClassScope(dict[str, set[str | None]]):
    """The scope of a class body, which the functions in it do not see."""


def _evaluated_outside(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [*node.decorator_list, *([node.returns] if node.returns else [])]
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    return []


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without what is within nested scopes."""
    outside = set(map(id, _evaluated_outside(scope)))
    todo = [child for child in ast.iter_child_nodes(scope) if id(child) not in outside]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, _COMPREHENSIONS):  # `:=` in it binds a name around it
            todo += [inner.target for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)]
        elif not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            todo += ast.iter_child_nodes(node)


def _bound_by(node: ast.AST) -> Iterator[tuple[str, str | None]]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = "." * level + (module or "")
            for alias in names:
                if alias.name == STAR:
                    yield STAR, base
                else:
                    yield alias.asname or alias.name, f"{base}.{alias.name}"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name, f"<defined here>.{name}"
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
            yield name, None
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name, None
        case ast.MatchMapping(rest=str(name)):
            yield name, None
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            yield from ((name, None) for name in names)
