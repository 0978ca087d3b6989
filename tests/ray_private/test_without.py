"""Without a part of Ray's private interface, its callers take the public way: the same outcome, later or with fewer words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import ray.data
from hypothesis import given
from hypothesis import strategies as st
from ray.util.placement_group import placement_group, remove_placement_group

from offload import preload
from offload.errors import RunError
from offload.pipeline.pool.ray_state import Held, awaited_cpus, held, programs
from offload.pipeline.raydata.dataset_source import units_of
from offload.pipeline.raydata.execution import iterate
from offload.process import ray_forks
from offload.ray_private import (
    actor_ends,
    cluster_tables,
    data,
    draining,
    first_use,
    fork_cut,
    free_resources,
    job_client,
    library_settings,
    local_start,
    log_forwarding,
    membership,
    own_processes,
)
from offload.ray_private import preload as preloaded
from offload.ray_private.data import blocks
from offload.ray_private.free_resources import divided
from offload.ray_private.part import ABSENT, Part
from offload.train.cluster import connection, ray_nodes, ray_processes, ray_settings
from offload.train.cluster.holdings import NAMESPACE, Holdings
from offload.train.cluster.ray_output import keep_to_logs
from tests.helpers import ROOT, eventually
from tests.programs.on_plain_ray import ROWS, SAMPLES

DEADLINE_S = 800.0
Without = Callable[[Part], None]

on_ray = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Without:
    """Leave out a part from now on."""
    return lambda part: monkeypatch.setenv(ABSENT, part.name)


@pytest.mark.slow
@pytest.mark.ray
def test_a_program_without_any_part_reads_the_same_samples() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.programs.on_plain_ray"],
        env={**environment, ABSENT: "all"}, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert set(found["parts"].values()) == {False}
    assert found["loaded"] == [[number**2 for number in range(SAMPLES)]] * 2
    assert "ValueError: broken" in found["failure"]
    assert found["sigterm_is_kept"]
    assert "does not know the plans of Ray" in found["executed_since"]
    assert found["numbers"] == [2 * number for number in range(ROWS)]


# --- starts -----------------------------------------------------------------------------------------------------------


def test_processes_are_not_preloaded(without: Without) -> None:
    assert preload.runtime_env({})
    without(preloaded.PART)
    assert preload.runtime_env({}) == {}
    with preload.serving_ahead("A_MARK", "mark") as mark:
        assert mark == "mark"
        assert preload.ahead.key() is None


def test_ray_starts_as_it_does_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import node, parameter, services, utils, worker

    names = [
        (parameter, "RayParams"), (node.Node, "start_api_server"), (services, "ConsolePopen"),
        (services, "_build_python_executable_command_memory_profileable"), (utils, "set_sigterm_handler"),
        (utils, "get_dashboard_dependency_error"), (worker, "listen_error_messages"),
    ]  # fmt: skip
    before = [getattr(holder, name) for holder, name in names]

    def started() -> list[bool]:
        with (
            local_start.undisturbed(print) as told,
            local_start.without_helpers(),
            local_start.agents_by("agent.py", without_dashboard=True),
        ):
            return [told, *(getattr(h, name) is value for (h, name), value in zip(names, before, strict=True))]

    assert started() == [True, *[False] * len(names)]
    monkeypatch.setenv(ABSENT, "all")
    assert started() == [False, *[True] * len(names)]
    assert [getattr(holder, name) for holder, name in names] == before


def test_the_caller_s_sigterm_stays_its_own(without: Without) -> None:
    without(local_start.PROCESSES)
    before = signal.getsignal(signal.SIGTERM)
    with local_start.undisturbed(print):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ray_gets_only_settings_that_it_knows(without: Without) -> None:
    known = {ray_processes.RECONNECT: 10}
    assert local_start.settings({**known, "no_such_setting_of_ray": 1}, 0) == {
        "_system_config": known,
        "_metrics_export_port": 0,
    }
    without(local_start.SETTINGS)
    assert local_start.settings(known, 0) == {}


@pytest.mark.ray
@on_ray
def test_the_core_processes_are_known_as_children(without: Without) -> None:
    known = {name: process.pid for name, process in ray_processes.own_processes().items()}
    without(own_processes.PART)
    found = ray_processes.own_processes()
    assert {name: process.pid for name, process in found.items()} == known
    assert ray_processes.ControlWatch().lost() is None


def test_a_child_that_has_ended_has_ended_somehow() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        child = own_processes.Child(psutil.Process(process.pid))
        assert child.poll() is None
        child.kill()
        process.wait()
        with pytest.raises(own_processes.UnknownEndError):
            child.poll()
        with pytest.raises(ProcessLookupError):
            child.kill()


@pytest.mark.ray
@on_ray
def test_a_run_says_that_a_child_has_ended(without: Without) -> None:
    without(own_processes.PART)
    watch = ray_processes.ControlWatch()
    with subprocess.Popen(["true"]) as process:
        watch._own = {"raylet": own_processes.Child(psutil.Process(process.pid))}
        process.wait()
    assert str(watch.lost()).endswith("has ended")


# --- a connection -----------------------------------------------------------------------------------------------------


def test_calls_of_ray_go_unnoticed(without: Without, monkeypatch: pytest.MonkeyPatch) -> None:
    without(first_use.PART)
    assert not ray_processes.on_first_use(lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RunError, match="the connection to Ray has ended"), ray_processes.no_new_ray():
        pytest.fail("Ray would start anew")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with ray_processes.no_new_ray():
        pass


@pytest.mark.ray
@on_ray
def test_a_fork_is_still_refused(without: Without) -> None:
    without(fork_cut.PART)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ray_forks.check_not_forked()
            os.write(write, b"may use Ray")
        except RunError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        assert b"this process was forked from one that is connected to Ray" in pipe.read()
    os.waitpid(child, 0)
    assert ray.get(ray.put(1)) == 1


def test_ray_prints_everything(without: Without, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import ray_logging, worker

    without(log_forwarding.PART)
    dispatcher = ray_logging.global_worker_stdstream_dispatcher
    show: Any = worker.print_to_stdstream
    monkeypatch.setattr(dispatcher, "emit", type(dispatcher).emit.__get__(dispatcher))
    before = dispatcher.emit
    keep_to_logs("vit")
    assert (dispatcher.emit, worker.print_to_stdstream) == (before, show)


def test_the_environment_names_mode_and_token(without: Without, monkeypatch: pytest.MonkeyPatch) -> None:
    without(library_settings.PART)
    library_settings.read_anew()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    for mode, used in (("token", True), ("disabled", False)):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        assert ray_settings.uses_token() is used
        assert ray_settings.token_in_use() == ("a token" if used else "")


def test_settings_outlive_a_connection_whose_end_cannot_be_seen(without: Without) -> None:
    without(library_settings.CONNECTION)
    with ray_settings.settled():
        assert library_settings.connection() is None


def test_ray_itself_finds_a_cluster(without: Without) -> None:
    without(membership.PART)
    assert ray_nodes.is_node_of("192.0.2.1:6379", 1.0)
    assert ray_nodes.has_node("192.0.2.1:6379", "a node", 1.0)
    assert ray_nodes.addresses_here() is None
    assert connection._cluster_here() == "auto"


def test_ray_itself_finds_its_token(without: Without) -> None:
    without(membership.KNOWN_TOKEN)
    ray_nodes.use_known_token()


# --- the cluster ------------------------------------------------------------------------------------------------------


@pytest.mark.ray
@on_ray
def test_one_node_has_what_the_cluster_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_equal() -> bool:
        monkeypatch.delenv(ABSENT, raising=False)
        known = free_resources.free_resources()
        monkeypatch.setenv(ABSENT, free_resources.PART.name)
        return {node: free["CPU"] for node, free in free_resources.free_resources().items()} == {
            node: free["CPU"] for node, free in known.items()
        }

    room = placement_group([{"CPU": 1}])
    assert room.wait(DEADLINE_S)
    eventually(is_equal, DEADLINE_S)
    remove_placement_group(room)
    eventually(is_equal, DEADLINE_S)


amounts = st.floats(0.0, 64.0)


@given(
    whole=st.dictionaries(st.sampled_from("abc"), amounts, min_size=1),
    reserved=st.lists(st.tuples(st.sampled_from("abcd"), amounts), max_size=4),
    free=amounts,
)
def test_nodes_share_what_is_free(whole: dict[str, float], reserved: list[tuple[str, float]], free: float) -> None:
    left = divided(
        {node: {"CPU": cpus} for node, cpus in whole.items()},
        [(node, {"CPU": cpus}) for node, cpus in reserved],
        {"CPU": free},
    )
    total = 0.0
    for node, found in left.items():
        cpus = found.get("CPU", 0.0)
        total += cpus
        taken = sum(amount for holder, amount in reserved if holder == node)
        assert 0.0 <= cpus <= max(whole[node] - taken, 0.0) + 1e-9
    assert total <= free + 1e-6


@pytest.mark.ray
@on_ray
def test_holders_of_cpus_are_groups_and_tasks(without: Without) -> None:
    @ray.remote(num_cpus=2)
    class Counter:
        def ready(self) -> None: ...

    eventually(lambda: held() == Held(), DEADLINE_S)
    counter: Any = Counter.remote()
    ray.get(counter.ready.remote())
    room = placement_group([{"CPU": 1}], name="room")
    assert room.wait(DEADLINE_S)
    without(cluster_tables.PART)
    eventually(lambda: held().in_words == "tasks 2 CPUs, placement group room 1 CPU", DEADLINE_S)
    assert not held().by_us_alone
    ray.kill(counter)
    remove_placement_group(room)
    eventually(lambda: held() == Held(), DEADLINE_S)


@pytest.mark.ray
@on_ray
def test_nobody_counts_as_waiting(without: Without) -> None:
    without(cluster_tables.AWAITED)
    assert awaited_cpus() == 0.0
    assert programs() == 1


@pytest.mark.ray
@on_ray
def test_holdings_end_without_the_ids_of_actors(without: Without) -> None:
    @ray.remote(num_cpus=1)
    class Hub:
        def ready(self) -> None: ...

    without(cluster_tables.ACTOR_IDS)
    holdings = Holdings()
    holdings.note_actor("a hub")
    hub: Any = Hub.options(name="a hub", namespace=NAMESPACE).remote()
    ray.get(hub.ready.remote())
    holdings.release()
    holdings.drop()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(hub.ready.remote())


@pytest.mark.ray
@on_ray
def test_a_notice_goes_to_the_cluster_by_command(without: Without) -> None:
    gone = ray.NodeID.from_random().hex()
    without(draining.PART)
    assert draining.draining_nodes() == set()
    draining.drain(gone, "a test", 4e9)
    with pytest.raises(ray.exceptions.RaySystemError, match="ray drain-node failed"):
        draining.drain("no id", "a test", 4e9)


@pytest.mark.ray
@on_ray
def test_a_death_is_reported_in_ray_s_words(without: Without) -> None:
    @ray.remote(num_cpus=0)
    class Worker:
        def die(self) -> None:
            os._exit(1)

    worker: Any = Worker.remote()
    with pytest.raises(ray.exceptions.RayActorError) as died:
        ray.get(worker.die.remote())
    assert died.value.actor_id is not None
    assert not actor_ends.ran_out_of_memory(died.value.actor_id)
    without(actor_ends.PART)
    assert not actor_ends.ran_out_of_memory(died.value.actor_id)
    assert actor_ends.classes_of(os.getpid()) == set()


# --- Ray Data and jobs ------------------------------------------------------------------------------------------------


@pytest.mark.ray
@on_ray
def test_ray_data_executes_a_dataset_whose_plan_nobody_knows(without: Without) -> None:
    dataset = ray.data.range(10)
    assert not isinstance(units_of(dataset), str)
    without(data.PLANS)
    assert str(units_of(dataset)).startswith("offload does not know the plans of Ray")


@pytest.mark.ray
@on_ray
def test_blocks_pass_through_this_process(without: Without) -> None:
    dataset = ray.data.range(100, override_num_blocks=4)
    dataset.context.enable_progress_bars = False

    def ids() -> list[int]:
        found = []
        for block in iterate(dataset):
            table = ray.get(block.ref)
            assert block.cost.rows == table.num_rows
            assert block.cost.size_bytes > 0
            found += table.column("id").to_pylist()
        return sorted(found)

    assert ids() == list(range(100))
    without(blocks.PART)
    assert ids() == list(range(100))


def test_a_job_client_without_deadlines(without: Without, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.job_submission

    asked: list[dict[str, Any]] = []

    class Client:
        def __init__(self, url: str) -> None:
            self.url = url

        def _do_request(self, method: str, endpoint: str, *, data: Any = None, **more: Any) -> None:
            asked.append(more)

        def get_version(self) -> str:
            return "2.50.0"

    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", Client)
    looked: list[str] = []
    looks = {"receive": lambda *_: None, "check": lambda url, response, request: looked.append(request)}
    with_deadlines = job_client.job_client("http://head:8265", reach_s=1.0, send_s=3.0, **looks)
    with_deadlines.answer_s = 2.0
    with_deadlines._do_request("GET", "/api")
    with_deadlines._do_request("PUT", "/api", data=b"archive")
    without(job_client.PART)
    client = job_client.job_client("http://head:8265", reach_s=1.0, send_s=3.0, **looks)
    client._do_request("GET", "/api")
    assert [more.get("timeout") for more in asked] == [(1.0, 2.0), (3.0, 2.0), None]
    assert looked == ["GET /api", "PUT /api"]
    assert job_client.version_of(client) == "2.50.0"
    assert job_client.version_of(SimpleNamespace(_server_ray_version="2.60.0")) == "2.60.0"
