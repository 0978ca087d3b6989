"""How busy offload keeps the GPU with real JPEG files, on few cores and on all, beside a DataLoader and the model's prediction."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import offload
from benchmarks import workloads
from benchmarks.gpu import training
from benchmarks.gpu.place import Found, Place, expect, read_lines
from offload.machine import usable_cores
from offload.measure.findings import profile_document
from offload.model import JointGoodput, NodeType, Profile, Shape
from offload.probe.driver import probe
from offload.report.run_dir import METRICS

MODELS = ("vit_base_patch16_224", "resnet50")
FEW_CORES = 4
BATCH_SIZES = ((70, 256), (38, 128), (0, 64))  # by GiB of the GPU's memory: ViT-B/16 takes the most
IMAGES = 600
GIB = 2**30
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = 10
SAMPLES = 500_000  # one pass is longer than a run
PROBE_S = 25.0
WAIT_S = 0.05  # a batch that comes so late has just been made


@dataclass(frozen=True)
class Photos(Dataset[Any]):
    """The JPEG files over and over, each time with another crop."""

    jpeg: workloads.Workload
    samples: int = SAMPLES

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> workloads.Sample:
        return self.jpeg.make(i)


def _model(name: str) -> torch.nn.Module:
    """A model with random weights, in the layout of the batches."""
    model: torch.nn.Module = timm.create_model(name, num_classes=CLASSES, pretrained=False)
    return model.to(memory_format=torch.channels_last)


def _batch_size(place: Place) -> int:
    if place.device == "cpu":
        return 4
    gib = torch.cuda.get_device_properties(0).total_memory / GIB
    return next(size for least, size in BATCH_SIZES if gib >= least)


def train(ctx: offload.Context) -> None:
    """Train until some seconds after a warm-up. The answer counts these alone, by the wall clock; the last commit is not among them.

    Preprocessing starts before the worker. The loop first drops the batches of this lead, or the rate would be that of the device alone.
    """
    config = ctx.config
    model = _model(config["model"])
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    began = steady = None
    samples, rate = 0, None
    led, left = True, math.inf
    for batch in ctx.steps(10**6):
        now = time.monotonic()
        if led:
            led, left = now - left < WAIT_S, now
            ctx.skip()
            continue
        began = now if began is None else began
        if steady is None and now - began >= config["warm_s"]:
            _wait(ctx.device)
            steady = time.monotonic()
        with ctx.autocast():
            loss = cross_entropy(model(batch["image"]), batch["label"])
        ctx.backward(loss)
        ctx.step()
        if steady is None or rate is not None:
            continue
        samples += ctx.rows
        if time.monotonic() - steady >= config["steady_s"]:
            _wait(ctx.device)
            rate = samples / (time.monotonic() - steady)
            ctx.stop()
    training.answer(ctx, {"samples_per_s": rate, "device": ctx.device.type})


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busy(place: Place) -> Found:
    """Samples/s and busy share of both models with bf16, from real files, against the model's ceiling with data on the device. A
    DataLoader has the same cores. A probe on all cores predicts each run before it begins."""
    began = time.monotonic()
    folder = workloads.jpeg_files(place.folder / "jpeg", images=place.pick(IMAGES, 40))
    photos = Photos(workloads.get("jpeg", folder))
    figures: dict[str, Any] = {"making_files_s": round(time.monotonic() - began, 1), "models": {}}
    models = place.pick(MODELS, ("resnet10t",))
    batch_size = _batch_size(place)
    profiles = {}
    for name in models:
        figures["models"][name] = {"batch_size": batch_size, "ceiling_samples_per_s": _ceiling(place, name, batch_size)}
        place.so_far(figures)
        if place.device == "cuda":
            torch.cuda.empty_cache()  # the runs of this machine need the memory
    with place.ray():
        for name in models:
            profiles[name] = _profile(place, photos, name, batch_size)
            place.so_far(figures)
    cores = sorted({min(FEW_CORES + 1, usable_cores()), usable_cores()}) if place.device == "cuda" else [None]
    for count in cores:  # the models share a Ray
        with place.ray(count):
            for name in models:
                predicted = _predicted(profiles[name], count or 2, batch_size)
                found = _run(place, photos, name, batch_size)
                alone = _alone(place, photos, name, batch_size, workers=count or 1)
                found |= {
                    "predicted_samples_per_s": predicted,
                    "prediction_error": predicted / found["samples_per_s"] - 1,
                    "dataloader_samples_per_s": alone,
                }
                figures["models"][name][f"{count or 'shared'} cores"] = found
                place.so_far(figures)
                expect(found["device"] == place.device, f"{name} trained on {found['device']}")
    return Found(said=_sentence(figures["models"]), figures=figures)


def _trainer_arguments(place: Place, photos: Photos, name: str, batch_size: int) -> dict[str, Any]:
    return {
        "datasets": {"train": offload.from_torch(photos, on_device=offload.Normalize(MEAN, STD))},
        "batch_size": batch_size,
        "workers": 1,
        "precision": "bf16",
        "checkpoints": offload.Checkpoints(keep=1),
        "train_loop_config": {"model": name, "warm_s": place.pick(8.0, 0.5), "steady_s": place.pick(10.0, 1.0)},
    }


def _profile(place: Place, photos: Photos, name: str, batch_size: int) -> Profile:
    """What a probe measures on all cores of this machine."""
    known = {"workload": name, "measured": {}}
    trainer = offload.Trainer(train, **_trainer_arguments(place, photos, name, batch_size))
    found = probe(trainer, address=None, quiet=True, known=known, seconds=place.pick(PROBE_S, None))
    expect(found is not None, "the probe was interrupted")
    assert found is not None
    return Profile.from_document(profile_document(found))


def _predicted(profile: Profile, cores: int, batch_size: int) -> float:
    """The joint model's samples/s for one GPU host with so many cores."""
    host = NodeType(name="host", vcpus=cores, memory_gib=1, network_gbps=1.0, usd_per_hour=1.0, gpus=1, gpu_speed=1.0)
    ceiling = profile.input.samples_per_s(Shape({host: 1}), 1)
    joint = JointGoodput(profile.step_time, None, ceiling, overlap=profile.overlap)
    return float(joint.throughput(1, 1, batch_size, 0))


