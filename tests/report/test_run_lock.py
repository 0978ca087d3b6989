"""One run at a time in a run directory, whatever becomes of the run that holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.report.run_dir import locked

HOLDER = """
import sys
from pathlib import Path
from offload.report.run_dir import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(
            ConfigError, match=rf"a run trains in {tmp_path} already: process {os.getpid()} on \S+\. Wait"
        ):
            locked(tmp_path).__enter__()
        with pytest.raises(ConfigError), locked(tmp_path):  # the refusal has not freed it
            pass
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("killed", [True, False])
def test_a_run_that_ended_holds_nothing(tmp_path: Path, killed: bool) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} on"), locked(tmp_path):
            pass
        if killed:
            holder.kill()
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_locked_gets_no_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "nowhere"):
        pass
