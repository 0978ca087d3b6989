"""What a Ray user sees of a run: actors by name, the output in Ray's logs, and the run itself through the cluster."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import offload
from offload.callbacks import Prometheus
from offload.report.page.records import RunReader
from offload.train.hub.run_names import hub_of, runs
from tests.helpers import ROOT, eventually


def train(ctx: offload.Context) -> None:
    model, _ = ctx.prepare(m := torch.nn.Linear(1, 1), torch.optim.SGD(m.parameters(), lr=0.01))
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["x"][:, None]).mean())
            ctx.step()
    print("the user prints this")
    logging.getLogger("user").warning("the user logs this")
    Path(ctx.config["pid"]).write_text(str(os.getpid()))
    while not Path(ctx.config["looked"]).exists():
        ctx.report(waits=1)
        time.sleep(0.2)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_is_found_by_name_and_its_output_in_ray_s_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looked, pid = tmp_path / "looked", tmp_path / "pid"
    rows = [{"x": torch.zeros(())} for _ in range(8)]
    trainer = offload.Trainer(
        train,
        datasets={"train": offload.from_torch(rows)},
        workers=1,
        batch_size=4,
        callbacks=[Prometheus()],
        train_loop_config={"looked": str(looked), "pid": str(pid)},
    )
    running = threading.Thread(target=lambda: trainer.fit(run_dir=tmp_path / "vit"))

    def logged(kind: str, text: str) -> bool:
        # Ray opens a worker's log files as its standard streams.
        log = Path("/proc", pid.read_text(), "fd", {"out": "1", "err": "2"}[kind]).readlink()
        return log.match(f"worker-*-{pid.read_text()}.{kind}") and text in log.read_text()

    running.start()
    try:
        eventually(lambda: "vit" in runs())
        through = RunReader(tmp_path, hub_of("vit").tails)
        eventually(lambda: through.read().intervals["step"].max(initial=0) == 2)
        eventually(pid.exists)
        eventually(lambda: logged("out", "the user prints this") and logged("err", "the user logs this"))
    finally:
        looked.touch()
        running.join()
    eventually(lambda: "vit" not in runs())
    assert "this Ray serves no metrics, so Prometheus finds none" in capsys.readouterr().err


SEEN = """
import json, os, subprocess, sys, threading, time
from pathlib import Path

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300"}
import ray, torch
from ray.util.state import list_actors

import offload
from offload.report.page.records import RunReader
from offload.train.hub.run_names import hub_of, runs
from tests.helpers import eventually
from tests.prometheus import free_port

folder = Path(sys.argv[1])
seen, looked = {}, folder / "looked"

def train(ctx):
    model, _ = ctx.prepare(m := torch.nn.Linear(1, 1), torch.optim.SGD(m.parameters(), lr=0.01))
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["x"][:, None]).mean())
            ctx.step()
    while not looked.exists():
        ctx.report(waits=1)
        time.sleep(0.2)

def fit():
    rows = [{"x": torch.zeros(())} for _ in range(8)]
    trainer = offload.Trainer(train, datasets={"train": offload.from_torch(rows)}, workers=1, batch_size=4)
    trainer.fit(run_dir=folder / "vit", quiet=True)

def actors():
    alive = (each for each in list_actors(address=dashboard, detail=True) if each.state == "ALIVE")
    return {each.repr_name or each.name or each.class_name: each for each in alive}

context = ray.init("local", num_cpus=2, dashboard_port=free_port(), include_dashboard=True, log_to_driver=False)
dashboard = f"http://{context.dashboard_url}"
running = threading.Thread(target=fit)
running.start()
try:
    eventually(lambda: runs() == ["vit"])
    eventually(lambda: RunReader(folder, hub_of("vit").tails).read().intervals["step"].max(initial=0) == 2)
    eventually(lambda: "vit worker" in actors())
    seen["actors"] = sorted(actors())
    command = [sys.executable, "-m", "offload", "watch", "--address", context.address_info["gcs_address"], "--json"]
    seen["watched"] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
finally:
    looked.touch()
    running.join()
eventually(lambda: runs() == [])
print(json.dumps(seen))
"""


@pytest.mark.soak  # Ray's dashboard is ten more processes
def test_a_ray_user_finds_the_run_where_others_are(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEEN, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    rays_own = {"SynchronizationActor"}
    assert set(seen["actors"]) - rays_own == {"vit desk", "vit hub", "vit worker", "vit preprocessing"}
    assert (seen["watched"]["name"], seen["watched"]["status"]) == ("vit", "unfinished")
    assert dict(seen["watched"]["facts"])["trained"].startswith("step 2,")
