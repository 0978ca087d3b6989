"""Runs with several feeds on a real Ray cluster: every sample once, whatever happens to the feeds."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.train
import torch

import offload
from offload.model.feeds import FeedRule
from offload.report.run_dir import read_lines
from offload.train.driver import run as run_module
from tests.conftest import LOGICAL_CPUS
from tests.emulation.history import each_pass, log_batch, read_history
from tests.emulation.numbers import Line
from tests.helpers import eventually

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

SAMPLES, EPOCHS = 403, 3
EACH_ONCE = {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}


class Numbered(Line):
    """Samples that also tell the process that made them, and its number in the run."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        info: Any = torch.utils.data.get_worker_info()
        return {**super().__getitem__(i), "process": np.int64(os.getpid()), "number": np.int64(info.id)}


def feeds() -> list[tuple[str, str]]:
    """The names and namespaces of the feeds that run beside hubs."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [(actor["name"], actor["namespace"]) for actor in actors if " feed " in actor["name"]]


def train(ctx: offload.Context) -> None:
    """Logs each step's ids. ``at``: what rank 0 does before the steps of these numbers; ``raises_at``: where all ranks commit and raise."""
    torch.manual_seed(7)
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    folder = Path(ctx.config["log"])
    for _ in ctx.epochs(EPOCHS):
        for batch in ctx.batches("train"):
            step = ctx.global_step
            if step == ctx.config["raises_at"]:
                ctx._loop.committer.commit("interval")
                raise ValueError("no such colour")
            log_batch(ctx, batch, folder, ctx.config["round"])
            with open(folder / f"processes of run {ctx.config['round']}", "a") as file:
                pairs = zip(batch["number"].tolist(), batch["process"].tolist(), strict=True)
                file.writelines(f"{number} {process}\n" for number, process in pairs)
            marker = folder / f"done-{step}"
            if ctx.rank == 0 and step in ctx.config["at"] and not marker.exists():
                marker.write_text("\n".join(name for name, _ in feeds()))
                act(ctx, ctx.config["at"][step])
            ctx.backward(((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean())
            ctx.step()
        ctx.report(steps=ctx.global_step)


def act(ctx: offload.Context, what: str | int) -> None:
    """Kill all feeds beside the hub, or the hub itself, or let preprocessing have so many cores."""
    if what == "kill the hub":
        ray.kill(ctx._loop.setup.hub.actor)
        return
    if what == "kill":
        for name, namespace in feeds():
            ray.kill(ray.get_actor(name, namespace))
        return
    here = ray.get_runtime_context().get_node_id()
    hub: Any = ctx._loop.setup.hub
    assert hub.reshape((here,) * int(what), {here: 1e9}, 100.0).result()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    log = tmp_path / "log"
    log.mkdir()

    def go(number: int, *, at: dict[int, Any] | None = None, raises_at: int = -1) -> Any:
        monkeypatch.setattr(run_module, "FEED_RULE", FeedRule(least=number))
        return offload.Trainer(
            train,
            datasets={"train": offload.from_torch(Numbered(SAMPLES, noise=1.0))},
            scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5}),
            train_loop_config={
                "log": str(log),
                "at": at or {},
                "raises_at": raises_at,
                "round": len(list((tmp_path / "run").glob("error.txt"))),
            },
            workers=2,
            batch_size=16,
        ).fit(run_dir=tmp_path / "run", quiet=True)

    return go


def test_cores_change_and_a_feed_dies(run: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run(2, at={5: 2, 9: 3, 35: "kill", 60: 2}).status == "finished"
    assert each_pass(read_history(log)) == EACH_ONCE
    (before,), (after,) = ((log / f"done-{step}").read_text().splitlines() for step in (35, 60))
    assert before != after, "the next worker group has another feed"
    events = read_lines(tmp_path / "run" / "events.jsonl")
    (lost,) = [event for event in events if event["event"] == "worker_lost"]
    assert "the process of a feed has ended" in lost["reason"]
    assert sum(event["event"] == "node_preprocesses" for event in events) == 1, "two feeds begin on one node"
    eventually(lambda: not feeds())


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_resumes_in_the_middle_of_an_epoch(run: Any, tmp_path: Path, before: int, after: int) -> None:
    with pytest.raises(offload.RunError, match="no such colour"):
        run(before, raises_at=33, at={30: 3})
    assert len((tmp_path / "log" / "done-30").read_text().splitlines()) == before - 1
    eventually(lambda: not feeds())
    assert run(after, at={40: 3}).status == "finished"
    assert len((tmp_path / "log" / "done-40").read_text().splitlines()) == after - 1
    assert each_pass(read_history(tmp_path / "log")) == EACH_ONCE
    for round_, number in ((0, before), (1, after)):
        lines = (tmp_path / "log" / f"processes of run {round_}").read_text().splitlines()
        processes = {(int(of_run), int(pid)) for of_run, pid in map(str.split, lines)}
        numbers = sorted(of_run for of_run, _ in processes)
        assert len(set(numbers)) == len(processes), "no two processes of a run have the same number"
        assert (numbers[-1] < LOGICAL_CPUS) == (number == 1)


def test_feeds_and_their_preprocessing_end_with_the_hub(run: Any, tmp_path: Path) -> None:
    with pytest.raises(offload.RunError):
        run(2, at={9: "kill the hub"})
    eventually(lambda: not feeds() and ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
