"""All parts of Ray's private interface that offload uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.ray_private import (
    actor_ends,
    cluster_tables,
    data,
    draining,
    first_use,
    fork_cut,
    free_resources,
    job_client,
    library_settings,
    local_start,
    log_forwarding,
    membership,
    own_processes,
    preload,
)
from offload.ray_private.data import blocks
from offload.ray_private.part import Part

PARTS: tuple[Part, ...] = (
    preload.PART,
    data.PLANS,
    blocks.PART,
    local_start.PROCESSES,
    local_start.HELPERS,
    local_start.AGENTS,
    local_start.SETTINGS,
    own_processes.PART,
    first_use.PART,
    fork_cut.PART,
    log_forwarding.PART,
    library_settings.PART,
    library_settings.CONNECTION,
    membership.PART,
    membership.KNOWN_TOKEN,
    free_resources.PART,
    cluster_tables.PART,
    cluster_tables.AWAITED,
    cluster_tables.ACTOR_IDS,
    draining.PART,
    actor_ends.PART,
    actor_ends.LOGS,
    job_client.PART,
)


@dataclass(frozen=True, kw_only=True)
class FoundPart:
    """A part as this Ray has it. ``lacking``: the first thing that it lacks; None if the part is active."""

    name: str
    purpose: str
    lacking: str | None
    without: str
    cost: str

    @property
    def active(self) -> bool:
        """Whether offload uses it."""
        return self.lacking is None


def found_parts(parts: Sequence[Part] = PARTS) -> list[FoundPart]:
    """All parts, as this Ray has them. Imports much of Ray."""
    return [
        FoundPart(name=p.name, purpose=p.purpose, lacking=p.lacking(), without=p.without, cost=p.cost) for p in parts
    ]
