"""A run whose program is killed leaves no placement group, actor or process on a cluster that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import placement_group_table

import offload
from offload import runs
from offload.train.steering import registry
from tests.conftest import LOGICAL_CPUS
from tests.helpers import MARK, ROOT, command_of, eventually, marked, title_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
Kill = Callable[[], object]


def train(ctx: offload.Context) -> None:
    """Train until somebody ends it."""
    model, _ = ctx.prepare(m := torch.nn.Linear(1, 1), torch.optim.SGD(m.parameters(), lr=0.0))
    for _ in ctx.epochs(1_000_000):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["x"][:, None]).mean())
            ctx.step()
            time.sleep(0.05)  # idle: the cores are for what ends the run


def fit(folder: Path, address: str | None = None) -> None:
    rows = [{"x": torch.tensor(float(n))} for n in range(64)]
    trainer = offload.Trainer(train, datasets={"train": offload.from_torch(rows)}, batch_size=16, workers=1)
    trainer.fit(run_dir=folder, quiet=True, address=address)


@ray.remote(num_cpus=0)
class Host:
    """A program's actor that trains."""

    def process(self) -> int:
        return os.getpid()

    def fit(self, folder: Path) -> None:
        fit(folder)


@contextmanager
def in_an_actor(folder: Path, mark: str) -> Iterator[tuple[Kill, Kill]]:
    host: Any = Host.options(runtime_env={"env_vars": {MARK: mark}}).remote()  # type: ignore[attr-defined]
    pid = ray.get(host.process.remote())
    running = host.fit.remote(folder)
    try:
        yield lambda: ray.kill(host), lambda: os.kill(pid, signal.SIGKILL)
    finally:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(running)


def the_actor_is_killed(folder: Path, mark: str) -> None:
    with in_an_actor(folder, mark) as (kill, _):
        eventually(trains)
        kill()


def the_process_of_the_actor_is_killed(folder: Path, mark: str) -> None:
    with in_an_actor(folder, mark) as (_, kill):
        eventually(trains)
        kill()


def the_driver_is_killed(folder: Path, mark: str) -> None:
    address = ray.get_runtime_context().gcs_address
    words = f"from tests.train.driver.test_left_behind import fit; fit({str(folder)!r}, {address!r})"
    with subprocess.Popen([sys.executable, "-c", words], cwd=ROOT, env={**os.environ, MARK: mark}) as driver:
        eventually(trains)
        driver.kill()


def trains() -> bool:
    return any(run.state == "training" for run in runs.listed())


def groups() -> list[Any]:
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(the_actor_is_killed, marks=pytest.mark.soak),  # nearly the same to Ray as the end of its process
        the_process_of_the_actor_is_killed,
        the_driver_is_killed,
    ],
)
def test_a_killed_program_leaves_nothing_behind(tmp_path: Path, end: Callable[[Path, str], None]) -> None:
    mark = uuid.uuid4().hex
    end(tmp_path / "vit", mark)

    def processes() -> list[str]:
        # The server of a node's processes is not the run's: it ends once nobody has used it for a while.
        return [title_of(process) for process in marked(mark) if not any("preload" in w for w in command_of(process))]

    def left() -> tuple[object, ...]:
        return ray.available_resources().get("CPU"), groups(), registry.names(), processes()

    eventually(lambda: left() == (LOGICAL_CPUS, [], [], []), state=left)
