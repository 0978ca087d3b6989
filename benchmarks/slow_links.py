"""Runs of real processes on emulated hosts with slow links: a worker with cores beside it, and a CPU host whose link carries little.

The samples sleep instead of computing, so that two cores can stand for many. Where it stops: :mod:`benchmarks.model_check` predicts the
rates and prints the table.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from offload.testing import Hosts, HostSpec

ROOT = Path(__file__).resolve().parent.parent
GPU_HOST, CPU_HOST = "gpu-1", "cpu-1"
PAYLOAD = 0.95  # of a link's bits: the rest is headers of Ethernet, IP and TCP
BATCH = 20
WARM_SHARE = 0.3
"""Of the samples, before the rate counts."""
DRAINED_S = 1.0
"""Seconds; the newest sample of a batch is younger once the worker has trained what cores made while it was starting."""
STEADY_SHARE = 0.9
"""Of the samples, up to which the steady rate counts. As many bytes are then under way at both ends of the time."""

SCRIPT = """
import json, sys, time
import numpy as np, ray, ray.train, torch
import offload
from benchmarks.slow_links import BATCH, DRAINED_S, STEADY_SHARE, WARM_SHARE, Sleeping

folder, seconds, size_bytes, samples, deterministic = sys.argv[1:]
dataset = Sleeping(int(samples), float(seconds), int(size_bytes))

def train(ctx):
    ctx.prepare(torch.nn.Linear(1, 1))
    seen, marks, n = 0, [], len(dataset)
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ctx.backward(torch.zeros((), requires_grad=True))
            ctx.step()
            seen += len(batch["x"])
            drained = bool(marks) or time.time() - float(batch["made"].max()) < DRAINED_S
            if len(marks) < 2 and drained and seen >= (WARM_SHARE, STEADY_SHARE)[len(marks)] * n:
                marks.append((time.monotonic(), seen))
    if len(marks) < 2:
        raise RuntimeError("the run was too short: nearly all of it trained what cores made while the worker was starting")
    marks.append((time.monotonic(), seen))
    rates = [(b[1] - marks[0][1]) / (b[0] - marks[0][0]) for b in marks[1:]]
    ctx.report(steady_samples_per_s=rates[0], samples_per_s=rates[1])

ray.init(log_to_driver=False)
result = offload.Trainer(
    train, datasets={"train": dataset}, workers=1, batch_size=BATCH, deterministic=deterministic == "yes",
    scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 1, "gpu_slot": 1}),
).fit(run_dir=folder, quiet=True)
print(json.dumps({**result.metrics, "cores": result.document["preprocessing_cores"]}))
"""


class Link(NamedTuple):
    """The preprocessing cores of the worker's host and of the CPU host (0: there is none), the link's Mbit/s, and a sample's seconds of a
    core and bytes."""

    near_cores: int
    far_cores: int
    mbit_per_s: float
    seconds: float
    size_bytes: int


class Sleeping:
    """Samples that take their time and hold so many bytes."""

    def __init__(self, samples: int, seconds: float, size_bytes: int) -> None:
        self.samples, self.seconds, self.size_bytes = samples, seconds, size_bytes

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        time.sleep(self.seconds)
        return {"x": np.full(self.size_bytes, i % 251, dtype=np.uint8), "made": np.array(time.time())}


def core_seconds(seconds: float) -> float:
    """What a sample takes of a core by the clock: sleeping takes a little longer than it should."""
    one = Sleeping(1, seconds, 1)
    began = time.perf_counter()
    for _ in range(100):
        one[0]
    return (time.perf_counter() - began) / 100


class Rates(NamedTuple):
    """Samples/s of a run: before its last blocks travel, and to its end."""

    steady: float
    to_the_end: float


def measure(link: Link, samples: int, *, deterministic: bool = False) -> Rates:
    """The rates of a run over so many samples.

    Raises RuntimeError with the end of its output if it fails.
    """
    specs = {GPU_HOST: HostSpec(shm_bytes=2 << 30)}
    if link.far_cores:
        specs[CPU_HOST] = HostSpec(shm_bytes=2 << 30, mbit_per_s=link.mbit_per_s)
    cpus = {GPU_HOST: link.near_cores + 1, CPU_HOST: link.far_cores}
    env = {"PYTHONPATH": str(ROOT), "RAY_TRAIN_ENABLE_STATE_TRACKING": "0"}
    arguments = (link.seconds, link.size_bytes, samples, "yes" if deterministic else "no")
    with tempfile.TemporaryDirectory() as folder, Hosts(specs) as hosts:
        hosts.start_ray(
            head=GPU_HOST,
            num_cpus={name: cpus[name] for name in specs},
            env=env,
            extra_args={GPU_HOST: ['--resources={"gpu_slot": 1}']},
        )
        ran = hosts[GPU_HOST].run(
            [sys.executable, "-c", SCRIPT, f"{folder}/run", *map(str, arguments)], env=env, timeout=600
        )
    if ran.returncode:
        raise RuntimeError(ran.stderr[-2000:])
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    if found["cores"] != link.near_cores + link.far_cores:
        raise RuntimeError(f"{found['cores']} cores preprocessed, of {link.near_cores + link.far_cores}")
    return Rates(float(found["steady_samples_per_s"]), float(found["samples_per_s"]))
