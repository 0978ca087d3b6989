"""Keep forks of a process that has imported Ray from drawing the same ids. This is private to Ray.

Ray draws ids from a generator that it seeds at first use. A module that decorates a class with ``ray.remote`` uses it. Processes
forked after the import of such a module would therefore draw the same numbers. Ray then confuses the call of one with that of
another, and the actor that both call dies.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def drawn_elsewhere() -> Iterator[None]:
    """A context in which classes decorated with ``ray.remote`` get their ids from the operating system, if Ray has the class of such
    ids."""
    import ray.actor

    real: Any = getattr(ray.actor, "ActorClassID", None)
    if real is None:
        yield
        return

    class FromSystem:
        @staticmethod
        def from_random() -> Any:
            return real(os.urandom(real.size()))

    ray.actor.ActorClassID = FromSystem  # type: ignore[attr-defined, assignment, misc, unused-ignore]
    try:
        yield
    finally:
        ray.actor.ActorClassID = real  # type: ignore[attr-defined, misc, unused-ignore]


def repeat_in_forks() -> bool:
    """Return whether two forks of this process would draw the same ids."""
    return len({_drawn_in_a_fork() for _ in range(2)}) == 1


def _drawn_in_a_fork() -> bytes:
    from ray import NodeID  # any kind of id

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, NodeID.from_random().binary())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        drawn = pipe.read()
    os.waitpid(child, 0)
    return drawn
