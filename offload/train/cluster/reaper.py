"""End the remains of a Ray after its driver was killed or has crashed. This process outlives the driver.

    python -S reaper.py MARK < a pipe that ends with the driver

Ray's own processes die with their parent; the kernel ensures that. The processes that they started notice it, except those that are
just starting: these look for Ray for half a minute. Any input through the pipe means that the driver ended in order.

It imports little, and only from the standard library: this process lives as long as the run.
"""

import contextlib
import os
import signal
import sys
import time

MARK = "OFFLOAD_RAY"  # the environment variable of every process of a Ray that is started here, and of their children
GRACE_S = 1.5  # time for processes to notice by themselves that their Ray has ended
KILL_S = 5.0


def end_marked(mark: str, grace_s: float = GRACE_S) -> None:
    """Kill the marked processes that do not end by themselves within ``grace_s`` seconds."""
    began = time.monotonic()
    while (left := marked(mark)) and time.monotonic() - began < grace_s + KILL_S:
        if time.monotonic() - began >= grace_s:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """The live processes that carry the mark and whose environment is readable, without this one."""
    wanted = f"{MARK}={mark}".encode()
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            # A zombie, whose parent has not waited for it, has no environment left.
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    pids.append(int(name))
    return pids


def main(mark: str) -> None:
    """Wait for the driver's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not os.read(0, 1):
        end_marked(mark)


if __name__ == "__main__":
    main(sys.argv[1])
