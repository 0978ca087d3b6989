"""What other nodes would bring, according to the model: the same accelerators alone, and the best next step.

The model scales the run's own measurements: with the run's nodes it gives the measured rate. It is :class:`offload.model.JointGoodput`
with one measured step time and :class:`offload.model.InputRate`, and the workers and their batch stay as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offload.errors import ConfigError
from offload.measure.steps import INPUT_BOUND
from offload.model.blocks import HUB_BLOCK_S, STORE_SHARE
from offload.model.catalog import NodeType, Shape
from offload.model.goodput import OVERLAP, JointGoodput
from offload.model.input_rate import GIB, REMOTE_CORE_SECONDS_PER_BYTE, InputRate
from offload.model.step_time import StepTime
from offload.report.page.measured import Measurements
from offload.report.page.money import Prices
from offload.report.page.node_history import Node

MOST_NODES = 32  # further nodes that an advice considers
KNEE = 0.97  # share of the best reachable rate with which an advice is content
WORTH_IT = 0.03  # least relative gain that makes an advice
# Network and memory of a node of which they are unknown: the model then never lets them bind.
UNLIMITED_GBPS, UNLIMITED_GIB = 1e6, 1e6


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A rate on some nodes: measured, or predicted by the model.

    Args:
        nodes: their kinds and counts.
        samples_per_s, stall: the throughput, and the share of the step time spent waiting for data.
        usd_per_hour: the price of the nodes; None if one is unknown.
    """

    nodes: Mapping[str, int]
    samples_per_s: float
    stall: float
    usd_per_hour: float | None

    @property
    def usd_per_million(self) -> float | None:
        """Dollars per million samples."""
        if self.usd_per_hour is None or self.samples_per_s <= 0:
            return None
        return self.usd_per_hour / 3600 / self.samples_per_s * 1e6


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Nodes of one kind, as the model sees them. ``usd_per_hour``: None if unknown."""

    type: NodeType
    usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """The model of a run at its last size.

    Args:
        measured: the measurements at this size.
        kinds: the kinds of nodes by name, those of the run and those that could join.
        now: the run's nodes: a count by kind.
        input: the cost of a sample.
        input_samples_per_s: the input's rate on these nodes.
    """

    measured: Measurements
    kinds: Mapping[str, Kind]
    now: Mapping[str, int]
    input: InputRate
    input_samples_per_s: float

    def at(self, nodes: Mapping[str, int]) -> Predicted | None:
        """The rate with other nodes; None if the model has no answer, as for nodes without a worker."""
        nodes = {name: count for name, count in nodes.items() if count}
        usd = [self.kinds[name].usd_per_hour for name in nodes]
        price = (
            None if None in usd else math.fsum(n * u for n, u in zip(nodes.values(), usd, strict=True) if u is not None)
        )
        try:
            # Only the ratio comes from the model, so that its constant errors cancel.
            ratio = self.modelled(nodes) / self.modelled(self.now)
        except (ConfigError, ZeroDivisionError):
            return None
        if not ratio > 0:
            return Predicted(nodes=nodes, samples_per_s=0.0, stall=1.0, usd_per_hour=price)
        size = self.measured.global_batch_size
        working_s = max(self.measured.working_s, 1e-9)
        joint = JointGoodput(
            StepTime(alpha_compute=working_s, beta_compute=0.0), None, self.input_samples_per_s * ratio, overlap=OVERLAP
        )
        step_s = float(joint.step_time_s(1, 1, size, 0))
        return Predicted(
            nodes=nodes, samples_per_s=size / step_s, stall=max(1 - working_s / step_s, 0.0), usd_per_hour=price
        )

    def bottleneck(self, nodes: Mapping[str, int]) -> str:
        """The part of the input that binds on these nodes: ``cpu``, ``network`` or ``hub``."""
        return str(self.input.bottleneck(*self._at(nodes)))

    def modelled(self, nodes: Mapping[str, int]) -> float:
        """The input's samples/s on these nodes, by the model alone."""
        return float(self.input.samples_per_s(*self._at(nodes)))

    def _at(self, nodes: Mapping[str, int]) -> tuple[Shape, int, int]:
        return self._shape(nodes), self.measured.workers, self.measured.local_batch_size

    def _shape(self, nodes: Mapping[str, int]) -> Shape:
        return Shape({self.kinds[name].type: count for name, count in nodes.items() if count})


