"""``offload launch sagemaker``, which runs a training as a heterogeneous job on Amazon SageMaker."""

from __future__ import annotations

import math
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offload.cli.launch.job_commands import FILE, JobCommands, job_arguments, job_options, say
from offload.cli.output import Emit, stdout_for_json
from offload.cli.parameters import check_together
from offload.errors import ConfigError
from offload.files import read_json
from offload.prices import load_catalog
from offload.report.terminal.job_text import format_sagemaker_job, format_sagemaker_request

if TYPE_CHECKING:
    from offload.launch.sagemaker.groups import Groups
    from offload.launch.sagemaker.job_template import JobTemplate
    from offload.launch.sagemaker.launcher import PreparedJobs
    from offload.launch.sagemaker.service import Service
    from offload.model import Catalog

MOST = 10**9
_WITH_A_JOB = ("region", "catalog_path", "as_json", "wait")
OF_A_JOB = {"status_of": _WITH_A_JOB, "stop_job": _WITH_A_JOB, "requirements": ("as_json",)}
"""The options that are valid with --status, --stop and --requirements."""
_REGION_OF_IMAGE = re.compile(r"\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.")


class Positive(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A number above 0, and small enough for any clock."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 < number <= MOST:  # nor NaN
            self.fail(f"{value!r} is not a number above 0{f', {MOST:,} at most' if number > MOST else ''}.", param, ctx)
        return number


POSITIVE = Positive()


@click.command(context_settings={"ignore_unknown_options": False})
@job_arguments
@click.option(
    "--gpu", "gpus", multiple=True, metavar="TYPE:COUNT", help="Instances for the workers, such as ml.g5.xlarge:1."
)
@click.option(
    "--cpu", "cpus", multiple=True, metavar="TYPE:COUNT", help="Instances that only preprocess; may be repeated."
)
@click.option(
    "--plan",
    "plan_path",
    type=FILE,
    help="Use the recommendation of a plan.json (offload plan -o) instead of --gpu and --cpu.",
)
@click.option("--role", metavar="ARN", envvar="OFFLOAD_ROLE", help="The role of the job. [env: OFFLOAD_ROLE]")
@click.option(
    "--bucket", envvar="OFFLOAD_BUCKET", help="Bucket for script, checkpoints and results. [env: OFFLOAD_BUCKET]"
)
@click.option("--image-uri", metavar="URI", help="The container image, the same for all instances.")
@click.option("--framework-version", metavar="X.Y", help="Use AWS's own image for this PyTorch version instead.")
@click.option("--region", help="AWS region (default: that of your AWS configuration).")
@click.option("--name", help="The job's name (default: the script's, with the time).")
@click.option(
    "--input", "inputs", multiple=True, metavar="NAME[@GROUP,..]=S3URI",
    help="Input data, which the instances get below /opt/ml/input/data/NAME; may be repeated.",
)  # fmt: skip
@click.option(
    "--input-mode", type=click.Choice(["File", "FastFile"]), default="File", show_default=True,
    help="File: each instance copies its data before training. FastFile: it reads data from S3 on demand.",
)  # fmt: skip
@click.option(
    "--max-usd",
    type=POSITIVE,
    metavar="USD",
    help="Stop the job before it costs more than this.",
)
@click.option(
    "--max-hours",
    type=POSITIVE,
    default=24.0,
    show_default=True,
    help="Stop the job after this time.",
)
@click.option(
    "--spot", is_flag=True, help="Use spot capacity, which is cheaper; an interrupted job resumes from its checkpoints."
)
@click.option(
    "--checkpoints",
    metavar="S3URI",
    help="Folder of checkpoints, also to resume from (default: a folder of the job's own).",
)
@click.option(
    "--hyperparameter",
    "hyperparameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="Argument for the script, passed as --NAME VALUE, exactly as typed.",
)
@click.option(
    "--env",
    "environment",
    multiple=True,
    metavar="NAME=VALUE",
    help="Variable for the containers. No secrets: they would be visible.",
)
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="Tag of the job.")
@click.option("--subnet", "subnets", multiple=True, metavar="ID", help="Run inside a VPC; with --security-group.")
@click.option(
    "--security-group",
    "security_groups",
    multiple=True,
    metavar="ID",
    help="Security group in the VPC; it must allow all TCP from itself.",
)
@click.option("--kms-key", metavar="ID", help="Key that encrypts volumes, script and results.")
@click.option("--encrypt-traffic", is_flag=True, help="Encrypt traffic between the instances, too (slower).")
@click.option(
    "--image-entrypoint", is_flag=True,
    help="Start the containers with the image's own entrypoint. The script then gets no notice of a stop.",
)  # fmt: skip
@click.option("--volume-gib", type=int, default=50, show_default=True, help="Disk size of each instance.")
@click.option(
    "--hosts-deadline", type=POSITIVE, default=600.0, show_default=True, metavar="SECONDS",
    help="The time that started instances wait for the others.",
)  # fmt: skip
@click.option("--catalog", "catalog_path", type=FILE, help="TOML file with more instance types, or other prices.")
@click.option(
    "--submitter", type=click.Choice(["auto", "estimator", "boto3"]), default="auto", show_default=True,
    help="The estimator of the SageMaker SDK, version 2, or boto3; auto: the estimator if installed. Both send the same request.",
)  # fmt: skip
@click.option(
    "--wait", is_flag=True, help="Show the instances' output until the job ends, then its cost and throughput."
)
@click.option(
    "--requirements",
    is_flag=True,
    help="Only print offload's requirements on the instances, for an image of your own.",
)
@job_options(
    job="NAME",
    dry_run="Check everything and print the request. No credentials are needed.",
    status="Show the state and the cost of a job; with --wait, its output until it ends.",
    stop="Stop a job; its last checkpoint stays.",
)
@click.pass_context
def sagemaker(
    ctx: click.Context,
    /,
    script: Path | None,
    args: tuple[str, ...],
    as_json: bool,
    dry_run: bool,
    status_of: str | None,
    stop_job: str | None,
    wait: bool,
    submitter: Any,
    catalog_path: Path | None,
    plan_path: Path | None,
    region: str | None,
    requirements: bool,
    **asked: Any,
) -> None:
    """Train SCRIPT as an Amazon SageMaker job whose CPU instances preprocess for its GPU instances.

    \b
        offload launch sagemaker train.py --gpu ml.g5.xlarge:1 --cpu ml.c5.4xlarge:2 \\
            --role arn:aws:iam::123456789012:role/training --bucket my-bucket \\
            --framework-version 2.8 --max-usd 20 --wait -- --epochs 20

    The job ships SCRIPT's folder, without hidden files, runs and checkpoints, and the installed offload. Arguments after -- go to the
    script. --dry-run shows the request first. Ctrl-C under --wait leaves the job running.
    """  # fmt: skip
    with stdout_for_json(as_json) as emit:
        check_together(ctx, OF_A_JOB)
        _check_installed()
        from offload.launch.requirements import requirements as needed
        from offload.launch.sagemaker.service import Service, region_of

        if requirements:
            pinned = needed()
            emit({"requirements": pinned}, "\n".join(pinned))
            return
        catalog = load_catalog(catalog_path)
        for option, of in (("--status", status_of), ("--stop", stop_job)):
            if of == "":
                raise ConfigError(f"{option} must be the name of a job, as the launch printed it, found ''.")
        if stop_job:
            _commands(Service(region), catalog, "boto3", emit).stop(stop_job, wait=wait)
            return
        if status_of:
            _commands(Service(region), catalog, "boto3", emit).status(status_of, wait=wait)
            return
        if script is None:
            raise ConfigError("SCRIPT is missing: a Python file that defines build() -> offload.Trainer.")
        region = region_of(region) if region and dry_run else _region(region, asked["image_uri"], dry_run)
        template, choices, name = _asked_for(script, args, region, plan_path=plan_path, **asked)
        _launch(template, choices, name, script, plan_path, catalog, submitter, wait, dry_run, emit)


