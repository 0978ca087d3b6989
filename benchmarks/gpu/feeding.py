"""Training of timm's models from a workload's samples, at a steady rate: with offload, with a DataLoader, from data on the device, and
as the joint model predicts it from a probe."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import offload
from benchmarks import workloads
from benchmarks.gpu import training
from benchmarks.gpu.place import Place, expect, read_lines
from benchmarks.raw_images import IMAGE_SIZE, LABELS
from offload.measure.findings import profile_document
from offload.model import JointGoodput, NodeType, Profile, Shape
from offload.probe.driver import probe
from offload.report.run_dir import METRICS

BATCH_SIZES = ((70, 256), (38, 128), (0, 64))  # by GiB of the GPU's memory: ViT-B/16 takes the most
GIB = 2**30
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = LABELS
SAMPLES = 500_000  # one pass is longer than a run
PROBE_S = 25.0
DROP_S = 3.0  # more than the device takes to receive what was made before the worker started
LOOK_S = 0.1  # between two readings of the GPU's utilisation


@dataclass(frozen=True)
class Samples(Dataset[Any]):
    """The samples of a workload; those of files come over and over, each time with another crop."""

    workload: workloads.Workload
    samples: int = SAMPLES

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> workloads.Sample:
        return self.workload.make(i)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained.

    Args:
        model: its name in timm.
        data: the samples. Images of uint8 are HWC and normalised on the device; those of float32 are CHW.
        batch_size: samples per step.
        steady_s: for how many seconds to measure.
    """

    model: str
    data: Samples
    batch_size: int
    steady_s: float = 10.0

    @property
    def on_device(self) -> offload.Normalize | None:
        """What the device does with a batch first."""
        return None if self.data.workload.name == "blur" else offload.Normalize(MEAN, STD)

    def batch(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Random samples of the same type and shape, on the device."""
        labels = torch.randint(0, CLASSES, (self.batch_size,), device=device)
        if self.on_device is None:
            return {"image": torch.rand((self.batch_size, 3, IMAGE_SIZE, IMAGE_SIZE), device=device), "label": labels}
        shape = (self.batch_size, IMAGE_SIZE, IMAGE_SIZE, 3)
        return {"image": torch.randint(0, 256, shape, dtype=torch.uint8, device=device), "label": labels}


def batch_size(place: Place) -> int:
    """Samples per step that fit into the GPU's memory."""
    if place.device == "cpu":
        return 4
    gib = torch.cuda.get_device_properties(0).total_memory / GIB
    return next(size for least, size in BATCH_SIZES if gib >= least)


def network(name: str) -> torch.nn.Module:
    """A model with random weights, in the layout of the batches."""
    model: torch.nn.Module = timm.create_model(name, num_classes=CLASSES, pretrained=False)
    return model.to(memory_format=torch.channels_last)


class Utilization:
    """What NVIDIA's driver says about the GPU, by another clock than offload's own: the share of time in which a kernel ran.

    ``share`` is its mean until :meth:`stop`, in 0..1; None without a GPU or without the package nvidia-ml-py.
    """

    def __init__(self, device: torch.device) -> None:
        self.share: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(device,), daemon=True)
        if device.type == "cuda":
            self._thread.start()

    def _look(self, device: torch.device) -> None:
        seen: list[int] = []
        with suppress(ModuleNotFoundError, RuntimeError):
            while not self._ended.wait(LOOK_S):
                seen.append(torch.cuda.utilization(device))
                self.share = sum(seen) / len(seen) / 100

    def stop(self) -> float | None:
        self._ended.set()
        return self.share


def train(ctx: offload.Context) -> None:
    """Train until some seconds after a warm-up. The answer counts these alone, by the wall clock; the last commit is not among them.

    Preprocessing starts before the worker. The loop first drops batches for ``drop_s`` seconds, so that this lead does not count: for
    its length, the rate would be that of the device alone.
    """
    config = ctx.config
    model = network(config["model"])
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    began = steady = looking = None
    samples, rate, utilization = 0, None, None
    first = time.monotonic()
    for batch in ctx.steps(10**6):
        now = time.monotonic()
        if now - first < config["drop_s"]:
            ctx.skip()
            continue
        began = now if began is None else began
        if steady is None and now - began >= config["warm_s"]:
            wait(ctx.device)
            steady, looking = time.monotonic(), Utilization(ctx.device)
        with ctx.autocast():
            loss = cross_entropy(model(batch["image"]), batch["label"])
        ctx.backward(loss)
        ctx.step()
        if steady is None or looking is None or rate is not None:
            continue
        samples += ctx.rows
        if time.monotonic() - steady >= config["steady_s"]:
            wait(ctx.device)
            rate, utilization = samples / (time.monotonic() - steady), looking.stop()
            ctx.stop()
    training.answer(ctx, {"samples_per_s": rate, "device": ctx.device.type, "utilization": utilization})


