"""A heterogeneous training job, and the request that starts it: pure.

It finds mistakes before any call: :mod:`offload.launch.sagemaker.limits` checks single values, this module the rules between them.
Where it stops: nothing is read, uploaded or submitted.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, argument
from offload.launch.arguments import login_in, secrets_in
from offload.launch.sagemaker import limits
from offload.launch.sagemaker.container import process_one
from offload.launch.sagemaker.groups import InstanceGroup, has_gpus, has_local_storage
from offload.launch.sagemaker.settings import GPU_GROUP, Settings, is_reserved
from offload.versions import CONTAINER_ENTRY

CHECKPOINTS = "/opt/ml/checkpoints"
ENTRY = CONTAINER_ENTRY
FILE = "File"  # the service's default input mode
MOST_SHOWN = 20
LONGEST_RUN_S = 28 * 86_400  # the maximum from the service's documentation; its API model has none
METRICS = {  # CloudWatch's name → the word before the number in the entry's progress lines
    "samples_per_s": "samples/s",
    "stall": "stall",
    "goodput": "goodput",
    "loss": "loss",
    "workers": "workers",
    "global_batch_size": "batch",
}
RUN_LINES = ("python3", "-u", "-c", r"import sys; exec('\n'.join(sys.argv[1:]))")
"""A command that runs the program in its arguments, one line each: the service allows up to 100, of 256 characters each."""
_NUMBER = r"([-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)"


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Input data. ``groups``: the groups that get it; empty: all. ``mode``: ``File`` copies it before training, ``FastFile`` mounts it."""

    name: str
    uri: str
    groups: tuple[str, ...] = ()
    mode: str = FILE


