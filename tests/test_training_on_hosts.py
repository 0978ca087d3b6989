"""Training on several hosts: where the workers are, and where preprocessing is."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from offload.testing import Hosts, HostSpec
from tests.helpers import require_hosts

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
CORES = sorted(os.sched_getaffinity(0))

SCRIPT = '''
import json, os, socket, sys, time
import numpy as np, ray.train, torch
import offload

class Where(torch.utils.data.Dataset):
    """The worker's host waits until the other one has made a sample, or it might be done before that has started."""
    def __init__(self, marker):
        self.marker = marker
    def __len__(self):
        return 600
    def __getitem__(self, i):
        at_gpu = socket.gethostname() == "gpu-1"
        if not at_gpu:
            open(self.marker, "a").close()
        while not os.path.exists(self.marker):
            time.sleep(0.05)
        return {"host": np.int64(at_gpu)}

def train(ctx):
    ctx.prepare(torch.nn.Linear(1, 1))
    here = int(socket.gethostname() == "gpu-1")
    counts = {True: 0, False: 0}
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            at_gpu = int(batch["host"].sum())
            counts[True] += at_gpu
            counts[False] += len(batch["host"]) - at_gpu
            ctx.backward(torch.zeros((), requires_grad=True))
            ctx.step()
    ctx.report(at_gpu=ctx.sum(counts[True]), elsewhere=ctx.sum(counts[False]), workers_at_gpu=ctx.sum(here))

scaling = ray.train.ScalingConfig(resources_per_worker={"CPU": 1, "gpu_slot": 1})
result = offload.Trainer(train, datasets={"train": Where(sys.argv[2])}, workers=1, batch_size=20, scaling_config=scaling).fit(
    run_dir=sys.argv[1], quiet=True
)
print(json.dumps({"metrics": result.metrics, "cores": result.document["preprocessing_cores"]}))
'''


@pytest.fixture(autouse=True, scope="module")
def _hosts_can_be_emulated() -> None:
    require_hosts()


def test_a_worker_that_takes_a_core_of_its_host_finds_it_free(tmp_path: Path) -> None:
    """Preprocessing takes the cores that the workers leave, node by node: one too many on the worker's host, and the
    worker would wait for its CPU without an end."""
    specs = {
        "gpu-1": HostSpec(core=CORES[0], shm_bytes=256 << 20),
        "cpu-1": HostSpec(core=CORES[-1], shm_bytes=256 << 20),
    }
    with Hosts(specs) as hosts:
        hosts.start_ray(
            head="gpu-1",
            num_cpus={"gpu-1": 2, "cpu-1": 2},
            env={"PYTHONPATH": str(ROOT)},
            extra_args={"gpu-1": ['--resources={"gpu_slot": 1}']},
        )
        ran = hosts["gpu-1"].run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(tmp_path / "marker")],
            env={"PYTHONPATH": str(ROOT)},
            timeout=150,
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer = json.loads(ran.stdout.strip().splitlines()[-1])
    metrics = Counter(answer["metrics"])
    assert answer["cores"] == 3
    assert metrics["workers_at_gpu"] == 1
    assert metrics["at_gpu"] + metrics["elsewhere"] == 600
    assert metrics["elsewhere"] > 0


BESIDE = """
import socket
import ray
from offload.train.cluster import on_this_node

ray.init(log_to_driver=False)

class Somewhere:
    def host(self):
        return socket.gethostname()

actors = [on_this_node(ray.remote(Somewhere)).remote() for _ in range(6)]
print(sorted(set(ray.get([actor.host.remote() for actor in actors]))))
"""


def test_an_actor_without_a_cpu_lives_beside_its_driver() -> None:
    """The run's actor: elsewhere, each of its answers would cross the network, and it would die with another node."""
    specs = {
        "gpu-1": HostSpec(core=CORES[0], shm_bytes=256 << 20),
        "cpu-1": HostSpec(core=CORES[-1], shm_bytes=256 << 20),
    }
    with Hosts(specs) as hosts:
        hosts.start_ray(head="gpu-1")
        ran = hosts["gpu-1"].run([sys.executable, "-c", BESIDE], env={"PYTHONPATH": str(ROOT)}, timeout=150)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.strip().splitlines()[-1] == "['gpu-1']"
