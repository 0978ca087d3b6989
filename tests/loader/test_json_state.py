"""Whatever a checkpoint takes, JSON takes too once it is encoded, and it comes back equal and of the same type."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.loader.state.json_state import TAG, decoded, encoded
from offload.train.checkpoints.plain import NotPlainError
from tests.train.checkpoints.test_plain import LEAVES, containers


def through_json(value: Any) -> Any:
    return decoded(json.loads(json.dumps(encoded(value, "the state"), allow_nan=False)))


@settings(max_examples=50)
@given(st.recursive(LEAVES, containers, max_leaves=12))
def test_what_is_data_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    back = through_json(value)
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.Generator().manual_seed(1).get_state(),
        torch.empty(0, dtype=torch.uint8),
        torch.arange(6).reshape(2, 3)[:, 1:],
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.rand(3, requires_grad=True),
    ],
    ids=["octets", "none", "view", "bfloat16", "grad"],
)
def test_tensors_come_back(tensor: torch.Tensor) -> None:
    back = through_json({"tensor": tensor})["tensor"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor.detach())


def test_arrays_and_what_has_no_number_in_json_come_back() -> None:
    state = {"array": np.arange(6, dtype=">i2").reshape(2, 3), "inf": float("-inf"), TAG: OrderedDict([(1, (2, 3))])}
    back = through_json(state)
    assert back["array"].dtype == state["array"].dtype  # type: ignore[union-attr]
    assert np.array_equal(back["array"], state["array"])
    assert (back["inf"], back[TAG]) == (state["inf"], state[TAG])
    assert np.isnan(through_json([float("nan")])[0])


def test_a_view_does_not_bring_the_memory_that_it_shows() -> None:
    assert len(json.dumps(encoded(torch.zeros(1_000_000)[:2], "a view"))) < 4000


def test_the_state_of_a_generator_is_shorter_than_its_bytes() -> None:
    state = torch.Generator().manual_seed(1).get_state()
    assert len(encoded(state, "a generator")["content"]) < len(state)


def test_an_object_is_refused_by_its_place() -> None:
    with pytest.raises(NotPlainError, match=r"the state\['draws'\]\[0\] is of type numpy.*Generator"):
        encoded({"draws": [np.random.default_rng()]}, "the state")


@pytest.mark.parametrize(
    "damaged",
    [
        {TAG: "octets"},
        {TAG: "unknown", "content": []},
        {TAG: "octets", "content": "no base64"},
        {TAG: "octets", "content": "AAAA"},
        {TAG: "saved", "content": encoded(torch.zeros(1), "")["content"][:-40]},
        {TAG: "tuple", "content": 3},
        {TAG: "dict", "content": [3]},
        {TAG: "float", "content": None},
    ],
    ids=str,
)
def test_damage_is_a_value_error(damaged: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decoded([damaged])
