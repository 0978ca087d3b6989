"""A probe's worker: it first drains the input alone, then runs the script's loop on replayed batches.

On a small machine, the two would slow each other down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from offload.errors import RunError
from offload.pipeline.blocks.receiver import DirectBlocks
from offload.pipeline.feed.passes import PassKey, Reach, Slice
from offload.pipeline.pool.packed_recipe import PackedRecipe
from offload.pipeline.program.pickling import Carried
from offload.probe.kept import Kept, row_bytes
from offload.probe.probe_context import ProbeContext
from offload.probe.processes import CpuSeconds, cpu_seconds
from offload.probe.stages import LEAST_RAW_BYTES, exact_over_auto, measure_stages
from offload.report.events import NodeNames, RunEvent
from offload.train.group.group import Outcome
from offload.train.group.in_worker import Member
from offload.train.hub.calls import RankCalls
from offload.train.messages import TRAIN
from offload.train.worker.assembly import training_loop
from offload.train.worker.data.batches import Batches, Cutting
from offload.train.worker.data.feed_client import BlockReader, HubFeed, feed_of
from offload.train.worker.ends import StopRun
from offload.train.worker.links.agreement import NoAgreement
from offload.train.worker.links.peers import NoPeers
from offload.train.worker.links.printing import printing_to_driver
from offload.train.worker.loop import TrainingLoop
from offload.train.worker.process import place_of, run_user_function
from offload.train.worker.setup import UserFunctions, WorkerSetup, first_pass

KEPT_BLOCKS = 4  # blocks replayed to measure how fast a worker takes in batches
KEPT_BYTES = 128 << 20
MOST_KEPT = 1024  # rows
TELL_S = 1.0
LEAST_DRAINED_S = 0.25


@dataclass(frozen=True, kw_only=True)
class PhaseBegun(RunEvent, kind="probing"):
    """The probe's progress: what it does, and the completed share."""

    phase: str
    share: float

    def sentence(self, nodes: NodeNames) -> str:
        return f"{self.phase}: {self.share:.0%}"


@dataclass(frozen=True, kw_only=True)
class ProbeMeasured(RunEvent, kind="probed"):
    """Everything that the worker has measured."""

    measurements: dict[str, Any]

    def sentence(self, nodes: NodeNames) -> str:
        return "the probe has measured the script"


@dataclass(frozen=True, kw_only=True)
class ProbeBudget:
    """The seconds for each part, and the recipe to measure step by step (None: a ``ray.data.Dataset``)."""

    drain_s: float = 20.0
    ingest_s: float = 2.0
    stages_s: float = 6.0
    decoding_s: float = 2.0
    replay_s: float = 24.0
    recipe: PackedRecipe | None = None
    rows: pa.Table | None = None

    def within(self, seconds: float) -> ProbeBudget:
        """The same parts in ``seconds`` altogether."""
        parts = ("drain_s", "ingest_s", "stages_s", "decoding_s", "replay_s")
        share = seconds / sum(getattr(self, name) for name in parts)
        return dataclasses.replace(self, **{name: share * getattr(self, name) for name in parts})


