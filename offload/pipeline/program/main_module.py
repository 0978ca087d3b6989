"""The script of a program, run again in preprocessing processes under the name ``__mp_main__``, as :mod:`multiprocessing` does in processes
that it spawns.

What the script sets up at its top level is then there: a library's settings, openers and codecs, warning filters, loggers. Its source
travels, so a node needs no copy of the file. Only a script that tells the two names apart, by ``if __name__ == "__main__":``, runs again:
any other would start its work there.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import ConfigError

NAME = "__mp_main__"


class Setting(NamedTuple):
    """A statement at the top level of a script that changes another module: its line, its text, and that module's name."""

    line: int
    text: str
    module: str


@dataclass(frozen=True)
class MainModule:
    """A program's script.

    Args:
        path: its file.
        source: the content of the file.
        package: the package in whose name it imports, if it was started by ``python -m``.
        is_guarded: whether it can run again without starting its work.
    """

    path: str
    source: bytes = field(repr=False)
    package: str | None = None
    is_guarded: bool = True

    @property
    def name(self) -> str:
        """The name of its file."""
        return os.path.basename(self.path)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """What its top level changes in other modules."""
        return tuple(settings_of(self.source))

    @property
    def names(self) -> tuple[str, ...]:
        """The names that it has when it runs again; none if it does not."""
        return tuple(names_of(self.source)) if self.is_guarded else ()

    @property
    def is_here(self) -> bool:
        """Whether this process has it already: it is the program, a fork of it, or has run the script again."""
        return self.path == _file_of(script_module())

    def run_again(self) -> bool:
        """Make it this process's ``__main__``, and return whether it has run for that. An error of it leaves the module as far as it has
        come: see :func:`problem`."""
        global _problem
        if not self.is_guarded or self.is_here:
            return False
        _former.append(sys.modules["__main__"])  # functions at work may look names up there
        module = types.ModuleType(NAME)
        vars(module).update(__file__=self.path, __package__=self.package)
        sys.modules["__main__"] = sys.modules[NAME] = module
        _running.append(self)
        _problem = ""
        try:
            exec(compile(self.source, self.path, "exec", dont_inherit=True), vars(module))
        except (Exception, SystemExit) as error:
            _problem = self._says(error)
        finally:
            _running.pop()
        return True

    def _says(self, error: BaseException) -> str:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.path]
        line = lines[0] if lines else getattr(error, "lineno", None)
        where = "" if line is None else f" in line {line}"
        said = str(error) if isinstance(error, _AgainError) else f"{type(error).__name__}: {error}".rstrip(": ")
        return (
            f"preprocessing processes run {self.name} again under the name {NAME}, as multiprocessing's spawn does, and it ended{where}: "
            f"{said.rstrip('.')}. What follows there is not set up in them. Put what must not run again under "
            'if __name__ == "__main__":'
        )


class _AgainError(ConfigError):
    """The script would start its work again."""


_former: list[types.ModuleType] = []  # earlier modules __main__ of this process
_running: list[MainModule] = []  # the one that runs again now
_problem = ""
_imported: types.ModuleType | None = None  # the script that this command has imported instead of running it


def problem() -> str:
    """What went wrong when this process ran the script again; empty if nothing did."""
    return _problem


def refuse_again(what: str) -> None:
    """Raise ConfigError while this process runs a script again, which would start ``what`` there, too."""
    if _running:
        raise _AgainError(f"it would start {what} in each of them")


def imported(script: types.ModuleType) -> None:
    """Note that this module is the script of this ``offload`` command. The command has imported it, so it can run again without a guard."""
    global _imported
    _imported = script


def script_module() -> types.ModuleType:
    """The module of this program's script."""
    main = sys.modules["__main__"]
    is_command = _name_of(main) == "offload.__main__" or Path(_file_of(main) or "").stem == "offload"
    return _imported if _imported is not None and is_command else main


def of_this_process() -> MainModule | None:
    """The script of this program; None for a notebook, ``python -c``, a package's ``__main__``, and whatever else
    :mod:`multiprocessing` would not run again."""
    main = script_module()
    file = _file_of(main)
    if file is None or Path(file).stem == "ipython" or _name_of(main).split(".")[-1] == "__main__":
        return None
    package = getattr(getattr(main, "__spec__", None), "parent", None) or None
    return _read(file, package, is_safe=main is _imported)


def _name_of(main: Any) -> str:
    """The name under which ``python -m`` has found this module; empty for a script."""
    return str(getattr(getattr(main, "__spec__", None), "name", ""))


def _file_of(main: Any) -> str | None:
    file = getattr(main, "__file__", None)
    if not isinstance(file, str):
        return None
    return os.path.abspath(file)


@functools.cache
def _read(path: str, package: str | None, *, is_safe: bool = False) -> MainModule | None:
    try:
        source = Path(path).read_bytes()
        guarded = is_safe or has_guard(source)
    except (OSError, SyntaxError, ValueError):  # it has been removed, or is no Python source
        return None
    return MainModule(path, source, package, guarded)


# --- the source, pure ---------------------------------------------------------------------------------------------------


def has_guard(source: bytes) -> bool:
    """Return whether a script asks at its top level for its ``__name__``. Raises SyntaxError and ValueError for other files."""
    return any(_is_guard(statement) for statement in ast.parse(source).body)


def _is_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )


def names_of(source: bytes) -> Iterator[str]:
    """The variables that a script sets at its top level outside its guard."""
    waiting: list[ast.AST] = [statement for statement in ast.parse(source).body if not _is_guard(statement)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def settings_of(source: bytes) -> Iterator[Setting]:
    """The statements at a script's top level that change what it has imported: ``ImageFile.LOAD_TRUNCATED_IMAGES = True``,
    ``register_heif_opener()``."""
    modules: dict[str, str] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            modules |= {name.asname or name.name.split(".")[0]: name.name for name in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            modules |= {name.asname or name.name: f"{statement.module or ''}.{name.name}" for name in statement.names}
        elif (root := _changed(statement)) in modules:
            yield Setting(statement.lineno, ast.unparse(statement).splitlines()[0], modules[root])


def _changed(statement: ast.stmt) -> str:
    """The name of the thing of which a statement sets an attribute or an item, or which it calls; empty for other statements."""
    target: ast.expr | None = None
    if isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name):
        target = statement.targets[0]
    elif isinstance(statement, ast.AugAssign) and not isinstance(statement.target, ast.Name):
        target = statement.target
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        target = statement.value.func
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""
