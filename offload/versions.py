"""The versions of Python and Ray that offload works with, and what it says of others.

A version that cannot work is refused when offload is imported. A version that nobody has tested yet gets a warning. Where it stops: this
module imports neither Ray nor torch, and an old Python can read it.
"""

from __future__ import annotations

import os
import re
import sys

LOWEST_RAY = "2.50"
"""The first Ray that works. Older ones are refused."""
TESTED_RAY = (LOWEST_RAY, "2.61")
"""From the first version, up to but not including the second."""
PYTHONS = ((3, 11), (3, 15))
"""From the first version, up to but not including the second, as in pyproject.toml."""
INSTALL_RAY = f"pip install 'ray[data]>={LOWEST_RAY}'"
CONTAINER_ENTRY = "offload_entry.py"
"""The program that a SageMaker container starts. It installs Ray first."""


def check_versions() -> None:
    """Raise an error that is both a ConfigError and an ImportError if offload cannot work with this Python or this Ray."""
    reason = python_refusal(sys.version_info[:2]) or ray_refusal(installed_ray())
    if reason is not None:
        from offload.errors import VersionError  # only now: an import that succeeds does not need it

        raise VersionError(reason)


def end_on_wrong_python() -> None:
    """End the process, as a command with a wrong option ends, if offload cannot run with this Python."""
    if (reason := python_refusal(sys.version_info[:2])) is not None:
        sys.stderr.write(f"offload: {reason}\n")
        sys.exit(2)


def checks_by_itself() -> bool:
    """Whether this process is a command of offload, which checks the versions at a better moment.

    ``offload doctor`` reports them, the entry of a Ray job names the machine, and that of a SageMaker container installs Ray.
    """
    words = sys.orig_argv
    if "-m" in words[1:-1]:
        module = words[words.index("-m", 1) + 1]
        return module == "offload" or module.startswith("offload.")
    return os.path.basename(sys.argv[0] if sys.argv else "") in ("offload", CONTAINER_ENTRY)


def installed_ray() -> str | None:
    """The version of the installed Ray, without importing it: an empty text if it tells none, None if there is no Ray."""
    imported = sys.modules.get("ray")
    if imported is not None:
        return str(getattr(imported, "__version__", ""))
    import importlib.metadata
    import importlib.util

    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        spec = None if "ray" in sys.modules else importlib.util.find_spec("ray")
        return None if spec is None or spec.origin is None else ""


def python_refusal(version: tuple[int, ...]) -> str | None:
    """One sentence if offload cannot run with this Python; None if it can."""
    if PYTHONS[0] <= version[:2] < PYTHONS[1]:
        return None
    found = ".".join(map(str, version))
    return f"Python {found} runs this program, and offload needs {python_range()}: install offload for one of these."


def python_range() -> str:
    """The range of Python versions in words."""
    (major, lowest), (_, limit) = PYTHONS
    return f"Python {major}.{lowest} to {major}.{limit - 1}"


def ray_refusal(version: str | None) -> str | None:
    """One sentence if offload cannot work with this Ray (None: there is none); None if it can, or if the version says nothing."""
    if version is None:
        return f"Ray is not installed, and offload needs {ray_range()}: {INSTALL_RAY}."
    if not is_too_old(version):
        return None
    return f"Ray {version} is installed, and offload needs {ray_range()}: {INSTALL_RAY}."


def ray_range() -> str:
    """The range of Ray versions in words."""
    major, _, limit = TESTED_RAY[1].partition(".")
    return f"Ray {LOWEST_RAY} or newer (tested: {LOWEST_RAY} to {major}.{int(limit) - 1})"


def is_too_old(version: str) -> bool:
    """Whether this Ray is older than the lowest that works. A pre-release counts as the version that it leads to."""
    parsed, lowest = _parse(version), _parse(LOWEST_RAY)
    return parsed is not None and lowest is not None and parsed < lowest


def ray_version_warning(version: str) -> str | None:
    """One paragraph to show for a Ray ``version`` outside the tested range; None inside it.

    A pre-release counts as the version that it leads to; an unreadable version counts as outside.
    """
    parsed = _parse(version)
    lowest, limit = (_parse(bound) for bound in TESTED_RAY)
    if parsed is not None and lowest is not None and limit is not None and lowest <= parsed < limit:
        return None
    return (
        f"Ray {version} is outside the range that offload was tested with (>={TESTED_RAY[0]},<{TESTED_RAY[1]}). "
        "Where it lacks something that offload uses, or has changed it, offload is slower or says less: offload doctor lists what "
        "that costs. "
        f"Install a tested one with: pip install 'ray[data]>={TESTED_RAY[0]},<{TESTED_RAY[1]}'"
    )


def _parse(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
