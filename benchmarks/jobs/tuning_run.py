"""A search of :mod:`benchmarks.tuning`: eight learning rates for a small net, with paced preprocessing and paced accelerators.

    python benchmarks/jobs/tuning_run.py FOLDER SETTINGS

SETTINGS is a JSON object, see :class:`Settings`. An image is decoded from PNG and made noisy, and its preprocessing then sleeps for its
time of a core, so that two cores can stand for many. FOLDER gets a byte in ``decoded`` for each decoded image, a line in ``heard.jsonl``
for each event of a trial, and ``result.json`` at the end. Searches of offload need an arbiter on the cluster.
"""

import io
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import ray.train
import torch
from PIL import Image
from ray import tune
from ray.train.torch import TorchConfig, TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining, TrialScheduler
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import offload
from offload.paced import PacedAccelerator

WORKER_CPUS = 0.25  # that a worker takes beside its accelerator
DRIVER_CPUS = 0.01  # of a plain trial, whose process only waits for its worker: Tune would reserve a whole one
BLOCK = 16  # images of a task of Ray Data, as many as offload makes at a time
FOR_TRAINING = 1400  # of the digits that scikit-learn ships
NOISE = 0.2  # standard deviation of what an augmentation adds to pixels in 0..1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A search.

    Args:
        way: ``plain`` is Ray Tune with Ray Train and Ray Data, ``offload`` is offload.tune under the arbiter.
        shared: where trials of offload share samples on each node; None: each makes its own.
        rates: the learning rates, one for each trial, in the order in which they begin.
        epochs: of the best trials.
        samples: of an epoch.
        batch_size: the global batch.
        core_s: seconds of a preprocessing core for an image.
        alpha_s, beta_s: a worker's seconds for a step, and for each sample of it.
        workers: the least and the most of a trial of offload; a plain one has the least.
        concurrent: trials at a time.
        every: epochs between two exchanges of population-based training; None: ASHA.
        favor: what the best trial counts for the arbiter; None: as much as the others.
        seed: of the data's order, the noise and the initial weights.
    """

    way: str
    shared: str | None = None
    rates: tuple[float, ...]
    epochs: int
    samples: int
    batch_size: int
    core_s: float
    alpha_s: float
    beta_s: float
    workers: tuple[int, int] = (1, 1)
    concurrent: int
    every: int | None = None
    favor: float | None = None
    seed: int = 0


class Images(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Handwritten digits as PNG, of which each takes its time on a core."""

    def __init__(self, samples: int, core_s: float, folder: Path) -> None:
        digits = load_digits()
        self.files = [_png(image) for image in digits.images[:samples]]
        self.labels = digits.target[:samples].astype(np.int64)
        self.core_s, self.decoded = core_s, folder / "decoded"

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        began = time.monotonic()
        pixels = np.asarray(Image.open(io.BytesIO(self.files[number])), np.float32) / 255
        with self.decoded.open("ab", buffering=0) as log:
            log.write(b".")
        image = torch.from_numpy(pixels) + NOISE * torch.randn(pixels.shape)
        time.sleep(max(self.core_s - (time.monotonic() - began), 0.0))
        return {"image": image, "label": torch.tensor(self.labels[number])}


def _png(image: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray((image * (255 / 16)).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The share of other digits that the model reads rightly."""
    digits = load_digits()
    images = torch.from_numpy(digits.images[FOR_TRAINING:] / 16).float()
    labels = torch.from_numpy(digits.target[FOR_TRAINING:])
    return float((model(images).argmax(1) == labels).float().mean())


def note(folder: Path, **event: Any) -> None:
    """Record an event with its time."""
    with (folder / "heard.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"at": time.time(), **event}) + "\n")


class Heard(tune.Callback):
    """What Tune hears of its trials, in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        note(self.folder, event="begun", trial=str(trial), rate=trial.config["lr"])

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        epoch = result["training_iteration"]
        measured = {"rate": trial.config["lr"], "epoch": epoch, "accuracy": result["accuracy"]}
        note(self.folder, event="result", trial=str(trial), **measured)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        note(self.folder, event="ended", trial=str(trial), rate=trial.config["lr"])


# -- the same training, twice ------------------------------------------------------------------------------------------


def train_with_offload(ctx: Any) -> None:
    settings, folder = Settings(**ctx.config["settings"]), Path(ctx.config["folder"])
    accelerator = PacedAccelerator(settings.alpha_s, settings.beta_s)
    model = net()
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=ctx.config["lr"]))
    for _ in ctx.epochs(settings.epochs):
        for number, batch in enumerate(ctx.batches("train")):
            if not number and not ctx.rank:
                note(folder, event="trains", rate=ctx.config["lr"])
            accelerator.step(len(batch["label"]))
            ctx.backward(cross_entropy(model(batch["image"]), batch["label"]))
            ctx.step()
        ctx.report(accuracy=accuracy(model))


def with_offload(settings: Settings, folder: Path) -> Any:
    """The trainable of offload."""

    def build(config: dict[str, Any]) -> offload.Trainer:
        least, most = settings.workers
        return offload.Trainer(
            train_with_offload,
            datasets={"train": offload.from_torch(Images(settings.samples, settings.core_s, folder))},
            batch_size=settings.batch_size,
            workers=(least, most) if least < most else least,
            seed=settings.seed,
            scaling_config=ray.train.ScalingConfig(use_gpu=True, resources_per_worker={"CPU": WORKER_CPUS, "GPU": 1}),
            storage_path=str(folder / "checkpoints"),
            train_loop_config={**config, "settings": asdict(settings), "folder": str(folder)},
        )

    return offload.tune.trainable(build, shared=settings.shared)


