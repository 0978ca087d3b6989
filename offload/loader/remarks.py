"""The remarks of a DataLoader to its program, on the logger ``offload``."""

from __future__ import annotations

import logging


class Remarks:
    """The remarks of a loader. It makes each kind of them once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def once(self, kind: str, text: str) -> None:
        """Make a remark, unless it has made one of this kind."""
        if kind not in self._said:
            self._said.add(kind)
            say(text)


def say(text: str) -> None:
    """Make a remark."""
    logging.getLogger("offload").warning("%s", text)
