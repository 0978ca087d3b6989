"""The script whose rate `benchmarks/prediction.py` predicts and measures: `offload probe` and `offload run` take it.

    offload probe benchmarks/rows/predicted.py -- --workload jpeg --samples 100000 --data DIR --alpha 0.01 --beta 0.001

Each worker occupies a paced accelerator for each batch and records when its batches arrived.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import ray.train
import torch

import offload
from benchmarks.rows import protocol
from benchmarks.rows.dataloader import Samples
from benchmarks.rows.ray_script import TRAIN_RESOURCE
from offload.paced import PacedAccelerator


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The arrivals at one worker: samples received up to each batch, and when."""

    counts: list[int]
    at_s: list[float]

    def samples_per_s(self) -> float:
        """Return the rate in the steady state, measured as in every row."""
        count, when = np.array(self.counts), np.array(self.at_s)
        return protocol.steady_rate(count, when, int(count[-1]))

    def steady_s(self) -> tuple[float, float]:
        """Return when the steady state began and ended, on the machine's monotonic clock."""
        first, last = protocol.steady_ends(np.array(self.counts), self.counts[-1])
        return self.at_s[first], self.at_s[last]


def train(ctx: offload.Context) -> None:
    task = protocol.Task(**ctx.config["task"])
    nothing = torch.zeros((), requires_grad=True)
    accelerator = PacedAccelerator(task.alpha_s, task.beta_s)
    counts: list[int] = []
    at_s: list[float] = []
    ctx.prepare(torch.nn.Linear(1, 1), torch.optim.SGD([nothing], lr=0.0))
    received = 0
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            received += len(batch["label"])
            counts.append(received)
            at_s.append(time.monotonic())
            accelerator.step(len(batch["label"]))
            ctx.backward(nothing * 1.0)
            ctx.step()
    arrivals = Arrivals(counts=counts, at_s=at_s)
    Path(ctx.config["answers"], f"rank-{ctx.rank}.json").write_text(json.dumps(asdict(arrivals)))


def build() -> offload.Trainer:
    parser = protocol.parser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--answers", default=".")
    parser.add_argument(
        "--on-hosts", action="store_true", help="run workers on marked hosts, where they reserve no core"
    )
    given = vars(parser.parse_args())
    workers, answers, on_hosts = (given.pop(name) for name in ("workers", "answers", "on_hosts"))
    return trainer(protocol.Task(**given), workers=workers, answers=answers, on_hosts=on_hosts)


def trainer(task: protocol.Task, *, workers: int = 1, answers: str = ".", on_hosts: bool = False) -> offload.Trainer:
    """The trainer of a task. ``answers``: the folder in which the workers write when their batches arrived."""
    torch.set_num_threads(1)
    resources = {"CPU": 0.0} | ({TRAIN_RESOURCE: 1.0} if on_hosts else {})
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Samples(task))},
        workers=workers,
        batch_size=task.batch_size,
        scaling_config=ray.train.ScalingConfig(resources_per_worker=resources),
        train_loop_config={"task": asdict(task), "answers": answers},
    )


def answered(folder: Path) -> list[Arrivals]:
    """The arrivals at each worker, from the folder of answers."""
    return [Arrivals(**json.loads(path.read_text())) for path in sorted(folder.glob("rank-*.json"))]
