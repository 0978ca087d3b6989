"""Which variables of a program's environment its preprocessing processes get. Pure.

A spawned process of :mod:`multiprocessing` inherits all variables. A process of Ray has those of its node, so the program's travel to it,
with two exceptions:

* what belongs to Ray, to offload and to the use of cores and GPUs never travels;
* what describes a host (its paths, its user, its place in a job) travels only if the program itself has changed it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

NEVER = (
    "RAY_", "OFFLOAD_", "PYTHONBREAKPOINT",  # Ray sets the last one
    # A preprocessing process has one core and no GPU, and Ray or offload sees to that.
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NEURON_RT_", "TPU_", "ASCEND_RT_", "ONEAPI_DEVICE_",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
)  # fmt: skip
"""The beginnings of the names of variables that never travel."""

OF_A_HOST = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOST", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "MAIL", "DISPLAY",
        "TMPDIR", "TMP", "TEMP", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV",
        "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID",
    }
)  # fmt: skip
"""The variables that describe a host."""

OF_A_HOST_BEGIN = (
    "CONDA_", "SSH_", "XDG_", "DBUS_", "TERM", "SLURM_", "PMI", "NVIDIA_", "KUBERNETES_", "ECS_", "AWS_CONTAINER_", "SM_",
)  # fmt: skip
"""The beginnings of the names of other variables that describe a host."""


def travelling(now: Mapping[str, str], at_start: Mapping[str, str], others: Collection[str] = ()) -> dict[str, str]:
    """The variables that travel.

    Args:
        now: the program's environment.
        at_start: the environment with which the program began.
        others: further names that stay.
    """
    return {
        name: value
        for name, value in now.items()
        if _may_travel(name, others) and not (_is_of_a_host(name) and at_start.get(name) == value)
    }


def removed(now: Mapping[str, str], known: Collection[str], others: Collection[str] = ()) -> list[str]:
    """The ``known`` names that the program has had and no longer has."""
    return sorted(name for name in set(known) - now.keys() if _may_travel(name, others))


def _may_travel(name: str, others: Collection[str]) -> bool:
    return not name.startswith(NEVER) and name not in others


def _is_of_a_host(name: str) -> bool:
    return name in OF_A_HOST or name.startswith(OF_A_HOST_BEGIN)
