"""The launcher's messages to the entry: one hyperparameter, besides the user's own, and files of the bundle.

Where it stops: everyone who may describe the job sees its hyperparameters, so the token travels in the bundle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

NAME = "offload_job"
TOKEN, PLAN = ".offload-token", ".offload-plan.json"
TO_INSTALL = "offload-requirements.txt"
"""Files of the bundle. Not ``requirements.txt``: the training toolkit would install it, and would not explain a failure."""
GPU_GROUP = "gpu"
"""The instance group of the workers, whose first host is the head."""
HOSTS_DEADLINE_S = 600.0
RESERVED_PREFIX = "sagemaker_"
RESERVED = (NAME, "_tuning_objective_metric", "default_user_module_name")
"""Names that do not reach the script: the launcher's own, and two of the training toolkit."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one job.

    Args:
        script: the user's script, relative to the bundle.
        args: its arguments, after those from the hyperparameters.
        storage: the folder of checkpoints for workers on several GPU hosts, since no host sees another's disk. The workers of one host,
            and all workers without a storage, write to the job's checkpoint folder.
        hosts_deadline_s: how long running hosts wait for the others, in seconds.
    """

    script: str
    args: tuple[str, ...] = ()
    storage: str | None = None
    hosts_deadline_s: float = HOSTS_DEADLINE_S

    def hyperparameter(self) -> dict[str, Any]:
        """The settings as a hyperparameter of the job."""
        return {NAME: {name: value for name, value in asdict(self).items() if value is not None}}


def read_settings(base: Path) -> tuple[Settings, dict[str, str]]:
    """Read the settings and the user's hyperparameters, as typed, from ``input/config/hyperparameters.json`` below ``base``.

    Raises ConfigError if another launcher, or another version of this one, started the job.
    """
    path = base / "input" / "config" / "hyperparameters.json"
    try:
        hyperparameters = {name: _text(value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()}
        values = dict(json.loads(hyperparameters.pop(NAME)))
        settings = Settings(**{**values, "args": tuple(values.get("args", ()))})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} does not hold the launcher's settings ({type(error).__name__}: {error}): launch the job with "
            "`offload launch sagemaker` of this version."
        ) from None
    return settings, {name: value for name, value in hyperparameters.items() if not is_reserved(name)}


def deadline_s(base: Path) -> float:
    """The time that hosts wait for each other, even if the settings are unreadable: the hosts report that once they have met."""
    try:
        return read_settings(base)[0].hosts_deadline_s
    except ConfigError:
        return HOSTS_DEADLINE_S


def is_reserved(name: str) -> bool:
    """Return whether the service, its training toolkit or the launcher reserves this name, so that the hyperparameter would not reach the
    script."""
    return name in RESERVED or name.startswith(RESERVED_PREFIX)


def arguments(hyperparameters: Mapping[str, str]) -> list[str]:
    """Hyperparameters in the form that the training toolkit passes to a script: ``--name value``, ``-n value``."""
    return [
        text
        for name, value in sorted(hyperparameters.items())
        for text in (f"--{name}" if len(name) > 1 else f"-{name}", value)
    ]


def _text(value: Any) -> str:
    """The text that a script gets for a stored value.

    The launcher and the SDK's estimator store JSON, so text is a JSON string. The console and version 3 of the SDK store plain text:
    ``1.10`` stays ``1.10``, since only a JSON string is decoded.
    """
    if not isinstance(value, str):
        return json.dumps(value)
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value
