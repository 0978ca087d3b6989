"""What several tests use: data, servers, a check."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from offload.cli.main import main
from offload.preload import NONE_AHEAD
from tests.emulation import unavailable

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "programs"
"""Scripts that tests run in processes of their own."""
DATA = ROOT / "tests" / "data"
RAY_STARTS_NOTHING_AHEAD = {f"RAY_{name}": str(int(value)) for name, value in NONE_AHEAD.items()}
"""The environment of raylets that start no idle Python processes, which would cost a second of CPU time each."""


def plan_document(*shapes: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """plan.json with these candidates, as ``offload plan -o`` writes it."""
    candidate = {
        "workers": 1,
        "batch_size": 64,
        "local_batch_size": 64,
        "accum_steps": 0,
        "samples_per_s": 310.2,
        "samples_per_s_low": 300.0,
        "samples_per_s_high": 320.0,
        "step_time_s": 0.2,
        "stall": 0.0,
        "bottleneck": "gpu",
        "goodput": 310.2,
        "usd_per_hour": 3.04,
        "usd_per_million_samples": 2.7,
        "hours": None,
        "usd": None,
    }
    return {
        "schema": "offload.plan/1",
        "objective": "cost",
        "candidates": [{"shape": shape, **candidate} for shape in shapes],
        "recommended": 0,
        "baseline": 0,
        **changed,
    }


def write_jpegs(folder: Path, count: int, *, classes: int = 3, size: tuple[int, int] = (24, 32)) -> None:
    """Real JPEG files of noise, ``folder/<class>/<number>.jpg``."""
    import simplejpeg

    rng = np.random.default_rng(0)
    for i in range(count):
        target = folder / f"class_{i % classes}"
        target.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        (target / f"{i:04d}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels))


@contextmanager
def moto_server(address: str = "127.0.0.1") -> Iterator[tuple[dict[str, str], Any]]:
    """A real S3 server, reached over HTTP as AWS is: the environment variables that lead to it, and a client."""
    import boto3
    import requests
    from moto.server import ThreadedMotoServer

    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    server = ThreadedMotoServer(address, port, verbose=False)
    server.start()
    url = f"http://{address}:{port}"
    # What it holds belongs to the process, not to the server: an earlier test's buckets would still be there.
    requests.post(f"{url}/moto-api/reset", timeout=800).raise_for_status()
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="testing", aws_secret_access_key="testing"
    )
    try:
        yield (
            {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            },
            client,
        )
    finally:
        client.close()
        server.stop()


def require_hosts() -> None:
    """Skip where hosts cannot be emulated; with CI=true they must be."""
    reason = unavailable()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"with CI=true emulated hosts must work: {reason}")
        pytest.skip(reason)


@contextlib.contextmanager
def case(*names: object) -> Iterator[None]:
    """One case of a law: what fails within says which."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {', '.join(map(str, names))}")
        raise


def offload_here(
    *words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in this process, with its exit code and outputs: a process of its own costs seconds for imports."""
    arguments = [str(word) for word in words]
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryFile() as documents,
        contextlib.chdir(cwd or Path.cwd()),
    ):
        patch.setattr(sys, "argv", ["offload", *arguments])
        patch.setattr(sys, "path", [*sys.path])
        stdout = os.dup(1)
        os.dup2(documents.fileno(), 1)  # --json writes documents to it, and redirects it until the process ends
        try:
            done = CliRunner().invoke(main, arguments, env=env)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        documents.seek(0)
        document = documents.read().decode()
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, document or done.stdout, done.stderr)


def without_ray(**more: str) -> dict[str, str]:
    """This process's environment for a program with a Ray of its own: without the settings of the tests' Ray, but its folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "RAY_TMPDIR": tempfile.gettempdir(), **more}


def mount_small_disk(path: Path, options: str) -> None:
    """Mount a disk of a size of its own, as root. Skips where none can be mounted; with CI=true it must be. The test unmounts it."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], capture_output=True, text=True)
    if mounted.returncode:
        reason = f"no disk can be mounted here: {mounted.stderr.strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(f"with CI=true small disks must work: {reason}")
        pytest.skip(reason)


def eventually(
    condition: Callable[[], bool], deadline_s: float = 800.0, *, state: Callable[[], object] = lambda: ""
) -> None:
    """Wait until it is so. ``state``: what to say if it never is. Looks that cost much come less often: others need the cores."""
    until = time.monotonic() + deadline_s
    while True:
        looked = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < until, f"still not so after {deadline_s} s: {state()}"
        time.sleep(max(0.02, min(4 * (now - looked), 0.5)))


def end_loaders() -> None:
    """End this process's DataLoaders, and wait until Ray has freed their cores. Ray may take seconds for it."""
    import ray
    import torch

    from offload.loader.job import session as sessions

    cluster: Any = ray  # its functions have no types

    def ended() -> bool:
        gc.collect()  # in each look: it does nothing while another thread collects
        sessions.end_unused()
        return bool(cluster.available_resources().get("CPU") == cluster.cluster_resources()["CPU"])

    def state() -> object:
        loaders = [each for each in gc.get_objects() if isinstance(each, torch.utils.data.DataLoader)]
        holders = [type(holder) for loader in loaders for holder in gc.get_referrers(loader) if holder is not loaders]
        return cluster.available_resources(), cluster.cluster_resources(), sessions._users, loaders, holders

    eventually(ended, state=state)


def open_to_others(folder: Path) -> None:
    """Let other users read a test's folder and those around it, up to that of temporary files."""
    around = Path(os.environ["PYTEST_DEBUG_TEMPROOT"]).resolve()
    for each in (folder, *folder.resolve().parents):
        if around in each.parents:
            each.chmod(0o755)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Within, this process, which is root's, has the rights of a user without any. What it imports meanwhile may be unreadable."""
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def command_of(process: psutil.Process) -> list[str]:
    """The process's command line; empty once it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def title_of(process: psutil.Process) -> str:
    """The first word of the process's command, which Ray's processes replace by their title; "" once it has ended."""
    return "".join(command_of(process)[:1])


MARK = "OFFLOAD_TEST_OF_ENDINGS"  # an environment variable, which processes inherit


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that have inherited this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
