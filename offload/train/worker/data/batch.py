"""A batch as a training function gets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from offload.errors import RunError
from offload.pipeline.blocks.wire import SAMPLE_ID

T = TypeVar("T")


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


def shown_batch(content: Any) -> Any:
    """A batch as the loop gets it: a dict of columns as a :class:`Batch`, anything else unchanged."""
    return Batch(content) if type(content) is dict else content


def columns_of(batch: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """These columns of a batch. Raises RunError for a batch that a ``collate_fn`` made without columns."""
    if isinstance(batch, Batch):
        return batch.columns(names)
    raise RunError(
        f"ctx.batches(..., {', '.join(map(repr, names))}) picks columns, and the collate_fn returned a {type(batch).__name__}. Leave the "
        "names out, or return a dict."
    )


class BatchIterator(Iterator[T], Generic[T]):
    """The batches of a pass. ``len()`` is the number of this worker's batches at the present batch size, as progress bars want it; a batch
    that adapts changes it."""

    def __init__(self, batches: Iterator[T], count: int | None) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> BatchIterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._batches)

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError(
                "the number of batches is unknown: the data set does not say how many samples it has, its transform is a generator, or its "
                "collate_fn has max_tokens"
            )
        return self._count
