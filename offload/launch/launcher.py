"""The protocols of all launchers: render a job, submit it, watch it to its end, stop it.

A submission holds everything that travels, and renders to the request to a service. A launcher talks to one service.
:func:`launch` drives any launcher. Where it stops: other modules parse the command line and print states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from offload.errors import ConfigError, OffloadError, RunError

Document = dict[str, Any]
Say = Callable[[str], None]


class NoCapacity(ConfigError):
    """The service, or the account's quota, has no capacity for these machines."""


class Unreachable(OffloadError):
    """The service did not answer. It may have carried out the request, and may be asked again."""


class Submission(Protocol):
    """A checked job with all that it takes along. Its methods do not contact a service."""

    @property
    def job_id(self) -> str:
        """The id under which the service knows the job."""

    def render(self) -> Document:
        """The request, in JSON's types. It is the same at each call, and holds no secrets."""

    def bundle(self) -> bytes:
        """The archive that travels with the request. Raises ConfigError for files that must not, or cannot, travel."""


SomeSubmission = TypeVar("SomeSubmission", bound=Submission)
_Submitted = TypeVar("_Submitted", contravariant=True)


class Launcher(Protocol[_Submitted]):
    """One service that runs jobs.

    A job's state is a document with a ``schema``, the service's word for its ``status``, and other fields of the schema.

    Raises:
        ConfigError: if the service does not know the job id, or refuses the request.
        Unreachable: if the service does not answer.
    """

    def submit(self, submission: _Submitted) -> str:
        """Upload a job's bundle and start the job. Return a sentence about the started job.

        Raises NoCapacity if the service lacks such machines.
        """

    def state(self, job_id: str) -> Document:
        """A job's current state."""

    def watch(self, job_id: str, show: Say, say: Say) -> Document:
        """Pass a job's output to ``show``, and its events to ``say``, until it has ended. Return its last state."""

    def stop(self, job_id: str, say: Say, *, wait: bool) -> Document:
        """Ask a job to stop; with ``wait``, wait until it has ended or its time to stop is up. Return its state.

        A job that has ended does not change.
        """

    def exit_code(self, state: Document) -> int | None:
        """The exit code of a command that waited for a job in this state; None if the job has not ended."""

    def how_to_see(self, job_id: str) -> str:
        """A sentence with the commands that show and stop a job."""


def launch(
    launcher: Launcher[SomeSubmission],
    submissions: Sequence[SomeSubmission],
    *,
    wait: bool,
    show: Say,
    say: Say = lambda text: None,
) -> Document:
    """Submit the first job for which the service has machines, and with ``wait``, watch it to its end. Return its state.

    ``submissions``: the jobs to try, best first, at least one. A service may notice that it lacks machines only after it accepted a
    job; this then submits the next one, too.

    Raises:
        ConfigError: if the service refuses; NoCapacity if it lacks machines for all jobs.
        RunError: if a job was, or may have been, started, and the service then does not answer.
        KeyboardInterrupt: on Ctrl-C, after ``say`` has told the user how to see the job.
    """
    for submission in submissions:
        started = False
        try:
            sentence = launcher.submit(submission)
            started = True
            say(sentence)
            return launcher.watch(submission.job_id, show, say) if wait else launcher.state(submission.job_id)
        except NoCapacity as error:
            if submission is submissions[-1]:
                raise
            say(f"{error}\nTrying the plan's next best candidate.")
        except KeyboardInterrupt:
            goes_on = "goes on" if started else "may have been started"
            say(f"{submission.job_id} {goes_on}: {launcher.how_to_see(submission.job_id)}")
            raise
        except OffloadError as error:
            if not started and not isinstance(error, Unreachable):
                raise
            was = "was" if started else "may have been"
            raise RunError(
                f"{error} {submission.job_id} {was} started: {launcher.how_to_see(submission.job_id)}"
            ) from None
    raise ValueError("there is no job to launch")
