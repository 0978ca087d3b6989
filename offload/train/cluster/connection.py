"""Join a Ray cluster, or start one on this machine, and describe its nodes.

Where it stops: users start clusters of several hosts themselves; offload configures Ray only on this machine alone.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload import machine, preload
from offload.errors import ConfigError, argument
from offload.model.checks import check_text
from offload.model.placement import GPU_TYPE, NodeResources
from offload.preload import ahead
from offload.process.interrupts import Interrupts, handled
from offload.process.program_state import restored
from offload.process.ray_forks import check_not_forked
from offload.ray_private.library_settings import refused_tokens
from offload.ray_private.preload.local_agent import LOOPBACK
from offload.train.cluster import ray_processes
from offload.train.cluster.answers import PendingAnswer as PendingAnswer
from offload.train.cluster.answers import answer as answer
from offload.train.cluster.connected import INSTANCE_TYPE, ControlLostError
from offload.train.cluster.connected import ConnectedCluster as ConnectedCluster
from offload.train.cluster.holdings import left
from offload.train.cluster.idle import give_back_idle, used_by_a_run
from offload.train.cluster.left import are_free
from offload.train.cluster.ray_nodes import addresses_here, free_resources, has_node, is_node_of, use_known_token
from offload.train.cluster.ray_output import keep_to_logs
from offload.train.cluster.ray_settings import settled
from offload.train.cluster.reaper import MARK, end_marked
from offload.versions import ray_version_warning

REACH_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
# Resources count as held by others once they are in use for this long: tasks come and go, and release resources late.
HELD_S = 1.5
LOOK_S = 0.25
DIGITS = 4  # decimals of resource amounts: Ray's resolution
JOIN_S = 5.0  # time for a cluster to notice a new node
DASHBOARD_PORT = 8265
SPAWNED = "__mp_main__"  # the name of the program's module in a process that multiprocessing has spawned
_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")

# The run forwards the output of the user's function itself; all other logs stay in Ray's session folder.
_RAY_INIT: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


MARKET_TYPE, SPOT = "ray.io/market-type", "spot"  # Ray's own label of a node that the provider may reclaim
HEAD = "node:__internal_head__"  # a resource of the head node alone


_BUILT_IN = ("CPU", "GPU", "memory", "object_store_memory")


_REFUSALS = (ray.exceptions.RayError, RuntimeError, ValueError, OSError)  # Ray's errors if it cannot join


@contextmanager
def connected(
    address: str | None, *, metrics_port: int | None = None, runs: bool = True, looks: bool = True
) -> Iterator[ConnectedCluster]:
    """A connection for the duration of a run. This process releases its idle CPUs for the run. A cluster that this call started ends
    with it.

    Args:
        address: the cluster; None: RAY_ADDRESS, or else a new one on this machine.
        metrics_port: the port at which a new cluster serves Ray's metrics, 0 for a free one; None: it serves none.
        runs: whether the connection is for a run. If so, this releases what earlier or interrupted runs of this thread left behind.
        looks: whether a run wants to know what others hold (:func:`held_by_others`).

    Raises:
        ConfigError: if nothing listens at ``address``, or the listener does not answer.
    """
    with handled() as interrupts, used_by_a_run(), _opened(address, interrupts, metrics_port) as ours:
        if runs:
            _release_left()
        give_back_idle()
        try:
            yield _describe(ours=ours, looks=runs and looks)
        except ControlLostError:
            raise  # nobody would answer
        except BaseException:
            with interrupts.shielded():
                for holdings in left() if runs else ():
                    holdings.release()
            raise


def _release_left() -> None:
    """Release what this thread's earlier runs still hold because something interrupted their cleanup."""
    for holdings in left():
        holdings.release()
        holdings.drop()


@contextmanager
def connected_as_library(address: str | None) -> Iterator[ConnectedCluster]:
    """Like :func:`connected`, but for a library inside the user's own program, which keeps its signal handlers except while Ray starts.

    Raises ConfigError, too, if the program is connected to another cluster.
    """
    if ray.is_initialized():
        _check_is_ours(address)
    with ExitStack() as stack:
        with handled() as interrupts:
            # The handlers stay only until Ray has started: the program's own are its own business.
            ours = stack.enter_context(_opened(address, interrupts))
        yield _describe(ours=ours)


