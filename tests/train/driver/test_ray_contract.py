"""What offload relies on in Ray beyond its everyday API. A failure here names the file to change for a new Ray."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import ray
import ray.data
import torch
from ray._private import ray_constants
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

import offload
from offload.errors import ConfigError, find_offload_error
from offload.pipeline.blocks.memory import writable
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.program import output_tail
from offload.pipeline.raydata import execution
from offload.ray_private import draining, fork_cut
from offload.ray_private.preload import minimal_agent
from offload.train.cluster import connection as cluster
from offload.train.cluster import ray_processes, ray_settings
from offload.train.cluster.reaper import MARK, marked
from offload.train.group import group
from offload.versions import TESTED_RAY, ray_version_warning
from tests.helpers import ROOT, eventually, title_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

DEADLINE_S = 800.0


def relies(file: str, what: str) -> str:
    assert (ROOT / "offload" / file).exists(), file
    return (
        f"offload/{file} relies on it: {what} (Ray {ray.__version__}, tested with {TESTED_RAY[0]} to {TESTED_RAY[1]})"
    )


# --- Ray Data ---------------------------------------------------------------------------------------------------------


def test_a_dataset_gives_its_blocks_as_references_with_statistics() -> None:
    file = "pipeline/ray_data.py"
    dataset = ray.data.range(100, override_num_blocks=4).map_batches(lambda batch: batch)
    dataset.context.enable_progress_bars = False
    assert hasattr(dataset, "iter_internal_ref_bundles"), relies(file, "Dataset.iter_internal_ref_bundles")
    rows = 0
    for bundle in dataset.iter_internal_ref_bundles():
        assert hasattr(bundle, "blocks"), relies(file, "a bundle's .blocks")
        for entry in bundle.blocks:
            for name in ("ref", "metadata"):
                assert hasattr(entry, name), relies(file, f"an entry of .blocks has .{name}")
            for name in ("num_rows", "size_bytes", "exec_stats"):
                assert hasattr(entry.metadata, name), relies(file, f"a block's metadata has .{name}")
            table = ray.get(entry.ref)
            assert isinstance(table, pa.Table), relies(file, f"a block is an Arrow table, found {type(table)}")
            assert entry.metadata.num_rows == table.num_rows, relies(file, "metadata.num_rows")
            assert entry.metadata.size_bytes > 0, relies(file, "metadata.size_bytes")
            for name in ("cpu_time_s", "wall_time_s"):
                value = getattr(entry.metadata.exec_stats, name, None)
                assert isinstance(value, float), relies(file, f"exec_stats.{name} in seconds, found {value!r}")
                assert 0 <= value < 60, relies(file, f"exec_stats.{name} in seconds, found {value!r}")
            rows += table.num_rows
    assert rows == 100


def test_a_dataset_carries_its_context_and_limits() -> None:
    file = "pipeline/ray_data.py"
    context = ray.data.DataContext.get_current().copy()
    assert isinstance(context.enable_progress_bars, bool), relies(file, "DataContext.enable_progress_bars")
    limits = ray.data.ExecutionResources.for_limits(object_store_memory=1e9)
    context.execution_options.resource_limits = limits
    assert context.execution_options.resource_limits.object_store_memory == 1e9, relies(
        file, "ExecutionOptions.resource_limits"
    )
    assert ray.data.range(1).context is not None, relies(file, "Dataset.context")


# --- objects ----------------------------------------------------------------------------------------------------------


def test_memory_of_the_object_store_can_be_written_to() -> None:
    """A batch within one block is a view of it, and users change batches in place."""
    ref = ray.put(np.zeros((64, 4096), np.uint8))
    stored = ray.get(ref)
    assert not stored.flags.writeable, relies(
        "pipeline/owned_memory.py", "objects come read-only; if not, writable() is superfluous"
    )
    tensor = torch.from_numpy(writable(stored[16:32]))
    tensor.add_(1)
    again = ray.get(ref)
    assert again.sum(axis=1).tolist() == [0] * 16 + [4096] * 16 + [0] * 32
    del stored, again, ref
    assert int(tensor.sum()) == 16 * 4096, relies("pipeline/owned_memory.py", "a view keeps its object alive")


# --- A run ----------------------------------------------------------------------------------------------------------------


def ray_processes_beside_this() -> set[str]:
    """The names of the Ray processes that this worker's own raylet has started: other clusters of the machine do not count."""
    titles = {title_of(process) for process in psutil.Process().parent().children(recursive=True)}
    return {title.removeprefix("ray::").split(".")[0] for title in titles if title.startswith("ray::")}


