"""A Dataset's units and steps, run outside Ray Data, make the rows that Ray Data makes. This is the contract with Ray's plans."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import ray.data
import torch
from PIL import Image
from ray import cloudpickle
from ray.data.block import BlockMetadata
from ray.data.expressions import col, download, random
from torch.utils.data import TensorDataset

from offload.pipeline.raydata.runner import Runner
from offload.pipeline.raydata.unit_maker import UnitMaker, joined
from offload.ray_private.data import drafts
from offload.ray_private.data.dataset_plan import take_over
from offload.ray_private.data.refusals import NotTakenOverError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore:Use 'expr' instead:UserWarning"),
    pytest.mark.filterwarnings("ignore:This API is deprecated"),  # zip
    pytest.mark.filterwarnings("ignore:String expressions are deprecated"),  # streaming_train_test_split
]

ROWS, FILES = 90, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("dataset")
    for number in range(FILES):
        ids = np.arange(ROWS // FILES) + number * (ROWS // FILES)
        table = pa.table(
            {"id": ids, "name": [f"n{i}" for i in ids], "x": ids / 7, "v": [[i, i + 1] for i in ids.tolist()]}
        )
        (found / "rows").mkdir(exist_ok=True)
        pq.write_table(table, found / "rows" / f"{number}.parquet", row_group_size=11)
        (found / "text").mkdir(exist_ok=True)
        (found / "text" / f"{number}.csv").write_text("id,name\n" + "".join(f"{i},n{i}\n" for i in ids))
        (found / "images").mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 6, 3), number, np.uint8)).save(found / "images" / f"{number}.png")
    return found


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    context = ray.data.DataContext.get_current()
    before, logger = context.enable_progress_bars, logging.getLogger("ray.data")
    level = logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.CRITICAL)
    yield
    context.enable_progress_bars = before
    logger.setLevel(level)


class Times:
    def __init__(self, by: int = 2) -> None:
        self.by = by

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "times": batch["id"] * self.by}


class Plus:
    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "plus": row["id"] + 1}


class Counted:
    async def __call__(self, batch: dict[str, Any]) -> Any:
        yield {"id": batch["id"], "n": np.full(len(batch["id"]), len(batch))}


class Later:
    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "plus": row["id"] + 1}


def halves(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"id": row["id"], "half": half} for half in range(row["id"] % 3)]


def in_pairs(batch: dict[str, Any]) -> Any:
    yield {"id": batch["id"][::2]}
    yield {"id": batch["id"][1::2]}


def rows(folder: Path) -> ray.data.Dataset:
    return ray.data.read_parquet(str(folder / "rows"))


def stored() -> ray.data.Dataset:
    """The same rows, as blocks that are there: Ray starts no processes to read them before a step of its own."""
    return ray.data.from_arrow([pa.Table.from_pylist(ALL[:50]), pa.Table.from_pylist(ALL[50:])])


Rows = list[dict[str, Any]]
Made = Callable[[Path], ray.data.Dataset]
ALL: Rows = [{"id": i, "name": f"n{i}", "x": i / 7, "v": [i, i + 1]} for i in range(ROWS)]
IDS: Rows = [{"id": i} for i in range(ROWS)]
IMAGES = [np.full((8, 6, 3), number, np.uint8) for number in range(FILES)]
TAKEN: dict[str, tuple[Made, Rows]] = {
    "parquet": (rows, ALL),
    "some columns": (
        lambda f: rows(f).select_columns(["id", "v"]).rename_columns({"v": "w"}),
        [{"id": row["id"], "w": row["v"]} for row in ALL],
    ),
    "map": (
        lambda f: rows(f).map(lambda row: {"id": row["id"], "image": np.full((4, 3), row["id"] % 5, np.uint8)}),
        [{"id": i, "image": np.full((4, 3), i % 5)} for i in range(ROWS)],
    ),
    "map_batches": (
        lambda f: rows(f).map_batches(lambda b: {"id": b["id"], "y": b["x"] * 2}),
        [{"id": row["id"], "y": row["x"] * 2} for row in ALL],
    ),
    "batches of pandas": (
        lambda f: rows(f).map_batches(lambda frame: frame.assign(z=1), batch_format="pandas"),
        [{**row, "z": 1} for row in ALL],
    ),
    "batches of arrow": (
        lambda f: rows(f).map_batches(lambda t: t.select(["name"]), batch_format="pyarrow", batch_size=7),
        [{"name": row["name"]} for row in ALL],
    ),
    "generator": (lambda f: rows(f).map_batches(in_pairs), IDS),
    "filter": (lambda f: rows(f).filter(lambda row: row["id"] % 3 == 0), ALL[::3]),
    "expression": (
        lambda f: rows(f).with_column("y", col("id") * 2).filter(expr=col("id") > 50),
        [{**row, "y": row["id"] * 2} for row in ALL[51:]],
    ),
    "flat_map": (lambda f: rows(f).flat_map(halves), [each for row in ALL for each in halves(row)]),
    "class": (
        lambda f: rows(f).map_batches(Times, fn_constructor_args=(3,), concurrency=1),
        [{**row, "times": row["id"] * 3} for row in ALL],
    ),
    "two classes": (
        lambda f: rows(f).map_batches(Times, concurrency=1).map(Plus, concurrency=1).filter(lambda r: r["id"] > 4),
        [{**row, "times": row["id"] * 2, "plus": row["id"] + 1} for row in ALL[5:]],
    ),
    "async class": (lambda f: rows(f).map_batches(Counted, concurrency=1), [{"id": i, "n": 4} for i in range(ROWS)]),
    "two async classes": (
        lambda f: rows(f).map_batches(Counted, concurrency=1).map(Later, concurrency=1),
        [{"id": i, "n": 4, "plus": i + 1} for i in range(ROWS)],
    ),
    "class after function": (
        lambda f: rows(f).map(lambda r: r).map_batches(Times, concurrency=2).map_batches(lambda b: b),
        [{**row, "times": row["id"] * 2} for row in ALL],
    ),
    "csv": (lambda f: ray.data.read_csv(str(f / "text")).map(lambda row: {"id": row["id"]}), IDS),
    "images": (
        lambda f: ray.data.read_images(str(f / "images")).map(lambda row: {"image": row["image"]}),
        [{"image": image} for image in IMAGES],
    ),
    "binary": (
        lambda f: ray.data.read_binary_files(str(f / "images")).map(lambda row: {"png": row["bytes"][1:4]}),
        [{"png": b"PNG"}] * FILES,
    ),
    "range": (
        lambda f: ray.data.range(57, override_num_blocks=3).map(lambda row: {"id": row["id"] ** 2}),
        [{"id": i**2} for i in range(57)],
    ),
    "tensors": (
        lambda f: ray.data.range_tensor(20, shape=(2, 2)).map_batches(lambda b: b),
        [{"data": np.full((2, 2), i)} for i in range(20)],
    ),
    "items": (
        lambda f: ray.data.from_items([{"id": i, "text": "t" * i} for i in range(9)]).map(lambda row: row),
        [{"id": i, "text": "t" * i} for i in range(9)],
    ),
    "numpy": (
        lambda f: ray.data.from_numpy(np.arange(24).reshape(12, 2)),
        [{"data": [2 * i, 2 * i + 1]} for i in range(12)],
    ),
    "pandas": (
        lambda f: ray.data.from_pandas([pd.DataFrame({"id": [1, 2]}), pd.DataFrame({"id": [3]})]).map(lambda row: row),
        [{"id": 1}, {"id": 2}, {"id": 3}],
    ),
    "arrow": (
        lambda f: ray.data.from_arrow(pa.table({"id": [1, 2, 3], "s": ["a", None, "c"]})),
        [{"id": 1, "s": "a"}, {"id": 2, "s": None}, {"id": 3, "s": "c"}],
    ),
    "materialized": (
        lambda f: ray.data.range(30, override_num_blocks=2).materialize().map(lambda row: row),
        [{"id": i} for i in range(30)],
    ),
    "split": (
        lambda f: ray.data.from_items([{"id": i} for i in range(40)]).split(3, equal=True)[0].map(lambda row: row),
        [{"id": i} for i in range(13)],
    ),
    "union": (
        lambda f: rows(f).select_columns(["id"]).union(ray.data.range(9)).map(lambda r: {"id": r["id"] + 1}),
        [{"id": row["id"] + 1} for row in [*IDS, *IDS[:9]]],
    ),
    "block sizes": (lambda f: rows(f).repartition(2).map(lambda row: {"id": row["id"]}).randomize_block_order(), IDS),
    "limit": (
        lambda f: ray.data.range(100, override_num_blocks=7).limit(43).map(lambda row: {"id": row["id"]}),
        IDS[:43],
    ),
    "sort": (lambda f: rows(f).sort("id", descending=True).map(lambda row: {"id": row["id"]}), IDS),
    "join": (
        lambda f: (
            stored()
            .select_columns(["id", "name"])
            .join(ray.data.from_items(IDS[:20]), "inner", 2, on=("id",))
            .map(lambda row: row)
        ),
        [{"id": i, "name": f"n{i}"} for i in range(20)],
    ),
    "groupby": (
        lambda f: (
            stored()
            .with_column("third", col("id") % 3)
            .groupby("third", num_partitions=2)
            .count()
            .map(lambda r: {"n": r["count()"]})
        ),
        [{"n": ROWS // 3}] * 3,
    ),
    "random_shuffle": (lambda f: rows(f).random_shuffle().filter(lambda row: row["id"] > 3), ALL[4:]),
    "empty blocks": (
        lambda f: ray.data.from_arrow([pa.table({"id": [0]}), pa.table({"id": pa.array([], pa.int64())})]).limit(1),
        IDS[:1],
    ),
    "empty blocks before a limit": (
        lambda f: ray.data.from_arrow([pa.table({"id": pa.array([], pa.int64())}), pa.table({"id": [0, 1]})]).limit(1),
        IDS[:1],
    ),
    "batches after a sort": (lambda f: stored().sort("id").map_batches(lambda b: {"id": b["id"]}), IDS),
    "zip": (
        lambda f: ray.data.range(9).zip(ray.data.range(9).rename_columns({"id": "same"})).limit(7),
        [{"id": i, "same": i} for i in range(7)],
    ),
    "two of them": (lambda f: rows(f).sort("x").limit(5).union(stored().random_shuffle()), [*ALL[:5], *ALL]),
    "shuffled into blocks": (
        lambda f: stored().repartition(2, shuffle=True).map(lambda row: {"id": row["id"]}),
        IDS,
    ),
    "same number": (lambda f: rows(f).map_batches(lambda b: {"id": b["id"]}, udf_modifying_row_count=False), IDS),
}
REFUSED: dict[str, tuple[Made, str]] = {
    "function before a sort": (
        lambda f: rows(f).map(lambda r: r).sort("id"),
        r"step Sort needs rows of several blocks at once, and Map\(<lambda>\) before it may draw random numbers",
    ),
    "function before a join": (
        lambda f: ray.data.range(9).join(ray.data.range(9).filter(lambda r: True), "inner", 2, on=("id",)),
        r"step Join.* needs rows of several .* Filter\(<lambda>\) before it",
    ),
    "random column": (
        lambda f: rows(f).with_column("y", 1 + random()).sort("id"),
        "step Sort needs rows of several .* an expression before it may draw",
    ),
    "map_groups": (
        lambda f: rows(f).groupby("id").map_groups(lambda group: group),
        "takes the whole blocks that the step before it makes",
    ),
    "one group": (
        lambda f: rows(f).groupby(None).map_groups(lambda group: group),
        "takes the whole blocks that the step before it makes",
    ),
    "blocks": (
        lambda f: rows(f).repartition(2).map_batches(lambda b: b),
        "takes the whole blocks that the step before it makes",
    ),
    "GPU after a sort": (
        lambda f: rows(f).sort("id").map_batches(Times, batch_size=8, num_gpus=1, concurrency=1),
        r"MapBatches\(Times\) takes GPUs",
    ),
    "rows of a block": (
        lambda f: rows(f).repartition(target_num_rows_per_block=5),
        "StreamingRepartition.* needs rows",
    ),
    "GPU": (
        lambda f: rows(f).map_batches(Times, batch_size=8, num_gpus=1, concurrency=1),
        r"MapBatches\(Times\) takes GPUs",
    ),
    "resources": (lambda f: rows(f).map(Plus, resources={"special": 1}, concurrency=1), r"Map\(Plus\) sets resources"),
    "download": (
        lambda f: ray.data.from_items([{"at": str(f / "images" / "0.png")}]).with_column("png", download("at")),
        r"Download.* downloads with processes of Ray Data",
    ),
    "concurrency": (lambda f: rows(f).map(halves, concurrency=2), r"Map\(halves\) limits its concurrency"),
    "random split": (
        lambda f: rows(f).streaming_train_test_split(0.5, split_type="random", seed=1)[0].map_batches(lambda b: b),
        r"step MapBatches\(random_split\) draws by the tasks of Ray Data",
    ),
    "late limit": (lambda f: rows(f).filter(lambda r: True).limit(5), "limit=5 follows steps whose number of rows"),
}


def made(dataset: ray.data.Dataset) -> list[dict[str, Any]]:
    """The rows that the units of a Dataset give, in order."""
    plan = take_over(dataset)
    runners = [Runner(cloudpickle.loads(cloudpickle.dumps(chain))) for chain in plan.chains]
    found: list[dict[str, Any]] = []
    for number, unit in enumerate(plan.units):
        columns = joined(
            list(runners[unit.chain].run(unit.packed_input, number=number, start=unit.start, stop=unit.stop))
        )
        count = len(next(iter(columns.values()), ()))
        assert unit.rows in (None, count), (unit, count)
        found += [{name: column[i] for name, column in columns.items()} for i in range(count)]
    return found


def comparable(found: list[dict[str, Any]]) -> Counter[str]:
    def plain(value: Any) -> Any:
        return np.asarray(value).tolist() if not isinstance(value, str | bytes) else value

    return Counter(repr({name: plain(value) for name, value in sorted(row.items())}) for row in found)


# Ray Data runs each of these as it does "sort", which stays.
AGAIN = ("two of them", "random_shuffle", "sort", "join", "groupby", "batches after a sort")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in AGAIN else []) for name in TAKEN]
)
def test_units_and_steps_make_the_rows_of_a_dataset(name: str, folder: Path) -> None:
    build, expected = TAKEN[name]
    assert comparable(made(build(folder))) == comparable(expected)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The minimum number of concurrent actors")  # Ray Data's, of pipelines with one block
@pytest.mark.parametrize("name", TAKEN)
def test_ray_data_makes_the_same_rows(name: str, folder: Path) -> None:
    build, expected = TAKEN[name]
    assert comparable(build(folder).take_all()) == comparable(expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_ray_data_can_execute_is_named(name: str, folder: Path) -> None:
    build, message = REFUSED[name]
    with pytest.raises(NotTakenOverError, match=message):
        take_over(build(folder))


@pytest.mark.parametrize("name", ["parquet", "map", "csv", "images", "range", "items", "pandas", "union"])
def test_a_dataset_built_again_has_the_same_units(name: str, folder: Path) -> None:
    first, again = take_over(TAKEN[name][0](folder)), take_over(TAKEN[name][0](folder))
    assert first.identity == again.identity
    assert [(u.start, u.stop, u.rows, u.named) for u in first.units] == [
        (u.start, u.stop, u.rows, u.named) for u in again.units
    ]


def test_other_data_has_another_identity(folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "other.parquet")
    both = rows(folder).select_columns(["id"]).union(ray.data.read_parquet(str(tmp_path)))
    assert take_over(both).identity != take_over(rows(folder).select_columns(["id"])).identity
    stored = ray.data.range(9).materialize()  # Ray stores blocks in any order: only this process knows them
    assert take_over(stored).identity != take_over(stored).identity


@pytest.mark.parametrize(
    ("kind", "read"),
    [("images", ray.data.read_images), ("rows", ray.data.read_parquet), ("text", ray.data.read_csv)],
)
def test_files_that_ray_data_shuffles_are_the_same_units_in_every_run(
    kind: str, read: Callable[..., ray.data.Dataset], folder: Path
) -> None:
    """Otherwise, a resumed run would begin its epoch again. offload shuffles them itself, but neither what a limit takes nor an order that
    the user keeps."""

    def shuffled() -> ray.data.Dataset:
        return read(str(folder / kind), shuffle="files")

    plain = read(str(folder / kind))
    assert {take_over(shuffled()).identity for _ in range(8)} == {take_over(plain).identity}
    assert comparable(made(shuffled())) == comparable(made(plain))
    assert len({take_over(shuffled(), shuffle=False).identity for _ in range(16)}) > 1
    if kind != "text":  # whose number of rows is unknown
        assert len({take_over(shuffled().limit(2)).identity for _ in range(16)}) > 1


def test_what_ray_data_executed_is_told_with_its_size_and_keeps_its_order(folder: Path) -> None:
    plan = take_over(stored().sort("id").map(lambda row: row), shuffle=False)
    assert plan.units
    (executed,) = plan.executed
    assert executed.step == "Sort"
    assert executed.size_bytes > 8 * ROWS
    assert take_over(rows(folder)).executed == ()


def test_an_order_that_ray_data_draws_in_every_epoch_stays_so_unless_offload_shuffles(folder: Path) -> None:
    with pytest.raises(NotTakenOverError, match="step RandomShuffle orders the rows anew in every epoch"):
        take_over(rows(folder).random_shuffle(), shuffle=False)


def test_ids_of_the_user_outlast_the_driver_only_with_ray_data(folder: Path) -> None:
    with pytest.raises(
        NotTakenOverError, match="its step Sort needs rows of several blocks at once, and it has an id_col"
    ):
        take_over(rows(folder).sort("id"), has_ids=True)
    assert take_over(rows(folder), has_ids=True).units


@pytest.mark.parametrize("name", ["parquet", "map", "items", "limit", "same number", "images"])
def test_the_number_of_rows_is_known_if_no_step_can_change_it(name: str, folder: Path) -> None:
    plan = take_over(TAKEN[name][0](folder))
    assert sum(unit.rows or 0 for unit in plan.units) == len(made(TAKEN[name][0](folder)))


@pytest.mark.parametrize("name", ["filter", "flat_map", "map_batches"])
def test_the_number_of_rows_is_unknown_otherwise(name: str, folder: Path) -> None:
    assert {unit.rows for unit in take_over(TAKEN[name][0](folder)).units} == {None}


def test_a_small_file_gives_every_core_work(folder: Path) -> None:
    """A file of a thousand paths may stand for hours of work."""
    plan = take_over(rows(folder).map(lambda row: row))
    assert len(plan.units) >= ROWS
    batched = take_over(rows(folder).map_batches(lambda b: b, batch_size=10))
    assert all((unit.inputs or 0) >= 10 for unit in batched.units)


def test_a_torch_data_set_is_left_to_ray_data_with_a_better_way() -> None:
    """Ray's source asserts that it gets one read task."""
    with pytest.raises(
        NotTakenOverError, match=r"reads a torch data set in one task \(offload.from_torch reads one on"
    ):
        take_over(ray.data.from_torch(TensorDataset(torch.arange(3))))


