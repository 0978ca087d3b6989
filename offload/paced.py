"""The paced accelerator, a stand-in for a GPU on machines without one. It takes time and computes nothing."""

import time
from collections.abc import Callable


class PacedAccelerator:
    """An accelerator that occupies its caller for `alpha_s + beta_s * m` seconds per step of local batch size `m`, without CPU use.

    It sleeps towards a deadline on the monotonic clock. A sleep always ends a little late; the next step is shorter by the excess, so
    that consecutive steps take exactly their nominal time on average. The excess is dropped if the caller was away for longer (for
    example, waiting for data): time spent elsewhere does not make a step faster. Report its measurements under its name, never as a
    GPU's.
    """

    name = "paced accelerator"

    def __init__(
        self,
        alpha_s: float,
        beta_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Args: alpha_s: seconds per step, whatever its size. beta_s: seconds per sample."""
        for parameter, value in (("alpha_s", alpha_s), ("beta_s", beta_s)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{parameter} must be a number of seconds ≥ 0, found {value}")
        self.alpha_s = alpha_s
        self.beta_s = beta_s
        self.busy_s = 0.0
        """The nominal time of all steps so far: the busy time of the accelerator."""
        self.steps = 0
        self._clock = clock
        self._sleep = sleep
        self._excess_s = 0.0
        self._returned_at: float | None = None

    def step_time_s(self, local_batch_size: int) -> float:
        """The nominal duration of one step."""
        return self.alpha_s + self.beta_s * local_batch_size

    def step(self, local_batch_size: int) -> None:
        """Occupy the caller for one step. Raises ValueError for a batch of less than one sample."""
        if local_batch_size < 1:
            raise ValueError(f"local batch size must be ≥ 1, found {local_batch_size}")
        now = self._clock()
        duration_s = self.step_time_s(local_batch_size)
        # A step starts no earlier than its call, but one that follows at once starts where the last should have ended.
        idle_s = 0.0 if self._returned_at is None else now - self._returned_at
        start = now - max(self._excess_s - idle_s, 0.0)
        deadline = start + duration_s
        while (left_s := deadline - self._clock()) > 0:
            self._sleep(left_s)
        self._returned_at = self._clock()
        self._excess_s = self._returned_at - deadline
        self.busy_s += duration_s
        self.steps += 1

    def __repr__(self) -> str:
        return f"{self.name} ({self.alpha_s:g} s + {self.beta_s:g} s per sample)"