def run_probe(carried: Carried, setup: WorkerSetup, budget: ProbeBudget, member: Member) -> Outcome:
    """Measure, and send the findings as a :class:`ProbeMeasured`. ``carried``: :class:`UserFunctions`."""
    functions: UserFunctions = carried.opened()
    setup = setup.joined(functions)
    torch.manual_seed(setup.seed)
    np.random.seed(setup.seed & 0xFFFFFFFF)
    loop = training_loop(setup, place_of(setup, member))
    context = ProbeContext(loop)
    tell = _Teller(loop)
    try:
        # First the input alone, then the loop alone: together, they would share the cores, and neither rate would be
        # its own.
        tell.phase("draining the input", 0.0)
        drained = _drain(loop, context, budget, tell)
        measuring = time.monotonic()
        tell.phase("timing the stages", 0.45)
        stages = _stages(budget) if context.rank == 0 else None
        tell.phase("replaying batches", 0.6)
        context.budget_s = budget.replay_s
        context.on_progress = lambda share: tell.phase("replaying batches", 0.6 + 0.4 * share)
        if not len(context.cached):
            raise RunError("the training data set delivered no batch to replay. Does it have samples?")
        with printing_to_driver(loop.reporter):
            _replay(functions.train, context)
        if not context.measured:
            raise RunError(
                "the script's function asked for no batch of ctx.batches('train'), so that no step could be measured."
            )
        nodes = loop.place.talk.gather_objects(member.node)
        if context.rank:
            return "finished"
        loop.reporter.event(
            ProbeMeasured(
                measurements=dict(
                    workers=context.world_size,
                    nodes=len(set(nodes)),
                    **drained,
                    stages=stages,
                    steps=[dataclasses.asdict(step) for step in context.measured],
                    gradients=context.gradients,
                    gradient_bytes=context.gradient_bytes,
                    samples_each=context.samples_each,
                    gradients_s=context.gradients_s,
                    blocks=0 if context.depth is None else len(context.depth),
                    measuring_s=drained["drained_s"] + time.monotonic() - measuring,
                    device=torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu",
                    device_memory_bytes=context.device_memory(),
                )
            )
        )
    finally:
        loop.finish()
    return "finished"


def _replay(user_function: Any, context: ProbeContext) -> None:
    """Run the script's loop. If it fails because of the smaller depth, run it again on the whole model."""
    try:
        run_user_function(user_function, context)
    except StopRun:
        return
    except Exception:
        if context.depth is None:
            raise
        context.begin_anew()
        with contextlib.suppress(StopRun):
            run_user_function(user_function, context)


