"""The rows of the matrix: which Python, Ray and torch each installs, and whether that must work or be refused. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

PYTHON = "3.11"
"""The Python of a row that is about something else."""
OLDEST_MINOR, NEWEST_MINOR = 50, 60
PROGRAMS = {
    "dataloader": "`offload.DataLoader`",
    "trainer": "`offload.Trainer`, two workers",
    "dataset": "a `ray.data.Dataset` under the Trainer",
    "kill": "a worker is killed with SIGKILL",
    "resize": "2 → 1 → 2 workers",
    "resume": "interrupted and resumed",
    "job": "a job on a Ray head",
}
"""The programs in the order in which they run, and what each shows."""
REFUSAL = "refusal"
"""Instead of the programs: offload is refused in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One environment.

    Args:
        name: its name in the table.
        python: the minor version of its Python.
        packages: requirements in addition to offload's own.
        resolution: which versions uv takes where several fit.
        expects: whether offload works in it, or is refused.
    """

    name: str
    python: str = PYTHON
    packages: tuple[str, ...] = ()
    resolution: Literal["highest", "lowest-direct"] = "highest"
    expects: Literal["works", "refused"] = "works"
    remark: str = field(default="", compare=False)


def _ray(minor: int) -> str:
    return f"ray[data,default]==2.{minor}.*"


ROWS = (
    *(Row(name=f"ray2.{minor}", packages=(_ray(minor),)) for minor in range(OLDEST_MINOR, NEWEST_MINOR + 1)),
    Row(name="newest", packages=("ray[data,default]",), remark="the newest version of every package"),
    *(Row(name=f"python3.{minor}", python=f"3.{minor}", packages=("ray[data,default]",)) for minor in (12, 13, 14)),
    Row(name="torch2.6", packages=("ray[data,default]", "torch==2.6.*")),
    Row(
        name="lowest",
        packages=("ray[default]",),
        resolution="lowest-direct",
        remark="the lowest version of every package that offload names",
    ),
    Row(name="ray2.49", packages=("ray==2.49.*",), expects="refused"),
    Row(name="python3.10", python="3.10", packages=("ray==2.50.*",), expects="refused"),
)


class UnknownName(ValueError):
    """A name of no row or program; the text lists those that exist."""


def chosen_rows(names: Sequence[str]) -> list[Row]:
    """The rows with these names, in the order of ROWS; all without names. Raises UnknownName."""
    wanted = _known("row", names, [row.name for row in ROWS])
    return [row for row in ROWS if row.name in wanted]


def chosen_programs(names: Sequence[str]) -> list[str]:
    """The programs with these names, in their order; all without names. Raises UnknownName."""
    wanted = _known("program", names, PROGRAMS)
    return [name for name in PROGRAMS if name in wanted]


def _known(kind: str, names: Sequence[str], known: Iterable[str]) -> set[str]:
    all_names = list(known)
    unknown = [name for name in names if name not in all_names]
    if unknown:
        raise UnknownName(f"there is no {kind} {', '.join(unknown)}; the {kind}s are {', '.join(all_names)}")
    return set(names or all_names)
