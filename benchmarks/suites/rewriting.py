"""Rewrites a test module so that it imports offload where it imports the class that it tests.

The text is rewritten, not the loaded module: processes that a test starts import the module again, and meet the same names.
"""

import ast
from collections.abc import Mapping


def rewritten(source: str, stand_ins: Mapping[str, str], texts: Mapping[str, str] | None = None) -> str:
    """Return the source of a module with other imports, also in the programs that it holds as text. Comments and the layout get lost.

    Args:
        stand_ins: what takes the place of what, by full name: ``{"torch.utils.data.DataLoader": "offload.DataLoader"}``. It
            concerns ``from ... import`` alone: what a module reaches by its full name stays.
        texts: parts of strings, and what stands there instead, such as the names of files.
    """
    return ast.unparse(ast.fix_missing_locations(_Rewriter(stand_ins, texts or {}).visit(ast.parse(source)))) + "\n"


class _Rewriter(ast.NodeTransformer):
    def __init__(self, stand_ins: Mapping[str, str], texts: Mapping[str, str]) -> None:
        self.stand_ins, self.texts = stand_ins, texts

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        kept: list[ast.alias] = []
        placed: list[ast.stmt] = []
        for alias in node.names:
            stand_in = self.stand_ins.get(f"{node.module}.{alias.name}") if node.level == 0 else None
            if stand_in is None:
                kept.append(alias)
                continue
            module, _, name = stand_in.rpartition(".")
            called = alias.asname or alias.name
            placed.append(ast.ImportFrom(module, [ast.alias(name, None if called == name else called)], 0))
        return [ast.ImportFrom(node.module, kept, node.level), *placed] if kept else placed

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if not isinstance(node.value, str):
            return node
        value = node.value
        for old, new in self.texts.items():
            value = value.replace(old, new)
        return ast.Constant(self._program(value), node.kind)

    def _program(self, text: str) -> str:
        """A text that is a program, for another process to run, with other imports. Any other text as it is."""
        if not any(f"from {name.rpartition('.')[0]} import" in text for name in self.stand_ins):
            return text
        try:
            return rewritten(text, self.stand_ins)
        except SyntaxError:
            return text
