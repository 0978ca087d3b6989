"""Preprocessing cores that are asked for and given back: by Ray's own autoscaler, which starts and ends real raylets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.model.placement import Placement, on_fewest_nodes
from tests.helpers import ROOT, require_hosts
from tests.programs.autoscaled import inside


def test_cores_lie_on_few_nodes_and_stay_where_they_are() -> None:
    placement = Placement(workers=1, held=(0, 1, 0, 0), free_cpus=(4.0, 2.0, 8.0, 4.0))
    assert on_fewest_nodes(placement, 100) == (4, 2, 8, 4)
    assert on_fewest_nodes(placement, 9) == (0, 2, 7, 0)
    assert on_fewest_nodes(placement, 5, (0, 2, 0, 4)) == (0, 2, 0, 3)
    assert on_fewest_nodes(placement, 1) == (0, 1, 0, 0)


def test_bounds_of_cores_that_contradict_are_refused() -> None:
    for bounds in ((0, 4), (5, 4)):
        with pytest.raises(offload.ConfigError, match=r"preprocessing_cores.* must .*such as \(4, 64\)"):
            offload.Cluster(preprocessing_cores=bounds)


def told_by(script: str, tmp_path: Path, version: int, *more: str) -> dict[str, Any]:
    """What a script says after its run on a cluster with an autoscaler."""
    require_hosts()
    command = [sys.executable, "-m", f"tests.programs.{script}", str(tmp_path), str(version), *more]
    done = subprocess.run(inside(tmp_path, command), capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == "finished"
    assert told["right"], "samples were lost or repeated"
    return told


@pytest.mark.ray
@pytest.mark.hosts
@pytest.mark.soak
def test_nodes_come_when_the_input_binds_and_are_given_back_when_it_does_not(tmp_path: Path) -> None:
    told = told_by("cores_come_and_go", tmp_path, 2)
    fast = [epoch["at"] for epoch in told["epochs"] if epoch["fast"]]
    slow_again = next(epoch["at"] for epoch in told["epochs"] if not epoch["fast"] and epoch["at"] > fast[-1])
    wanted = [(e["at"], e["cores"]) for e in told["events"] if e["event"] == "cores_wanted"]
    growing = [cores for at, cores in wanted if fast[0] < at < slow_again]
    shrinking = [cores for at, cores in wanted if at > slow_again]
    planned = 4.4  # cores: 80 samples/s of 20 a core, and a tenth more
    assert growing == sorted(growing)
    assert planned - 2 <= growing[-1] <= planned + 2  # nodes have two cores each
    assert shrinking == sorted(shrinking, reverse=True)
    assert shrinking[-1] <= 2
    # The machine that the head is on has two of these cores.
    assert 1 <= max(count for _, _, count in told["nodes"]) <= 2
    assert told["nodes"][-1][2] == 0, "what is not needed was not given back"


@pytest.mark.ray
@pytest.mark.hosts
@pytest.mark.soak
@pytest.mark.parametrize("until", ["two workers train", "a node was given back"])
def test_a_run_waits_for_its_first_worker_asks_for_another_that_pays_and_gives_it_back_when_it_does_not(
    tmp_path: Path, until: str
) -> None:
    told = told_by("workers_come_and_go", tmp_path, 1, until)
    kinds = [event["event"] for event in told["events"]]
    assert "cluster_changed" in kinds[kinds.index("workers_wanted") : kinds.index("resized")]
    resized = [(event["workers_before"], event["workers"]) for event in told["events"] if event["event"] == "resized"]
    placed = [count for _, count, _ in told["nodes"]]
    assert placed[:2] == [0, 1]
    given_back = until == "a node was given back"
    assert resized == ([(1, 2), (2, 1)] if given_back else [(1, 2)])
    assert placed[placed.index(2) :] == ([2, 1] if given_back else [2])
