"""A pass over a Dataset's units: each sample once, with the same bytes, wherever tasks are cut and training stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import ray.data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import csv
from ray.data import RandomSeedConfig
from ray.data.expressions import random

import offload
from offload.errors import ConfigError, RunError
from offload.pipeline.blocks import whole_samples, wire
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.feed.datasets import FeedDataset
from offload.pipeline.feed.meter import Meter
from offload.pipeline.feed.passes import Pass, PassKey, PassRequest, Slice
from offload.pipeline.feed.tasks import UnitTasks
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.pool.task import Block, Cost
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.watchdog import NoReports, Watch
from offload.pipeline.raydata.dataset_source import units_of
from offload.pipeline.raydata.units import UnitIndex, UnitRecipe
from tests.pipeline.arrow_tables import arrow_columns, plain

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore:Use 'expr' instead:UserWarning"),
]

N = 160


def noisy(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "step": np.random.rand(len(batch["id"])), "name": [f"n{i}" for i in batch["id"]]}


def augment(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "augmented": np.random.rand(len(batch["id"]))}


def some(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "copy": copy} for copy in range(row["id"] % 4)]


def dataset() -> ray.data.Dataset:
    return ray.data.range(N, override_num_blocks=9).map_batches(noisy).flat_map(some)


EXPECTED = Counter((i, copy) for i in range(N) for copy in range(i % 4))


class Ref:
    def hex(self) -> str:
        return str(id(self))


class Cores:
    cores, store_bytes, stores, by_node = 2, 1e9, {"node": 1e9}, Counter({"node": 2})


class Passing:
    """Passes over one Dataset, whose tasks run in this process."""

    def __init__(
        self,
        source: ray.data.Dataset | None = None,
        *,
        shuffle: bool = True,
        transform: Any = augment,
        on_error: Any = "raise",
        id_column: str | None = None,
        collate_fn: Any = None,
    ) -> None:
        units = units_of(source if source is not None else dataset())
        assert isinstance(units, UnitIndex), units
        self.units = units
        made = offload.from_ray(ray.data.range(1), transform, on_error=on_error, collate_fn=collate_fn)
        inner = made.recipe(None, seed=3, dataset="train")
        recipe = UnitRecipe(inner=inner, chains=units.chains, ids=units.ids, shuffle=shuffle, id_column=id_column)
        self.stream = FeedDataset(
            recipe=cast(Any, recipe.ready()), units=units.table, unit_samples=units.samples, shuffle=shuffle, seed=3
        )

    def tasks(self, *, epoch: int = 0, done: Ranges | None = None, first_rows: int = 8) -> UnitTasks:
        request = PassRequest(world_size=1, first_rows=first_rows, epoch=epoch, done=(done or Ranges()).pairs)
        visit = Pass(PassKey(attempt=1, name="train", number=epoch), request, None)
        return UnitTasks(self.stream, self.units.table, visit, Meter(lambda: Counter()), cast(Any, Cores))

    def blocks(self, tasks: UnitTasks, most: int = 10**9) -> list[wire.Columns]:
        found: list[wire.Columns] = []
        while len(found) < most and (assignment := tasks.next_task("node")) is not None:
            task = assignment.task
            table = cast(Any, task.recipe).process(
                task.rows, epoch=task.epoch, scratch=Scratch(), watch=Watch(NoReports())
            )
            cost = Cost(rows=table.num_rows, size_bytes=max(table.nbytes, 1), cpu_s=0.01, wall_s=0.01)
            assignment.finished(Block(ref=cast(Any, Ref()), cost=cost))
            found.append(wire.decode(table))
        return found

    def rows(self, **options: Any) -> dict[int, dict[str, Any]]:
        return by_position(self.blocks(self.tasks(**options)))

    def samples(self) -> list[Any]:
        """The samples that reach a ``collate_fn``, in the order of the pass."""
        blocks = self.blocks(self.tasks())
        return [sample for block in blocks for row in whole_samples.decode(block) for sample in row]


def by_position(blocks: Sequence[wire.Columns]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for block in blocks:
        for i, position in enumerate(np.asarray(block[POSITION]).tolist()):
            assert position not in found, "each position once"
            found[position] = {name: column[i] for name, column in block.items()}
    return found


@pytest.fixture(scope="module")
def passing() -> Passing:
    return Passing()


def test_a_pass_gives_each_sample_once_in_an_order_of_its_own(passing: Passing) -> None:
    first, second = passing.rows(epoch=0), passing.rows(epoch=1)
    for rows in (first, second):
        assert Counter((int(row["id"]), int(row["copy"])) for row in rows.values()) == EXPECTED
        assert len({int(row[SAMPLE_ID]) for row in rows.values()}) == EXPECTED.total()
    order = [[(int(row["id"]), int(row["copy"])) for row in rows.values()] for rows in (first, second)]
    assert order[0] != order[1] != sorted(order[1])
    ids = [
        {(int(row["id"]), int(row["copy"])): int(row[SAMPLE_ID]) for row in rows.values()} for rows in (first, second)
    ]
    assert ids[0] == ids[1], "a sample keeps its id"
    draws = [[float(row[name]) for row in first.values()] for name in ("step", "augmented")]
    assert len(set(draws[1])) == EXPECTED.total()
    assert len(set(draws[0])) == len({i for i, _ in EXPECTED})


def test_without_shuffling_samples_come_in_the_order_of_the_dataset() -> None:
    rows = Passing(shuffle=False).rows(epoch=3)
    assert [(int(row["id"]), int(row["copy"])) for row in rows.values()] == list(EXPECTED)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_rest_of_a_pass_has_the_bytes_that_it_would_have_had(passing: Passing, data: st.DataObject) -> None:
    whole = passing.rows(epoch=2)
    positions = list(whole)
    trained = data.draw(st.one_of(
        st.integers(0, len(positions)).map(lambda count: set(positions[:count])),
        st.sets(st.sampled_from(positions)),
    ))  # fmt: skip
    done = Ranges.of(np.array(sorted(trained), dtype=np.int64))
    rest = passing.rows(epoch=2, done=done, first_rows=data.draw(st.integers(1, 64)))
    assert rest.keys() == whole.keys() - trained
    for position, row in rest.items():
        assert row.keys() == whole[position].keys()
        assert all(np.array_equal(value, whole[position][name]) for name, value in row.items())


def same(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def in_pieces() -> ray.data.Dataset:
    """Rows of numbers, arrays and text, of which a unit has several batches, and fewer or more than it has inputs."""
    ids = ray.data.range(N, override_num_blocks=3)

    def made(batch: dict[str, Any]) -> dict[str, Any]:
        ids = np.repeat(batch["id"], batch["id"] % 3)
        return {"id": ids, "noise": np.random.rand(len(ids), 2, 3), "name": [f"n{i}" for i in ids]}

    return ids.map_batches(made, batch_size=7)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_samples_are_the_same_with_and_without_a_transform_that_changes_nothing(
    on_error: str, data: st.DataObject
) -> None:
    plain, transformed = (Passing(in_pieces(), transform=each, on_error=on_error) for each in (None, same))
    positions = list(plain.rows())
    trained = data.draw(st.sets(st.sampled_from(positions)))
    done = Ranges.of(np.array(sorted(trained), dtype=np.int64))
    mine, theirs = (each.rows(done=done) for each in (plain, transformed))
    assert list(mine) == list(theirs) == [position for position in positions if position not in trained]
    for position, row in mine.items():
        assert row.keys() == theirs[position].keys()
        assert all(np.array_equal(value, theirs[position][name]) for name, value in row.items())


def with_objects(batch: dict[str, Any]) -> dict[str, Any]:
    """Arrays, which become one column, and others, which stay objects."""
    return {
        "id": batch["id"],
        "x": np.stack([np.full(2, float(i)) for i in batch["id"]]),
        "tokens": [np.full(i % 3, float(i)) for i in batch["id"]],
        "target": [{"boxes": np.full(2, float(i)), "names": ["a"]} for i in batch["id"]],
    }


def row_with_objects(row: dict[str, Any]) -> dict[str, Any]:
    made = with_objects({"id": np.array([row["id"]])})
    return {name: column[0] for name, column in made.items()}


def change(batch: dict[str, Any]) -> dict[str, Any]:
    """Write to everything that a batch holds. The random numbers, which few calls draw, let offload repeat such a call."""
    for row in (*batch["x"], *batch["tokens"], *(target["boxes"] for target in batch["target"])):
        row += 1
    for target in batch["target"]:
        target["names"].append("b")
    drawn = np.random.rand() * 0 if any(i % 40 == 39 for i in batch["id"]) else 0.0
    return {
        "id": batch["id"],
        "x": np.stack(batch["x"]) + drawn,
        "tokens": [row.sum() - len(row) for row in batch["tokens"]],
        "boxes": [target["boxes"] for target in batch["target"]],
        "names": [len(target["names"]) for target in batch["target"]],
    }


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_transform_that_writes_to_its_samples_changes_each_once(by_row: bool, shuffle: bool) -> None:
    ids = ray.data.range(N, override_num_blocks=2)
    source = ids.map(row_with_objects) if by_row else ids.map_batches(with_objects)
    found = {int(row["id"]): row for row in Passing(source, shuffle=shuffle, transform=change).rows().values()}
    assert sorted(found) == list(range(N))
    for i, row in found.items():
        assert [*row["x"], *row["boxes"]] == [i + 1] * 4
        assert row["tokens"] == i * (i % 3)
        assert row["names"] == 2


def test_units_that_were_trained_are_not_made_again(passing: Passing) -> None:
    tasks = passing.tasks(epoch=1)
    begun = by_position(passing.blocks(tasks, most=3))
    rest = passing.tasks(epoch=1, done=Ranges.of(np.array(sorted(begun), dtype=np.int64)))
    made = 0
    while (assignment := rest.next_task("node")) is not None:
        made += assignment.task.rows.num_rows
    empty = sum(count == 0 for count in Counter(i % 4 for i in range(N)).values())
    assert made <= passing.units.table.num_rows - len({p >> 2 * passing.units.ids.bits for p in begun}) + empty


@pytest.mark.parametrize("first", [0, 1])
def test_units_that_give_next_to_nothing_are_shared_among_the_cores(first: int) -> None:
    tasks = Passing(ray.data.range(N, override_num_blocks=9).filter(lambda row: False), transform=None).tasks()
    left = N
    for rows in (first, *[0] * N):
        if (assignment := tasks.next_task("node")) is None:
            break
        units = assignment.task.rows.num_rows
        assert units <= max(left // 4, 1)
        left -= units
        assignment.finished(Block(ref=cast(Any, Ref()), cost=Cost(rows=rows, size_bytes=1, cpu_s=0.01, wall_s=0.01)))
    assert left == 0


def test_the_first_tasks_hold_one_unit_each_for_units_may_hold_millions_of_rows(passing: Passing) -> None:
    """Otherwise, the first batch of a Dataset of large files waits for dozens of them."""
    tasks = passing.tasks(first_rows=4096)
    first, second = tasks.next_task("node"), tasks.next_task("node")
    assert first is not None
    assert second is not None
    assert first.task.rows.num_rows == second.task.rows.num_rows == 1
    first.finished(Block(ref=cast(Any, Ref()), cost=Cost(rows=2, size_bytes=1, cpu_s=0.01, wall_s=0.01)))
    third = tasks.next_task("node")
    assert third is not None
    assert third.task.rows.num_rows > 1, "small ones go together"


def test_a_lost_block_is_made_again(passing: Passing) -> None:
    def block(rows: int) -> Block:
        return Block(ref=cast(Any, Ref()), cost=Cost(rows=rows, size_bytes=1, cpu_s=0.1, wall_s=0.1))

    tasks = passing.tasks()
    current = tasks._pass
    first = tasks.next_task("node")
    assert first is not None
    first.finished(lost := block(5))
    piece = Slice(lost.ref, 1, 4, 0)
    again = tasks.repeat(piece, rank=0)
    assert again.task is first.task
    current.owe(0)
    again.finished(new := block(5))
    assert current.next_slices(0, 9, timeout_s=0.0) == ([piece._replace(ref=new.ref)], False)
    again.finished(block(4))
    with pytest.raises(RunError, match="made 4 samples of the units that gave 5 before"):
        current.next_slices(0, 9, timeout_s=0.0)


def test_a_checkpoint_of_another_data_set_is_refused(passing: Passing) -> None:
    with pytest.raises(RunError, match="record of the epoch does not fit the data set"):
        passing.tasks(done=Ranges(((5, 6),)))


def test_rows_of_changing_number_are_refused(passing: Passing) -> None:
    """A checkpoint that says 3 of 7 samples, and a step that now gives 8."""
    ids, unit = passing.units.ids, 5
    done = Ranges.of(ids.positions(unit, 7, np.arange(3, dtype=np.int64)))
    with pytest.raises(RunError, match=r"made \d+ rows of read task 5 of the ray.data.Dataset, and it made before 7"):
        passing.rows(done=done)


@pytest.mark.parametrize("seed", [None, RandomSeedConfig(seed=4), 4])
def test_a_random_sample_is_the_same_one_when_an_epoch_is_made_again(seed: Any) -> None:
    """As a resumed run and a lost block make it. Without a fixed seed, each epoch has a sample of its own."""
    passing = Passing(ray.data.range(N, override_num_blocks=9).random_sample(0.5, seed=seed), transform=None)
    first, again, other = ([int(row["id"]) for row in passing.rows(epoch=epoch).values()] for epoch in (0, 0, 1))
    assert first == again
    assert (set(first) == set(other)) == (seed == 4)
    assert 0 < len(first) < N


@pytest.mark.parametrize("options", [{}, {"seed": 4}, {"seed": 4, "reseed_after_execution": False}])
def test_a_random_expression_draws_the_same_numbers_when_an_epoch_is_made_again(options: dict[str, Any]) -> None:
    """The number of rows that a filter leaves must not change. Without a fixed seed, each epoch has numbers of its own."""
    source = ray.data.range(N, override_num_blocks=9).filter(expr=random(**options) < 0.5)
    passing = Passing(source, transform=None)
    first, again, other = ([int(row["id"]) for row in passing.rows(epoch=epoch).values()] for epoch in (0, 0, 1))
    assert first == again
    assert (set(first) == set(other)) == (len(options) == 2)
    assert 0 < len(first) < N


def test_a_step_that_breaks_its_promise_is_refused() -> None:
    source = ray.data.range(9).map_batches(lambda b: {"id": b["id"][:0]}, udf_modifying_row_count=False)
    with pytest.raises(
        RunError, match=r"made 0 rows of read task 0 .* its plan promises 1\..*udf_modifying_row_count=False"
    ):
        Passing(source, shuffle=False, transform=None).rows()


def test_an_error_of_a_step_names_the_step_the_unit_and_the_line() -> None:
    def broken(row: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no such colour")

    with pytest.raises(
        RunError,
        match=r"ReadRange → Map\(.*broken\) raised ValueError: no such colour \(broken, .*test_units.py:\d+\) on read task 0",
    ):
        Passing(ray.data.range(3).map(broken), shuffle=False, transform=None).rows()


def test_an_error_of_the_transform_names_the_sample() -> None:
    def broken(batch: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no such colour")

    with pytest.raises(
        RunError, match=r"broken raised ValueError: no such colour .* on sample .* \(row 0 of read task 0\)"
    ):
        Passing(ray.data.range(3), shuffle=False, transform=broken).rows()


def test_a_class_that_cannot_be_constructed() -> None:
    class Broken:
        def __init__(self) -> None:
            raise FileNotFoundError("no weights")

        def __call__(self, batch: Any) -> Any: ...

    with pytest.raises(
        RunError, match=r"class of the steps of a ray.data.Dataset raised FileNotFoundError: no weights \(__init__, "
    ):
        Passing(ray.data.range(3).map_batches(Broken, concurrency=1))


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the ray\.data\.Dataset has no rows"):
        units_of(ray.data.range(9).limit(0))


def test_a_filter_that_keeps_nothing_gives_no_sample() -> None:
    assert Passing(ray.data.range(9).filter(lambda row: False), transform=None).rows() == {}


def test_a_dataset_that_ray_data_must_execute_says_why() -> None:
    shuffled = ray.data.range(9).map(lambda row: row).random_shuffle()
    assert "RandomShuffle needs rows of several blocks" in str(units_of(shuffled))
    assert "cannot be read (AttributeError" in str(units_of(cast(Any, object())))


def test_an_error_before_a_sort_is_said_as_the_source_said_it(tmp_path: Path) -> None:
    (tmp_path / "broken.csv").write_text("id\n1\n2,3\n")
    with pytest.raises(
        RunError, match=r"Ray Data could not execute .*: its step Sort, or one before it, raised .*Error: .*CSV"
    ):
        units_of(ray.data.read_csv(str(tmp_path)).sort("id"))


def odd(batch: dict[str, Any]) -> dict[str, Any]:
    if (batch["id"] % 10 == 3).any():
        raise ValueError("no such colour")
    return {"id": batch["id"], "x": np.random.rand(len(batch["id"]))}


def test_rows_whose_steps_fail_are_skipped_if_asked_and_named() -> None:
    passing = Passing(ray.data.range(60, override_num_blocks=4).map_batches(odd), transform=None, on_error="skip")
    first, again = passing.rows(), passing.rows()
    errors = {row[wire.ERROR] for row in first.values() if row[wire.ERROR] is not None}
    good = {int(row["id"]): float(row["x"]) for row in first.values() if row[wire.ERROR] is None}
    assert sorted(good) == [i for i in range(60) if i % 10 != 3]
    assert len(first) == 60
    assert len(errors) == 6
    assert all("no such colour (odd, " in error and "of read task" in error for error in errors)
    assert good == {int(row["id"]): float(row["x"]) for row in again.values() if row[wire.ERROR] is None}
    assert len(set(good.values())) == len(good)


def test_an_input_that_cannot_be_read_is_skipped_whole(tmp_path: Path) -> None:
    for number in range(4):
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes(b"no image")
    images = ray.data.read_images(str(tmp_path)).map(lambda row: {"x": row["image"]})
    rows = Passing(images, transform=None, on_error="skip").rows()
    assert sorted(int(row["x"][0, 0, 0]) for row in rows.values() if row[wire.ERROR] is None) == [0, 1, 3]
    assert len(rows) == 4
    with pytest.raises(
        RunError,
        match=r"ReadImage → Map.* raised ValueError: PIL couldn't load .*/2.png'. \(.* on_error=.skip. to count",
    ):
        Passing(images, transform=None).rows()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_transform_may_change_its_batch_in_place(shuffle: bool) -> None:
    """Columns of stored blocks and of files lie in memory that others read, too."""

    def doubled(batch: dict[str, Any]) -> dict[str, Any]:
        batch["id"] *= 2
        return batch

    stored = ray.data.range(40, override_num_blocks=4).materialize()
    passing = Passing(stored, shuffle=shuffle, transform=doubled)
    for _ in range(2):
        assert sorted(int(row["id"]) for row in passing.rows().values()) == [2 * i for i in range(40)]


def test_rows_need_not_have_the_same_columns() -> None:
    def ragged(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": row["id"],
            **({"odd": "yes"} if row["id"] % 2 else {}),
            **({"late": 1.5} if row["id"] > 7 else {}),
        }

    rows = Passing(ray.data.range(10, override_num_blocks=2).map(ragged), transform=None).rows()
    found = {int(row["id"]): (row.get("odd"), row.get("late")) for row in rows.values()}
    assert found == {i: ("yes" if i % 2 else None, 1.5 if i > 7 else None) for i in range(10)}


def test_ids_may_be_the_user_s() -> None:
    def failing(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 3:
            raise ValueError("no such colour")
        return {"key": row["id"] + 1000}

    source = ray.data.range(10, override_num_blocks=2).map(failing)
    rows = Passing(source, transform=None, on_error="skip", id_column="key").rows()
    good = [row for row in rows.values() if row[wire.ERROR] is None]
    assert sorted(int(row[SAMPLE_ID]) for row in good) == [1000 + i for i in range(10) if i != 3]
    assert all(row[SAMPLE_ID] == row["key"] for row in good)
    with pytest.raises(RunError, match="has no column 'name'"):
        Passing(ray.data.range(3), transform=None, id_column="name").rows()


def in_one_order(rows: Iterable[Any]) -> list[Any]:
    """The values of these rows, in an order of their own: Ray's depends on the task that ends first."""
    return sorted((plain(row) for row in rows), key=repr)


