"""Row `tfdata`: whether TensorFlow reads a file from S3 at all. The row ends with TensorFlow's error if not."""

import argparse

import tensorflow as tf

from benchmarks.rows.protocol import ANSWER

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--key", required=True)
    try:
        print(f"{ANSWER}{len(tf.io.read_file(parser.parse_args().key).numpy())}")
    except tf.errors.OpError as error:
        raise SystemExit(f"TensorFlow {tf.__version__}: {error.message}") from None
