"""Runs of real processes on emulated hosts with slow links: a worker with cores beside it, and a CPU host whose link carries little.

The samples sleep instead of computing, so that two cores can stand for many. Where it stops: :mod:`benchmarks.model_check` predicts the
rates and prints the table.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.emulation import Hosts, HostSpec

ROOT = Path(__file__).resolve().parent.parent
GPU_HOST, CPU_HOST = "gpu-1", "cpu-1"
PAYLOAD = 0.95  # of a link's bits: the rest is headers of Ethernet, IP and TCP
BATCH = 20
WARM_SHARE = 0.3
"""Of the samples, before the rate counts."""
DRAINED_S = 3.0
"""Seconds; the newest sample of a batch is younger once the worker has trained what cores made while it was starting."""
LATEST_SHARE = 0.5
"""Of the samples, by which that must be so: less than the rest does not tell the rate."""
STEADY_SHARE = 0.9
"""Of the samples, up to which the steady rate counts. As many bytes are then under way at both ends of the time."""
LONGER = 2
"""Times as many samples, after a run that was too short."""

SCRIPT = """
import json, sys, time
import numpy as np, ray, ray.train, torch
import offload
from benchmarks.slow_links import BATCH, Sleeping, Trained, rates

folder, seconds, size_bytes, samples, deterministic = sys.argv[1:]
dataset = Sleeping(int(samples), float(seconds), int(size_bytes))

def train(ctx):
    ctx.prepare(torch.nn.Linear(1, 1))
    batches = []
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ctx.backward(torch.zeros((), requires_grad=True))
            ctx.step()
            now = time.time()
            batches.append(Trained(now, len(batch["x"]), now - float(batch["made"].max())))
    found = rates(batches)
    ctx.report(**({} if found is None else found._asdict()))

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


class Trained(NamedTuple):
    """A batch: when it was trained (seconds of any clock), its samples, and the seconds since its newest sample was made."""

    at_s: float
    samples: int
    age_s: float


class Rates(NamedTuple):
    """Samples/s of a run: before its last blocks travel, and to its end."""

    steady: float
    to_the_end: float


def rates(batches: Sequence[Trained]) -> Rates | None:
    """The rates of a run, without what cores made while the worker was starting. None: nearly all samples were such.

    Samples arrive in bursts, so the steady rate is the slope of a line through the samples trained by each moment.
    """
    seen = np.cumsum([batch.samples for batch in batches])
    at_s = np.array([batch.at_s for batch in batches])
    fresh = (seen >= WARM_SHARE * seen[-1]) & (np.array([batch.age_s for batch in batches]) < DRAINED_S)
    first = int(np.argmax(fresh))
    if not fresh[first] or seen[first] > LATEST_SHARE * seen[-1]:
        return None
    last = int(np.searchsorted(seen, STEADY_SHARE * seen[-1]))
    moments = np.linspace(at_s[first], at_s[last], 1000)
    trained = seen[np.searchsorted(at_s, moments, side="right") - 1]
    slope = np.polyfit(moments - moments[0], trained, 1)[0]
    return Rates(float(slope), float((seen[-1] - seen[first]) / (at_s[-1] - at_s[first])))


def measure(link: Link, samples: int, *, deterministic: bool = False) -> Rates:
    """The rates of a run over so many samples, or over more if these were too few.

    Raises RuntimeError with the end of its output if it fails.
    """
    while (found := _run(link, samples, deterministic=deterministic)) is None:
        samples *= LONGER
    return found


def _run(link: Link, samples: int, *, deterministic: bool) -> Rates | None:
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
    return Rates(float(found["steady"]), float(found["to_the_end"])) if "steady" in found else None
