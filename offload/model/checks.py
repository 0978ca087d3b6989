"""Checks of users' values. All errors use one wording: the parameter, the value found, and what to pass instead.

Each function returns the value in its plain Python type (``np.int64(64)`` becomes ``64``) or raises ConfigError.
``sane`` shows a good value.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from offload.errors import ConfigError

MOST = 2**53  # the largest count: beyond it, a count is a mistake, and floats cannot represent every integer


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
    """``value`` as a float within [least, most] (and > ``above``); infinity only with ``infinite``."""
    expected = f" ({sane})" if sane else ""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ConfigError(f"{name} must be a number{expected}, found {shown(value)}.")
    try:
        number = float(value)
    except OverflowError:
        raise ConfigError(f"{name} is too large{expected}, found {shown(value)}.") from None
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


def check_count(
    name: str, value: Any, *, least: int = 0, most: int = MOST, sane: str = "", whole_floats: bool = False
) -> int:
    """``value`` as an int within [least, most]. ``whole_floats``: 64.0 counts as 64, as in JSON."""
    expected = f" ({sane})" if sane else ""
    check_number(name, value, least=-math.inf, sane=sane)
    if isinstance(value, float | np.floating) and not (whole_floats and value == int(value)):
        raise ConfigError(f"{name} must be a whole number{expected}, found {shown(value)}.")
    number = int(value)
    if number < least:
        raise ConfigError(f"{name} must be at least {least}{expected}, found {shown(number)}.")
    if number > most:
        raise ConfigError(f"{name} must be at most {most:,}{expected}, found {shown(number)}.")
    return number


def check_range(name: str, value: Any, *, least: int = 1, sane: str) -> tuple[int, int]:
    """``value`` as (least, most): two counts in their order."""
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []
    if len(pair) != 2:
        raise ConfigError(f"{name} must be a pair, the least and the most ({sane}), found {shown(value)}.")
    low, high = (check_count(f"{name}[{i}]", bound, least=least, sane=sane) for i, bound in enumerate(pair))
    if low > high:
        raise ConfigError(f"{name} must name the least first ({sane}), found {shown(value)}.")
    return low, high


def check_flag(name: str, value: Any) -> bool:
    """``value``, which must be True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} must be True or False, found {shown(value)}.")
    return bool(value)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """``value``, which must be one of ``choices``."""
    words = [f'"{choice}"' for choice in choices]
    if not isinstance(value, str) or f'"{value}"' not in words:
        expected = " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]
        raise ConfigError(f"{name} must be {expected}, found {shown(value)}.")
    return value


def check_text(name: str, value: Any, *, sane: str) -> str:
    """``value``, text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be text ({sane}), found {shown(value)}.")
    return value


def check_path(name: str, value: Any, *, sane: str) -> str:
    """``value``, text or a path, as text."""
    text = value.__fspath__() if hasattr(type(value), "__fspath__") else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} must be a path ({sane}), found {shown(value)}.")
    return text


def check_names(name: str, value: Any, *, sane: str) -> tuple[str, ...]:
    """``value``, a list of names, as a tuple. A plain string is refused: it would count as a list of letters."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list of names ({sane}), found {shown(value)}.")
    return tuple(check_text(f"{name}[{i}]", item, sane=sane) for i, item in enumerate(value))


def check_mapping(name: str, value: Any, *, sane: str) -> dict[Any, Any]:
    """``value``, a mapping, as a dict."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a dict ({sane}), found {shown(value)}.")
    return dict(value)


def check_callable(name: str, value: Any, *, sane: str) -> Any:
    """``value``, which must be callable."""
    if not callable(value):
        raise ConfigError(f"{name} must be callable ({sane}), found {shown(value)}.")
    return value


def shown(value: Any) -> str:
    """``value`` as an error message shows it, in 40 characters or so."""
    if value is None:
        return "nothing"
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of about {round(value.bit_length() * math.log10(2)):,} digits"
    text = f"a {type(value).__name__}"
    with contextlib.suppress(Exception):  # the repr of a user's object, or of a tensor, may raise anything
        text = repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:40]}…"
