"""Cut the rows of blocks into local batches.

Where it stops: rows in, rows out; :mod:`offload.train.worker.data.delivery` makes tensors of them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from offload.errors import FAILURES, RunError
from offload.pipeline.blocks import whole_samples
from offload.pipeline.blocks.whole_samples import SAMPLES
from offload.pipeline.blocks.wire import ERROR, HIDDEN, POSITION, SAMPLE_ID, Columns, join, parts_of_columns
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.preprocessing.wording import say


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A skipped sample, and the reason."""

    sample_id: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """A limit of a local batch beside its number of samples: the sum of their ``tokens``, such as lengths."""

    tokens: Callable[[Any], int]
    most: int


def budget_of(collate_fn: Any) -> TokenBudget | None:
    """The limit of tokens that a collate function sets for a batch, such as :class:`offload.collate.pad` with ``max_tokens``."""
    most = getattr(collate_fn, "max_tokens", None)
    return None if most is None else TokenBudget(tokens=collate_fn.tokens, most=most)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The rows of a local batch.

    Args:
        pieces: the rows as columns, if they did not travel as whole samples.
        samples, ids: whole samples and their ids, otherwise.
        rows: the number of samples.
        weight: their weight in the gradient: the number of samples, or of tokens under a :class:`TokenBudget`.
        positions: the positions that the batch trains.
        partial: whether it is the last batch, and not full.
        skipped: samples that were skipped just before.
    """

    pieces: tuple[Columns, ...] = ()
    samples: tuple[Any, ...] = ()
    ids: tuple[int, ...] = ()
    rows: int
    weight: int
    positions: Ranges
    partial: bool = False
    skipped: tuple[Skipped, ...] = ()

    def first(self, rows: int) -> Cut:
        """A copy of the first ``rows`` rows, for fillers. If there are fewer, the first one repeats."""
        pick = [*range(min(rows, self.rows)), *([0] * (rows - self.rows))]
        if self.samples:
            samples = copy.deepcopy([self.samples[i] for i in pick])
            return Cut(
                samples=tuple(samples),
                ids=tuple(self.ids[i] for i in pick),
                rows=0,
                weight=0,
                positions=Ranges(),
            )
        # Fillers serve the whole run, and views would keep their block as long.
        piece = {
            n: c[pick] if isinstance(c, np.ndarray) else [c[i] for i in pick]
            for n, c in _joined(self.pieces, rows).items()
        }
        return Cut(pieces=(piece,), rows=0, weight=0, positions=Ranges())

    def again(self) -> Cut:
        """The same rows for another batch, whatever a ``collate_fn`` did to their first use."""
        return dataclasses.replace(self, samples=copy.deepcopy(self.samples)) if self.samples else self


def _joined(pieces: Sequence[Columns], rows: int) -> Columns:
    """The first ``rows`` rows of pieces, as far as they have them."""
    first, counts = list[Columns](), list[int]()
    for piece in pieces:
        if (more := rows - sum(counts)) > 0:
            first.append({n: c[:more] for n, c in piece.items()})
            counts.append(len(first[-1][POSITION]))
    return {name: join(parts) for name, parts in parts_of_columns(first, counts).items()}


class Cutter:
    """Cuts pieces, as they come, into local batches.

    A sample of which a transform made several is never divided: its samples come in one batch, which they may exceed alone.

    Args:
        least: the fewest rows of a batch, where that can be had: the last batch takes rows from the one before. Models with batch
            normalisation cannot train on a single row.
        budget: a limit besides the number of samples.
    """

    def __init__(self, *, least: int = 1, budget: TokenBudget | None = None) -> None:
        self._least, self._budget = least, budget
        self._rows: _Rows = _ColumnRows()
        self._skipped: list[Skipped] = []

    def add(self, columns: Columns, rows: int) -> None:
        """Add a piece of so many rows of a block."""
        columns, rows = _without_errors(columns, rows, self._skipped)
        if not rows:
            return
        # One block with whole samples is enough: a batch cannot hold some rows as columns and others not.
        if SAMPLES in columns and isinstance(self._rows, _ColumnRows):
            self._rows = _WholeRows(self._budget, self._rows.as_entries())
        self._rows.add(columns, rows)

    def cut(self, size: int, *, over: bool, near_end: bool) -> Cut | None:
        """The next batch of up to ``size`` samples; None if more rows must come first.

        Args:
            over: whether no more rows will come.
            near_end: whether the rows may end soon. The batch then waits until enough rows for the one after it are here.
        """
        head, complete, rest = self._rows.head(size)
        if not over:
            # Wait for more rows: the batch is not full, or what follows might be too little for a batch of its own.
            if not complete or (near_end and rest < self._least):
                return None
        elif not head:
            return None
        elif 0 < rest < self._least <= head - (self._least - rest):
            # The batch gives rows to the last one, which would be too small, if both are then large enough.
            size = head - (self._least - rest)
        cut = self._rows.pop(size, tuple(self._skipped), partial=over and not complete)
        self._skipped.clear()
        return cut

    def leftover(self) -> tuple[Skipped, ...]:
        """The skipped samples after the last batch."""
        return tuple(self._skipped)


class _Rows(Protocol):
    def add(self, columns: Columns, rows: int) -> None:
        """Add a piece."""

    def head(self, size: int) -> tuple[int, bool, int]:
        """(the samples of the next batch, whether no later row can join it, the samples after it)."""

    def pop(self, size: int, skipped: tuple[Skipped, ...], *, partial: bool) -> Cut:
        """Remove the next batch."""


class _ColumnRows:
    """Rows as views of blocks' columns."""

    def __init__(self) -> None:
        self._pieces: list[Columns] = []
        self._counts: list[int] = []

    def add(self, columns: Columns, rows: int) -> None:
        self._pieces.append(columns)
        self._counts.append(rows)

    def head(self, size: int) -> tuple[int, bool, int]:
        total = sum(self._counts)
        return min(size, total), total >= size, max(total - size, 0)

    def pop(self, size: int, skipped: tuple[Skipped, ...], *, partial: bool) -> Cut:
        size = min(size, sum(self._counts))
        head, self._pieces, self._counts = _split(self._pieces, self._counts, size)
        ranges = [Ranges.of(np.asarray(piece[POSITION])) for piece in head]
        positions = ranges[0] if len(ranges) == 1 else Ranges.of_all(ranges)
        return Cut(pieces=tuple(head), rows=size, weight=size, positions=positions, partial=partial, skipped=skipped)

    def as_entries(self) -> list[_Entry]:
        """The rows as whole samples."""
        entries = []
        for columns, rows in zip(self._pieces, self._counts, strict=True):
            visible = {name: column for name, column in columns.items() if name not in (*HIDDEN, SAMPLE_ID)}
            entries += _entries(columns, whole_samples.rows_of(visible, rows))
        return entries


