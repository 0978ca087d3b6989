"""Start processes with their imports done: new workers and preprocessing processes are forked, not started.

``import torch, torchvision`` takes 5 to 10 s on a host's cores. Every resize of the worker group and every new preprocessing process
would wait for it. With :mod:`offload.preload.python` as the ``py_executable`` of the runtime environment, a process on each node
imports everything once and forks the others. They also share the memory of the imported modules.
"""

import functools
import os
import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from offload.preload import ahead
from offload.ray_private.preload import PART

ALWAYS = (
    "ray",
    "torch",
    "offload.pipeline.pool.pool",
    "offload.pipeline.describe.sources",
    "offload.train.hub.ray_hub",
)
"""What preprocessing and the hub need. A node that only preprocesses imports no more."""
# Imported ahead if the driver imported them, too: a script that does not use them need not have them.
IF_USED = ("torchvision", "torchvision.transforms.v2", "timm", "cv2", "simplejpeg", "PIL.Image", "pandas", "scipy")
FIRST_STEP = ("torch._dynamo",)
"""What an optimizer's first step imports, which takes as long as importing torch does."""
WORKER = ("offload.train.worker.process", "offload.train.group.ray_group")
TRAINING = (*WORKER, *FIRST_STEP)
"""What workers need beside that."""
SWITCH = "OFFLOAD_PRELOAD"
QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_TRAIN_ENABLE_STATE_TRACKING": "0"}
"""Ray's settings in the environment of a run, unless the user has set them."""
NONE_AHEAD = {"enable_worker_prestart": False, "prestart_worker_first_driver": False}
"""Ray's settings that keep it from starting Python processes ahead, one per core: those of a run are forked, so these would stay idle."""
# Each of these sets another Python than this one.
OTHER_PYTHON = ("py_executable", "pip", "uv", "conda", "container", "image_uri")


def runtime_env(job: Mapping[str, Any], *, also: Sequence[str] = ()) -> dict[str, Any]:
    """The runtime environment of processes that start with their imports done, for a job with its own environment ``job``.
    ``also``: modules that these processes need and others do not.

    It is empty if the job brings its own Python, which must not be replaced, if the user turns preloading off
    (``OFFLOAD_PRELOAD=0`` in the driver's environment), or if this Ray lacks what it needs.
    """
    if not _wanted() or any(job.get(name) for name in OTHER_PYTHON):
        return {}
    launcher = Path(__file__).with_name("python.py")
    # A server that was started ahead may have begun before the driver imported the rest.
    also = [*used(), *also]
    key = ahead.key() or _key()
    ours = shlex.join([sys.executable, "-S", str(launcher), key, ",".join(ALWAYS), ",".join(also)])
    # A node with this Python or this package elsewhere starts its processes normally.
    here = f"[ -x {shlex.quote(sys.executable)} ] && [ -f {shlex.quote(str(launcher))} ]"
    command = f'if {here}; then exec {ours} "$@"; fi; exec python3 "$@"'
    return {"py_executable": shlex.join(["sh", "-c", command, "sh"])}


def serving_ahead(mark_name: str, mark: str, *, then: Sequence[str] = FIRST_STEP) -> AbstractContextManager[str]:
    """A context in which a server of this process imports ahead, for a Ray that it is about to start; see
    :func:`offload.preload.ahead.serving`. Without preloading there is none. Workers will run on this node, too."""
    if not _wanted():
        return nullcontext(mark)
    return ahead.serving([*ALWAYS, *WORKER, *used()], then, mark_name=mark_name, mark=mark, env=QUIET)


def _wanted() -> bool:
    return os.environ.get(SWITCH) != "0" and PART.available()


def used() -> list[str]:
    """The modules of :data:`IF_USED` that this program has imported."""
    return [name for name in IF_USED if name in sys.modules]


def _key() -> str:
    """The key of this job's servers: trials of a search, whose drivers are processes of one job, share them. Other jobs have their own
    servers, since their modules may have other versions."""
    ray: Any = sys.modules.get("ray")
    connected = ray is not None and ray.is_initialized()
    return f"job-{ray.get_runtime_context().get_job_id()}" if connected else _own_key()


@functools.cache
def _own_key() -> str:
    return uuid.uuid4().hex
