"""This process's connection to the feed, which all its DataLoaders share.

It begins with the first batch that anybody wants, and ends some seconds after the last loader is gone, or with the process. A Ray that
it started ends with it. The ranks of a job on one machine share the Ray that the first of them starts.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import uuid
import weakref
from contextlib import ExitStack
from typing import Any

import ray

from offload import preload
from offload.errors import RunError
from offload.loader.feed import LoaderFeed
from offload.loader.job import Job
from offload.loader.node_choice import NodeChoice
from offload.loader.shared_ray import shared
from offload.train.cluster.connection import Cluster, on_this_node
from offload.train.cluster.ray_processes import no_new_ray

LINGER_S = 10.0  # time for another loader to come: a new Ray takes seconds
BEAT_S = 5.0
THREADS = 32
THREADS_PER_RANK = 4
NAMESPACE = "offload"
MODULES = ("offload.loader.recipe",)


class Session:
    """The connection. ``address``: the cluster's address, as :class:`offload.DataLoader` takes it."""

    def __init__(self, address: str | None, placement: str) -> None:
        self.client = uuid.uuid4().hex
        self._stack = ExitStack()
        self._pid = os.getpid()
        self._ended = threading.Event()
        job = Job.of()
        self._shared = job.world_size > 1
        try:
            cluster = self._stack.enter_context(shared(job, address))
            self.feed = _feed_of(job, cluster, placement)
        except BaseException:
            self._stack.close()
            raise
        threading.Thread(target=self._beat, daemon=True, name="offload-loader-alive").start()

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self._ended.is_set()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(Exception), no_new_ray():
                self.feed.alive.remote(self.client)

    def close(self) -> None:
        """End the connection."""
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError, RunError), no_new_ray():
                ray.get(self.feed.leave.remote(self.client), timeout=BEAT_S)
                if not self._shared:  # a shared feed ends by itself, once no rank uses it
                    ray.kill(self.feed)
            self._stack.close()


class User:
    """A DataLoader's hold on a session, which ends with it."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._held = False

    def session(self, address: str | None, placement: str) -> Session:
        """The session for this cluster. Starts it if there is none.

        Raises ConfigError as :func:`offload.train.cluster.connection.connected` does, RunError in a process that was forked from one
        with a session.
        """
        if not self._held:
            weakref.finalize(self, _release, self._name).atexit = False
            self._held = True
        key = (address, placement)
        with _lock:
            session = _sessions.get(key)
            if session is None or session.ended or not ray.is_initialized():
                _check_not_forked()
                session = _sessions[key] = Session(address, placement)
            _users.setdefault(key, set()).add(self._name)
            return session


_lock = threading.Lock()
_sessions: dict[tuple[str | None, str], Session] = {}
_users: dict[tuple[str | None, str], set[str]] = {}


def _release(user: str) -> None:
    """Note that this user is gone. A session without users ends after a while. The garbage collector may call this at any time."""
    for users in list(_users.values()):
        users.discard(user)
    timer = threading.Timer(LINGER_S, end_unused)
    timer.daemon = True
    timer.start()


def end_unused() -> None:
    """End the sessions that no loader uses."""
    with _lock:
        for key in [key for key in _sessions if not _users.get(key)]:
            _sessions.pop(key).close()


@atexit.register
def _end_all() -> None:
    """End the sessions of this process: Ray's own exit handler comes later."""
    with _lock:
        for session in _sessions.values():
            session.close()
        _sessions.clear()
        _users.clear()


_forked = False


def _after_fork() -> None:
    global _forked, _lock
    _forked = bool(_sessions)
    _lock = threading.Lock()
    _sessions.clear()
    _users.clear()


os.register_at_fork(after_in_child=_after_fork)


def _check_not_forked() -> None:
    if _forked:
        raise RunError(
            "this process was forked from one that already iterates over an offload.DataLoader, and Ray does not survive a fork. Start "
            'processes with multiprocessing.get_context("spawn"), or fork before the first iteration.'
        )


def _feed_of(job: Job, cluster: Cluster, placement: str) -> Any:
    job_env: dict[str, Any] = dict(ray.get_runtime_context().runtime_env)
    choice = NodeChoice(choice=placement, home=ray.get_runtime_context().get_node_id())
    cores = choice.cores(cluster.nodes, preload.runtime_env(job_env, also=MODULES))
    options: dict[str, Any] = {
        "max_concurrency": THREADS + THREADS_PER_RANK * job.world_size,
        "runtime_env": dict(cores.runtime_env) or None,
    }
    if job.world_size > 1:
        # Whichever rank comes first makes it. It must not end with that rank.
        options |= {
            "name": f"loader-{job.name}-{placement}",
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "lifetime": "detached",
        }
    return on_this_node(ray.remote(LoaderFeed), **options).remote(cores, choice)
