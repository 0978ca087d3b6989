"""Where an actor's process ran, why Ray ended it, and where its log is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.ray_private.part import Part

PART = Part(
    name="ends of actors",
    purpose="say how a worker's process ended: its node, its exit status, its log",
    without="the run reports Ray's own error",
    cost="the report of a worker's death does not say whether it was killed, ran out of memory or crashed",
    needs=("ray._private.state:actors(actor_id)",),
)

LOGS = Part(
    name="logs of workers",
    purpose="name the log file of a worker that died",
    without="the report of a death names no file",
    cost="the log must be looked for in Ray's session folder",
    needs=("ray._private.worker:_global_node", "ray._private.node:Node.get_logs_dir_path"),
)

OUT_OF_MEMORY = "oom_context"  # Ray's name for its memory monitor's reason


@dataclass(frozen=True, kw_only=True)
class ActorEnd:
    """What Ray knows of an actor's process. ``out_of_memory``: whether Ray ended it to free memory."""

    node_id: str
    address: str
    pid: int
    out_of_memory: bool


def actor_end(actor_id: str) -> ActorEnd | None:
    """What Ray knows of the process of an actor that has ended; None if it does not tell."""

    def private() -> ActorEnd:
        from ray._private.state import actors

        actor: Any = actors(actor_id)
        cause = actor["DeathCause"]
        return ActorEnd(
            node_id=actor["Address"]["NodeID"],
            address=actor["Address"]["IPAddress"],
            pid=int(actor["Pid"]),
            out_of_memory=cause is not None and cause.WhichOneof("context") == OUT_OF_MEMORY,
        )

    return PART.use(private, otherwise=lambda: None)


def log_of(pid: int) -> Path | None:
    """The file with the standard error of a process of this node; None if there is none, or Ray does not tell."""

    def private() -> Path | None:
        from ray._private.worker import _global_node

        node: Any = _global_node
        return max(Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.err"), default=None)

    return LOGS.use(private, otherwise=lambda: None)


def classes_of(pid: int) -> set[str]:
    """The names of the classes of the actors with this process id, dead ones included; empty if Ray does not tell."""

    def private() -> set[str]:
        from ray._private.state import actors

        known: Any = actors()
        return {actor["ActorClassName"] for actor in known.values() if actor["Pid"] == pid}

    return PART.use(private, otherwise=set)
