"""Upload a job's bundle and start it, with the SDK's estimator or with boto3 alone.

Both send the same request (:meth:`offload.launch.sagemaker.job.SageMakerJob.request`), as a test ensures.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import urlparse

import botocore.exceptions

from offload.errors import ConfigError, argument
from offload.launch.launcher import Unreachable
from offload.launch.sagemaker.images import quiet_sdk
from offload.launch.sagemaker.job import CHECKPOINTS, ENTRY, FILE, SageMakerJob, metric_definitions
from offload.launch.sagemaker.service import Service, asking

Submitter = Literal["auto", "estimator", "boto3"]

Start = Callable[[SageMakerJob, Service], None]
"""A function that sends a job's request."""

# A configuration without the user's defaults: the job is submitted exactly as it was checked and shown. It has no telemetry, which is
# the user's decision, and logs errors if it cannot reach its bucket.
_SDK_CONFIG = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}


def upload(job: SageMakerJob, bundle: bytes, service: Service) -> None:
    """Upload the bundle to the place from which the job fetches it. Raises ConfigError if AWS refuses it."""
    where = urlparse(job.source)
    more = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": job.kms_key} if job.kms_key else {}
    with asking(f"upload the script to {job.source}"):
        service.s3.put_object(Bucket=where.netloc, Key=where.path.lstrip("/"), Body=bundle, **more)


def starter(submitter: Submitter = "auto") -> Start:
    """The function that starts a job: ``auto`` uses the SDK's estimator if it is installed, else boto3.

    Raises ConfigError, before any upload, if the user wants the estimator and the SDK lacks it.
    """
    if submitter == "boto3":
        return _by_boto3
    try:
        _sdk()
    except ConfigError:
        if submitter == "estimator":
            raise
        return _by_boto3
    return _by_estimator


def start(job: SageMakerJob, service: Service, by: Start) -> None:
    """Start the job.

    Raises ConfigError if the service refuses, NoCapacity if it lacks such instances, Unreachable if the connection broke before an
    answer.
    """
    with asking("start the training job"):
        try:
            by(job, service)
        except botocore.exceptions.ClientError as error:
            if error.response["Error"].get("Code") != "ResourceInUse":
                raise
            _check_is_ours(job, service)
        except (botocore.exceptions.ReadTimeoutError, botocore.exceptions.ConnectionClosedError) as error:
            raise Unreachable(f"cannot start the training job: {error}") from None


def _check_is_ours(job: SageMakerJob, service: Service) -> None:
    """Raise ConfigError if another job has the name. botocore repeats a call that was answered too late, and then finds the name taken
    by this very job."""
    description = service.sagemaker.describe_training_job(TrainingJobName=job.name)
    # Another tool's job may have no hyperparameters, or plain text in them.
    if description.get("HyperParameters", {}).get("sagemaker_submit_directory") != json.dumps(job.source):
        raise ConfigError(f"this account already has a job {job.name!r}: choose another {argument('name')}.")


def _by_boto3(job: SageMakerJob, service: Service) -> None:
    service.sagemaker.create_training_job(**job.request())


def _by_estimator(job: SageMakerJob, service: Service) -> None:
    sdk = _sdk()
    session = sdk.Session(
        boto_session=service.session,
        sagemaker_client=service.sagemaker,
        default_bucket=urlparse(job.source).netloc,
        sagemaker_config=_SDK_CONFIG,
    )
    estimator = sdk.pytorch.PyTorch(
        entry_point=ENTRY,
        source_dir=job.source,
        role=job.role,
        image_uri=job.image,
        instance_groups=[sdk.InstanceGroup(g.name, g.instance_type, g.count) for g in job.groups],
        volume_size=job.volume_gib,
        volume_kms_key=job.volume_kms_key,
        output_path=job.output,
        output_kms_key=job.kms_key,
        max_run=job.max_run_s,
        max_wait=job.max_wait_s,
        use_spot_instances=job.spot,
        checkpoint_s3_uri=job.checkpoints,
        checkpoint_local_path=CHECKPOINTS if job.checkpoints else None,
        hyperparameters=job.all_hyperparameters(),
        environment=dict(job.environment) or None,
        tags=[{"Key": key, "Value": value} for key, value in job.tags.items()] or None,
        subnets=[*job.subnets] or None,
        security_group_ids=[*job.security_groups] or None,
        encrypt_inter_container_traffic=job.encrypt_traffic,
        metric_definitions=metric_definitions(),
        container_entry_point=job.entrypoint,
        container_arguments=job.entrypoint_arguments,
        disable_profiler=True,
        debugger_hook_config=False,
        sagemaker_session=session,
    )
    inputs = {
        channel.name: sdk.TrainingInput(
            channel.uri,
            instance_groups=[*channel.groups] or None,
            input_mode=channel.mode if channel.mode != FILE else None,
        )
        for channel in job.channels
    }
    estimator.fit(inputs=inputs or None, job_name=job.name, wait=False)


class _Sdk:
    """The used parts of the SageMaker SDK, which takes seconds to import."""

    def __init__(self) -> None:
        import sagemaker.inputs
        import sagemaker.instance_group
        import sagemaker.pytorch
        import sagemaker.session

        self.Session: Any = sagemaker.session.Session
        self.pytorch: Any = sagemaker.pytorch
        self.InstanceGroup: Any = sagemaker.instance_group.InstanceGroup
        self.TrainingInput: Any = sagemaker.inputs.TrainingInput


@functools.cache
def _sdk() -> _Sdk:
    """Import the SDK. Raises ConfigError if it is not installed, or has no estimators (version 3)."""
    quiet_sdk()
    try:
        return _Sdk()
    except botocore.exceptions.BotoCoreError as error:  # it reads the AWS configuration
        raise ConfigError(
            f"the SageMaker SDK cannot be imported: {error}. Correct AWS_PROFILE and the AWS configuration, or pass "
            f"{argument('submitter', 'boto3')}."
        ) from None
    except ImportError as error:
        version = _installed("sagemaker")
        raise ConfigError(
            f"{argument('submitter', 'estimator')} needs version 2 of the SageMaker SDK, and "
            f"{f'version {version} is installed' if version else 'it is not installed'} ({_first_line(error)}): pip install "
            f"'offload[sagemaker]', or pass {argument('submitter', 'boto3')}, which sends the same request."
        ) from None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: ImportError) -> str:
    return str(error).partition("\n")[0]
