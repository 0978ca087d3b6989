"""Checks of the model's parameters, with one wording: the name, the value found, and what a sane one looks like."""

from __future__ import annotations

import math
from typing import Any

from offload.errors import ConfigError


def check_number(
    name: str,
    value: Any,
    *,
    least: float = 0.0,
    most: float = math.inf,
    above: float | None = None,
    infinite: bool = False,
    sane: str = "",
) -> float:
    """``value`` as a float within [least, most] (and > ``above``); infinity only with ``infinite``.

    Raises ConfigError that names the thing and the value found; ``sane`` says what one would expect to see.
    """
    expected = f" ({sane})" if sane else ""
    if isinstance(value, bool) or not isinstance(value, int | float | _numpy_numbers()):
        raise ConfigError(f"{name} must be a number{expected}, found {_shown(value)}.")
    number = float(value)
    if math.isnan(number):
        raise ConfigError(f"{name} must be a number{expected}, found NaN.")
    if math.isinf(number) and not (infinite and number > 0):
        raise ConfigError(f"{name} must be finite{expected}, found {number}.")
    if above is not None and number <= above:
        raise ConfigError(f"{name} must be greater than {above:g}{expected}, found {number:g}.")
    if number < least:
        raise ConfigError(f"{name} must be at least {least:g}{expected}, found {number:g}.")
    if number > most:
        raise ConfigError(f"{name} must be at most {most:g}{expected}, found {number:g}.")
    return number


def check_count(name: str, value: Any, *, least: int = 0, sane: str = "") -> int:
    """``value`` as an int ≥ ``least``. Raises ConfigError as :func:`check_number` does."""
    number = check_number(name, value, least=least, sane=sane)
    if number != int(number):
        raise ConfigError(f"{name} must be a whole number{f' ({sane})' if sane else ''}, found {number:g}.")
    return int(number)


def _numpy_numbers() -> Any:
    import numpy as np

    return np.integer | np.floating


def _shown(value: Any) -> str:
    text = repr(value)
    return "nothing" if value is None else text if len(text) <= 40 else f"{text[:40]}…"
