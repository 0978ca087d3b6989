"""The resources that one node must have room for, as Ray counts them."""

from __future__ import annotations

from collections.abc import Mapping

Bundle = tuple[tuple[str, float], ...]
"""Amounts by resource name, in the order of names."""

GPU_TYPE = "accelerator_type:"
"""Ray's prefix for the resource that a node with GPUs of a kind has."""


def bundle_of(resources: Mapping[str, float]) -> Bundle:
    """A bundle of these resources, without zero amounts."""
    return tuple(sorted((name, amount) for name, amount in resources.items() if amount > 0))
