"""Memory maps of data sets: their content stays in the file, and arrives all the same."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.errors import RunError
from offload.pipeline.pool.packed_recipe import pack
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.program import pickling, pickling_rules
from offload.pipeline.sources.from_torch import list_torch_dataset

ROWS = 1000


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of numbers, large enough for maps to travel by name."""
    monkeypatch.setattr(pickling_rules, "LARGE_BYTES", 1000)
    np.arange(64 * ROWS, dtype=np.uint16).reshape(ROWS, 64).tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "columns.npy", np.asfortranarray(np.arange(6 * ROWS).reshape(ROWS, 6)))
    return tmp_path / "tokens.bin"


def mapped(path: Path, mode: Any = "r", offset: int = 0) -> Any:
    return np.memmap(path, np.uint16, mode, offset).reshape(-1, 64)


MAPS: dict[str, Callable[[Path], Any]] = {
    "whole": mapped,
    "named by text": lambda path: mapped(path=str(path)),  # type: ignore[arg-type]
    "behind a header": lambda path: mapped(path, offset=128 * 3),
    "behind a page": lambda path: mapped(path, offset=128 * 500),
    "part": lambda path: mapped(path, offset=128 * 40)[7:90],
    "in columns": lambda path: np.load(path.with_name("columns.npy"), mmap_mode="r"),
}


@pytest.mark.parametrize("kind", MAPS)
def test_a_map_travels_as_the_name_of_its_file(tokens: Path, kind: str) -> None:
    made = MAPS[kind](tokens)
    packed = pickling.dumps({"data": made, "again": made})
    assert len(packed) < 1000, "without the content"
    found = pickle.loads(packed)
    assert type(found["data"]) is np.memmap
    assert (found["data"].dtype, found["data"].shape) == (made.dtype, made.shape)
    assert np.array_equal(found["data"], made)
    assert found["data"] is found["again"]


def test_a_recipe_takes_no_content_of_a_data_set_over_a_map(tokens: Path) -> None:
    recipe = Recipe(transform=None, kind="none", seed=0, reader=list_torch_dataset(mapped(tokens)).reader)
    packed = pack(recipe)
    assert len(packed) < tokens.stat().st_size / 10
    reader: Any = pickle.loads(packed.tobytes()).reader
    assert np.array_equal(reader.dataset, mapped(tokens))


OTHERS: dict[str, Callable[[Path], Any]] = {
    "small": lambda path: mapped(path)[:2],
    "changed in memory alone": lambda path: mapped(path, "c"),
    "with gaps": lambda path: mapped(path)[::2],
    "computed": lambda path: mapped(path) + 1,
    "no map": lambda path: np.asarray(mapped(path)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_arrays_travel_with_their_content(tokens: Path, kind: str) -> None:
    made = OTHERS[kind](tokens)
    if made.flags.writeable:
        made[0] = 7
    packed = pickling.dumps(made)
    tokens.unlink()
    assert np.array_equal(pickle.loads(packed), made)


def test_a_map_whose_file_is_gone_travels_with_its_content(tokens: Path) -> None:
    made = mapped(tokens)
    tokens.unlink()
    assert np.array_equal(pickle.loads(pickling.dumps(made)), made)


def test_a_node_that_does_not_see_the_file_is_told(tokens: Path) -> None:
    packed = pickling.dumps(mapped(tokens))
    tokens.write_bytes(b"")
    with pytest.raises(RunError, match=r"tokens\.bin', which the data set maps into memory, cannot be mapped"):
        pickle.loads(packed)
    tokens.unlink()
    with pytest.raises(RunError, match=r"No such file.*Every node must see the file under this path"):
        pickle.loads(packed)
