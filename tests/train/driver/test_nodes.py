"""Nodes that are lost, joined, or that fail again and again: on a Ray cluster of several raylets. Drained ones: test_notices.py; lost
ones with a worker: test_training_on_hosts.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROGRAM = "tests.programs.nodes_come_and_go"


def command(scenario: str, tmp_path: Path, driver: int) -> list[str]:
    return [sys.executable, "-m", PROGRAM, scenario, str(tmp_path), str(driver)]


def run(scenario: str, tmp_path: Path, driver: int = 0) -> dict[str, Any]:
    done = subprocess.run(command(scenario, tmp_path, driver), capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == "finished"
    assert told["right"]
    return told


def of_kind(told: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in told["events"] if event["event"] == kind]


@pytest.mark.soak
def test_nodes_that_preprocess_are_lost_and_join_while_the_worker_goes_on(tmp_path: Path) -> None:
    told = run("preprocessing", tmp_path)
    assert not of_kind(told, "worker_lost")
    assert told["repeated_steps"] == 0
    lost, joined = of_kind(told, "cluster_changed")
    assert (len(lost["left"]), len(joined["joined"])) == (1, 1)
    (short,) = of_kind(told, "short_of_memory")
    assert short["cores"] == [2]  # of four, since each process keeps as much as that dataset needs
    assert (lost["preprocessing_cores"], joined["preprocessing_cores"]) == (2, 4)


@pytest.mark.soak
def test_a_node_on_which_workers_die_repeatedly_is_excluded(tmp_path: Path) -> None:
    told = run("deadly", tmp_path)
    (excluded,) = of_kind(told, "node_excluded")
    assert len(excluded["nodes"]) == 1
    assert len(of_kind(told, "worker_lost")) in (2, 3)  # of a death that a peer notices before Ray nobody is blamed
    assert told["workers"][-1] == 1


@pytest.mark.soak
def test_a_driver_that_is_killed_resumes_by_the_same_command(tmp_path: Path) -> None:
    killed = subprocess.Popen(
        command("driver", tmp_path, 0), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    deadline = time.monotonic() + 800
    log = tmp_path / "log" / "1-0.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 80:  # in the fourth epoch
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.wait()
    for process in started:  # its cluster, whose processes would outlive it
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    told = run("driver", tmp_path, 1)
    (resumed,) = of_kind(told, "resumed")
    assert resumed["step"] > 0
