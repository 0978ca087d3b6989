"""A run read through its cluster, by the name of its hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from click.testing import CliRunner, Result

from offload.cli.main import main
from offload.pipeline.feed.datasets import Cores
from offload.report.page.records import RunReader
from offload.report.run_tail import RunOverError
from offload.train.cluster.holdings import Holdings
from offload.train.hub import view
from offload.train.hub.ray_hub import RayHub
from offload.train.hub.run_names import hub_of, named_hub, runs
from tests.helpers import eventually
from tests.report.runs import Writer

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
NOTHING = Cores(nodes=(), task_cpus=1.0, stores={})


@contextmanager
def training(path: Path) -> Iterator[str]:
    """A run's directory and hub, without its driver and its workers. The run's name on the cluster."""
    run = Writer(path)
    run.begin()
    run.train(3)

    def start(**named: str) -> Any:
        return ray.remote(RayHub).options(num_cpus=0, **named).remote({}, NOTHING, 1, path)

    name, actor = named_hub(path.name, start, Holdings())
    try:
        yield name
    finally:
        ray.kill(actor)
        eventually(lambda: name not in runs())


def watch(*arguments: str) -> Result:
    address = ray.get_runtime_context().gcs_address
    return CliRunner().invoke(main, ["watch", "--address", address, *arguments])


def test_a_run_is_chosen_by_name_and_read_as_it_grows(tmp_path: Path) -> None:
    none = watch()
    assert (none.exit_code, "no run trains on the Ray cluster at" in none.stderr) == (2, True)
    assert "offload watch RUN_DIR" in none.stderr
    with training(tmp_path / "a" / "vit") as first:
        with training(tmp_path / "b" / "vit") as second:
            assert (first, second) == ("vit", "vit-2")
            several = watch()
            assert several.exit_code == 2
            assert ": vit, vit-2. Choose one: --run vit." in several.stderr
            unknown = watch("--run", "bert")
            assert (unknown.exit_code, "no run 'bert' trains" in unknown.stderr) == (2, True)
            with view.reader_on(ray.get_runtime_context().gcs_address, "vit-2") as here:
                assert here.read().path == tmp_path / "b" / "vit"
        assert len(here.read().intervals) == 3, "this host sees the directory, which outlives the hub"
        hub = hub_of("vit")
        elsewhere = RunReader(tmp_path, view._look(hub, "vit", tmp_path / "on another host"))
        assert len(elsewhere.read().intervals) == 3
    with pytest.raises(RunOverError, match="the run 'vit' has ended, or its driver is lost"):
        elsewhere.read()