def _commands(service: Service, catalog: Catalog, submitter: Any, emit: Emit) -> JobCommands:
    from offload.launch.sagemaker.launcher import SageMakerLauncher

    launcher = SageMakerLauncher(service, catalog, submitter)
    return JobCommands(launcher=launcher, text_of=format_sagemaker_job, emit=emit, show=say)


def _launch(
    template: JobTemplate, choices: tuple[Groups, ...], name: str, script: Path, plan_path: Path | None, catalog: Catalog,
    submitter: Any, wait: bool, dry_run: bool, emit: Emit,
) -> None:  # fmt: skip
    from offload.launch.sagemaker.bundle import REQUIREMENTS
    from offload.launch.sagemaker.launcher import prepare
    from offload.launch.sagemaker.service import Service
    from offload.launch.sagemaker.submit import starter

    if os.path.isfile(script.parent / REQUIREMENTS):
        say(f"checking whether {REQUIREMENTS} can be installed with offload")  # takes some seconds
    prepared = prepare(template, name, choices, script, catalog, plan_path)
    for note in prepared.notes:
        say(note)
    if dry_run:
        if submitter == "estimator":
            starter(submitter)
        _show_request(prepared, catalog, emit)
        return
    _commands(Service(template.region), catalog, submitter, emit).launch(prepared.jobs, wait=wait)


def _check_installed() -> None:
    try:
        import boto3  # noqa: F401
    except ImportError:
        raise ConfigError("launching on SageMaker needs boto3: pip install 'offload[sagemaker]'.") from None


