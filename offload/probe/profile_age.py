"""Check whether a profile is plausible, and still describes the script, libraries and machine at hand.

:func:`facts` collects facts about them; :func:`changes` compares plain facts, and :func:`warnings` a profile's with today's.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, RunError
from offload.model.profile import Profile

LIBRARIES = ("ray", "torch", "torchvision", "timm")


def facts(script: Path | None) -> dict[str, Any]:
    """Facts about this machine and environment, and the script's source if there is a script."""
    return {
        "cpu_model": cpu_model(),
        "cores": os.cpu_count() or 1,
        "versions": {name: version for name in LIBRARIES if (version := _version(name)) is not None},
        "script_sha256": None if script is None else digest(script),
    }


def changes(measured: Mapping[str, Any], now: Mapping[str, Any], *, workload: str) -> list[str]:
    """A sentence for each difference. Facts that either side lacks are not compared."""
    said = []
    for name, version in (measured.get("versions") or {}).items():
        here = now["versions"].get(name)
        if here is not None and here != version:
            said.append(f"it was measured with {name} {version}, and {here} is installed")
    if measured.get("script_sha256") and now["script_sha256"] and measured["script_sha256"] != now["script_sha256"]:
        said.append(f"{workload} has changed since, perhaps its transform or its model")
    model, cores = measured.get("cpu_model"), measured.get("cores")
    if model and (model != now["cpu_model"] or cores not in (None, now["cores"])):
        there = model if cores is None else f"{model}, {cores} cores"
        said.append(
            f"it was measured on another machine ({there}) than this one ({now['cpu_model']}, {now['cores']} cores)"
        )
    return said


def warnings(profile: Profile) -> list[str]:
    """A warning if the profile may no longer describe its script, or comes from another environment."""
    script = Path(profile.workload) if profile.workload else None
    said = changes(profile.measured, facts(script), workload=profile.workload)
    return [f"the profile may be stale: {'; '.join(said)}. offload probe measures anew."] if said else []


def digest(path: Path) -> str | None:
    """The SHA-256 of a file; None if there is no such file, or another user's that cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if os.path.isfile(path) else None
    except OSError:
        return None


def cpu_model() -> str:
    """The processor's name, from the kernel."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_usable(document: dict[str, Any]) -> None:
    """Raise RunError for a profile that ``offload plan`` would refuse."""
    try:
        Profile.from_document(document, source="the profile")
    except ConfigError as error:
        defect = str(error).removeprefix("the profile: ").partition(",")[0]
        raise RunError(
            f"the probe's figures are not plausible: {defect}. The step is too slow for this CPU, or other programs used it meanwhile. "
            "Probe on an idle machine, or on one with a GPU."
        ) from None
