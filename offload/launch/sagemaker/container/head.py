"""The head's part of a job: gather the hosts, start Ray on them, run the user's script, and tell all hosts the outcome."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.launch.sagemaker.container import ray_node
from offload.launch.sagemaker.container.place import INTERRUPTED, STOPPED_EARLY, HostPlace, Outcome, reason_of
from offload.launch.sagemaker.container.prepared import SAME_EVERYWHERE, Prepared, prepare
from offload.launch.sagemaker.container.progress_lines import ProgressLines
from offload.launch.sagemaker.container.ray_node import RayNode
from offload.launch.sagemaker.container.rendezvous import MEETING_PORT, Rendezvous
from offload.launch.sagemaker.settings import PLAN, Settings, arguments, deadline_s
from offload.report.run_dir import CHECKPOINTS, EVENTS, METRICS, PRINTED, REPORT, SKIPPED, SUMMARY

MARGIN_S = 15.0
MOST_LATE_S = 120.0  # time for the hosts of a job to hear of a failure: all of them cost money meanwhile
STOPPED = "the job was stopped; a checkpoint was committed."
STOPPED_WITHOUT = "the job was stopped before it reported a checkpoint."
JOB_FILE, PLAN_FILE, ERROR_FILE = "job.txt", "plan.json", "error.txt"
TRACEBACK_LINES = 30
KEPT = (SUMMARY, REPORT, EVENTS, METRICS, SKIPPED, PRINTED, PLAN_FILE)


class Head:
    """The leader of one job."""

    def __init__(self, place: HostPlace) -> None:
        self._place = place
        self._node: RayNode | None = None
        self._script: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def lead(self) -> Outcome:
        """Lead the whole job. Raises OffloadError for an error that ends the job, after telling all hosts."""
        place = self._place
        others = [host for host in place.hosts.all if host != place.hosts.current]
        # This comes first, so that the other hosts hear of any failure.
        meeting = Rendezvous((place.address, MEETING_PORT), place.token, others, self._lost)
        outcome = Outcome(exit=1, reason="the head failed.")
        late_s = 0.0
        try:
            with self._stoppable():
                prepared = prepare(place, meeting.check)
                meeting.gather(prepared.versions, prepared.settings.hosts_deadline_s)
                _check_packages(prepared.versions)
                self._node = RayNode(prepared.node)
                self._node.start()
                meeting.tell({"start": True})
                meeting.await_ready(ray_node.START_S + MARGIN_S)  # give a failing host the time to report its reason
                print(f"offload: Ray runs on all {len(others) + 1} hosts", flush=True)
                outcome = self._run_script(prepared)
        except KeyboardInterrupt:
            outcome = Outcome(exit=INTERRUPTED, reason=STOPPED_EARLY)
        except Exception as error:
            outcome = Outcome(exit=1, reason=reason_of(error))
            late_s = min(deadline_s(place.base), MOST_LATE_S)
            raise
        finally:
            meeting.close(asdict(outcome), late_s)
            if self._node is not None:
                self._node.stop()
        return outcome

    def _lost(self, host: str) -> None:
        print(f"offload: host {host} is lost. Training goes on without it if it only preprocessed.", flush=True)

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """A context in which the run commits a checkpoint on SIGTERM, which process 1 passes on
        (:mod:`offload.launch.sagemaker.container.process_one`)."""

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

    def _run_script(self, prepared: Prepared) -> Outcome:
        from offload.report.terminal.summary import format_summary

        place, node = self._place, self._node
        assert node is not None, "Ray is started first"
        if finished := self._finished_before():
            print("offload: this job has already finished: there is nothing left to do", flush=True)
            self._keep(finished)
            return Outcome(exit=0)
        anew = self._starts_anew(prepared.settings)
        self._set_up_run_dir()
        command = self._command(prepared, anew=anew)
        environment = {**os.environ, **node.environment()}
        with ProgressLines(place.run_dir):
            self._script = subprocess.Popen(
                command, env=environment, cwd=place.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
            printed, _ = self._script.communicate()
        code, document = self._script.returncode, _document(printed.decode(errors="replace"))
        if code == 0:
            print(format_summary(document), flush=True)
            self._keep(document)
            return Outcome(exit=0)
        if self._stopping:
            return Outcome(exit=INTERRUPTED, reason=_how_it_stopped(document))
        story = _text(place.run_dir / ERROR_FILE).strip().splitlines()[-TRACEBACK_LINES:]
        print("\n".join(story), file=sys.stderr, flush=True)
        return Outcome(exit=1, reason=document.get("error") or _how_it_died(prepared.settings.script, code))

    def _finished_before(self) -> dict[str, Any]:
        """The summary, if this job had finished before its container started again. Raises ConfigError if another job finished
        there."""
        summary = _document(_text(self._place.run_dir / SUMMARY))
        if summary.get("status") != "finished":
            return {}
        owner = _text(self._place.run_dir / JOB_FILE)
        if owner != self._place.job:
            run = f"a finished run of the job {owner}" if owner else "a finished run of an unknown job"
            raise ConfigError(
                f"the checkpoint location holds {run}, and this one would train nothing: launch with another location "
                "(offload launch sagemaker --checkpoints)."
            )
        return summary

    def _set_up_run_dir(self) -> None:
        place, run_dir = self._place, self._place.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / JOB_FILE).write_text(place.job, encoding="utf-8")
        (run_dir / ERROR_FILE).unlink(missing_ok=True)  # of an attempt before a restart
        if (place.folder / PLAN).exists():
            shutil.copyfile(place.folder / PLAN, run_dir / PLAN_FILE)

    def _command(self, prepared: Prepared, *, anew: bool) -> list[str]:
        place, settings = self._place, prepared.settings
        storage = self._storage(settings)
        return [
            *(sys.executable, "-m", "offload", "run", settings.script, "--json"),
            *("--run-dir", str(place.run_dir), "--address", f"{place.head_address}:{ray_node.HEAD_PORT}"),
            *(("--storage-path", storage) if storage else ()),
            *(("--overwrite",) if anew else ()),
            *("--", *arguments(prepared.hyperparameters), *settings.args),
        ]

    def _storage(self, settings: Settings) -> str | None:
        """The folder of checkpoints; None: the run directory."""
        return settings.storage if len(self._place.hosts.with_workers) > 1 else None

    def _starts_anew(self, settings: Settings) -> bool:
        """Bring the newest checkpoint to the place where this job writes.

        Return whether there is no complete checkpoint, but only the beginning of one that an interrupted job was writing.
        """
        from offload.launch.sagemaker.container.checkpoints import Shelf, bring_newest

        place, events = self._place, self._place.run_dir / EVENTS
        folder = Shelf(uri=str(place.run_dir), name=CHECKPOINTS)
        shared = Shelf(uri=settings.storage, name=place.run_dir.name) if settings.storage else None
        ours, theirs = (shared, folder) if shared and self._storage(settings) else (folder, shared)
        if theirs is not None:
            try:
                for line in bring_newest(theirs, ours):
                    print(f"offload: {line}", flush=True)
            except OSError as error:
                print(f"offload: not looking for checkpoints in {theirs.uri}: {error}", file=sys.stderr, flush=True)
        try:
            there = ours.folders().values()
        except OSError:
            return False  # `offload run` checks the place and names the problem
        if any(shelf.usable for shelf in there):
            events.parent.mkdir(parents=True, exist_ok=True)
            events.touch()  # the service may not have kept it, and without it the run would not resume
            return False
        return bool(there) and (not events.exists() or _text(place.run_dir / JOB_FILE) == place.job)

    def _keep(self, document: Mapping[str, Any]) -> None:
        """Put the model and the run's files into the folders that the service uploads."""
        from offload.train.checkpoints.storage import fetch

        data, run_dir = self._place.base / "output" / "data", self._place.run_dir
        data.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            if (run_dir / name).exists():
                shutil.copyfile(run_dir / name, data / name)
        if document.get("checkpoint"):
            fetch(f"{document['checkpoint']}/model.pt", self._place.base / "model" / "model.pt")


def _how_it_stopped(document: Mapping[str, Any]) -> str:
    """``document``: what the run printed; nothing if the stop came before it trained."""
    return STOPPED if document.get("checkpoint") else STOPPED_WITHOUT


def _how_it_died(script: str, code: int) -> str:
    if code >= 0:
        return f"{script} ended with exit code {code} and gave no reason: see the log."
    hint = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
    return f"the process of {script} was killed by {signal.Signals(-code).name}{hint}."


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _check_packages(versions: Mapping[str, str]) -> None:
    """Check the packages of this host; all hosts have the same."""
    missing = [name for name in SAME_EVERYWHERE if name not in versions]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is not installed, and the bundle's requirements do not name it.")
