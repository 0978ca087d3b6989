"""Training on several hosts: where the workers are, and where preprocessing is."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from offload.report.run_dir import read_lines
from tests.emulation import Hosts, HostSpec
from tests.emulation.history import each_pass, read_history
from tests.emulation.netns import Host, HostProcess
from tests.helpers import RAY_STARTS_NOTHING_AHEAD, ROOT, require_hosts

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

CORES = sorted(os.sched_getaffinity(0))

SCRIPT = '''
import json, os, socket, sys, time
import numpy as np, ray, ray.train, torch
import offload
from offload.train.cluster.connection import on_this_node

class Somewhere:
    def host(self):
        return socket.gethostname()

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

ray.init(log_to_driver=False)
actors = [on_this_node(ray.remote(Somewhere)).remote() for _ in range(4)]
beside = sorted({ray.get(actor.host.remote()) for actor in actors})
scaling = ray.train.ScalingConfig(resources_per_worker={"CPU": 1, "gpu_slot": 1})
result = offload.Trainer(train, datasets={"train": Where(sys.argv[2])}, workers=1, batch_size=20, scaling_config=scaling).fit(
    run_dir=sys.argv[1], quiet=True
)
print(json.dumps({"metrics": result.metrics, "cores": result.document["preprocessing_cores"], "beside": beside}))
'''


@pytest.fixture(autouse=True, scope="module")
def _hosts_can_be_emulated() -> None:
    require_hosts()


def test_a_worker_that_takes_a_core_of_its_host_finds_it_free(tmp_path: Path) -> None:
    """Preprocessing takes the cores that the workers leave, node by node: one too many on the worker's host, and the
    worker would wait for its CPU without an end."""
    specs = {
        "gpu-1": HostSpec(core=tuple(CORES), shm_bytes=256 << 20),
        "cpu-1": HostSpec(core=tuple(CORES), shm_bytes=256 << 20),
    }
    with Hosts(specs) as hosts:
        hosts.start_ray(
            head="gpu-1",
            num_cpus={"gpu-1": 2, "cpu-1": 2},
            env={"PYTHONPATH": str(ROOT), **RAY_STARTS_NOTHING_AHEAD},
            extra_args={"gpu-1": ['--resources={"gpu_slot": 1}']},
        )
        ran = hosts["gpu-1"].run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(tmp_path / "marker")],
            env={"PYTHONPATH": str(ROOT)},
            timeout=300,
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer = json.loads(ran.stdout.strip().splitlines()[-1])
    metrics = Counter(answer["metrics"])
    assert answer["cores"] == 3
    # The hub and its like need no CPU. They live beside the driver, or each of their answers would cross the network.
    assert answer["beside"] == ["gpu-1"]
    assert metrics["workers_at_gpu"] == 1
    assert metrics["at_gpu"] + metrics["elsewhere"] == 600
    assert metrics["elsewhere"] > 0


AHEAD = """
import time, psutil, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from offload import preload
from offload.train.cluster.connection import import_ahead

@ray.remote(num_cpus=0)
def serves():
    return any(part.endswith("preload/server.py") for each in psutil.process_iter(["cmdline"]) for part in each.info["cmdline"] or ())

ray.init(log_to_driver=False)
home = ray.get_runtime_context().get_node_id()
(away,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != home]
there = serves.options(scheduling_strategy=NodeAffinitySchedulingStrategy(away, soft=False))
assert not ray.get(there.remote())
import_ahead([home, away], preload.runtime_env({}))
deadline = time.monotonic() + 120
while not ray.get(there.remote()):
    assert time.monotonic() < deadline, "no server of imports"
    time.sleep(0.1)
"""


def test_other_nodes_import_while_the_hub_starts() -> None:
    """Otherwise CPU nodes would import only once the hub has started their processes, and training would begin without them."""
    with Hosts({"gpu-1": HostSpec(), "cpu-1": HostSpec()}) as hosts:
        env = {"PYTHONPATH": str(ROOT), **RAY_STARTS_NOTHING_AHEAD}
        hosts.start_ray(head="gpu-1", num_cpus={"gpu-1": 1, "cpu-1": 1}, env=env)
        ran = hosts["gpu-1"].run([sys.executable, "-c", AHEAD], env={"PYTHONPATH": str(ROOT)}, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]


KILLED = """
import json, sys, time
from pathlib import Path
import numpy as np, ray.data, ray.train, torch
import offload
from tests.emulation.history import log_batch

SAMPLES, EPOCHS = 400, 2

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES
    def __getitem__(self, i):
        time.sleep(0.002)
        return {"x": np.full(2, i / SAMPLES, dtype=np.float32)}

