"""Row `dali`: DALI's pipeline on CPUs, as in its ImageNet examples.

It decodes the crop's region alone, and resizes with antialiasing. Its Gaussian blur applies two kernels of one dimension, where torchvision
applies one of two dimensions: the same result for less work.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types

from benchmarks.raw_images import BLUR_KERNEL, BLUR_SIGMA, BLURS, IMAGE_SIZE, LABELS, labelled_files, noise
from benchmarks.rows import protocol
from benchmarks.rows.peers import common


@pipeline_def
def of_files(files: list[str], labels: list[int], shuffled: int) -> Any:
    encoded, label = fn.readers.file(
        files=files, labels=labels, random_shuffle=True, initial_fill=shuffled, name="files"
    )
    image = fn.decoders.image_random_crop(
        encoded, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
    )
    image = fn.resize(image, resize_x=IMAGE_SIZE, resize_y=IMAGE_SIZE, antialias=True)
    return fn.flip(image, horizontal=fn.random.coin_flip()), label


@pipeline_def
def of_noise() -> Any:
    image, label = fn.external_source(
        lambda at: (noise(at.idx_in_epoch), np.array([at.idx_in_epoch % LABELS])), num_outputs=2, batch=False
    )
    for _ in range(BLURS):
        image = fn.gaussian_blur(image, window_size=BLUR_KERNEL, sigma=fn.random.uniform(range=BLUR_SIGMA))
    return fn.transpose(image, perm=[2, 0, 1]), label


def main() -> None:
    task = protocol.parse()
    options = {"batch_size": task.batch_size, "num_threads": common.cores(), "device_id": None, "seed": 0}
    if task.workload == "jpeg":
        files, labels = labelled_files(protocol.folder(task))
        ids = [number % len(files) for number in range(task.samples)]
        pipeline = of_files([files[i] for i in ids], [labels[i] for i in ids], shuffled=1024, **options)
    else:
        pipeline = of_noise(**options)
    pipeline.build()

    def batches() -> Iterator[Mapping[str, Any]]:
        for _ in range(task.samples // task.batch_size):
            image, label = pipeline.run()
            # The pipeline writes to the same memory again, so that the consumer needs copies.
            yield {"image": np.array(image.as_array()), "label": label.as_array()[:, 0].astype(np.int64)}

    common.answer(task, batches)


if __name__ == "__main__":
    main()
