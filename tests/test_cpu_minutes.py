"""The meter of CPU minutes counts what a command leaves behind, and ends as the command does."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers import PROGRAMS

BURN = "import time\nwhile time.process_time() < 0.9: pass"
COMMAND = f"""
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as Ray's raylets do: nobody learns what its children took
subprocess.Popen([sys.executable, "-S", "-c", {BURN!r}], start_new_session=True).wait()
sys.exit(3)
"""


def test_processes_that_nobody_waits_for_count_and_the_exit_code_is_the_commands() -> None:
    meter = [sys.executable, str(PROGRAMS / "cpu_minutes.py")]
    done = subprocess.run([*meter, sys.executable, "-S", "-c", COMMAND], capture_output=True, text=True, timeout=800)
    assert done.returncode == 3
    *_, said = done.stderr.splitlines()
    minutes, unit = said.removeprefix("at least ").split(" CPU ")
    assert unit.startswith("minutes")
    assert float(minutes) >= 0.01


def test_a_signal_that_ends_the_command_ends_the_meter() -> None:
    command = [sys.executable, str(PROGRAMS / "cpu_minutes.py"), "sh", "-c", "kill -TERM $$"]
    assert subprocess.run(command, capture_output=True, timeout=800).returncode == -15
