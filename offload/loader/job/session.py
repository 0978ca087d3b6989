"""This process's connection to the feed, which all its DataLoaders share.

It begins with the first batch that a loader needs, and ends some seconds after the last loader is gone, or with the process. A Ray that
it started ends with it. The ranks of a job on one machine share the Ray that the first of them starts.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import ray

from offload import preload
from offload.errors import ConfigError, RunError
from offload.loader.job.loader_feed import LoaderFeed
from offload.loader.job.node_choice import NodeChoice
from offload.loader.job.ranks import Ranks
from offload.loader.job.shared_ray import shared
from offload.pipeline.blocks.receiver import DirectBlocks
from offload.pipeline.pool.ray_state import held
from offload.process.ray_forks import check_not_forked
from offload.train.cluster.connection import (
    ConnectedCluster,
    PendingAnswer,
    check_address,
    describe,
    here,
    import_ahead,
    on_this_node,
)
from offload.train.cluster.idle import on_end, on_need, unless_used
from offload.train.cluster.left import leave
from offload.train.cluster.ray_output import keep_to_logs
from offload.train.cluster.ray_processes import no_new_ray, on_first_use

LINGER_S = 10.0  # time for another loader to come: a new Ray takes seconds
BEAT_S = 5.0
SHARE_S = 60.0  # time for processes without reserved CPUs to replace those with reserved ones
THREADS = 32
THREADS_PER_RANK = 4
NAMESPACE = "offload"
MODULES = ("offload.loader.job.readers",)


class FeedSession:
    """The connection. ``address``: the cluster's address, as :class:`offload.DataLoader` takes it."""

    def __init__(self, address: str | None, placement: str) -> None:
        self.client = uuid.uuid4().hex
        self._stack = ExitStack()
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._lost = False
        self._renewing = threading.Lock()
        self._iterations: set[str] = set()
        self.is_programs = False
        """Whether the program's own code uses the session's Ray, too. Ray then stays until the program ends it."""
        self._job, self._placement = Ranks.of(), placement
        try:
            cluster = self._stack.enter_context(shared(self._job, address))
            self._cluster_address = here()
            self._connect(cluster)
        except BaseException:
            self._stack.close()
            raise
        if not on_first_use(_let_program):
            self.is_programs = True
        threading.Thread(target=self._beat, daemon=True, name="offload-loader-alive").start()

    @property
    def ended(self) -> bool:
        """Whether the session is over, or its connection to Ray."""
        return self._ended.is_set() or here() != self._cluster_address

    @property
    def is_shared(self) -> bool:
        """Whether other ranks use the same feed."""
        return self._job.world_size > 1

    def let_program(self) -> None:
        """Leave the Ray, and the cores that no iteration uses, to the program's own code."""
        self.is_programs = True
        if self.is_idle:
            self.give_back()

    def lose_feed(self, feed: Any) -> None:
        """Note that this feed is gone. The next iteration makes another."""
        with self._renewing:
            if feed is self.feed and not self._lost:  # an iteration may learn late of the end of an earlier one
                self._lost = True
                leave(self._cpus)

    def renew(self) -> None:
        """Make another feed if this one is gone."""
        with self._renewing:
            if self._lost:
                self.direct.close()
                self._connect(describe())
                self._lost = False

    def _connect(self, cluster: ConnectedCluster) -> None:
        self.feed, self._cpus = _feed_of(self._job, cluster, self._placement)
        self.direct = DirectBlocks(_FeedSenders(self.feed))

    def begin(self, iteration: str) -> None:
        """Note an iteration, which needs the feed."""
        self._iterations.add(iteration)

    def end(self, iteration: str) -> None:
        """Note that an iteration is over. The garbage collector may call this at any time."""
        self._iterations.discard(iteration)

    def forget(self, loader: str) -> None:
        """Note that a loader is gone. The garbage collector may call this at any time."""
        if not self._lost and not self.ended:
            with contextlib.suppress(Exception), no_new_ray():
                self.feed.forget.remote(self.client, loader)

    @property
    def is_idle(self) -> bool:
        """Whether nobody iterates."""
        return not self._iterations

    def give_back(self) -> None:
        """End the feed, and with it the cores that it keeps. The connection to Ray stays."""
        if not self._lost and not self.is_shared:
            with contextlib.suppress(ray.exceptions.RayError, RunError), no_new_ray():
                ray.kill(self.feed)
                leave(self._cpus)
            self._lost = True

    def make_room(self) -> None:
        """Free the cores for others: give them back, or share them while an iteration needs them."""
        if self.ended or self._lost or self.is_shared:
            return
        if self.is_idle:
            self.give_back()
        elif self._cpus:
            with contextlib.suppress(ray.exceptions.RayError, RunError), no_new_ray():
                ray.get(self.feed.share.remote(SHARE_S), timeout=SHARE_S + BEAT_S)
                leave(self._cpus)
                self._cpus = {}

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            if not self._lost:
                with contextlib.suppress(Exception), no_new_ray():
                    self.feed.alive.remote(self.client)

    def close(self) -> None:
        """End the connection."""
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        self.direct.close()
        if here() == self._cluster_address:
            with contextlib.suppress(ray.exceptions.RayError, RunError), no_new_ray():
                ray.get(self.feed.leave.remote(self.client), timeout=BEAT_S)
            self.give_back()  # a shared feed ends by itself, once no rank uses it
        self._stack.close()


