"""The ``offload`` command as a user meets it: processes with an exit code, a standard output and a standard error."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import offload as offload_package
from offload.cli.main import main
from offload.errors import ConfigError
from offload.prices import built_in
from offload.process.interrupts import INTERRUPTED
from offload.report.page.records import read_run
from offload.report.page.story import Story
from offload.report.page.what_if import RunModel
from offload.report.run_dir import EVENTS, METRICS, REPORT, SUMMARY, locked, read_lines
from offload.train.cluster import connection as cluster
from offload.train.cluster.connection import check_reachable
from tests.helpers import eventually, offload_here, without_ray

DEADLINE_S = 800.0

SCRIPT = '''
"""A script as a user writes it, with prints where users have them."""

import argparse
import atexit
import sys
import time
from pathlib import Path

import numpy as np
import torch

import offload

print("printed while the script is loaded")
atexit.register(print, "printed when all is over")


class Numbers(torch.utils.data.Dataset):
    def __init__(self, samples, broken=None):
        self.samples, self.broken = samples, broken

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        if i == self.broken:
            raise ValueError("no such colour")
        return {"x": np.full(2, i / self.samples, dtype=np.float32)}


def train(ctx):
    print("printed while training")
    model = torch.nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            loss = (model(batch["x"]) ** 2).mean()
            ctx.backward(loss)
            ctx.step()
            if ctx.config["slow_while"] and Path(ctx.config["slow_while"]).exists():
                time.sleep(0.5)  # an epoch of 400 steps does not end before the test has looked
        ctx.report(loss=loss)


def build():
    print("printed while the trainer is built")
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--broken", type=int)
    parser.add_argument("--slow-while", default="")
    arguments = parser.parse_args()
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Numbers(arguments.samples, arguments.broken))},
        workers=1,
        batch_size=16,
        train_loop_config={"epochs": arguments.epochs, "slow_while": arguments.slow_while},
    )


if __name__ == "__main__":
    sys.exit("offload run loads a script, it does not execute it")
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_training.py"
    path.write_text(SCRIPT)
    return path


def offload(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The installed command, beside this Python."""
    return subprocess.run(
        [Path(sys.executable).with_name("offload"), *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=without_ray(**env),
    )


BeforeRay = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def before_ray(monkeypatch: pytest.MonkeyPatch) -> BeforeRay:
    """The command in this process, for what must be found before Ray is started or joined."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("Ray is started")

    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", never)
    monkeypatch.setattr(cluster, "_start_local", never)
    monkeypatch.setattr(cluster, "_serving_ahead", nullcontext)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def run(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        try:
            return offload_here(*arguments, env=env)
        finally:
            atexit.unregister(print)  # the script's last words would be those of the tests

    return run


def refusal(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """What a user is told: one paragraph on stderr, never a traceback; under --json the same in one document on stdout."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("offload: ")]
    assert said.endswith((".", ")")), said
    if "--json" in done.args:
        document = json.loads(done.stdout)
        assert document["schema"] == "offload.error/1"
        assert document["exit_code"] == code
        assert said == f"offload: {document['error']}"
    else:
        assert done.stdout == ""
    return said


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_is_stopped_by_ctrl_c_resumed_by_the_same_command_and_not_repeated(
    tmp_path: Path, script: Path, request: pytest.FixtureRequest
) -> None:
    run_dir, slow = tmp_path / "run", tmp_path / "slow"
    slow.touch()
    command = [Path(sys.executable).with_name("offload"), "run", script, "--run-dir", run_dir, "--"]
    command += ["--epochs", "2", "--samples", "6400", "--slow-while", slow]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=without_ray(),
        start_new_session=True,
    ) as run:
        try:
            eventually(lambda: bool(read_lines(run_dir / METRICS)) or run.poll() is not None, DEADLINE_S)
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the command and to what it started
            said, _ = run.communicate(timeout=DEADLINE_S)
        finally:
            run.kill()
    assert run.returncode == INTERRUPTED, said
    assert "Traceback" not in said
    assert "committing a checkpoint" in said
    document = json.loads((run_dir / SUMMARY).read_text())
    assert document["status"] == "interrupted"
    assert 0 < document["steps"] < 800
    assert Path(document["checkpoint"]).is_dir()
    assert ("checkpoint", "stop") in [(e["event"], e.get("reason")) for e in read_lines(run_dir / EVENTS)]

    slow.unlink()
    again = ["run", script, "--json", "--watch", *command[3:]]
    done = offload(*again)
    assert done.returncode == 0, done.stderr
    assert "standard error is no terminal, so there is a line every ten seconds" in done.stderr
    assert "resuming the run" in done.stderr
    assert f"resumed at epoch 1, step {document['steps']:,}" in done.stderr
    for when in ("while the script is loaded", "while the trainer is built", "while training", "when all is over"):
        assert done.stderr.count(f"printed {when}") == 1, done.stderr
    finished = json.loads(done.stdout)  # under --json the document is all there is on stdout
    assert json.loads((run_dir / SUMMARY).read_text()) == finished
    assert (finished["schema"], finished["status"], finished["steps"]) == ("offload.summary/1", "finished", 800)
    # At a fixed batch samples are worth the same, whatever else a run counts.
    assert finished["goodput"] == finished["samples_per_s"] > 0
    assert "<html" in (run_dir / REPORT).read_text()
    story = Story(read_run(run_dir), built_in(), {})
    assert isinstance(story.model, RunModel), story.model  # the run wrote down all that the report's model needs
    assert all(node.training and node.preprocessing for node in story.nodes)
    assert story.progress is not None
    assert story.records.intervals.busy_s
    events = [e["event"] for e in read_lines(run_dir / EVENTS)]
    assert events[0] == "run_started"
    assert events[-1] == "run_finished"
    assert "run_resumed" in events

    repeated = refusal(request.getfixturevalue("before_ray")(*again))
    assert "holds a finished run" in repeated
    assert "--overwrite" in repeated
    assert [e["event"] for e in read_lines(run_dir / EVENTS)] == events


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_data_that_raise_end_the_run_with_exit_code_1(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, on the Ray that the tests share."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    run_dir = tmp_path / "run"
    done = CliRunner().invoke(
        main, ["run", str(script), "--run-dir", str(run_dir), "--", "--epochs", "1", "--broken", "37"]
    )
    assert done.exit_code == 1, done.output
    text = done.output
    assert "ValueError: no such colour" in text
    assert "sample 37" in text
    document = json.loads((run_dir / SUMMARY).read_text())
    assert document["status"] == "failed"
    assert document["error"] in text
    assert read_lines(run_dir / EVENTS)[-1]["event"] == "run_finished"
    assert "no such colour" in (run_dir / "error.txt").read_text()


# --- what is found before Ray is started ------------------------------------------------------------------------------


BROKEN = """
import argparse

def build():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, help="how long")
    parser.parse_args()
    return 5
"""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A script whose build() makes no Trainer; what else may be wrong with one: test_script.py."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    return script


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--epochs", "3"], "returned int; it must return an offload.Trainer"),
        (["--epocs", "3"], "rejected its arguments (line 7)"),
    ],
)
def test_a_script_that_is_none_is_refused_before_ray_is_started(
    tmp_path: Path, broken: Path, before_ray: BeforeRay, arguments: list[str], says: str
) -> None:
    done = before_ray("run", broken, "--run-dir", tmp_path / "run", "--json", "--", *arguments)
    assert says in refusal(done)
    assert ("unrecognized arguments: --epocs 3" in done.stderr) == ("--epocs" in arguments)
    assert not (tmp_path / "run").exists()


