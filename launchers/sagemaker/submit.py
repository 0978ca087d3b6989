"""Upload a job's bundle and start it: by the SDK's estimator, or with boto3 alone.

Both send the same request (:meth:`launchers.sagemaker.job.Job.request`); a test holds it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import urlparse

import botocore.exceptions

from launchers.sagemaker.job import CHECKPOINTS, ENTRY, Job, metric_definitions
from launchers.sagemaker.service import Service, asking
from offload.errors import ConfigError

Submitter = Literal["estimator", "boto3"]

# An own configuration, without defaults: what is submitted is what was checked and shown. Telemetry is the user's business,
# and where its bucket cannot be reached, it logs errors.
_SDK_CONFIG = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}


def upload(job: Job, bundle: bytes, service: Service) -> None:
    """Put the bundle where the job fetches it. Raises ConfigError where that is refused."""
    where = urlparse(job.source)
    more = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": job.kms_key} if job.kms_key else {}
    with asking(f"upload the script to {job.source}"):
        service.s3.put_object(Bucket=where.netloc, Key=where.path.lstrip("/"), Body=bundle, **more)


def start(job: Job, service: Service, submitter: Submitter = "estimator") -> None:
    """Start the job. Raises ConfigError where that is refused, NoCapacity where there are no such instances to be had."""
    by: dict[Submitter, Callable[[Job, Service], None]] = {"estimator": _by_estimator, "boto3": _by_boto3}
    with asking("start the training job"):
        try:
            by[submitter](job, service)
        except botocore.exceptions.ClientError as error:
            if error.response["Error"].get("Code") != "ResourceInUse":
                raise
            _check_is_ours(job, service)


def _check_is_ours(job: Job, service: Service) -> None:
    """A call that was answered too late is made again, and then finds the name taken, by this very job."""
    found = service.sagemaker.describe_training_job(TrainingJobName=job.name)
    if json.loads(found["HyperParameters"].get("sagemaker_submit_directory", "null")) != job.source:
        raise ConfigError(f"there has been a job {job.name!r} in this account already: choose another --name.")


def image_for(version: str, region: str, instance_type: str) -> str:
    """The URI of AWS's own image of a PyTorch version. Raises ConfigError for one that the SDK does not know."""
    image_uris = _sdk().image_uris
    known = image_uris.config_for_framework("pytorch")["training"]["versions"]
    full = next(
        (name for name in sorted(known, reverse=True) if name == version or name.startswith(f"{version}.")), None
    )
    if full is None:
        newest = ", ".join(sorted(known, key=_numbers)[-4:])
        raise ConfigError(
            f"the SageMaker SDK knows no image for PyTorch {version}; the newest it knows: {newest}. Pass --image-uri for others."
        )
    try:
        uri: str = image_uris.retrieve(
            "pytorch", region, version=version, py_version=known[full]["py_versions"][-1], instance_type=instance_type,
            image_scope="training",
        )  # fmt: skip
    except (ValueError, KeyError) as error:
        raise ConfigError(f"there is no image of PyTorch {version} in {region}: {error} Pass --image-uri.") from None
    return uri


def _by_boto3(job: Job, service: Service) -> None:
    service.sagemaker.create_training_job(**job.request())


def _by_estimator(job: Job, service: Service) -> None:
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
        disable_profiler=True,
        debugger_hook_config=False,
        sagemaker_session=session,
    )
    inputs = {c.name: sdk.TrainingInput(c.uri, instance_groups=[*c.groups] or None) for c in job.channels}
    estimator.fit(inputs=inputs or None, job_name=job.name, wait=False)


class _Sdk:
    """The parts of the SageMaker SDK that are used. It takes seconds to import."""

    def __init__(self) -> None:
        import sagemaker.image_uris
        import sagemaker.inputs
        import sagemaker.instance_group
        import sagemaker.pytorch
        import sagemaker.session

        self.Session: Any = sagemaker.session.Session
        self.pytorch: Any = sagemaker.pytorch
        self.image_uris: Any = sagemaker.image_uris
        self.InstanceGroup: Any = sagemaker.instance_group.InstanceGroup
        self.TrainingInput: Any = sagemaker.inputs.TrainingInput


def _sdk() -> _Sdk:
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")  # that version 3 exists, which has no estimators
    for name in ("sagemaker", "sagemaker.config"):  # it prints on stdout where it found no configuration
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return _Sdk()
    except ImportError as error:
        raise ConfigError(
            f"the SageMaker SDK with estimators is not installed ({error}): pip install 'offload[sagemaker]', or pass --submitter boto3 "
            "with --image-uri."
        ) from None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
