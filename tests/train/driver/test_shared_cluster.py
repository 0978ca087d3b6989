"""A cluster on which other programs work, too: a run takes what they leave, and waits where that is too little."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import offload
from offload.model.placement import NodeResources, beside, bundle_of
from offload.report.events.event import read_event
from offload.report.run_dir import read_lines
from offload.report.terminal.live_line import LiveLine
from offload.train.cluster.holdings import Holdings
from offload.train.cluster.node_requests import NodeRequests
from offload.train.cluster.ray_nodes import free_resources
from tests.conftest import LOGICAL_CPUS
from tests.helpers import end_loaders, eventually
from tests.loops import one_epoch

SAMPLES, BATCH = 32, 8


def test_what_others_hold_of_a_node_is_left_to_them() -> None:
    node = NodeResources(name="n", cpus=8, gpus=2, others={"disk": 3.0})
    assert beside(node, {}) == node
    left = beside(node, {"CPU": 3, "GPU": 2, "disk": 5})
    assert (left.cpus, left.gpus, left.others) == (5, 0, {"disk": 0.0})


@ray.remote
class Other:
    """Another program."""

    def ready(self) -> None: ...


def fit(tmp_path: Path, **options: Any) -> dict[str, Any]:
    data = torch.utils.data.TensorDataset(torch.zeros(SAMPLES, 1))
    trainer = offload.Trainer(
        one_epoch, datasets={"train": offload.from_torch(data, columns=["x"])}, batch_size=BATCH, workers=1, **options
    )
    return trainer.fit(run_dir=tmp_path / "run").document


@pytest.mark.ray
def test_room_that_comes_first_is_kept_until_the_rest_is_there(ray_cluster: None) -> None:
    def held() -> float:
        return sum(each["CPU"] for each in requests.held().values())

    other = Other.options(num_cpus=2).remote()  # type: ignore[attr-defined]
    ray.get(other.ready.remote())
    requests, bundle = NodeRequests(Holdings()), bundle_of({"CPU": 1.5, "GPU": 0})
    try:
        requests.ask({bundle: 2}, hold=True)
        eventually(lambda: held() == 1.5)
        requests.ask({bundle: 1}, hold=True)  # what is missing now
        assert held() == 1.5
        ray.kill(other)
        eventually(lambda: held() == 3.0)
        # Without holding what came is given back, and asked for again.
        requests.ask({bundle: 1})
        eventually(lambda: held() == 1.5)
    finally:
        requests.close()
    eventually(lambda: sum(node.get("CPU", 0.0) for node in free_resources().values()) == LOGICAL_CPUS)


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_takes_the_cores_that_others_leave(ray_cluster: None, tmp_path: Path) -> None:
    other = Other.options(num_cpus=2).remote()  # type: ignore[attr-defined]
    ray.get(other.ready.remote())
    try:
        summary = fit(tmp_path)
    finally:
        ray.kill(other)
    assert summary["samples"] == SAMPLES
    assert summary["preprocessing_cores"] == LOGICAL_CPUS - 2 - 1  # one is the worker's
    (told,) = [event for event in read_lines(tmp_path / "run" / "events.jsonl") if event["event"] == "others_hold"]
    assert read_event(told).sentence({}) == (
        "other programs hold 2 of 4 CPU: this run uses the rest, and what they release later"
    )


class Process(torch.utils.data.Dataset[int]):
    """The process that makes each sample, which takes it a moment."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> int:
        time.sleep(0.02)
        return os.getpid()


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_has_the_cores_of_an_idle_loader_though_ray_frees_them_late(ray_cluster: None, tmp_path: Path) -> None:
    loader: Any = offload.DataLoader(Process())
    try:
        os.kill(int(next(iter(loader))), signal.SIGSTOP)  # Ray asks it to end, and kills it only seconds later
        summary = fit(tmp_path)
    finally:
        del loader
        end_loaders()
    assert summary["preprocessing_cores"] == LOGICAL_CPUS - 1  # one is the worker's
    events = read_lines(tmp_path / "run" / "events.jsonl")
    assert not [event for event in events if event["event"] == "others_hold"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("autoscaled", "said"),
    [
        (False, "waiting for room: this program itself holds 4 of 4 CPU (actor Other 4 CPUs)"),
        pytest.param(
            True,
            "waiting for nodes with room for 1 × 1 CPU; this program itself holds 4 of 4 CPU (actor Other 4 CPUs)",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_run_that_finds_no_room_says_so_and_begins_when_there_is(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autoscaled: bool, said: str
) -> None:
    other = Other.options(num_cpus=LOGICAL_CPUS).remote()  # type: ignore[attr-defined]
    ray.get(other.ready.remote())
    shown: list[str] = []

    def status(self: LiveLine, text: str) -> None:
        shown.append(text)
        if text == said:
            ray.kill(other)

    monkeypatch.setattr(LiveLine, "status", status)
    summary = fit(tmp_path, cluster=offload.Cluster(autoscale_workers=autoscaled))
    assert next(text for text in shown if "room" in text) == said
    assert summary["samples"] == SAMPLES
    assert summary["preprocessing_cores"] == LOGICAL_CPUS - 1
