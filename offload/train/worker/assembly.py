"""Put a worker's loop together: from the driver's settings and the worker's place in its group to a loop that can go on."""

from __future__ import annotations

import torch

from offload.measure.steps import CudaClock, StepClock, StepMeter
from offload.model.batch_split import BatchSplit
from offload.train.messages import GroupStart
from offload.train.worker.ends import Ends
from offload.train.worker.links.hang_watchdog import Watchdog
from offload.train.worker.links.reporter import Reporter
from offload.train.worker.local_passes import Passes
from offload.train.worker.loop import TrainingLoop
from offload.train.worker.progress_report import ProgressReport
from offload.train.worker.rank_place import RankPlace
from offload.train.worker.saving.committing import Committer
from offload.train.worker.saving.training_state import TrainingState
from offload.train.worker.setup import WorkerSetup
from offload.train.worker.steps.batch_scaling import BatchScaling
from offload.train.worker.steps.device_memory import DeviceMemory
from offload.train.worker.steps.preparation import Preparation
from offload.train.worker.steps.stepping import Stepper


def training_loop(setup: WorkerSetup, place: RankPlace) -> TrainingLoop:
    """The loop of the worker at this place, which has read the run's newest checkpoint. All ranks must call it."""
    rank, workers, device = place.rank, place.world_size, place.device
    # Rank 0 alone begins the group, so that all ranks start with the same orders.
    start: GroupStart = place.talk.broadcast(
        setup.hub.begin_group(place.attempt, place.homes) if rank == 0 else None, 0
    )
    watchdog = Watchdog(setup.hang_s)
    reporter = Reporter(setup.hub, rank, start, watchdog, node=place.node, interval_s=place.report_every_s)
    meter = StepMeter(CudaClock(torch) if device.type == "cuda" else StepClock())
    state = TrainingState(
        place.talk,
        place.checkpoints,
        seed=setup.seed,
        scaler=torch.amp.GradScaler(device.type) if setup.precision == "fp16" else None,
        samples=setup.train.samples,
        source=setup.source,
        resumable=setup.train.resumable,
        other_options_at=setup.other_options_at,
    )
    scaling = BatchScaling(setup.batch_size, setup.adaptation, workers=workers) if setup.batch_size.adaptive else None
    # Before the split, which may come from the checkpoint.
    state.load()
    memory = DeviceMemory(device)
    split = _first_split(setup, start, state, workers)
    progress = ProgressReport(reporter, state, scaling, memory, rank=rank, workers=workers, split=split)
    committer = Committer(
        setup.checkpoints,
        state,
        progress,
        reporter,
        watchdog,
        meter,
        rank=rank,
        failures_per_s=start.failures_per_s,
    )
    stepper = Stepper(
        state, meter, watchdog, rank=rank, workers=workers, scaling=scaling, join=place.join, memory=memory
    )
    preparation = Preparation(state, stepper, scaling, place.share, device, rank=rank, workers=workers, seed=setup.seed)
    ends = Ends(
        setup,
        place,
        state=state,
        reporter=reporter,
        watchdog=watchdog,
        committer=committer,
        scaling=scaling,
    )
    passes = Passes(
        setup,
        place,
        attempt=start.attempt,
        state=state,
        reporter=reporter,
        watchdog=watchdog,
        meter=meter,
        scaling=scaling,
    )
    if state.resumed:
        if scaling is not None and state.adapting:
            scaling.restore(state.adapting["noise"])
        passes.epoch = reporter.epoch = state.progress.epoch
        progress.resumed(start.attempt, ends.useful_goal())
    reporter.flush()  # the driver should know this worker's node if it dies soon
    return TrainingLoop(
        setup,
        place,
        state=state,
        reporter=reporter,
        watchdog=watchdog,
        meter=meter,
        committer=committer,
        stepper=stepper,
        preparation=preparation,
        ends=ends,
        passes=passes,
        progress=progress,
    )


def _first_split(setup: WorkerSetup, start: GroupStart, state: TrainingState, workers: int) -> BatchSplit:
    """The first split of global batches: as ordered, else the checkpoint's, else the user's."""
    stored, sizes = state.adapting, setup.batch_size
    before = start.orders.split
    if before is None and stored:
        local, accum = stored["batch"]
        before = BatchSplit(workers=stored["workers"], local_batch_size=local, accum_steps=accum)
    split = sizes.split(workers) if before is None else sizes.carried_over(before, workers)
    return split.with_local_at_most(start.most_local)
