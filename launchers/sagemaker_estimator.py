"""Start a heterogeneous SageMaker training job through the SDK's PyTorch estimator.

    python launchers/sagemaker_estimator.py examples/vit_blur.py --gpu ml.g5.xlarge:1 --cpu ml.c5.4xlarge:1 \\
        --role arn:aws:iam::123456789012:role/training --bucket my-bucket --image-uri URI --dry-run -- --epochs 3

Copy this script and change what your jobs need: `JobTemplate` has fields for inputs, tags, spot capacity, VPCs, keys and spending limits.
``offload launch sagemaker`` has an option for each, follows the job, and tries the next best plan if AWS lacks capacity.

Needs version 2 of the SageMaker SDK (``pip install '.[sagemaker]'`` in a checkout). Without ``--dry-run`` the script starts the job,
which costs money.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from offload.errors import OffloadError
from offload.launch.launcher import launch
from offload.launch.sagemaker.groups import groups_of
from offload.launch.sagemaker.job_template import JobTemplate, job_name
from offload.launch.sagemaker.launcher import SageMakerLauncher, prepare
from offload.launch.sagemaker.service import service_of
from offload.prices import built_in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, help="defines build() -> offload.Trainer")
    parser.add_argument("--gpu", required=True, metavar="TYPE:COUNT", help="instances for the workers")
    parser.add_argument("--cpu", action="append", default=[], metavar="TYPE:COUNT", help="instances that preprocess")
    for name in ("role", "bucket", "image-uri"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--region", help="default: the region of your AWS configuration")
    parser.add_argument("--dry-run", action="store_true", help="print the request, call nothing")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, for_script = parser.parse_args(sys.argv[1:at]), tuple(sys.argv[at + 1 :])

    service, catalog = service_of(options.region, dry_run=options.dry_run), built_in()
    template = JobTemplate(
        script=options.script.name,
        args=for_script,
        role=options.role,
        bucket=options.bucket,
        image=options.image_uri,
        region=service.region,
    )
    name = job_name(options.script, datetime.now(UTC))
    prepared = prepare(template, name, [groups_of(options.gpu, options.cpu)], options.script, catalog)
    for note in prepared.notes:
        print(note, file=sys.stderr)
    if options.dry_run:
        print(json.dumps(prepared.jobs[0].render(), indent=2))
        return
    launcher = SageMakerLauncher(service, catalog, "estimator")
    state = launch(launcher, prepared.jobs, wait=True, show=print, say=print)
    print(json.dumps(state, indent=2))
    sys.exit(launcher.exit_code(state))


if __name__ == "__main__":
    try:
        main()
    except OffloadError as error:
        sys.exit(f"Error: {error.naming({'--region'})}")
