"""A recipe on its way to preprocessing processes: pickled once, and unpickled and prepared once in each of them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

import offload.process.ray_forks  # noqa: F401  # a transform may fork
from offload.actors.values import Answer
from offload.errors import FAILURES, RunError, find_offload_error
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.watchdog import Watch
from offload.pipeline.preprocessing.wording import say
from offload.pipeline.program import main_module, pickling
from offload.pipeline.program.remedies import remedy


class TaskOutput(Protocol):
    """The output of a task. It may use the process's :class:`Scratch`, which the next task overwrites."""

    @property
    def num_rows(self) -> int:
        """The number of samples."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""


class TaskRecipe(Protocol):
    """The work of a kind of tasks. It travels to each process once, pickled."""

    def ready(self) -> Self:
        """Import and construct, in the process that works, what the work needs."""

    def process(self, rows: Any, *, epoch: int, scratch: Scratch, watch: Watch) -> TaskOutput:
        """Do the work of one task, and tell ``watch`` about it."""


def pack(recipe: Any, classes: list[type] | None = None) -> np.ndarray[Any, Any]:
    """The recipe as bytes, in an array: tasks read it in shared memory and unpickle it once per process. ``classes`` gets the classes that
    travel with it."""
    return np.frombuffer(pickling.dumps(recipe, classes), dtype=np.uint8)


_ready: dict[str, Any] = {}


_newest: dict[str, str] = {}  # the key of each owner's newest recipe


def unpack(key: str, packed: Callable[[], np.ndarray[Any, Any]], owner: str = "") -> Any:
    """The recipe ``key`` of this process, unpickled and prepared at its first use. It replaces an earlier one of the same ``owner``."""
    if key not in _ready:
        # Keep only the recipes of the newest few runs: one may hold a data set of millions of names.
        while len(_ready) >= 8:
            _ready.pop(next(iter(_ready)))
        if owner:
            _ready.pop(_newest.get(owner, ""), None)
            _newest[owner] = key
        _ready[key] = loaded(packed())
    return _ready[key]


def loaded(packed: np.ndarray[Any, Any]) -> Any:
    """The recipe, unpickled and prepared in this process. Raises RunError for an error that comes from what did not travel with it."""
    try:
        ready = pickling.loads(packed.tobytes()).ready()
    except FAILURES as error:
        if find_offload_error(error) is None and (mended := remedy(error)):
            raise RunError(
                f"a data set raised {say(error)} when a preprocessing process unpickled it.{mended}"
            ) from None
        raise
    finally:
        _tell_problem()
    return ready


def _tell_problem() -> None:
    """Print what went wrong when this process ran the program's script again, once. The program shows few equal lines."""
    problem = main_module.problem()
    if problem and problem not in _told:
        sys.stderr.write(f"{problem}\n")
        sys.stderr.flush()
    _told.add(problem)


_told: set[str] = set()  # problems


@dataclass(frozen=True, kw_only=True)
class PackedRecipe:
    """A recipe in the object store, or in the memory of this machine.

    Args:
        key: the key under which a process keeps it unpickled.
        ref: refers to its bytes.
        owner: of whose recipes a process keeps only the newest; empty: the recipe stands for itself.
        classes: those that travelled with it, which live in this process as long as their batches may come back.
    """

    key: str
    ref: Any
    owner: str = ""
    classes: tuple[type, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, recipe: TaskRecipe, owner: str = "", put: Callable[[Any], Any] | None = None) -> PackedRecipe:
        """Pack a recipe. ``put``: stores a value where the processes find it; by default, in Ray's object store."""
        classes: list[type] = []
        packed = pack(recipe, classes)
        # By content: two runs, or two loaders, with the same recipe share one unpickled copy in each process.
        key = hashlib.blake2b(packed.tobytes(), digest_size=16).hexdigest()
        return cls(key=key, ref=(put or _put_in_ray)(packed), owner=owner, classes=tuple(classes))

    def __getstate__(self) -> dict[str, Any]:
        # The classes stay here: they serve only to recognise objects that come back.
        return vars(self) | {"classes": ()}

    def ready(self) -> Any:
        """The recipe, unpickled once per process."""
        return unpack(self.key, self._packed, self.owner)

    def anew(self) -> Any:
        """The recipe, unpickled anew: what its objects store does not outlive their use."""
        return loaded(self._packed())

    def _packed(self) -> Any:
        if isinstance(self.ref, Answer):
            return self.ref.result()
        import ray

        return ray.get(self.ref)


def _put_in_ray(value: Any) -> Any:
    import ray

    return ray.put(value)
