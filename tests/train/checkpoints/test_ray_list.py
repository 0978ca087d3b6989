"""The list of checkpoints that Ray Train keeps is mended where it names what is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import _CheckpointManagerState

from offload.train.checkpoints import format as checkpoint
from offload.train.checkpoints.format import Progress, Training
from offload.train.checkpoints.ray_list import SNAPSHOT, in_order, mend_snapshot, mended_snapshot
from offload.train.checkpoints.storage import Storage
from offload.train.config import Checkpoints

NAMES = ["checkpoint_2026-11-22_10-00-00.1", "checkpoint_2026-11-22_10-00-10.2", "checkpoint_2026-11-22_10-00-20.3"]


def listed() -> dict[str, Any]:
    return mended_snapshot(None, NAMES)


def test_what_is_made_up_is_what_ray_train_reads() -> None:
    """A contract with what is private to it."""
    for there in (NAMES, NAMES[:1], []):
        state = _CheckpointManagerState.model_validate(mended_snapshot(listed(), there))
        assert [each.checkpoint_dir_name for each in state.checkpoint_results] == there
        assert len(state.checkpoint_report_indices) == len(there)
    assert set(listed()) == set(_CheckpointManagerState.model_fields)


def test_a_list_that_holds_is_left_as_it_is() -> None:
    state = listed()
    assert mended_snapshot(state, [*NAMES, "checkpoint_not_listed_yet"]) is state


def test_the_newest_that_is_there_comes_to_be_the_latest() -> None:
    state = mended_snapshot(listed(), NAMES[:2])
    assert state["latest_checkpoint_result"]["checkpoint_dir_name"] == NAMES[1]
    assert state["checkpoint_report_indices"] == [0, 1]
    assert state["current_report_index"] == 3
    kept = mended_snapshot(listed(), NAMES[1:])
    assert kept["latest_checkpoint_result"]["checkpoint_dir_name"] == NAMES[2]
    assert mended_snapshot(listed(), [])["latest_checkpoint_result"] is None


def test_a_list_of_another_ray_is_left_to_ray_train() -> None:
    state = {name: value for name, value in listed().items() if name != "checkpoint_report_indices"}
    assert in_order(state, Checkpoints(best="loss")) is state


def test_a_checkpoint_without_the_metric_counts_as_the_worst() -> None:
    """Ray Train stores a value that is not finite as null."""
    state = listed()
    for result, metrics in zip(state["checkpoint_results"], ({"loss": 1.0}, {"loss": None}, {}), strict=True):
        result["metrics"] = metrics
    for mode, order in (("min", [1, 2, 0]), ("max", [1, 2, 0])):
        ordered = in_order(state, Checkpoints(best="loss", mode=mode))  # type: ignore[arg-type]
        assert ordered["checkpoint_report_indices"] == order
        assert [each["checkpoint_dir_name"] for each in ordered["checkpoint_results"]] == [NAMES[at] for at in order]


@pytest.mark.parametrize("content", ["", '{"checkpoint_results": [', "[]"])
def test_half_a_list_is_made_anew(tmp_path: Path, content: str) -> None:
    for name in NAMES:
        (tmp_path / "run" / name).mkdir(parents=True)
    path = tmp_path / "run" / SNAPSHOT
    path.write_text(content)
    for _ in range(2):
        assert mend_snapshot(Storage(path=str(tmp_path)), "run", Checkpoints()) == len(NAMES)
        assert json.loads(path.read_text()) == listed()


def test_without_a_list_those_that_are_whole_are_listed(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / "run" / name).mkdir(parents=True)  # the disk was full as the first was written
        assert mend_snapshot(Storage(path=str(tmp_path)), "run", Checkpoints()) == 0
        assert not (tmp_path / "run" / SNAPSHOT).exists()
    checkpoint.save(tmp_path / "run" / NAMES[1], {}, Training(progress=Progress()).to_state())
    checkpoint.save(tmp_path / "run" / NAMES[2], {}, Training(progress=Progress()).to_state())
    (tmp_path / "run" / NAMES[2] / checkpoint.MODEL_FILE).write_bytes(b"half")
    assert mend_snapshot(Storage(path=str(tmp_path)), "run", Checkpoints()) == 1
    state = json.loads((tmp_path / "run" / SNAPSHOT).read_text())
    assert state["latest_checkpoint_result"]["checkpoint_dir_name"] == NAMES[1]


def test_nothing_is_written_where_nothing_is(tmp_path: Path) -> None:
    assert mend_snapshot(Storage(path=str(tmp_path)), "run", Checkpoints()) == 0
    assert not (tmp_path / "run").exists()
