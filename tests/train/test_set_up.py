"""What a program sets up before ``fit()`` reaches preprocessing and the workers, and ``setup`` runs before the samples."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import offload

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class Seen(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples of 1.0 where all is as the program has it."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, Any]:
        import library_of_this_test  # type: ignore[import-not-found]

        seen = {
            "library": library_of_this_test.NAME == "found",
            "variable": os.environ.get("OF_THIS_TEST") == "set",
            "set_up": os.environ.get("SET_UP") == f"once in {os.getpid()}",
        }
        return {name: float(fine) for name, fine in seen.items()}


def set_up() -> None:
    assert "SET_UP" not in os.environ
    os.environ["SET_UP"] = f"once in {os.getpid()}"


def train(ctx: Any) -> None:
    import library_of_this_test

    assert library_of_this_test.NAME == "found"
    assert os.environ["OF_THIS_TEST"] == "set"
    assert "SET_UP" not in os.environ  # that of preprocessing alone
    model = torch.nn.Linear(1, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            assert all(bool(column.all()) for column in batch.values()), batch
            ctx.backward(model(batch["library"].float().reshape(-1, 1)).sum())
            ctx.step()


def test_a_run_finds_the_program_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "library_of_this_test.py").write_text("NAME = 'found'\n")
    monkeypatch.syspath_prepend(tmp_path / "library")
    monkeypatch.setenv("OF_THIS_TEST", "set")
    data = {"train": offload.from_torch(Seen())}
    result = offload.Trainer(train, datasets=data, batch_size=8, setup=set_up).fit(run_dir=tmp_path / "run", quiet=True)
    assert (result.status, result.document["steps"]) == ("finished", 3)
    assert "library_of_this_test" not in sys.modules


def test_a_run_whose_setup_raises_says_so(tmp_path: Path) -> None:
    def opens_codecs() -> None:
        raise OSError("no such codec")

    def reads(ctx: Any) -> None:
        list(ctx.batches("train"))

    data = {"train": offload.from_torch(list(range(24)))}
    trainer = offload.Trainer(reads, datasets=data, batch_size=8, setup=opens_codecs)
    with pytest.raises(offload.RunError, match=r"setup \(.*opens_codecs\) raised OSError: no such codec"):
        trainer.fit(run_dir=tmp_path / "run", quiet=True)


def test_a_setup_with_arguments_is_refused() -> None:
    with pytest.raises(
        offload.ConfigError, match="setup without arguments, and it misses a required argument: 'number'"
    ):
        offload.Trainer(train, datasets={"train": [1]}, batch_size=1, setup=lambda number: None)  # type: ignore[misc]
