"""Nodes that are drained, lost, joined, or that fail again and again: on a Ray cluster of several raylets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("nodes_come_and_go.py")


def run(scenario: str, tmp_path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), scenario, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == "finished"
    assert told["right"]
    return told


def of_kind(told: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in told["events"] if event["event"] == kind]


def test_a_drained_node_is_left_after_a_commit_and_nothing_is_trained_again(tmp_path: Path) -> None:
    told = run("drain", tmp_path)
    (changed,) = of_kind(told, "cluster_changed")
    assert len(changed["leaving"]) == 1
    (commit,) = [e for e in of_kind(told, "checkpoint") if e["reason"] == "resize"]
    assert commit["at"] - changed["at"] < 20
    assert told["repeated_steps"] == 0
    assert (told["workers"][0], told["workers"][-1]) == (2, 1)
    assert not of_kind(told, "worker_lost")


def test_a_lost_node_with_a_worker_costs_what_was_not_committed(tmp_path: Path) -> None:
    told = run("lost", tmp_path)
    assert (told["workers"][0], told["workers"][-1]) == (2, 1)
    assert of_kind(told, "worker_lost")


def test_a_lost_node_that_only_preprocessed_stops_no_worker(tmp_path: Path) -> None:
    told = run("preprocessing", tmp_path)
    assert not of_kind(told, "worker_lost")
    assert told["repeated_steps"] == 0
    assert of_kind(told, "cluster_changed")


def test_a_node_that_joins_preprocesses(tmp_path: Path) -> None:
    told = run("join", tmp_path)
    (changed,) = of_kind(told, "cluster_changed")
    assert len(changed["joined"]) == 1
    assert changed["preprocessing_cores"] == 6
    assert told["repeated_steps"] == 0


def test_a_node_on_which_workers_die_repeatedly_is_excluded(tmp_path: Path) -> None:
    told = run("deadly", tmp_path)
    (excluded,) = of_kind(told, "node_excluded")
    assert len(excluded["nodes"]) == 1
    assert len(of_kind(told, "worker_lost")) == 2
    assert told["workers"][-1] == 1
