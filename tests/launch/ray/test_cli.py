"""`offload launch ray` on a real cluster: an emulated host with Ray's dashboard and its token, and a user's machine beside it that is none
of its nodes. Runs on several hosts: tests/train/driver/test_training_on_hosts.py."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.emulation import Hosts, HostSpec
from tests.helpers import RAY_STARTS_NOTHING_AHEAD, ROOT, require_hosts

pytestmark = [pytest.mark.hosts, pytest.mark.ray, pytest.mark.slow]

CORES = sorted(os.sched_getaffinity(0))
DEADLINE_S = 800.0
DASHBOARD = 8265

SCRIPT = """
import argparse
import time
from pathlib import Path

import helper
import numpy as np
import torch

import offload

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 320
    def __getitem__(self, i):
        return {"x": np.full(2, i / 320, dtype=np.float32), "travelled": np.int64("working_dir_files" in offload.__file__)}

def train(ctx):
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    args = ctx.config["args"]
    for _ in ctx.epochs(args.epochs):
        for batch in ctx.batches("train"):
            loss = (model(batch["x"]) ** 2).mean()
            ctx.backward(loss)
            ctx.step()
            if args.what == "raise" and ctx.global_step == 3:
                raise ValueError("the third step is cursed")
            if args.what == "slow" and not Path(args.shared, "go").exists():
                Path(args.shared, "trains").touch()
                time.sleep(0.1)
        ctx.report(
            loss=loss,
            workers=ctx.sum(1),
            travelled=float(batch["travelled"].min()),
            worker_travelled=float("working_dir_files" in offload.__file__),
        )