def model_of(measured: Measurements, nodes: Sequence[Node], prices: Prices) -> RunModel | str:
    """The model of a run on these nodes, or the reason in words why the run's records do not support one."""
    training = [node for node in nodes if node.training]
    if not nodes or not training:
        return "the run directory does not say which nodes held the workers"
    if measured.core_seconds_per_sample is None or measured.cores is None:
        return "the run directory has no measurement of the preprocessing cores"
    rate = _input_rate(measured)
    if rate is None:
        return "the run directory has no measurement of the input's rate"
    kinds: dict[str, Kind] = {}
    counts: Counter[str] = Counter()
    for node in nodes:
        trains = bool(node.training)
        name = _name(node, trains, nodes)
        counts[name] += 1
        kinds.setdefault(name, Kind(type=_type(name, node, trains, prices), usd_per_hour=prices.of_node(node)))
    for name, kind in prices.catalog.nodes.items():
        if not kind.gpus and name not in kinds:
            kinds[name] = Kind(
                type=kind, usd_per_hour=prices.own.get(name, prices.recorded.get(name, kind.usd_per_hour))
            )
    reserved = sum(node.cpus for node in nodes) - measured.cores
    input_rate = InputRate(
        core_seconds_per_sample=measured.core_seconds_per_sample,
        wire_bytes_per_sample=measured.wire_bytes_per_sample or 0.0,
        host_cpus_per_worker=max(reserved, 0.0) / measured.workers,
        remote_core_seconds_per_byte=REMOTE_CORE_SECONDS_PER_BYTE,
        hub_block_s=HUB_BLOCK_S,
    )
    model = RunModel(measured=measured, kinds=kinds, now=dict(counts), input=input_rate, input_samples_per_s=rate)
    return _with_own_hub(model)


def _with_own_hub(model: RunModel) -> RunModel:
    """The model with a hub that is at least as fast as the run has shown, and an input that is no faster than this hub."""
    if model.bottleneck(model.now) != "hub":
        return model
    measured, limit = model.measured, model.modelled(model.now)
    # While workers wait, the input's rate is measured, the hub's part included. Otherwise it is that of the cores alone.
    shown = model.input_samples_per_s if measured.stall >= INPUT_BOUND else measured.samples_per_s
    faster = max(shown / limit, 1.0)
    return replace(
        model,
        input=replace(model.input, hub_block_s=model.input.hub_block_s / faster),
        input_samples_per_s=min(model.input_samples_per_s, faster * limit),
    )


def alone(model: RunModel) -> Predicted | None:
    """The same accelerators without the nodes beside them; None if there are no such nodes."""
    hosts = {name: count for name, count in model.now.items() if model.kinds[name].type.gpus}
    return None if hosts == dict(model.now) else model.at(hosts)


