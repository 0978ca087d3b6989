"""Samples that several runs share on a node: equal to unshared ones to the bit, made once, and never waited for in vain."""

from __future__ import annotations

import dataclasses
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cloudpickle import cloudpickle as trackers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.cache.store import opened
from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.describe.sources import from_torch
from offload.pipeline.order.chunks import CHUNK
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.preprocessing import shared_samples
from offload.pipeline.preprocessing.shared_samples import SharedRecipe, Sharing, fingerprint
from tests.pipeline.index_pass import a_pass, listed, stream_of

SAMPLES = 3 * CHUNK + 5


class Noted(torch.utils.data.Dataset[Any]):
    """A data set that notes each sample that it makes, and draws random numbers for it."""

    def __init__(self, log: Path, *, random: bool = True) -> None:
        self.log, self.random = log, random

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        with self.log.open("a") as file:
            file.write(f"{i}\n")
        draw = np.random.rand() if self.random else 0.0
        return {"x": np.full((3, 2), i, np.float32), "text": f"é{i}", "draw": draw}


def made(log: Path) -> Counter[int]:
    """How often each sample was made since the last look."""
    counts = Counter(map(int, log.read_text().split())) if log.exists() else Counter[int]()
    log.unlink(missing_ok=True)
    return counts


def sharing(folder: Path, search: str = "search", size: int = 10**9) -> Sharing:
    return Sharing(spec=CacheSpec(path=folder, limit_bytes=size, text=""), search=search)


def shared(pipeline: Pipeline, where: Sharing) -> Any:
    """The data set of another run, whose processes share its samples."""
    stream = stream_of(pipeline)
    recipe: Any = stream.recipe
    return dataclasses.replace(stream, recipe=SharedRecipe.of(recipe, where).ready())


def content(rows: dict[int, dict[str, Any]]) -> dict[int, str]:
    return {at: repr([(name, np.asarray(value).tolist()) for name, value in row.items()]) for at, row in rows.items()}


dones = st.lists(st.integers(0, SAMPLES), max_size=4, unique=True).map(
    lambda ends: tuple(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(passes=st.lists(st.tuples(dones, st.integers(1, SAMPLES)), min_size=2, max_size=3))
def test_runs_share_equal_samples_and_make_each_once(tmp_path: Path, passes: Any) -> None:
    log = tmp_path / "log"
    pipeline = from_torch(Noted(log))
    where = sharing(tmp_path / "cache", uuid.uuid4().hex)
    whole = content(a_pass(stream_of(pipeline), epoch=1))
    made(log)
    chunks: set[int] = set()
    for done, first_rows in passes:
        rows = content(a_pass(shared(pipeline, where), epoch=1, done=done, first_rows=first_rows))
        assert rows == {at: row for at, row in whole.items() if at not in set(_positions(done))}
        # Whole chunks are made, for whichever of their samples.
        new = {at // CHUNK for at in rows} - chunks
        chunks |= new
        counts = made(log)
        assert set(counts.values()) <= {1}
        assert counts.total() == sum(min(CHUNK, SAMPLES - chunk * CHUNK) for chunk in new)


def _positions(done: Any) -> list[int]:
    return [at for start, stop in Ranges(tuple(done)).pairs for at in range(start, stop)]


def test_runs_that_work_side_by_side_make_each_sample_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pipeline, where = from_torch(Noted(log, random=False)), sharing(tmp_path / "cache")
    with ThreadPoolExecutor(4) as runs:
        passes = list(runs.map(lambda _: content(a_pass(shared(pipeline, where), first_rows=SAMPLES)), range(4)))
    assert all(rows == passes[0] for rows in passes)
    assert made(log) == Counter(range(SAMPLES))


def test_a_run_makes_a_chunk_itself_whose_maker_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_samples, "WAIT_S", 0.1)
    log = tmp_path / "log"
    pipeline, where = from_torch(Noted(log, random=False)), sharing(tmp_path / "cache")
    whole = content(a_pass(stream_of(pipeline)))
    made(log)
    store = opened(where.spec)
    assert store is not None
    keys: list[str] = []
    real = shared_samples.CachedSource.claimed

    def noted(self: Any, key: str) -> Any:
        keys.append(key)
        return real(self, key)

    with (
        monkeypatch.context() as patch
    ):  # the keys of another search's chunks differ, so they are taken from a pass of this one
        patch.setattr(shared_samples.CachedSource, "claimed", noted)
        patch.setattr(shared_samples.CachedSource, "put", lambda *_: None)
        a_pass(shared(pipeline, where))
    made(log)
    hanging = store.source("hanging")
    with hanging.claimed(keys[0]) as ours:
        assert ours
        assert content(a_pass(shared(pipeline, where))) == whole
    assert made(log) == Counter(range(SAMPLES))


def test_without_room_each_run_makes_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pipeline, where = from_torch(Noted(log)), sharing(tmp_path / "cache", size=1)
    whole = content(a_pass(stream_of(pipeline)))
    for _ in range(2):
        assert content(a_pass(shared(pipeline, where))) == whole


def test_a_class_of_the_script_is_the_same_in_each_process(tmp_path: Path) -> None:
    class Local(Noted):
        """It travels by value."""

    pipeline = from_torch(Local(tmp_path))
    recipe = pipeline.recipe(listed(pipeline), seed=7)
    first = fingerprint(recipe)
    # As another process, which has not pickled it yet.
    trackers._DYNAMIC_CLASS_TRACKER_BY_ID.pop(trackers._DYNAMIC_CLASS_TRACKER_BY_CLASS.pop(Local))
    assert fingerprint(recipe) == first


def test_only_equal_recipes_share() -> None:
    def doubled(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": 2 * sample["x"]}

    def recipe(transform: Any, *, seed: int = 7, dataset: str = "train") -> Any:
        pipeline = from_torch([{"x": np.zeros(2)}] * 4, transform, per_sample=True)
        return pipeline.recipe(listed(pipeline), seed=seed, dataset=dataset)

    def scaled(by: float) -> Any:
        return lambda sample: {"x": by * sample["x"]}

    same = [recipe(scaled(2.0)), recipe(scaled(2.0))]
    same[1] = dataclasses.replace(same[1], program=dataclasses.replace(same[1].program, folder="/elsewhere"))
    assert len({fingerprint(each) for each in same}) == 1
    others = [*same[:1], recipe(scaled(3.0)), recipe(doubled), recipe(scaled(2.0), seed=8)]
    assert len({fingerprint(each) for each in others}) == len(others)
