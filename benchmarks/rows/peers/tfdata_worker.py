"""The worker of the row `tfdata-service`: a process on each host, until the row ends."""

import argparse
import os

import tensorflow as tf

DISPATCHER_PORT, WORKER_PORT = 5050, 5051


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--head", required=True)
    head = parser.parse_args().head
    service = tf.data.experimental.service
    config = service.WorkerConfig(
        dispatcher_address=f"{head}:{DISPATCHER_PORT}",
        worker_address=f"{os.uname().nodename}:{WORKER_PORT}",
        port=WORKER_PORT,
    )
    service.WorkerServer(config).join()


if __name__ == "__main__":
    main()
