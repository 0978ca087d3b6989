"""A run on Ray is listed and steered from outside: it pauses, resumes, resizes and stops, and trains each sample once all the same."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from click.testing import CliRunner
from ray.util.placement_group import placement_group_table

import offload
from offload import runs
from offload.cli.main import main
from offload.train.steering import registry
from tests.conftest import LOGICAL_CPUS
from tests.helpers import eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
SAMPLES = 64
STEP_S = 0.05  # idle: the cores are for what steers the run


def train(ctx: offload.Context) -> None:
    """Train until somebody ends it, and write down which samples each epoch has trained."""
    model, _ = ctx.prepare(m := torch.nn.Linear(1, 1), torch.optim.SGD(m.parameters(), lr=0.0))
    for epoch in ctx.epochs(100_000):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["x"][:, None]).mean())
            ctx.step()
            with open(f"{ctx.config['seen']}.{ctx.rank}", "a") as file:
                file.writelines(f"{epoch} {int(x)}\n" for x in batch["x"])
            time.sleep(STEP_S)


class Running:
    """A run under way in a thread of this process."""

    def __init__(self, folder: Path, name: str = "vit", **named: Any) -> None:
        self.seen, self.result, self.error = folder / "seen", {}, None
        rows = [{"x": torch.tensor(float(n))} for n in range(SAMPLES)]
        trainer = offload.Trainer(
            train,
            datasets={"train": offload.from_torch(rows)},
            batch_size=16,
            train_loop_config={"seen": str(self.seen)},
            **named,
        )

        def fit() -> None:
            try:
                self.result = trainer.fit(run_dir=folder / name, quiet=True).document
            except offload.OffloadError as error:
                self.error = error

        self.thread = threading.Thread(target=fit)
        self.thread.start()

    def trained(self) -> Counter[str]:
        files = self.seen.parent.glob("seen.*")
        return Counter(line for file in files for line in file.read_text().splitlines())


class Other:
    """Another program."""

    def ready(self) -> None: ...


def state(name: str = "vit") -> str:
    return next((run.state for run in runs.listed() if run.name == name), "")


def reason(name: str) -> str:
    return next((run.reason for run in runs.listed() if run.name == name), "")


def groups() -> list[Any]:
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def all_is_free() -> bool:
    return ray.available_resources().get("CPU") == LOGICAL_CPUS and not groups()


def test_a_run_pauses_resumes_resizes_and_stops(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Running(tmp_path, workers=(1, 2))
    eventually(lambda: state() == "training")
    capfd.readouterr()
    main(["runs", "--json"], standalone_mode=False)
    (listed,) = json.loads(capfd.readouterr().out)["runs"]
    assert (listed["name"], listed["workers"], listed["bounds"]) == ("vit", 2, [1, 2])

    with pytest.raises(offload.ConfigError, match="no run 'bert' on this Ray cluster: there are vit"):
        runs.pause("bert")
    with pytest.raises(offload.ConfigError, match="'vit' was not resumed: it is not paused"):
        runs.resume("vit")
    with pytest.raises(
        offload.ConfigError, match="'vit' was not resized: it may have from 1 to 2 workers, and 3 was asked for"
    ):
        runs.resize("vit", 3)
    with pytest.raises(offload.ConfigError, match="workers must be at least 1"):
        runs.resize("vit", 0)

    assert runs.pause("vit") == "paused: it holds nothing"
    eventually(all_is_free)
    assert state() == "paused"
    assert run.thread.is_alive()
    before = run.trained().total()
    assert runs.resume("vit") == "resumed with 2 worker(s)"
    eventually(lambda: run.trained().total() > before)

    assert runs.resize("vit", 1) == "resized to 1 worker"
    assert registry.states(5.0)[0].workers == 1
    here = ray.get_runtime_context().get_node_id()
    assert runs.resize("vit", 2, nodes={here: 2}) == "resized to 2 workers"

    stopped = CliRunner().invoke(main, ["runs", "stop", "vit"])
    assert (stopped.exit_code, stopped.stdout) == (0, "vit: stopped.\n")
    run.thread.join()
    assert run.result["status"] == "interrupted"
    eventually(lambda: all_is_free() and not registry.names())
    counts = run.trained()
    last = max(int(line.partition(" ")[0]) for line in counts)
    finished = {line: count for line, count in counts.items() if int(line.partition(" ")[0]) < last}
    assert set(finished.values()) == {1}
    assert len(finished) == last * SAMPLES


def test_a_run_takes_up_what_another_program_gives_back(tmp_path: Path) -> None:
    other: Any = ray.remote(Other).options(num_cpus=2).remote()
    ray.get(other.ready.remote())
    run = Running(tmp_path, workers=1)
    try:
        eventually(lambda: [(r.state, r.cores) for r in runs.listed()] == [("training", 1)])
        ray.kill(other)
        eventually(lambda: [(r.state, r.workers, r.cores) for r in runs.listed()] == [("training", 1, 3)])
    finally:
        runs.stop("vit")
        run.thread.join()


def test_a_paused_run_leaves_its_room_to_the_one_that_waits(tmp_path: Path) -> None:
    first = Running(tmp_path / "1", workers=3)
    eventually(lambda: state() == "training")
    second = Running(tmp_path / "2", workers=3)
    eventually(lambda: "other programs hold" in reason("vit-2"))
    runs.pause("vit")
    eventually(lambda: state("vit-2") == "training")
    runs.resume("vit")
    eventually(lambda: state() == "waiting")
    runs.stop("vit-2")
    eventually(lambda: state() == "training")
    runs.stop("vit")
    for run in (first, second):
        run.thread.join()
        assert run.result["status"] == "interrupted"
