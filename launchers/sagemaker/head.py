"""The head's part of a job: gather the hosts, start Ray on all of them, run the user's script, tell all how it ended."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launchers.sagemaker import ray_node
from launchers.sagemaker.bundle import PLAN
from launchers.sagemaker.hosts import JobHosts
from launchers.sagemaker.progress import ProgressLines
from launchers.sagemaker.ray_node import NodeSpec, RayNode
from launchers.sagemaker.rendezvous import Rendezvous
from launchers.sagemaker.settings import GPU_GROUP, Settings, arguments
from offload.errors import ConfigError
from offload.report.run_dir import EVENTS, METRICS, REPORT, SKIPPED, SUMMARY
from offload.report.summary import format_summary

MEETING_PORT = 6378
SAME_EVERYWHERE = {"Ray": "ray", "torch": "torch", "NumPy": "numpy", "PyArrow": "pyarrow"}
"""Packages of which all hosts of a job must have the same version: objects of theirs travel between hosts."""
INTERRUPTED = 130
MARGIN_S = 15.0
STOPPED = "the job was stopped; a checkpoint was committed."
WITHOUT_GPUS = "OFFLOAD_WITHOUT_GPUS"
JOB_FILE, PLAN_FILE, ERROR_FILE = "job.txt", "plan.json", "error.txt"
TRACEBACK_LINES = 30
KEPT = (SUMMARY, REPORT, EVENTS, METRICS, SKIPPED, PLAN_FILE)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job, or this host's part in it, ended. ``reason``: of a failure."""

    exit: int
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """A host of a job, and all that it was told.

    Args:
        base: the service's folder, ``/opt/ml``.
        folder: the unpacked bundle.
        job: its name.
        address, head_address: of this host and of the head, on the job's network.
    """

    base: Path
    folder: Path
    hosts: JobHosts
    settings: Settings
    hyperparameters: Mapping[str, Any]
    job: str
    token: str
    token_file: Path
    versions: Mapping[str, str]
    address: str
    head_address: str

    @functools.cached_property
    def node(self) -> NodeSpec:
        """What this host brings into the cluster."""
        shm, memory = ray_node.free_shm_bytes(), ray_node.memory_bytes()
        if shm < ray_node.LITTLE_SHM_BYTES:
            print(
                f"offload: /dev/shm of {self.hosts.current} has {shm >> 20:,} MiB: few batches fit, so preprocessing may have to wait. "
                "Give the container more (docker run --shm-size), or take smaller batches.",
                flush=True,
            )
        return NodeSpec(
            address=self.address,
            head=self.head_address,
            group=self.hosts.group.name,
            instance_type=self.hosts.group.instance_type,
            cores=ray_node.cores(),
            gpus=self._gpus(),
            store_bytes=ray_node.store_bytes(shm, memory),
            interface=self.hosts.interface,
            token_file=self.token_file,
            folder=self.folder,
        )

    def _gpus(self) -> int:
        """Workers run in the group of GPUs alone. Raises ConfigError where it has none: nobody means to pay for what is not used."""
        if self.hosts.group.name != GPU_GROUP:
            return 0
        found = ray_node.gpus(os.environ)
        if not found and not os.environ.get(WITHOUT_GPUS):
            raise ConfigError(
                f"{self.hosts.current} ({self.hosts.group.instance_type}) sees no GPU: take an image with CUDA, whose PyTorch is one "
                f"for GPUs, or pass --env {WITHOUT_GPUS}=1 to train on its CPUs."
            )
        return found

    @property
    def run_dir(self) -> Path:
        """Of the run: where it outlives the container, if the job has such a place."""
        kept = self.base / "checkpoints"
        return (kept if kept.is_dir() else self.base / "output" / "data") / "run"


