"""Rows `dataset-1-host` and `dataset-2-hosts`: offload on the `ray.data.Dataset` of the Ray script, unchanged."""

import logging

import ray

from benchmarks.rows import offload_row, protocol, ray_script


def main() -> None:
    task = protocol.parse()
    ray.init(address="auto", logging_level=logging.ERROR)
    offload_row.run(task, ray_script.dataset(task))


if __name__ == "__main__":
    main()