class _Teller:
    """A sender of the probe's progress, without delay."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._reporter, self._silent = loop.reporter, loop.place.rank > 0

    def phase(self, name: str, share: float) -> None:
        if self._silent:
            return
        self._reporter.event(PhaseBegun(phase=name, share=share))
        self._reporter.flush()


def _drain(loop: TrainingLoop, context: ProbeContext, budget: ProbeBudget, tell: _Teller) -> dict[str, Any]:
    """Take batches as fast as they come, and keep some."""
    setup = loop.setup
    key = PassKey(attempt=loop.passes.attempt, name=TRAIN, number=0)
    request = first_pass(setup.split, deterministic=setup.deterministic)
    opened = setup.hub.open(key, request, context.rank, loop.place.node)
    feed = feed_of(opened, setup.hub, loop.passes.direct, _Recording)
    batches = _batches(context, setup, feed, key, ordered=setup.train.ordered)
    began, before, reported_s, samples = time.monotonic(), cpu_seconds(), 0.0, 0
    kept: Kept | None = None
    while (batch := batches.get()) is not None:
        if kept is None:  # the time before the first batch is start-up
            kept = Kept(max(setup.split.local_batch_size, min(MOST_KEPT, KEPT_BYTES // row_bytes(batch))))
            kept.add(batch)
            began, before = time.monotonic(), cpu_seconds()
            continue
        kept.add(batch)
        samples += batch.rows * context.world_size
        spent_s = time.monotonic() - began
        if spent_s - reported_s >= TELL_S:
            reported_s = spent_s
            tell.phase("draining the input", min(0.4, 0.4 * spent_s / budget.drain_s))
        if spent_s >= budget.drain_s:
            break
    drained_s, spent = time.monotonic() - began, cpu_seconds().since(before)
    batches.close()
    if kept is not None:
        context.cached = kept.joined()
    costs = setup.hub.costs(TRAIN)
    ingest = _ingest(context, setup, feed.kept, budget.ingest_s) if feed.kept else None
    return {
        "costs": costs,
        "ingest_samples_per_s": ingest,
        "drained_s": drained_s,
        **beside_preprocessing(spent, drained_s, samples),
    }


def beside_preprocessing(spent: CpuSeconds, drained_s: float, samples: int) -> dict[str, float]:
    """The CPU time beside preprocessing while ``samples`` samples were drained: the raylet's for each of them, and the cores of the rest.

    Both are 0 where so few samples were drained that this time does not tell: the kernel counts each process in steps of 10 ms.
    """
    if drained_s < LEAST_DRAINED_S:
        return {"raylet_s_per_sample": 0.0, "beside_cpus": 0.0}
    return {"raylet_s_per_sample": spent.raylet_s / max(samples, 1), "beside_cpus": spent.beside_s / drained_s}


def _batches(context: ProbeContext, setup: WorkerSetup, feed: Any, key: PassKey, *, ordered: bool) -> Batches:
    return Batches(
        feed,
        key,
        peers=NoPeers(rank=context.rank),
        split=setup.split,
        delivery=context.delivery,
        cutting=Cutting(padded=False, budget=setup.train.budget, ordered=ordered),
        agreement=NoAgreement(),
        template={},
    )


def _ingest(context: ProbeContext, setup: WorkerSetup, kept: list[Slice], seconds: float) -> float:
    """The rate, in samples/s, at which this worker fetches ready blocks, cuts and joins them, and copies them to its device."""
    # Those of other nodes were sent to this process: no link may count now.
    futures.wait([piece.ref.future() for piece in kept], timeout=seconds)
    feed = _Replaying(kept)
    batches = _batches(context, setup, feed, PassKey(attempt=0, name=TRAIN, number=0), ordered=True)
    batches.get()
    began, samples = time.monotonic(), 0
    while time.monotonic() - began < seconds and (batch := batches.get()) is not None:
        samples += batch.rows
    # Copies to a GPU may still be under way, and count only once they have arrived.
    context.synchronize()
    rate = samples / (time.monotonic() - began)
    batches.close()
    return rate


def _stages(budget: ProbeBudget) -> dict[str, Any] | None:
    if budget.recipe is None or budget.rows is None:
        return None
    threads = torch.get_num_threads()
    recipe = budget.recipe.ready()  # limits this process to one thread, like each preprocessing process
    try:
        exact = exact_over_auto(recipe, budget.rows, seconds=budget.decoding_s)
        costs = measure_stages(recipe, budget.rows, seconds=budget.stages_s)
    finally:
        # The script's loop follows in this process, with its own number of threads.
        torch.set_num_threads(threads)
    raw_bytes = costs.raw_bytes / max(costs.samples, 1)
    return {
        "shares": [list(share) for share in costs.shares()],
        "exact_over_auto": exact,
        "constant": None if (constant := costs.constant()) is None else dataclasses.asdict(constant),
        "raw_bytes_per_sample": raw_bytes if raw_bytes >= LEAST_RAW_BYTES else 0.0,
    }


class _Recording(HubFeed):
    """A feed that keeps its first blocks."""

    def __init__(self, hub: RankCalls, direct: DirectBlocks, first: int = 0) -> None:
        super().__init__(hub, direct, first)
        self.kept: list[Slice] = []

    def next_slices(
        self, key: PassKey, rank: int, want: int, reach: Reach = "any", *, arrived: int = 0, wait: bool = True
    ) -> tuple[list[Slice], bool]:
        slices, over = super().next_slices(key, rank, want, reach, arrived=arrived, wait=wait)
        self.kept += slices[: KEPT_BLOCKS - len(self.kept)]
        return slices, over


class _Replaying(BlockReader):
    """A feed that hands out the same blocks again and again."""

    def __init__(self, kept: list[Slice]) -> None:
        super().__init__()
        self._kept, self._next = kept, 0

    def next_slices(
        self, key: PassKey, rank: int, want: int, reach: Reach = "any", *, arrived: int = 0, wait: bool = True
    ) -> tuple[list[Slice], bool]:
        self._next += 1
        return [self._kept[self._next % len(self._kept)]], False

    def arrived(self, key: PassKey, rank: int, reach: Reach, arrived: int) -> None: ...

    def again(self, key: PassKey, rank: int, piece: Slice) -> None: ...

    def leave(self, key: PassKey, rank: int) -> None: ...
