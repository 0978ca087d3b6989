"""A connection to a Ray cluster that runs already, for a program that looks at it or steers what runs there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offload.errors import ConfigError, argument
from offload.train.cluster.connection import check_address, connected


@contextmanager
def connected_to_running(address: str | None, doing: str) -> Iterator[None]:
    """A connection to the cluster at ``address``; None: RAY_ADDRESS, or else the one on this host. ``doing``: what it is for, as the
    beginning of a sentence.

    Raises ConfigError if there is no such cluster.
    """
    cluster = check_address(address) or _cluster_here()
    if cluster == "local":  # would start a new cluster
        raise ConfigError(
            f"{doing} on a Ray cluster that runs already, found {argument('address', 'local')}: pass its HOST:PORT."
        )
    with connected(cluster, runs=False):
        yield


def _cluster_here() -> str | None:
    try:
        return check_address("auto")
    except ConfigError:
        raise ConfigError(
            f"no Ray cluster runs on this machine, and none is named: pass {argument('address', 'HOST:PORT')} of one, or set RAY_ADDRESS."
        ) from None