def _run(place: Place, photos: Photos, name: str, batch_size: int) -> dict[str, Any]:
    """One run: its own figures for the second half of its intervals, and those of its summary."""
    told, result = training.fit(
        place,
        train,
        name=f"{name}-{time.monotonic_ns()}",
        **_trainer_arguments(place, photos, name, batch_size),
    )
    intervals = read_lines(result.run_dir / METRICS)
    steady = intervals[len(intervals) // 2 :]
    total = {key: sum(each[key] for each in steady) for key in ("step_time_s", "data_wait_s", "compute_s", "sync_s")}
    document, step_s = result.document, total["step_time_s"] or float("nan")
    ceilings = [each["device_ceiling_samples_per_s"] for each in steady if each["device_ceiling_samples_per_s"]]
    return {
        "device": told["device"],
        "samples_per_s": told["samples_per_s"],
        "busy_share": (total["compute_s"] + total["sync_s"]) / step_s,
        "stall": total["data_wait_s"] / step_s,
        "device_ceiling_samples_per_s": sum(ceilings) / len(ceilings) if ceilings else None,
        "preprocessing_cores": document["preprocessing_cores"],
        "input": document["input"].get("train"),
        "whole_run": {key: document[key] for key in ("samples", "samples_per_s", "stall", "first_batch_s")},
    }


def _steps(place: Place, name: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A training step of the model on a batch of uint8 images that is on the device."""
    model = _model(name).to(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    normalize = offload.Normalize(MEAN, STD)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(place.device, dtype=torch.bfloat16):
            loss = cross_entropy(model(normalize({"image": images})["image"]), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _ceiling(place: Place, name: str, batch_size: int) -> float:
    """Samples/s of training steps on a batch that is already on the device."""
    device = torch.device(place.device)
    images = torch.randint(0, 256, (batch_size, 224, 224, 3), dtype=torch.uint8, device=device)
    labels = torch.randint(0, CLASSES, (batch_size,), device=device)
    step = _steps(place, name)
    for _ in range(place.pick(10, 1)):
        step(images, labels)
    _wait(device)
    began, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - began < place.pick(5.0, 0.1):
        step(images, labels)
        steps += 1
        if steps % 10 == 0:
            _wait(device)  # the queue would otherwise run far ahead of the clock
    _wait(device)
    return steps * batch_size / (time.perf_counter() - began)


def _alone(place: Place, photos: Photos, name: str, batch_size: int, *, workers: int) -> float:
    """Samples/s of the same training from torch's DataLoader with pinned memory, in the same steady state."""
    device = torch.device(place.device)
    loader: DataLoader[Any] = DataLoader(
        photos,
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        pin_memory=place.device == "cuda",
        drop_last=True,
        # A process that has used CUDA must not fork.
        multiprocessing_context="spawn",
    )
    step, batches = _steps(place, name), iter(loader)
    warm_s, steady_s = place.pick((4.0, 10.0), (0.1, 1.0))
    began = steady = None
    samples = 0
    for batch in batches:
        step(batch["image"].to(device, non_blocking=True), batch["label"].to(device, non_blocking=True))
        now = time.monotonic()
        began = now if began is None else began
        if steady is not None:
            samples += batch_size
            if now - steady >= steady_s:
                break
        elif now - began >= warm_s:
            _wait(device)
            steady = time.monotonic()
    _wait(device)
    assert steady is not None
    rate = samples / (time.monotonic() - steady)
    del batches, loader  # ends its processes
    if place.device == "cuda":
        torch.cuda.empty_cache()
    return rate


def _sentence(models: dict[str, dict[str, Any]]) -> str:
    said = []
    for name, each in models.items():
        runs = [
            f"{run['samples_per_s']:,.0f} on {key} (busy {run['busy_share']:.0%}, predicted {run['predicted_samples_per_s']:,.0f}, "
            f"DataLoader {run['dataloader_samples_per_s']:,.0f})"
            for key, run in each.items()
            if isinstance(run, dict)
        ]
        said.append(f"{name}: {', '.join(runs)} of {each['ceiling_samples_per_s']:,.0f} samples/s")
    return "; ".join(said)
