"""The exchange of gradients just before a step, on one of two ranks. The test plays the other one."""

from __future__ import annotations

import pytest
import torch

from offload.train.worker.steps import joining
from offload.train.worker.steps.joining import Distributed


def test_gradients_of_sparse_embeddings_become_the_mean_and_stay_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    (table(torch.tensor([1, 1, 2])).sum() + (weight * 3.0).sum()).backward()
    theirs = torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [8.0, 8.0]])  # of other rows

    def add(flat: torch.Tensor) -> None:
        flat += torch.cat([theirs.reshape(-1), torch.full((4,), 5.0)])

    monkeypatch.setattr(joining.dist, "all_reduce", add)
    monkeypatch.setattr(joining.dist, "get_world_size", lambda: 2)
    gradients = [table.weight.grad, weight.grad]
    Distributed().average([each for each in gradients if each is not None])
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert table.weight.grad.coalesce().indices().tolist() == [[1, 2, 3]]
    assert table.weight.grad.to_dense().tolist() == [[0.0, 0.0], [2.0, 2.0], [0.5, 0.5], [4.0, 4.0]]
    assert weight.grad is not None
    assert weight.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    torch.optim.SparseAdam([table.weight]).step()
