"""The part of every host except the head, which prepares the host, starts Ray when the head says so, and ends as the head does.

It reports failures to the head, which tells all hosts. The head trains.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from offload.errors import OffloadError, RunError
from offload.launch.sagemaker.container.place import INTERRUPTED, STOPPED_EARLY, HostPlace, Outcome, reason_of
from offload.launch.sagemaker.container.prepared import Prepared, prepare
from offload.launch.sagemaker.container.ray_node import RayNode
from offload.launch.sagemaker.container.rendezvous import MEETING_PORT, Follower
from offload.launch.sagemaker.settings import deadline_s

T = TypeVar("T")


class FollowerHost:
    """A follower's part in one job."""

    def __init__(self, place: HostPlace) -> None:
        self._place = place
        self._ended = threading.Event()
        self._failure: str | None = None
        self._node: RayNode | None = None

    def follow(self) -> Outcome:
        """Follow the head to the end of the job. Raises OffloadError if the host cannot find the head, or loses it."""
        place = self._place
        # Preparation and the search for the head both take time: do them in parallel.
        preparing = _in_background(lambda: prepare(place, self._check))
        preparing.add_done_callback(self._note)
        try:
            with _stoppable():
                head = (place.head_address, MEETING_PORT)
                follower = Follower(head, place.token, place.hosts.current, deadline_s(place.base))
            # From now on, ignore SIGTERM. The head, which gets it too, commits a checkpoint, and needs this host until then.
            preparing.add_done_callback(lambda done: self._tell_prepared(follower, done))
            for message in follower.messages():
                if "start" in message:
                    # In the background: `ray start` would wait for a lost head, and this host must hear the head meanwhile.
                    starting = _in_background(lambda: self._start(preparing.result()))
                    starting.add_done_callback(self._note)
                    starting.add_done_callback(lambda done: self._tell(follower, done, ready=True))
                if "outcome" in message:
                    return self._as_told(message["outcome"])
        except KeyboardInterrupt:
            return Outcome(exit=INTERRUPTED, reason=STOPPED_EARLY)
        except OffloadError:
            if self._failure is not None:  # the reason why this host failed says more than the loss of the head
                return Outcome(exit=1, reason=self._failure)
            raise
        finally:
            self._ended.set()
            if self._node is not None:
                self._node.stop()
        raise AssertionError("messages end with an outcome or raise")

    def _check(self) -> None:
        if self._ended.is_set():
            raise RunError("the job has ended.")

    def _start(self, prepared: Prepared) -> None:
        self._node = RayNode(prepared.node)
        self._node.start()

    def _tell_prepared(self, follower: Follower, done: Future[Prepared]) -> None:
        versions = {} if done.exception() else dict(done.result().versions)
        self._tell(follower, done, versions=versions)

    def _tell(self, follower: Follower, done: Future[Any], **success: Any) -> None:
        error = done.exception()
        if error is None:
            follower.say(**success)
        elif not self._ended.is_set():
            follower.say(failed=reason_of(error))

    def _note(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is None or self._ended.is_set():
            return
        if not isinstance(error, OffloadError):
            traceback.print_exception(error)
        self._failure = reason_of(error)

    def _as_told(self, outcome: dict[str, Any]) -> Outcome:
        if self._failure is not None:
            return Outcome(exit=1, reason=self._failure)
        reason, hosts = outcome.get("reason"), self._place.hosts
        told_by_its_host = reason is not None and reason.split(":")[0] in hosts.all
        return Outcome(
            exit=int(outcome["exit"]), reason=reason if not reason or told_by_its_host else f"{hosts.head}: {reason}"
        )


@contextmanager
def _stoppable() -> Iterator[None]:
    """A context in which SIGTERM ends this host's part, during the search for the head; afterwards, SIGTERM is ignored."""

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        # Not SIG_IGN, which Ray's processes would inherit.
        signal.signal(signal.SIGTERM, lambda signum, frame: None)


def _in_background(act: Callable[[], T]) -> Future[T]:
    """Call on a thread that, unlike an executor's, does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
