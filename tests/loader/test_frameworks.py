"""offload.DataLoader under other libraries, with the real packages: losses are those of torch's DataLoader."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.utils.data
from ray import cloudpickle

import offload
from offload.loader.job import session as sessions
from tests.helpers import ROOT
from tests.test_kinds import load

FRAMEWORKS = ROOT / "examples" / "frameworks"
PACKAGES = {
    "lightning_fit": "lightning",
    "hf_trainer": "transformers",
    "accelerate_loop": "accelerate",
    "timm_train": "timm",
}

pytestmark = [
    pytest.mark.usefixtures("loader_engine"),
    pytest.mark.filterwarnings("ignore"),  # the libraries' own
]


@pytest.fixture(scope="module", autouse=True)
def _free_cores_afterwards() -> Iterator[None]:
    yield
    gc.collect()
    sessions.end_unused()


@pytest.fixture(name="example")
def _example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    pytest.importorskip(PACKAGES[request.param])
    module = load(FRAMEWORKS / f"{request.param}.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.parametrize("example", ["accelerate_loop"], indirect=True)
def test_accelerate(example: Any) -> None:
    assert example.main() == pytest.approx(example.main(torch.utils.data.DataLoader), rel=1e-6)


@pytest.mark.parametrize("example", ["hf_trainer"], indirect=True)
def test_hugging_face(example: Any, tmp_path: Path) -> None:
    class Plain(example.OffloadTrainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self, loader_class: Any = torch.utils.data.DataLoader) -> Any:
            return super().get_train_dataloader(loader_class)

    class Seen(example.OffloadTrainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self, loader_class: Any = offload.DataLoader) -> Any:
            loaders.append(super().get_train_dataloader(loader_class))
            return loaders[-1]

    loaders: list[Any] = []
    theirs = example.main(Plain, str(tmp_path / "theirs"))
    assert len(theirs) == 16
    ours = str(tmp_path / "ours")
    assert example.main(Seen, ours, save_strategy="steps", save_steps=12) == pytest.approx(theirs, rel=1e-6)
    assert loaders[0].sampler.epoch == 1  # the second epoch has an order of its own
    # In the middle of the second epoch, the samples that are left are those of the first run's order.
    assert example.main(folder=ours, resume=f"{ours}/checkpoint-12") == pytest.approx(theirs, rel=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("example", ["timm_train"], indirect=True)
def test_timm(example: Any, jpeg_folder: Path) -> None:
    losses = example.main(str(jpeg_folder), seed=1)
    # The augmentations are random, and differ from those of torch's workers.
    assert len(losses) == 2 * (103 // 32)
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("example", ["lightning_fit"], indirect=True)
def test_lightning_resumes_in_the_middle_of_an_epoch(example: Any, tmp_path: Path) -> None:
    theirs = example.main(torch.utils.data.DataLoader, str(tmp_path / "theirs"))
    assert example.main(folder=str(tmp_path / "ours")) == pytest.approx(theirs, rel=1e-6)
    lightning = example.lightning

    def fit(checkpoint: Path | None) -> list[float]:
        lightning.seed_everything(0)
        model = example.Classifier()
        keeps = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path / "kept", "step-{step}", every_n_train_steps=21, save_top_k=-1
        )
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", default_root_dir=str(tmp_path), logger=False, enable_progress_bar=False,
            callbacks=[keeps],
        )  # fmt: skip
        loader = offload.DataLoader(example.Digits(), batch_size=16, shuffle=True)
        trainer.fit(model, loader, ckpt_path=checkpoint)
        losses: list[float] = model.losses
        return losses

    whole = fit(None)  # 16 steps an epoch
    (kept,) = (tmp_path / "kept").glob("*.ckpt")
    assert fit(kept) == pytest.approx(whole[21:], rel=1e-6)
