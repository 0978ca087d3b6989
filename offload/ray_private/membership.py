"""Which clusters have a node on this machine, and which nodes a cluster has, before this process is connected."""

from __future__ import annotations

import logging
from typing import Any

from offload.ray_private.part import Part

PART = Part(
    name="nodes before a connection",
    purpose="find this machine's clusters, and tell within seconds that it is no node of one",
    without="ray.init looks for them",
    cost='a wrong address is noticed after a minute, and address="auto" takes the cluster of the last ray start alone',
    needs=(
        "ray._private.services:find_node_ids()",
        "ray._private.services:find_gcs_addresses()",
        "ray._private.services:find_bootstrap_address(temp_dir)",
        "ray._raylet:InnerGcsClient.get_all_node_info",
        "ray._raylet:GcsClient",
    ),
)

KNOWN_TOKEN = Part(
    name="token before a connection",
    purpose="take Ray's token file into account before ray.init does",
    without="ray.init reads it; questions before that go without a token",
    cost="a cluster that asks for the token of this file alone refuses the check of its address",
    needs=(
        "ray._private.authentication.authentication_token_setup:maybe_enable_token_auth_if_token_available(warn_if_disabled)",
        "ray._private.authentication.authentication_token_setup:logger",
    ),
)


def nodes_here() -> set[str] | None:
    """The ids of the nodes whose processes this machine shows; None if Ray does not tell."""

    def private() -> set[str]:
        from ray._private import services

        return {str(node) for node in services.find_node_ids()}  # type: ignore[no-untyped-call]

    return PART.use(private, otherwise=lambda: None)


def sockets_at(address: str, within_s: float) -> list[tuple[str, str]] | None:
    """The ids of a cluster's nodes, and their sockets for drivers on the same machine; None if Ray does not tell.

    Raises Ray's error if the cluster refuses to answer, for example without its token.
    """

    def private() -> list[tuple[str, str]]:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        client: Any = GcsClient(address=address)
        nodes = client.get_all_node_info(timeout=within_s)
        return [(node.hex(), info.raylet_socket_name) for node, info in nodes.items()]

    return PART.use(private, otherwise=lambda: None)


def addresses_here() -> tuple[str, ...] | None:
    """The addresses (``host:port``) of the clusters with a node on this machine, the one of the last ``ray start`` first. None if Ray does
    not tell."""

    def private() -> tuple[str, ...]:
        from ray._private import services

        last: str | None = services.find_bootstrap_address(None)
        others = sorted(map(str, services.find_gcs_addresses()))  # type: ignore[no-untyped-call]
        return tuple(dict.fromkeys([last, *others] if last else others))

    return PART.use(private, otherwise=lambda: None)


def enable_known_token() -> None:
    """Use token authentication if the mode is unset and the environment or Ray's token file has a token, without Ray's warning that
    this is the default."""

    def private() -> None:
        from ray._private.authentication import authentication_token_setup as setup

        level = setup.logger.level
        setup.logger.setLevel(logging.ERROR)
        try:
            setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        finally:
            setup.logger.setLevel(level)

    KNOWN_TOKEN.use(private, otherwise=lambda: None)
