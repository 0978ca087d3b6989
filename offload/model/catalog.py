"""Node types, shapes made of them, and the catalog with their prices.

Where it stops: text in, values out. The command line reads files and asks for today's prices.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offload.errors import ConfigError, argument
from offload.model.checks import check_count, check_number
from offload.model.overlap import plain

EXPECTED = {
    "vcpus": "cores as the provider counts them, such as 16",
    "memory_gib": "GiB, such as 32",
    "gpus": "a number of GPUs, such as 1",
    "network_gbps": "gigabits per second, such as 10",
    "usd_per_hour": "US dollars per hour, such as 0.816",
    "core_speed": "relative to an ml.c5 vCPU, such as 1.0",
    "gpu_speed": "relative to the device of the profile, such as 2.5",
    "spot_usd_per_hour": "US dollars per hour, such as 0.30",
    "interruptions_per_hour": "per node, such as 0.02",
}
MAKERS = {"nvidia", "tesla", "amd"}  # words of a GPU's name that drivers add, leave out or change


@dataclass(frozen=True, kw_only=True)
class NodeType:
    """One type of node.

    Args:
        name: the provider's name: ``ml.c5.4xlarge``.
        vcpus: cores as the provider counts them.
        memory_gib: main memory.
        gpus: GPUs; 0 for a CPU node.
        gpu_model: the GPU's name: ``NVIDIA A10G``; None if it is not known.
        gpu_speed: speed of one GPU relative to the device that the profile was measured on; None: known only if that device
            is the same model.
        network_gbps: gigabits per second, sustained unless ``burst``.
        burst: whether ``network_gbps`` is an "up to" figure that does not last.
        usd_per_hour: the on-demand price.
        spot_usd_per_hour: the spot price, if known.
        interruptions_per_hour: how often the provider reclaims such a spot node, if known.
        core_speed: speed of one vCPU while all vCPUs of its node are busy, relative to an ml.c5 vCPU.
        region, price_source: where the price applies, and its source.

    Raises:
        ConfigError: for a value out of its range, with the value found and an example of a sane one.
    """

    name: str
    vcpus: int
    memory_gib: float
    usd_per_hour: float
    network_gbps: float
    gpus: int = 0
    gpu_model: str | None = None
    gpu_speed: float | None = None
    burst: bool = False
    spot_usd_per_hour: float | None = None
    interruptions_per_hour: float | None = None
    core_speed: float = 1.0
    region: str | None = None
    price_source: str | None = None

    def __post_init__(self) -> None:
        check_count(self._of("vcpus"), self.vcpus, least=1, sane=EXPECTED["vcpus"], whole_floats=True)
        check_count(self._of("gpus"), self.gpus, sane=EXPECTED["gpus"], whole_floats=True)
        for name in ("memory_gib", "network_gbps", "usd_per_hour", "core_speed"):
            check_number(self._of(name), getattr(self, name), above=0.0, sane=EXPECTED[name])
        for name in ("gpu_speed", "spot_usd_per_hour"):
            if getattr(self, name) is not None:
                check_number(self._of(name), getattr(self, name), above=0.0, sane=EXPECTED[name])
        if self.interruptions_per_hour is not None:
            check_number(
                self._of("interruptions_per_hour"),
                self.interruptions_per_hour,
                sane=EXPECTED["interruptions_per_hour"],
            )
        if not isinstance(self.burst, bool):
            raise ConfigError(f"{self._of('burst')} must be true or false, found {self.burst!r}.")
        for name in ("gpu_model", "region", "price_source"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"{self._of(name)} must be text, found {getattr(self, name)!r}.")

    def _of(self, field: str) -> str:
        return f"{field} of {self.name}"

    def is_model_of(self, device: str) -> bool:
        """Return whether its GPU is the one that torch calls ``device``: all words of the model's name but the maker's are words of the
        device's name, as A100 is in ``NVIDIA A100-SXM4-40GB``."""
        model = _words(self.gpu_model or "") - MAKERS
        return bool(model) and model <= _words(device)


