"""A recipe: the reader and the transform of a data set, and what they need in the process that runs them.

Where it stops: :mod:`offload.pipeline.preprocessing.processing` runs a recipe on index rows, and :mod:`offload.pipeline.feed.feed` decides
on which.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from offload.errors import FAILURES, RunError
from offload.pipeline.blocks.wire import SAMPLE_ID
from offload.pipeline.index.source import Reader
from offload.pipeline.order.chunks import Calls
from offload.pipeline.preprocessing.environment import hold_to_one_core
from offload.pipeline.preprocessing.randomness import Held, held_by
from offload.pipeline.preprocessing.wording import Words, say
from offload.pipeline.program.surroundings import Program

OnError = Literal["raise", "skip"]
Kind = Literal["none", "batch", "sample", "image", "generator"]
"""What a transform takes: nothing, a batch, a sample, an image; ``"generator"``: a sample, for which it yields any number of samples."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a task needs besides its rows.

    ``program``: its surroundings, which must be the first field: a process unpickles the others in them. ``transform`` may be a class; the
    process that runs it then constructs it.
    ``dataset``: the data set's name, for messages.
    ``sample_timeout_s``: the longest time that a sample may take. ``whole``: samples travel as they are, not as columns
    (:mod:`offload.pipeline.blocks.whole_samples`). ``seeded_by``: the column of index rows whose number seeds a sample's random numbers; it
    is the position if a pass draws samples repeatedly. ``parts``: the recipes of the data sets that were mixed, if any, and
    ``part_names`` their names. ``calls``: the size of the reader's and the transform's calls. ``held``: the generators
    of random numbers that the transform holds, once it is ready. ``setup``: the user's function, which each process calls before all else.
    """

    program: Program = field(default_factory=Program.here)
    transform: Any
    kind: Kind
    seed: int
    on_error: OnError = "raise"
    reader: Reader | None = None
    dataset: str = ""
    sample_timeout_s: float | None = None
    whole: bool = False
    seeded_by: str = SAMPLE_ID
    parts: tuple[Recipe, ...] = ()
    part_names: tuple[str, ...] = ()
    calls: Calls = field(default_factory=Calls)
    held: Held = ()
    setup: Callable[[], object] | None = None

    @property
    def words(self) -> Words:
        """Words for errors about its samples."""
        describe = None if self.reader is None else self.reader.describe
        name = "" if self.kind == "none" else _name(self.transform, self.kind)
        return Words(describe=describe, transform=name, dataset=self.dataset)

    @property
    def members_vary(self) -> bool:
        """Whether its samples may lack columns that others have. A user's transform decides itself what it returns."""
        return self.kind == "none" and self.reader is not None and self.reader.members_vary

    def ready(self) -> Self:
        """Prepare this recipe in this process: construct the transform, import its libraries and limit them to one thread.

        Raises RunError for a ``setup``, a transform class, or a factory of a data set that raises.
        """
        if self.setup is not None:
            self._set_up(self.setup)
        transform = self.transform
        if isinstance(transform, type):
            try:
                transform = transform()
            except FAILURES as error:
                raise RunError(
                    f"the transform class {self.words.transform} raised {say(error)} when it was constructed on a "
                    "preprocessing process. Correct its constructor: it runs on every node, without arguments."
                ) from None
        _import_ahead(transform)
        if self.reader is not None:
            self.reader.prepare()
        hold_to_one_core()
        calls = Calls()
        if self.parts or self.sample_timeout_s is not None:  # a late sample is to be found within a chunk
            calls.fix()
        parts = tuple(part.ready() for part in self.parts)
        for part in parts:
            # Parts share the rows of a call, so none of them may change its size.
            part.calls.fix()
        return dataclasses.replace(self, transform=transform, parts=parts, calls=calls, held=held_by(transform))

    def _set_up(self, setup: Callable[[], object]) -> None:
        try:
            setup()
        except FAILURES as error:
            name = getattr(setup, "__qualname__", type(setup).__name__)
            raise RunError(
                f"setup ({name}) raised {say(error)} on a preprocessing process. Correct it: each process calls it without arguments, "
                "before its first sample."
            ) from None


def _name(transform: Any, kind: Kind) -> str:
    if kind == "image":
        return getattr(transform, "__qualname__", None) or repr(transform)
    return str(getattr(transform, "__qualname__", type(transform).__name__))


def _import_ahead(transform: Any) -> None:
    """Import the libraries that the transform's code would import at its first run. Libraries loaded later would be neither seeded
    nor limited to one core."""
    function = transform if hasattr(transform, "__code__") or transform is None else type(transform).__call__
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    # Those whose random numbers and threads are set here.
    for library in ("torch", "cv2"):
        if any(name.split(".")[0] == library for name in names):
            with contextlib.suppress(ImportError):  # the transform's own import raises a better error
                importlib.import_module(library)
