"""Read a run through its cluster, from a host that may not see the run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ray.exceptions import RayError

from offload.errors import ConfigError, argument
from offload.report.page.records import RunReader
from offload.report.run_dir import EVENTS
from offload.report.run_tail import Look, RunOverError, Tails, tails_in
from offload.train.cluster.connection import check_address, connected
from offload.train.hub.client import HubClient
from offload.train.hub.run_names import hub_of, runs


@contextmanager
def reader_on(address: str, name: str | None) -> Iterator[RunReader]:
    """A reader of a run on the cluster at ``address``: the one with this name, or the only one.

    Raises ConfigError if there is no such run, or several, or no such cluster. Its reads raise RunOverError after the run's end, unless
    this host sees the run directory.
    """
    cluster = check_address(address)
    if cluster == "local":  # would start a new cluster
        raise _none(address)
    with connected(cluster, runs=False):
        yield _reader(_chosen(runs(), name, address))


def _reader(run: str) -> RunReader:
    try:
        hub = hub_of(run)
        path = hub.run_dir()
    except (RayError, ValueError):  # ValueError: Ray's for the name of an actor that has ended
        raise _over(run, "its run directory") from None
    return RunReader(path, _look(hub, run, path))


def _chosen(running: list[str], name: str | None, address: str) -> str:
    if not running:
        raise _none(address)
    known = ", ".join(running)
    if name is None and len(running) > 1:
        raise ConfigError(
            f"several runs train on the Ray cluster at {address!r}: {known}. Choose one: {argument('run', running[0])}."
        )
    if name is not None and name not in running:
        raise ConfigError(f"no run {name!r} trains on the Ray cluster at {address!r}, but {known}.")
    return name or running[0]


def _look(hub: HubClient, run: str, path: Path) -> Look:
    """The files of the run: on this host if they are here, for they outlive the hub, or else through the hub."""
    here = tails_in(path)

    def there(offsets: Mapping[str, int]) -> Tails:
        try:
            return hub.tails(offsets)
        except RayError:
            raise _over(run, f"{path} on its driver's host") from None

    return here if _same(here, there) else there


def _same(here: Look, there: Look) -> bool:
    """Return whether both see the same run: its first event tells the time and the nodes."""
    try:
        first = [look({}).get(EVENTS) for look in (here, there)]
    except ConfigError:
        return False
    lines = [None if tail is None else tail.data.partition(b"\n")[0] for tail in first]
    return lines[0] is not None and lines[0] == lines[1]


def _none(address: str) -> ConfigError:
    return ConfigError(
        f"no run trains on the Ray cluster at {address!r}. For a run that has ended, name its folder: offload watch RUN_DIR."
    )


def _over(run: str, where: str) -> RunOverError:
    return RunOverError(f"the run {run!r} has ended, or its driver is lost; {where} tells how.")
