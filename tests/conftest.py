"""Shared by the tests: a Ray cluster of their own, and small data sets of real JPEG files."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.helpers import write_jpegs

LOGICAL_CPUS = 4

# Commands that are interrupted in tests would inherit it, if a shell started these in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A test does not fail because the machine is slow.
hypothesis.settings.register_profile("offload", deadline=None)
hypothesis.settings.load_profile("offload")


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for all tests that train: four logical CPUs, token authentication, a folder of its own."""
    import ray

    from offload import machine
    from offload.train import cluster

    # Ray's sockets need a short path; pytest's folders are long.
    os.environ.setdefault("RAY_TMPDIR", "/tmp")
    before = machine.usable_cores
    machine.usable_cores = lambda: LOGICAL_CPUS
    try:
        cluster._start_local()
        yield
    finally:
        machine.usable_cores = before
        ray.shutdown()


@pytest.fixture(autouse=True)
def tasks_get_test_modules_by_value(request: pytest.FixtureRequest) -> None:
    """Ray's workers cannot import the tests: what tests define travels whole."""
    if request.module is not None and request.node.get_closest_marker("ray"):
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def jpeg_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """103 JPEGs of 3 classes, all of one size: a number that no batch size divides."""
    folder = tmp_path_factory.mktemp("jpegs")
    write_jpegs(folder, 103)
    return folder
