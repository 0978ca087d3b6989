"""Rows that the probe keeps, to replay batches of any size."""

from __future__ import annotations

import copy
from typing import Any

import torch

from offload.pipeline.order.ranges import Ranges
from offload.probe.stages import size_of
from offload.train.worker.data.batches import LocalBatch
from offload.train.worker.data.cutting import Cut
from offload.train.worker.data.delivery import Delivery


class Kept:
    """Copies of the first ``most`` rows of batches. They are joined only at the end, since copying takes time from the cores under
    measurement."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._parts: dict[str, list[Any]] = {}
        self._samples: list[Any] = []

    def add(self, batch: LocalBatch) -> None:
        """Keep as many rows of this batch as are still missing."""
        if not self._left or not batch.rows:
            return
        rows = min(batch.rows, self._left)
        self._left -= rows
        if batch.samples:
            self._samples += copy.deepcopy(batch.samples[:rows])
            return
        for name, column in batch.content.items():
            part = column[:rows]
            self._parts.setdefault(name, []).append(part.clone() if isinstance(part, torch.Tensor) else list(part))

    def joined(self) -> Rows:
        """All kept rows."""
        columns = {
            name: torch.cat(parts) if isinstance(parts[0], torch.Tensor) else [row for part in parts for row in part]
            for name, parts in self._parts.items()
        }
        return Rows(columns, self._samples)


class Rows:
    """Rows of columns on the device, or whole samples."""

    def __init__(self, columns: dict[str, Any], samples: list[Any]) -> None:
        self._columns, self._samples = columns, samples
        self._count = len(samples) or len(next(iter(columns.values()), ()))

    def __len__(self) -> int:
        return self._count

    def batch(self, size: int, first: int, delivery: Delivery) -> Any:
        """A batch of ``size`` rows from ``first`` on, wrapping around at their end."""
        chosen = [(first + i) % self._count for i in range(size)]
        if self._samples:
            samples = tuple(copy.deepcopy(self._samples[i]) for i in chosen)
            cut = Cut(samples=samples, ids=tuple(chosen), rows=size, weight=size, positions=Ranges.of(chosen))
            content, event = delivery.deliver(cut)
            delivery.arrived(content, event)
            return content
        return {
            name: column[torch.tensor(chosen, device=column.device)]
            if isinstance(column, torch.Tensor)
            else [column[i] for i in chosen]
            for name, column in self._columns.items()
        }


def row_bytes(batch: LocalBatch) -> int:
    """The bytes of the first row of a batch, or of the mean of its samples, at least 1."""
    if batch.samples:
        return max(int(size_of(batch.samples) / len(batch.samples)), 1)
    content = batch.content if isinstance(batch.content, dict) else {}
    return max(int(size_of({name: column[:1] for name, column in content.items()})), 1)