@contextmanager
def _opened(address: str | None, interrupts: Interrupts, metrics_port: int | None = None) -> Iterator[bool]:
    """A connection. Yields whether this call started the Ray."""
    if (warning := ray_version_warning(ray.__version__)) is not None:
        logging.getLogger("offload").warning(warning)
    check_not_forked()
    _pickle_main_by_value()
    address = address or os.environ.get("RAY_ADDRESS") or None
    if ray.is_initialized():
        keep_to_logs()
        with interrupts.finally_killing(ray_processes.kill_own):
            yield False
    elif address is None or address == "local":
        with _started(interrupts, metrics_port):
            yield True
    else:
        with _joined(address, interrupts):
            yield False


@contextmanager
def preparing(address: str | None) -> Iterator[None]:
    """A context for the preparations of a run before :func:`connected`. Meanwhile, a process imports what the run's processes will
    need. ``address``: as :func:`check_address` returns it."""
    with nullcontext() if ray.is_initialized() or address not in (None, "local") else _serving_ahead():
        yield


def _serving_ahead() -> AbstractContextManager[str]:
    return preload.serving_ahead(MARK, ray_processes.new_mark())


@contextmanager
def _started(interrupts: Interrupts, metrics_port: int | None) -> Iterator[None]:
    """Start a Ray for this process alone. An interrupted run leaves no process behind. After any other run, processes that the user's
    function started, such as an upload, may go on."""
    with (
        _serving_ahead() as mark,
        ray_processes.reaped(mark),
        interrupts.finally_killing(lambda: ray_processes.kill_marked(mark)),
    ):
        at_once, address = False, None
        try:
            with interrupts.shielded(nothing_to_lose=True), settled():
                _start_local(mark, metrics_port)
                address = here()
            interrupts.check()
            yield
        except (KeyboardInterrupt, ControlLostError):
            at_once = True
            raise
        finally:
            with interrupts.shielded():
                _shut_down(address)
                ahead.end()
                if at_once:
                    end_marked(mark)


@contextmanager
def _joined(address: str, interrupts: Interrupts) -> Iterator[None]:
    joined: str | None = None
    try:
        _join(address, interrupts)
        joined = here()
        yield
    finally:
        with interrupts.shielded():
            _shut_down(joined)


def here() -> str | None:
    """The address of the cluster to which this process is connected; None without a connection."""
    return ray.get_runtime_context().gcs_address if ray.is_initialized() else None


def _shut_down(address: str | None) -> None:
    """End the connection to the cluster at ``address`` (None: any), but not one to another cluster that the user's code has made since."""
    if address in (None, here()) or not ray.is_initialized():
        with restored():
            ray.shutdown()


def _pickle_main_by_value() -> None:
    """Pickle the user's classes and functions by value in a process that multiprocessing has spawned. It names the program's module
    ``__mp_main__``, and Ray's processes would try to import a module of that name."""
    main = sys.modules.get(SPAWNED)
    if main is not None and main.__name__ == SPAWNED:
        cloudpickle.register_pickle_by_value(main)  # type: ignore[no-untyped-call]


def _start_local(mark: str = "", metrics_port: int | None = None) -> None:
    if metrics_port:
        _check_free(metrics_port)
    # If RAY_AUTH_MODE is unset, the new cluster uses token authentication (a mode set before the import of ray stays). A token of
    # its own keeps Ray from writing one to the home directory, where it would outlive the cluster.
    if os.environ.get("RAY_AUTH_MODE") != "disabled" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", _own_token())
    _quiet()
    try:
        ray_processes.start_local(
            mark or ray_processes.new_mark(),
            metrics_port=metrics_port,
            num_cpus=machine.usable_cores(),
            include_dashboard=False,
            **_RAY_INIT,
        )
    except OSError as error:
        # Ray's message names the file that it cannot create, or the length of a socket path that is too long.
        raise ConfigError(
            f"Ray cannot start: {error}. It keeps its sockets and logs in the folder for temporary files: set RAY_TMPDIR to a folder "
            "with a short path that this user may write to."
        ) from None


def _check_free(port: int) -> None:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
    except OSError as error:
        raise ConfigError(
            f"Ray's metrics cannot be served at {LOOPBACK}:{port}: {error.strerror}. Pass another port, or none for a free one."
        ) from None


