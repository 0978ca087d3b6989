"""A batch as a training function gets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.errors import RunError
from offload.train.worker.data.batch import Batch


def batch() -> Batch:
    return Batch({"sample_id": torch.tensor([4, 7]), "x": torch.ones(2)})


def test_a_model_takes_the_columns_alone() -> None:
    def model(**columns: Any) -> set[str]:
        return set(columns)

    assert model(**batch()) == set(batch()) == {"x"}


def test_ids_come_when_they_are_asked_for() -> None:
    assert batch()["sample_id"].tolist() == [4, 7]
    x, ids = batch().columns(["x", "sample_id"])
    assert (x.tolist(), ids.tolist()) == ([1.0, 1.0], [4, 7])


def test_a_missing_column_is_named() -> None:
    with pytest.raises(RunError, match="there is no column 'label'; a batch has x"):
        batch().columns(["x", "label"])
    with pytest.raises(KeyError):
        batch()["label"]
