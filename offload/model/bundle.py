"""Bundles of resources that must fit on one node, as Ray counts them."""

from __future__ import annotations

from collections.abc import Mapping

Bundle = tuple[tuple[str, float], ...]
"""Amounts by resource name, in the order of names."""

GPU_TYPE = "accelerator_type:"
"""Ray's prefix for the resource that names the kind of a node's GPUs."""


def bundle_of(resources: Mapping[str, float]) -> Bundle:
    """A bundle of these resources, without zero amounts."""
    return tuple(sorted((name, amount) for name, amount in resources.items() if amount > 0))
