"""What :class:`offload.launch.launcher.Launcher` promises, checked of a launcher and a job that runs until it is stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from offload.cli.launch import launch as command
from offload.errors import ConfigError
from offload.launch.launcher import Launcher, SomeSubmission, Submission


def rendering_is_pure(submission: Submission, secret: str | None = None) -> None:
    """The request is JSON and the same each time, and so is the archive. The request holds no secret."""
    request = json.dumps(submission.render())
    assert json.dumps(submission.render()) == request
    assert submission.bundle() == submission.bundle()
    assert secret is None or secret not in request


def holds(launcher: Launcher[SomeSubmission], submission: SomeSubmission, runs: Callable[[], bool]) -> None:
    """Submit the job, look at it, stop it, and watch what is left of it. ``runs``: waits until the job runs."""
    said: list[str] = []

    for ask in (launcher.state, lambda name: launcher.stop(name, said.append, wait=True)):
        with pytest.raises(ConfigError, match=submission.job_id):
            ask(submission.job_id)
    assert submission.job_id in launcher.submit(submission)
    assert runs()
    state = launcher.state(submission.job_id)
    assert json.loads(json.dumps(state)) == state
    assert state["schema"].startswith("offload.")
    assert launcher.exit_code(state) is None

    stopped = launcher.stop(submission.job_id, said.append, wait=True)
    assert launcher.exit_code(stopped)
    assert stopped["schema"] == state["schema"]
    assert submission.job_id in said[-1]
    assert launcher.stop(submission.job_id, said.append, wait=True)["status"] == stopped["status"]
    assert len(said) == 1  # the second time there was nothing to stop
    assert launcher.watch(submission.job_id, lambda text: None, said.append)["status"] == stopped["status"]

    for line in re.findall(r"`offload launch ([^`]+)`", launcher.how_to_see(submission.job_id)):
        name, *arguments = line.split()
        assert arguments[-2] in ("--status", "--stop")
        assert arguments[-1] == submission.job_id
        options = {option for parameter in command.commands[name].params for option in parameter.opts}
        assert set(arguments[::2]) <= options