@dataclass(frozen=True, eq=False)
class Shape:
    """The nodes to rent: a count for each type. Counts may be arrays, for many shapes at once.

    Raises:
        ConfigError: if a count is negative or not whole, or if there is no GPU node.
    """

    nodes: Mapping[NodeType, Any]

    def __post_init__(self) -> None:
        counts = {kind: np.asarray(count) for kind, count in self.nodes.items()}
        for kind, count in counts.items():
            if not np.all(np.isfinite(count) & (count >= 0) & (count == np.floor(count))):
                raise ConfigError(f"the number of {kind.name} nodes must be a whole number ≥ 0, found {count}.")
        # Past the frozen dataclass: counts become arrays once, here.
        object.__setattr__(self, "nodes", counts)
        if not any(kind.gpus for kind in counts):
            names = ", ".join(kind.name for kind in counts) or "no nodes"
            raise ConfigError(f"a shape needs nodes with GPUs for its workers, found {names}.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            return NotImplemented
        return self.nodes.keys() == other.nodes.keys() and all(
            np.array_equal(self.nodes[kind], other.nodes[kind]) for kind in self.nodes
        )

    def __hash__(self) -> int:
        return hash(frozenset(self.nodes))

    @property
    def usd_per_hour(self) -> Any:
        """The on-demand price of all nodes."""
        return plain(np.asarray(sum(kind.usd_per_hour * count for kind, count in self.nodes.items())))

    @property
    def gpus(self) -> Any:
        """The number of GPUs: the most workers that it can hold."""
        return plain(np.asarray(sum(kind.gpus * count for kind, count in self.nodes.items())))

    def of(self, *, gpu: bool) -> Iterator[tuple[NodeType, NDArray[Any]]]:
        """Types and counts of the GPU nodes, or of the CPU nodes."""
        return ((kind, count) for kind, count in self.nodes.items() if (kind.gpus > 0) == gpu)


@dataclass(frozen=True)
class Catalog:
    """Node types by name."""

    nodes: Mapping[str, NodeType]

    @staticmethod
    def from_toml(text: str, *, source: str = "the catalog") -> Catalog:
        """Parse ``[nodes."ml.c5.4xlarge"]`` tables.

        Raises ConfigError if the text is not TOML, a type appears twice, or a field is missing, unknown or out of its
        range.
        """
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{source} is not valid TOML: {_readable(error, text)}") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists within lists without end
            raise ConfigError(f"{source} cannot be read: {error}. Did you mean another file?") from None
        tables = document.get("nodes")
        if not isinstance(tables, dict) or not tables:
            raise ConfigError(
                f'{source} holds no nodes. Give each one a table: [nodes."ml.c5.4xlarge"] with vcpus, memory_gib, '
                "gpus, network_gbps, usd_per_hour."
            )
        return Catalog({name: _node_type(name, table, source) for name, table in tables.items()})

    def extended_by(self, other: Catalog) -> Catalog:
        """Both catalogs; ``other`` wins for a type that both hold."""
        return Catalog({**self.nodes, **other.nodes})

    def with_prices(self, usd_per_hour: Mapping[str, float], *, region: str, source: str) -> Catalog:
        """The same types with these prices. Prices of other types are ignored."""
        priced = {
            name: replace(self.nodes[name], usd_per_hour=usd, region=region, price_source=source)
            for name, usd in usd_per_hour.items()
            if name in self.nodes
        }
        return Catalog({**self.nodes, **priced})

    def __getitem__(self, name: str) -> NodeType:
        """The type of that name. Raises ConfigError, with the nearest names, if there is none."""
        if name not in self.nodes:
            near = difflib.get_close_matches(name, self.nodes, n=3, cutoff=0.5)
            hint = f"Nearest: {', '.join(near)}." if near else f"It holds {', '.join(sorted(self.nodes)[:5])}, …"
            raise ConfigError(
                f"the catalog holds no instance type {name!r}. {hint} Add a type of your own with "
                f"{argument('catalog', 'FILE', python='offload.prices.load_catalog(FILE)')}."
            )
        return self.nodes[name]

    def gpu_type(self, name: str) -> NodeType:
        """The type of that name, for workers. Raises ConfigError if it has no GPUs."""
        kind = self[name]
        if not kind.gpus:
            some = [n for n, k in self.nodes.items() if k.gpus][:3]
            raise ConfigError(
                f"{name} has no GPU and cannot hold workers: give it as a CPU type, and one with GPUs "
                f"({', '.join(some)}, …) as the GPU type."
            )
        return kind

    def cpu_type(self, name: str) -> NodeType:
        """The type of that name, for preprocessing alone. Raises ConfigError if it has GPUs that would idle."""
        kind = self[name]
        if kind.gpus:
            raise ConfigError(f"{name} has {kind.gpus} GPUs that would idle in preprocessing: give it as a GPU type.")
        return kind

    def shape(self, counts: Mapping[str, ArrayLike]) -> Shape:
        """A shape from counts by name."""
        return Shape({self[name]: count for name, count in counts.items()})


def _words(name: str) -> set[str]:
    return {word for word in re.split(r"[\s-]+", name.lower()) if word}


def _node_type(name: str, table: Any, source: str) -> NodeType:
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {name} must be a table of fields, found {table!r}.")
    known = [field.name for field in fields(NodeType) if field.name != "name"]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                f"{source}: {name} has an unknown field {key!r}. "
                + (f"Did you mean {near[0]}?" if near else f"Known are {', '.join(known)}.")
            )
    for key in ("vcpus", "memory_gib", "network_gbps", "usd_per_hour"):
        if key not in table:
            raise ConfigError(f"{source}: {name} has no {key} ({EXPECTED[key]}).")
    return NodeType(name=name, **table)


def _readable(error: tomllib.TOMLDecodeError, text: str) -> str:
    """The error's text with the line it refers to: for a duplicate table, tomllib does not give the name."""
    place = re.search(r"at line (\d+)", str(error))
    line = text.splitlines()[int(place[1]) - 1].strip() if place else ""
    twice = "Cannot declare" in str(error) or "Cannot overwrite" in str(error)
    return f"{error}{f': {line}' if line else ''}{' (each type may appear only once)' if twice else ''}"