def build():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--shared", default="")
    parser.add_argument("--what", choices=["", "raise", "slow"], default="")
    args = parser.parse_args()
    print("built with", helper.NAME, flush=True)
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Numbers())},
        workers=1,
        batch_size=16,
        train_loop_config={"args": args},
    )
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A cluster, and a user's machine that reaches it."""

    hosts: Hosts
    url: str
    token: dict[str, str]
    script: Path

    def command(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "offload", *map(str, arguments)]

    def environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        return {**kept, "PYTHONPATH": str(ROOT), **self.token, **more}

    def offload(self, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """The command on the user's machine."""
        return subprocess.run(
            self.command(*arguments),
            capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=self.environment(**env),
        )  # fmt: skip

    def launch(self, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        return self.offload("launch", "ray", "--address", self.url, *arguments, **env)

    def read(self, run_dir: str, name: str) -> str:
        """A file of a run directory on the head."""
        home = self.hosts["head"].folder / "home"
        return Path(run_dir.replace("~", str(home)), name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    require_hosts()
    folder = tmp_path_factory.mktemp("mine")
    (folder / "train_it.py").write_text(SCRIPT)
    (folder / "helper.py").write_text("NAME = 'a module beside the script'\n")
    with Hosts({"head": HostSpec(core=tuple(CORES), shm_bytes=256 << 20)}) as hosts:
        hosts.start_ray(
            head="head",
            num_cpus={"head": 3},
            dashboard=True,
            # As on a host whose environment is activated. The job brings offload: it is not on these hosts' PYTHONPATH.
            env={
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": "",
                **RAY_STARTS_NOTHING_AHEAD,
            },
            extra_args={"head": ["--dashboard-host=0.0.0.0", f"--dashboard-port={DASHBOARD}"]},
        )
        token = {name: hosts["head"].env[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
        url = f"http://{hosts['head'].address}:{DASHBOARD}"
        yield Place(hosts=hosts, url=url, token=token, script=folder / "train_it.py")


def until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.1)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """What a user is told, before anything was started."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "started" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_script_runs_as_a_job(place: Place) -> None:
    two = ["--max-workers", "2", "--cpus-per-worker", "0.5"]  # numbers of workers are the command line's
    job = place.launch(place.script, "--name", "same", "--json", *two)
    assert job.returncode == 0, job.stderr
    document = json.loads(job.stdout)
    assert (document["status"], document["exit_code"], document["run_dir"]) == (
        "SUCCEEDED",
        0,
        f"~/offload-runs/{getpass.getuser()}/same",
    )
    assert "built with a module beside the script" in job.stderr
    run = json.loads(place.read(document["run_dir"], "summary.json"))
    assert (run["status"], run["metrics"]["workers"]) == ("finished", 2)
    # offload's own processes, whose runtime environment is set on top of the job's, import what travelled.
    assert (run["metrics"]["travelled"], run["metrics"]["worker_travelled"]) == (1, 1)


@pytest.mark.soak
def test_the_same_script_gives_the_same_loss_here_on_a_host_and_as_a_job(place: Place, tmp_path: Path) -> None:
    here = place.offload(
        "run", place.script, "--run-dir", tmp_path / "here", "--json", RAY_AUTH_TOKEN="", RAY_AUTH_MODE="disabled"
    )
    assert here.returncode == 0, here.stderr
    command = place.command("run", place.script, "--run-dir", tmp_path / "there", "--json", "--address")
    there = place.hosts["head"].run(
        [*command, str(place.hosts.ray_address)], env={"PYTHONPATH": str(ROOT)}, timeout=DEADLINE_S
    )
    assert there.returncode == 0, there.stderr
    job = place.launch(place.script, "--name", "alike", "--json")
    assert job.returncode == 0, job.stderr
    as_a_job = place.read(json.loads(job.stdout)["run_dir"], "summary.json")
    runs = [json.loads(text) for text in (here.stdout, there.stdout, as_a_job)]
    assert {run["status"] for run in runs} == {"finished"}
    losses = [run["metrics"]["loss"] for run in runs]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    travelled = [(run["metrics"]["travelled"], run["metrics"]["worker_travelled"]) for run in runs]
    assert travelled == [(0, 0), (0, 0), (1, 1)]


@pytest.mark.soak
def test_a_job_that_fails_ends_with_1_and_the_same_command_resumes_it(place: Place) -> None:
    failed = place.launch(place.script, "--name", "raises", "--", "--what", "raise")
    assert failed.returncode == 1
    assert "ValueError: the third step is cursed" in failed.stdout
    assert re.search(r"status +FAILED, exit code 1", failed.stdout)
    resumed = place.launch(place.script, "--name", "raises")
    assert resumed.returncode == 0, resumed.stdout
    events = place.read(f"~/offload-runs/{getpass.getuser()}/raises", "events.jsonl").splitlines()
    assert [e["event"] for e in map(json.loads, events) if e["event"].startswith("run_")] == [
        "run_started", "run_finished", "run_resumed", "run_finished",
    ]  # fmt: skip


def test_the_command_ends_as_the_run_does(place: Place) -> None:
    wrong = place.launch(place.script, "--name", "wrong", "--", "--what", "nonsense")
    assert wrong.returncode == 2
    assert "invalid choice: 'nonsense'" in wrong.stdout
    assert re.search(r"status +FAILED, exit code 2", wrong.stdout)


def test_ctrl_c_leaves_the_job_and_stop_commits_a_checkpoint(place: Place, tmp_path: Path) -> None:
    arguments = [place.script, "--name", "stopped", "--", "--what", "slow", "--shared", tmp_path, "--epochs", "5000"]
    following = subprocess.Popen(
        place.command("launch", "ray", "--address", place.url, *arguments),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=place.environment(),
    )  # fmt: skip
    until((tmp_path / "trains").exists, following)
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 130, said
    job = re.search(r"started (stopped-\S+) at", said)
    assert job is not None
    assert f"{job[1]} goes on: `offload launch ray --address {place.url} --status {job[1]}` shows it" in said
    assert "Traceback" not in said

    again = place.launch(*arguments)
    assert (
        f"the job {job[1]} already runs in ~/offload-runs/{getpass.getuser()}/stopped: stop it first (--stop {job[1]})"
        in refusal(again)
    )
    state = json.loads(place.launch("--status", job[1], "--json").stdout)
    assert (state["status"], state["exit_code"]) == ("RUNNING", None)

    stopped = place.launch("--stop", job[1], "--json")
    assert stopped.returncode == 0, stopped.stderr
    assert (json.loads(stopped.stdout)["status"], json.loads(stopped.stdout)["exit_code"]) == ("STOPPED", 130)
    assert "it first commits a checkpoint" in stopped.stderr
    summary = json.loads(place.read(f"~/offload-runs/{getpass.getuser()}/stopped", "summary.json"))
    assert summary["status"] == "interrupted"
    assert summary["checkpoint"] is not None


CONTRACT = """
import sys
from pathlib import Path
from offload.launch.ray.bundle import pack
from offload.launch.ray.job_api import JobApi
from offload.launch.ray.job import RayJob
from offload.launch.ray.launcher import RayLauncher, RaySubmission
from tests.helpers import eventually
from tests.launch import contract

_, url, token, script, built = sys.argv
submission = RaySubmission.of(RayJob(name="waits", user="me", script="waits.py"), pack(Path(script)))
contract.rendering_is_pure(submission, token)
contract.holds(RayLauncher(JobApi(url)), submission, lambda: eventually(Path(built).exists) is None)
"""


def test_what_every_launcher_promises(place: Place, tmp_path: Path) -> None:
    waits, built = tmp_path / "mine" / "waits.py", tmp_path / "built"
    waits.parent.mkdir()
    waits.write_text(f"""
import time
from pathlib import Path
def build():
    Path({str(built)!r}).touch()
    time.sleep({DEADLINE_S})
""")
    command = [sys.executable, "-c", CONTRACT, place.url, place.token["RAY_AUTH_TOKEN"], str(waits), str(built)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=place.environment()
    )
    assert done.returncode == 0, done.stderr


def test_a_token_that_is_missing_or_wrong(place: Place, tmp_path: Path) -> None:
    missing = refusal(place.launch(place.script, RAY_AUTH_MODE="disabled"))
    assert "asks for a token, and got none: here RAY_AUTH_MODE is disabled" in missing
    wrong = refusal(place.launch(place.script, RAY_AUTH_TOKEN="0" * 64))
    assert "refuses the token: here RAY_AUTH_MODE is token, and the token comes from RAY_AUTH_TOKEN" in wrong
    for text in (missing, wrong):
        assert text.endswith(
            "Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token."
        )
    file = tmp_path / "token"
    file.write_text(place.token["RAY_AUTH_TOKEN"])
    unknown = place.launch("--status", "nobody", RAY_AUTH_TOKEN_PATH=str(file), RAY_AUTH_TOKEN="")
    assert f"there is no job nobody at {place.url}" in refusal(unknown)


def test_other_ports_of_the_cluster_are_not_its_dashboard(place: Place) -> None:
    text = refusal(place.offload("launch", "ray", place.script, "--address", f"http://{place.hosts.ray_address}"))
    assert "is not a Ray dashboard" in text
    assert "(usually 8265)" in text


def test_a_driver_runs_on_nodes_only(place: Place, tmp_path: Path) -> None:
    address = str(place.hosts.ray_address)
    text = refusal(place.offload("run", place.script, "--address", address, "--run-dir", tmp_path / "run"))
    assert f"this machine is not a node of the Ray cluster at '{address}'" in text
    assert f"offload launch ray SCRIPT --address {place.url}" in text


ANOTHER_VERSION = """
import sys
import ray
from offload.errors import ConfigError
from offload.train.cluster.connection import connected
ray.__version__ = "2.59.1"
try:
    with connected(sys.argv[1]):
        print("joined")
except ConfigError as error:
    print(error)
"""


def test_another_ray_is_named_with_both_versions(place: Place) -> None:
    import ray

    code = [sys.executable, "-c", ANOTHER_VERSION, str(place.hosts.ray_address)]
    said = place.hosts["head"].run(code, env={"PYTHONPATH": str(ROOT)}, timeout=DEADLINE_S, check=True).stdout
    python = ".".join(map(str, sys.version_info[:3]))
    assert f"runs Ray {ray.__version__} with Python {python}, and this is Ray 2.59.1 with Python {python}" in said


FOLLOWS = """
import sys
from offload.launch.ray import running_job
from offload.launch.ray.job_api import JobApi

def show(text):
    print(text, end="", flush=True)

def say(text):
    print("SAID:", text, flush=True)

cluster = JobApi(sys.argv[1])
job = cluster.client.submit_job(entrypoint="for i in $(seq 1 30); do echo line $i; sleep 0.2; done")
print("ENDED:", running_job.follow(cluster, job, show, say)["status"])
"""


def test_a_lost_connection_is_made_again_and_no_line_is_shown_twice(place: Place) -> None:
    lines = []
    with (
        Wire(place.hosts["head"].address, DASHBOARD) as wire,
        subprocess.Popen(
            [sys.executable, "-c", FOLLOWS, f"http://127.0.0.1:{wire.port}"],
            stdout=subprocess.PIPE, text=True, env=place.environment(),
        ) as follower,
    ):  # fmt: skip
        assert follower.stdout is not None
        for line in follower.stdout:
            lines.append(line.strip())
            if line == "line 10\n":
                wire.cut()
            if "trying again" in line:
                wire.mend()
    assert follower.returncode == 0
    assert [line for line in lines if line.startswith("line ")] == [f"line {n}" for n in range(1, 31)]
    said = [line for line in lines if line.startswith("SAID:")]
    assert "The job goes on; trying again" in said[0]
    assert any("answers again" in line for line in said[1:])
    assert lines[-1] == "ENDED: SUCCEEDED"


class Wire:
    """Carries connections to a port of a host. It can be cut: connections break off, and new ones are refused."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._links: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_cut = False

    def __enter__(self) -> Wire:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()
        self._break()

    def cut(self) -> None:
        self._is_cut = True
        self._break()

    def mend(self) -> None:
        self._is_cut = False

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                link, _ = self._server.accept()
                if self._is_cut:
                    link.close()
                    continue
                other = socket.create_connection(self._to)
                with self._lock:
                    self._links += [link, other]
                for source, sink in ((link, other), (other, link)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for link in (source, sink):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _break(self) -> None:
        with self._lock:
            for link in self._links:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
                link.close()
            self._links.clear()
