"""Row `tfdata-service`: tf.data service. A worker on each host sends batches over gRPC; the dispatcher is in the process that consumes."""

import os
import time

import tensorflow as tf

from benchmarks.rows import protocol
from benchmarks.rows.peers import common, tfdata
from benchmarks.rows.peers.tfdata_worker import DISPATCHER_PORT

DEADLINE_S = 60.0


def main() -> None:
    task = protocol.parse()
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=DISPATCHER_PORT))
    until = time.monotonic() + DEADLINE_S
    while dispatcher._num_workers() < task.hosts:
        if time.monotonic() > until:
            raise SystemExit(f"{dispatcher._num_workers()} of {task.hosts} workers registered in {DEADLINE_S:.0f} s")
        time.sleep(0.1)
    batches, conversion_s = tfdata.data(task)
    # Each element of the source goes to one worker, so that an epoch has every sample once.
    batches = batches.apply(
        service.distribute(
            processing_mode=service.ShardingPolicy.DYNAMIC, service=f"grpc://{os.uname().nodename}:{DISPATCHER_PORT}"
        )
    )
    common.answer(task, lambda: batches.prefetch(2), conversion_s)


if __name__ == "__main__":
    main()
