"""What every launcher does: render a job, submit it, watch it to its end, stop it.

A job holds everything that travels and renders to the request that a service gets. A launcher speaks to one service.
:func:`launch` drives any of them. Where it stops: options of the command line, and how states are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from offload.errors import ConfigError, OffloadError, RunError

Document = dict[str, Any]
Say = Callable[[str], None]


class NoCapacity(ConfigError):
    """The account's quota, or the service, has no room for these machines."""


class Unreachable(OffloadError):
    """The service did not answer. It may have done what it was asked to do, and may be asked again."""


class Job(Protocol):
    """A checked job. Its methods reach no service."""

    @property
    def job_id(self) -> str:
        """The id under which the service knows the job."""

    def render(self) -> Document:
        """The request, in JSON's types: the same at each call. It holds no secrets."""

    def bundle(self) -> bytes:
        """The archive that travels with the request. Raises ConfigError for files that must not, or cannot, travel."""


SomeJob = TypeVar("SomeJob", bound=Job)
_Submitted = TypeVar("_Submitted", contravariant=True)


class Launcher(Protocol[_Submitted]):
    """One service that runs jobs.

    A job's state is a document with a ``schema``, the service's word for its ``status``, and more that the schema lists.

    Raises:
        ConfigError: for a job id that the service does not know, and for what the service refuses.
        Unreachable: where the service does not answer.
    """

    def submit(self, job: _Submitted) -> str:
        """Upload a job's bundle and start the job. Returns a sentence on what was started.

        Raises NoCapacity if the service has no such machines.
        """

    def state(self, job_id: str) -> Document:
        """A job's state now."""

    def watch(self, job_id: str, show: Say, say: Say) -> Document:
        """Pass what a job prints to ``show``, and what happens to it to ``say``, until it has ended. Returns its last state."""

    def stop(self, job_id: str, say: Say, *, wait: bool) -> Document:
        """Ask a job to stop; with ``wait``, until it has or its time to stop is up. Returns its state.

        A job that has ended stays as it is.
        """

    def exit_code(self, state: Document) -> int | None:
        """The exit code of a command that waited for a job in this state; None for a job that has not ended."""

    def how_to_see(self, job_id: str) -> str:
        """A sentence with the commands that show and stop a job."""


def launch(
    launcher: Launcher[SomeJob], jobs: Sequence[SomeJob], *, wait: bool, show: Say, say: Say = lambda text: None
) -> Document:
    """Submit the first job that the service has the machines for, and with ``wait`` watch it to its end. Returns its state.

    ``jobs``: best first, at least one. A service may find out that it lacks machines only after it took a job: the next one is
    submitted then, too.

    Raises:
        ConfigError: if the service refuses; NoCapacity where it has machines for none of the jobs.
        RunError: if a job was, or may have been, started and the service then says nothing about it.
        KeyboardInterrupt: on Ctrl-C, after ``say`` has told the user how to see the job.
    """
    for job in jobs:
        started = False
        try:
            said = launcher.submit(job)
            started = True
            say(said)
            return launcher.watch(job.job_id, show, say) if wait else launcher.state(job.job_id)
        except NoCapacity as error:
            if job is jobs[-1]:
                raise
            say(f"{error}\nTrying the next best of the plan.")
        except KeyboardInterrupt:
            goes_on = "goes on" if started else "may have been started"
            say(f"{job.job_id} {goes_on}: {launcher.how_to_see(job.job_id)}")
            raise
        except OffloadError as error:
            if not started and not isinstance(error, Unreachable):
                raise
            was = "was" if started else "may have been"
            raise RunError(f"{error} {job.job_id} {was} started: {launcher.how_to_see(job.job_id)}") from None
    raise ValueError("there is no job to launch")
