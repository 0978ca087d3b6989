"""Checks that end in every wrong way, for tests of `make gpu-check`."""

import os
import signal
import subprocess
import sys
import time

from benchmarks.gpu.place import CheckFailed, Found, Place


def crashes(place: Place) -> Found:
    """Dies as a process does whose native code is wrong."""
    place.so_far({"before": 1})
    os.kill(os.getpid(), signal.SIGSEGV)
    return Found(said="")


def hangs(place: Place) -> Found:
    """Never ends, nor does the process that it has started; both ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(10_000)"
    started = subprocess.Popen([sys.executable, "-c", ignoring])
    place.so_far({"pids": [os.getpid(), started.pid]})
    time.sleep(10_000)
    return Found(said="")


def raises(place: Place) -> Found:
    """Raises what it did not expect."""
    place.so_far({"before": 1})
    raise ValueError("no such colour\nand no other")


def disproves(place: Place) -> Found:
    """Finds something wrong."""
    raise CheckFailed("weights differ")


def lacks(place: Place) -> Found:
    """Needs a package that is nowhere."""
    import no_such_package_at_all

    return Found(said=str(no_such_package_at_all))


def exits(place: Place) -> Found:
    """Ends the process."""
    sys.exit("enough")


def passes(place: Place) -> Found:
    """Finds nothing wrong."""
    return Found(said="all is well", figures={"answer": 42, "infinite": float("inf")})
