"""The verdict of a DataLoader says what would help, and never recommends fewer cores than there are."""

from __future__ import annotations

import dataclasses

from offload.loader.stats import LoaderStats

STATS = LoaderStats(
    batches=10,
    samples_per_s=100.0,
    stall=0.5,
    cores=2,
    input_ceiling_samples_per_s=100.0,
    core_seconds_per_sample=0.02,
    bytes_per_sample=10.0,
)


def verdict(**changed: float) -> str:
    return dataclasses.replace(STATS, **changed).verdict  # type: ignore[arg-type]


def test_busy_cores_need_more_of_their_kind() -> None:
    # Without waiting, the program would take 200 samples/s, which are 4 core-seconds.
    assert (
        verdict()
        == "the input holds the program up: it waited 50% of its time for 2 cores; about 4 cores would keep up"
    )


def test_cores_that_are_not_busy_are_not_what_is_missing() -> None:
    said = verdict(core_seconds_per_sample=0.0001, input_ceiling_samples_per_s=20_000.0)
    assert "would keep up" not in said
    assert "they could make 20,000 samples/s, so more cores would not help" in said


def test_an_input_that_keeps_up_and_one_that_nobody_read() -> None:
    assert verdict(stall=0.004) == "the input keeps up: the program waited 0.4% of its time"
    assert verdict(batches=0) == "no batch was read yet"
