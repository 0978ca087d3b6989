"""Launch a job, the next best where there is no capacity for the first, and follow it if asked to."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.asked import check_script
from launchers.sagemaker import watch
from launchers.sagemaker.bundle import REQUIREMENTS, pack
from launchers.sagemaker.groups import Groups
from launchers.sagemaker.images import check_image
from launchers.sagemaker.job import ENTRY, Job
from launchers.sagemaker.order import Order
from launchers.sagemaker.resolve import check_requirements
from launchers.sagemaker.service import NoCapacity, Service
from launchers.sagemaker.submit import Submitter, start, starter, upload
from launchers.sagemaker.watch import Say
from offload.errors import ConfigError, RunError
from offload.model import Catalog


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One job to try, and the token of its hosts, which travels in its bundle alone."""

    job: Job
    token: str


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that can be known before any call. ``notes``: what a user should know of it."""

    attempts: tuple[Attempt, ...]
    script: Path
    catalog: Catalog
    plan: Path | None = None
    notes: tuple[str, ...] = ()

    def bundle(self, attempt: Attempt) -> bytes:
        """What an attempt uploads. Raises ConfigError for what must not, or cannot, be."""
        return pack(self.script, ENTRY, attempt.token, self.plan)


def prepare(
    order: Order, name: str, choices: Sequence[Groups], script: Path, catalog: Catalog, plan: Path | None = None
) -> Prepared:
    """Check everything. ``choices``: groups, best first; others than the best are left out where the order does not allow them.

    Raises ConfigError for all that the service, or a container, would refuse.
    """
    check_script(script)
    image = check_image(order.image)
    attempts: list[Attempt] = []
    notes: list[str] = []
    for number, groups in enumerate(choices, start=1):
        try:
            job = order.job(name if number == 1 else f"{name}-{number}", groups, catalog, secrets.token_hex(4))
        except ConfigError as error:
            if number == 1:
                raise
            notes.append(f"not an alternative: {' + '.join(f'{g.count} × {g.instance_type}' for g in groups)}: {error}")
        else:
            attempts.append(Attempt(job=job, token=secrets.token_hex(32)))
    own = script.parent / REQUIREMENTS
    if own.is_file():
        notes.append(check_requirements(own, image))
    return Prepared(attempts=tuple(attempts), script=script, catalog=catalog, plan=plan, notes=tuple(notes))


def launch(
    prepared: Prepared,
    service: Service,
    submitter: Submitter,
    *,
    wait: bool,
    say: Say,
    started: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Launch, and with ``wait`` follow to the end. Returns the job's state as a document (:func:`launchers.sagemaker.watch.state`).

    ``started`` is called with the name of each job that AWS took. Raises ConfigError where AWS refuses, NoCapacity where it has
    none of the choices, RunError where it started a job and then tells nothing of it.
    """
    by = starter(submitter)
    for number, attempt in enumerate(prepared.attempts, start=1):
        job = attempt.job
        try:
            upload(job, prepared.bundle(attempt), service)
            start(job, service, by)
            started(job.name)
            say(f"started {job.name}: {' + '.join(f'{g.count} × {g.instance_type}' for g in job.groups)}")
            return _state(prepared, service, job.name, wait, say)
        except NoCapacity as error:
            if number == len(prepared.attempts):
                raise
            say(f"{error}\nthe next best of the plan is tried")
    raise AssertionError("there is at least one attempt")


def _state(prepared: Prepared, service: Service, name: str, wait: bool, say: Say) -> dict[str, Any]:
    try:
        if wait:
            ended, rates = watch.follow(service, name, say)
            return watch.state(ended, prepared.catalog, rates)
        return watch.state(watch.describe(service, name), prepared.catalog)
    except NoCapacity:
        raise
    except ConfigError as error:
        raise RunError(f"{name} was started and goes on, but: {error}") from None
