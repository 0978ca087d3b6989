"""A smaller depth of the same model, for machines where a whole step takes too long for repeated measurement.

Models of repeated blocks (transformers, residual stages) take ``T(1) + (D − 1)·(T(2) − T(1))`` seconds a step at depth D.
Where it stops: :mod:`offload.measure.sizes` combines the measurements at depths 1 and 2.
"""

from __future__ import annotations

import torch

LEAST_BLOCKS = 4
LEAST_PARAMETERS = 5_000_000  # for fewer, a whole step is quick to measure
SHARE = 0.5  # least share of the parameters in the blocks for depth to matter


class Depth:
    """The longest sequence of equal blocks of a model, which can be shortened and restored."""

    def __init__(self, blocks: torch.nn.Module) -> None:
        self._blocks = blocks
        self._all = dict(blocks._modules)

    def __len__(self) -> int:
        return len(self._all)

    def cut(self, depth: int) -> None:
        """Keep only the first ``depth`` blocks."""
        self._blocks._modules = dict(list(self._all.items())[:depth])

    def whole(self) -> None:
        """Restore all blocks."""
        self._blocks._modules = dict(self._all)


def repeated_blocks(model: torch.nn.Module) -> Depth | None:
    """The blocks of a model whose step is long because it is deep; None for any other model."""
    total = sum(p.numel() for p in model.parameters())
    if total < LEAST_PARAMETERS:
        return None
    blocks = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.Sequential | torch.nn.ModuleList)
        and len(module) >= LEAST_BLOCKS
        and len({type(block) for block in module}) == 1
    ]
    size = {id(module): sum(p.numel() for p in module.parameters()) for module in blocks}
    deepest = max(blocks, key=lambda module: size[id(module)], default=None)
    if deepest is None or size[id(deepest)] < SHARE * total:
        return None
    return Depth(deepest)