class Head:
    """Leads one job."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._node: RayNode | None = None
        self._script: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def lead(self) -> Outcome:
        """All of it. Raises OffloadError for what ends the job, after all hosts were told."""
        place = self._place
        others = [host for host in place.hosts.all if host != place.hosts.current]
        meeting = Rendezvous((place.address, MEETING_PORT), place.token, others, place.versions, self._lost)
        outcome = Outcome(exit=1, reason="the head failed.")
        try:
            with self._stoppable():
                meeting.gather(place.settings.hosts_deadline_s)
                self._check_packages()
                self._node = RayNode(place.node)
                self._node.start()
                meeting.tell({"start": True})
                meeting.await_ready(ray_node.START_S + MARGIN_S)  # a host that fails tells why, if it is waited for
                print(f"offload: Ray runs on all {len(others) + 1} hosts", flush=True)
                outcome = self._run_script()
        except KeyboardInterrupt:
            outcome = Outcome(exit=INTERRUPTED, reason="the job was stopped before training began.")
        except Exception as error:
            outcome = Outcome(exit=1, reason=str(error))
            raise
        finally:
            meeting.close(asdict(outcome))
            if self._node is not None:
                self._node.stop()
        return outcome

    def _check_packages(self) -> None:
        """All hosts have the same, so what is missing here is missing everywhere."""
        missing = [name for name in SAME_EVERYWHERE if name not in self._place.versions]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} is not installed: without a network (isolation, or a VPC without a way to packages) "
                "requirements.txt cannot be; take an image that holds it."
            )

    def _lost(self, host: str) -> None:
        print(f"offload: host {host} is lost. Training goes on without it where it only preprocessed.", flush=True)

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Where SIGTERM reaches this process, a checkpoint is committed. The training toolkit does not pass it on."""

        def stop(signum: int, frame: object) -> None:
            self._stopping = True
            if self._script is None:
                raise KeyboardInterrupt
            self._script.send_signal(signal.SIGINT)

        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _run_script(self) -> Outcome:
        place, node = self._place, self._node
        assert node is not None, "Ray is started first"
        if finished := self._finished_before():
            print("offload: this job had finished already: nothing is left to do", flush=True)
            self._keep(finished)
            return Outcome(exit=0)
        self._set_up_run_dir()
        environment = {**os.environ, **node.environment()}
        with ProgressLines(place.run_dir):
            self._script = subprocess.Popen(
                self._command(), env=environment, cwd=place.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
            printed, _ = self._script.communicate()
        code, document = self._script.returncode, _document(printed.decode(errors="replace"))
        if code == 0:
            print(format_summary(document), flush=True)
            self._keep(document)
            return Outcome(exit=0)
        if self._stopping:
            return Outcome(exit=INTERRUPTED, reason=STOPPED)
        story = _text(place.run_dir / ERROR_FILE).strip().splitlines()[-TRACEBACK_LINES:]
        print("\n".join(story), file=sys.stderr, flush=True)
        return Outcome(exit=1, reason=document.get("error") or _how_it_died(place.settings.script, code))

    def _finished_before(self) -> dict[str, Any]:
        """The summary, where this very job had finished before its container was started once more. Raises ConfigError where
        another job had."""
        summary = _document(_text(self._place.run_dir / SUMMARY))
        if summary.get("status") != "finished":
            return {}
        owner = _text(self._place.run_dir / JOB_FILE)
        if owner != self._place.job:
            raise ConfigError(
                f"the checkpoint location holds a finished run (of the job {owner or 'of an unknown name'}), and this one would train "
                "nothing: launch with other --checkpoints."
            )
        return summary

    def _set_up_run_dir(self) -> None:
        place, run_dir = self._place, self._place.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / JOB_FILE).write_text(place.job, encoding="utf-8")
        (run_dir / ERROR_FILE).unlink(missing_ok=True)  # of an attempt before a restart
        if (place.folder / PLAN).exists():
            shutil.copyfile(place.folder / PLAN, run_dir / PLAN_FILE)

    def _command(self) -> list[str]:
        place, settings = self._place, self._place.settings
        storage = ["--storage-path", settings.storage] if settings.storage else []
        if settings.storage and settings.own_storage and not (place.run_dir / EVENTS).exists():
            # Interrupted before anything of its run directory was kept: what lies there is of no use to anybody.
            storage.append("--overwrite")
        return [
            *(sys.executable, "-m", "offload", "run", settings.script, "--json"),
            *("--run-dir", str(place.run_dir), "--address", f"{place.head_address}:{ray_node.HEAD_PORT}"),
            *(*storage, "--", *arguments(place.hyperparameters), *settings.args),
        ]

    def _keep(self, document: Mapping[str, Any]) -> None:
        """Put the model and the run's files where the service uploads them from."""
        from offload.train.storage import fetch

        data, run_dir = self._place.base / "output" / "data", self._place.run_dir
        data.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            if (run_dir / name).exists():
                shutil.copyfile(run_dir / name, data / name)
        if document.get("checkpoint"):
            fetch(f"{document['checkpoint']}/model.pt", self._place.base / "model" / "model.pt")


def _how_it_died(script: str, code: int) -> str:
    if code >= 0:
        return f"{script} ended with {code} and said no more: see the log."
    hint = "; that is how the kernel ends a process when memory runs out" if -code == signal.SIGKILL else ""
    return f"the process of {script} was killed by {signal.Signals(-code).name}{hint}."


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _document(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
