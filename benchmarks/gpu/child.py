"""Runs one check in this process, and writes what it found.

    python -m benchmarks.gpu.child MODULE:FUNCTION ANSWER FOLDER DEVICE GPUS

ANSWER is written anew with every interim figure, so that a check that is killed keeps what it had.
"""

import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.place import CheckFailed, NotApplicable, Place
from offload.report.run_dir import to_json

OURS = ("offload", "benchmarks")


def answer_of(function: str, place: Place) -> dict[str, Any]:
    """Run a check: its status, and its reason or findings."""
    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)(place)
    except NotApplicable as reason:
        return {"status": "not applicable", "reason": str(reason)}
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in OURS:
            raise
        return {"status": "not applicable", "reason": f"needs the package {package}, which is not installed"}
    except CheckFailed as reason:
        return {"status": "failed", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        return {"status": "failed", "reason": f"{type(error).__name__}: {lines[0]}"}
    return {"status": "passed", "said": found.said, "figures": found.figures}


def main(function: str, answer: str, folder: str, device: str, gpus: str) -> None:
    """Run the check, and write its answer."""
    faulthandler.enable()
    kept: dict[str, Any] = {"figures": {}}

    def write(document: Mapping[str, Any]) -> None:
        half = Path(f"{answer}.half")
        half.write_text(to_json(dict(document)))
        os.replace(half, answer)

    def so_far(figures: Mapping[str, Any]) -> None:
        kept["figures"] = {**kept["figures"], **figures}
        write(kept)

    assert device in ("cuda", "cpu")
    place = Place(device="cuda" if device == "cuda" else "cpu", gpus=int(gpus), folder=Path(folder), so_far=so_far)
    answered = answer_of(function, place)  # first, since it adds to what is kept
    write({**kept, **answered})


if __name__ == "__main__":
    main(*sys.argv[1:])