def train(ctx):
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    folder = Path(ctx.config["log"])
    for _ in ctx.epochs(EPOCHS):
        for batch in ctx.batches("train"):
            log_batch(ctx, {"sample_id": batch["id"] if "id" in batch else batch["sample_id"]}, folder, ctx.config["driver"])
            kills = ctx.global_step // 20  # that must have been by now
            while kills and kills <= ctx.config["kills"] and not (folder.parent / f"killed-{kills}").exists():
                time.sleep(0.05)
            time.sleep(0.1)  # for checkpoints in between
            ctx.backward(model(batch["x"]).mean())
            ctx.step()

def numbers(batch):
    time.sleep(0.002 * len(batch["id"]))
    return {"id": batch["id"], "x": np.repeat(batch["id"][:, None] / SAMPLES, 2, 1).astype(np.float32)}

folder = Path(sys.argv[1])
(folder / "log").mkdir(parents=True, exist_ok=True)
if sys.argv[4] == "dataset":
    ray.init(address="auto")
    source = ray.data.range(SAMPLES, override_num_blocks=9).map_batches(numbers)
else:
    source = offload.from_torch(Numbers())
offload.Trainer(
    train,
    datasets={"train": source},
    workers=(1, 2),
    batch_size=16,
    adaptation=offload.Adaptation(schedule={0: 2}),
    checkpoints=offload.Checkpoints(every_s=1.0, every_epochs=100),
    scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5, "place": 1}, placement_strategy="SPREAD"),
    train_loop_config={"log": str(folder / "log"), "driver": int(sys.argv[2]), "kills": int(sys.argv[3])},
).fit(run_dir=folder / "run", quiet=True)
"""


@pytest.mark.parametrize(
    ("last", "source"),
    [
        pytest.param("offload.Trainer(", "samples", marks=pytest.mark.soak),
        pytest.param("offload.Trainer(", "dataset", marks=pytest.mark.soak),
        pytest.param("ray::TrainController", "samples", marks=pytest.mark.soak),
    ],
)
def test_processes_may_be_killed_and_the_run_is_correct(tmp_path: Path, last: str, source: str) -> None:
    """A host with a worker is lost, then the driver or Ray Train's controller, with which the command ends; given again it
    resumes. (Workers that die: test_elastic.py.)"""
    # One after the other: whose command line holds this, on this host. With its raylet a host is lost.
    victims = (("raylet/raylet", "cpu-1"), (last, "gpu-1"))
    specs = {
        "gpu-1": HostSpec(core=tuple(CORES), shm_bytes=256 << 20),
        "cpu-1": HostSpec(core=tuple(CORES), shm_bytes=256 << 20),
    }
    with Hosts(specs) as hosts:
        place = ["--resources", json.dumps({"place": 1})]  # a worker each
        hosts.start_ray(
            head="gpu-1", num_cpus={"gpu-1": 2, "cpu-1": 2}, env={"PYTHONPATH": str(ROOT), **RAY_STARTS_NOTHING_AHEAD},
            extra_args=dict.fromkeys(specs, place),
        )  # fmt: skip

        def command(number: int) -> HostProcess:
            argv = [sys.executable, "-c", KILLED, str(tmp_path), str(number), str(len(victims)), source]
            return hosts["gpu-1"].popen(argv, env={"PYTHONPATH": str(ROOT)})

        run = command(0)
        for count, (victim, where) in enumerate(victims, start=1):
            wait_for_step(run, tmp_path / "log", 20 * count, attempt=count)
            assert kill(hosts[where], victim), victim
            (tmp_path / f"killed-{count}").touch()
        assert run.wait(timeout=300) != 0
        assert command(1).wait(timeout=300) == 0
        assert each_pass(read_history(tmp_path / "log")) == {n: Counter(range(400)) for n in range(2)}
        events = read_lines(tmp_path / "run" / "events.jsonl")
        first, *later = [event["workers"] for event in events if event["event"] == "first_step"]
        assert (first, set(later)) == (2, {1})


def kill(host: Host, victim: str) -> int:
    """Kill the host's processes whose command line holds this. Returns how many there were."""
    killed = 0
    for pid in host.pids():
        with contextlib.suppress(psutil.NoSuchProcess):  # others come and go
            process = psutil.Process(pid)
            if victim in " ".join(process.cmdline()):
                process.kill()
                killed += 1
    return killed


def wait_for_step(run: HostProcess, log: Path, step: int, attempt: int) -> None:
    """Of this attempt or a later one."""

    def steps() -> Iterator[int]:
        for path in log.glob("*-0.jsonl"):
            if int(path.name.partition("-")[0]) >= attempt:
                yield from (line["step"] for line in read_lines(path))

    deadline = time.monotonic() + 120
    while max(steps(), default=0) < step:
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
