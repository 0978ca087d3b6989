"""Why Ray ended an actor's process, and which classes of actors a process had."""

from __future__ import annotations

from typing import Any

from offload.ray_private.part import Part

PART = Part(
    name="ends of actors",
    purpose="say that Ray ended a worker to free memory, and hide its own message on the death of a worker",
    without="the run reports the process's exit status alone",
    cost="the report of a worker that Ray ended says only that a signal did",
    needs=("ray._private.state:actors(actor_id)",),
)

OUT_OF_MEMORY = "oom_context"  # Ray's name for its memory monitor's reason


def ran_out_of_memory(actor_id: str) -> bool:
    """Return whether Ray ended the process of this actor to free memory. False if Ray does not tell."""

    def private() -> bool:
        from ray._private.state import actors

        cause: Any = actors(actor_id)["DeathCause"]
        return cause is not None and cause.WhichOneof("context") == OUT_OF_MEMORY

    return PART.use(private, otherwise=lambda: False)


def classes_of(pid: int) -> set[str]:
    """The names of the classes of the actors with this process id, dead ones included; empty if Ray does not tell."""

    def private() -> set[str]:
        from ray._private.state import actors

        known: Any = actors()
        return {actor["ActorClassName"] for actor in known.values() if actor["Pid"] == pid}

    return PART.use(private, otherwise=set)
