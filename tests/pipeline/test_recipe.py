"""What a preprocessing task does with its rows: reproducible, checked, nothing lost without a word."""

from __future__ import annotations

import functools
import itertools
import platform
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle
from torchvision import transforms as v1

from offload.errors import RunError
from offload.pipeline.blocks import whole_samples, wire
from offload.pipeline.blocks.wire import ERROR, POSITION, SAMPLE_ID
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.feed import Feed
from offload.pipeline.feed.passes import PassKey, PassRequest
from offload.pipeline.images.split import split_transform
from offload.pipeline.index.source import At, Reader, Samples, nowhere
from offload.pipeline.order.chunks import CHUNK
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.pool import packed_recipe
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.raydata.execution import encode_foreign
from offload.pipeline.sources.from_torch import TorchReader
from tests.pipeline.test_feed import HandPool

Batch = dict[str, Any]


class Numbers(Reader):
    """A source whose sample i is i, as an image and as a label; some rows may be bad, some may raise."""

    def __init__(self, bad: tuple[int, ...] = (), raising: tuple[int, ...] = ()) -> None:
        self.bad, self.raising = bad, raising

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        ids = rows.column(SAMPLE_ID).to_pylist()
        if stopped := [i for i in ids if i in self.raising]:
            raise OSError(f"no sample {stopped[0]}")
        images = [None if i in self.bad else np.full((2, 3, 3), i % 256, np.uint8) for i in ids]
        errors = {row: f"{i} is bad" for row, i in enumerate(ids) if i in self.bad}
        return Samples({"image": images, "label": np.array(ids, dtype=np.int64)}, errors)

    def describe(self, rows: pa.Table, row: int) -> str:
        return f"file-{rows.column(SAMPLE_ID)[row].as_py()}"


@pytest.fixture(autouse=True)
def without_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    """With OpenCV, whose generator tells no state, rows always come 16 at a time; tests of this process may have imported it."""
    monkeypatch.delitem(sys.modules, "cv2", raising=False)


def recipe(transform: Any = None, kind: Any = "batch", **kwargs: Any) -> Recipe:
    kwargs = {"seed": 7, "reader": Numbers(), **kwargs}
    return Recipe(transform=transform, kind="none" if transform is None else kind, **kwargs)


def index(positions: Any, ids: Any = None) -> pa.Table:
    positions = np.asarray(positions, dtype=np.int64)
    return pa.table({SAMPLE_ID: positions if ids is None else np.asarray(ids, dtype=np.int64), POSITION: positions})


def run(made: Recipe, positions: Any, *, ids: Any = None, epoch: int = 0) -> Batch:
    return wire.decode(process(made, index(positions, ids), epoch=epoch))


def failure(made: Recipe, positions: Any = range(8), ids: Any = None) -> str:
    with pytest.raises(RunError) as caught:
        process(made, index(positions, ids), epoch=0)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- transforms that are random, in every way there is ----------------------------------------------------------------


def noisy_batch(batch: Batch) -> Batch:
    rows = len(batch["label"])
    draws = np.stack([np.random.rand(rows), [random.random() for _ in range(rows)], torch.rand(rows).numpy()], axis=1)
    return {"label": batch["label"], "draws": draws}


def noisy_sample(sample: Batch) -> Batch:
    return {"label": sample["label"], "draws": np.array([np.random.rand(), random.random(), torch.rand(()).item()])}


def noisy_image(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([np.random.rand(), random.random(), torch.rand(()).item()])


RANDOM: list[tuple[Callable[..., Any], str, str]] = [
    (noisy_batch, "batch", "draws"),
    (noisy_sample, "sample", "draws"),
    (noisy_image, "image", "image"),
]


@pytest.mark.parametrize(("transform", "kind", "column"), RANDOM)
@settings(deadline=None, max_examples=25)
@given(cuts=st.sets(st.integers(1, 9), max_size=4), epoch=st.integers(0, 5), seed=st.integers(0, 2**62))
def test_augmentation_does_not_depend_on_how_rows_are_cut_into_tasks(
    transform: Any, kind: str, column: str, cuts: set[int], epoch: int, seed: int
) -> None:
    made = recipe(transform, kind, seed=seed)
    ids = np.random.default_rng(0).permutation(10 * CHUNK)
    whole = run(made, range(len(ids)), ids=ids, epoch=epoch)
    edges = [0, *(c * CHUNK for c in sorted(cuts)), len(ids)]  # tasks are never cut inside a chunk
    parts = []
    for a, b in itertools.pairwise(edges):
        random.seed(), np.random.seed(), torch.manual_seed(a)  # another process, another state
        parts.append(run(made, range(a, b), ids=ids[a:b], epoch=epoch))
    for name in whole:
        assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])