def metrics_address(*, ours: bool) -> str | None:
    """The URL at which this process's node serves Ray's metrics; None if it serves none. ``ours``: whether this process started the Ray."""
    here = ray.get_runtime_context().get_node_id()
    node = next(n for n in ray.nodes() if n["NodeID"] == here)  # type: ignore[no-untyped-call]
    port = int(node["MetricsExportPort"])
    host = LOOPBACK if ours else node["NodeManagerAddress"]
    return f"http://{host}:{port}/metrics" if port > 0 else None


@functools.cache
def _own_token() -> str:
    """The token of every cluster that this process starts."""
    return secrets.token_hex(32)


def _join(address: str, interrupts: Interrupts) -> None:
    if address != "auto":
        check_reachable(address)
    try:
        if address != "auto":
            _check_is_node(address)
        with interrupts.shielded(nothing_to_lose=True), settled():
            _quiet()
            if address != "auto":
                use_known_token()
            ray_processes.join(address, **_RAY_INIT)
        interrupts.check()
    except _REFUSALS as error:
        raise _cannot_join(address, error) from None
    try:
        # Joining succeeds even where tokens differ or all CPUs are taken. Only a task shows whether the cluster works
        # for this program.
        ray.get(_answer.remote(), timeout=ANSWER_TIMEOUT_S)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
        _shut_down(None)
        raise ConfigError(
            f"the Ray cluster at {address!r} did not run a first task within {ANSWER_TIMEOUT_S:.0f} s ({type(error).__name__}). "
            f"Its authentication mode may differ (here RAY_AUTH_MODE={os.environ.get('RAY_AUTH_MODE', 'unset')}), or all its "
            "CPUs are taken."
        ) from None


def _check_is_node(address: str) -> None:
    if not is_node_of(address, JOIN_S):
        raise ConfigError(
            f"this machine is not a node of the Ray cluster at {address!r}, and a driver must run on one. {_as_a_job(address)}; or let "
            f"this machine join (ray start --address={address})."
        )


def _cannot_join(address: str, error: Exception) -> ConfigError:
    if len(versions := _VERSIONS.findall(str(error))) == 2:
        (their_ray, their_python), (our_ray, our_python) = versions
        return ConfigError(
            f"the Ray cluster at {address!r} runs Ray {their_ray} with Python {their_python}, and this is Ray {our_ray} with Python "
            f"{our_python}: run it with the Python that Ray was started with there, or install the same versions here."
        )
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ConfigError(
        f"cannot join the Ray cluster at {address!r}: {first} Check that it runs (ray status), that its Ray version is "
        f"{ray.__version__}, and that RAY_AUTH_MODE and the token are those of the cluster."
    )


def check_address(address: str | None) -> str | None:
    """Return the address for :func:`connected`, with ``"auto"`` resolved; RAY_ADDRESS stands in for None.

    This starts and writes nothing, and detects a wrong address in seconds.

    Raises:
        ConfigError: if the address is invalid, no Ray answers there, this machine is not a node of the cluster, or this process is
            connected to another cluster.
        RunError: in a fork of a process with a connection.
    """
    check_not_forked()
    if ray.is_initialized():
        _check_is_ours(address)
        return address or None
    named = os.environ.get("RAY_ADDRESS") or None
    address = named if address is None or address == "" else address
    if address is None or address == "local":
        return address
    check_text("the address of a Ray cluster", address, sane='"auto" or host:port')
    if address == "auto" and named in (None, "auto", "local"):
        return _cluster_here()
    address = named if address == "auto" and named is not None else address  # as Ray takes it
    check_reachable(address)
    try:
        _check_is_node(address)
    except _REFUSALS as error:
        raise _cannot_join(address, error) from None
    return address


def _check_is_ours(address: str | None) -> None:
    """Raise ConfigError if ``address`` names another cluster than the one to which this process is connected.

    A cluster may have several names and addresses, so this compares nodes. A cluster that does not list its nodes passes.
    """
    here = ray.get_runtime_context()
    if address in (None, "", "auto", "local", here.gcs_address):
        return
    check_text("the address of a Ray cluster", address, sane='"auto" or host:port')
    check_reachable(address)
    try:
        if has_node(address, here.get_node_id(), JOIN_S):
            return
    except refused_tokens():  # ours takes the token that this process has
        pass
    except _REFUSALS:
        return
    raise ConfigError(
        f"this process is connected to the Ray cluster at {here.gcs_address!r}, and the one at {address!r} is another. Pass no address to "
        "use the former. Call ray.shutdown() first, or start another process, to use the latter."
    )


