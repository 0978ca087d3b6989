"""A batch as a training function gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import RunError
from offload.pipeline.wire import SAMPLE_ID


class Batch(dict[str, Any]):
    """The columns of a batch. ``batch["sample_id"]`` gives the samples' ids, int64, but is not among the columns: ``model(**batch)`` passes
    the columns alone."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self._sample_ids = self.pop(SAMPLE_ID, None)

    def __missing__(self, name: str) -> Any:
        if name == SAMPLE_ID and self._sample_ids is not None:
            return self._sample_ids
        raise KeyError(name)

    def columns(self, names: Sequence[str]) -> tuple[Any, ...]:
        """These columns, in that order; ``sample_id`` may be among them. Raises RunError if one is missing."""
        try:
            return tuple(self[name] for name in names)
        except KeyError as error:
            raise RunError(f"there is no column {error.args[0]!r}; a batch has {', '.join(self)}.") from None