@dataclass(frozen=True, kw_only=True)
class SageMakerJob:
    """A training job.

    Args:
        name: the name of the job, unique in the account and region.
        groups: the group with GPUs, named ``gpu``, and groups that preprocess.
        role: ARN of the job's role.
        image: URI of the container image, the same for all groups.
        region: the region of the service.
        source: S3 URI of the bundle with the user's folder and the entry.
        settings: the entry's configuration.
        output: S3 URI of the folder for the model and the failure file.
        checkpoints: S3 URI where the service keeps ``/opt/ml/checkpoints``; None: nothing outlives the job.
        channels: input data.
        hyperparameters, environment, tags: passed to the service unchanged. No secrets: everyone who may describe the job can read
            them.
        volume_gib: the volume size of each instance.
        max_run_s: seconds after which the service stops the job.
        spot: whether to use spot capacity; the job waits for it at most as long as it may run.
        subnets, security_groups: the VPC of the job; empty: no VPC.
        kms_key: the key for the output, and for volumes if no instance type has local disks.
        encrypt_traffic: whether to encrypt traffic between instances.
        image_entrypoint: whether the image's own entrypoint starts the containers. Otherwise the launcher's process 1 does
            (:mod:`offload.launch.sagemaker.container.process_one`), which passes SIGTERM on to the entry.
    """

    name: str
    groups: tuple[InstanceGroup, ...]
    role: str
    image: str
    region: str
    source: str
    settings: Settings
    output: str
    checkpoints: str | None = None
    channels: tuple[Channel, ...] = ()
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    volume_gib: int = 50
    max_run_s: int = 86_400
    spot: bool = False
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    kms_key: str | None = None
    encrypt_traffic: bool = False
    image_entrypoint: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError with a list of all values that the service would refuse or that could not work, or for secrets."""
        self._check_secrets()
        self._check_hyperparameters()
        wrong = [*self._contradictions(), *limits.violations(self.request(), limits.create_training_job().input_shape)]
        if wrong:
            more = f"\n  and {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
            raise ConfigError("this job could not run:\n  " + "\n  ".join(wrong[:MOST_SHOWN]) + more)

    def request(self) -> dict[str, Any]:
        """The document of a CreateTrainingJob call."""
        hyperparameters = {
            **self.all_hyperparameters(),
            "sagemaker_program": ENTRY,
            "sagemaker_submit_directory": self.source,
            "sagemaker_container_log_level": 20,
            "sagemaker_job_name": self.name,
            "sagemaker_region": self.region,
        }
        document: dict[str, Any] = {
            "TrainingJobName": self.name,
            "RoleArn": self.role,
            "AlgorithmSpecification": {
                "TrainingImage": self.image,
                "TrainingInputMode": "File",
                "MetricDefinitions": metric_definitions(),
                **_if(ContainerEntrypoint=self.entrypoint, ContainerArguments=self.entrypoint_arguments),
            },
            "HyperParameters": {key: json.dumps(value) for key, value in hyperparameters.items()},
            "OutputDataConfig": {"S3OutputPath": self.output, **_if(KmsKeyId=self.kms_key)},
            "ResourceConfig": {
                "VolumeSizeInGB": self.volume_gib,
                "InstanceGroups": [
                    {"InstanceGroupName": g.name, "InstanceType": g.instance_type, "InstanceCount": g.count}
                    for g in self.groups
                ],
                **_if(VolumeKmsKeyId=self.volume_kms_key),
            },
            "StoppingCondition": {
                "MaxRuntimeInSeconds": self.max_run_s,
                **_if(MaxWaitTimeInSeconds=self.max_wait_s),
            },
            "ProfilerConfig": {"DisableProfiler": True},  # the profiler does not support heterogeneous jobs
            "EnableManagedSpotTraining": self.spot,
            "EnableInterContainerTrafficEncryption": self.encrypt_traffic,
        }
        if self.channels:
            document["InputDataConfig"] = [_channel(channel) for channel in self.channels]
        if self.subnets or self.security_groups:
            document["VpcConfig"] = {"Subnets": [*self.subnets], "SecurityGroupIds": [*self.security_groups]}
        if self.checkpoints:
            document["CheckpointConfig"] = {"S3Uri": self.checkpoints, "LocalPath": CHECKPOINTS}
        if self.environment:
            document["Environment"] = dict(self.environment)
        if self.tags:
            document["Tags"] = [{"Key": key, "Value": value} for key, value in self.tags.items()]
        return document

    def all_hyperparameters(self) -> dict[str, Any]:
        """The user's hyperparameters and the entry's settings."""
        return {**self.hyperparameters, **self.settings.hyperparameter()}

    @property
    def entrypoint(self) -> list[str] | None:
        """The command that replaces the image's own entrypoint; None: the image's own."""
        return None if self.image_entrypoint else [*RUN_LINES]

    @property
    def entrypoint_arguments(self) -> list[str] | None:
        """The arguments of :attr:`entrypoint`."""
        return None if self.image_entrypoint else program()

    @property
    def volume_kms_key(self) -> str | None:
        """The key for volumes; None if an instance type has local disks, for which the service accepts no key."""
        return None if any(has_local_storage(group.instance_type) for group in self.groups) else self.kms_key

    @property
    def max_wait_s(self) -> int | None:
        """The time limit for the wait for spot capacity and the run together, in seconds; None without spot."""
        return 2 * self.max_run_s if self.spot else None

    def _check_secrets(self) -> None:
        remedy = (
            "and everyone who may describe the job, or read its log, could read it: let the script fetch it from AWS Secrets Manager under "
            "the job's role."
        )
        # Not merged: a name may be in both, with two values.
        parameters = {name: str(value) for name, value in self.hyperparameters.items()}
        if secrets := [*secrets_in(self.environment, self.settings.args), *secrets_in(parameters, ())]:
            raise ConfigError(f"{secrets[0]} looks like a secret, {remedy}")
        where = login_in(
            [
                *self.environment.items(),
                *parameters.items(),
                *(
                    (f"argument {number} of the script", text)
                    for number, text in enumerate(self.settings.args, start=1)
                ),
            ]
        )
        if where is not None:
            raise ConfigError(f"{where} has an address with a password or a token in it, {remedy}")

    def _check_hyperparameters(self) -> None:
        """Raise ConfigError for names that cannot become options of the script."""
        for name in self.hyperparameters:
            if is_reserved(name):
                raise ConfigError(
                    f"the hyperparameter {name!r} cannot be set: the name is reserved, and the script would not get it. Choose another, "
                    f"or pass --{name} after --, among the script's arguments."
                )
            if name.startswith("-"):
                raise ConfigError(
                    f"the hyperparameter {name!r} would reach the script as --{name}: give its name without dashes, "
                    f"{name.lstrip('-') or 'lr'}=VALUE."
                )

    def _contradictions(self) -> Iterator[str]:
        """Violated rules between values, which the service's API model lacks."""
        names = [group.name for group in self.groups]
        for name, times in Counter(names).items():
            if times > 1:
                yield f"{times} groups are named {name!r}"
        for group in self.groups:
            if group.count < 1:
                yield f"group {group.name!r} has {group.count} instances, at least 1 is needed"
            yield from _wrong_type(group)
        if GPU_GROUP not in names:
            yield f"no group is named {GPU_GROUP!r}: the workers run there"
        yield from self._wrong_channels(names)
        if self.max_run_s > LONGEST_RUN_S:
            yield f"StoppingCondition.MaxRuntimeInSeconds: {self.max_run_s}, at most {LONGEST_RUN_S:,} (28 days) are allowed"
        if bool(self.subnets) != bool(self.security_groups):
            yield "a VPC needs both subnets and security groups, found only one of the two"
        if self.volume_kms_key and "alias/" in self.volume_kms_key:
            yield f"the key of volumes must be an id or ARN, not an alias: {self.volume_kms_key!r}"

    def _wrong_channels(self, names: Sequence[str]) -> Iterator[str]:
        for name, times in Counter(channel.name for channel in self.channels).items():
            if times > 1:
                yield f"{times} channels are named {name!r}"
        for channel in self.channels:
            for group in set(channel.groups) - set(names):
                yield f"channel {channel.name!r} is for group {group!r}; the groups are {', '.join(names)}"
            if channel.groups and GPU_GROUP not in channel.groups:
                with_gpus = (GPU_GROUP, *channel.groups)
                remedy = argument("input", f"{channel.name}@{','.join(with_gpus)}=...", python=f"groups={with_gpus!r}")
                yield (
                    f"channel {channel.name!r} leaves out the group {GPU_GROUP!r}, whose hosts list the data and preprocess, too: "
                    f"{remedy}, or name no groups"
                )
        named = [bool(channel.groups) for channel in self.channels]
        if any(named) and not all(named):
            without = ", ".join(channel.name for channel in self.channels if not channel.groups)
            yield f"either all channels name their groups or none does: {without} name none"


