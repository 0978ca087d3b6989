"""A job's hosts and its head, from the files that the service writes into each container.

Every host finds the same answer in its own files. Where it stops: no network, no processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.launch.sagemaker.settings import GPU_GROUP


@dataclass(frozen=True, kw_only=True)
class HostGroup:
    """Hosts of one instance type, in natural order (``algo-2`` before ``algo-10``)."""

    name: str
    instance_type: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class JobHosts:
    """A job's hosts, as one of them (``current``) sees them. ``interface``: the network interface between them."""

    current: str
    groups: tuple[HostGroup, ...]
    interface: str

    @property
    def head(self) -> str:
        """The first host of the GPU group. The service's own "master" is the first of all, which may be a CPU host."""
        return self.with_workers[0]

    @property
    def is_head(self) -> bool:
        """Whether this host is the head."""
        return self.current == self.head

    @property
    def with_workers(self) -> tuple[str, ...]:
        """The hosts of the GPU group."""
        return next(group for group in self.groups if group.name == GPU_GROUP).hosts

    @property
    def all(self) -> tuple[str, ...]:
        """Every host, in natural order."""
        return tuple(sorted((host for group in self.groups for host in group.hosts), key=natural))

    @property
    def group(self) -> HostGroup:
        """The group of this host."""
        return next(group for group in self.groups if self.current in group.hosts)


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A key that sorts numbers within names as numbers."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)


def read_hosts(base: Path, environment: Mapping[str, str]) -> JobHosts:
    """Read the hosts from ``input/config/resourceconfig.json`` below ``base`` (``/opt/ml``), which all SDKs write.

    ``environment``: the environment of this process. If the training toolkit put the hosts there, too, both must agree (with version
    3 of the SDK, it does not).

    Raises ConfigError if the file is missing or malformed, the job has no GPU group, or the two sources disagree.
    """
    path = base / "input" / "config" / "resourceconfig.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        groups = tuple(
            HostGroup(
                name=group["instance_group_name"],
                instance_type=group["instance_type"],
                hosts=tuple(sorted(group["hosts"], key=natural)),
            )
            for group in config["instance_groups"]
        )
        hosts = JobHosts(
            current=config["current_host"], groups=groups, interface=config.get("network_interface_name") or "eth0"
        )
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: this must run in a SageMaker training container.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} does not describe a heterogeneous job ({type(error).__name__}: {error}): launch it with instance groups."
        ) from None
    _check(hosts, path)
    _check_environment(hosts, environment)
    return hosts


def _check(hosts: JobHosts, path: Path) -> None:
    names = [group.name for group in hosts.groups]
    if GPU_GROUP not in names or not all(group.hosts for group in hosts.groups):
        raise ConfigError(
            f"{path} names the groups {', '.join(names) or 'none'}: one must be {GPU_GROUP!r}, and none empty."
        )
    if hosts.current not in hosts.all:
        raise ConfigError(f"{path} says that this is {hosts.current!r}, which is in none of its groups.")


def _check_environment(hosts: JobHosts, environment: Mapping[str, str]) -> None:
    pairs: dict[str, tuple[Any, Any]] = {
        "SM_CURRENT_HOST": (environment.get("SM_CURRENT_HOST"), hosts.current),
        "SM_CURRENT_INSTANCE_GROUP": (environment.get("SM_CURRENT_INSTANCE_GROUP"), hosts.group.name),
    }
    if "SM_HOSTS" in environment:
        pairs["SM_HOSTS"] = sorted(json.loads(environment["SM_HOSTS"])), sorted(hosts.all)
    for name, (theirs, ours) in pairs.items():
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"{name} is {theirs!r}, and resourceconfig.json says {ours!r}: the container is inconsistent."
            )
