"""Learning-rate rules, which give the factor by which a larger batch may raise the learning rate.

Sources: AdaScale: Johnson et al., ICML 2020; its square root for the Adam family: Qiao et al., "Pollux", OSDI'21; linear:
Goyal et al., "Accurate, Large Minibatch SGD", 2017; square root: Krizhevsky, "One weird trick", 2014; LEGW: You et al.,
"Large-Batch Training for LSTM and Beyond", SC'19.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from offload.errors import ConfigError

Rule = Literal["adascale", "adascale-sqrt", "linear", "sqrt", "legw", "none"]
RULES: tuple[Rule, ...] = get_args(Rule)


def learning_rate_factor(
    rule: Rule, *, scale: float, gain: float, passes: float = 0.0, warmup_epochs: float = 0.0
) -> float:
    """The factor for the script's learning rate.

    Args:
        rule: the name of the rule.
        scale: ``k = M/M0``, the global batch over the initial one.
        gain: AdaScale's gain at that batch, in [1, k].
        passes: passes over the data so far (LEGW).
        warmup_epochs: LEGW's warm-up at the initial batch; it is k times as long at batch M.

    Raises ConfigError for an unknown rule.
    """
    if rule == "none":
        return 1.0
    if rule == "adascale":
        return gain
    if rule == "adascale-sqrt":
        return math.sqrt(gain)
    if rule == "linear":
        return scale
    if rule == "sqrt":
        return math.sqrt(scale)
    if rule == "legw":
        warmup = warmup_epochs * scale
        # Linear in the passes over the data, not in the steps, whose number per pass changes with the batch.
        return math.sqrt(scale) * (min(passes / warmup, 1.0) if warmup > 0 else 1.0)
    raise ConfigError(f"the learning-rate rule must be one of {', '.join(RULES)}, found {rule!r}.")
