"""The launcher for Ray clusters: jobs that are ready to submit, and the cluster that takes them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from offload.errors import ConfigError, argument
from offload.launch.launcher import Document, Say
from offload.launch.ray import running_job
from offload.launch.ray.bundle import Bundle
from offload.launch.ray.job import RayJob, job_id
from offload.launch.ray.job_api import JobApi

WORKING_DIR = "working_dir.zip"


@dataclass(frozen=True, kw_only=True)
class RaySubmission:
    """A job with its own id and its bundle."""

    job_id: str
    job: RayJob
    archive: bytes

    @classmethod
    def of(cls, job: RayJob, bundle: Bundle) -> RaySubmission:
        """A submission with a new id: a cluster does not accept an id twice."""
        return cls(job_id=job_id(job.name, datetime.now(UTC)), job=job, archive=bundle.archive)

    def render(self) -> Document:
        """The arguments of Ray's ``submit_job``."""
        return self.job.request(self.job_id, WORKING_DIR)

    def bundle(self) -> bytes:
        """The zip archive that becomes the job's working directory."""
        return self.archive


class RayLauncher:
    """One cluster. See :class:`offload.launch.launcher.Launcher`."""

    def __init__(self, cluster: JobApi) -> None:
        self.cluster = cluster

    def submit(self, submission: RaySubmission) -> str:
        """Upload the archive, unless the cluster has it, and start the job."""
        job = submission.job
        run_dir = job.run_dir_there
        for other in self.cluster.running_in(run_dir):
            raise ConfigError(
                f"the job {other} already runs in {run_dir}: stop it first "
                f"({argument('stop', other, python=f'stop({other!r})')}), or choose another {argument('name')}."
            )
        self.cluster.submit(job, submission.job_id, submission.archive)
        return (
            f"started {submission.job_id} at {self.cluster.url}; its run directory is {run_dir} on the cluster's head"
        )

    def state(self, job_id: str) -> Document:
        """A document of the schema ``offload.ray-job/1``."""
        return running_job.state(self.cluster, self.cluster.describe(job_id))

    def watch(self, job_id: str, show: Say, say: Say) -> Document:
        """Show a job's output until it has ended. Raises RunError if the cluster does not answer for ten minutes."""
        return running_job.follow(self.cluster, job_id, show, say)

    def stop(self, job_id: str, say: Say, *, wait: bool) -> Document:
        """Ask a job to stop; with ``wait``, wait as long as Ray lets it commit a checkpoint."""
        return running_job.stop(self.cluster, job_id, say, wait=wait)

    def exit_code(self, state: Document) -> int | None:
        """The exit code of the job's driver."""
        code: int | None = state["exit_code"]
        return code

    def how_to_see(self, job_id: str) -> str:
        """The commands that show and stop a job, with the cluster's address."""
        how = f"offload launch ray --address {self.cluster.url}"
        return f"`{how} --status {job_id}` shows it, `{how} --stop {job_id}` stops it."
