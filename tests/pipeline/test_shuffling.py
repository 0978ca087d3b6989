"""The order of a pass: a permutation that (seed, epoch) alone decide, with storage's units kept together."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.pipeline.order.shuffling import Consecutive, epoch_permutation, generator, mix

seeds = st.integers(-(2**63), 2**64)
epochs = st.integers(0, 10_000)


@settings(deadline=None)
@given(n=st.integers(0, 500), seed=seeds, epoch=epochs, shuffle=st.booleans())
def test_every_sample_once(n: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = epoch_permutation(n, seed=seed, epoch=epoch, shuffle=shuffle)
    assert order.dtype == np.uint32  # four bytes a sample
    assert sorted(order.tolist()) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(0, 300), seed=seeds, epoch=epochs)
def test_seed_and_epoch_alone_decide(n: int, seed: int, epoch: int) -> None:
    once = epoch_permutation(n, seed=seed, epoch=epoch)
    np.random.seed(7)  # the global state has no say
    assert np.array_equal(once, epoch_permutation(n, seed=seed, epoch=epoch))


def test_the_same_in_another_process() -> None:
    code = (
        "from offload.pipeline.order.shuffling import epoch_permutation; print(*epoch_permutation(50, seed=3, epoch=4))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=800)
    assert [int(i) for i in other.stdout.split()] == epoch_permutation(50, seed=3, epoch=4).tolist()


def test_the_order_is_pinned() -> None:
    # A resumed run must meet the order of the run that it continues, after an upgrade of numpy or of offload too.
    assert epoch_permutation(10, seed=0, epoch=0).tolist() == [0, 7, 8, 6, 9, 5, 1, 3, 2, 4]
    assert epoch_permutation(10, seed=1, epoch=2, groups=np.repeat([0, 1], 5)).tolist() == [
        1,
        0,
        4,
        2,
        3,
        7,
        6,
        9,
        5,
        8,
    ]


@settings(deadline=None)
@given(n=st.integers(100, 300), seed=seeds, epoch=epochs)
def test_epochs_and_seeds_differ(n: int, seed: int, epoch: int) -> None:
    order = epoch_permutation(n, seed=seed, epoch=epoch)
    assert not np.array_equal(order, epoch_permutation(n, seed=seed, epoch=epoch + 1))
    assert not np.array_equal(order, epoch_permutation(n, seed=seed + 1, epoch=epoch))
    assert not np.array_equal(order, np.arange(n))


@settings(deadline=None)
@given(n=st.integers(0, 100), seed=seeds, epoch=epochs)
def test_without_shuffling_the_order_is_the_sources_own(n: int, seed: int, epoch: int) -> None:
    groups = np.arange(n, dtype=np.int64)[::-1].copy()
    assert epoch_permutation(n, seed=seed, epoch=epoch, shuffle=False, groups=groups).tolist() == list(range(n))


@settings(deadline=None)
@given(groups=st.lists(st.integers(-5, 12), max_size=200), seed=seeds, epoch=epochs)
def test_groups_are_contiguous_so_that_each_is_read_once(groups: list[int], seed: int, epoch: int) -> None:
    of_sample = np.array(groups, dtype=np.int64)
    order = epoch_permutation(len(groups), seed=seed, epoch=epoch, groups=of_sample)
    assert sorted(order.tolist()) == list(range(len(groups)))
    visited = of_sample[order]
    starts = 1 + int(np.count_nonzero(np.diff(visited))) if len(visited) else 0
    assert starts == len(set(groups))


def test_groups_and_their_samples_both_change_places() -> None:
    groups = np.repeat(np.arange(20), 20)
    first, second = (epoch_permutation(400, seed=0, epoch=e, groups=groups) for e in (0, 1))
    order_of_groups = [groups[o][::20].tolist() for o in (first, second)]
    assert order_of_groups[0] != order_of_groups[1] != list(range(20))
    within = [[o[groups[o] == 3].tolist() for o in (first, second)]]
    assert within[0][0] != within[0][1] != sorted(within[0][1])


def test_every_place_is_equally_likely() -> None:
    # Sample 0 of 10 over 2,000 epochs: each place 200 times give or take; 6 standard deviations are 80.
    places = [int(np.flatnonzero(epoch_permutation(10, seed=0, epoch=e) == 0)[0]) for e in range(2000)]
    counts = np.bincount(places, minlength=10)
    assert counts.min() > 120
    assert counts.max() < 280


@settings(deadline=None)
@given(parts=st.lists(st.integers(-(2**63), 2**63), min_size=1, max_size=4))
def test_mix_gives_seeds_that_every_generator_takes(parts: list[int]) -> None:
    seed = mix(*parts)
    assert 0 <= seed < 2**63
    assert seed == mix(*parts)


def test_mix_tells_neighbours_and_orders_of_its_parts_apart() -> None:
    seeds_ = {
        mix(seed, epoch, sample, use)
        for seed in range(4)
        for epoch in range(4)
        for sample in range(400)
        for use in (1, 2)
    }
    assert len(seeds_) == 4 * 4 * 400 * 2
    assert len({s & 0xFFFFFFFF for s in seeds_}) > 0.999 * len(seeds_)  # numpy's legacy seed takes 32 bits
    assert mix(1, 2) != mix(2, 1)
    assert mix(1) != mix(1, 0)


def test_mix_spreads_one_changed_bit_over_all_bits() -> None:
    flips = np.zeros(63)
    trials = 0
    for part in range(3):
        for bit in range(0, 40, 4):
            for base in range(20):
                parts = [base * 1_000_003, base * 7_919, base * 104_729]
                before = mix(*parts)
                parts[part] ^= 1 << bit
                changed = before ^ mix(*parts)
                flips += [(changed >> i) & 1 for i in range(63)]
                trials += 1
    # Each of 63 bits flips in half of 600 trials; 6 standard deviations are 12 points.
    assert (flips / trials).min() > 0.38
    assert (flips / trials).max() < 0.62


@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 9), max_size=12), seed=st.integers(0, 2**70), epoch=st.integers(0, 5))
def test_the_order_is_that_of_wide_numbers_however_it_is_held(counts: list[int], seed: int, epoch: int) -> None:
    """Checkpoints record positions of this order, so that it must never change."""
    runs = Consecutive(np.array(counts, dtype=np.int64))
    n, rng = sum(counts), generator(seed, epoch)
    parts = np.split(np.arange(n, dtype=np.int64), np.flatnonzero(np.diff(runs.each())) + 1)
    wide = [rng.permutation(parts[i]).tolist() for i in rng.permutation(len(parts)).tolist()] if n else []
    for groups in (runs, runs.each()):
        assert epoch_permutation(n, seed=seed, epoch=epoch, groups=groups).tolist() == [
            i for part in wide for i in part
        ]
    assert epoch_permutation(n, seed=seed, epoch=epoch).tolist() == generator(seed, epoch).permutation(n).tolist()
    assert runs[np.arange(n)].tolist() == runs.tolist()
