"""The versions of Ray with which this release was tested, and the warning for any other.

Where it stops: it refuses nothing. Other versions may well work; contract tests check what offload relies on.
"""

from __future__ import annotations

import re

TESTED_RAY = ("2.60", "2.61")
"""From the first version, up to but not including the second."""


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
        f"Install a tested one with: pip install 'ray[data,train]>={TESTED_RAY[0]},<{TESTED_RAY[1]}'"
    )


def _parse(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
