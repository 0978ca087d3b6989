"""``offload launch ray``, which runs a training as a job on any Ray cluster."""

from __future__ import annotations

import getpass
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offload.cli.launch.job_commands import FILE, JobCommands, job_arguments, job_options, say
from offload.cli.output import Emit, stdout_for_json
from offload.cli.parameters import check_together
from offload.errors import ConfigError
from offload.report.terminal.job_text import format_ray_job, format_ray_request

if TYPE_CHECKING:
    from offload.launch.ray.job import RayJob

OF_A_JOB = {"status_of": ("address", "as_json"), "stop_job": ("address", "as_json", "no_wait")}
"""The options that are valid with --status and --stop."""


@click.command(context_settings={"ignore_unknown_options": False})
@job_arguments
@click.option(
    "--address", metavar="URL", envvar=["OFFLOAD_RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"], show_envvar=True,
    help="Address of the cluster's dashboard, such as http://head:8265.",
)  # fmt: skip
@click.option("--working-dir", type=FILE, help="The folder to upload (default: the script's).")
@click.option("--name", help="Name of the run (default: the script's). The job's id is this name and the time.")
@click.option("--max-workers", type=int, metavar="N", help="The most workers, instead of the script's setting.")
@click.option("--cpus-per-worker", type=float, metavar="N", help="CPUs that each worker reserves.")
@click.option("--gpus-per-worker", type=float, metavar="N", help="GPUs that each worker reserves.")
@click.option("--requirements", type=FILE, help="pip requirements to install on the nodes for this job.")
@click.option(
    "--env", "environment", multiple=True, metavar="NAME=VALUE",
    help="Variable of the job's processes. Pass no secrets: everyone with access to the dashboard can see them.",
)  # fmt: skip
@click.option("--run-dir", help="Run directory on the cluster's head (default: ~/offload-runs/USER/NAME).")
@click.option(
    "--storage-path", metavar="URI", help="Folder of checkpoints; with several nodes, one that all of them reach."
)
@click.option("--overwrite", is_flag=True, help="Replace the run that the directory holds, instead of resuming it.")
@click.option("--no-wait", is_flag=True, help="Do not follow the job to its end.")
@job_options(
    job="ID",
    dry_run="Check everything here and print the request. No cluster is needed.",
    status="Show the state of a job.",
    stop="Stop a job, once it has committed a checkpoint.",
)
@click.pass_context
def ray(
    ctx: click.Context,
    /,
    script: Path | None,
    args: tuple[str, ...],
    address: str | None,
    no_wait: bool,
    dry_run: bool,
    status_of: str | None,
    stop_job: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Train SCRIPT as a job on a Ray cluster: any that runs offload's version of Ray and serves its dashboard.

    \b
        offload launch ray train.py --address http://head:8265 --max-workers 4 \\
            --requirements requirements.txt -- --epochs 20

    The job ships SCRIPT's folder, without hidden files, runs and checkpoints, and the installed offload. Arguments after -- go to the
    script. The command shows the job's output until it ends, and exits with its exit code; Ctrl-C leaves the job running. The same
    command again resumes a run that did not finish.
    """  # fmt: skip
    with stdout_for_json(as_json) as emit:
        check_together(ctx, OF_A_JOB)
        _check_id("--status", status_of)
        _check_id("--stop", stop_job)
        if stop_job is not None:
            _commands(address, emit).stop(stop_job, wait=not no_wait)
            return
        if status_of is not None:
            _commands(address, emit).status(status_of)
            return
        if script is None:
            raise ConfigError(
                "SCRIPT is missing: a Python file that defines build() -> offload.Trainer. (Or --status ID, or --stop ID.)"
            )
        _launch(script, args, address, no_wait, dry_run, asked, emit)


def _check_id(option: str, job_id: str | None) -> None:
    """Raise ConfigError for text that is no job's id."""
    if job_id is not None and not re.fullmatch(r"[^\s/?#]+", job_id):
        raise ConfigError(f"{option} must be the id of a job, as the launch printed it, found {job_id!r}.")


def _launch(
    script: Path, args: tuple[str, ...], address: str | None, no_wait: bool, dry_run: bool, asked: dict[str, Any], emit: Emit
) -> None:  # fmt: skip
    from offload.launch.arguments import check_script
    from offload.launch.ray.address import dashboard_url
    from offload.launch.ray.bundle import pack
    from offload.launch.ray.launcher import RaySubmission

    check_script(script)
    bundle = pack(script, asked.pop("working_dir"))
    for note in bundle.left_behind:
        say(note)
    submission = RaySubmission.of(_job(bundle.script, args, **asked), bundle)
    if dry_run:
        if address is not None:
            dashboard_url(address)
        request = submission.render()
        emit(request, format_ray_request(request, bundle_bytes=len(bundle.archive)))
        return
    _commands(address, emit).launch([submission], wait=not no_wait)


def _commands(address: str | None, emit: Emit) -> JobCommands:
    from offload.launch.ray.job_api import JobApi, check_installed
    from offload.launch.ray.launcher import RayLauncher

    if address is None:
        raise ConfigError(
            "--address is missing: pass the address of the cluster's dashboard, such as http://head:8265 (or OFFLOAD_RAY_ADDRESS, or "
            "RAY_API_SERVER_ADDRESS)."
        )
    check_installed()
    # Ray's log arrives in pieces that need not end with a line.
    show = partial(click.echo, nl=False)
    return JobCommands(launcher=RayLauncher(JobApi(address)), text_of=format_ray_job, emit=emit, show=show)


def _job(
    script: str,
    args: tuple[str, ...],
    *,
    name: str | None,
    requirements: Path | None,
    environment: tuple[str, ...],
    max_workers: int | None,
    cpus_per_worker: float | None,
    gpus_per_worker: float | None,
    **same: Any,
) -> RayJob:
    from offload.launch.arguments import pairs_of
    from offload.launch.ray.bundle import read_requirements
    from offload.launch.ray.job import RayJob, run_name
    from offload.train.config import WorkerOverrides

    return RayJob(
        name=name or run_name(Path(script).stem),
        user=_user(),
        script=script,
        args=args,
        workers=WorkerOverrides(
            max_workers=max_workers, cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker
        ),
        requirements=tuple(read_requirements(requirements)) if requirements else (),
        environment=pairs_of(environment, "--env"),
        **same,
    )


def _user() -> str:
    from offload.launch.ray.job import run_name

    try:
        return run_name(getpass.getuser(), "user")
    except (KeyError, OSError):  # a number without a name, as in some containers
        return "user"
