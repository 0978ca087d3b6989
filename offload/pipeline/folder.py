"""The folder in which a program runs. Ray's processes run where Ray was started, but the program's paths may be relative to its own."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Folder:
    """A folder. A process enters it as it unpickles it, if there is such a folder on its node. A recipe pickles it before the data set,
    whose own unpickling may open files."""

    path: str

    @classmethod
    def here(cls) -> Folder:
        """This process's."""
        try:
            return cls(os.getcwd())
        except FileNotFoundError:  # it has been removed
            return cls("")

    def enter(self) -> None:
        """Enter it."""
        with contextlib.suppress(OSError):
            os.chdir(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _entered, (self.path,)


def _entered(path: str) -> Folder:
    folder = Folder(path)
    folder.enter()
    return folder
