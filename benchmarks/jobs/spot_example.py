"""The job of `benchmarks/spot_notice.py` on the head: an unchanged example, on two workers that record what they train.

    PYTHONPATH=.:examples python -m benchmarks.jobs.spot_example FOLDER EXAMPLE [ARGUMENT ...]

The run directory is FOLDER/run. FOLDER/log gets a record of each worker's batches.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray.train

import offload
from tests.emulation.history import log_batch


def logged(train: Callable[[offload.Context], None], folder: Path) -> Callable[[offload.Context], None]:
    """Return the same training, which also records each of its batches."""

    def train_and_log(ctx: offload.Context) -> None:
        batches = ctx.batches

        def written_down(name: str = "train", *columns: str) -> Iterator[Any]:
            batch: Any
            for batch in batches(name, *columns):
                if name == "train":
                    log_batch(ctx, batch, folder)
                yield batch

        ctx.batches = written_down  # type: ignore[method-assign,assignment]
        train(ctx)

    return train_and_log


def main() -> None:
    folder, example = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [example, *sys.argv[3:]]
    trainer: offload.Trainer = importlib.import_module(example).build()
    (folder / "log").mkdir()
    trainer.train = logged(trainer.train, folder / "log")
    trainer.workers = (1, 2)
    trainer.adaptation = offload.Adaptation(schedule={0: 2})
    trainer.scaling_config = ray.train.ScalingConfig(
        resources_per_worker={"CPU": 0.5, "place": 1.0}, placement_strategy="SPREAD"
    )
    trainer.fit(run_dir=folder / "run", address="auto")


if __name__ == "__main__":
    main()
