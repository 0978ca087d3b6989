"""Read a host's configuration and detect its equipment. This runs once the hosts have met, so that all of them hear of a problem."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import offload
from offload.errors import ConfigError
from offload.launch.sagemaker.container import ray_node
from offload.launch.sagemaker.container.hosts import JobHosts
from offload.launch.sagemaker.container.installing import install
from offload.launch.sagemaker.container.place import HostPlace
from offload.launch.sagemaker.container.ray_node import NodeSpec
from offload.launch.sagemaker.settings import GPU_GROUP, Settings, read_settings

SAME_EVERYWHERE = {"Ray": "ray", "torch": "torch", "NumPy": "numpy", "PyArrow": "pyarrow"}
"""Packages that must have the same version on all hosts of a job, since their objects travel between hosts."""
WITHOUT_GPUS = "OFFLOAD_WITHOUT_GPUS"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A host that is ready to start Ray.

    Args:
        settings, hyperparameters: the settings and hyperparameters of the job.
        versions: the versions that must be the same on all hosts.
        node: the host's resources in the cluster.
    """

    settings: Settings
    hyperparameters: Mapping[str, Any]
    versions: Mapping[str, str]
    node: NodeSpec


def prepare(place: HostPlace, check: Callable[[], None] = lambda: None) -> Prepared:
    """Prepare this host. ``check`` is called now and then and may raise to end the preparation.

    Raises ConfigError for unreadable settings, requirements that cannot be installed, and missing GPUs.
    """
    settings, hyperparameters = read_settings(place.base)
    install(place.folder, check)
    return Prepared(
        settings=settings, hyperparameters=hyperparameters, versions=installed(), node=node_of(place, os.environ)
    )


def installed() -> dict[str, str]:
    """This host's versions of the packages that all hosts of a job must share."""
    return {
        "Python": platform.python_version(),
        "offload": offload.__version__,
        **{name: version for name, package in SAME_EVERYWHERE.items() if (version := _version(package))},
    }


def node_of(place: HostPlace, environment: Mapping[str, str]) -> NodeSpec:
    """A host's resources in the cluster. Raises ConfigError for a host of the GPU group without GPUs."""
    hosts = place.hosts
    gpus = _gpus(hosts, environment)
    shm, memory = ray_node.free_shm_bytes(), ray_node.memory_bytes()
    if shm < ray_node.LITTLE_SHM_BYTES:
        print(
            f"offload: /dev/shm of {hosts.current} has {shm >> 20:,} MiB: few batches fit, so preprocessing may have to wait. "
            "Give the container more (docker run --shm-size), or use smaller batches.",
            flush=True,
        )
    return NodeSpec(
        address=place.address,
        head=place.head_address,
        group=hosts.group.name,
        instance_type=hosts.group.instance_type,
        cores=ray_node.cores(),
        gpus=gpus,
        store_bytes=ray_node.store_bytes(shm, memory),
        interface=hosts.interface,
        token_file=place.token_file,
        folder=place.folder,
    )


def _gpus(hosts: JobHosts, environment: Mapping[str, str]) -> int:
    """The GPUs of this host. Workers run only in the GPU group, and nobody wants to pay for unused GPUs elsewhere."""
    if hosts.group.name != GPU_GROUP:
        return 0
    gpus = ray_node.gpus(environment)
    if not gpus and not environment.get(WITHOUT_GPUS):
        raise ConfigError(
            f"{hosts.current} ({hosts.group.instance_type}) sees no GPU: use an image with CUDA and a PyTorch build "
            f"for GPUs, or set {WITHOUT_GPUS}=1 in the job's environment to train on its CPUs."
        )
    return gpus


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
