"""The first part of preprocessing that draws no random numbers: what a node would save by keeping its result on its disk."""

from __future__ import annotations

from dataclasses import dataclass

READ_S = 100e-6
READ_S_PER_BYTE = 0.8e-9
"""The CPU time to find a sample in a node's cache: benchmarks/cached_samples.py measures both."""
WORTH_SAYING = 0.2  # of the core-seconds


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The stages before the first one that draws random numbers.

    Args:
        until: that stage; None if no stage draws any.
        share: the share of the core-seconds of the stages before it, between 0 and 1.
        bytes_out: the bytes of their result for one sample.
    """

    until: str | None
    share: float
    bytes_out: float

    def saved(self, core_seconds_per_sample: float) -> float:
        """The share of the core-seconds that a found sample saves. It is negative if finding it takes longer than making it."""
        return self.share - (READ_S + READ_S_PER_BYTE * self.bytes_out) / core_seconds_per_sample


def advice(constant: Constant | None, core_seconds_per_sample: float) -> str | None:
    """A sentence for the user; None if a cache would save little."""
    if constant is None or (saved := constant.saved(core_seconds_per_sample)) < WORTH_SAYING:
        return None
    what = "Nothing" if constant.until is None else f"Nothing before {constant.until}"
    return (
        f"{what} draws random numbers. If each node keeps that part on its disk (offload.cached), later epochs take {saved:.0%} fewer "
        f"core-seconds, and a sample takes {constant.bytes_out / 1000:,.1f} kB there."
    )
