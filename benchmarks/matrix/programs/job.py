"""A script runs as a job: `offload launch ray` submits it to the job API of a Ray head with a dashboard, shows its output and ends with
its exit code."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.matrix.programs.common import EPOCHS, SAMPLES, expect, run

UP_S = 120.0
LOOK_S = 0.5
SCRIPT = f"""
import numpy as np
import torch

import offload


def train(ctx):
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    for _ in ctx.epochs({EPOCHS}):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["x"]).mean())
            ctx.step()
    print("the script has trained", flush=True)


def build():
    samples = [{{"x": np.full(2, i, dtype=np.float32)}} for i in range({SAMPLES})]
    return offload.Trainer(train, datasets={{"train": offload.from_torch(samples)}}, batch_size=8)
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


@contextlib.contextmanager
def head(folder: Path) -> Iterator[str]:
    """A Ray head with a dashboard on this machine, at free ports. Yields the dashboard's address."""
    names = (
        "port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port", "metrics-export-port",
        "node-manager-port", "object-manager-port",
    )  # fmt: skip
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    url = f"http://127.0.0.1:{ports['dashboard-port']}"
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"),
        *("--object-store-memory=100000000", "--disable-usage-stats", "--node-ip-address=127.0.0.1"),
        *(f"--temp-dir={os.environ['RAY_TMPDIR']}/head",),
        *(f"--{name}={port}" for name, port in ports.items()),
    ]
    with (folder / "head.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_for(url, process, folder / "head.log")
            yield url
        finally:
            process.terminate()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the job API answers."""
    until = time.monotonic() + UP_S
    while True:
        expect(process.poll() is None, f"ray start ended: {log.read_text()[-1000:]}")
        expect(time.monotonic() < until, f"the dashboard did not answer: {log.read_text()[-1000:]}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/api/jobs/", timeout=LOOK_S * 10).close()
            return
        time.sleep(LOOK_S)


def program(folder: Path) -> dict[str, Any]:
    script = folder / "script" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    with head(folder) as url:
        # Jobs start the first python3 on the head's PATH.
        command = [sys.executable, "-m", "offload", "launch", "ray", str(script), "--address", url]
        command += ["--run-dir", str(folder / "run"), "--cpus-per-worker", "0.5"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    expect(done.returncode == 0, f"the job ended with {done.returncode}: {done.stdout[-2000:]}")
    expect("the script has trained" in done.stdout, f"its output is {done.stdout[-1000:]}")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    expect(summary["status"] == "finished", f"the run is {summary['status']}")
    return {"status": summary["status"]}


if __name__ == "__main__":
    run(program)
