"""The number of feeds of a run."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from offload.model.blocks import STORE_SHARE
from offload.model.feeds import (
    FEED_BUSY,
    FEED_CORES,
    MOST_FEEDS,
    ONE_FEED,
    USUAL_BYTES,
    USUAL_CORE_SECONDS,
    FeedRule,
    feed_share,
)

STORE_BYTES = STORE_SHARE * 2 * (1 << 30)  # of each core, as in benchmarks/results/simulation.json
DECODED = 0.00113, 150_552.0  # core-seconds and bytes of a decoded JPEG there
costs = st.tuples(st.floats(1e-6, 10.0), st.floats(1.0, 1e8))


def feeds(cores: int, workers: int, cost: tuple[float, float] | None, rule: FeedRule | None = None) -> int:
    return (rule or FeedRule()).feeds(cores=cores, workers=workers, store_bytes=cores * STORE_BYTES, cost=cost)


@settings(deadline=None)
@given(cores=st.integers(0, 2 * FEED_CORES - 1), workers=st.integers(0, 1024), cost=st.none() | costs)
def test_a_small_cluster_has_one_feed_whatever_a_sample_costs(
    cores: int, workers: int, cost: tuple[float, float] | None
) -> None:
    assert feeds(cores, workers, cost) == 1


@settings(deadline=None)
@given(cores=st.integers(0, 20_000), workers=st.integers(0, 1024), cost=st.none() | costs)
def test_the_fewest_feeds_that_are_not_too_busy_unless_workers_or_cores_limit_them(
    cores: int, workers: int, cost: tuple[float, float] | None
) -> None:
    number = feeds(cores, workers, cost)
    core_seconds, sample_bytes = cost or (USUAL_CORE_SECONDS, USUAL_BYTES)

    def busy(number: int) -> float:
        return float(
            feed_share(
                number,
                core_seconds=core_seconds,
                sample_bytes=sample_bytes,
                cores=cores,
                store_bytes=cores * STORE_BYTES,
                workers=workers,
            )
        )

    most = max(min(workers, cores // FEED_CORES, MOST_FEEDS), 1)
    assert 1 <= number <= most
    assert number == most or busy(number) <= FEED_BUSY
    assert all(busy(fewer) > FEED_BUSY for fewer in range(1, number))


def test_the_sizes_at_which_one_feed_ends() -> None:
    """By the simulation, one hub is busy all the time with 160 cores that decode JPEG files for 64 workers."""
    assert feeds(100, 64, DECODED) == 1
    assert feeds(160, 64, DECODED) == 2
    assert feeds(704, 64, DECODED) > 4
    assert feeds(704, 1, DECODED) == 1, "a rank has one feed"
    assert feeds(500, 64, None) == 1, "unless a sample is known to cost little"


def test_a_rule_limits_the_number() -> None:
    assert feeds(10_000, 64, DECODED, ONE_FEED) == 1
    forced = FeedRule(least=3)
    assert feeds(4, 8, None, forced) == 3
    assert feeds(2, 8, None, forced) == 2, "a feed without a core would feed nobody"
    assert feeds(4, 1, None, forced) == 1
