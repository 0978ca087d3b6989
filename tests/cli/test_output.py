"""What a command prints under --json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PRINTS = """
from offload.cli.output import stdout_for_json
with stdout_for_json(True) as emit:
    print("aside")
    emit({"text": "x" * 1_000_000}, "")
"""


def test_a_large_document_passes_through_a_pipe_that_does_not_block() -> None:
    """As Node.js makes the pipes that its children inherit. A pipe holds 64 KiB."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with subprocess.Popen([sys.executable, "-c", PRINTS], stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        with open(reading, "rb") as stream:
            printed = stream.read()
        _, said = process.communicate()
    assert process.returncode == 0, said
    assert json.loads(printed) == {"text": "x" * 1_000_000}
    assert said == b"aside\n"


INTERRUPTS_ITSELF = """
import os, signal, time
def build():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
"""


def test_a_command_that_is_interrupted_prints_a_document_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTS_ITSELF)
    command = [sys.executable, "-m", "offload", "run", str(script), "--run-dir", str(tmp_path / "run"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 130
    assert json.loads(done.stdout) == {"schema": "offload.error/1", "error": "interrupted", "exit_code": 130}
    assert done.stderr.endswith("offload: ended at once; the same command resumes from the last checkpoint.\n")


ENDS = """
import sys
import click
from offload.cli.output import stdout_for_json
from offload.errors import RunError
ends = {"exit": SystemExit(130), "click": click.exceptions.Exit(130), "error": RunError("later")}
with stdout_for_json(True) as emit:
    if sys.argv[2] == "printed":
        emit({"status": "interrupted"}, "")
    raise ends[sys.argv[1]]
"""


@pytest.mark.parametrize(("end", "printed"), [("exit", ""), ("click", ""), ("exit", "printed"), ("error", "printed")])
def test_there_is_one_document_whatever_the_end(end: str, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, end, printed], capture_output=True, text=True, timeout=800)
    assert done.returncode != 0
    document = json.loads(done.stdout)
    assert document.get("status", document.get("error")) == "interrupted"
