"""Process 1 of a container, which starts the training toolkit as the image would, and passes SIGTERM on to the entry.

The service announces a stop or a spot interruption by SIGTERM to process 1, two minutes before it kills the container. AWS's images
and the toolkit do not pass the signal on. This program travels within the request, line by line
(:func:`offload.launch.sagemaker.job.program`), since the container has nothing else yet. It runs on any Python 3 with its standard
library. Where it stops: the toolkit fetches the bundle and starts the entry, which writes its process id to the file that ENTRY_PID
names.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile

ENTRY_PID = "OFFLOAD_ENTRY_PID"
# AWS's images start the toolkit with this script, which gives the container its host name in the job.
IMAGE_START = "start_with_right_hostname.sh"
STOPPED = 143


def main() -> None:
    """Run the toolkit to its end."""
    pid_file = os.path.join(tempfile.mkdtemp(), "entry.pid")

    def stop(signum: int, frame: object) -> None:
        try:
            with open(pid_file) as file:
                entry = int(file.read())
        except (OSError, ValueError):
            os._exit(STOPPED)  # nothing was begun yet; the kernel ends what else runs here
        try:
            os.kill(entry, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it has ended, and the toolkit will

    signal.signal(signal.SIGTERM, stop)
    script = shutil.which(IMAGE_START)
    command = ["bash", "-m", script, "train"] if script else ["train"]
    try:
        toolkit = subprocess.Popen(command, env=dict(os.environ, **{ENTRY_PID: pid_file}))
    except OSError as error:
        fail(f"this image cannot run `train` ({error}): install sagemaker-training, or launch with --image-entrypoint.")
    while True:
        pid, status = os.wait()  # of orphans too: nobody else ends them here
        if pid == toolkit.pid:
            sys.exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def fail(reason: str) -> None:
    """Write the failure file, and end."""
    base = os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")
    with open(os.path.join(base, "output", "failure"), "w") as file:
        file.write(reason)
    sys.exit(reason)


if __name__ == "__main__":
    main()