def test_an_empty_run_directory_is_not_the_folder_of_the_command(script: Path, before_ray: BeforeRay) -> None:
    """As a shell passes a variable that is not set."""
    text = refusal(before_ray("run", script, "--run-dir", "", "--json", "--", "--epochs", "1"))
    assert "run_dir must be a path (a folder, such as runs/a), found ''" in text


def test_a_run_directory_must_be_a_folder_of_this_machine(script: Path, before_ray: BeforeRay) -> None:
    done = before_ray("run", script, "--run-dir", "s3://bucket/x", "--json", "--", "--epochs", "1")
    assert "--run-dir must be a folder of this machine, found s3://bucket/x. Checkpoints alone" in refusal(done)


def test_a_second_run_in_the_same_directory_changes_nothing(
    tmp_path: Path, script: Path, before_ray: BeforeRay
) -> None:
    with locked(tmp_path):
        arguments = ["run", script, "--run-dir", tmp_path, "--overwrite", "--json", "--", "--epochs", "1"]
        assert "already: process" in refusal(before_ray(*arguments))


def test_a_folder_of_temporary_files_that_ray_cannot_use(tmp_path: Path, script: Path) -> None:
    """One whose path is too long for a socket's."""
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    done = offload(
        "run",
        script,
        "--run-dir",
        tmp_path / "run",
        "--json",
        "--address",
        "local",
        "--",
        "--epochs",
        "1",
        RAY_TMPDIR=str(folder),
    )
    text = refusal(done)
    assert "Ray cannot start" in text
    assert "set RAY_TMPDIR to a folder with a short path" in text


