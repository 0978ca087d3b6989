"""Numbers in words, as messages, terminals and pages spell them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

GOODPUT_DIFFERS = 0.999  # share of samples/s above which a goodput would show the same number again


def figure(value: float | None) -> str:
    """Three significant digits below a thousand, whole numbers above: ``0.00123``, ``95.4``, ``1,234``."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1e6:
        return f"{value:,.3g}" if abs(value) >= 1e12 else f"{value:,.0f}"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def rate(value: float | None) -> str:
    """Samples per second."""
    return f"{figure(value)} samples/s"


def rate_shown(value: float) -> str:
    """A rate, such as samples/s, as sentences show it: whole from ten on, and with two digits below, as of samples that take seconds."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def usd(value: float | None) -> str:
    """Dollars: two digits after the point from ten cents on, and two significant ones below."""
    if value is None or not math.isfinite(value):
        return "–"
    if value and abs(value) < 0.0995:
        return f"${value:.2g}" if abs(value) >= 1e-4 else f"${value:.1e}"
    return f"${value:,.2f}"


def share(value: float | None) -> str:
    """A share in percent."""
    if value is None or not math.isfinite(value):
        return "–"
    percent = 100 * value
    if 0 < abs(percent) < 0.05:
        return "<0.1%"
    return f"{percent:.1f}%" if 0 < abs(percent) < 9.95 else f"{percent:.0f}%"


def duration(seconds: float | None) -> str:
    """A duration in its two largest units: ``4.2 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 119.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24:,} d {hours % 24} h"
    larger, smaller = (f"{hours} h", f"{minutes} min") if hours else (f"{minutes} min", f"{rest} s")
    return larger if smaller.startswith("0 ") else f"{larger} {smaller}"


def moment(seconds: float) -> str:
    """A second of the run as minutes and seconds, with hours from an hour on: ``0:07``, ``2:05:00``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def times(value: float | None) -> str:
    """A factor: ``1.89×``."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.2f}×"


def parts_held(held: Mapping[str, Sequence[float]]) -> str:
    """Resources in words, ``3 of 8 CPU``. ``held``: by resource, the held and the total amount."""
    return ", ".join(f"{amount:g} of {total:g} {name}" for name, (amount, total) in held.items())
