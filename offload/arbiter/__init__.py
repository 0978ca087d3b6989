"""The arbiter of a Ray cluster: it follows the runs, and hands workers and cores from one to another as the allocation decides.

::

    offload.arbiter.start("auto")
    for run in offload.arbiter.status("auto").runs:
        print(run.name, run.holding, run.reason)
    offload.arbiter.stop("auto")

Where it stops: ``offload.model.allocation`` decides who is to have what, and each run takes up and gives back workers and cores itself.
Of this package, only ``ray_arbiter`` and ``registry`` talk to a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offload.arbiter.status import Status
from offload.errors import ConfigError
from offload.model.allocation.values import Rules
from offload.model.checks import check_number

__all__ = ["Rules", "Status", "start", "status", "stop", "weigh"]


def start(address: str | None = None, rules: Rules | None = None) -> None:
    """Start the arbiter of a Ray cluster, on its head node. It outlives this process.

    Args:
        address: the cluster; None: RAY_ADDRESS, or else the one on this host.
        rules: what the cluster's owner wants; None: the defaults of :class:`Rules`.

    Raises:
        ConfigError: if there is no such cluster, if it has an arbiter already, or if the head cannot start one.
    """
    with _cluster(address):
        from offload.arbiter import registry

        registry.start(rules or Rules())


def status(address: str | None = None) -> Status:
    """Who holds what of a cluster and why, what others hold, and what more would bring. ``address``: see :func:`start`.

    Raises:
        ConfigError: if there is no such cluster, if it has no arbiter, or if the arbiter does not answer.
    """
    with _cluster(address):
        from offload.arbiter import registry

        return registry.status()


def weigh(name: str, weight: float, address: str | None = None) -> None:
    """Give a run another weight while it trains. It keeps that until it ends, or until the arbiter starts anew.

    Args:
        name: the run, as :func:`status` names it.
        weight: its share beside others, as that of :class:`offload.Cluster`.
        address: see :func:`start`.

    Raises:
        ConfigError: for a weight that is not above 0, if there is no such cluster or run, if the cluster has no arbiter, or if the arbiter
            does not answer.
    """
    share = check_number("weight", weight, above=0.0, sane="a share, such as 2")
    with _cluster(address):
        from offload.arbiter import registry

        if not registry.weigh(name, share):
            there = ", ".join(run.name for run in registry.status().runs) or "none"
            raise ConfigError(f"no run {name!r} reports to the arbiter: the runs that do are {there}.")


def stop(address: str | None = None) -> None:
    """Stop the arbiter of a cluster. The runs keep what they hold. ``address``: see :func:`start`.

    Raises:
        ConfigError: if there is no such cluster, or if it has no arbiter.
    """
    with _cluster(address):
        from offload.arbiter import registry

        registry.stop()


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """A connection to the cluster."""
    from offload.train.cluster.running import connected_to_running  # it imports Ray

    with connected_to_running(address, "an arbiter runs"):
        yield
