"""The rate of the input side, in samples/s that the CPUs, network, storage, hub and workers of a shape can deliver."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offload.errors import ConfigError
from offload.model.blocks import STORE_SHARE, block_rows, hub_slowdown, most_block_bytes, room_with_hub
from offload.model.catalog import NodeType, Shape
from offload.model.checks import check_number
from offload.model.feeds import fewest_feeds
from offload.model.overlap import Floats, plain

# CPU time that the daemons of two hosts spend on a byte that travels between them, measured on cores of speed 1: the two-host
# rows of benchmarks/results/offload_vs_single-*.json cost 1.4 to 1.6 ns more than the one-host rows.
REMOTE_CORE_SECONDS_PER_BYTE = 1.4e-9
NETWORK_EFFICIENCY = 0.8  # eta: payload of a NIC relative to its nominal bandwidth
BYTES_PER_GIGABIT = 1e9 / 8
GIB = 1 << 30
BOTTLENECKS = ("cpu", "network", "ingest", "storage", "hub")


@dataclass(frozen=True)
class InputRate:
    """The smallest of five limits::

        cpu      max X_local + X_remote  with each  ≤ Σ_g nodes_g · core_speed_g · c_g / (w·(1 + sigma·(c_g − 1)))
        network  the same, with  X_remote ≤ eta·ΣNIC_cpu / wire_bytes  and
                 X_remote + b·X_local ≤ eta·ΣNIC_gpu / wire_bytes
        ingest   K · (samples/s that one worker can receive, collate and copy to its device)
        storage  bytes/s of the store / raw bytes per sample
        hub      F · samples of a block / (hub_block_s · hub_slowdown(K/F)) with F feeds, which hand out the blocks of K/F workers each
                 (:mod:`offload.model.blocks`, :mod:`offload.model.feeds`)

    ``c_g`` are the cores of a node that preprocess: all cores of a CPU node, and those that workers leave free on a GPU node.
    A sample that travels from one node to another costs each of the two another ``remote_core_seconds_per_byte·wire_bytes/2``: what
    GPU nodes receive, they preprocess less. All samples of CPU nodes travel. A sample of a GPU node goes to a worker there as long as that
    one takes them; the share ``b`` goes to others: what nodes make beyond the share of all samples that their workers take. Network cards
    carry as much in either direction at once.

    Where it stops: gradients are not counted on the network cards. They cost the step its time (:class:`StepTime`). In a pass of fixed
    order, such as that of ``deterministic=True``, more samples travel between GPU nodes: the share ``1 − 1/G`` for G nodes.

    Args:
        core_seconds_per_sample: w, CPU time of one sample on a core of speed 1, with its node's other cores busy.
        wire_bytes_per_sample: bytes shipped from a preprocessing task to a worker.
        contention: sigma in [0, 1]: how much each further busy core of a node slows all of them down. 0 if w was
            measured with all cores busy.
        ingest_samples_per_s_per_worker: the rate that one worker can take in.
        raw_bytes_per_sample: bytes read from storage.
        storage_bytes_per_s: the rate at which the store delivers to all nodes together.
        host_cpus_per_worker: cores of a GPU node that each of its workers keeps for its own threads.
        remote_core_seconds_per_byte: CPU time of both ends together, on cores of speed 1.
        hub_block_s: CPU time that a feed, such as the hub, spends on a block, with 32 workers; 0: none.

    Raises:
        ConfigError: for a value out of its range.
    """

    core_seconds_per_sample: float
    wire_bytes_per_sample: float
    contention: float = 0.0
    ingest_samples_per_s_per_worker: float = math.inf
    raw_bytes_per_sample: float = 0.0
    storage_bytes_per_s: float = math.inf
    host_cpus_per_worker: float = 1.0
    remote_core_seconds_per_byte: float = 0.0
    hub_block_s: float = 0.0

    def __post_init__(self) -> None:
        check_number("core_seconds_per_sample", self.core_seconds_per_sample, above=0.0)
        check_number("wire_bytes_per_sample", self.wire_bytes_per_sample)
        check_number("contention", self.contention, most=1.0)
        check_number("ingest_samples_per_s_per_worker", self.ingest_samples_per_s_per_worker, above=0.0, infinite=True)
        check_number("raw_bytes_per_sample", self.raw_bytes_per_sample)
        check_number("storage_bytes_per_s", self.storage_bytes_per_s, above=0.0, infinite=True)
        check_number("host_cpus_per_worker", self.host_cpus_per_worker)
        check_number("remote_core_seconds_per_byte", self.remote_core_seconds_per_byte)
        check_number("hub_block_s", self.hub_block_s)

    def samples_per_s(self, shape: Shape, workers: ArrayLike, local_batch_size: ArrayLike = 1) -> Any:
        """The input ceiling of ``shape`` with ``workers`` workers spread evenly over its GPU nodes, over broadcast
        arrays (a float for scalars). Blocks hold whole local batches, if possible."""
        return plain(self.ceiling(shape, workers, local_batch_size)[0])

    def bottleneck(self, shape: Shape, workers: ArrayLike, local_batch_size: ArrayLike = 1) -> Any:
        """The limit that binds: "cpu", "network", "ingest", "storage" or "hub"; the first of them if several are equal."""
        return plain(np.array(BOTTLENECKS)[self.ceiling(shape, workers, local_batch_size)[1]])

    def ceiling(
        self, shape: Shape, workers: ArrayLike, local_batch_size: ArrayLike
    ) -> tuple[Floats, NDArray[np.int64]]:
        """The input ceiling, and the place of the limit that binds in ``BOTTLENECKS``; both are arrays."""
        limits = self._limits(shape, workers, local_batch_size)
        return np.asarray(np.min(limits, axis=0)), np.asarray(np.argmin(limits, axis=0))

    def _limits(self, shape: Shape, workers: ArrayLike, local_batch_size: ArrayLike = 1) -> Floats:
        k = np.asarray(workers, dtype=float)
        if np.any(~(k >= 1)):
            raise ConfigError(f"the number of workers must be at least 1, found {np.min(k):g}.")
        w, one_end = self.core_seconds_per_sample, self.remote_core_seconds_per_byte * self.wire_bytes_per_sample / 2
        local, between, nic_gpu = self._gpu_nodes(shape, k)
        remote, nic_cpu = np.zeros(()), np.zeros(())
        for kind, count in shape.of(gpu=False):
            remote = remote + count * self._node_rate(kind, np.asarray(float(kind.vcpus)), one_end)
            nic_cpu = nic_cpu + count * kind.network_gbps
        # A sample from a CPU node takes the cores of its GPU node from as much of a local one.
        instead = one_end / (w + 2 * one_end * between)
        cpu = _most(local, remote, instead, between, np.asarray(np.inf))
        wire = cpu
        if self.wire_bytes_per_sample > 0:
            samples_per_gigabit = NETWORK_EFFICIENCY * BYTES_PER_GIGABIT / self.wire_bytes_per_sample
            wire = _most(
                local,
                np.minimum(remote, nic_cpu * samples_per_gigabit),
                instead,
                between,
                nic_gpu * samples_per_gigabit,
            )
        storage = np.inf
        if self.raw_bytes_per_sample > 0:
            storage = self.storage_bytes_per_s / self.raw_bytes_per_sample
        ingest = k * self.ingest_samples_per_s_per_worker
        hub = self._hub(shape, k, local_batch_size) if self.hub_block_s > 0 else np.inf
        limits = np.broadcast_arrays(cpu, wire, ingest, storage, hub)
        return np.stack(limits).astype(np.float64)

    def _hub(self, shape: Shape, workers: Floats, local_batch_size: ArrayLike) -> Floats:
        """Samples/s of which the feeds of a run hand out the blocks. Tasks are sized for all cores alike, and cut to a node's store."""
        w, size = self.core_seconds_per_sample, self.wire_bytes_per_sample
        held = workers / sum(count for _, count in shape.of(gpu=True))
        groups = [
            (kind, count, np.maximum(kind.vcpus - held * self.host_cpus_per_worker * bool(kind.gpus), 0.0))
            for kind, count in shape.nodes.items()
        ]
        stores = {kind: STORE_SHARE * kind.memory_gib * GIB for kind, _, _ in groups}
        cores = np.asarray(sum(count * own for _, count, own in groups))
        most_bytes = most_block_bytes(sum(count * stores[kind] for kind, count, _ in groups), cores)
        rates = [count * self._node_rate(kind, own, 0.0) for kind, count, own in groups]
        made = np.asarray(sum(rates))
        limits: dict[int, Floats] = {}

        def busy(feeds: int) -> Floats:
            whole = block_rows(w, size, cores / feeds, most_bytes, local_batch_size)
            blocks = np.zeros(())
            for (kind, _, own), rate in zip(groups, rates, strict=True):
                most = room_with_hub(most_block_bytes(stores[kind], own), w, size, cores / feeds)
                room = np.maximum(np.floor(most / max(size, 1.0)), 1.0)
                blocks = blocks + rate / np.minimum(whole, room)
            rows = np.divide(made, blocks, out=np.ones(np.broadcast(made, blocks).shape), where=blocks > 0)
            limits[feeds] = np.asarray(feeds * rows / (self.hub_block_s * hub_slowdown(workers / feeds)))
            return made / limits[feeds]

        chosen, limit = fewest_feeds(busy, cores, workers), np.zeros(())
        for feeds, of_feeds in limits.items():
            limit = np.where(chosen == feeds, of_feeds, limit)
        return np.asarray(limit)

    def _gpu_nodes(self, shape: Shape, workers: Floats) -> tuple[Floats, Floats, Floats]:
        """Samples/s preprocessed on the workers' own nodes, the share of them that travels to another such node, and the network of these
        nodes in Gb/s."""
        total = np.asarray(sum(count for _, count in shape.of(gpu=True)), dtype=float)
        if np.any(total < 1):
            raise ConfigError("a shape needs at least one GPU node for its workers, found none.")
        fewer = np.floor(workers / total)
        with_one_more = workers - fewer * total
        nic = np.zeros(())
        groups: list[tuple[NodeType, Floats, Floats, Floats]] = []  # type, nodes, workers of each, its free cores
        for kind, count in shape.of(gpu=True):
            # Some nodes hold one worker more than the others, in proportion on each type.
            share = count / total
            for nodes, held in ((count - with_one_more * share, fewer), (with_one_more * share, fewer + 1)):
                groups.append((kind, nodes, held, np.maximum(kind.vcpus - held * self.host_cpus_per_worker, 0.0)))
            nic = nic + count * kind.network_gbps
        produced = [nodes * self._node_rate(kind, free, 0.0) for kind, nodes, _, free in groups]
        all_made = np.maximum(sum(produced), np.finfo(float).tiny)
        beyond = [
            rate / all_made - nodes * held / workers for rate, (_, nodes, held, _) in zip(produced, groups, strict=True)
        ]
        between = np.asarray(sum(np.maximum(surplus, 0.0) for surplus in beyond))
        both_ends = self.remote_core_seconds_per_byte * self.wire_bytes_per_sample
        rate = sum(nodes * self._node_rate(kind, free, between * both_ends) for kind, nodes, _, free in groups)
        return np.asarray(rate), between, nic

    def _node_rate(self, kind: NodeType, cores: Floats, travel: Floats | float) -> Floats:
        """Samples/s of a node where each sample costs ``travel`` core-seconds besides its preprocessing."""
        slowed = 1 + self.contention * np.maximum(cores - 1, 0.0)
        return np.asarray(kind.core_speed * cores / (self.core_seconds_per_sample * slowed + travel))


def _most(local: Floats, remote: Floats, instead: Floats, between: Floats, nic: Floats) -> Floats:
    """The largest sum of x samples/s from CPU nodes and y from GPU nodes, with x ≤ ``remote``, y + ``instead``·x ≤ ``local`` (or y = 0),
    and x + ``between``·y ≤ ``nic``.

    The sum is linear in x between its ends, the x where the cores of the GPU nodes and their network cards bind at once, and the x from
    which on y = 0. From there on it rises, so one of the first three is the best.
    """
    most = np.minimum(remote, nic)
    with np.errstate(invalid="ignore", divide="ignore"):
        both = np.clip(np.nan_to_num((nic - between * local) / (1 - instead * between), posinf=0.0), 0.0, most)
    totals = []
    for x in (np.zeros(()), both, most):
        with np.errstate(invalid="ignore", divide="ignore"):
            carried = np.where(between > 0, (nic - x) / between, np.inf)
        totals.append(x + np.maximum(np.minimum(local - instead * x, carried), 0.0))
    best: Floats = np.max(np.broadcast_arrays(*totals), axis=0)
    return best
