"""Launch a job, the next best where there is no capacity for the first, and follow it if asked to."""

from __future__ import annotations

import ast
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.sagemaker import watch
from launchers.sagemaker.bundle import pack
from launchers.sagemaker.groups import Groups
from launchers.sagemaker.job import ENTRY, Job
from launchers.sagemaker.order import Order
from launchers.sagemaker.service import NoCapacity, Service
from launchers.sagemaker.submit import Submitter, start, upload
from launchers.sagemaker.watch import Say
from offload.errors import ConfigError, RunError
from offload.model import Catalog


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that can be known before any call: the jobs to try, best first, and the bundle."""

    jobs: tuple[Job, ...]
    script: Path
    catalog: Catalog

    def bundle(self) -> bytes:
        """With a token of its own. Raises ConfigError for what must not, or cannot, be uploaded."""
        return pack(self.script, ENTRY, secrets.token_hex(32))


def prepare(order: Order, name: str, choices: Sequence[Groups], script: Path, catalog: Catalog) -> Prepared:
    """Check everything. Raises ConfigError for all that the service, or a container, would refuse."""
    _check_script(script)
    names = [name, *(f"{name}-{number}" for number in range(2, len(choices) + 1))]
    jobs = tuple(order.job(each, groups, catalog) for each, groups in zip(names, choices, strict=True))
    return Prepared(jobs=jobs, script=script, catalog=catalog)


def launch(prepared: Prepared, service: Service, submitter: Submitter, *, wait: bool, say: Say) -> dict[str, Any]:
    """Launch, and with ``wait`` follow to the end. Returns the job's state as a document (:func:`launchers.sagemaker.watch.state`).

    Raises ConfigError where AWS refuses, NoCapacity where it has none of the choices, RunError where it started a job and then
    tells nothing of it.
    """
    for number, job in enumerate(prepared.jobs, start=1):
        try:
            upload(job, prepared.bundle(), service)
            start(job, service, submitter)
            say(f"started {job.name}: {' + '.join(f'{g.count} × {g.instance_type}' for g in job.groups)}")
            return _state(prepared, service, job.name, wait, say)
        except NoCapacity as error:
            if number == len(prepared.jobs):
                raise
            say(f"{error}\nthe next best of the plan is tried")
    raise AssertionError("there is at least one choice")


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


def _check_script(script: Path) -> None:
    """What would fail on rented machines. Nothing of the script is run: it may need what only they have."""
    if not script.is_file():
        raise ConfigError(f"there is no script {script}.")
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{script} is not Python: {error}.") from None
    names = {
        name
        for node in tree.body
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            else [alias.asname or alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else [target.id for target in node.targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign)
            else []
        )
    }
    if not names & {"build", "*"}:
        raise ConfigError(f"{script} defines no build(). Add one that returns an offload.Trainer.")
