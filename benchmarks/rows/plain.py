"""Row `plain`: one process, one core, no library in between. It shows what a core can do; the ideal is the sum over all cores."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import workloads
from benchmarks.rows import protocol


def main() -> None:
    task = protocol.parse()
    workload = workloads.get(task.workload, task.data_folder)
    workload.make(0)  # does the imports of the first sample

    def batches() -> Iterator[Mapping[str, Any]]:
        for start in range(0, task.samples, task.batch_size):
            ids = range(start, min(start + task.batch_size, task.samples))
            yield workloads.stack(workload.make(sample_id) for sample_id in ids)

    protocol.answer(protocol.consume(task, batches))


if __name__ == "__main__":
    main()
