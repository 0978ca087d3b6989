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
from tests.emulation.history import each_pass, read_history
from tests.emulation.hosts import Hosts
from tests.emulation.netns import Host, HostProcess, HostSpec
from tests.helpers import RAY_STARTS_NOTHING_AHEAD, ROOT, require_hosts, write_jpegs
from tests.train.test_stored_index import IMAGES, write_tars

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

CORES = sorted(os.sched_getaffinity(0))

SCRIPT = '''
import json, os, socket, sys, time
from pathlib import Path
import numpy as np, psutil, ray, ray.train, torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
import offload
from offload import preload
from offload.pipeline.index import stored_rows
from offload.train.cluster.connection import import_ahead, on_this_node

stored_rows.IN_MEMORY = 10  # the index is on the driver's disk

@ray.remote(num_cpus=0)
def serves():
    commands = (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))
    return any(word.endswith("preload/server.py") for command in commands for word in command)

class Somewhere:
    def host(self):
        return socket.gethostname()

class Means:
    """Each host waits until the other one makes samples, too, or it might have made all before that has started."""
    def __init__(self, folder):
        self.folder = folder
    def __call__(self, batch):
        away = socket.gethostname() == "cpu-1"
        (self.folder / f"makes-{socket.gethostname()}").touch()
        while not all((self.folder / f"makes-{host}").exists() for host in ("gpu-1", "cpu-1")):
            time.sleep(0.05)
        x = np.array([[image.mean()] for image in batch["image"]], np.float32)
        return {"x": x, "away": np.full(len(x), away)}

def train(ctx):
    model = torch.nn.Linear(1, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))
    ids, away = [], 0
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ids += batch["sample_id"].tolist()
            away += int(batch["away"].sum())
            ctx.backward(model(batch["x"]).mean())
            ctx.step()
    Path(ctx.config["out"]).write_text(json.dumps({"ids": ids, "away": away, "worker": socket.gethostname()}))

folder = Path(sys.argv[1])
ray.init(log_to_driver=False)
home = ray.get_runtime_context().get_node_id()
(away,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != home]
there = serves.options(scheduling_strategy=NodeAffinitySchedulingStrategy(away, soft=False))
served = ray.get(there.remote())
import_ahead([home, away], preload.runtime_env({}))
deadline = time.monotonic() + 800
while not ray.get(there.remote()):
    assert time.monotonic() < deadline, "no server of imports"
    time.sleep(0.1)
actors = [on_this_node(ray.remote(Somewhere)).remote() for _ in range(4)]
beside = sorted({ray.get(actor.host.remote()) for actor in actors})
result = offload.Trainer(
    train,
    datasets={"train": offload.webdataset(folder / "tars", Means(folder))},
    workers=1,
    batch_size=4,
    scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 1, "gpu_slot": 1}),
    train_loop_config={"out": str(folder / "out")},
).fit(run_dir=folder / "run", quiet=True)
listings = len(list(Path(os.environ["XDG_CACHE_HOME"], "offload", "listings").glob("*/key.values")))
cores = result.document["preprocessing_cores"]
print(json.dumps({"served": served, "beside": beside, "cores": cores, "listings": listings}))
'''


@pytest.fixture(autouse=True, scope="module")
def _hosts_can_be_emulated() -> None:
    require_hosts()


def test_a_worker_finds_its_core_free_and_preprocessing_is_on_both_hosts(tmp_path: Path) -> None:
    """One run shows what several hosts differ in.

    * Other nodes import while the hub starts. Otherwise training would begin without them.
    * Preprocessing takes the cores that the workers leave, node by node. One too many on the worker's host, and the worker would
      wait for its CPU without an end.
    * The hub and its like live beside the driver, or each of their answers would cross the network.
    * The index is on the driver's host alone, since each host has a home of its own. The other node needs no file of it.
    """
    write_jpegs(tmp_path / "images", IMAGES)
    write_tars(tmp_path / "tars", tmp_path / "images")
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
            [sys.executable, "-c", SCRIPT, str(tmp_path)],
            env={"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": "/tmp/ray/cache"},
            timeout=800,
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout.strip().splitlines()[-1]) == {
        "served": False,
        "beside": ["gpu-1"],
        "cores": 3,
        "listings": 1,  # kept for later runs
    }
    trained = json.loads((tmp_path / "out").read_text())
    assert trained["worker"] == "gpu-1"
    assert sorted(trained["ids"]) == list(range(IMAGES))
    assert 0 < trained["away"] < IMAGES


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
        pytest.param("ray::Hub", "samples", marks=pytest.mark.soak),
    ],
)
def test_processes_may_be_killed_and_the_run_is_correct(tmp_path: Path, last: str, source: str) -> None:
    """A host with a worker is lost, then the driver or the run's hub, with which the command ends; given again it
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
        assert run.wait(timeout=800) != 0
        assert command(1).wait(timeout=800) == 0
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

    deadline = time.monotonic() + 800
    while max(steps(), default=0) < step:
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
