"""The images of a task as records of a storage format: for libraries that read shards of their own.

A record of the workload `jpeg` holds the bytes of a file and its label. Other images are computed from their ids, so that a record holds
the id alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.rows import protocol
from benchmarks.rows.peers.common import SHARD

Record = dict[str, Any]
"""`image`, the bytes of a JPEG file or nothing, and `number`, its label or its id."""


class Images:
    """The records of a task, and the sample of a record. Picklable, so that it can be sent to other processes."""

    def __init__(self, task: protocol.Task) -> None:
        self._workload = workloads.get(task.workload, task.data_folder)
        self._samples = task.samples

    def shards(self) -> Iterator[list[Record]]:
        """Yield the records of one pass, shard by shard."""
        for start in range(0, self._records, SHARD):
            yield [self._record(number) for number in range(start, start + SHARD)]

    def sample(self, record: Record) -> workloads.Sample:
        """Return the preprocessed sample of a record."""
        if isinstance(self._workload, workloads.Jpeg):
            return self._workload.transform(self._workload.decode(record["image"], record["number"]))
        return self._workload.make(int(record["number"]))

    @property
    def _records(self) -> int:
        if not isinstance(self._workload, workloads.Jpeg):
            return self._samples
        if len(self._workload.files) % SHARD:
            raise SystemExit(f"{len(self._workload.files)} JPEG files are not whole shards of {SHARD}")
        return len(self._workload.files)

    def _record(self, number: int) -> Record:
        if isinstance(self._workload, workloads.Jpeg):
            file = Path(self._workload.files[number])
            return {"image": file.read_bytes(), "number": self._workload.labels[number]}
        return {"image": b"", "number": number}