@dataclass(frozen=True)
class _Entry:
    """All samples of one input."""

    samples: tuple[Any, ...]
    position: int
    sample_id: int


class _WholeRows:
    """Rows as whole samples."""

    def __init__(self, budget: TokenBudget | None, entries: list[_Entry]) -> None:
        self._budget, self._entries = budget, entries
        self._tokens = [self._tokens_of(entry) for entry in entries]

    def add(self, columns: Columns, rows: int) -> None:
        if SAMPLES in columns:
            columns = dict(columns)
            samples = whole_samples.decode(columns)
        else:
            visible = {name: column for name, column in columns.items() if name not in (*HIDDEN, SAMPLE_ID)}
            samples = whole_samples.rows_of(visible, rows)
        entries = _entries(columns, samples)
        self._entries += entries
        self._tokens += [self._tokens_of(entry) for entry in entries]

    def _tokens_of(self, entry: _Entry) -> int:
        if self._budget is None:
            return 0
        try:
            return sum(self._budget.tokens(sample) for sample in entry.samples)
        except RunError:
            raise
        except FAILURES as error:  # the user's function may raise anything
            name = getattr(self._budget.tokens, "__qualname__", "tokens")
            raise RunError(
                f"{name}(sample) of the collate_fn raised {say(error)} on sample {entry.sample_id}. Correct it: it gets a sample as the "
                "data set or its transform returned it, and returns the number of its tokens."
            ) from None

    def _prefix(self, size: int) -> tuple[int, int, bool]:
        """(entries, samples, complete) of the next batch. An entry is never divided, and the first one always fits."""
        samples = tokens = 0
        for number, entry in enumerate(self._entries):
            over = self._budget is not None and tokens + self._tokens[number] > self._budget.most
            if samples and (samples + len(entry.samples) > size or over):
                return number, samples, True
            samples += len(entry.samples)
            tokens += self._tokens[number]
        return len(self._entries), samples, samples >= size

    def head(self, size: int) -> tuple[int, bool, int]:
        entries, samples, complete = self._prefix(size)
        return samples, complete, sum(len(entry.samples) for entry in self._entries[entries:])

    def pop(self, size: int, skipped: tuple[Skipped, ...], *, partial: bool) -> Cut:
        count, _, _ = self._prefix(size)
        head, tokens = self._entries[:count], sum(self._tokens[:count])
        del self._entries[:count], self._tokens[:count]
        samples = tuple(sample for entry in head for sample in entry.samples)
        return Cut(
            samples=samples,
            ids=tuple(entry.sample_id for entry in head for _ in entry.samples),
            rows=len(samples),
            weight=len(samples) if self._budget is None else tokens,
            positions=Ranges.of(entry.position for entry in head),
            partial=partial,
            skipped=skipped,
        )


def _entries(columns: Columns, rows: list[list[Any]]) -> list[_Entry]:
    positions, ids = columns[POSITION], columns[SAMPLE_ID]
    return [_Entry(tuple(samples), int(positions[i]), int(ids[i])) for i, samples in enumerate(rows)]


def _without_errors(columns: Columns, rows: int, skipped: list[Skipped]) -> tuple[Columns, int]:
    """(the columns, the number of rows) without samples that preprocessing has skipped; these are added to ``skipped``."""
    reasons = columns.pop(ERROR, None)
    if reasons is None or not any(reasons):
        return columns, rows
    ids = columns[SAMPLE_ID]
    skipped += [Skipped(sample_id=int(ids[i]), reason=r) for i, r in enumerate(reasons) if r]
    good = np.array([i for i, r in enumerate(reasons) if not r], dtype=np.int64)
    rest: Columns = {n: c[good] if isinstance(c, np.ndarray) else [c[i] for i in good] for n, c in columns.items()}
    return rest, len(good)


def _split(pieces: list[Columns], counts: list[int], size: int) -> tuple[list[Columns], list[Columns], list[int]]:
    """The first ``size`` rows as views, and the rest."""
    head: list[Columns] = []
    while size:
        take = min(size, counts[0])
        head.append({n: c[:take] for n, c in pieces[0].items()})
        if take == counts[0]:
            pieces, counts = pieces[1:], counts[1:]
        else:
            pieces = [{n: c[take:] for n, c in pieces[0].items()}, *pieces[1:]]
            counts = [counts[0] - take, *counts[1:]]
        size -= take
    return head, pieces, counts
