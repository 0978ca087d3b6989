"""A template of jobs, without their instance groups and names: pure.

A launch may need several jobs of one template: without capacity for one set of groups, it tries the plan's next best.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from offload.errors import ConfigError, argument
from offload.launch.sagemaker.groups import Groups, seconds_for
from offload.launch.sagemaker.job import FILE, Channel, SageMakerJob
from offload.launch.sagemaker.settings import HOSTS_DEADLINE_S, Settings
from offload.model import Catalog

PREFIX = "offload"
MAX_RUN_S = 86_400
_LONGEST_STEM = 35  # characters of a job's name before its date; a name has at most 63
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_FOLDER = re.compile(r"s3://[^/]+/.+")
_CHANNEL = re.compile(r"(?P<name>[^@=]+)(@(?P<groups>[^=]*))?=(?P<uri>.+)")


@dataclass(frozen=True, kw_only=True)
class JobTemplate:
    """Everything about a job except its groups and its name. See :class:`offload.launch.sagemaker.job.SageMakerJob` for the rest.

    Args:
        script: the script, relative to the bundle.
        args: arguments for the script.
        bucket: the bucket for the bundle, checkpoints and output, below the prefix ``offload``.
        max_usd: the most to spend on instances: the service stops the job before it costs more.
        max_run_s: the longest time that the job may run, in seconds.
        checkpoints: S3 URI of the checkpoints; None: a folder of the job's own.
        hyperparameters: texts that the script gets unchanged.
        image_entrypoint: whether the image's own entrypoint starts the containers, see :class:`offload.launch.sagemaker.job.SageMakerJob`.
    """

    script: str
    args: tuple[str, ...]
    role: str
    bucket: str
    image: str
    region: str
    channels: tuple[Channel, ...] = ()
    checkpoints: str | None = None
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    volume_gib: int = 50
    max_usd: float | None = None
    max_run_s: int = MAX_RUN_S
    spot: bool = False
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    kms_key: str | None = None
    encrypt_traffic: bool = False
    image_entrypoint: bool = False
    hosts_deadline_s: float = HOSTS_DEADLINE_S

    def job(self, name: str, groups: Groups, catalog: Catalog, bundle: str) -> SageMakerJob:
        """The job. ``bundle``: a text that tells its bundle from that of any other job, even one of the same name.

        Raises ConfigError for values that the service would refuse, and for a cap on spend that is too low for any run.
        """
        if not _BUCKET.fullmatch(self.bucket):
            raise ConfigError(
                f"{argument('bucket')} {self.bucket!r} is not a valid bucket name: use 3 to 63 of a-z, 0-9, - and dots."
            )
        place = f"s3://{self.bucket}/{PREFIX}/{name}"
        checkpoints = (self.checkpoints or f"{place}/checkpoints").rstrip("/")
        if not _FOLDER.fullmatch(checkpoints):
            raise ConfigError(
                f"{argument('checkpoints')} must be a folder in a bucket, such as s3://bucket/checkpoints/a, found {self.checkpoints!r}: "
                "the workers' checkpoints go into a folder beside it."
            )
        max_run_s = self.max_run_s
        if self.max_usd is not None:
            max_run_s = min(max_run_s, seconds_for(self.max_usd, groups, catalog))
        return SageMakerJob(
            name=name,
            groups=groups,
            role=self.role,
            image=self.image,
            region=self.region,
            source=f"{place}/source-{bundle}.tar.gz",
            settings=Settings(
                script=self.script,
                args=self.args,
                storage=f"{checkpoints}-of-workers",
                hosts_deadline_s=self.hosts_deadline_s,
            ),
            output=f"s3://{self.bucket}/{PREFIX}",  # the service adds the job's name
            checkpoints=checkpoints,
            channels=self.channels,
            hyperparameters=self.hyperparameters,
            environment=self.environment,
            tags=self.tags,
            volume_gib=self.volume_gib,
            max_run_s=max_run_s,
            spot=self.spot,
            subnets=self.subnets,
            security_groups=self.security_groups,
            kms_key=self.kms_key,
            encrypt_traffic=self.encrypt_traffic,
            image_entrypoint=self.image_entrypoint,
        )


def job_name(script: Path, now: datetime) -> str:
    """A valid name, made unique by the time: ``vit-blur-2026-11-22-13-20-05-123`` for ``vit_blur.py``."""
    stem = re.sub(r"[^a-zA-Z0-9]+", "-", script.stem).strip("-")[:_LONGEST_STEM].strip("-") or "job"
    return f"{stem}-{now:%Y-%m-%d-%H-%M-%S}-{now.microsecond // 1000:03d}"


def channel_of(text: str, mode: str = FILE) -> Channel:
    """Parse ``train=s3://bucket/train``, or ``train@gpu,cpu=s3://bucket/train`` for some groups alone.

    Raises ConfigError for a text of another form.
    """
    match = _CHANNEL.fullmatch(text)
    if match is None or not match["uri"].startswith("s3://"):
        raise ConfigError(f"an input must be NAME=s3://... or NAME@GROUP,GROUP=s3://..., found {text!r}.")
    groups = tuple(filter(None, (match["groups"] or "").split(",")))
    return Channel(name=match["name"], uri=match["uri"], groups=groups, mode=mode)
