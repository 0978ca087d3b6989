"""Support for a Trainer in a script that torchrun started. torchrun starts one process per rank, but the Trainer starts its own workers."""

from __future__ import annotations

import os
from collections.abc import Mapping

from offload.errors import ConfigError

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def check_alone(env: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if torchrun has started several processes of the script: each would start a run of its own."""
    count = env.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in env and count != "1":
        raise ConfigError(
            f"torchrun has started {count} processes of this script, and offload.Trainer starts its workers itself. Start the script with "
            "python, and pass workers= for a number of workers. For a loop that torchrun starts, use offload.DataLoader."
        )


def worker_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables that keep workers from looking for torchrun's own store. torch would take it for the workers' rendezvous
    and wait half an hour for it."""
    return {_AGENT_STORE: "False"} if _AGENT_STORE in env else {}
