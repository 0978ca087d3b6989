"""The launcher for SageMaker: jobs that are ready to submit, and the service that takes them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError
from offload.launch.arguments import check_script
from offload.launch.launcher import Document, Say
from offload.launch.requirements import check_targets
from offload.launch.sagemaker import running_job
from offload.launch.sagemaker.bundle import REQUIREMENTS, pack
from offload.launch.sagemaker.groups import Groups
from offload.launch.sagemaker.images import check_image
from offload.launch.sagemaker.job import ENTRY, SageMakerJob
from offload.launch.sagemaker.job_template import JobTemplate
from offload.launch.sagemaker.resolve import check_requirements
from offload.launch.sagemaker.service import Service
from offload.launch.sagemaker.submit import Submitter, start, starter, upload
from offload.launch.uploaded_files import left_behind
from offload.model import Catalog


@dataclass(frozen=True, kw_only=True)
class SageMakerSubmission:
    """A job with its bundle. Only the bundle holds the token with which the job's hosts authenticate."""

    job: SageMakerJob
    token: str
    script: Path
    plan: Path | None = None

    @property
    def job_id(self) -> str:
        """The job's name."""
        return self.job.name

    def render(self) -> Document:
        """The document of a CreateTrainingJob call."""
        return self.job.request()

    def bundle(self) -> bytes:
        """The tar.gz archive that the job's hosts fetch. Raises ConfigError for files that must not, or cannot, travel."""
        return pack(self.script, ENTRY, self.token, self.plan)


@dataclass(frozen=True, kw_only=True)
class PreparedJobs:
    """Jobs to try, best first. ``notes``: messages about them to the user."""

    jobs: tuple[SageMakerSubmission, ...]
    notes: tuple[str, ...] = ()


def prepare(
    template: JobTemplate,
    name: str,
    choices: Sequence[Groups],
    script: Path,
    catalog: Catalog,
    plan: Path | None = None,
) -> PreparedJobs:
    """Check everything that can be checked before any call.

    ``choices``: instance groups, best first. Choices other than the best are dropped if the template does not allow them.

    Raises ConfigError for values that the service, or a container, would refuse.
    """
    check_script(script)
    image = check_image(template.image)
    jobs: list[SageMakerSubmission] = []
    notes: list[str] = []
    for number, groups in enumerate(choices, start=1):
        try:
            job = template.job(name if number == 1 else f"{name}-{number}", groups, catalog, secrets.token_hex(4))
        except ConfigError as error:
            if number == 1:
                raise
            notes.append(f"not an alternative: {_words(groups)}: {error}")
        else:
            jobs.append(SageMakerSubmission(job=job, token=secrets.token_hex(32), script=script, plan=plan))
    notes += left_behind(script.parent)
    own = script.parent / REQUIREMENTS
    if own.is_file():
        check_targets(own)
        notes.append(check_requirements(own, image))
    return PreparedJobs(jobs=tuple(jobs), notes=tuple(notes))


class SageMakerLauncher:
    """The service in one region. See :class:`offload.launch.launcher.Launcher`.

    Args:
        service: the account and the region.
        catalog: prices, for the cost of jobs.
        submitter: the client that sends requests.

    Raises:
        ConfigError: if ``submitter`` is not installed.
    """

    def __init__(self, service: Service, catalog: Catalog, submitter: Submitter = "auto") -> None:
        self._service, self._catalog = service, catalog
        self._start = starter(submitter)

    def submit(self, submission: SageMakerSubmission) -> str:
        """Upload the bundle to the bucket and start the job."""
        job = submission.job
        upload(job, submission.bundle(), self._service)
        start(job, self._service, self._start)
        return f"started {job.name}: {_words(job.groups)}"

    def state(self, job_id: str) -> Document:
        """A document of the schema ``offload.sagemaker-job/1``."""
        return running_job.state(running_job.describe(self._service, job_id), self._catalog)

    def watch(self, job_id: str, show: Say, say: Say) -> Document:
        """Show the output of a job's hosts until it has ended. Raises NoCapacity if it never got its instances."""
        ended, rates = running_job.follow(self._service, job_id, show, say)
        return running_job.state(ended, self._catalog, rates)

    def stop(self, job_id: str, say: Say, *, wait: bool) -> Document:
        """Ask a job to stop. The service gives its containers two minutes, in which they commit a checkpoint if they get the signal."""
        if self.exit_code(self.state(job_id)) is None:
            running_job.stop(self._service, job_id)
            say(f"stopping {job_id}: the service gives its containers two minutes to end")
        state = self.state(job_id)
        while wait and self.exit_code(state) is None:
            time.sleep(running_job.POLL_S)
            state = self.state(job_id)
        return state

    def exit_code(self, state: Document) -> int | None:
        """The exit code: 0 for a completed job, 1 for a job that failed or was stopped."""
        return None if state["status"] not in running_job.ENDED else int(state["status"] != "Completed")

    def how_to_see(self, job_id: str) -> str:
        """The commands that show and stop a job, with the service's region."""
        how = f"offload launch sagemaker --region {self._service.region}"
        return f"`{how} --status {job_id}` shows it, `{how} --stop {job_id}` stops it."


def _words(groups: Groups) -> str:
    return " + ".join(f"{group.count} × {group.instance_type}" for group in groups)
