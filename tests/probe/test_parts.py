"""What a probe measures with: stages timed one by one, a smaller depth of the same model, processes beside the worker."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

import offload
from offload.model.placement import NodeResources
from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.describe.sources import as_pipeline
from offload.probe.depth import repeated_blocks
from offload.probe.driver import would_train
from offload.probe.kept import row_bytes
from offload.probe.processes import CpuSeconds, cpu_seconds
from offload.probe.stages import PACK, StageCosts, exact_over_auto, measure_stages
from offload.probe.worker import beside_preprocessing
from tests.helpers import write_jpegs


def costs(pipeline: Pipeline) -> StageCosts:
    assert pipeline.list is not None
    index = pipeline.list()
    return measure_stages(pipeline.recipe(index, seed=0).ready(), index.table, seconds=0.5)


class Spin:
    """Uses the CPU for a given time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, image: Any) -> Any:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return image


class Spun(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.transform = v2.Compose([Spin(0.004), v2.CenterCrop(8)])

    def __len__(self) -> int:
        return 100

    def __getitem__(self, item: int) -> Any:
        Spin(0.001)(None)
        return self.transform(torch.zeros(3, 16, 16, dtype=torch.uint8)), np.int64(0)


def test_steps_within_a_data_set_are_told_apart() -> None:
    measured = costs(as_pipeline("train", Spun()))
    shares = {name: share for name, share, _ in measured.shares()}
    sizes = {name: size for name, _, size in measured.shares()}
    assert sum(shares.values()) == pytest.approx(1.0)
    # 4 ms in the step, 1 ms in the data set's own code: its step is not counted twice.
    assert shares["Spin"] > shares["Spun"]
    assert sizes["CenterCrop"] == 3 * 8 * 8
    assert measured.cpu_s / measured.samples >= 0.005


def test_steps_within_steps_are_told_apart() -> None:
    dataset = Spun()
    dataset.transform = v2.Compose([v2.RandomApply([v2.Compose([Spin(0.002), v2.CenterCrop(8)])], p=1.0)])
    shares = {name: share for name, share, _ in costs(as_pipeline("train", dataset)).shares()}
    assert shares["Spin"] > shares["RandomApply"]
    assert sum(shares.values()) == pytest.approx(1.0)


class Named:
    """Steps that get and give what they work on by name, as albumentations' do."""

    def __init__(self, *steps: Any) -> None:
        self.transforms = list(steps)

    def __call__(self, **data: Any) -> dict[str, Any]:
        for step in self.transforms:
            data = step(**data)
        return data


class Crop:
    size = 8

    def __call__(self, *, image: Any) -> dict[str, Any]:
        return {"image": image[:, : self.size, : self.size]}


class NamedData(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.transform = self.same = Named(Crop())

    def __len__(self) -> int:
        return 100

    def __getitem__(self, item: int) -> Any:
        assert self.transform.transforms[0].size == 8
        return self.transform(image=torch.zeros(3, 16, 16, dtype=torch.uint8))["image"], np.int64(0)


def test_steps_may_name_what_they_pass_and_show_their_attributes() -> None:
    sizes = {name: size for name, _, size in costs(as_pipeline("train", NamedData())).shares()}
    assert set(sizes) == {"Crop", "NamedData", PACK}
    assert sizes["Crop"] == 3 * 8 * 8


@pytest.mark.parametrize("label", [-1, -0.5, float("nan"), {"label": -1}])
def test_labels_that_a_step_makes_are_no_bytes(label: Any) -> None:
    measured = StageCosts(cpu_s=1.0)
    with measured.timing("log of the label") as out:
        out.append(label)
    assert {name: size for name, _, size in measured.shares()} == {"log of the label": None, PACK: None}


def test_steps_of_an_image_transform_are_told_apart_and_bytes_counted(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 12, size=(48, 64))
    files = [path.stat().st_size for path in tmp_path.rglob("*.jpg")]
    transform = v2.Compose(
        [v2.Resize((32, 32), antialias=True), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
    )
    measured = costs(offload.image_folder(str(tmp_path), transform))
    stages = {name: size for name, _, size in measured.shares()}
    assert {"read", "decode, Resize", PACK} <= set(stages)  # the step decodes what it needs
    assert not {"ToDtype", "Normalize"} & set(stages)  # they run on the device
    assert stages["decode, Resize"] == 3 * 32 * 32
    assert measured.raw_bytes / measured.samples == pytest.approx(np.mean(files), rel=0.2)


def test_whole_images_are_compared_with_what_crops_need(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 12, size=(480, 640))
    small = v2.Compose([v2.RandomResizedCrop(32, scale=(0.1, 0.1), antialias=True)])

    def ratio(**options: Any) -> float | None:
        pipeline = offload.image_folder(str(tmp_path), small, **options)
        assert pipeline.list is not None
        index = pipeline.list()
        return exact_over_auto(pipeline.recipe(index, seed=0).ready(), index.table, seconds=0.5)

    measured = ratio()
    assert measured is not None
    assert measured > 1  # a tenth of each image, at a fraction of its scale
    assert ratio(decode="exact") is None


def test_the_stages_before_the_first_random_one_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(
        sys.modules, "cv2", raising=False
    )  # with OpenCV, whose generator tells nothing, any stage might be random
    write_jpegs(tmp_path, 12, size=(48, 64))
    resize, crop = v2.Resize((32, 32), antialias=True), v2.RandomCrop(16)

    def constant(*steps: Any) -> Any:
        return costs(offload.image_folder(str(tmp_path), v2.Compose(steps) if steps else None)).constant()

    found = constant(resize, crop, v2.RandomHorizontalFlip())
    assert (found.until, found.bytes_out) == ("RandomCrop", 3 * 32 * 32)
    assert 0 < found.share < 1
    assert constant(resize).until is None
    assert constant().bytes_out > 3 * 48 * 64  # of the image, and the label
    assert constant(v2.RandomResizedCrop(16, antialias=True)).share < 0.5  # it is the step that decodes

    assert costs(as_pipeline("train", Spun())).constant().until is None  # type: ignore[union-attr]
    once = offload.cached(offload.image_folder(str(tmp_path)), crop, cache=f"ssd:{tmp_path / 'cache'}:1MB", name="a")
    assert costs(once).constant() is None, "it is cached already"


def test_a_function_of_a_batch_is_one_stage(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 6)

    def shrink(batch: Any) -> Any:
        return {"image": np.zeros((len(batch["label"]), 5, 5), np.uint8), "label": batch["label"]}

    measured = costs(offload.image_folder(str(tmp_path), shrink))
    sizes = {name: size for name, _, size in measured.shares()}
    assert sizes["shrink"] == 25 + 8


# --- depth ------------------------------------------------------------------------------------------------------------


class Deep(torch.nn.Module):
    def __init__(self, depth: int, width: int = 1024) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
        self.head = torch.nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.blocks(x))
        return y


def test_a_deep_model_is_cut_and_made_whole_again() -> None:
    model = Deep(8)
    x = torch.zeros(1, 1024)
    before = model(x)
    depth = repeated_blocks(model)
    assert depth is not None
    assert len(depth) == 8
    depth.cut(2)
    assert len(model.blocks) == 2
    assert not torch.equal(model(x), before)
    depth.whole()
    assert torch.equal(model(x), before)


def test_a_vision_transformer_is_deep_and_still_runs_when_cut() -> None:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=384, depth=12, num_heads=6, num_classes=10)
    depth = repeated_blocks(model)
    assert depth is not None
    assert len(depth) == 12
    depth.cut(1)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("model", [Deep(8, width=64), Deep(2), torch.nn.Linear(4000, 4000)])
def test_a_model_that_is_small_or_not_deep_is_measured_whole(model: torch.nn.Module) -> None:
    assert repeated_blocks(model) is None


def test_the_workers_of_a_script_are_those_that_its_gpus_hold() -> None:
    nodes = [NodeResources(name=each, node_id=each, cpus=8, gpus=gpus) for each, gpus in (("a", 4), ("b", 4), ("c", 0))]
    assert would_train(8, nodes, 1.0, "a") == (8, 4)
    assert would_train(6, nodes, 1.0, "b") == (6, 4)
    assert would_train(2, nodes, 1.0, "a") == (2, 2)
    assert would_train(1024, nodes, 2.0, "a") == (4, 2)
    assert would_train(16, nodes, 0.5, "a") == (8, 4)
    assert would_train(8, nodes, 1.0, "c") == (8, 1)


@pytest.mark.parametrize(
    ("content", "samples"),
    [
        ({"image": torch.zeros(2, 3, 100, dtype=torch.uint8), "label": torch.zeros(2)}, ()),
        ({"image": [torch.zeros(3, 100, dtype=torch.uint8), torch.zeros(3, 400, dtype=torch.uint8)], "label": torch.zeros(2)}, ()),
        ([None], [(torch.zeros(3, 100, dtype=torch.uint8), {"label": torch.zeros(1)})] * 2),  # what a collate_fn makes of samples
    ],
)  # fmt: skip
def test_rows_of_any_structure_are_kept_by_their_bytes(content: Any, samples: Any) -> None:
    """A thousand large samples without a known size would fill the memory."""
    batch: Any = SimpleNamespace(content=content, samples=tuple(samples))
    assert row_bytes(batch) == 304


def test_a_data_set_of_few_samples_does_not_tell_what_runs_beside_preprocessing() -> None:
    """A step of the kernel's clock in a few milliseconds would be cores, and a plan would leave its hosts none to preprocess."""
    step = CpuSeconds(raylet_s=0.01, beside_s=0.03)
    assert beside_preprocessing(step, 0.004, 0) == {"raylet_s_per_sample": 0.0, "beside_cpus": 0.0}
    second = CpuSeconds(raylet_s=0.1, beside_s=0.3)
    assert beside_preprocessing(second, 1.0, 1000) == {"raylet_s_per_sample": 0.0001, "beside_cpus": 0.3}


def test_without_a_raylet_nothing_is_counted() -> None:
    assert cpu_seconds() == CpuSeconds()
    assert CpuSeconds(raylet_s=3, beside_s=2).since(CpuSeconds(raylet_s=1, beside_s=1)) == CpuSeconds(
        raylet_s=2, beside_s=1
    )
