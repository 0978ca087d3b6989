"""One row of `benchmarks/inference.py`, in a process of its own: predicts a folder of JPEG files, and says how long that took."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torchvision.transforms import v2

import offload
from benchmarks.rows import protocol

BATCH = 64
CROP = v2.Compose([v2.Resize(176), v2.CenterCrop(160)])
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TRANSFORM = v2.Compose([CROP, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def build_model() -> torch.nn.Module:
    """A small convolutional network: preprocessing and model both take a core's time."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for width_in, width_out in ((3, 16), (16, 32), (32, 64)):
        layers += [torch.nn.Conv2d(width_in, width_out, 3, 2, 1), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10))


def with_offload(images: Path, output: Path, address: str | None) -> None:
    """offload.predict, on this machine or on a Ray of two cores."""
    weights = output.with_suffix(".pt")
    torch.save(build_model().state_dict(), weights)
    predictor = offload.Predictor(build_model, offload.image_folder(images, TRANSFORM))
    offload.predict(predictor, weights, output, batch_size=BATCH, address=address, quiet=True)


def decoded(batch: dict[str, Any]) -> dict[str, Any]:
    """Decode and crop a batch in a task of Ray Data, by the same libraries as offload."""
    import numpy as np
    import simplejpeg

    from offload.pipeline.preprocessing.environment import hold_to_one_core

    hold_to_one_core()
    images = [
        CROP(torch.from_numpy(simplejpeg.decode_jpeg(content, colorspace="RGB")).permute(2, 0, 1)).numpy()
        for content in batch["bytes"]
    ]
    return {"path": batch["path"], "image": np.stack(images)}


class Model:
    """The model in an actor of Ray Data."""

    def __init__(self) -> None:
        self.model = build_model().eval()
        self.finish = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            outputs = self.model(self.finish(torch.from_numpy(batch["image"])))
        return {"path": batch["path"], "output": outputs.numpy()}


def with_ray_data(images: Path, output: Path) -> None:
    """read_binary_files, a map for the preprocessing, a map for the model, write_parquet, as Ray's guide to batch inference has it."""
    import ray

    files = sorted(map(str, images.rglob("*.jpg")))
    data = ray.data.read_binary_files(files, include_paths=True)
    data = data.map_batches(decoded, batch_size=BATCH)
    data = data.map_batches(Model, batch_size=BATCH, concurrency=1, num_cpus=1)
    data.write_parquet(str(output))


def rows_of(output: Path) -> Iterator[Any]:
    """The outputs in the file or folder."""
    import pyarrow.parquet as pq

    table = pq.read_table(output, columns=["output"])
    yield table.num_rows
    yield float(sum(value for row in table.column("output").to_pylist() for value in row))


if __name__ == "__main__":
    row, images, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    began = time.perf_counter()
    if row != "offload":
        import ray

        ray.init(num_cpus=2, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
    started = time.perf_counter()
    if row == "ray-data":
        with_ray_data(images, output)
    else:
        with_offload(images, output, None)
    ended = time.perf_counter()
    samples, total = rows_of(output)
    print(
        protocol.ANSWER
        + json.dumps({"start_s": started - began, "work_s": ended - started, "samples": samples, "output_sum": total})
    )
