"""Shared by the tests: a Ray cluster of their own, small data sets of real JPEG files, and a folder for temporary files that goes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from offload import engine
from tests.helpers import RAY_STARTS_NOTHING_AHEAD, write_jpegs
from tests.shares import rank

pytest_plugins = ["tests.cpu_report"]

LOGICAL_CPUS = 4

# Commands that are interrupted in tests would inherit it, if a shell started these in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What the tests and their processes leave among temporary files goes with the session: servers' sockets, Ray's sessions, the
# folders of libraries. pytest keeps its own folders where they were. The path is short, as sockets need, and open to other users.
TEMPORARY: str | None = None
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    TEMPORARY = tempfile.mkdtemp(prefix="offload-", dir="/tmp")
    os.chmod(TEMPORARY, 0o1777)
    os.environ["TMPDIR"] = os.environ["RAY_TMPDIR"] = tempfile.tempdir = TEMPORARY

# multiprocessing would remove its own folder at the end of the process, after all of them have gone.
multiprocessing.current_process()._config["tempdir"] = tempfile.gettempdir()  # type: ignore[attr-defined]

# Raylets that tests start by hand, as those of a run of this machine alone, start no idle Python processes ahead.
for name, value in RAY_STARTS_NOTHING_AHEAD.items():
    os.environ.setdefault(name, value)

# Serve replaces a proxy that is not ready within five seconds, which on a busy machine none is.
for name in ("READY_CHECK", "HEALTH_CHECK"):
    os.environ.setdefault(f"RAY_SERVE_PROXY_{name}_TIMEOUT_S", "600")

# No test fails because the machine is slow, nor because continuous integration happened on an example that nobody has seen: there
# examples are the same each time. Elsewhere, and in `make soak`, they are new ones.
hypothesis.settings.register_profile("offload", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "offload")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let collections of garbage pass by what the tests import: they find nothing there, and in this process's forks they would copy it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries look at the end for what nobody has collected
    if TEMPORARY is not None:
        shutil.rmtree(TEMPORARY, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of pytest-xdist: how processes share out the tests."""
    from tests.shares import OneByOneOrByFile

    config.option.loadscopereorder = False
    return OneByOneOrByFile(config, log)


class Keeper:
    """A process that does nothing."""


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for all tests that train: four logical CPUs, token authentication, a folder of its own."""
    import ray

    from offload import machine, preload
    from offload.train.cluster import connection as cluster

    before = machine.usable_cores
    machine.usable_cores = lambda: LOGICAL_CPUS
    try:
        cluster._start_local()
        # The server that imports ahead ends half a minute after its last process, and the next test would wait for another one,
        # which costs as much as several runs: this process stays.
        environment = preload.runtime_env({}, also=preload.TRAINING)
        keeper: Any = ray.remote(Keeper).options(num_cpus=0, runtime_env=environment).remote()
        yield
        del keeper
    finally:
        machine.usable_cores = before
        ray.shutdown()


@pytest.fixture(autouse=True)
def commands_leave_no_address() -> Iterator[None]:
    """A command of `offload` may choose a Ray for its own process. Tests that run it in theirs put the variable back."""
    before = os.environ.get("RAY_ADDRESS")
    yield
    if before is None:
        os.environ.pop("RAY_ADDRESS", None)
    else:
        os.environ["RAY_ADDRESS"] = before


@pytest.fixture(autouse=True)
def a_cluster_is_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that does not ask for the shared cluster has no Ray, though another test may have left this process connected to it."""
    if engine.program_uses_ray() and "ray_cluster" not in request.fixturenames:
        monkeypatch.setattr(engine, "program_uses_ray", lambda: False)


@pytest.fixture(params=["this machine", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.soak])])
def loader_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine of a test's DataLoaders: processes of this machine, and once before a release also a real Ray."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        monkeypatch.setattr(engine, "program_uses_ray", lambda: True)
    return str(request.param)


@pytest.fixture(autouse=True)
def tasks_get_test_modules_by_value(request: pytest.FixtureRequest) -> None:
    """Ray's workers cannot import the tests: what tests define travels whole."""
    if request.module is not None and request.node.get_closest_marker("ray"):
        from ray import cloudpickle

        from tests import loops

        cloudpickle.register_pickle_by_value(request.module)
        cloudpickle.register_pickle_by_value(loops)


@pytest.fixture(scope="session")
def jpeg_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """103 JPEGs of 3 classes, all of one size: a number that no batch size divides."""
    folder = tmp_path_factory.mktemp("jpegs")
    write_jpegs(folder, 103)
    return folder
