"""A callback of Tune that lets the arbiter favor the best trial.

Where it stops: the arbiter decides what a weight is worth in workers and cores, and whether that is worth a restart.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ray import tune

from offload.arbiter import registry
from offload.errors import ConfigError
from offload.tune.trial import run_name

logger = logging.getLogger("offload")


class FavorBest(tune.Callback):
    """See :func:`offload.tune.favor_best`.

    Args:
        metric: what the search compares.
        largest: whether the largest value is the best.
        weight: of the best trial's run; those of all others are 1.
    """

    def __init__(self, metric: str, *, largest: bool, weight: float) -> None:
        self._metric, self._sign, self._weight = metric, 1.0 if largest else -1.0, weight
        self._scores: dict[str, float] = {}

    def setup(self, *arguments: Any, **info: Any) -> None:
        """Check that there is an arbiter. Raises ConfigError if not."""
        if registry.arbiter() is None:
            raise ConfigError(f"favor_best needs an arbiter, and {registry.MISSING}")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Weigh the runs anew."""
        if self._metric in result:
            self._scores[run_name(str(trial))] = self._sign * float(result[self._metric])
        self._weigh()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The best of those that go on may be another one."""
        self._scores.pop(run_name(str(trial)), None)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """As at the end of a trial."""
        self._scores.pop(run_name(str(trial)), None)

    def _weigh(self) -> None:
        try:
            now = {run.name: run.weight for run in registry.status().runs}
            for name, weight in weights(self._scores, now, self._weight).items():
                if now[name] != weight:
                    registry.weigh(name, weight)
        except ConfigError as error:  # an error here would end the search; the next result tries again
            logger.warning("The best trial is not favored until the next result: %s", error)


def weights(scores: Mapping[str, float], runs: Iterable[str], weight: float) -> dict[str, float]:
    """The weights of those runs that are trials: ``weight`` for the one whose trial has the highest score, and 1 for the others.

    ``scores``: by the name of the trial's first run. The next ones have a number behind it. A score that is not finite, as of a
    training that diverged, is never the highest.
    """
    finite = {trial: score for trial, score in scores.items() if math.isfinite(score)}
    best = max(finite, key=lambda trial: finite[trial], default=None)
    of_runs = {run: run if run in scores else re.sub(r"-\d+$", "", run) for run in runs}
    return {run: weight if trial == best else 1.0 for run, trial in of_runs.items() if trial in scores}