def _cluster_here() -> str:
    """The address of a cluster that has this machine as a node. Some of the machine's Ray processes may run in containers that are
    unreachable from outside, so this tries all addresses at once."""
    addresses = addresses_here()
    if addresses is None:  # Ray itself looks for one
        return "auto"
    with ThreadPoolExecutor(max_workers=max(len(addresses), 1)) as pool:
        for address, usable in zip(addresses, pool.map(_may_be_joined, addresses), strict=True):
            if usable:
                return address
    unreachable = f" (Ray processes exist, but none can be reached at {', '.join(addresses)})" if addresses else ""
    raise ConfigError(
        f"no Ray cluster runs on this machine{unreachable}. Start one (ray start --head), name another "
        f"({argument('address', 'host:port')}), or pass no address to run on this machine alone."
    )


def _may_be_joined(address: str) -> bool:
    try:
        check_reachable(address)
        return is_node_of(address, within_s=1.0)
    except (ConfigError, *_REFUSALS):
        return False


def _quiet() -> None:
    for name, value in preload.QUIET.items():
        os.environ.setdefault(name, value)


@ray.remote(num_cpus=0)
def _answer() -> bool:
    return True


def check_reachable(address: str) -> None:
    """Raise ConfigError unless Ray, or a server that looks like it, listens at ``host:port``."""
    if "://" in address:
        raise ConfigError(
            f'the address of a Ray cluster is "auto" or host:port where a driver runs on one of its nodes, found {address!r}. '
            f"{_as_a_job(address)}."
        )
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(
            f'the address of a Ray cluster is "auto" or host:port, found {address!r}; the port is usually 6379.'
        )
    try:
        with socket.create_connection((host, int(port)), timeout=REACH_TIMEOUT_S) as link:
            answers = _speaks_grpc(link)
    except (OSError, UnicodeError) as error:  # UnicodeError for an invalid host name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"no Ray cluster can be reached at {address!r}: {reason}. Start one there (ray start --head "
            f"--port={port}), open the port, or drop the address to run on this machine."
        ) from None
    if not answers:
        raise ConfigError(
            f"the server at {address!r} is not a Ray cluster, or it hangs: it did not answer as Ray does within "
            f"{REACH_TIMEOUT_S:.0f} s. Check the port (usually 6379) and, on that host, ray status."
        )


def _as_a_job(address: str) -> str:
    """The remedy on a machine that is not a node of the cluster."""
    scheme, _, rest = address.rpartition("://")
    host = rest.split("/")[0].rpartition(":")[0] or rest
    url = address if scheme in ("http", "https") else f"http://{host}:{DASHBOARD_PORT}"
    return f"Send the training there: offload launch ray SCRIPT --address {url}"


def _speaks_grpc(link: socket.socket) -> bool:
    """Return whether the other end answers an HTTP/2 client with a SETTINGS frame, as a gRPC server does. Ray itself would retry for a
    quarter of an hour. Under TLS, any listener passes."""
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return True
    # A frame's header: its length (3 bytes), its type, its flags, and the stream id (4 bytes). Type 4 is SETTINGS.
    settings, frame_type = 4, 3
    answer = b""
    try:
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, settings, 0, 0, 0, 0, 0]))
        while len(answer) <= frame_type and (part := link.recv(16)):
            answer += part
    except OSError:
        return False
    return len(answer) > frame_type and answer[frame_type] == settings


def describe() -> ConnectedCluster:
    """The cluster to which this process is connected, as it is now."""
    return _describe(ours=False)


def _describe(*, ours: bool, looks: bool = True) -> ConnectedCluster:
    return ConnectedCluster(whole=alive_nodes(), ours=ours, held=held_by_others({}) if looks and not ours else {})