def program() -> list[str]:
    """The lines of :mod:`offload.launch.sagemaker.container.process_one`, without its docstring and comments."""
    source = Path(process_one.__file__).read_text(encoding="utf-8").split('"""', 2)[2]
    return [line for line in source.splitlines() if line.strip() and not line.startswith("#")]


def metric_definitions() -> list[dict[str, str]]:
    """The metrics of the console, with the expressions that read them from the entry's progress lines."""
    return [
        {"Name": name, "Regex": rf"offload: epoch=.* {re.escape(word)}={_NUMBER}"} for name, word in METRICS.items()
    ]


def check_types(groups: Sequence[InstanceGroup]) -> None:
    """Raise ConfigError, with the nearest names, for an instance type that the service does not train on."""
    known = limits.training_types()
    for group in groups:
        if wrong := next(_wrong_type(group), None):
            raise ConfigError(f"{wrong}.")
        if group.instance_type not in known:
            near = ", ".join(difflib.get_close_matches(group.instance_type, known, n=3, cutoff=0.0))
            raise ConfigError(f"SageMaker trains on no instance type {group.instance_type!r}; nearest: {near}.")


def _wrong_type(group: InstanceGroup) -> Iterator[str]:
    known = limits.training_types()
    if group.instance_type in limits.inference_types():
        near = difflib.get_close_matches(group.instance_type, known, n=3)
        yield f"{group.instance_type} serves models and does not train; nearest that train: {', '.join(near)}"
    elif group.instance_type in known and has_gpus(group.instance_type) != (group.name == GPU_GROUP):
        has = "no GPU" if group.name == GPU_GROUP else f"GPUs: workers run in the group {GPU_GROUP!r} alone"
        yield f"group {group.name!r} is of {group.instance_type}, which has {has}"


def _channel(channel: Channel) -> dict[str, Any]:
    return {
        "ChannelName": channel.name,
        "DataSource": {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": channel.uri,
                "S3DataDistributionType": "FullyReplicated",
                **_if(InstanceGroupNames=list(channel.groups) or None),
            }
        },
        **_if(InputMode=channel.mode if channel.mode != FILE else None),
    }


def _if(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
