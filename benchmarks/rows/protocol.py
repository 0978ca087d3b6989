"""What a row receives, what it must do and what it answers. The same rule measures every row.

A row is a module run as `python -m benchmarks.rows.<name> --workload … --samples N …` inside the host that stands for
the GPU instance. It feeds N samples in batches to a consumer. The consumer only counts them or, with `--alpha` and
`--beta`, occupies a paced accelerator. The row prints its result, one JSON object, as the last line of its standard
output. If a Ray cluster is up, `RAY_ADDRESS` and the token are in the row's environment.

A new row needs little more than

    task = protocol.parse()
    ...                                             # import and prepare everything here; this is not measured
    result = protocol.consume(task, lambda: batches)  # in whichever process the batches arrive
    protocol.answer(result)                         # in the process that was started

The rule:

* The **steady state** lasts from the first batch after 40 % of the samples to the first batch after 90 %. Before that, a row that
  preprocesses while its consumer still starts uses up a lead, and would seem faster than its cores.
* Its rate is the slope of a least-squares line through (samples received, time of arrival). Batches arrive in bursts as large as a
  block, so two end points would be off by up to a burst each.
* **stall** is the part of the steady state that the consumer spent waiting in `next()`.
* **first_batch_s** runs from the request for the iterator, in a process that has imported everything, to the arrival of the first batch.
* The process that started the row measures CPU time. When the steady state begins and ends, the row writes a line to the named pipe
  `--events`, and that process reads the hosts' counters.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ANSWER = "result: "
STEADY_FROM, STEADY_TO = 0.4, 0.9
MAX_GAP = 0.3  # of the steady state may pass between two batches; with longer gaps it is only two or three bursts
TOO_FEW = "pass more"  # how the error of a row begins that cannot be measured with so few samples: long ones are cut
STEADY_BEGINS, STEADY_ENDS = "steady-begins", "steady-ends"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a row receives."""

    workload: str
    samples: int
    batch_size: int = 64
    data: str | None = None
    """Folder of JPEG or Parquet files."""
    alpha_s: float = 0.0
    beta_s: float = 0.0
    """The paced accelerator takes alpha_s + beta_s · batch size per batch; both 0: none."""
    hosts: int = 1
    """On how many hosts the row runs."""
    events: str | None = None
    """Named pipe to which the row writes when the steady state begins and ends."""

    def argv(self) -> list[str]:
        given = {key: value for key, value in asdict(self).items() if value is not None}
        return [f"--{key.removesuffix('_s').replace('_', '-')}={value}" for key, value in given.items()]

    @property
    def data_folder(self) -> Path | None:
        return None if self.data is None else Path(self.data)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a row answers. `extra` holds figures that only one row has."""

    samples: int
    samples_per_s: float
    first_batch_s: float
    stall: float
    steady_s: float
    """Length of the steady state."""
    first_batch_at_s: float
    """When the first batch arrived, on the machine's monotonic clock."""
    batch: Mapping[str, str]
    """Type and shape of each column of the first batch."""
    label_sum: int
    """The sum of all labels: a checksum that shows whether each sample arrived once."""
    extra: Mapping[str, float]


def folder(task: Task) -> Path:
    """The folder of the files that a task reads."""
    if task.data is None:
        raise SystemExit(f"the workload {task.workload} needs --data")
    return Path(task.data)