def held_by_others(ours: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The resources that others hold, by node id, without ``ours``: the least amounts in use during ``HELD_S``, so that short tasks do not
    count. Takes a second or two if others hold any, and longer while Ray frees what this process has just left."""
    while not are_free(lambda: _free_cpus(ours)):
        time.sleep(LOOK_S)
    in_use = amounts_in_use()
    until = time.monotonic() + HELD_S
    while in_use and time.monotonic() < until:
        time.sleep(LOOK_S)
        now = amounts_in_use()
        in_use = {
            node: {name: min(amount, now[node][name]) for name, amount in amounts.items() if name in now[node]}
            for node, amounts in in_use.items()
            if node in now
        }
    others = {
        node: {name: round(amount - ours.get(node, {}).get(name, 0.0), DIGITS) for name, amount in amounts.items()}
        for node, amounts in in_use.items()
    }
    return {
        node: some for node, amounts in others.items() if (some := {name: a for name, a in amounts.items() if a > 0})
    }


def _free_cpus(ours: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    free = free_resources()
    return {
        node.node_id: free[node.node_id].get("CPU", 0.0) + ours.get(node.node_id, {}).get("CPU", 0.0)
        for node in alive_nodes()
        if node.node_id in free
    }


def amounts_in_use() -> dict[str, dict[str, float]]:
    """The resources in use now, whoever holds them, by node id."""
    free = free_resources()
    in_use = {}
    for node in alive_nodes():
        whole = {"CPU": node.cpus, "GPU": node.gpus, **node.others}
        # A new node reports its resources before it reports which are free. Until then, all count as free.
        unused = free.get(node.node_id, whole)
        amounts = {
            name: amount - unused.get(name, 0.0) for name, amount in whole.items() if amount > unused.get(name, 0.0)
        }
        if amounts:
            in_use[node.node_id] = amounts
    return in_use


def alive_nodes() -> tuple[NodeResources, ...]:
    """The cluster's nodes now, in the order of their ids."""
    alive = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: str(n["NodeID"]))  # type: ignore[no-untyped-call]
    return tuple(
        NodeResources(
            name=str(n["NodeManagerAddress"]),
            node_id=str(n["NodeID"]),
            cpus=float(n["Resources"].get("CPU", 0)),
            gpus=float(n["Resources"].get("GPU", 0)),
            others={
                k: float(v)
                for k, v in n["Resources"].items()
                if k not in _BUILT_IN and not k.startswith(("node:", GPU_TYPE))
            },
            instance_type=(n.get("Labels") or {}).get(INSTANCE_TYPE),
            gpu_type=next((k.removeprefix(GPU_TYPE) for k in n["Resources"] if k.startswith(GPU_TYPE)), None),
            store_bytes=float(n["Resources"].get("object_store_memory", 0)),
            memory_bytes=float(n["Resources"].get("memory", 0)),
            spot=(n.get("Labels") or {}).get(MARKET_TYPE) == SPOT,
        )
        for n in alive
    )


def nodes_to_end_with() -> set[str]:
    """The ids of the nodes whose end ends the run: the driver's node and the head."""
    return {ray.get_runtime_context().get_node_id(), head_node()}


def head_node() -> str:
    """The id of the head node; of this process's node if no node says that it is the head."""
    heads = (str(n["NodeID"]) for n in ray.nodes() if n["Alive"] and HEAD in n["Resources"])  # type: ignore[no-untyped-call]
    here: str = ray.get_runtime_context().get_node_id()
    return next(heads, here)


def import_ahead(nodes: Collection[str], runtime_env: Mapping[str, Any]) -> None:
    """Start the imports of preprocessing processes on other nodes now, while the actor that will start these processes starts itself.

    Without preloading there is nothing to start: each process imports for itself.
    """
    if not runtime_env:
        return
    for node in set(nodes) - {ray.get_runtime_context().get_node_id()}:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        begun = _answer.options(num_cpus=0, runtime_env=dict(runtime_env), scheduling_strategy=place).remote()
        # The node may be gone. Ray would print an error that nobody retrieves.
        begun.future().add_done_callback(Future.exception)


def on_this_node(actor_class: Any, **options: Any) -> Any:
    """An actor class with options to run on the driver's node, without a CPU of its own."""
    here = ray.get_runtime_context().get_node_id()
    # For an actor without a CPU, Ray ignores a soft affinity and starts it anywhere.
    return actor_class.options(
        **options, num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)
    )
