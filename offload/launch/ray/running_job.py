"""A job's output, state and exit code, while it runs and afterwards.

Where it stops: only :func:`stop` changes anything.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from offload.errors import RunError
from offload.launch.launcher import Say, Unreachable
from offload.launch.ray.answers import ENDED, Job
from offload.launch.ray.job_api import JobApi

SCHEMA = "offload.ray-job/1"
POLL_S = 2.0
LAST_LINES_S = 10.0  # time for a job's log to end after the job
SILENCE_S = 600.0  # time without an answer after which a cluster counts as lost
INTERRUPTED = 130
FAILURES = 2  # failed log connections in a row, without a line, after which the client polls instead
_NOT_STARTED = ("RUNTIME_ENV_SETUP_FAILURE", "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE", "JOB_ENTRYPOINT_COMMAND_START_ERROR")


def state(cluster: JobApi, job: Job) -> dict[str, Any]:
    """A job's state as a document. ``exit_code``: None while it runs."""
    code = exit_code(job.status, job.driver_exit_code, job.error_type)
    began, end = (None if ms is None else datetime.fromtimestamp(ms / 1000, UTC) for ms in (job.began_ms, job.ended_ms))
    return {
        "schema": SCHEMA,
        "job": job.job_id,
        "name": job.name,
        "address": cluster.url,
        "status": job.status,
        "exit_code": code,
        "reason": _reason(job) if job.ended and code not in (0, INTERRUPTED) else None,
        "run_dir": job.run_dir,
        "began": None if began is None else began.isoformat(timespec="seconds"),
        "seconds": None if began is None else ((end or datetime.now(UTC)) - began).total_seconds(),
    }


def exit_code(status: str, of_driver: int | None, error_type: str | None) -> int | None:
    """The exit code of a command that waited for a job: its driver's; None if the job has not ended."""
    if status not in ENDED:
        return None
    if status == "STOPPED":
        return INTERRUPTED
    if of_driver is not None:
        return of_driver if of_driver >= 0 else 128 - of_driver  # a shell's code for an end by a signal
    return 0 if status == "SUCCEEDED" else 2 if error_type in _NOT_STARTED else 1


def _reason(job: Job) -> str:
    """The reason why a job failed. Its driver's output was shown, or is in its log."""
    code = job.driver_exit_code
    if code is not None:
        return f"the run ended with {code}: see its log (ray job logs {job.job_id})."
    said = [line.strip() for line in (job.message or "").splitlines() if line.strip()]
    return f"{job.error_type}: {said[-1] if said else 'Ray gave no details'}"


def stop(cluster: JobApi, job_id: str, say: Say, *, wait: bool, poll_s: float = POLL_S) -> dict[str, Any]:
    """Ask a job to stop; with ``wait``, wait as long as Ray gives it. Return its state."""
    job = cluster.describe(job_id)
    if job.ended:
        return state(cluster, job)
    cluster.stop(job_id)
    given_s = job.stop_wait_s
    say(f"stopping {job_id}: it first commits a checkpoint, within {given_s} s")
    until = time.monotonic() + given_s + LAST_LINES_S
    while wait and job.status not in ENDED and time.monotonic() < until:
        time.sleep(poll_s)
        job = cluster.describe(job_id)
    return state(cluster, job)


def follow(cluster: JobApi, job_id: str, show: Say, say: Say, poll_s: float = POLL_S) -> dict[str, Any]:
    """Show a job's output until it has ended. Return its state.

    After a lost connection, it connects again and goes on at the same place. Raises RunError if the cluster does not answer for ten
    minutes.
    """
    return asyncio.run(_Follower(cluster, job_id, show, say, poll_s).follow())


class _Follower:
    """A follower of one job's log, on one connection at a time. It also polls the status: a dead connection may look idle."""

    def __init__(self, cluster: JobApi, job_id: str, show: Say, say: Say, poll_s: float) -> None:
        self._cluster, self._job_id, self._show, self._say, self._poll_s = cluster, job_id, show, say, poll_s
        self._shown = 0  # characters
        self._failures = 0

    async def follow(self) -> dict[str, Any]:
        log = asyncio.create_task(self._log())
        answered_at, lost = time.monotonic(), False
        try:
            while True:
                try:
                    job = await asyncio.to_thread(self._cluster.describe, self._job_id)
                except Unreachable as error:
                    if time.monotonic() - answered_at > SILENCE_S:
                        raise RunError(
                            f"{error} It has not answered for {SILENCE_S:.0f} s. If the cluster is alive, the job goes on."
                        ) from None
                    if not lost:
                        self._say(f"{error} The job goes on; trying again")
                    lost = True
                else:
                    answered_at = time.monotonic()
                    if _broke_off(log):
                        self._count(log)
                    if lost or (log.done() and not job.ended) or _broke_off(log):
                        if lost:
                            self._say(f"{self._cluster.url} answers again")
                        log, lost = await self._anew(log), False
                    if job.ended:
                        await self._last_lines(log)
                        return state(self._cluster, job)
                await asyncio.sleep(self._poll_s)
        finally:
            log.cancel()
            await asyncio.gather(log, return_exceptions=True)

    async def _last_lines(self, log: asyncio.Task[None]) -> None:
        await asyncio.wait([log], timeout=LAST_LINES_S)
        while _broke_off(log) and self._failures < FAILURES:
            self._count(log)
            log = await self._anew(log)
            await asyncio.wait([log], timeout=LAST_LINES_S)

    async def _anew(self, log: asyncio.Task[None]) -> asyncio.Task[None]:
        log.cancel()
        await asyncio.gather(log, return_exceptions=True)
        return asyncio.create_task(self._log())

    def _count(self, log: asyncio.Task[None]) -> None:
        self._failures += 1
        if self._failures == FAILURES:
            self._say(f"{log.exception()} Polling it every {self._poll_s:g} s instead")

    async def _log(self) -> None:
        """Show the new part of the log. Every connection sends a log from its beginning."""
        if self._failures >= FAILURES:
            await self._ask()
            return
        received = 0
        async for text in self._cluster.log(self._job_id):
            self._failures = 0
            new = text[max(self._shown - received, 0) :]
            received += len(text)
            if new:
                self._shown = received
                self._show(new)

    async def _ask(self) -> None:
        """Poll the log until the job has ended, for networks that do not keep connections open."""
        while True:
            job = await asyncio.to_thread(self._cluster.describe, self._job_id)
            text = await asyncio.to_thread(self._cluster.log_so_far, self._job_id)
            new, self._shown = text[self._shown :], max(self._shown, len(text))
            if new:
                self._show(new)
            if job.ended:
                return
            await asyncio.sleep(self._poll_s)


def _broke_off(log: asyncio.Task[None]) -> bool:
    return log.done() and (log.cancelled() or log.exception() is not None)