@pytest.mark.slow
def test_a_run_starts_no_helper_that_it_has_no_use_for(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    look = ray_processes_beside_this

    def train(ctx: offload.Context) -> None:
        model = torch.nn.Linear(1, 1)
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                ctx.backward(model(batch["x"][:, None]).mean())
                ctx.step()
        seen.write_text("\n".join(look()))

    rows = [{"x": np.float32(i)} for i in range(8)]
    offload.Trainer(train, datasets={"train": offload.from_torch(rows)}, workers=1, batch_size=4).fit(
        run_dir=tmp_path / "run", quiet=True
    )
    titles = set(seen.read_text().split())
    assert {"RayHub", "TrainingWorker"} <= titles, titles
    unwanted = {"TrainController", "DatasetManager", "PlacementGroupCleaner", "PreemptionWatcher"}
    assert not titles & unwanted


# --- errors -----------------------------------------------------------------------------------------------------------


class Raises:
    def now(self) -> None:
        raise ConfigError("the file is empty. Give another.")

    def through(self, other: Any) -> None:
        ray.get(other.now.remote())

    def die(self) -> None:
        os._exit(1)


@pytest.fixture
def actors() -> Any:
    actor: Any = ray.remote(Raises).options(num_cpus=0)
    one, two = actor.remote(), actor.remote()
    yield one, two
    ray.kill(one)
    ray.kill(two)


def test_an_error_for_users_is_found_behind_actor_tasks(actors: Any) -> None:
    one, two = actors
    for call in (lambda: one.now.remote(), lambda: one.through.remote(two)):
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(call())
        found = find_offload_error(caught.value)
        assert isinstance(found, ConfigError), relies(
            "errors.py", "what a task raised is the .cause of what ray.get raises"
        )
        assert str(found) == "the file is empty. Give another."
        assert found.exit_code == 2


def test_an_actor_that_died_is_an_error_of_ray(actors: Any) -> None:
    with pytest.raises(ray.exceptions.RayError) as caught:
        ray.get(actors[0].die.remote())
    assert isinstance(caught.value, ray.exceptions.RayActorError), relies(
        "train/hub/client.py", "ActorDied is a RayError"
    )
    assert find_offload_error(caught.value) is None


# --- clusters ---------------------------------------------------------------------------------------------------------


def test_nodes_say_what_they_have() -> None:
    def cpus() -> list[float]:
        return [node.cpus for node in cluster._describe(ours=False).nodes]

    with contextlib.suppress(AssertionError):
        eventually(lambda: cpus() == [4], DEADLINE_S)  # Ray frees late what an earlier test has left
    assert cpus() == [4], relies("train/cluster/connection.py", "ray.nodes(): Alive, NodeManagerAddress, Resources")
    (node,) = cluster._describe(ours=False).nodes
    assert node.store_bytes > 0, relies(
        "train/cluster/connection.py", 'ray.nodes(): Resources["object_store_memory"], in bytes'
    )


def test_nodes_that_leave_and_labels_of_nodes_can_be_seen() -> None:
    assert draining.draining_nodes() == set(), relies(
        "ray_private/draining.py", "state.get_draining_nodes(): ids of nodes"
    )
    (node,) = ray.nodes()  # type: ignore[no-untyped-call]
    reliance = relies("train/group/group.py", f"a label {group.NODE_ID} on every node, for label selectors")
    assert node["Labels"][group.NODE_ID] == node["NodeID"], reliance
    assert cluster.MARKET_TYPE == ray._raylet.RAY_NODE_MARKET_TYPE_KEY, relies(  # type: ignore[attr-defined]
        "train/cluster/connection.py", "the label of nodes that may be taken back"
    )
    assert cluster.nodes_to_end_with() == {node["NodeID"]}, relies(
        "train/cluster/connection.py", "the id of the driver's node"
    )
    assert cluster.HEAD in node["Resources"], relies(
        "train/cluster/connection.py", f"a resource {cluster.HEAD} of the head alone"
    )


def test_a_node_can_be_drained_from_within() -> None:
    """Of a node that is long gone: this cluster is needed. test_notices.py drains a real one."""
    draining.drain(ray.NodeID.from_random().hex(), "a test", time.time() + 60)
    assert draining.draining_nodes() == set()


wants_tokens = pytest.mark.skipif(
    os.environ.get("RAY_AUTH_MODE") == "disabled" and os.environ.get("CI") != "true",
    reason="this environment turns Ray's tokens off: RAY_AUTH_MODE=disabled",
)

JOIN = """
import sys
from offload.errors import ConfigError
from offload.train.cluster.connection import connected
try:
    with connected(sys.argv[1]) as cluster:
        print("joined", len(cluster.nodes), cluster.ours)
except ConfigError as error:
    print(error)
"""


@wants_tokens
@pytest.mark.slow
def test_a_local_ray_wants_its_token() -> None:
    """The default mode of a new local Ray. Who comes without the token is told so, and not left to hang."""
    file = "train/cluster/connection.py"
    address = ray.get_runtime_context().gcs_address
    cluster.check_reachable(address)  # Ray answers as an HTTP/2 server does
    token = os.environ.get("RAY_AUTH_TOKEN")
    assert token, "tests/conftest.py starts Ray with a token of its own"

    def join(token: str) -> str:
        env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        done = subprocess.run(
            [sys.executable, "-c", JOIN, address],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            env=env,
        )
        assert "Traceback" not in done.stderr
        return done.stdout.strip()

    assert join(token) == "joined 1 False", relies(file, "RAY_AUTH_TOKEN is honoured")
    refused = join("0" * 64)
    assert refused.startswith(f"cannot join the Ray cluster at '{address}'"), relies(
        file, f"the default mode is token, and another token is refused: {refused!r}"
    )
    assert "RAY_AUTH_MODE" in refused


OTHER = """
import sys
import ray
from offload.train.cluster.connection import connected
with connected("local"):
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "token", [pytest.param("the same", marks=pytest.mark.soak), pytest.param("another", marks=wants_tokens)]
)
def test_an_address_of_another_cluster_is_refused_in_a_connected_process(tmp_path: Path, token: str) -> None:
    """It would be ignored: the run would train on the wrong machines."""
    env = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64} if token == "another" else None
    here = ray.get_runtime_context().gcs_address
    trainer = offload.Trainer(print, datasets={"train": [1, 2]}, batch_size=1)
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as other:
        assert other.stdout is not None
        there = other.stdout.readline().strip()
        for refused in (
            lambda: trainer.fit(run_dir=tmp_path / "run", address=there),
            lambda: next(iter(offload.DataLoader([1, 2], address=there))),
        ):
            with pytest.raises(ConfigError) as caught:
                refused()
            assert f"connected to the Ray cluster at '{here}', and the one at '{there}' is another" in str(caught.value)
            assert "ray.shutdown()" in str(caught.value)
        other.communicate()
    assert not (tmp_path / "run").exists()


def test_every_name_of_the_connected_cluster_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ray.get_runtime_context().gcs_address
    port = here.rpartition(":")[2]
    for address in (None, "", "auto", "local", here, f"localhost:{port}"):
        assert cluster.check_address(address) == (address or None)
    with pytest.raises(ConfigError, match=r"no Ray cluster can be reached at '127\.0\.0\.1:1'"):
        cluster.check_address("127.0.0.1:1")

    def silent(*unused: object) -> bool:
        raise ray.exceptions.RpcError("deadline exceeded")

    monkeypatch.setattr(cluster, "has_node", silent)
    assert cluster.check_address(f"localhost:{port}") == f"localhost:{port}"


# --- versions ---------------------------------------------------------------------------------------------------------


def test_the_installed_ray_is_a_tested_one() -> None:
    assert ray_version_warning(ray.__version__) is None, relies("versions.py", "run these tests, then widen TESTED_RAY")


def test_another_ray_is_warned_about_in_every_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray, "__version__", "2.99.0")
    with caplog.at_level(logging.WARNING, logger="offload"), cluster.connected(None) as joined:
        assert not joined.ours
    assert ray.is_initialized()  # it was before
    (record,) = [r for r in caplog.records if r.name == "offload"]
    assert "Ray 2.99.0 is outside the range" in record.getMessage()
    assert f">={TESTED_RAY[0]},<{TESTED_RAY[1]}" in record.getMessage()


@pytest.mark.parametrize(("asked", "held"), [(None, 1000), (300, 300), (5000, 1000)])
def test_a_dataset_holds_its_share_of_the_store_unless_the_user_set_less(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, held: int
) -> None:
    dataset = ray.data.range(10)
    if asked is not None:
        options = dataset.context.execution_options
        options.resource_limits = options.resource_limits.copy(object_store_memory=asked)
    executed: list[Any] = []
    monkeypatch.setattr(execution, "iterate", executed.append)
    recipe: Any = None
    execution.encode_dataset(dataset, recipe, id_column=None, done=Ranges(), epoch=0, task_cpus=1.0, store_bytes=1000)
    (encoded,) = executed
    assert encoded.context.execution_options.resource_limits.object_store_memory == held


# --- Jobs -------------------------------------------------------------------------------------------------------------


def test_the_job_client_asks_through_one_method_that_takes_a_timeout() -> None:
    from ray.job_submission import JobSubmissionClient

    file = "ray_private/job_client.py"
    asks = inspect.signature(JobSubmissionClient._do_request).parameters
    assert list(asks)[:3] == ["self", "method", "endpoint"], relies(file, "JobSubmissionClient._do_request")
    assert asks["kwargs"].kind is inspect.Parameter.VAR_KEYWORD, relies(file, "its arguments reach requests.request")
    assert "_server_ray_version" in inspect.getsource(JobSubmissionClient.__mro__[1]), relies(file, "the version found")


def test_how_long_a_job_may_take_to_stop_is_read_from_its_environment() -> None:
    from ray.dashboard.modules.job.job_supervisor import JobSupervisor

    from offload.launch.ray.job import STOP_WAIT

    file = "launch/ray/job.py"
    assert f'"{STOP_WAIT}"' in inspect.getsource(JobSupervisor), relies(
        file, f"{STOP_WAIT}, read by the job's supervisor"
    )


def test_this_machine_is_a_node_of_its_cluster_and_of_no_other() -> None:
    from offload.train.cluster.ray_nodes import free_resources, is_node_of

    address = ray.get_runtime_context().gcs_address
    assert is_node_of(address, 5.0), relies(
        "ray_private/membership.py", "find_node_ids and GcsClient.get_all_node_info"
    )
    (node,) = ray.nodes()
    assert free_resources()[node["NodeID"]].keys() <= node["Resources"].keys(), relies(
        "ray_private/free_resources.py", "available_resources_per_node"
    )


def test_the_processes_of_a_local_ray_can_be_watched_and_are_marked() -> None:
    own = ray_processes.own_processes()
    assert sorted(own) == ["gcs_server", "raylet"], relies(
        "ray_private/own_processes.py", "the names of a node's processes"
    )
    watch = ray_processes.ControlWatch()
    assert watch.lost() is None
    assert ray_processes.connecting(watch._gcs) is None, relies(
        "train/cluster/ray_processes.py", "gcs_address is host:port"
    )
    found = ray_processes._raylet_of(ray._private.worker._global_node.raylet_socket_name)  # type: ignore[attr-defined]
    assert found is not None, relies(
        "train/cluster/ray_processes.py", "a raylet's name, and its socket in its command line"
    )
    assert found.pid == own["raylet"].pid
    assert found.pid in marked(found.environ()[MARK]), relies(
        "train/reaper.py", "Ray's processes inherit the environment"
    )
    assert os.getsid(found.pid) != os.getsid(0), relies(
        "ray_private/local_start.py", "services.ConsolePopen starts processes"
    )
    with subprocess.Popen(["sh", "-c", "exit 7"]) as ended:
        ended.wait()
    watch._own = {"raylet": ended}
    assert str(watch.lost()).endswith("ended with exit code 7")


def test_a_head_that_does_not_answer_is_lost_after_rays_own_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "30")
    now = [0.0]
    watch = ray_processes.ControlWatch(now_s=lambda: now[0])
    watch._own, watch._gcs = {}, "127.0.0.1:1"
    now[0] = 29.0
    assert watch.lost() is None
    now[0] = 31.0
    assert str(watch.lost()).endswith("127.0.0.1:1 has not answered for 30 s")


def test_ray_leaves_signals_alone_and_says_nothing_of_its_own() -> None:
    parts: list[Any] = [ray._private.worker.init, ray._private.worker.connect, ray._private.services.start_ray_process]  # type: ignore[attr-defined]
    source = "".join(map(inspect.getsource, parts))
    for used in ("ray._private.utils.set_sigterm_handler(", "target=listen_error_messages", "= ConsolePopen("):
        assert used in source, relies("ray_private/local_start.py", used)


def test_a_fork_knows_what_a_connection_consists_of() -> None:
    file = "ray_private/fork_cut.py"
    module: Any = ray._private.worker  # type: ignore[attr-defined]
    worker, node = module.global_worker, module._global_node
    for name in ("core_worker", "gcs_client", "gcs_error_subscriber", "gcs_log_subscriber", "node"):
        assert name in vars(worker), relies(file, f"global_worker.{name}")
    assert "_global_state_accessor" in vars(ray._private.state.state), relies(file, "state._global_state_accessor")  # type: ignore[attr-defined]
    assert ray.experimental.internal_kv.global_gcs_client is worker.gcs_client, relies(
        file, "internal_kv.global_gcs_client"
    )
    peers = {peer_of(int(name)) for name in os.listdir("/proc/self/fd")}
    for path in (node.raylet_socket_name, node.plasma_store_socket_name):
        assert path in peers, relies(
            file, f"this process is connected to a socket of its Node: {path} is not in {peers}"
        )
    assert "atexit.register(shutdown" in inspect.getsource(module), relies(
        file, "Ray's exit handler is worker.shutdown"
    )


def peer_of(number: int) -> object:
    with contextlib.suppress(OSError):
        return fork_cut.peer(number)
    return None


def test_ray_can_read_its_mode_and_its_token_anew() -> None:
    file = "ray_private/library_settings.py"
    library: Any = ray._raylet  # type: ignore[attr-defined]
    assert hasattr(library.Config, "initialize"), relies(file, "Config.initialize")
    assert hasattr(library.AuthenticationTokenLoader.instance(), "reset_cache"), relies(file, "reset_cache")
    assert ray_settings.uses_token() == (os.environ.get("RAY_AUTH_MODE") != "disabled"), relies(file, "the mode")
    assert ray_settings.token_in_use() == (os.environ["RAY_AUTH_TOKEN"] if ray_settings.uses_token() else "")
    node: Any = ray._private.worker._global_node  # type: ignore[attr-defined]
    assert weakref.ref(node)() is node
    # ray.shutdown() drops the last reference.
    gc.unfreeze()  # conftest.py hides what was imported before the tests
    holders = [each for each in gc.get_referrers(node) if each is not sys._getframe()]
    gc.freeze()
    assert len(holders) == 2, relies(file, f"only ray._private.worker and its global_worker know the Node: {holders}")


# --- A Ray of this machine alone --------------------------------------------------------------------------------------


def test_the_agent_of_a_ray_of_this_machine_alone_serves_no_dashboard() -> None:
    """It answers no requests, and knows nothing that would have to be kept up to date for a dashboard."""
    file = "ray_private/local_start.py"
    (raylet,) = [each for each in psutil.Process().children(recursive=True) if title_of(each).endswith("/raylet")]
    (agent,) = [each for each in raylet.children() if title_of(each) == "ray::DashboardAgent"]
    started = next(text for text in raylet.cmdline() if text.startswith("--dashboard_agent_command="))
    assert minimal_agent.__file__ in started, relies(file, "services builds the agent's command with this function")
    assert "--minimal" in started, relies(file, "services asks utils.get_dashboard_dependency_error")
    listens = [each for each in agent.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    assert not listens, relies(
        "ray_private/preload/minimal_agent.py", "the agent looks for the packages of ray[default] by importing them"
    )


# --- Forwarded logs ---------------------------------------------------------------------------------------------------


def test_ray_forwards_logs_and_messages_by_what_can_be_replaced() -> None:
    file = "ray_private/log_forwarding.py"
    worker: Any = ray._private.worker
    assert "global_worker_stdstream_dispatcher.emit(data)" in inspect.getsource(worker.Worker.print_logs), relies(
        file, "forwarded lines go through the dispatcher"
    )
    assert worker.global_worker_stdstream_dispatcher is dispatcher, relies(file, "the dispatcher's place")
    assert "print_to_stdstream(" in inspect.getsource(worker.listen_error_messages), relies(
        file, "messages about dead processes are printed by print_to_stdstream"
    )
    assert set(output_tail.RAYS) == {
        ray_constants.LOG_PREFIX_JOB_ID, ray_constants.LOG_PREFIX_ACTOR_NAME, ray_constants.LOG_PREFIX_TASK_NAME,
    }, relies("pipeline/output_tail.py", "the lines by which Ray tells its log monitor whose output follows")  # fmt: skip