class _FeedSenders:
    """The senders of a feed's nodes."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def sender(self, node: str) -> PendingAnswer:
        """See :meth:`LoaderFeed.sender`."""
        return PendingAnswer(self._feed.sender.remote(node))

    def blocks_through_ray(self, node: str, reason: str) -> None:
        """See :meth:`LoaderFeed.blocks_through_ray`. Does not wait."""
        self._feed.blocks_through_ray.remote(node, reason)


class User:
    """A DataLoader's hold on a session, which ends with it."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self._held = False

    def session(self, address: str | None, placement: str) -> FeedSession:
        """The session for this cluster. Starts it if there is none.

        Raises ConfigError as :func:`offload.train.cluster.connection.connected` does, RunError in a process that was forked from one
        with a session.
        """
        if not self._held:
            weakref.finalize(self, _release, self.name).atexit = False
            self._held = True
        with _lock:
            key = _key(address, placement)
            session = _sessions.get(key)
            if session is None or session.ended:
                check_not_forked()
                for other in list(_sessions.values()):
                    other.make_room()
                session = _sessions[key] = _on_a_lasting_thread(lambda: FeedSession(address, placement))
            session.renew()
            _users.setdefault(key, set()).add(self.name)
            return session


_lock = threading.Lock()
_sessions: dict[tuple[str | None, str], FeedSession] = {}
_users: dict[tuple[str | None, str], set[str]] = {}


def _key(address: str | None, placement: str) -> tuple[str | None, str]:
    """The key of the session for this cluster.

    A process has one connection to Ray, by whatever names its loaders call the cluster. Two sessions there would compete for its cores.
    Raises ConfigError if ``address`` is that of another cluster.
    """
    for known, session in _sessions.items():
        if known[1] == placement and not session.ended:
            if known[0] != address:
                check_address(address)
            return known
    return address, placement


def _on_a_lasting_thread(make: Callable[[], FeedSession]) -> FeedSession:
    """Call ``make`` on the main thread, or on one that never ends: Linux ends Ray's processes with the thread that started them."""
    if threading.current_thread() is threading.main_thread():
        return make()
    session: Future[FeedSession] = Future()

    def run() -> None:
        try:
            session.set_result(make())
        except BaseException as error:
            session.set_exception(error)
        else:
            threading.Event().wait()

    threading.Thread(target=run, daemon=True, name="offload-loader-ray").start()
    return session.result()


