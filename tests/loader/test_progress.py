"""The state of a DataLoader's samplers at the beginning of an epoch."""

from __future__ import annotations

from typing import Any

import torch

from offload.loader.progress import restore, state_of


class Stepped(torch.utils.data.SequentialSampler):
    """Its state depends on what the program knows, as that of some samplers for large runs."""

    def state_dict(self, step: int) -> dict[str, Any]:
        return {"start": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the program keeps this state")


def test_a_sampler_that_wants_to_be_told_the_step_keeps_no_state_here() -> None:
    sampler = Stepped(range(3))
    state = state_of([sampler], None)
    assert state["samplers"] == [{}]
    restore(state, [sampler], None)
