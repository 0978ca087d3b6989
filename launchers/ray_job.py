"""Start a training as a job on a Ray cluster.

    python launchers/ray_job.py examples/quickstart.py --address http://head:8265 --dry-run

Copy this script and change what your jobs need: `RayJob` has fields for the number of workers, requirements, the run directory and the
checkpoint storage. ``offload launch ray`` has an option for each.

Needs ``pip install '.[ray]'`` in a checkout. With ``--dry-run`` no cluster is needed.
"""

import argparse
import getpass
import json
import sys
from pathlib import Path

from offload.errors import OffloadError
from offload.launch.arguments import check_script
from offload.launch.launcher import launch
from offload.launch.ray.bundle import pack
from offload.launch.ray.job import RayJob, run_name
from offload.launch.ray.job_api import JobApi
from offload.launch.ray.launcher import RayLauncher, RaySubmission


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, help="defines build() -> offload.Trainer")
    parser.add_argument("--address", default="http://127.0.0.1:8265", help="address of the cluster's dashboard")
    parser.add_argument("--dry-run", action="store_true", help="print the request, call nothing")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, for_script = parser.parse_args(sys.argv[1:at]), tuple(sys.argv[at + 1 :])

    check_script(options.script)
    bundle = pack(options.script)
    user = run_name(getpass.getuser(), "user")
    job = RayJob(name=run_name(options.script.stem), user=user, script=bundle.script, args=for_script)
    ready = RaySubmission.of(job, bundle)
    if options.dry_run:
        print(json.dumps(ready.render(), indent=2))
        return
    launcher = RayLauncher(JobApi(options.address))
    state = launch(launcher, [ready], wait=True, show=lambda text: print(text, end=""), say=print)
    print(json.dumps(state, indent=2))
    sys.exit(launcher.exit_code(state))


if __name__ == "__main__":
    try:
        main()
    except OffloadError as error:
        sys.exit(f"Error: {error}")
