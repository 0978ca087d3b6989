"""What Ray prints in a program that has started it."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import ray._private.worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
from ray._private.state import actors

from offload.pipeline.blocks.sender import BlockSender
from offload.pipeline.pool.preprocessor import Preprocessor
from offload.train.cluster import ray_output
from offload.train.cluster.ray_output import CLASSES, keep_to_logs
from tests.helpers import eventually

DIED = (
    "A worker died or was killed while executing a task by an unexpected system error. Worker PID: {} Worker exit type"
)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that Ray prints."""
    lines: list[str] = []

    def show(data: Any, *args: Any, **named: Any) -> None:
        lines.extend(data["lines"])

    monkeypatch.setattr(ray._private.worker, "print_to_stdstream", show)
    # Ray's own: an earlier run of this process may have replaced it.
    monkeypatch.setattr(dispatcher, "emit", type(dispatcher).emit.__get__(dispatcher))
    monkeypatch.setattr(dispatcher, "handlers", [("test", show)])
    monkeypatch.setattr(ray_output, "_ours", set(ray_output.LOADER))
    return lines


def test_lines_of_a_run_and_of_loaders_stay_in_ray_s_logs(shown: list[str]) -> None:
    def emit(actor: str | None) -> None:
        dispatcher.emit({"actor_name": actor, "lines": [str(actor)], "is_err": False})

    keep_to_logs("vit")
    keep_to_logs("vit-2")
    for actor in ("vit worker", "vit-2 hub", "preprocessing", "DataLoader feed", "their worker", None):
        emit(actor)
    assert shown == ["their worker", "None"]


class Theirs:
    """An actor of the program's."""

    def pid(self) -> int:
        return 0


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_deaths_of_our_processes_are_not_told_twice(shown: list[str]) -> None:
    keep_to_logs()
    ours, theirs = ray.remote(BlockSender).remote(), ray.remote(Theirs).remote()
    ray.get([ours.ready.remote(), theirs.pid.remote()])
    known: Any = actors()
    mine = {actor._actor_id.hex() for actor in (ours, theirs)}  # other tests' actors may live on
    pids = {each["ActorClassName"]: each["Pid"] for name, each in known.items() if name in mine}
    for actor in (ours, theirs):
        ray.kill(actor)
    eventually(lambda: all(actors()[name]["State"] == "DEAD" for name in mine))
    for name in ("BlockSender", "Theirs"):
        ray._private.worker.print_to_stdstream(
            {"lines": [DIED.format(pids[name])], "pid": "raylet", "is_err": False}, False
        )
    ray._private.worker.print_to_stdstream(
        {"lines": ["the node is short of memory"], "pid": "raylet", "is_err": False}, False
    )
    assert shown == [DIED.format(pids["Theirs"]), "the node is short of memory"]


def test_classes_bear_the_names_by_which_ray_knows_them() -> None:
    assert {Preprocessor.__name__, BlockSender.__name__} < set(CLASSES)
