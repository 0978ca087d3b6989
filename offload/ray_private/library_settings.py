"""What Ray's library keeps in this process: the authentication mode and the token of the first cluster that it uses."""

from __future__ import annotations

import os
from typing import Any

from offload.ray_private.part import Part

PART = Part(
    name="authentication of the process",
    purpose="connect one process to several clusters in turn, each with its own token, and tell a job's ranks their token",
    without="Ray keeps the mode and the token of the first cluster, and the ranks get the token of the environment",
    cost="a program that uses clusters with different tokens needs a process for each",
    needs=(
        "ray._raylet:Config.initialize",
        "ray._raylet:AuthenticationTokenLoader.instance",
        "ray._raylet:AuthenticationTokenLoader.reset_cache",
        "ray._raylet:AuthenticationTokenLoader.get_raw_token",
        "ray._raylet:AuthenticationMode.TOKEN",
        "ray._raylet:get_authentication_mode",
    ),
)

CONNECTION = Part(
    name="end of a connection",
    purpose="restore Ray's log level and the limit on open files when a connection ends, whoever ends it",
    without="they stay as ray.init has set them",
    cost="the process keeps Ray's log level and its limit on open files",
    needs=("ray._private.worker:_global_node",),
)


def refused_tokens() -> tuple[type[Exception], ...]:
    """What Ray raises where a cluster refuses this process's token; nothing in releases without tokens."""
    import ray.exceptions

    refused: type[Exception] | None = getattr(ray.exceptions, "AuthenticationError", None)
    return () if refused is None else (refused,)


def read_anew() -> None:
    """Make Ray's library read the mode and the token from the environment again when it next needs them."""

    def private() -> None:
        import ray._raylet

        library: Any = ray._raylet
        library.Config.initialize("")
        library.AuthenticationTokenLoader.instance().reset_cache()

    PART.use(private, otherwise=lambda: None)


def uses_token() -> bool:
    """Return whether Ray's library authenticates itself by a token."""

    def private() -> bool:
        import ray._raylet

        library: Any = ray._raylet
        return bool(library.get_authentication_mode() == library.AuthenticationMode.TOKEN)

    return PART.use(private, otherwise=lambda: os.environ.get("RAY_AUTH_MODE", "").lower() == "token")


def token_in_use() -> str:
    """The token of this process's connection; empty if it needs none."""

    def private() -> str:
        import ray._raylet

        library: Any = ray._raylet
        return str(library.AuthenticationTokenLoader.instance().get_raw_token())

    return PART.use(private, otherwise=lambda: os.environ.get("RAY_AUTH_TOKEN", "")) if uses_token() else ""


def connection() -> Any:
    """An object that lives as long as this process's connection to a cluster; None without one, or if Ray has none."""

    def private() -> Any:
        from ray._private import worker

        return worker._global_node

    return CONNECTION.use(private, otherwise=lambda: None)
