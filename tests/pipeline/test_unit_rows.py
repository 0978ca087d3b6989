"""Datasets of Ray that are mixed with other sources or drawn by weight: each sample is a row of a unit, in every pass and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray.data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError, RunError
from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import SAMPLE_ID
from offload.pipeline.describe.combine import mix, weighted
from offload.pipeline.describe.sources import from_ray, from_torch
from offload.pipeline.order.ranges import Ranges
from tests.pipeline.index_pass import a_pass, listed, stream_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

N = 45


def noisy(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["id"], "draw": np.random.rand(len(batch["id"]))}


def noisy_row(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 7:
        raise ValueError("no seven")
    return {"x": row["id"], "draw": np.random.rand()}


def promised(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["id"][:-1], "draw": batch["id"][:-1]}


def dataset(step: Callable[..., Any] = noisy, **options: Any) -> ray.data.Dataset:
    return ray.data.range(N, override_num_blocks=5).map_batches(step, udf_modifying_row_count=False, **options)


def numbers(n: int, first: int) -> list[dict[str, Any]]:
    return [{"x": first + i, "draw": 0.5} for i in range(n)]


@pytest.fixture(scope="module")
def mixed() -> Any:
    return stream_of(mix({"a": dataset(), "b": numbers(20, N), "c": dataset().materialize(), "d": dataset()}))


def test_a_pass_gives_each_row_once_and_each_set_its_own_random_numbers(mixed: Any) -> None:
    rows = a_pass(mixed)
    values = {int(row[SAMPLE_ID]): int(row["x"]) for row in rows.values()}
    own, stored = list(range(N)), range(N + 20, 2 * N + 20)
    assert sorted(values) == list(range(3 * N + 20))
    assert sorted(values[i] for i in stored) == own, "materialize() keeps no order of blocks"
    assert {i: x for i, x in values.items() if i not in stored} == {
        **dict(enumerate(range(N + 20))),
        **{2 * N + 20 + i: i for i in own},
    }
    draws = {int(row[SAMPLE_ID]): row["draw"] for row in rows.values()}
    assert len({draws[i] for i in range(N)} | {draws[2 * N + 20 + i] for i in range(N)}) == 2 * N
    later = {int(row[SAMPLE_ID]): row["draw"] for row in a_pass(mixed, epoch=1).values()}
    assert all(later[i] != draws[i] for i in own)
    assert all(later[i] == draws[i] for i in stored), "materialize() drew them once"


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(done=st.sets(st.integers(0, 3 * N + 19), max_size=3 * N + 19), epoch=st.integers(0, 2))
def test_the_rest_of_a_pass_has_the_bytes_that_it_would_have_had(mixed: Any, done: set[int], epoch: int) -> None:
    whole = a_pass(mixed, epoch=epoch)
    rest = a_pass(mixed, epoch=epoch, done=Ranges.of(done).pairs)
    assert rest == {i: row for i, row in whole.items() if i not in done}


@pytest.mark.soak
def test_draws_by_weight_of_what_ray_data_sorted() -> None:
    source = ray.data.from_items([{"x": i} for i in (3, 1, 2, 0)]).sort("x")
    rows = a_pass(stream_of(weighted(source, [0, 1, 0, 3], samples=30)))
    assert len(rows) == 30
    assert {int(row["x"]) for row in rows.values()} == {1, 3}
    assert all(row[SAMPLE_ID] == row["x"] for row in rows.values())


def with_objects(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["id"], "boxes": [{"at": np.full(2, float(i))} for i in batch["id"]]}


def change(sample: dict[str, Any]) -> dict[str, Any]:
    sample["boxes"]["at"] += 1
    return {"x": sample["x"], "at": sample["boxes"]["at"]}


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_transform_that_writes_to_a_row_leaves_it_alone_for_later_draws(shuffle: bool) -> None:
    source = from_ray(dataset(with_objects), change, per_sample=True)
    rows = a_pass(stream_of(weighted(source, np.ones(N), samples=6 * N), shuffle=shuffle))
    assert len({int(row["x"]) for row in rows.values()}) < len(rows)
    assert all(row["at"].tolist() == [row["x"] + 1] * 2 for row in rows.values())


def test_a_row_whose_step_fails_is_named_and_skipped_if_asked() -> None:
    source = ray.data.range(20, override_num_blocks=2).map(noisy_row)
    rows = a_pass(stream_of(mix({"a": from_ray(source, on_error="skip"), "b": numbers(20, N)})))
    assert len(rows) == 40
    assert {int(row[SAMPLE_ID]): row[wire.ERROR] for row in rows.values() if row[wire.ERROR]}.keys() == {7}
    with pytest.raises(RunError, match=r"sample 7 \(row \d+ of read task \d+\) is unusable: .*ValueError: no seven"):
        a_pass(stream_of(mix({"a": source, "b": numbers(20, N)})))


def test_a_step_that_breaks_its_promise_is_refused() -> None:
    with pytest.raises(RunError, match="its plan promises"):
        a_pass(stream_of(weighted(dataset(promised), np.ones(N))))


@pytest.mark.soak
def test_equal_datasets_have_equal_identities_and_others_do_not() -> None:
    one, same = (listed(mix({"a": dataset(), "b": numbers(3, 0)})).identity for _ in range(2))
    other = listed(mix({"a": dataset(noisy).limit(N - 1), "b": numbers(4, 0)})).identity
    stored = [listed(weighted(dataset().materialize(), np.ones(N))).identity for _ in range(2)]
    assert one == same != other
    assert stored[0] != stored[1], "only the process that stored them knows their order"
    assert listed(mix({"b": from_torch(numbers(3, 0))})).identity is None


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (lambda: dataset().flat_map(lambda row: [row]), "whose number of rows is known, and that of read task 0"),
        (lambda: dataset(num_gpus=1, batch_size=4), "takes GPUs. materialize() the Dataset."),
        (lambda: from_ray(dataset(), id_column="x"), "with id_column='x'. Drop id_column."),
    ],
    ids=["flat_map", "GPUs", "ids"],
)
def test_datasets_that_are_refused(source: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listed(mix({"a": source(), "b": numbers(3, 0)}))
    assert says in str(caught.value)
    assert str(caught.value).startswith("mix: 'a' ")
    assert "\n" not in str(caught.value)
