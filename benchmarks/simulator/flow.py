"""Samples/s that cores, links, workers and the hub let through: the fluid limit of blocks that flow from many cores.

Written apart from the product's input rate, which is under test here: GPU nodes are alike, so that the flow has a closed form. Two
rules alone are the product's (:mod:`offload.model.blocks`, :mod:`offload.model.feeds`): they are what the hub does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.simulator.job import Fleet, Floats, Job
from offload.model import blocks
from offload.model.blocks import STORE_SHARE, most_block_bytes, room_with_hub
from offload.model.catalog import NodeType
from offload.model.feeds import fewest_feeds

BYTES_PER_S = 1e9 / 8  # of one Gb/s


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Limits in samples/s, and the blocks that carry them."""

    made: Floats
    """By cores, with what links take from them."""
    ingest: Floats
    hub: Floats
    rows_per_block: Floats
    bottleneck_is_link: Floats
    """1 where the links of the CPU nodes or of the workers carry less than the cores make."""

    @property
    def samples_per_s(self) -> Floats:
        """The least of all."""
        return np.minimum(np.minimum(self.made, self.ingest), self.hub)


def flow(
    job: Job,
    fleet: Fleet,
    *,
    local_batch: Floats | float = 1.0,
    helpers: Floats | None = None,
    host_cores: float | None = None,
) -> Flow:
    """The flow through a fleet.

    Args:
        helpers: CPU nodes that are present, if they are not all; fractions are means over time.
        host_cores: cores of each GPU node that preprocess, if they are not all that its workers leave.
    """
    hosts = np.asarray(fleet.hosts, dtype=float)
    far_nodes = np.asarray(fleet.helpers if helpers is None else helpers, dtype=float)
    free = fleet.near_cores(job)
    near = (free if host_cores is None else np.minimum(hosts * host_cores, free)) * job.speed(fleet.host)
    one_end = job.travel_s_per_byte * job.wire_bytes / 2
    far, link = np.zeros(()), np.full((), np.inf)
    if fleet.helper is not None:
        far = far_nodes * fleet.helper.vcpus * job.speed(fleet.helper) / (job.core_seconds + one_end)
        card = job.link_share * BYTES_PER_S / max(job.wire_bytes, 1e-9)
        link = np.minimum(far_nodes * fleet.helper.network_gbps, hosts * fleet.host.network_gbps) * card
    # Everything from afar costs the receiving node its end of the way. Where it has no such cores, the workers' own threads pay.
    travels = np.minimum(far, link)
    near_alone = near / job.core_seconds
    # Where a sample costs less than its way, the feed's workers take what is near.
    made = np.maximum(travels + np.maximum(near - travels * one_end, 0.0) / job.core_seconds, near_alone)
    far_share = np.divide(travels, made, out=np.zeros(np.broadcast(travels, made).shape), where=made > 0)
    tried: dict[int, tuple[Floats, Floats]] = {}  # samples of a block and samples/s, by the number of feeds

    def busy(feeds: int) -> Floats:
        rows_near, rows_far = block_rows(job, fleet, local_batch, feeds)
        rows = 1 / ((1 - far_share) / rows_near + far_share / rows_far)
        hub = np.full((), np.inf)
        if job.hub is not None:
            per_block = np.vectorize(job.hub.block_s, otypes=[float])(fleet.workers / feeds)
            hub = feeds * rows / per_block
        tried[feeds] = rows, hub
        return np.asarray(made / hub)

    if job.feeds is None:
        chosen = fewest_feeds(busy, fleet.cores(job), fleet.workers)
    else:
        busy(job.feeds)
        chosen = np.full((), job.feeds)
    rows, hub = (
        np.select([chosen == feeds for feeds in tried], [each[of] for each in tried.values()]) for of in (0, 1)
    )
    ingest = np.asarray(fleet.workers * job.ingest_samples_per_s, dtype=np.float64)
    made, ingest, hub, rows = np.broadcast_arrays(made, ingest, hub, rows)
    return Flow(
        made=made, ingest=ingest, hub=hub, rows_per_block=rows, bottleneck_is_link=np.asarray(far > link, dtype=float)
    )


def block_rows(job: Job, fleet: Fleet, local_batch: Floats | float, feeds: int = 1) -> tuple[Floats, Floats]:
    """Samples of a full block from a GPU node and from a CPU node, by the rule of the product's feed over arrays.

    Tasks are sized for all cores alike, in whole local batches if possible, and then cut to what a node's store has room for.
    One of several ``feeds`` has its share of the cores.
    """
    near = fleet.near_cores(job) / np.maximum(fleet.hosts, 1)
    stores, cores = fleet.hosts * store_bytes(fleet.host), fleet.cores(job)
    room_near = room_far = most_block_bytes(store_bytes(fleet.host), near)
    if fleet.helper is not None:
        stores = stores + fleet.helpers * store_bytes(fleet.helper)
        room_far = most_block_bytes(store_bytes(fleet.helper), fleet.helper.vcpus)
    size = max(job.wire_bytes, 1.0)
    whole = blocks.block_rows(job.core_seconds, size, cores / feeds, most_block_bytes(stores, cores), local_batch)
    rows_near, rows_far = (
        np.maximum(np.minimum(whole, np.floor(room_with_hub(room, job.core_seconds, size, cores / feeds) / size)), 1.0)
        for room in (room_near, room_far)
    )
    return rows_near, rows_far


def store_bytes(kind: NodeType) -> float:
    """The object store of a node of this type."""
    return STORE_SHARE * kind.memory_gib * 2**30
