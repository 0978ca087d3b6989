"""What a program has set up around its objects, as its preprocessing processes should find it.

It is what :mod:`multiprocessing` hands to a process that it spawns: the search path of modules, the arguments, the working folder, the
environment, and the script itself. A recipe holds it as its first field, so that a process enters it before it unpickles the rest.

Where it stops: :mod:`offload.pipeline.program.pickling` carries the objects, :mod:`offload.pipeline.program.main_module` runs the script
again, :mod:`offload.pipeline.program.variables` chooses the variables, and :mod:`offload.pipeline.program.remedies` explains an error that
comes from what did not travel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import socket
import sys
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offload.pipeline.program import main_module
from offload.pipeline.program.main_module import MainModule
from offload.pipeline.program.variables import removed, travelling


@dataclass(frozen=True, kw_only=True)
class Program:
    """The surroundings of a program at one moment.

    A process enters them as it unpickles them, and the program itself does not.

    Args:
        process: the identity of the program's process.
        host: the name of its host.
        folder: its working folder; empty if that has been removed.
        path: its search path of modules.
        own_folders: those of its search path that exist and hold neither Python nor installed packages, of which each node has its own.
        arguments: ``sys.argv``.
        variables: the variables of its environment that travel, sorted.
        unset: the names of those that it has removed, sorted.
        main: its script; None if it has none that could run again.
    """

    process: tuple[str, int] = ("", 0)
    host: str = ""
    folder: str
    path: tuple[str, ...] = ()
    own_folders: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    unset: tuple[str, ...] = ()
    main: MainModule | None = None

    @classmethod
    def here(cls) -> Program:
        """Those of this process."""
        others = _set_by_ray()
        _known.update(os.environ)
        return cls(
            process=(_identity(), os.getpid()),
            host=socket.gethostname(),
            folder=_folder(),
            path=tuple(sys.path),
            own_folders=_own_folders(),
            arguments=tuple(sys.argv),
            variables=tuple(sorted(travelling(os.environ, _at_start(), others).items())),
            unset=tuple(removed(os.environ, {*_at_start(), *_known}, others)),
            main=main_module.of_this_process() if _entered is None else _entered.main,
        )

    def without(self, names: Collection[str]) -> Program:
        """The same without these variables, which somebody else sets."""
        return replace(
            self,
            variables=tuple((name, value) for name, value in self.variables if name not in names),
            unset=tuple(name for name in self.unset if name not in names),
        )

    def enter(self) -> None:
        """Make this process look like the program, unless it is that or has entered this before."""
        global _entered
        if self.process == (_identity(), os.getpid()) or self == _entered:
            return
        before, _entered = _entered, self
        self._impose(before)
        if self.main is not None and self.main.run_again():
            # The script may have extended sys.argv again, or set a variable that the program has changed since.
            self._impose(self)

    def _impose(self, before: Program | None) -> None:
        """Make this process's surroundings these, after those of ``before``."""
        others = {*self.path, *(() if before is None else before.path)}
        sys.path[:] = [*self.path, *(entry for entry in sys.path if entry not in others)]
        importlib.invalidate_caches()
        sys.argv[:] = self.arguments
        with contextlib.suppress(OSError):
            os.chdir(self.folder)
        _set_variables(dict(self.variables), self.unset)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (vars(self),)


def entered() -> Program | None:
    """The program that this process has entered last; None if it has entered none."""
    return _entered


_entered: Program | None = None
# The names of variables that this process, as a program, has had.
_known: set[str] = set()
# This process's own values of the variables that programs have changed. None: it had none.
_replaced: dict[str, str | None] = {}


def _unpickled(fields: Mapping[str, Any]) -> Program:
    program = Program(**fields)
    program.enter()
    return program


@functools.cache
def _identity() -> str:
    """A name for this process, which its forks share. Made at its first use: a server forks processes that are no program's."""
    return uuid.uuid4().hex


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed
        return ""


def _own_folders() -> tuple[str, ...]:
    installed = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    return tuple(entry for entry in sys.path if entry and not entry.startswith(installed) and os.path.exists(entry))


@functools.cache
def _at_start() -> Mapping[str, str]:
    """The environment with which this process began."""
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        entries = (os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0") if entry)
        return {name: value for name, _, value in entries}
    return {}


def _set_by_ray() -> Collection[str]:
    """The names of the variables that this job's processes get from Ray, since the user has asked for them."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ()
    return frozenset(ray.get_runtime_context().runtime_env.get("env_vars") or ())


def _set_variables(wanted: Mapping[str, str], unset: Collection[str]) -> None:
    """Give this process these variables, and back its own values of those that an earlier program has changed."""
    zone = os.environ.get("TZ")
    for name in _replaced.keys() - wanted.keys() - set(unset):
        _set_variable(name, _replaced.pop(name))
    for name, value in (*wanted.items(), *((name, None) for name in unset)):
        if os.environ.get(name) != value:
            _replaced.setdefault(name, os.environ.get(name))
            _set_variable(name, value)
    if os.environ.get("TZ") != zone:
        time.tzset()


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