def seldom_noisy_batch(batch: Batch) -> Batch:
    draws = np.zeros(len(batch["label"]))
    for i, label in enumerate(batch["label"].tolist()):
        if label % 61 == 0:
            draws[i] = random.random()
    return {"draws": draws}


def seldom_noisy_sample(sample: Batch) -> Batch:
    return {"draws": np.float64(torch.rand(()).item() if sample["label"] % 61 == 0 else 0.0)}


class SeldomNoisy(Numbers):
    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        ids = rows.column(SAMPLE_ID).to_numpy()
        return Samples({"draws": np.array([np.random.rand() if i % 61 == 0 else 0.0 for i in ids.tolist()])})


@pytest.mark.parametrize(
    ("transform", "kind", "reader"),
    [
        (seldom_noisy_batch, "batch", Numbers()),
        (seldom_noisy_sample, "sample", Numbers()),
        (None, "none", SeldomNoisy()),
    ],
    ids=["batch", "sample", "reader"],
)
@settings(deadline=None, max_examples=25)
@given(order=st.permutations(range(12)), cuts=st.sets(st.integers(1, 59), max_size=6))
def test_calls_of_many_chunks_draw_what_each_chunk_draws_alone(
    transform: Any, kind: Any, reader: Any, order: list[int], cuts: set[int]
) -> None:
    """Whatever a process did before, and however many rows it takes at once."""
    made = recipe(transform, kind, reader=reader)
    fixed = recipe(transform, kind, reader=reader)
    fixed.calls.fix()
    whole = run(fixed, range(60 * CHUNK))["draws"]
    assert np.count_nonzero(whole) == 16
    edges = list(itertools.pairwise([0, *sorted(cuts), 60]))
    for number in [each for each in order if each < len(edges)]:
        a, b = (CHUNK * edge for edge in edges[number])
        assert np.array_equal(run(made, range(a, b))["draws"], whole[a:b])


