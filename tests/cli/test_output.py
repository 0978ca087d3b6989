"""What a command prints under --json."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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
