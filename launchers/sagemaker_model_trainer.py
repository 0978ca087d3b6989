"""Start the job of ``offload launch sagemaker`` through the ``ModelTrainer`` of version 3 of the SageMaker SDK.

    pip install . boto3 'sagemaker>=3,<4'       # in a checkout
    python launchers/sagemaker_model_trainer.py examples/vit_blur.py --gpu ml.g5.xlarge:1 --cpu ml.c5.4xlarge:1 \\
        --role arn:aws:iam::123456789012:role/training --bucket my-bucket --image-uri URI --dry-run -- --epochs 3

The launcher checks everything, makes the bundle and uploads it; ModelTrainer sends the request. It gets no ``source_code``: the
image's own training toolkit fetches the bundle that the hyperparameters name. Without ``--dry-run`` the script starts the job, which
costs money.

Where it stops: version 3.27 sent this request to an emulated service, never to AWS. ModelTrainer adds the time to the job's name,
asks AWS whether the role suffices (so ``--dry-run`` needs credentials), and cannot switch the service's profiler off. It sends no
entrypoint, so a stop does not reach the script.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3

from offload.errors import OffloadError
from offload.launch.sagemaker.groups import groups_of
from offload.launch.sagemaker.job import CHECKPOINTS, SageMakerJob
from offload.launch.sagemaker.job_template import JobTemplate, channel_of, job_name
from offload.launch.sagemaker.launcher import prepare
from offload.launch.sagemaker.service import service_of
from offload.launch.sagemaker.submit import upload
from offload.prices import built_in


def model_trainer(job: SageMakerJob, boto_session: Any) -> Any:
    """Return a ModelTrainer that runs the job's bundle."""
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.shapes import InstanceGroup, MetricDefinition, S3DataSource
    from sagemaker.core.training.configs import (
        CheckpointConfig,
        Compute,
        InputData,
        Networking,
        OutputDataConfig,
        StoppingCondition,
        Tag,
    )
    from sagemaker.train import ModelTrainer

    request = job.request()
    trainer = ModelTrainer(
        base_job_name=job.name,
        training_image=job.image,
        role=job.role,
        sagemaker_session=Session(boto_session=boto_session, default_bucket=job.source.split("/")[2]),
        compute=Compute(
            instance_groups=[
                InstanceGroup(instance_group_name=g.name, instance_type=g.instance_type, instance_count=g.count)
                for g in job.groups
            ],
            volume_size_in_gb=job.volume_gib,
            enable_managed_spot_training=job.spot,
        ),
        stopping_condition=StoppingCondition(
            max_runtime_in_seconds=job.max_run_s, max_wait_time_in_seconds=job.max_wait_s
        ),
        output_data_config=OutputDataConfig(s3_output_path=job.output),
        checkpoint_config=CheckpointConfig(s3_uri=job.checkpoints, local_path=CHECKPOINTS),
        networking=Networking(
            subnets=[*job.subnets] or None,
            security_group_ids=[*job.security_groups] or None,
            enable_inter_container_traffic_encryption=job.encrypt_traffic,
        ),
        input_data_config=[
            InputData(
                channel_name=channel.name,
                data_source=S3DataSource(
                    s3_data_type="S3Prefix",
                    s3_uri=channel.uri,
                    s3_data_distribution_type="FullyReplicated",
                    **({"instance_group_names": [*channel.groups]} if channel.groups else {}),
                ),
            )
            for channel in job.channels
        ],
        hyperparameters=request["HyperParameters"],
        environment=dict(job.environment) or None,
        tags=[Tag(key=key, value=value) for key, value in job.tags.items()] or None,
    )
    metrics = request["AlgorithmSpecification"]["MetricDefinitions"]
    return trainer.with_metric_definitions(
        [MetricDefinition(name=metric["Name"], regex=metric["Regex"]) for metric in metrics]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    for name in ("gpu", "role", "bucket", "image-uri"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--cpu", action="append", default=[])
    parser.add_argument("--input", action="append", default=[])
    parser.add_argument("--region", default=None)
    parser.add_argument("--dry-run", action="store_true", help="print the request, upload nothing")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, for_script = parser.parse_args(sys.argv[1:at]), tuple(sys.argv[at + 1 :])

    service = service_of(options.region, dry_run=options.dry_run)
    template = JobTemplate(
        script=options.script.name,
        args=for_script,
        role=options.role,
        bucket=options.bucket,
        image=options.image_uri,
        region=service.region,
        channels=tuple(map(channel_of, options.input)),
        image_entrypoint=True,  # ModelTrainer cannot send another one
    )
    name = job_name(options.script, datetime.now(UTC))
    prepared = prepare(template, name, [groups_of(options.gpu, options.cpu)], options.script, built_in())
    for note in prepared.notes:
        print(note, file=sys.stderr)
    submission = prepared.jobs[0]
    trainer = model_trainer(submission.job, boto3.Session(region_name=service.region))  # the SDK takes its region
    if options.dry_run:
        print(json.dumps(trainer._create_training_job_args(boto3=True), indent=2, default=str))
        return
    upload(submission.job, submission.bundle(), service)
    trainer.train()


if __name__ == "__main__":
    try:
        main()
    except OffloadError as error:
        sys.exit(f"Error: {error.naming({'--region'})}")