def test_wrong_usage_is_a_document_too_where_json_is_asked_for() -> None:
    done = offload("run", "--json", "--nosuch")
    assert done.returncode == 2
    assert json.loads(done.stdout) == {
        "schema": "offload.error/1",
        "error": "No such option '--nosuch'.",
        "exit_code": 2,
    }
    assert "No such option '--nosuch'" in done.stderr
    assert offload("run", "--nosuch", "--", "--json").stdout == ""


def test_output_to_a_full_disk_is_one_sentence() -> None:
    command = [sys.executable, "-m", "offload", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr
        == "offload: the output cannot be written: No space left on device. The command's files are complete.\n"
    )


def test_a_scripts_own_help(broken: Path, before_ray: BeforeRay) -> None:
    done = before_ray("run", broken, "--", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "how long" in done.stdout


def test_addresses_that_lead_nowhere(tmp_path: Path, script: Path, before_ray: BeforeRay) -> None:
    def run(*options: str, **env: str) -> str:
        arguments = ["run", script, "--run-dir", tmp_path / "run", "--json", *options, "--", "--epochs", "1"]
        return refusal(before_ray(*arguments, **env))

    text = run("--address", "127.0.0.1:1")
    assert "no Ray cluster can be reached at '127.0.0.1:1': Connection refused" in text
    assert "ray start --head" in text
    assert "'127.0.0.1:2'" in run(RAY_ADDRESS="127.0.0.1:2")  # the option, where it is given, comes first
    assert "'127.0.0.1:1'" in run("--address", "127.0.0.1:1", RAY_ADDRESS="127.0.0.1:2")
    assert "\"auto\" or host:port, found 'head'" in run("--address", "head")


@pytest.mark.parametrize("command", ["run", "probe", "demo"])
def test_a_wrong_address_is_found_before_anything_else(
    tmp_path: Path, script: Path, before_ray: BeforeRay, command: str
) -> None:
    where = {"run": [script, "--run-dir", tmp_path / "run"], "probe": [script], "demo": ["--data", tmp_path / "data"]}[
        command
    ]
    arguments = [command, *where, "--address", "127.0.0.1:1", *([] if command == "demo" else ["--", "--epochs", "1"])]
    done = before_ray(*arguments)
    assert "no Ray cluster can be reached at '127.0.0.1:1'" in refusal(done)
    assert "printed" not in done.stderr  # by the script
    assert [path.name for path in tmp_path.iterdir()] == [script.name]


def test_fit_looks_at_the_address_before_it_lists_the_data(tmp_path: Path) -> None:
    class Unlisted:
        def __len__(self) -> int:
            raise AssertionError("listed")

        def __getitem__(self, i: int) -> Any: ...

    with socket.socket() as free, pytest.MonkeyPatch.context() as patch:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        patch.setattr(cluster.ray, "is_initialized", lambda: False)
        patch.setenv("RAY_ADDRESS", address)
        trainer = offload_package.Trainer(print, datasets={"train": Unlisted()}, batch_size=1)
        with pytest.raises(ConfigError, match=f"no Ray cluster can be reached at '{address}'"):
            trainer.fit(run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_auto_where_the_only_processes_of_rays_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself tries such an address for minutes."""
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "addresses_here", lambda: ("127.0.0.1:1", "a..b:6379"))
    with pytest.raises(
        ConfigError, match=r"no Ray cluster runs on this machine .*127\.0\.0\.1:1, a\.\.b:6379.*ray start --head"
    ):
        cluster.check_address("auto")
    monkeypatch.setattr(cluster, "addresses_here", tuple)
    with pytest.raises(ConfigError, match=r"no Ray cluster runs on this machine\. Start one"):
        cluster.check_address("auto")


@pytest.mark.parametrize("address", [None, "local", ""])
def test_no_address_is_none(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster.check_address(address) == (address or None)


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:port", "head:0", "head:65536", "head:²"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match=r'"auto" or host:port, found .*6379'):
        check_reachable(address)


@pytest.mark.parametrize(
    ("address", "instead"),
    [
        ("ray://head:10001", "http://head:8265"),
        ("ray://head", "http://head:8265"),
        ("http://head:9000", "http://head:9000"),
    ],
)
def test_an_address_that_takes_jobs_or_drivers_from_elsewhere_is_answered_with_the_launcher(
    address: str, instead: str
) -> None:
    with pytest.raises(ConfigError, match=rf"found '{address}'\. .*offload launch ray SCRIPT --address {instead}\."):
        check_reachable(address)


def test_hosts_that_cannot_exist() -> None:
    for host in ("a..b", "x" * 70):  # names that cannot even be looked up
        with pytest.raises(ConfigError, match=r"no Ray cluster can be reached at"):
            check_reachable(f"{host}:6379")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n"], ids=["closes", "HTTP"])
def test_a_listener_that_is_not_ray(answer: bytes) -> None:
    """Ray itself tries such an address for a quarter of an hour."""
    with (
        answering(answer) as address,
        pytest.raises(ConfigError, match=f"{address}' is not a Ray cluster, or it hangs"),
    ):
        check_reachable(address)


def test_a_listener_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "REACH_TIMEOUT_S", 0.2)
    with answering(None) as address, pytest.raises(ConfigError, match="it did not answer as Ray does"):
        check_reachable(address)


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """A server for one connection; with None it says nothing and stays."""
    done = threading.Event()

    def serve() -> None:
        link, _ = server.accept()
        with link:
            link.recv(64)
            if answer is None:
                done.wait(DEADLINE_S)
            else:
                link.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "teaches"),
    [
        ([], ["offload doctor", "offload demo", "offload run SCRIPT", "build() -> offload.Trainer", "--version"]),
        (["run"], ["build() -> offload.Trainer", "Arguments after --", "-- --epochs 20", "resumes an unfinished run", "Ctrl-C commits"]),
        (["demo"], ["real JPEGs", "every CPU", "the run directory with a report", "[default: 1500;", "a paced accelerator"]),
        (["doctor"], ["what to do", "Exit code 0 if nothing fails"]),
        (["launch", "ray"], ["http://head:8265", "leaves the job running", "resumes a run", "[env var: OFFLOAD_RAY_ADDRESS"]),
        (["predict"], ["predictor()", "return offload.Predictor", "OUTPUT.parts holds what is done", "kill -9", "Exit codes: 0 success"]),
        (["plan"], ["before you pay", "offload probe train.py", "Fewest dollars per useful sample"]),
    ],
    ids=["offload", "run", "demo", "doctor", "launch ray", "predict", "plan"],
)  # fmt: skip
def test_help_teaches(command: list[str], teaches: list[str]) -> None:
    done = CliRunner().invoke(main, [*command, "--help"])
    assert done.exit_code == 0
    assert done.stderr == ""
    text = " ".join(done.stdout.split())
    for phrase in teaches:
        assert phrase in text
    assert CliRunner().invoke(main, [*command, "-h"]).stdout == done.stdout


@pytest.mark.parametrize("command", ["run", "demo", "predict", "probe", "watch", "doctor"])
def test_every_command_says_which_cluster_auto_means(command: str) -> None:
    text = " ".join(CliRunner().invoke(main, [command, "--help"]).stdout.split())
    assert '("auto": RAY_ADDRESS, or else this host\'s)' in text


def test_it_runs_as_a_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offload", "--version"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("offload, version ")


RUN_OPTIONS = ["--storage-path", "--address", "--json", "--overwrite", "--quiet", "--run-dir"]
OPTIONS: dict[str, list[str]] = {
    "arbiter start": [
        "--address", "--fairness", "--first-cores", "--growth", "--json", "--network-gbps", "--shorter-first", "--usd-per-core-hour",
        "--usd-per-gpu-hour", "--usd-per-hour",
    ],
    "arbiter status": ["--address", "--json", "--page"],
    "arbiter stop": ["--address", "--json"],
    "demo": [*RUN_OPTIONS, "--compare", "--data", "--epochs", "--images"],
    "doctor": ["--address", "--cache", "--json"],
    "plan": [
        "--ami", "--batch-size", "--budget", "--catalog", "--chart", "--cluster-name", "--cpu-nodes", "--cpu-type", "--deadline",
        "--emit", "--gpu-nodes", "--gpu-speed", "--gpu-type", "--hosts", "--image", "--job", "--json", "--max-batch-size", "--objective",
        "--output", "--plan", "--profile", "--ray", "--refresh-prices", "--region", "--samples", "--spot", "--step",
    ],
    "predict": [
        "--address", "--argmax", "--batch-size", "--json", "--output", "--overwrite", "--quiet", "--seed", "args", "checkpoint", "script",
    ],
    "probe": ["--address", "--apply", "--core-speed", "--json", "--loader", "--output", "--quiet", "--yes", "args", "script"],
    "report": ["--catalog", "--json", "--output", "--png", "--usd-per-hour", "run_dirs"],
    "runs": ["--address", "--json"],
    "runs pause": ["--address", "--json", "--timeout-s", "name"],
    "runs resize": ["--address", "--json", "--timeout-s", "name", "workers"],
    "runs resume": ["--address", "--json", "--timeout-s", "name"],
    "runs stop": ["--address", "--json", "--timeout-s", "name"],
    "watch": ["--address", "--json", "--run", "run_dir"],
    "run": [
        *RUN_OPTIONS, "--arbiter", "--cpus-per-worker", "--gpus-per-worker", "--max-workers", "--priority", "--watch", "--weight", "args",
        "script",
    ],
    "launch ray": [
        "--address", "--cpus-per-worker", "--dry-run", "--env", "--gpus-per-worker", "--json", "--max-workers", "--name", "--no-wait",
        "--overwrite", "--requirements", "--run-dir", "--status", "--stop", "--storage-path", "--working-dir", "args", "script",
    ],
    "launch sagemaker": [
        "--bucket", "--catalog", "--checkpoints", "--cpu", "--dry-run", "--encrypt-traffic", "--env", "--framework-version",
        "--gpu", "--hosts-deadline", "--hyperparameter", "--image-entrypoint", "--image-uri", "--input", "--input-mode", "--json",
        "--kms-key", "--max-hours", "--max-usd", "--name", "--plan", "--region", "--requirements", "--role", "--security-group",
        "--spot", "--status", "--stop", "--submitter", "--subnet", "--tag", "--volume-gib", "--wait", "args", "script",
    ],
}  # fmt: skip


def test_names_of_commands_and_options_are_frozen() -> None:
    """Scripts of users hold these names: removing one breaks them. Add new ones here."""

    def names(command: Any) -> list[str]:
        return sorted(p.opts[-1] for p in command.params if isinstance(p, click.Parameter))

    context = click.Context(main)
    commands: dict[str, Any] = {name: main.get_command(context, name) for name in main.list_commands(context)}
    for group in ("arbiter", "launch"):
        commands |= {f"{group} {name}": command for name, command in commands.pop(group).commands.items()}
    commands |= {f"runs {name}": command for name, command in commands["runs"].commands.items()}
    assert {name: names(command) for name, command in commands.items()} == {
        name: sorted(options) for name, options in OPTIONS.items()
    }


def test_an_unknown_option_is_refused_with_a_hint(script: Path) -> None:
    done = offload("run", script, "--overwite")
    assert done.returncode == 2
    assert re.search("Did you mean.*--overwrite", done.stderr)
    assert done.stderr.startswith("Usage: offload run")
