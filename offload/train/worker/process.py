"""The process of a worker: run the user's function with its context."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from offload.errors import RunError, find_offload_error
from offload.model.checks import shown
from offload.pipeline.program.pickling import Carried
from offload.process import forks
from offload.train.group.group import Outcome
from offload.train.group.in_worker import Member, travelling
from offload.train.worker.assembly import training_loop
from offload.train.worker.context import Context
from offload.train.worker.ends import StopRun
from offload.train.worker.links.peers import DistPeers, NoPeers
from offload.train.worker.links.printing import printing_to_driver
from offload.train.worker.rank_place import RankPlace
from offload.train.worker.saving.checkpointer import FolderCheckpointer
from offload.train.worker.saving.training_state import seed_at_start
from offload.train.worker.setup import UserFunctions, WorkerSetup
from offload.train.worker.steps.joining import Distributed
from offload.uncaught import LIBRARIES, of_program


def place_of(setup: WorkerSetup, member: Member) -> RankPlace:
    """This process's place in the run. All ranks must call it: they connect here."""
    several = member.world_size > 1
    # In the order of names: all ranks must make their groups in the same order.
    peers = {name: DistPeers() if several else NoPeers() for name in sorted(setup.datasets)}
    talk = DistPeers() if several else NoPeers()
    return RankPlace(
        attempt=member.attempt,
        rank=member.rank,
        world_size=member.world_size,
        device=torch.device(member.device),
        node=member.node,
        homes=member.homes,
        talk=talk,
        peers=peers,
        checkpoints=FolderCheckpointer(setup.storage, setup.name, setup.checkpoints, talk),
        join=Distributed(),
        share=_share,
    )


def _share(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel():
            own = tensor.detach()
            dense = own.contiguous()
            dist.broadcast(dense.reshape(-1).view(torch.uint8), src=0)  # as bytes: gloo does not send every type
            if dense is not own:
                own.copy_(dense)


def run_worker(carried: Carried, setup: WorkerSetup, member: Member) -> Outcome:
    """Run the user's function with its context on this worker. ``carried``: :class:`UserFunctions`."""
    if setup.marker is not None:
        setup.marker.check()
    if setup.program is not None:
        setup.program.enter()
    functions: UserFunctions = carried.opened()
    setup = setup.joined(functions)
    seed_at_start(setup.seed, member.rank)
    # Tokenizers with threads warn, or lock up, in a process that forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loop = training_loop(setup, place_of(setup, member))
    context = Context(loop)
    try:
        with printing_to_driver(loop.reporter):
            run_user_function(functions.train, context)
        loop.commit_rest()
    except torch.OutOfMemoryError as error:
        loop.out_of_memory(error)
        raise
    except StopRun as ordered:
        return "replaced" if ordered.end == "resize" else "stopped"
    finally:
        loop.finish()
    return "finished"


def run_user_function(user_function: Any, context: Context) -> None:
    """Call the user's training function. An exception gets a note with the user's frames. Raises RunError if the function exits, which
    would end this process silently, and RestatedError instead of an exception that cannot travel."""
    try:
        with forks.ending_here():
            user_function(context)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RunError(_exit_of(user_function, error, context.rank)) from error
    except Exception as error:
        reported = travelling(error)
        if find_offload_error(error) is None:
            reported.add_note(_where(error, context.rank))
        if reported is error:
            raise
        raise reported from error


def _where(error: Exception, rank: int) -> str:
    """The user's frames from which an exception came."""
    frames = traceback.extract_tb(of_program(error.__traceback__))
    own = [frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)]
    return f"On rank {rank}:\n" + "".join(traceback.format_list(own or frames)).rstrip()


def _exit_of(user_function: Any, error: BaseException, rank: int) -> str:
    name = getattr(user_function, "__name__", "the training function")
    did = "raised KeyboardInterrupt"
    if isinstance(error, SystemExit):
        did = f"called sys.exit({'' if error.code is None else shown(error.code)})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{name}() {did} on rank {rank}{where}. Return from it to end the training, or raise an exception that describes the problem."
