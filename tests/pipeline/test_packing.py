"""A batch of any structure arrives as it was."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision import tv_tensors

from offload.pipeline.blocks.packing import BESIDE_BYTES, pack, unpack
from tests.loader.same import same

DTYPES = [
    torch.uint8,
    torch.int64,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.complex64,
]


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Tensors of any type, shape and layout: permuted, with gaps, expanded, empty, small and large."""
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 50, 130]), max_size=3))
    made = (torch.rand(shape) * 100).to(draw(st.sampled_from(DTYPES)))
    if made.dim() > 1 and draw(st.booleans()):
        made = made.transpose(0, -1)
    if made.dim() and draw(st.booleans()):
        made = made[..., ::2]
    return made.unsqueeze(0).expand(3, *made.shape) if draw(st.booleans()) else made


leaves = st.one_of(tensors(), st.integers(), st.text(), st.binary(), st.none(), st.floats(allow_nan=False))
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4), st.tuples(inner, inner)
    ),
)


def travel(batch: Any) -> Any:
    return unpack(pickle.loads(pickle.dumps(pack(batch))))


@given(batches)
def test_every_structure_arrives_as_it_was(batch: Any) -> None:
    assert same(travel(batch), batch, strides=False)


def test_the_layout_of_dense_tensors_stays() -> None:
    images = torch.rand(4, 3, 50, 60).to(memory_format=torch.channels_last)
    assert travel(images).is_contiguous(memory_format=torch.channels_last)


def test_large_contents_lie_beside_the_pickle_and_are_writable() -> None:
    batch = {
        "image": torch.zeros(BESIDE_BYTES),
        "label": torch.zeros(8, dtype=torch.long),
        "array": np.zeros(BESIDE_BYTES),
    }
    packed = pack(batch)
    assert [content.nbytes for content in packed.contents] == [4 * BESIDE_BYTES, 8 * BESIDE_BYTES]
    assert len(packed.structure) < BESIDE_BYTES
    for content in packed.contents:
        content.flags.writeable = False  # as Ray hands them out
    arrived = unpack(packed)
    arrived["image"] += 1
    arrived["array"] += 1
    assert float(arrived["image"].sum()) == BESIDE_BYTES


@pytest.mark.parametrize(
    "special",
    [
        tv_tensors.BoundingBoxes(torch.rand(3, 4), format="XYXY", canvas_size=(9, 9)),  # type: ignore[call-arg]
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["boxes", "parameter", "leaf", "sparse", "conjugate"],
)
def test_special_tensors_keep_what_makes_them_special(special: torch.Tensor) -> None:
    arrived = travel({"x": special})["x"]
    assert (type(arrived), arrived.dtype, arrived.layout) == (type(special), special.dtype, special.layout)
    assert arrived.requires_grad == special.requires_grad
    assert torch.equal(
        arrived.to_dense() if special.is_sparse else arrived, special.to_dense() if special.is_sparse else special
    )
    assert vars(arrived) == vars(special)


def test_a_tensor_in_two_places_stays_one() -> None:
    one = torch.ones(3)
    first, second = travel([one, one])
    assert first is second