def best_step(model: RunModel) -> tuple[str, int, Predicted] | None:
    """The best change of the CPU nodes: (kind, difference of their count, prediction); None if no change is worth it.

    While the input binds, more nodes of the kind that the run has, or of the best kind in the catalog: those with the least dollars per
    sample, or without prices the fewest that reach ``KNEE`` of the best rate. Otherwise fewer nodes, if the rate then stays.
    """
    now = model.at(model.now)
    if now is None:
        return None
    beside = [name for name in model.now if not model.kinds[name].type.gpus]
    if model.measured.stall < INPUT_BOUND:
        return _fewer(model, now, beside)
    known = all(model.kinds[name].usd_per_hour is not None for name in model.now)
    kinds = beside or ([name for name, kind in model.kinds.items() if not kind.type.gpus] if known else [])
    steps = [
        (kind, more, predicted)
        for kind in kinds
        for more in range(1, MOST_NODES + 1)
        if (predicted := model.at({**model.now, kind: model.now.get(kind, 0) + more})) is not None
    ]
    steps = [step for step in steps if step[2].samples_per_s > (1 + WORTH_IT) * now.samples_per_s]
    if not steps:
        return None
    if all(step[2].usd_per_hour is not None for step in steps):
        # A hundredth of the price is not worth fewer nodes: among almost equal prices, the faster wins.
        least = min(step[2].usd_per_million or math.inf for step in steps)
        near = [step for step in steps if (step[2].usd_per_million or math.inf) <= 1.01 * least]
        return max(near, key=lambda step: step[2].samples_per_s)
    most = max(step[2].samples_per_s for step in steps)
    return min((step for step in steps if step[2].samples_per_s >= KNEE * most), key=lambda step: step[1])


def more_cores(model: RunModel) -> tuple[int, Predicted] | None:
    """Predict the rate with twice the preprocessing cores. It serves runs whose nodes have no instance type."""
    cores = model.measured.cores or 0
    host = next(name for name in model.now if model.kinds[name].type.gpus)
    if not cores:
        return None
    extra = replace(model.kinds[host].type, name="more cores", vcpus=cores, gpus=0, gpu_model=None, gpu_speed=None)
    wider = replace(model, kinds={**model.kinds, extra.name: Kind(type=extra, usd_per_hour=None)})
    predicted = wider.at({**model.now, extra.name: 1})
    return None if predicted is None else (cores, predicted)


def _fewer(model: RunModel, now: Predicted, beside: Sequence[str]) -> tuple[str, int, Predicted] | None:
    steps = []
    for kind in beside:
        for less in range(1, model.now[kind] + 1):
            predicted = model.at({**model.now, kind: model.now[kind] - less})
            if predicted is not None and predicted.samples_per_s >= KNEE * now.samples_per_s:
                steps.append((kind, -less, predicted))
    return min(steps, key=lambda step: step[1], default=None)


def _input_rate(measured: Measurements) -> float | None:
    """The rate of the input. While workers wait for it, it follows from the step time, so that the model gives the measured rate."""
    known = [rate for rate in (measured.input_ceiling, measured.input_pace) if rate is not None]
    if measured.stall < INPUT_BOUND:
        return max(min(known), measured.samples_per_s) if known else None
    # The model adds both times as step^p = working^p + input^p, with p = OVERLAP. Solve it for the input's time of a global batch.
    step_s, working_s = measured.step_s, measured.working_s
    ratio = min(working_s / step_s, 1.0) ** OVERLAP
    input_s = step_s * (1 - ratio) ** (1 / OVERLAP) if ratio < 1 else step_s
    return measured.global_batch_size / input_s


def _name(node: Node, trains: bool, nodes: Sequence[Node]) -> str:
    """The name of a node's kind. Nodes of one kind with and without workers are two kinds here."""
    mixed = len({bool(other.training) for other in nodes if other.kind == node.kind}) > 1
    sizes = len({other.cpus for other in nodes if other.kind == node.kind}) > 1
    name = f"{node.kind} of {node.cpus:g} cores" if sizes else node.kind
    return f"{name} without workers" if mixed and not trains else name


def _type(name: str, node: Node, trains: bool, prices: Prices) -> NodeType:
    sold = prices.catalog.nodes.get(node.instance_type or "")
    memory_gib = UNLIMITED_GIB if sold is None else sold.memory_gib
    if node.store_bytes is not None:
        memory_gib = node.store_bytes / STORE_SHARE / GIB
    return NodeType(
        name=name,
        vcpus=max(int(node.cpus), 1),
        memory_gib=memory_gib,
        gpus=max(int(node.gpus), 1) if trains else 0,
        network_gbps=sold.network_gbps if sold is not None else UNLIMITED_GBPS,
        usd_per_hour=1.0,
        core_speed=sold.core_speed if sold is not None else 1.0,
    )