def _show_request(prepared: PreparedJobs, catalog: Catalog, emit: Emit) -> None:
    from offload.launch.sagemaker.groups import usd_per_hour

    first = prepared.jobs[0]
    try:
        hourly: float | None = usd_per_hour(first.job.groups, catalog)
    except ConfigError:
        hourly = None
    request, others = first.render(), len(prepared.jobs) - 1
    emit(
        request, format_sagemaker_request(request, usd_per_hour=hourly, bundle_bytes=len(first.bundle()), others=others)
    )


def _asked_for(
    script: Path,
    args: tuple[str, ...],
    region: str,
    *,
    gpus: tuple[str, ...],
    cpus: tuple[str, ...],
    plan_path: Path | None,
    role: str | None,
    bucket: str | None,
    image_uri: str | None,
    framework_version: str | None,
    name: str | None,
    inputs: tuple[str, ...],
    input_mode: str,
    max_hours: float,
    hosts_deadline: float,
    hyperparameters: tuple[str, ...],
    environment: tuple[str, ...],
    tags: tuple[str, ...],
    checkpoints: str | None,
    **same: Any,
) -> tuple[JobTemplate, tuple[Groups, ...], str]:
    from offload.launch.arguments import pairs_of
    from offload.launch.sagemaker.bundle import name_of
    from offload.launch.sagemaker.groups import groups_of, groups_of_plan
    from offload.launch.sagemaker.images import image_for
    from offload.launch.sagemaker.job import check_types
    from offload.launch.sagemaker.job_template import JobTemplate, channel_of, job_name
    from offload.model.planning.plans import Plan

    if len(gpus) > 1:
        raise ConfigError(
            f"--gpu is given {len(gpus)} times ({', '.join(gpus)}): the workers run in one group of equal instances. Choose one."
        )
    if bool(gpus or cpus) == bool(plan_path):
        raise ConfigError("name the instances: either --gpu TYPE:COUNT (and --cpu TYPE:COUNT), or --plan plan.json.")
    if plan_path is not None:
        plan = Plan.from_document(read_json(plan_path, "the plan", "Make it with offload plan -o."), str(plan_path))
        choices = groups_of_plan(plan, str(plan_path))
        _tell_spot(plan.spot, bool(same["spot"]))
    elif gpus:
        choices = (groups_of(gpus[0], cpus),)
    else:
        raise ConfigError("--gpu is missing: the workers need a group of GPU instances, such as --gpu ml.g5.xlarge:1.")
    check_types(choices[0])
    if role is None:
        raise ConfigError(
            "--role is missing: the ARN of the job's role (or OFFLOAD_ROLE). offload's page 'On Amazon SageMaker' has its policy."
        )
    if bucket is None:
        raise ConfigError(
            "--bucket is missing: an S3 bucket for the script, checkpoints and results (or OFFLOAD_BUCKET)."
        )
    if bool(image_uri) == bool(framework_version):
        raise ConfigError("name the image: either --image-uri URI, or --framework-version 2.8 for AWS's own.")
    if input_mode != "File" and not inputs:
        raise ConfigError(f"--input-mode {input_mode} says how to read --input, and there is no --input.")
    template = JobTemplate(
        script=name_of(script),
        args=args,
        role=role,
        bucket=bucket.removeprefix("s3://").rstrip("/"),
        image=image_uri or image_for(str(framework_version), region, choices[0][0].instance_type),
        region=region,
        channels=tuple(channel_of(text, input_mode) for text in inputs),
        checkpoints=checkpoints,
        hyperparameters=pairs_of(hyperparameters, "--hyperparameter"),
        environment=pairs_of(environment, "--env"),
        tags=pairs_of(tags, "--tag"),
        max_run_s=int(max_hours * 3600),
        hosts_deadline_s=hosts_deadline,
        **same,
    )
    return template, choices, name or job_name(script, datetime.now(UTC))


def _tell_spot(planned: str, spot: bool) -> None:
    """Say where the job differs from its plan in what it pays."""
    if planned == "all" and not spot:
        say("the plan is for spot capacity, and the job is on demand: pass --spot for the plan's price.")
    elif planned == "cpu":
        paid = "spot" if spot else "on demand"
        say(f"the plan is for spot CPU nodes alone, which SageMaker does not offer: all of the job is {paid}.")


def _region(region: str | None, image_uri: str | None, dry_run: bool) -> str:
    from offload.launch.sagemaker.service import FALLBACK_REGION, NO_REGION, NoRegionError, Service

    try:
        return Service(region).region
    except ConfigError as error:
        if not (dry_run or isinstance(error, NoRegionError)):
            raise
        in_image = _REGION_OF_IMAGE.search(image_uri or "")
        if in_image:
            return in_image[1]
        if dry_run:
            click.echo(NO_REGION, err=True)
            return FALLBACK_REGION
        raise
