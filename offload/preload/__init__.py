"""Processes that start with their imports done: new workers and preprocessing processes are forked, not started.

On a host's cores ``import torch, torchvision`` takes 5 to 10 s, which every resize of the worker group and every new
preprocessing process would wait for. A runtime environment whose ``py_executable`` is :mod:`offload.preload.launch` has them
forked from a process of that node that imported everything once. What is imported is shared memory besides.
"""

import functools
import os
import shlex
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ALWAYS = (
    "ray",
    "torch",
    "ray.train.torch",
    "offload.train.worker.process",
    "offload.train.driver.ray_train",
    "offload.pipeline.pool",
)
# Imported ahead where the driver imported them too: a script that does without them need not have them.
IF_USED = ("torchvision", "torchvision.transforms.v2", "timm", "cv2", "simplejpeg", "PIL.Image", "pandas", "scipy")
SWITCH = "OFFLOAD_PRELOAD"
# Each of these names another Python than this one.
OTHER_PYTHON = ("py_executable", "pip", "uv", "conda", "container", "image_uri")


def runtime_env(job: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime environment of processes that start with their imports done, for a job with this environment of its own.

    Empty where the job brings a Python of its own, which is not ours to replace, and where the user turns preloading off
    (``OFFLOAD_PRELOAD=0`` in the driver's environment).
    """
    if os.environ.get(SWITCH) == "0" or any(job.get(name) for name in OTHER_PYTHON):
        return {}
    modules = ",".join([*ALWAYS, *(name for name in IF_USED if name in sys.modules)])
    launcher = Path(__file__).with_name("launch.py")
    ours = shlex.join([sys.executable, "-S", str(launcher), _key(), modules])
    # A node where this Python or this package lies elsewhere starts its processes plainly.
    here = f"[ -x {shlex.quote(sys.executable)} ] && [ -f {shlex.quote(str(launcher))} ]"
    command = f'if {here}; then exec {ours} "$@"; fi; exec python3 "$@"'
    return {"py_executable": shlex.join(["sh", "-c", command, "sh"])}


@functools.cache
def _key() -> str:
    """This driver's. Others have servers of their own: they may have been started with other versions of the modules."""
    return uuid.uuid4().hex