def test_what_a_process_could_not_hold_is_left_to_ray_data(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    class Unknown(ray.data.Datasource):
        def estimate_inmemory_data_size(self) -> None:
            return None

        def get_read_tasks(self, parallelism: int, **options: Any) -> list[ray.data.ReadTask]:
            nothing = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [ray.data.ReadTask(lambda: [pa.table({"id": [1]})], nothing)]

    with pytest.raises(NotTakenOverError, match="tells neither the size nor the rows of a read task"):
        take_over(ray.data.read_datasource(Unknown()))
    monkeypatch.setattr(drafts, "MOST_UNIT_BYTES", 1 << 20)
    (folder / "long").mkdir()
    (folder / "long" / "0.csv").write_text("id\n" + "1\n" * 2_000_000)
    with pytest.raises(NotTakenOverError, match=r"a read task reads \d+ MiB at once \(more than 1\)"):
        take_over(ray.data.read_csv(str(folder / "long")))


class Fragments(ray.data.Datasource):
    """A source like Lance: its read tasks name the rows before any filter, and need not tell their size."""

    def __init__(self, each: int, size_bytes: int | None, **scanner_options: Any) -> None:
        super().__init__()
        self.each, self.size_bytes, self.scanner_options = each, size_bytes, scanner_options

    def supports_predicate_pushdown(self) -> bool:
        return True

    def estimate_inmemory_data_size(self) -> None:
        return None

    def get_read_tasks(self, parallelism: int, **options: Any) -> list[ray.data.ReadTask]:
        predicate, least = self.get_current_predicate(), self.scanner_options.get("filter", 0)
        where = pc.field("id") >= least if predicate is None else predicate.to_pyarrow() & (pc.field("id") >= least)
        meta = BlockMetadata(num_rows=self.each, size_bytes=self.size_bytes, input_files=None, exec_stats=None)
        tables = [pa.table({"id": np.arange(self.each) + number * self.each}) for number in range(10)]
        return [ray.data.ReadTask(lambda table=table: [table.filter(where)], meta) for table in tables]


def test_a_read_task_of_unknown_size_is_read_once() -> None:
    """Each part of it would read from its first row on. One of many rows might not fit into memory."""
    assert [unit.rows for unit in take_over(ray.data.read_datasource(Fragments(100, None))).units] == [100] * 10
    assert len(take_over(ray.data.read_datasource(Fragments(100, 800))).units) == 200
    with pytest.raises(NotTakenOverError, match=r"reads 65,537 rows .* does not tell their size"):
        take_over(ray.data.read_datasource(Fragments((1 << 16) + 1, None)))


@pytest.mark.parametrize("way", ["predicate", "option", "both"])
def test_a_filter_in_the_source_leaves_the_number_of_rows_unknown(way: str) -> None:
    def filtered(size_bytes: int | None) -> ray.data.Dataset:
        options = {} if way == "predicate" else {"filter": 900}
        dataset = ray.data.read_datasource(Fragments(100, size_bytes, **options))
        return dataset if way == "option" else dataset.filter(expr=col("id") >= 950)

    assert comparable(made(filtered(800))) == comparable(
        [{"id": i} for i in range(900 if way == "option" else 950, 1000)]
    )
    with pytest.raises(NotTakenOverError, match="tells neither the size nor the rows"):
        take_over(filtered(None))
    assert {unit.rows for unit in take_over(ray.data.read_datasource(Fragments(100, None, batch_size=9))).units} == {
        100
    }


def test_the_user_s_dataset_stays_as_it_was(folder: Path) -> None:
    dataset = TAKEN["two classes"][0](folder)
    before = str(dataset._logical_plan.dag), dataset.context.execution_options.preserve_order
    take_over(dataset)
    assert (str(dataset._logical_plan.dag), dataset.context.execution_options.preserve_order) == before


class Coroutine:
    begun: ClassVar[list[int]] = []

    async def __call__(self, batch: dict[str, Any]) -> Any:
        Coroutine.begun += batch["id"].tolist()
        yield {"id": batch["id"]}


def test_coroutines_find_their_object_whenever_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray begins further ones on a thread of their own while the first results are on their way, and by then the object may be gone."""
    monkeypatch.setattr(drafts, "LEAST_UNITS", 1)
    source = ray.data.from_arrow(pa.table({"id": list(range(40))}))
    plan = take_over(source.map_batches(Coroutine, batch_size=1, concurrency=1))
    (unit,) = plan.units
    found: list[int] = []
    for piece in Runner(plan.chains[0]).run(unit.packed_input, number=0, start=unit.start, stop=unit.stop):
        assert sorted(Coroutine.begun) == list(range(40))
        found += np.asarray(piece["id"]).tolist()
    assert found == list(range(40))


def test_large_blocks_and_files_are_cut(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(drafts, "LEAST_UNITS", 1)
    whole = len(take_over(rows(folder)).units)
    monkeypatch.setattr(drafts, "UNIT_BYTES", 100)
    monkeypatch.setattr(drafts, "SMALL_BYTES", 50)
    assert len(take_over(rows(folder)).units) == 9 > whole == 3  # row groups
    stored = ray.data.from_numpy(np.zeros((100, 8)))
    assert len(take_over(stored).units) >= 64
    assert len(made(stored)) == 100


def test_a_block_counts_by_its_parts_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a whole data set of Hugging Face, or of a data frame."""
    monkeypatch.setattr(drafts, "UNIT_BYTES", 500)
    monkeypatch.setattr(drafts, "MOST_UNIT_BYTES", 1000)
    assert len(made(ray.data.from_numpy(np.zeros((100, 8))))) == 100
    with pytest.raises(NotTakenOverError, match="at once"):
        take_over(ray.data.from_numpy(np.zeros((2, 1000))))


def test_read_tasks_of_many_small_rows_are_small() -> None:
    """A function of rows makes a dict of each."""
    plan = take_over(ray.data.range(50 * drafts.UNIT_ROWS * 10, override_num_blocks=2).map(lambda row: row))
    assert max(unit.inputs or 0 for unit in plan.units) <= drafts.UNIT_ROWS


def test_the_read_tasks_of_many_files_take_little_memory(tmp_path: Path) -> None:
    for number in range(300):
        Image.fromarray(np.full((8, 6, 3), number % 256, np.uint8)).save(tmp_path / f"{number}.png")
    plan = take_over(ray.data.read_images(str(tmp_path)).map(lambda row: row))
    assert len(plan.units) >= 200
    assert sum(len(unit.packed_input) for unit in plan.units) / len(plan.units) < 1000
    assert len(made(ray.data.read_images(str(tmp_path)))) == 300


def test_a_function_gets_batches_of_the_size_that_it_asks_for(folder: Path) -> None:
    """Each file is cut into seven units of 4 or 5 rows."""
    sized = rows(folder).map_batches(lambda batch: {"size": np.full(len(batch["id"]), len(batch["id"]))}, batch_size=4)
    assert Counter(row["size"] for row in made(sized)) == Counter({4: 84, 1: 6})


def test_missing_numbers_are_nan_behind_a_function_of_rows_too(tmp_path: Path) -> None:
    """As in Ray's own batches, also in a unit that holds no other number. Text stays text or None."""
    missing: dict[str, list[Any]] = {"x": [None, 0.5], "n": [None, 2], "name": [None, "a"], "flag": [None, True]}
    table = {"id": list(range(6)), **{name: values * 3 for name, values in missing.items()}}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    rows = ray.data.read_parquet(str(tmp_path))
    for source in (rows, rows.filter(lambda row: row["id"] >= 0), rows.map(lambda row: row)):
        assert len(take_over(source).units) > 1
        found = made(source)
        assert [(row["name"], row["flag"]) for row in found] == [(None, None), ("a", True)] * 3
        for name, value in (("x", 0.5), ("n", 2)):
            assert np.isnan([row[name] for row in found[::2]]).all()
            assert [row[name] for row in found[1::2]] == [value] * 3


def test_reading_parquet_leaves_arrow_its_threads(folder: Path) -> None:
    """Ray's reader would decode on 32 threads, and each preprocessing process has one core."""
    before = pa.cpu_count()
    assert len(made(rows(folder))) == ROWS
    assert pa.cpu_count() == before


class Noted:
    def __init__(self, folder: str) -> None:
        (Path(folder) / uuid.uuid4().hex).touch()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


def test_the_parts_of_a_union_share_the_object_of_a_later_step(tmp_path: Path) -> None:
    """A process would hold a model once for each part."""
    ids = ray.data.range(4)
    union = ids.union(ids, ids).map_batches(Noted, fn_constructor_args=(str(tmp_path),), concurrency=1)
    chains = take_over(union).chains
    assert len(chains) == 3
    UnitMaker(cloudpickle.loads(cloudpickle.dumps(chains)))
    assert len(list(tmp_path.iterdir())) == 1