def samples_of(source: ray.data.Dataset) -> list[dict[str, Any]]:
    """The samples of a Dataset, without offload's own columns."""
    found = Passing(source, shuffle=False, transform=None).rows()
    return [{n: v for n, v in row.items() if n not in (POSITION, SAMPLE_ID)} for row in found.values()]


@settings(max_examples=3, deadline=None)
@given(table=arrow_columns(columns=14, stored=True), as_pandas=arrow_columns(of_pandas=True, columns=5))
def test_samples_of_every_type_are_the_rows_that_ray_gives(table: pa.Table, as_pandas: pa.Table) -> None:
    """Lists of different lengths wait for a ``collate_fn``, so the samples travel whole here."""
    for build in (
        lambda: ray.data.from_arrow([table, table.slice(0, 1)]),
        lambda: ray.data.from_arrow([table, table.slice(0, 1)]).filter(lambda row: True),
        lambda: ray.data.from_pandas([as_pandas.to_pandas(), as_pandas.slice(0, 1).to_pandas()]),
    ):
        found = Passing(build(), shuffle=False, transform=None, collate_fn=list).samples()
        assert in_one_order(found) == in_one_order(build().take_all())


@pytest.mark.parametrize(
    "options", [{}, {"mode": "L"}, {"mode": "RGB"}, {"mode": "RGBA", "size": (4, 6)}, {"size": (5, 3)}]
)
def test_images_are_those_that_ray_reads(tmp_path: Path, options: dict[str, Any]) -> None:
    for number in range(3):
        Image.fromarray(np.full((8, 6, 3), 40 * number, np.uint8)).save(tmp_path / f"{number}.png")
    read = ray.data.read_images(str(tmp_path), **options)
    found, expected = samples_of(read), read.take_all()
    assert {row["image"].dtype for row in found} == {row["image"].dtype for row in expected}
    assert in_one_order(found) == in_one_order(expected)


def test_cells_of_csv_files_are_those_that_ray_reads(tmp_path: Path) -> None:
    """A column without values in one file, as text, categories and numbers of others, and empty text."""
    (tmp_path / "a.csv").write_text("id,text,number,flag\n0,,,\n1,,,\n")
    (tmp_path / "b.csv").write_text("id,text,number,flag\n2,,5,true\n3,abc,,\n4,x,7,false\n")
    for convert in (
        csv.ConvertOptions(),
        csv.ConvertOptions(strings_can_be_null=True),
        csv.ConvertOptions(strings_can_be_null=True, auto_dict_encode=True),
    ):

        def read(convert: Any = convert) -> ray.data.Dataset:
            return ray.data.read_csv(str(tmp_path), convert_options=convert)

        found = samples_of(read())
        assert in_one_order(found) == in_one_order(read().take_all())
        text = {row["id"]: row["text"] for row in found if row["id"] > 1}
        assert text == {2: "" if not convert.strings_can_be_null else None, 3: "abc", 4: "x"}
