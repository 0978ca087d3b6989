"""All parts of Ray's private interface that offload uses."""

from __future__ import annotations

from collections.abc import Sequence

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
from offload.ray_private.part import FoundPart, Part

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
    job_client.PART,
)


def found_parts(parts: Sequence[Part] = PARTS) -> list[FoundPart]:
    """All parts, as this Ray has them. Imports much of Ray."""
    return [
        FoundPart(name=p.name, purpose=p.purpose, lacking=p.lacking(), without=p.without, cost=p.cost) for p in parts
    ]
