"""The workloads as tf.data pipelines of TensorFlow's own operations: for the rows `tfdata` and `tfdata-service`.

Without antialiasing, images are read as in TensorFlow's ImageNet examples: only the crop's region is decoded. With antialiasing, as in the
plain loop, the whole image is decoded, since the resized crop needs float pixels either way. Synthetic images come from TensorFlow's own
generator: they are no plain loop's, but cost as much to blur. Tables are TFRecord files, each row an Example.
"""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import tables
from benchmarks.raw_images import BLUR_KERNEL, BLUR_SIGMA, BLURS, IMAGE_SIZE, LABELS, labelled_files
from benchmarks.rows import protocol
from benchmarks.rows.peers import common

READ_AT_ONCE = 4  # files of rows, interleaved
SHUFFLED_BATCHES = 8


def options() -> Any:
    """Options of a data set that runs on the row's cores alone. The order of samples is free, as in training."""
    made = tf.data.Options()
    made.threading.private_threadpool_size = common.cores()
    made.deterministic = False
    return made


def of_images(task: protocol.Task, *, antialias: bool) -> Any:
    """Batches of images. An element of the source is a whole batch of ids: the service hands out elements one by one."""
    sample = _of_file(task, antialias) if task.workload == "jpeg" else _of_noise
    starts = tf.data.Dataset.range(0, task.samples, task.batch_size)
    ids = starts.flat_map(lambda start: tf.data.Dataset.range(start, start + task.batch_size))
    return ids.map(sample, num_parallel_calls=common.cores()).batch(task.batch_size)


def _of_file(task: protocol.Task, antialias: bool) -> Any:
    files, labels = labelled_files(protocol.folder(task))
    paths, classes = tf.constant(files), tf.constant(labels, tf.int64)

    def sample(sample_id: Any) -> dict[str, Any]:
        number = sample_id % len(files)
        data = tf.io.read_file(paths[number])
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(data),
            tf.zeros([1, 0, 4]),
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1.0),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        if antialias:
            image = tf.slice(tf.io.decode_jpeg(data, channels=3), begin, size)
        else:
            window = tf.stack([begin[0], begin[1], size[0], size[1]])
            image = tf.image.decode_and_crop_jpeg(data, window, channels=3)
        image = tf.image.resize(image, [IMAGE_SIZE, IMAGE_SIZE], antialias=antialias)
        image = tf.image.random_flip_left_right(tf.cast(tf.round(image), tf.uint8))
        return {"image": image, "label": classes[number]}

    return sample


def _of_noise(sample_id: Any) -> dict[str, Any]:
    image = tf.random.stateless_normal([1, IMAGE_SIZE, IMAGE_SIZE, 3], seed=tf.stack([sample_id, 0]))
    at = tf.range(BLUR_KERNEL, dtype=tf.float32) - BLUR_KERNEL // 2
    around = [[0, 0], [BLUR_KERNEL // 2] * 2, [BLUR_KERNEL // 2] * 2, [0, 0]]
    for _ in range(BLURS):
        line = tf.nn.softmax(-0.5 * tf.square(at / tf.random.uniform([], *BLUR_SIGMA)))
        # One kernel of two dimensions, as torchvision's.
        kernel = tf.tile((line[:, None] * line[None, :])[:, :, None, None], [1, 1, 3, 1])
        image = tf.nn.depthwise_conv2d(tf.pad(image, around, "REFLECT"), kernel, [1, 1, 1, 1], "VALID")
    return {"image": tf.transpose(image[0], [2, 0, 1]), "label": sample_id % LABELS}


def write(task: protocol.Task, folder: Path) -> None:
    """Write one file's rows as TFRecords."""
    with tf.io.TFRecordWriter(str(folder / "rows.tfrecord")) as writer:
        for row in common.rows_of(task):
            writer.write(tf.train.Example(features=tf.train.Features(feature=_features(row))).SerializeToString())


def _features(row: dict[str, Any]) -> dict[str, Any]:
    made = {}
    for name, value in row.items():
        if name == "text":
            made[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()]))
        elif name.startswith("number"):
            made[name] = tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
        else:
            made[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
    return made


def of_tables(task: protocol.Task) -> tuple[Any, float]:
    """Batches of rows, and the seconds of the conversion."""
    folder, conversion_s = common.converted(task, "tfrecord", lambda folder: write(task, folder))
    rows = tables.ROWS_PER_FILE[task.workload]
    links = common.repeated(task, [folder / "rows.tfrecord"], folder / "all", rows)
    files = tf.data.Dataset.from_tensor_slices([str(link) for link in links]).shuffle(len(links), seed=0)
    records = files.interleave(
        tf.data.TFRecordDataset, cycle_length=READ_AT_ONCE, num_parallel_calls=common.cores(), deterministic=False
    )
    batches = records.shuffle(SHUFFLED_BATCHES * task.batch_size, seed=0).batch(task.batch_size)
    make = _text() if task.workload == "text" else _tabular
    return batches.map(make, num_parallel_calls=common.cores()), conversion_s


def _text() -> Any:
    words = tf.lookup.KeyValueTensorInitializer(
        list(tables.VOCABULARY), list(tables.VOCABULARY.values()), tf.string, tf.int32
    )
    vocabulary = tf.lookup.StaticHashTable(words, default_value=0)
    stored = {"text": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def make(examples: Any) -> dict[str, Any]:
        batch = tf.io.parse_example(examples, stored)
        found = tf.strings.split(tf.strings.lower(batch["text"]))[:, : tables.TOKENS]
        tokens = tf.ragged.map_flat_values(vocabulary.lookup, found)
        return {"tokens": tokens.to_tensor(shape=[None, tables.TOKENS]), "label": batch["label"]}

    return make


def _tabular(examples: Any) -> dict[str, Any]:
    stored: dict[str, Any] = {f"number_{i}": tf.io.FixedLenFeature([], tf.float32) for i in range(tables.NUMBERS)}
    stored |= {f"category_{i}": tf.io.FixedLenFeature([], tf.int64) for i in range(tables.CATEGORIES)}
    stored["label"] = tf.io.FixedLenFeature([], tf.int64)
    batch = tf.io.parse_example(examples, stored)
    numbers = tf.stack([batch[f"number_{i}"] for i in range(tables.NUMBERS)], axis=1)
    gaps = tf.math.is_nan(numbers)
    numbers = tf.where(gaps, 0.0, numbers)
    numbers = tf.sign(numbers) * tf.math.log1p(tf.abs(numbers))
    categories = tf.stack([batch[f"category_{i}"] for i in range(tables.CATEGORIES)], axis=1)
    salt = tf.constant(np.arange(tables.CATEGORIES) * 0x85EBCA77, tf.int64)
    return {
        "features": tf.concat([numbers, tf.cast(gaps, tf.float32)], axis=1),
        "categories": (categories * 0x9E3779B1 + salt) % tables.BUCKETS,
        "label": tf.cast(batch["label"], tf.float32),
    }


def data(task: protocol.Task, *, antialias: bool = False) -> tuple[Any, float]:
    """Batches of a task, and the seconds of a conversion before."""
    made = of_tables(task) if task.workload in tables.NAMES else (of_images(task, antialias=antialias), 0.0)
    return made[0].with_options(options()), made[1]
