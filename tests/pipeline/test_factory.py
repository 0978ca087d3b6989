"""Data sets that each process constructs itself, their role as torch's workers, and what is said of those that cannot travel."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError, RunError
from offload.pipeline.describe.sources import from_torch
from offload.pipeline.index.source import Index
from offload.pipeline.preprocessing import environment
from offload.pipeline.preprocessing.environment import Ordinal, lowest_free
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.preprocessing.unpicklable import obstacle
from offload.pipeline.program import pickling
from offload.pipeline.sources.from_torch import TorchReader


class Lines(torch.utils.data.Dataset[Any]):
    """The lines of a file that stays open: it cannot be pickled."""

    made = 0
    classes = ("one", "two")

    def __init__(self, path: Any) -> None:
        type(self).made += 1
        self.file = open(path, encoding="ascii")  # noqa: SIM115
        self.lines = self.file.read().split()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, i: int) -> Any:
        return {"text": self.lines[i], "made": self.made}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "lines").write_text("a b c", encoding="ascii")
    return tmp_path / "lines"


def listed(factory: Any, **kwargs: Any) -> Index:
    pipeline = from_torch(factory, **kwargs)
    assert pipeline.list is not None
    return pipeline.list()


def refusal(factory: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        listed(factory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["lambda", "partial", "class"])
def test_each_process_constructs_its_own_once(path: Path, kind: str) -> None:
    class Here(Lines):
        def __init__(self) -> None:
            super().__init__(path)

    factory: Any = {"lambda": lambda: Lines(path), "partial": functools.partial(Lines, path), "class": Here}[kind]
    index = listed(factory)
    assert (len(index), index.classes) == (3, ("one", "two"))
    reader: Any = pickle.loads(pickling.dumps(index.reader))
    dataset = Here if kind == "class" else Lines
    before = type(reader.dataset).made
    rows = index.table.slice(1, 2)
    assert [reader.read(rows).columns["text"] for _ in range(2)] == [["b", "c"]] * 2
    assert type(reader.dataset).made == before
    assert reader.describe(index.table, 1) == f"item 1 of {dataset.__name__}"


def test_a_process_constructs_it_before_its_first_task(path: Path) -> None:
    made: list[int] = []

    def factory() -> list[int]:
        made.append(1)
        return [1, 2]

    index = listed(factory, columns=["x"])
    ready = Recipe(transform=None, kind="none", seed=0, reader=index.reader).ready()
    assert len(made) == 2
    assert ready.reader is not None
    ready.reader.read(index.table)
    assert len(made) == 2


def test_factories_that_fail() -> None:
    def broken() -> Any:
        raise OSError("no such file")

    assert refusal(broken).startswith("from_torch(broken) raised OSError: no such file. Correct it")
    assert "must return a map-style data set (__getitem__ and __len__), found 5" in refusal(lambda: 5)
    assert "from_torch(iter)" in refusal(functools.partial(iter, [1]))
    assert "found nothing" in refusal(lambda: None)
    with pytest.raises(
        ConfigError, match=r"calls Lines without arguments, and it misses a required argument: 'path'.*lambda"
    ):
        from_torch(Lines)
    with pytest.raises(ConfigError, match="required argument"):
        from_torch(lambda root: root)


def test_a_factory_that_fails_only_on_a_preprocessing_process() -> None:
    calls: list[int] = []

    def factory() -> list[int]:
        calls.append(1)
        if len(calls) > 1:
            raise FileNotFoundError("/data/x.h5")
        return [1]

    index = listed(factory)
    with pytest.raises(
        RunError, match=r"from_torch\(factory\) raised FileNotFoundError: /data/x.h5 on a preprocessing process"
    ):
        Recipe(transform=None, kind="none", seed=0, reader=index.reader).ready()


# --- what cannot travel -----------------------------------------------------------------------------------------------


class Locked(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.items, self.inner = [1, 2], {"guard": threading.Lock()}

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Any:
        return self.items[i], i


def said(recipe: Recipe) -> str:
    with pytest.raises(TypeError) as caught:
        pickling.dumps(recipe)
    return obstacle(recipe, caught.value)


def test_the_attribute_that_cannot_travel_is_named_with_the_line_to_write() -> None:
    def of(dataset: Any) -> str:
        return said(Recipe(transform=None, kind="none", seed=0, reader=TorchReader(dataset, ("x", "y"))))

    assert of(Locked()) == (
        "its attribute Locked.inner['guard'] (a lock) cannot be pickled. Let each process construct it: "
        "offload.from_torch(lambda: Locked(...))."
    )
    subset: Any = torch.utils.data.ConcatDataset([torch.utils.data.Subset(Locked(), [0])])
    assert "ConcatDataset.datasets[0].dataset.inner['guard'] (a lock)" in of(subset)
    transform: Any = functools.partial(print, threading.Lock())
    text = said(Recipe(transform=transform, kind="batch", seed=0, reader=TorchReader([1], ("x",))))
    assert text.startswith("the transform partial cannot be pickled")


# --- the role of torch's workers --------------------------------------------------------------------------------------


class Asking(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        info: Any = torch.utils.data.get_worker_info()
        return {
            "id": info.id,
            "of": info.num_workers,
            "seeded": info.seed == torch.initial_seed(),
            "me": info.dataset is self,
        }


def test_get_worker_info_answers_while_a_data_set_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_here", Ordinal(3, 5))
    index = listed(Asking())
    columns = index.reader.read(index.table).columns
    assert {name: list(column) for name, column in columns.items()} == {
        "id": [3] * 3,
        "of": [5] * 3,
        "seeded": [True] * 3,
        "me": [True] * 3,
    }
    assert torch.utils.data.get_worker_info() is None


def test_a_data_set_without_torch_does_not_load_it() -> None:
    program = """
        import sys
        from offload.pipeline.describe.sources import from_torch
        index = from_torch([1, 2], columns=["x"]).list()
        assert index.reader.read(index.table).columns["x"] == [1, 2]
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=800)


@given(steps=st.lists(st.integers(0, 7), max_size=40), planned=st.integers(1, 8))
def test_live_processes_never_share_a_number(steps: list[int], planned: int) -> None:
    alive: list[int] = []
    for step in steps:
        if step < len(alive):
            alive.pop(step)
        else:
            me = lowest_free(set(alive), planned)
            assert me.number not in alive
            assert 0 <= me.number < me.of
            assert me.of >= planned
            alive.append(me.number)
