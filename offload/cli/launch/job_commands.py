"""What ``offload launch`` does with a job, whatever runs it: launch and follow it, show its state, stop it.

Where it stops: each launcher's command has the options of its service, and makes the submissions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offload.cli.output import Emit
from offload.errors import RunError
from offload.process.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from offload.launch.launcher import Document, Launcher

FILE = click.Path(path_type=Path)


def job_arguments(command: Any) -> Any:
    """Add SCRIPT and its arguments to a command."""
    command = click.argument("args", nargs=-1, type=click.UNPROCESSED)(command)
    return click.argument("script", type=FILE, required=False)(command)


def job_options(*, job: str, dry_run: str, status: str, stop: str) -> Callable[[Any], Any]:
    """Add the options of every launcher to a command.

    Args:
        job: what the service calls a job's identity, such as ``ID``.
        dry_run, status, stop: what these options do, for the help.
    """
    options = (
        click.option("--dry-run", is_flag=True, help=dry_run),
        click.option("--status", "status_of", metavar=job, help=status),
        click.option("--stop", "stop_job", metavar=job, help=stop),
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            help="Print one document on stdout: the job's state, or the request (--dry-run).",
        ),
    )

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@dataclass(frozen=True, kw_only=True)
class JobCommands:
    """The commands about the jobs of one launcher.

    Args:
        launcher: the service that runs the jobs.
        text_of: a job's state as text.
        emit: prints the state, as a document or as text.
        show: prints a part of a job's output.
    """

    launcher: Launcher[Any]
    text_of: Callable[[Mapping[str, Any]], str]
    emit: Emit
    show: Callable[[str], None]

    def launch(self, submissions: Sequence[Any], *, wait: bool) -> None:
        """Submit the first job for which the service has machines. With ``wait``, follow it and exit with its code."""
        from offload.launch.launcher import launch

        try:
            state = launch(self.launcher, submissions, wait=wait, show=self.show, say=say)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        self._print(state, exits=wait)

    def status(self, job_id: str, *, wait: bool = False) -> None:
        """Print a job's state. With ``wait``, follow it first, and exit with its code."""
        state = self.launcher.state(job_id)  # a wrong address fails here, not after ten minutes of silence
        if wait:
            try:
                state = self.launcher.watch(job_id, self.show, say)
            except KeyboardInterrupt:
                raise click.exceptions.Exit(INTERRUPTED) from None
        self._print(state, exits=wait)

    def stop(self, job_id: str, *, wait: bool) -> None:
        """Stop a job and print its state. With ``wait``, exit with 1 if it still runs after its time to stop."""
        try:
            state = self.launcher.stop(job_id, say, wait=wait)
        except KeyboardInterrupt:
            say(f"{job_id} is stopping, if the request reached it: {self.launcher.how_to_see(job_id)}")
            raise click.exceptions.Exit(INTERRUPTED) from None
        self._print(state, exits=False)
        if wait and self.launcher.exit_code(state) is None:
            say(f"{job_id} still runs, after its time to stop: check --status and its log.")
            raise click.exceptions.Exit(RunError.exit_code)

    def _print(self, state: Document, *, exits: bool) -> None:
        self.emit(state, self.text_of(state))
        if exits and (code := self.launcher.exit_code(state)):
            raise click.exceptions.Exit(code)


def say(text: str) -> None:
    """Tell the user something beside the command's output."""
    click.echo(text, err=True)