def parser() -> argparse.ArgumentParser:
    """Return a parser of the arguments that make a task."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--data")
    parser.add_argument("--alpha", type=float, default=0.0, dest="alpha_s")
    parser.add_argument("--beta", type=float, default=0.0, dest="beta_s")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--events")
    return parser


def parse(argv: list[str] | None = None) -> Task:
    return Task(**vars(parser().parse_args(argv)))


def consume(
    task: Task,
    request: Callable[[], Iterable[Mapping[str, Any]]],
    size: Callable[[Mapping[str, Any]], int] = lambda batch: len(batch["label"]),
    trained: Callable[[], None] = lambda: None,
) -> Result:
    """Request the iterator, take every batch from it, and measure. A batch is a mapping with a column `label`. When the accelerator has
    finished a batch, `trained` is called, as a training loop steps its optimizer."""
    accelerator = _accelerator(task)
    arrived: list[float] = []  # when each batch arrived
    counts: list[int] = []  # samples received up to and including the batch
    waits: list[float] = []  # how long the consumer waited for it
    received = label_sum = 0
    described: dict[str, str] = {}
    requested = time.monotonic()
    batches = iter(request())
    asked = requested
    while (batch := next(batches, None)) is not None:
        now = time.monotonic()
        before = received
        received += size(batch)
        arrived.append(now)
        counts.append(received)
        waits.append(now - asked)
        described = described or describe(batch)
        label_sum += int(np.asarray(batch["label"]).sum(dtype=np.int64))
        for share, event in ((STEADY_FROM, STEADY_BEGINS), (STEADY_TO, STEADY_ENDS)):
            if before < share * task.samples <= received:
                _tell(task, event)
        if accelerator is not None:
            accelerator.step(received - before)
        trained()
        del batch  # before fetching the next one: a consumer holds one batch, not two
        asked = time.monotonic()
    if received != task.samples:
        raise SystemExit(f"{received} samples arrived of {task.samples}")

    count, when = np.array(counts), np.array(arrived)
    first, last = steady_ends(count, task.samples)
    if last - first < 3:
        raise SystemExit(f"{TOO_FEW}: {task.samples} samples are too few to measure")
    steady_s = float(when[last] - when[first])
    if max(waits[first + 1 : last + 1]) > MAX_GAP * steady_s:
        raise SystemExit(f"{TOO_FEW}: {task.samples} samples arrive in too few bursts to speak of a steady state")
    return Result(
        samples=received,
        samples_per_s=steady_rate(count, when, task.samples),
        first_batch_s=arrived[0] - requested,
        stall=sum(waits[first + 1 : last + 1]) / steady_s,
        steady_s=steady_s,
        first_batch_at_s=arrived[0],
        batch=described,
        label_sum=label_sum,
        extra={},
    )


def describe(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return type and shape of each column, the same words for arrays and tensors of any library."""
    columns = {name: np.asarray(column) for name, column in batch.items()}
    return {name: f"{column.dtype} {'×'.join(map(str, column.shape))}" for name, column in columns.items()}


def _accelerator(task: Task) -> Any:
    if not (task.alpha_s or task.beta_s):
        return None
    from offload.paced import PacedAccelerator  # not in the environments of other libraries, which only count

    return PacedAccelerator(task.alpha_s, task.beta_s)


def steady_ends(count: Any, samples: int) -> tuple[int, int]:
    """Return the numbers of the first and the last batch of the steady state, from the samples received up to each batch."""
    first, last = (int(np.searchsorted(count, share * samples)) for share in (STEADY_FROM, STEADY_TO))
    return first, last


def steady_rate(count: Any, when: Any, samples: int) -> float:
    """Return samples/s in the steady state, from the samples received up to each batch and the times of arrival."""
    first, last = steady_ends(count, samples)
    steady = slice(first, last + 1)
    return float(1 / np.polyfit(count[steady], when[steady] - when[first], 1)[0])


def answer(result: Result) -> None:
    """Print the result where the process that started the row looks for it."""
    sys.stdout.flush()
    print("\n" + ANSWER + json.dumps(asdict(result)), flush=True)


def read_answer(stdout: str) -> Result:
    """Find the result in a row's output: libraries print on, too, while a row ends."""
    answers = [line for line in stdout.splitlines() if line.startswith(ANSWER)]
    return Result(**json.loads(answers[-1].removeprefix(ANSWER)))


def _tell(task: Task, event: str) -> None:
    if task.events is not None:
        with Path(task.events).open("w") as pipe:
            pipe.write(f"{event}\n")
