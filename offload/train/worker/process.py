"""The process of a worker: run the user's function with its context, among the ranks that Ray Train has started."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray import cloudpickle

from offload.errors import RunError, find_offload_error
from offload.model.checks import shown
from offload.pipeline.program.pickling import Carried
from offload.process import forks
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


class RestatedError(Exception):
    """An exception of the user's function that cannot travel to the driver: its type's ``name`` and its ``text``."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text)
        self.name, self.text = name, text

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def place_of(setup: WorkerSetup) -> RankPlace:
    """This process's place in the worker group. All ranks must call it: they connect here."""
    world_size = ray.train.get_context().get_world_size()
    several = world_size > 1
    peers = {name: DistPeers() if several else NoPeers() for name in sorted(setup.datasets)}
    talk = DistPeers() if several else NoPeers()
    return RankPlace(
        rank=ray.train.get_context().get_world_rank(),
        world_size=world_size,
        device=ray.train.torch.get_device(),
        node=ray.get_runtime_context().get_node_id(),
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


def run_worker(carried: Carried, setup: WorkerSetup) -> None:
    """Run the user's function with its context on this worker. ``carried``: :class:`UserFunctions`."""
    if setup.marker is not None:
        setup.marker.check()
    setup.folder.enter()
    functions: UserFunctions = carried.opened()
    setup = setup.joined(functions)
    seed_at_start(setup.seed, ray.train.get_context().get_world_rank())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loop = training_loop(setup, place_of(setup))
    context = Context(loop)
    try:
        with printing_to_driver(loop.reporter):
            run_user_function(functions.train, context)
        loop.commit_rest()
    except torch.OutOfMemoryError as error:
        loop.out_of_memory(error)
        raise
    except StopRun:
        pass
    finally:
        loop.finish()


def run_user_function(user_function: Any, context: Context) -> None:
    """Call the user's training function. An exception gets a note with the user's frames. Raises RunError if the function exits, which
    would end this process silently, and RestatedError instead of an exception that cannot travel."""
    try:
        with forks.ending_here():
            user_function(context)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RunError(_exit_of(user_function, error, context.rank)) from error
    except Exception as error:
        reported = error if _travels(error) else RestatedError(type(error).__name__, str(error))
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


def _travels(error: Exception) -> bool:
    """Return whether an exception arrives where it is sent. If it does not, Ray Train takes its worker for dead, and starts it again and
    again.

    Many do not: those with an open file, and those whose ``__init__`` takes other arguments than the message, such as torch.compile's.
    """
    try:
        cloudpickle.loads(cloudpickle.dumps(error))  # type: ignore[no-untyped-call]
    except Exception:  # pickling runs the user's code
        return False
    return True


def _exit_of(user_function: Any, error: BaseException, rank: int) -> str:
    name = getattr(user_function, "__name__", "the training function")
    did = "raised KeyboardInterrupt"
    if isinstance(error, SystemExit):
        did = f"called sys.exit({'' if error.code is None else shown(error.code)})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{name}() {did} on rank {rank}{where}. Return from it to end the training, or raise an exception that describes the problem."
