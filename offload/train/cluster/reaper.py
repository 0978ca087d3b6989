"""Outlives the process that started a Ray, and ends what is left of that Ray should it be killed or crash.

    python -S reaper.py MARK < a pipe that ends with the driver

Ray's own processes die with their parent, the kernel sees to that. Those that they started notice it, except for those that are
just starting: these look for Ray for half a minute. Anything that comes through the pipe says that all is in order.

Only the standard library is imported, and little of it: this process lives as long as the run.
"""

import contextlib
import os
import signal
import sys
import time

MARK = "OFFLOAD_RAY"  # in the environment of every process of a Ray that is started here, and of those that they start
GRACE_S = 1.5  # for processes that notice by themselves that their Ray has ended
KILL_S = 5.0


def end_marked(mark: str, grace_s: float = GRACE_S) -> None:
    """Kill the processes of a Ray that was started here, as far as they do not end by themselves."""
    began = time.monotonic()
    while (left := marked(mark)) and time.monotonic() - began < grace_s + KILL_S:
        if time.monotonic() - began >= grace_s:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """The live processes that carry the mark, as far as they are ours to look at; without this one."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            # A process that has ended, and that its parent has not waited for, has no environment left.
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def main(mark: str) -> None:
    """Wait for the driver's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not os.read(0, 1):
        end_marked(mark)


if __name__ == "__main__":
    main(sys.argv[1])