def _release(user: str) -> None:
    """Note that this user is gone. A session without users ends after a while. The garbage collector may call this at any time."""
    for key, users in list(_users.items()):
        if user in users:
            users.discard(user)
            if (session := _sessions.get(key)) is not None:
                session.forget(user)
    _end_later()


_newest_look = object()


def _end_later() -> None:
    global _newest_look
    if _sessions:
        _newest_look = look = object()
        timer = threading.Timer(LINGER_S, _end_unless_later, (look,))
        timer.daemon = True
        timer.start()


def _end_unless_later(look: object) -> None:
    """End the sessions that no loader uses, unless another loader has gone since: that starts the time anew."""
    if look is _newest_look:
        end_unused()


def end_unused() -> None:
    """End the sessions that no loader uses.

    While another session, a run or the program's own code uses this process's Ray, only give back their cores: an unused session may have
    started the Ray of all. Ranks of a job keep their sessions to the end, since other ranks may need them. A loader that begins meanwhile
    waits, since the Ray that it would find is about to end.
    """
    with unless_used() as free, _lock:
        unused = [key for key in _sessions if not _users.get(key) and not _sessions[key].is_shared]
        free = free and not any(session.is_programs and not session.ended for session in _sessions.values())
        if free and len(unused) == len(_sessions):
            closing = [_sessions.pop(key) for key in unused]
        else:
            closing = []
            for key in unused:
                _sessions[key].give_back()
        for session in closing:
            session.close()


def make_room() -> None:
    """Give back the cores of sessions that no iteration uses, and share those of the others."""
    with _lock:
        sessions = list(_sessions.values())
    for session in sessions:
        session.make_room()


def _let_program() -> None:
    """Leave this process's Ray to the program's own code, too."""
    for session in list(_sessions.values()):
        session.let_program()


on_need(make_room)
on_end(_end_later)


@atexit.register
def _end_all() -> None:
    """End the sessions of this process: Ray's own exit handler comes later."""
    with _lock:
        sessions = list(_sessions.values())
        _sessions.clear()
        _users.clear()
    for session in sessions:
        session.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _sessions.clear()
    _users.clear()


os.register_at_fork(after_in_child=_after_fork)


def _feed_of(job: Ranks, cluster: ConnectedCluster, placement: str) -> tuple[Any, Mapping[str, float]]:
    """(the job's feed, its CPUs by node id if this rank made it). The first rank to come makes the feed."""
    name = _shared_name(job, placement) if job.world_size > 1 else None
    if name is not None:
        keep_to_logs(name)
        if (existing := _existing_feed(name)) is not None:
            return existing, {}
    job_env: dict[str, Any] = dict(ray.get_runtime_context().runtime_env)
    choice = NodeChoice(choice=placement, home=ray.get_runtime_context().get_node_id())
    try:
        cores = choice.cores(cluster.nodes, preload.runtime_env(job_env, also=MODULES), lambda: held().in_words)
    except ConfigError:
        if name is not None and (existing := _existing_feed(name)) is not None:  # it has just taken the CPUs
            return existing, {}
        raise
    import_ahead(set(cores.nodes), cores.runtime_env)
    options: dict[str, Any] = {
        "max_concurrency": THREADS + THREADS_PER_RANK * job.world_size,
        "runtime_env": dict(cores.runtime_env) or None,
    }
    if name is not None:
        # It must not end with the rank that makes it.
        options |= {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
    feed = on_this_node(ray.remote(LoaderFeed), **options).remote(cores, choice)
    return feed, {node: count * cores.task_cpus for node, count in cores.by_node.items()}


def end_shared_feed(job: Ranks, placement: str) -> None:
    """End the feed that the ranks of a job have made, if any, and with it the CPUs that it keeps: for one who knows that all ranks have
    ended. By itself, it waits a while for ranks that died."""
    if (feed := _existing_feed(_shared_name(job, placement))) is not None:
        ray.kill(feed)


def _shared_name(job: Ranks, placement: str) -> str:
    return f"loader-{job.name}-{placement}"


def _existing_feed(name: str) -> Any:
    """The feed that another rank has made; None if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
