"""The parts of a pass that several feeds hand out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from offload.pipeline.order.chunks import CHUNK
from offload.pipeline.order.parts import WHOLE, Part
from offload.pipeline.order.ranges import Ranges
from offload.train.hub.division import parts_of


@settings(deadline=None)
@given(
    samples=st.integers(0, 700),
    done=st.sets(st.integers(0, 800), max_size=300) | st.integers(0, 800).map(lambda stop: set(range(stop))),
    ranks=st.integers(1, 12),
    data=st.data(),
)
def test_parts_cover_what_is_left_once_in_whole_chunks(
    samples: int, done: set[int], ranks: int, data: st.DataObject
) -> None:
    feeds = data.draw(st.integers(1, ranks))
    left = sorted(set(range(samples)) - done)
    parts = [part.missing(Ranges.of(done), samples) for part in parts_of(feeds, ranks)]
    handed_out = [[int(position) for position in part[:]] for part in parts]
    assert [position for part in handed_out for position in part] == left
    chunks = [{position // CHUNK for position in part} for part in handed_out]
    assert sum(map(len, chunks)) == len(set().union(*chunks)), "a chunk belongs to one feed"
    for part, rows in zip(parts_of(feeds, ranks), handed_out, strict=True):
        # Both of its ends lie within a chunk of where they would be without chunks.
        assert abs(len(rows) - len(left) * part.ranks / part.of) <= CHUNK


@given(ranks=st.integers(1, 2000), data=st.data())
def test_each_rank_has_one_feed_and_feeds_have_about_equally_many(ranks: int, data: st.DataObject) -> None:
    feeds = data.draw(st.integers(1, min(ranks, 16)))
    parts = parts_of(feeds, ranks)
    assert len(parts) == feeds
    if feeds == 1:
        assert parts == (WHOLE,)
        return
    assert [rank for part in parts for rank in range(part.start, part.stop)] == list(range(ranks))
    assert max(part.ranks for part in parts) - min(part.ranks for part in parts) <= 1


def test_a_part_of_all_ranks_is_the_whole() -> None:
    done = Ranges.of([3, 4])
    assert list(Part(0, 4, 4).missing(done, 40)[:]) == list(WHOLE.missing(done, 40)[:])
