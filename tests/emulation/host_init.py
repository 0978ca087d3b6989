"""Process 1 of an emulated host: mount the host's private folders, then reap processes until its owner is gone.

It runs as a script with the standard library only, already inside the host's new namespaces. It stops when its standard input ends,
because the owning process closes it or dies. The kernel then kills every other process of the host, and removes its namespaces, mounts
and network devices.
"""

import json
import os
import signal
import socket
import subprocess
import sys


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> None:
    config = json.loads(sys.argv[1])
    # /proc is still the outer one here, so this is our process id as the owner sees it.
    outer_pid = os.readlink("/proc/self")
    socket.sethostname(config["name"])
    for arguments in config["mounts"]:
        subprocess.run(["mount", *arguments], check=True)
    signal.signal(signal.SIGCHLD, _reap)
    os.write(1, f"{outer_pid}\n".encode())
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    main()