def train_with_ray(config: dict[str, Any]) -> None:
    settings, folder = Settings(**config["settings"]), Path(config["folder"])
    torch.manual_seed(settings.seed)
    accelerator = PacedAccelerator(settings.alpha_s, settings.beta_s)
    model = net()  # on the CPU, since accelerators are paced, and of one worker alone
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    data = ray.train.get_dataset_shard("train")
    for _ in range(settings.epochs):
        batches = data.iter_torch_batches(
            batch_size=settings.batch_size, local_shuffle_buffer_size=4 * settings.batch_size, device="cpu"
        )
        for number, batch in enumerate(batches):
            if not number:
                note(folder, event="trains", rate=config["lr"])
            accelerator.step(len(batch["label"]))
            optimizer.zero_grad()
            loss: Any = cross_entropy(model(batch["image"]), batch["label"])
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as kept:
            torch.save(model.state_dict(), Path(kept) / "model.pt")
            ray.train.report({"accuracy": accuracy(model)}, checkpoint=ray.train.Checkpoint.from_directory(kept))


def with_ray(settings: Settings, folder: Path) -> Any:
    """The trainable of Ray's guide to Train with Tune: a function that runs a TorchTrainer, whose reports go on to Tune."""
    images = Images(settings.samples, settings.core_s, folder)

    def make(batch: dict[str, Any]) -> dict[str, Any]:
        rows = [images[int(number)] for number in batch["id"]]
        return {name: np.stack([row[name].numpy() for row in rows]) for name in rows[0]}

    def drive(config: dict[str, Any]) -> None:
        ray.data.DataContext.get_current().enable_progress_bars = False
        report: Any = TuneReportCallback()  # type: ignore[no-untyped-call]
        # One block for each task, so that all cores work on an epoch.
        numbers = ray.data.range(settings.samples, override_num_blocks=settings.samples // BLOCK)
        TorchTrainer(
            train_with_ray,
            train_loop_config={**config, "settings": asdict(settings), "folder": str(folder)},
            torch_config=TorchConfig(backend="gloo"),
            datasets={"train": numbers.map_batches(make, batch_size=BLOCK)},
            scaling_config=ray.train.ScalingConfig(
                num_workers=settings.workers[0],
                use_gpu=True,
                resources_per_worker={"CPU": WORKER_CPUS, "GPU": 1},
            ),
            run_config=ray.train.RunConfig(
                name=f"train-{tune.get_context().get_trial_id()}",
                storage_path=str(folder / "train"),
                callbacks=[report],
            ),
        ).fit()

    return tune.with_resources(drive, {"CPU": DRIVER_CPUS})


# -- the search --------------------------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Settings, Path], Any]] = {"plain": with_ray, "offload": with_offload}


def scheduler_of(settings: Settings) -> TrialScheduler:
    if settings.every is None:
        return ASHAScheduler(max_t=settings.epochs, grace_period=1, reduction_factor=2)
    return PopulationBasedTraining(
        perturbation_interval=settings.every,
        quantile_fraction=1 / 3,
        hyperparam_mutations={"lr": sorted(settings.rates)},
    )


def search(settings: Settings, folder: Path) -> dict[str, Any]:
    """Run the search; return what came out of it."""
    favors = [] if settings.favor is None else [offload.tune.favor_best("accuracy", mode="max", weight=settings.favor)]
    began = time.time()
    results: Any = tune.Tuner(
        WAYS[settings.way](settings, folder),
        param_space={"lr": tune.grid_search(list(settings.rates))},
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            scheduler=scheduler_of(settings),
            max_concurrent_trials=settings.concurrent,
            # A plain trial that Tune stops has a thread that waits for its TorchTrainer. Tune could not use its process again.
            reuse_actors=settings.way == "offload",
        ),
        run_config=tune.RunConfig(
            name="search", storage_path=str(folder / "tune"), verbose=0, callbacks=[Heard(folder), *favors]
        ),
    ).fit()
    seconds = time.time() - began
    if results.errors:
        raise SystemExit(f"{len(results.errors)} trials failed, the first with: {results.errors[0]}")
    best = results.get_best_result()
    return {
        "seconds": seconds,
        "began": began,
        "best_rate": best.config["lr"],
        "best_accuracy": best.metrics["accuracy"],
        "trials": [_trial(result) for result in results],
        "lanes": [] if settings.way == "plain" else [asdict(span) for span in offload.arbiter.status().history],
    }


def _trial(result: Any) -> dict[str, Any]:
    return {
        "rate": result.config["lr"],
        "epochs": result.metrics["training_iteration"],
        "accuracy": result.metrics["accuracy"],
    }


def main(arguments: Sequence[str]) -> None:
    folder, settings = Path(arguments[0]), Settings(**json.loads(arguments[1]))
    ray.init(logging_level=logging.WARNING, log_to_driver=False)
    (folder / "result.json").write_text(json.dumps(search(settings, folder)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