def wait(device: torch.device) -> None:
    """Wait until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _trainer_arguments(place: Place, case: Case, *, drop_s: float) -> dict[str, Any]:
    return {
        "datasets": {"train": offload.from_torch(case.data, on_device=case.on_device)},
        "batch_size": case.batch_size,
        "workers": 1,
        "precision": "bf16",
        "checkpoints": offload.Checkpoints(keep=1),
        "train_loop_config": {
            "model": case.model,
            "drop_s": drop_s,
            "warm_s": place.pick(8.0, 0.5),
            "steady_s": place.pick(case.steady_s, 1.0),
        },
    }


def profile(place: Place, case: Case) -> Profile:
    """What a probe measures on the cores of this Ray."""
    known = {"workload": case.model, "measured": {}}
    trainer = offload.Trainer(train, **_trainer_arguments(place, case, drop_s=0.0))
    found = probe(trainer, address=None, quiet=True, known=known, seconds=place.pick(PROBE_S, None))
    expect(found is not None, "the probe was interrupted")
    assert found is not None
    return Profile.from_document(profile_document(found))


def predicted(profile: Profile, batch_size: int, *, cores: int, cpu_host_cores: int = 0) -> float:
    """The joint model's samples/s for one GPU host with so many cores, and a CPU host with so many; 0: none."""
    shape = {
        NodeType(
            name="gpu-host", vcpus=cores, memory_gib=1, network_gbps=10.0, usd_per_hour=1.0, gpus=1, gpu_speed=1.0
        ): 1
    }
    if cpu_host_cores:
        shape[NodeType(name="cpu-host", vcpus=cpu_host_cores, memory_gib=1, network_gbps=10.0, usd_per_hour=1.0)] = 1
    ceiling = profile.input.samples_per_s(Shape(shape), 1)
    joint = JointGoodput(profile.step_time, None, ceiling, overlap=profile.overlap)
    return float(joint.throughput(1, 1, batch_size, 0))


def run(place: Place, case: Case) -> dict[str, Any]:
    """One run: its own figures for the second half of its intervals, and those of its summary."""
    told, result = training.fit(
        place,
        train,
        name=f"{case.model}-{time.monotonic_ns()}",
        **_trainer_arguments(place, case, drop_s=place.pick(DROP_S, 0.5)),
    )
    expect(told["device"] == place.device, f"{case.model} trained on {told['device']}")
    intervals = read_lines(result.run_dir / METRICS)
    steady = intervals[len(intervals) // 2 :]
    total = {key: sum(each[key] for each in steady) for key in ("step_time_s", "data_wait_s", "compute_s", "sync_s")}
    document, step_s = result.document, total["step_time_s"] or float("nan")
    ceilings = [each["device_ceiling_samples_per_s"] for each in steady if each["device_ceiling_samples_per_s"]]
    return {
        **told,
        "busy_share": (total["compute_s"] + total["sync_s"]) / step_s,
        "stall": total["data_wait_s"] / step_s,
        "device_ceiling_samples_per_s": sum(ceilings) / len(ceilings) if ceilings else None,
        "preprocessing_cores": document["preprocessing_cores"],
        "input": document["input"].get("train"),
        "whole_run": {key: document[key] for key in ("samples", "samples_per_s", "stall", "first_batch_s")},
    }


def _steps(place: Place, case: Case) -> Callable[[Mapping[str, torch.Tensor]], None]:
    """A training step of the model on a batch that is on the device."""
    model = network(case.model).to(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    first: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] = case.on_device or (lambda batch: batch)

    def step(batch: Mapping[str, torch.Tensor]) -> None:
        with torch.autocast(place.device, dtype=torch.bfloat16):
            loss = cross_entropy(model(first({"image": batch["image"]})["image"]), batch["label"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ceiling(place: Place, case: Case) -> float:
    """Samples/s of training steps on a batch that is already on the device."""
    device = torch.device(place.device)
    batch = case.batch(device)
    step = _steps(place, case)
    for _ in range(place.pick(10, 1)):
        step(batch)
    wait(device)
    began, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - began < place.pick(5.0, 0.1):
        step(batch)
        steps += 1
        if steps % 10 == 0:
            wait(device)  # the queue would otherwise run far ahead of the clock
    wait(device)
    rate = steps * case.batch_size / (time.perf_counter() - began)
    del batch, step
    if place.device == "cuda":
        torch.cuda.empty_cache()  # the runs of this machine need the memory
    return rate


def dataloader(place: Place, case: Case, *, workers: int) -> dict[str, Any]:
    """Samples/s of the same training from torch's DataLoader with pinned memory, in the same steady state, and the GPU's utilisation."""
    device = torch.device(place.device)
    loader: DataLoader[Any] = DataLoader(
        case.data,
        batch_size=case.batch_size,
        shuffle=True,
        num_workers=workers,
        pin_memory=place.device == "cuda",
        drop_last=True,
        # A process that has used CUDA must not fork.
        multiprocessing_context="spawn",
    )
    step, batches = _steps(place, case), iter(loader)
    warm_s, steady_s = place.pick((4.0, case.steady_s), (0.1, 1.0))
    began = steady = looking = None
    samples = 0
    for batch in batches:
        step({name: column.to(device, non_blocking=True) for name, column in batch.items()})
        now = time.monotonic()
        began = now if began is None else began
        if steady is not None:
            samples += case.batch_size
            if now - steady >= steady_s:
                break
        elif now - began >= warm_s:
            wait(device)
            steady, looking = time.monotonic(), Utilization(device)
    wait(device)
    assert steady is not None
    assert looking is not None
    found = {"samples_per_s": samples / (time.monotonic() - steady), "utilization": looking.stop()}
    del batches, loader  # ends its processes
    if place.device == "cuda":
        torch.cuda.empty_cache()
    return found
