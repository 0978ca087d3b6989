"""The simulator beside measured runs: each recorded case, what it was calibrated on, and how far it is off.

Inputs were measured apart from the outcome: core-seconds by a probe, the speed of hosts by plain loops beside the run, links and
accelerators as they were set. Nothing is fitted to a measured rate. What a record does not hold is left out, with the reason.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import simulated
from benchmarks.simulator.flow import BYTES_PER_S
from benchmarks.simulator.steps import batches
from offload.model import Profile
from offload.model.input_rate import REMOTE_CORE_SECONDS_PER_BYTE

RESULTS = Path(__file__).resolve().parent.parent / "results"
GOAL = 0.10
HEADERS = 0.95
"""Payload of an emulated link over its bits: headers of Ethernet, IP and TCP take the rest."""
TASK_VARIATION = 0.05
STEPS = 400

LEFT_OUT = {
    "peers.json, peers_blur.json: other libraries": "the simulator has this project's pipeline alone",
    "peers.json, tables.json: text and tables": "no probe's profile of these workloads is recorded",
    "one_machine*.json, loader.json: DataLoader": "its tasks and processes are not the Trainer's that the profiles measured",
    "datasets.json: a ray.data.Dataset": "no profile of Ray Data's reading is recorded",
    "scale.json: rates": "one process stands for many cores in step; its CPU time of a block calibrates the hub instead",
    "node_joins.json: seconds to join": "an input of the simulator, as are those of elastic.json",
    "arbitrated_runs.json, elastic.json, adaptation.json": "they measure decisions and pauses, which are inputs here",
    "storage_latency.json": "the simulator has no storage",
    "model_network.json": "a simulation itself",
}


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host of a recorded run: its cores, their speed over the probed one's, and whether a worker is there."""

    cores: float
    speed: float
    worker: bool
    bytes_per_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recorded run and what calibrates it.

    Args:
        core_seconds: of a sample on a core of speed 1, in the pipeline.
        step_s: of a worker with its local batch; 0: it only counts.
        measured: samples/s, or what ``unit`` says.
        over: divide the simulated rate by this (a ceiling, or the plain loop's rate).
    """

    record: str
    name: str
    nodes: tuple[Node, ...]
    core_seconds: float
    wire_bytes: float
    local_batch: int
    step_s: float
    measured: float
    over: float = 1.0
    travel_s_per_byte: float = REMOTE_CORE_SECONDS_PER_BYTE
    inputs: str = ""

    def simulated(self) -> float:
        """What the simulator says, in the unit of ``measured``."""
        rate = input_rate(self)
        workers = sum(node.worker for node in self.nodes)
        batch = self.local_batch * workers
        if not self.step_s:
            return rate / self.over
        rng = np.random.default_rng(0)
        blocks = max(batch * self.core_seconds, 1.0)  # blocks of a second of a core
        wait_s = batch / rate * np.exp(TASK_VARIATION / math.sqrt(blocks) * rng.standard_normal(STEPS))
        _, ended = batches(wait_s[:, None], np.full((STEPS, 1), self.step_s), 4)
        first = STEPS // 5
        return float(batch * (STEPS - first) / (ended[-1, 0] - ended[first - 1, 0])) / self.over


def input_rate(case: Case) -> float:
    """Samples/s of the cores and links of hosts that differ: near ones pay for the half of the way that ends with them."""
    one_end = case.travel_s_per_byte * case.wire_bytes / 2
    near = [node for node in case.nodes if node.worker]
    far = [node for node in case.nodes if not node.worker]
    cores = sum(node.cores * node.speed for node in near)
    card = sum(min(node.bytes_per_s, BYTES_PER_S * 1e3) for node in near) / case.wire_bytes
    made = sum(
        min(node.cores * node.speed / (case.core_seconds + one_end), node.bytes_per_s / case.wire_bytes) for node in far
    )
    travels = min(made, card)
    together = travels + max(cores - travels * one_end, 0.0) / case.core_seconds
    return max(together, cores / case.core_seconds)


def cases() -> list[Case]:
    """All cases that the records calibrate."""
    return [
        *_prediction(),
        *_links(),
        *_two_hosts(),
        *_paced(),
        *_peers(),
        *_mixed(),
        *_joins(),
        *_gpu(),
        *_sagemaker(),
    ]


def table() -> list[dict[str, Any]]:
    """A row for each case, with its error."""
    rows = []
    for case in cases():
        said = case.simulated()
        rows.append(
            {
                "record": case.record,
                "case": case.name,
                "simulated": round(said, 4),
                "measured": round(case.measured, 4),
                "error": round(said / case.measured - 1, 4),
                "inputs": case.inputs,
            }
        )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Errors without their signs."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "cases": len(errors),
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(max(errors), 4),
        "within_goal": sum(error <= GOAL for error in errors),
    }


def beside_the_feed() -> list[dict[str, Any]]:
    """The fluid rate beside the project's own feed on a simulated clock, block by block, for the links that were measured."""
    rows = []
    for case in _links():
        card = case.nodes[1].bytes_per_s
        nodes = (
            simulated.Node(name="near", cores=int(case.nodes[0].cores), bytes_per_s=1e10, workers=1),
            simulated.Node(name="far", cores=int(case.nodes[1].cores), bytes_per_s=card),
        )
        rate = input_rate(case)
        world = simulated.World(
            nodes=nodes,
            core_seconds_per_sample=case.core_seconds,
            bytes_per_sample=case.wire_bytes,
            samples=int(rate * 30),
            local_batch_size=case.local_batch,
        )
        blocks = simulated.simulate(world).samples_per_s
        rows.append(
            {
                "case": case.name,
                "fluid": round(rate, 1),
                "blocks": round(blocks, 1),
                "error": round(rate / blocks - 1, 4),
            }
        )
    return rows


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _profile(workload: str) -> tuple[Profile, float]:
    """A probe's profile, and the plain loop's rate on its core at that time."""
    probed = _read("prediction.json")["profiles"][workload]
    return Profile.from_document(probed["document"]), float(probed["plain"])


def _prediction() -> Iterator[Case]:
    """Paced accelerators on up to three hosts. Speeds are means of plain loops before and after the run."""
    record = "prediction.json"
    for row in _read(record)["cases"]:
        profile, _ = _profile(row["workload"])
        keeps = profile.input.host_cpus_per_worker
        speeds = {name: (row["core_speeds"][name] + row["core_speeds_after"][name]) / 2 for name in row["core_speeds"]}
        nodes = tuple(
            Node(cores=1 - keeps if name.startswith("gpu") else 1.0, speed=speed, worker=name.startswith("gpu"))
            for name, speed in speeds.items()
        )
        yield Case(
            record=record,
            name=f"{row['workload']}, {row['hosts']}, pace {row['pace']:g}",
            nodes=nodes,
            core_seconds=profile.input.core_seconds_per_sample,
            wire_bytes=profile.input.wire_bytes_per_sample,
            local_batch=row["batch_size"] // row["workers"],
            # AdaptDL's model knows the accelerators alone: its rate is their setting.
            step_s=row["batch_size"] / row["adaptdl"],
            measured=row["measured"],
            inputs="a probe; plain loops before and after; the accelerator's setting",
        )


def _links() -> Iterator[Case]:
    record = "model_links.json"
    document = _read(record)
    for row in document["rows"]:
        card = row["mbit_per_s"] * 1e6 / 8 * HEADERS
        yield Case(
            record=record,
            name=f"{row['near_cores']} + {row['far_cores']} cores, {row['mbit_per_s']:g} Mbit/s, {row['size_bytes'] // 1000} kB",
            nodes=(
                Node(cores=row["near_cores"], speed=1.0, worker=True),
                Node(cores=row["far_cores"], speed=1.0, worker=False, bytes_per_s=card),
            ),
            core_seconds=document["core_seconds_per_sample"],
            wire_bytes=row["size_bytes"],
            local_batch=20,
            step_s=0.0,
            measured=row["measured_samples_per_s"],
            travel_s_per_byte=0.0,
            inputs="the length of a sleep; the link's setting",
        )


def _two_hosts() -> Iterator[Case]:
    """offload's rows over the plain loops beside them, for workloads of which a probe is recorded."""
    for workload in ("blur", "blur-uint8", "jpeg"):
        record = f"offload_vs_single-{workload}.json"
        for row in _read(record)["rows"]:
            if row["name"] in ("offload-1-host", "offload-2-hosts"):
                yield _over_plain(record, workload, row["name"], row["delivered_over_ideal"])


def _peers() -> Iterator[Case]:
    for record, workload in (("peers.json", "jpeg"), ("peers_blur.json", "blur")):
        for row in _read(record)["rows"]:
            if row["name"] in ("offload-1-host", "offload-2-hosts") and row["workload"] == workload:
                yield _over_plain(record, workload, row["name"], row["delivered_over_ideal"])


def _over_plain(record: str, workload: str, name: str, measured: float) -> Case:
    """A rate over that of plain loops on the same cores. The probe's core-seconds over its plain loop's say what the pipeline adds."""
    profile, plain = _profile(workload)
    keeps = profile.input.host_cpus_per_worker
    two = name.endswith("2-hosts")
    nodes = [Node(cores=1 - keeps, speed=1.0, worker=True), *([Node(cores=1, speed=1.0, worker=False)] if two else [])]
    return Case(
        record=record,
        name=f"{workload}, {name}, over plain loops",
        nodes=tuple(nodes),
        core_seconds=profile.input.core_seconds_per_sample,
        wire_bytes=profile.input.wire_bytes_per_sample,
        local_batch=64,
        step_s=0.0,
        measured=measured,
        over=plain * len(nodes),
        inputs="a probe and its plain loop",
    )


def _paced() -> Iterator[Case]:
    """Accelerators at a multiple of the input's ceiling: the rate over that ceiling, and one of two sides binds."""
    for pace in (0.8, 2.0):
        record = f"offload_vs_single-pace-{pace}.json"
        row = next(row for row in _read(record)["rows"] if row["name"] == "offload-2-hosts")
        case = _over_plain(record, "jpeg", "offload-2-hosts", row["rate_over_ceiling"])
        ceiling = input_rate(case)
        yield Case(
            record=record,
            name=f"jpeg, two hosts, accelerator at {pace:g} of the input's ceiling: rate over the ceiling",
            nodes=case.nodes,
            core_seconds=case.core_seconds,
            wire_bytes=case.wire_bytes,
            local_batch=64,
            step_s=64 / (pace * ceiling),
            measured=row["rate_over_ceiling"],
            over=ceiling,
            inputs="the accelerator's setting",
        )


def _mixed() -> Iterator[Case]:
    record = "mixed_cluster.json"
    profile, plain = _profile("blur-uint8")
    overhead = profile.input.core_seconds_per_sample * plain
    for number, run in enumerate(_read(record)["runs"], 1):
        hosts = run["plain"][0]["samples_per_s_by_host"]
        rates = {name: statistics.fmean(loop["samples_per_s_by_host"][name] for loop in run["plain"]) for name in hosts}
        yield Case(
            record=record,
            name=f"blur-uint8, hosts of 1, 0.75 (half as fast) and 0.25 cores, run {number}",
            nodes=tuple(Node(cores=1.0, speed=rate / plain, worker=name == "gpu-1") for name, rate in rates.items()),
            core_seconds=overhead / plain,
            wire_bytes=profile.input.wire_bytes_per_sample,
            local_batch=64,
            step_s=0.0,
            measured=run["offload"]["samples_per_s"],
            inputs="a probe; plain loops before and after",
        )


def _joins() -> Iterator[Case]:
    """A second host that joins: the rate afterwards over that before."""
    record = "node_joins.json"
    document = _read(record)
    for number, run in enumerate(document["runs"], 1):
        yield Case(
            record=record,
            name=f"a host joins another like it: rate after over before, run {number}",
            nodes=(Node(cores=1, speed=1.0, worker=True), Node(cores=1, speed=1.0, worker=False)),
            core_seconds=1.0,
            wire_bytes=1.0,
            local_batch=1,
            step_s=0.0,
            measured=run["rate_after"] / run["rate_before"],
            inputs="the number of cores",
        )


def _gpu() -> Iterator[Case]:
    """An H100: the record has the probe's prediction, from which its core-seconds follow, and the model's rate on the device."""
    record = "offload_vs_single-gpu.json"
    for case in _read(record)["cases"]:
        rows = case["rows"]
        near = rows["offload, GPU host"]["preprocessing_cores"]
        core_seconds = near / rows["predicted"]["samples_per_s"]
        for name, cores in (("offload, GPU host", near), ("offload, both hosts", None)):
            far = 0 if cores else rows[name]["preprocessing_cores"] - near
            yield Case(
                record=record,
                name=f"{case['workload']}, {case['model']}, {name.removeprefix('offload, ')}",
                nodes=(
                    Node(cores=near, speed=1.0, worker=True),
                    *([Node(cores=far, speed=1.0, worker=False)] if far else []),
                ),
                core_seconds=core_seconds,
                wire_bytes=rows[name]["input"]["wire_bytes_per_sample"],
                local_batch=rows["device"]["batch_size"],
                step_s=rows["device"]["batch_size"] / rows["device"]["samples_per_s"],
                measured=rows[name]["samples_per_s"],
                inputs="a probe on the GPU host's cores; a plain loop on the device",
            )
    record = "gpu.json"
    busy = next(check for check in _read(record)["checks"] if check["name"] == "busy")
    for model, figures in busy["figures"]["models"].items():
        # Both predictions are of the same probe; the one that the device does not bind has its core-seconds.
        bound = figures["5 cores"]
        core_seconds = bound["preprocessing_cores"] / bound["predicted_samples_per_s"]
        for name in ("5 cores", "16 cores"):
            yield Case(
                record=record,
                name=f"jpeg, {model}, {name}",
                nodes=(Node(cores=figures[name]["preprocessing_cores"], speed=1.0, worker=True),),
                core_seconds=core_seconds,
                wire_bytes=figures[name]["input"]["wire_bytes_per_sample"],
                local_batch=figures["batch_size"],
                step_s=figures["batch_size"] / figures["ceiling_samples_per_s"],
                measured=figures[name]["samples_per_s"],
                inputs="a probe; a plain loop on the device",
            )


def _sagemaker() -> Iterator[Case]:
    """The record has predictions alone: what follows from that of one host for two, and their ratio."""
    record = "sagemaker.json"
    rows = _read(record)["rows"]
    core_seconds = 1 / rows["single"]["predicted"]["samples_per_s"]
    for name, hosts in (("single", 1), ("offloaded", 2)):
        yield Case(
            record=record,
            name=f"the published workload, {name}",
            nodes=tuple(Node(cores=1, speed=1.0, worker=i == 0) for i in range(hosts)),
            core_seconds=core_seconds,
            wire_bytes=602_120.0,  # of a float32 image with its label
            local_batch=32,
            step_s=0.0,
            measured=rows[name]["samples_per_s"],
            inputs="a plain loop or a probe, before the jobs",
        )