@pytest.mark.parametrize(("kind", "reads"), [("batch", 4), ("sample", 4), ("batch", 1 << 20)])
def test_only_light_rows_that_draw_nothing_come_many_at_once(kind: str, reads: int) -> None:
    class Wide(Numbers):
        sizes: ClassVar[list[int]] = []

        def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
            self.sizes.append(rows.num_rows)
            return Samples({"x": np.zeros((rows.num_rows, reads // 4), np.float32)})

    def first(batch: Batch) -> Batch:
        return {"x": batch["x"][..., :1]}

    run(recipe(first, kind, reader=Wide()), range(64 * CHUNK))
    assert (max(Wide.sizes) > CHUNK) == (reads == 4)


@pytest.mark.parametrize(("transform", "kind", "column"), RANDOM)
def test_augmentation_differs_between_samples_epochs_and_seeds(transform: Any, kind: str, column: str) -> None:
    first = run(recipe(transform, kind), range(40))[column]
    for generator in range(3):
        assert len(set(first[:, generator].tolist())) == 40
    for other in (run(recipe(transform, kind), range(40), epoch=1), run(recipe(transform, kind, seed=8), range(40))):
        assert not np.intersect1d(first, other[column]).size


def test_augmentation_of_a_sample_follows_the_sample() -> None:
    # Per sample, the draw belongs to the sample, wherever the order of the epoch puts it.
    made = recipe(noisy_sample, "sample")
    first, second = run(made, range(20)), run(made, range(20), ids=range(19, -1, -1))
    assert np.array_equal(first["draws"], second["draws"][::-1])


class Restless(Numbers):
    """A source that draws random numbers of its own, another count each time."""

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        self.reads = getattr(self, "reads", 0) + 1
        for _ in range(self.reads):
            random.random(), np.random.rand(), torch.rand(())
        return super().read(rows)


@pytest.mark.parametrize(("transform", "kind", "column"), RANDOM)
def test_augmentation_does_not_depend_on_what_the_source_draws(transform: Any, kind: str, column: str) -> None:
    made = recipe(transform, kind, reader=Restless())
    assert np.array_equal(run(made, range(20))[column], run(made, range(20))[column])


class Augmenting(torch.utils.data.Dataset[Any]):
    """A data set that augments in its own __getitem__, as most do."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> tuple[float, int]:
        return torch.rand(()).item() + random.random() + np.random.rand(), i


class AugmentingInBatches(Augmenting):
    """One that fetches and augments several samples at once."""

    def __getitems__(self, items: list[int]) -> list[tuple[float, int]]:
        draws = torch.rand(len(items)).numpy() + np.random.rand(len(items)) + [random.random() for _ in items]
        return list(zip(draws.tolist(), items, strict=True))


def run_torch(epoch: int, rows: range, dataset: type[Augmenting] = Augmenting) -> Any:
    made = Recipe(transform=None, kind="none", seed=7, reader=TorchReader(dataset(), ("draw", "label")))
    positions = np.array(rows)
    return wire.decode(
        process(made, pa.table({"item": positions, SAMPLE_ID: positions, POSITION: positions}), epoch=epoch)
    )


def test_a_data_set_that_augments_itself_is_reproducible_and_differs_between_epochs() -> None:
    first = run_torch(0, range(64))["draw"]
    assert len(set(first.tolist())) == 64
    assert np.array_equal(np.concatenate([run_torch(0, range(16))["draw"], run_torch(0, range(16, 64))["draw"]]), first)
    assert not np.intersect1d(run_torch(1, range(64))["draw"], first).size


@pytest.mark.parametrize(
    ("transform", "kind", "reader"),
    [
        *((transform, kind, Numbers()) for transform, kind, _ in RANDOM),
        (None, "none", TorchReader(Augmenting(), ("draw", "label"))),
        (None, "none", TorchReader(AugmentingInBatches(), ("draw", "label"))),
    ],
)
@settings(deadline=None, max_examples=20)
@given(done=st.sets(st.integers(0, 69), max_size=69), first_rows=st.integers(1, 40), epoch=st.integers(0, 5))
def test_the_bytes_of_a_sample_are_the_same_wherever_a_resume_cuts(
    transform: Any, kind: Any, reader: Any, done: set[int], first_rows: int, epoch: int
) -> None:
    made = recipe(transform, kind, reader=reader)
    stream = FeedDataset(recipe=None, rows=pa.table({"item": np.arange(70)}), shuffle=True, seed=7)  # type: ignore[arg-type]

    def blocks(trained: Ranges) -> Batch:
        feed = Feed({"train": stream}, Cores(nodes=("here",) * 2, task_cpus=1.0, stores={"here": 1e9}), pool=HandPool)
        request = PassRequest(world_size=1, first_rows=first_rows, epoch=epoch, done=trained.pairs)
        feed.open(PassKey(attempt=0, name="train", number=epoch), request, rank=0)
        found = []
        while (each := feed.pool.next_task("here")) is not None:
            random.seed(), np.random.seed(), torch.seed()  # another process, another state
            found.append(wire.decode(process(made, each.task.rows, epoch=epoch)))
        return {name: np.concatenate([block[name] for block in found]) for name in found[0]}

    whole = blocks(Ranges())
    left = np.array([position not in done for position in whole[POSITION]])
    assert left.any()
    resumed = blocks(Ranges.of(done))
    assert set(resumed) == set(whole)
    for name in whole:
        assert np.array_equal(resumed[name], whole[name][left]), name


# --- what a transform gets and gives ----------------------------------------------------------------------------------


def test_without_a_transform_rows_pass() -> None:
    block = run(recipe(), range(40), ids=range(100, 140))
    assert list(block) == ["image", "label", SAMPLE_ID, POSITION]
    assert block["image"].shape == (40, 2, 3, 3)
    assert block["image"].dtype == np.uint8
    assert block["label"].tolist() == block[SAMPLE_ID].tolist() == list(range(100, 140))
    assert block[POSITION].tolist() == list(range(40))


def test_a_batch_transform_gets_lists_and_arrays_of_whole_chunks() -> None:
    seen: list[list[int]] = []

    def halved(batch: Batch) -> Batch:
        assert isinstance(batch["image"], list)
        assert batch["image"][0].shape == (2, 3, 3)
        assert batch["label"].dtype == np.int64
        seen.append(batch["label"].tolist())
        return {"image": np.stack(batch["image"]) // 2, "name": [f"n{i}" for i in batch["label"]]}

    block = run(recipe(halved), range(5, 40))
    assert [label for labels in seen for label in labels] == list(range(5, 40))
    assert all(labels[0] in (5, 16, 32) for labels in seen)  # aligned to positions of the pass
    assert block["image"][:, 0, 0, 0].tolist() == [i // 2 for i in range(5, 40)]
    assert block["name"] == [f"n{i}" for i in range(5, 40)]
    assert "label" not in block


def test_a_sample_transform_gets_one_sample() -> None:
    def renamed(sample: Batch) -> Batch:
        return {"x": sample["image"][0, 0], "y": sample["label"] * 2}

    block = run(recipe(renamed, "sample"), range(20))
    assert block["x"].shape == (20, 3)
    assert (block["y"].tolist(), block["y"].dtype) == (list(range(0, 40, 2)), np.int64)


def test_an_image_transform_gets_the_image_and_leaves_the_rest() -> None:
    made = split_transform(v1.Compose([v1.Resize((4, 5)), v1.ToTensor()]))
    block = run(recipe(made.cpu, "image"), range(20))
    assert (block["image"].shape, block["image"].dtype) == ((20, 4, 5, 3), np.uint8)
    assert block["label"].tolist() == list(range(20))


def test_an_image_transform_of_a_source_without_images() -> None:
    made = recipe(split_transform(v1.Compose([v1.Resize((4, 5)), v1.ToTensor()])).cpu, "image", reader=NoImages())
    assert "no column 'image': it gives x, y" in failure(made)


class NoImages(Numbers):
    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        return Samples({"x": np.zeros((rows.num_rows, 2)), "y": np.zeros(rows.num_rows)})


IMPORTS_TORCH_ITSELF = """
import sys
import numpy as np, pyarrow as pa
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.index.source import At, Reader, Samples, nowhere

class Zeros(Reader):
    def read(self, rows, at):
        return Samples({"label": np.zeros(rows.num_rows)})
    def describe(self, rows, row):
        return ""

def noisy(batch):
    import torch
    return {"x": torch.rand(len(batch["label"]))}

def block():
    ids = np.arange(16)
    rows = pa.table({"sample_id": ids, "__position__": ids})
    made = Recipe(transform=noisy, kind="batch", seed=3, reader=Zeros()).ready()
    return process(made, rows, epoch=0).column("x").to_pylist()

assert "torch" not in sys.modules
first = block()
assert "torch" in sys.modules
assert first == block()
"""


def test_a_transform_that_imports_torch_itself_is_reproducible_from_its_first_chunk_on() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS_TORCH_ITSELF], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr


CHURN = """
import resource
import numpy as np
from offload.pipeline.preprocessing.environment import keep_freed_memory
keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def churn():
    for _ in range(50):
        np.ones(1 << 20, np.uint8), np.ones(3 << 20, np.uint8)
churn()
before = faults()
churn()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back so eagerly")
def test_memory_that_was_freed_is_not_taken_anew() -> None:
    done = subprocess.run([sys.executable, "-c", CHURN], capture_output=True, text=True, timeout=800, check=True)
    assert int(done.stdout) < 1024, "pages; given back and taken anew it would be 50,000"


@pytest.mark.parametrize(
    "column",
    [
        lambda n: torch.ones(n, 2),
        lambda n: [torch.ones(2)] * n,
        lambda n: tuple(np.ones((n, 2), np.float32)),
        lambda n: np.array([*np.ones((n, 2), np.float32), None], dtype=object)[:-1],
        lambda n: pd.Series([np.ones(2, np.float32)] * n, index=range(1, n + 1)),
    ],
    ids=["tensor", "list of tensors", "tuple", "array of objects", "column of a data frame with its own index"],
)
def test_columns_of_every_kind_become_tensors(column: Any) -> None:
    block = run(recipe(lambda batch: {"x": column(len(batch["label"]))}), range(20))
    assert (block["x"].shape, block["x"].dtype) == ((20, 2), np.float32)
    made = recipe(lambda batch: {"label": batch["label"], "x": column(len(batch["label"]))}, whole=True)
    rows = [sample for (sample,) in whole_samples.decode(run(made, range(20)))]
    assert [row["label"] for row in rows] == list(range(20))
    assert [np.asarray(row["x"]).tolist() for row in rows] == [[1, 1]] * 20


def test_a_column_that_some_chunks_lack() -> None:
    def sometimes(batch: Batch) -> Batch:
        return {"label": batch["label"], **({"note": ["x"] * len(batch["label"])} if batch["label"][0] >= 16 else {})}

    assert run(recipe(sometimes), range(20))["note"] == [None] * 16 + ["x"] * 4


@pytest.mark.parametrize("none", [[], {"found": []}, [None]])
def test_a_first_sample_without_objects_does_not_hide_that_others_hold_arrays(none: Any) -> None:
    def crops(sample: Batch) -> Batch:
        found = [np.ones((sample["label"], 2))]
        return {"crops": ({"found": found} if isinstance(none, dict) else found) if sample["label"] else none}

    rows = whole_samples.decode(run(recipe(crops, "sample"), range(3)))
    made = [sample["crops"] for (sample,) in rows]
    assert made[0] == none
    arrays = [each["found"] if isinstance(none, dict) else each for each in made[1:]]
    assert [array.shape for (array,) in arrays] == [(1, 2), (2, 2)]


def test_a_block_without_objects_does_not_hide_that_others_hold_arrays() -> None:
    alone = np.zeros(0)  # as of an empty list in a Parquet file
    assert whole_samples.is_nested([alone, [np.ones((1, 2))]])
    assert not whole_samples.is_nested([alone, np.ones(2)])


# --- what a user is told ----------------------------------------------------------------------------------------------


def raises_on_21(batch: Batch) -> Batch:
    if 21 in batch["label"]:
        raise ValueError("cannot augment")  # this line
    return batch


def sample_raises_on_21(sample: Batch) -> Batch:
    raises_on_21({"label": [sample["label"]]})
    return sample


def fails_in_a_library(batch: Batch) -> Batch:
    return {"x": np.stack([np.zeros(i % 2 + 1) for i in batch["label"]])}  # this line


def line_of(function: Any) -> int:
    import inspect

    lines, first = inspect.getsourcelines(function)
    return next(first + i for i, line in enumerate(lines) if "# this line" in line)


@pytest.mark.parametrize(("transform", "kind"), [(raises_on_21, "batch"), (sample_raises_on_21, "sample")])
def test_a_transform_that_raises(transform: Any, kind: str) -> None:
    text = failure(recipe(transform, kind), range(40), ids=range(39, -1, -1))
    assert f"the transform {transform.__name__} raised ValueError: cannot augment" in text
    assert f"(raises_on_21, {__file__}:{line_of(raises_on_21)})" in text
    assert "on sample 21 (file-21)" in text


def test_a_transform_that_fails_on_a_whole_batch_only_names_the_batch_and_the_users_line() -> None:
    text = failure(recipe(fails_in_a_library), range(16, 30))
    assert "on a batch of 14 samples, 16 to 29 (the first is file-16)" in text
    assert f"(fails_in_a_library, {__file__}:{line_of(fails_in_a_library)})" in text  # not numpy's


def test_an_image_transform_that_raises() -> None:
    text = failure(recipe(split_transform(v1.Compose([v1.RandomCrop(99), v1.ToTensor()])).cpu, "image"))
    assert "the transform RandomCrop, ToTensor raised ValueError" in text
    assert "sample 0 (file-0)" in text


@pytest.mark.parametrize("kind", ["batch", "sample"])
def test_a_transform_that_returns_nothing(kind: str) -> None:
    assert "raised TypeError: it returned None, not a dict of columns" in failure(recipe(lambda batch: None, kind))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda n: np.zeros(n - 1), "returned 7"),
        (lambda n: [0] * 2 * n, "returned 16"),
        (lambda n: 1.5, "returned one float"),
    ],
)
def test_another_number_of_rows_gives_both_counts(returned: Any, says: str) -> None:
    text = failure(recipe(lambda batch: {**batch, "extra": returned(len(batch["label"]))}))
    assert "got 8 rows and " + says in text
    assert "'extra'" in text
    assert "filter samples before the source" in text


def growing(batch: Batch) -> Batch:
    return {"image": [np.zeros((4 + (i == 37), 5, 3), np.uint8) for i in batch["label"]]}


def growing_arrays(batch: Batch) -> Batch:
    return {"image": np.zeros((len(batch["label"]), 4 + (37 in batch["label"]), 5, 3), np.uint8)}


def test_ragged_shapes_name_both_samples_and_shapes() -> None:
    text = failure(recipe(growing), range(48))
    assert "column 'image' has rows of different shapes" in text
    assert "(4, 5, 3) for sample 0 (file-0), (5, 5, 3) for sample 37 (file-37)" in text
    assert "resize or crop" in text
    assert "(5, 5, 3) for sample 16 (file-16)" in failure(recipe(growing_arrays), range(48))  # of 16 to 47


# --- samples that cannot be read --------------------------------------------------------------------------------------


def test_a_bad_sample_ends_the_run() -> None:
    text = failure(recipe(reader=Numbers(bad=(5, 6))))
    assert text.startswith("sample 5 (file-5) is unusable: 5 is bad.")
    assert 'on_error="skip"' in text


def test_a_reader_that_raises_ends_the_run() -> None:
    text = failure(recipe(reader=Numbers(raising=(5,))))
    assert "reading sample 5 (file-5) raised OSError: no sample 5" in text
    assert 'on_error="skip"' in text


@settings(deadline=None, max_examples=50)
@given(bad=st.sets(st.integers(0, 59)), raising=st.sets(st.integers(0, 59)), transformed=st.booleans())
def test_skipped_samples_keep_their_rows_and_reasons(bad: set[int], raising: set[int], transformed: bool) -> None:
    made = recipe(
        (lambda batch: {"image": np.stack(batch["image"]), "label": batch["label"]}) if transformed else None,
        reader=Numbers(bad=tuple(bad), raising=tuple(raising)),
        on_error="skip",
    )
    block = run(made, range(60), ids=range(60))
    assert block[SAMPLE_ID].tolist() == block[POSITION].tolist() == list(range(60))
    for i, reason in enumerate(block[ERROR]):
        if i in bad | raising:
            assert reason.startswith(f"file-{i}: ")
            assert ("no sample" if i in raising else f"{i} is bad") in reason
        else:
            assert reason is None
            assert block["label"][i] == i
            assert (block["image"][i] == i).all()


class Recovering(Numbers):
    """A source whose first read fails, as storage that is out of reach for a moment."""

    failed = False

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        if not self.failed:
            self.failed = True
            raise OSError("connection reset")
        return super().read(rows, at)


def test_samples_that_can_be_read_at_the_second_attempt_do_not_end_a_run_that_skips() -> None:
    block = run(recipe(reader=Recovering(bad=(5,)), on_error="skip"), range(8))
    assert [i for i, reason in enumerate(block[ERROR]) if reason] == [5]
    assert np.delete(block["label"], 5).tolist() == [0, 1, 2, 3, 4, 6, 7]


class WithoutImages(Numbers):
    """A source that gives None for an image that a sample lacks."""

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        return Samples(super().read(rows, at).columns)


@pytest.mark.parametrize(("kind", "what"), [("batch", "a batch"), ("sample", "a sample")])
def test_a_function_that_takes_its_argument_for_an_image_is_told_what_it_is(kind: Any, what: str) -> None:
    def convert(image: Any) -> Any:
        return image.convert("RGB")

    text = failure(recipe(convert, kind, reader=WithoutImages()))
    assert f"It gets {what}, a dict of" in text
    assert "transforms of torchvision and timm alone get the image. Correct the transform" in text


class Refused(Numbers):
    """Storage that reads nothing."""

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        said = "cannot be read: AWS Error ACCESS_DENIED during GetObject operation: Forbidden"
        return Samples(super().read(rows, at).columns, dict.fromkeys(range(rows.num_rows), said))


def test_what_storage_refuses_is_no_fault_of_the_file() -> None:
    text = failure(recipe(reader=Refused()))
    assert "is unusable: cannot be read: AWS Error ACCESS_DENIED" in text
    assert "Check the storage, not the file: the credentials" in text
    assert "on_error" not in text


def test_an_image_transform_of_a_sample_without_an_image() -> None:
    reader = WithoutImages(bad=(5, 6))
    text = failure(recipe(noisy_image, "image", reader=reader))
    assert text.startswith("sample 5 (file-5) is unusable: it has no image.")
    block = run(recipe(noisy_image, "image", reader=reader, on_error="skip"), range(8))
    assert [reason for reason in block[ERROR] if reason] == ["file-5: it has no image", "file-6: it has no image"]
    others = run(recipe(noisy_image, "image"), range(8))["image"]
    assert np.array_equal(np.delete(block["image"], [5, 6], axis=0), np.delete(others, [5, 6], axis=0))


def test_all_samples_skipped() -> None:
    block = run(recipe(reader=Numbers(bad=tuple(range(8))), on_error="skip"), range(8))
    assert set(block) == {ERROR, SAMPLE_ID, POSITION}
    assert len(block[ERROR]) == 8


def test_skipping_does_not_change_the_augmentation_of_others() -> None:
    whole = run(recipe(noisy_sample, "sample"), range(20))
    made = recipe(noisy_sample, "sample", reader=Numbers(bad=(3,)), on_error="skip")
    some = run(made, range(20))
    keep = [i for i in range(20) if i != 3]
    assert np.array_equal(some["draws"][keep], whole["draws"][keep])


def test_a_raising_transform_is_never_skipped() -> None:
    assert "cannot augment" in failure(recipe(raises_on_21, on_error="skip"), range(40))


# --- what travels, and what is made where it runs ---------------------------------------------------------------------


class Model:
    """A transform with set-up."""

    made = 0

    def __init__(self) -> None:
        Model.made += 1

    def __call__(self, batch: Batch) -> Batch:
        return {"label": batch["label"] + 1}


def test_a_class_is_constructed_once_where_it_runs() -> None:
    Model.made = 0
    ready = recipe(Model).ready()
    assert Model.made == 1
    for _ in range(3):
        assert run(ready, range(20))["label"].tolist() == list(range(1, 21))
    assert Model.made == 1
    assert recipe(noisy_batch).ready().transform is noisy_batch


def test_a_process_unpacks_a_stage_once() -> None:
    fetched: list[str] = []

    def fetch(name: str) -> np.ndarray[Any, Any]:
        fetched.append(name)
        return packed_recipe.pack(recipe(functools.partial(noisy_batch), seed=len(fetched)))

    try:
        first = packed_recipe.unpack("a", lambda: fetch("a"))
        assert packed_recipe.unpack("a", lambda: fetch("a")) is first
        assert fetched == ["a"]
        for i in range(20):  # old recipes make room
            packed_recipe.unpack(f"b{i}", lambda: fetch("b"))
        assert packed_recipe.unpack("a", lambda: fetch("a")) is not first
        assert len(packed_recipe._ready) <= 8
    finally:
        packed_recipe._ready.clear()


def test_preprocessing_holds_to_one_core() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        recipe(noisy_batch).ready()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_lambdas_and_closures_travel() -> None:
    shift = 5
    made = recipe(lambda batch: {"label": batch["label"] + shift})
    again = cloudpickle.loads(packed_recipe.pack(made).tobytes())
    assert run(again, range(3))["label"].tolist() == [5, 6, 7]


# --- a plain ray.data.Dataset -----------------------------------------------------------------------------------------


def foreign(**kwargs: Any) -> Recipe:
    return recipe(reader=None, **kwargs)


def block_of(made: Recipe, columns: Batch, *, id_column: str | None = None, **kwargs: Any) -> Batch:
    return wire.decode(encode_foreign(made, columns, id_column=id_column, **{"done": Ranges(), **kwargs}))


def test_samples_that_were_trained_are_left_out() -> None:
    columns = {"key": np.array([5, 1, 9, 3]), "x": ["a", "b", "c", "d"]}
    block = block_of(foreign(), columns, id_column="key", done=Ranges.of([1, 9]))
    assert block["x"] == ["a", "d"]
    assert block["key"].tolist() == block[SAMPLE_ID].tolist() == block[POSITION].tolist() == [5, 3]
    none_left = block_of(foreign(), columns, id_column="key", done=Ranges.of(range(10)))
    assert set(none_left) == {SAMPLE_ID, POSITION}
    assert len(none_left[SAMPLE_ID]) == 0


def test_without_an_id_column_the_reading_side_numbers() -> None:
    assert set(block_of(foreign(), {"x": np.arange(4)})) == {"x"}
    assert encode_foreign(foreign(), {}, id_column=None, done=Ranges()).num_rows == 0


def test_its_transform_and_its_objects() -> None:
    images = np.empty(3, dtype=object)
    images[:] = [np.full((2, 2), i) for i in range(3)]
    assert block_of(foreign(), {"image": images})["image"].shape == (3, 2, 2)
    made = foreign(transform=lambda sample: {"y": sample["x"] * 2}, kind="sample")
    assert block_of(made, {"x": np.arange(3)})["y"].tolist() == [0, 2, 4]


def doubled_in_place(batch: Batch) -> Batch:
    batch["x"] *= 2
    return batch


def test_its_transform_may_change_its_batch_in_place() -> None:
    """Arrays of Ray's blocks cannot be written to."""
    x = np.arange(4)
    x.flags.writeable = False
    assert block_of(foreign(transform=doubled_in_place), {"x": x})["x"].tolist() == [0, 2, 4, 6]
    assert x.tolist() == [0, 1, 2, 3]


def test_its_mistakes_are_told_as_well() -> None:
    def call(made: Recipe, columns: Batch, id_column: str | None = "key") -> str:
        with pytest.raises(RunError) as caught:
            encode_foreign(made, columns, id_column=id_column, done=Ranges())
        return str(caught.value)

    keys = np.array([70, 21])
    text = call(foreign(transform=raises_on_21), {"key": keys, "label": keys})
    assert "the transform raises_on_21 raised ValueError: cannot augment" in text
    assert "sample 21" in text
    images = np.empty(2, dtype=object)
    images[:] = [np.zeros((2, 2)), np.zeros((3, 2))]
    assert "(2, 2) for sample 70, (3, 2) for sample 21" in call(foreign(), {"key": keys, "image": images})
    text = call(foreign(), {"x": keys, "label": keys})
    assert "no column 'key'" in text
    assert "x, label" in text
    for key in (np.array([0.5, 0.7]), ["a", "b"]):  # 0.5 and 0.7 would be one sample
        assert "'key' must hold integers" in call(foreign(), {"key": key})


@pytest.mark.parametrize(("transform", "kind"), [(noisy_batch, "batch"), (noisy_sample, "sample")])
@settings(deadline=None, max_examples=20)
@given(done=st.sets(st.integers(0, 19)))
def test_its_augmentation_is_the_same_wherever_a_resume_cuts(transform: Any, kind: Any, done: set[int]) -> None:
    def draws(done: Ranges) -> Any:
        made = foreign(transform=transform, kind=kind)
        return block_of(made, {"label": np.arange(20)}, id_column="label", done=done).get("draws", [])

    left = [i for i in range(20) if i not in done]
    assert np.array_equal(draws(Ranges.of(done)), draws(Ranges())[left] if left else [])


@pytest.mark.parametrize("id_column", [None, "label"])
def test_its_augmentation_differs_between_blocks_and_epochs_and_can_be_had_again(id_column: str | None) -> None:
    def draws(rows: range, epoch: int = 0) -> Any:
        made = foreign(transform=noisy_sample, kind="sample")
        return block_of(made, {"label": np.array(rows)}, id_column=id_column, epoch=epoch)["draws"]

    first = draws(range(8))
    assert np.array_equal(draws(range(8)), first)
    assert not np.intersect1d(draws(range(8, 16)), first).size
    assert not np.intersect1d(draws(range(8), epoch=1), first).size


def test_setup_comes_before_everything_else_of_a_recipe() -> None:
    order: list[str] = []

    class Opens(Numbers):
        def prepare(self) -> None:
            order.append("reader")

    class Constructed:
        def __init__(self) -> None:
            order.append("transform")

        def __call__(self, batch: Batch) -> Batch:
            return batch

    ready = recipe(Constructed, reader=Opens(), setup=lambda: order.append("setup")).ready()
    assert order == ["setup", "transform", "reader"]
    run(ready, range(40))
    assert order.count("setup") == 1


def test_a_setup_that_raises_is_named() -> None:
    def opens_codecs() -> None:
        raise OSError("no such codec")

    with pytest.raises(
        RunError, match=r"setup \(.*opens_codecs\) raised OSError: no such codec \(.*test_recipe.py:\d+\)"
    ):
        recipe(setup=opens_codecs).ready()
