"""Scripts of many kinds train with offload.DataLoader and with the Trainer exactly as with torch's DataLoader, and change in few lines."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle

import offload
from offload.pipeline.order.shuffling import Draws, epoch_permutation
from offload.report.run_dir import read_lines
from tests.helpers import ROOT, end_loaders

KINDS = ROOT / "examples" / "kinds"
NAMES = sorted(path.stem for path in (KINDS / "torch_loader").glob("*.py"))
PAGE = ROOT / "docs" / "kinds.md"
FOLDERS = {"offload_loader": 3, "trainer": 12}  # with the most lines that may change


@pytest.fixture(scope="module", autouse=True)
def _free_cores_afterwards() -> Iterator[None]:
    yield
    end_loaders()


def load(path: Path) -> ModuleType:
    """The script as a module. Processes of Ray cannot import it, as they cannot a script that a user starts."""
    spec = importlib.util.spec_from_file_location(f"kinds_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed_lines(folder: str, name: str) -> int:
    before, after = ((KINDS / each / f"{name}.py").read_text().splitlines() for each in ("torch_loader", folder))
    changes = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]  # without the names of the files
    return sum(line[0] == "+" and bool(line[1:].strip()) for line in changes)


@contextmanager
def script(folder: str, name: str) -> Iterator[ModuleType]:
    """A script that processes of Ray can run."""
    module = load(KINDS / folder / f"{name}.py")
    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)
    try:
        yield module
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[module.__name__]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_kind_is_written_in_every_way(folder: str) -> None:
    assert sorted(path.stem for path in (KINDS / folder).glob("*.py")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_change_and_the_page_says_how_many(name: str) -> None:
    lines = [changed_lines(folder, name) for folder in FOLDERS]
    assert all(1 <= changed <= most for changed, most in zip(lines, FOLDERS.values(), strict=True))
    row = re.search(
        rf"\| {name} \| .* \| \[(\d+)\]\(.*/{name}.py\) \| \[(\d+)\]\(.*/{name}.py\) \|",
        PAGE.read_text(encoding="utf-8"),
    )
    assert row is not None
    assert list(map(int, row.groups())) == lines


def each_once(first: int) -> list[Any]:
    """All kinds, of which every other one is left to `make soak`: the loader and the trainer show half of them each."""
    marks = [[], [pytest.mark.soak]]
    return [pytest.param(name, marks=marks[(number + first) % 2]) for number, name in enumerate(NAMES)]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", each_once(0))
def test_the_loader_gives_the_same_losses(name: str) -> None:
    with script("offload_loader", name) as ours:
        assert ours.main() == pytest.approx(load(KINDS / "torch_loader" / f"{name}.py").main(), rel=1e-6)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", each_once(1))
def test_the_trainer_gives_the_same_losses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the Trainer's order, in which torch's DataLoader is made to deliver the samples."""
    asked: dict[str, Any] = {}

    def from_torch(dataset: Any, **options: Any) -> Any:
        asked.update(dataset=dataset, collate_fn=options.get("collate_fn", torch.utils.data.default_collate))
        return offload_from_torch(dataset, **options)

    def weighted(data: Any, weights: list[float]) -> Any:
        asked.update(draws=Draws(weights=np.array(weights), number=len(weights)))
        return offload_weighted(data, weights)

    def make(train: Any, **options: Any) -> Any:
        trainer = offload_trainer(train, deterministic=True, **options)
        asked.update(batch_size=trainer.batch_size.initial)
        if isinstance(loader := options["datasets"]["train"], torch.utils.data.DataLoader):
            asked.update(dataset=loader.dataset, collate_fn=loader.collate_fn)
        return trainer

    class InTheTrainersOrder:
        """torch's DataLoader, of the samples that the Trainer trains. Others keep their order."""

        def __init__(self, dataset: Any, *, drop_last: bool = False, **options: Any) -> None:
            self.epoch, self.drop_last = 0, drop_last
            is_test = hasattr(dataset, "__getitem__") and options.keys() == {"batch_size"}
            self.test = torch.utils.data.DataLoader(dataset, **options) if is_test else None

        def __len__(self) -> int:
            return len(asked["dataset"]) // asked["batch_size"]

        def __iter__(self) -> Iterator[Any]:
            if self.test is not None:
                yield from self.test
                return
            n = len(asked["dataset"])
            order = asked["draws"].order if "draws" in asked else functools.partial(epoch_permutation, n)
            ids = order(seed=0, epoch=self.epoch).tolist()
            self.epoch += 1
            batches = torch.utils.data.BatchSampler(ids, asked["batch_size"], self.drop_last)
            yield from torch.utils.data.DataLoader(
                asked["dataset"], batch_sampler=batches, collate_fn=asked["collate_fn"]
            )

    offload_from_torch, offload_weighted, offload_trainer = offload.from_torch, offload.weighted, offload.Trainer
    monkeypatch.setattr(offload, "from_torch", from_torch)
    monkeypatch.setattr(offload, "weighted", weighted)
    monkeypatch.setattr(offload, "Trainer", make)
    with script("trainer", name) as ours:
        ours.build().fit(run_dir=tmp_path / "run", quiet=True)
    reports = [each["metrics"] for each in read_lines(tmp_path / "run" / "events.jsonl") if each["event"] == "report"]
    theirs = load(KINDS / "torch_loader" / f"{name}.py")
    monkeypatch.setattr(theirs, "DataLoader", InTheTrainersOrder)
    assert [loss for report in reports for loss in report.values()] == pytest.approx(theirs.main(), rel=1e-4)
