"""The rendezvous of a job's hosts: they meet here, and all of them learn the outcome.

The head listens. Every other host connects, proves that it knows the job's token, gives its name, and stays connected. It then sends
its versions once it is prepared, and reports that it is ready, or why it failed. The head's messages (start Ray; the outcome) reach it
at once. Silence means that the other side is gone. Ray's own connections would end late and give no reason.

Where it stops: other modules start Ray and the user's script. Messages are JSON; nothing is unpickled. It needs only the standard
library, so that hosts can meet before anything is installed on them.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from offload.errors import ConfigError, RunError

MEETING_PORT = 6378
ALIVE_S = 3.0  # time between two signs of life
SILENT_S = 15.0  # time without one after which the other side counts as gone
HANDSHAKE_S = 10.0
RETRY_S = 0.2

Address = tuple[str, int]


class HeadLost(RunError):
    """The head ended without reporting an outcome."""


class Rendezvous:
    """The head's side of the rendezvous. It listens from the start.

    Args:
        address: the address of this host, on the job's network; port 0 for any.
        token: the token of the job.
        hosts: the names of the expected hosts.
        lost: a callback, on another thread, with the name of a host that is gone before the end.
    """

    def __init__(
        self, address: Address, token: str, hosts: Collection[str], lost: Callable[[str], None] = lambda host: None
    ) -> None:
        self._token, self._hosts = token.encode(), frozenset(hosts)
        self._lost = lost
        self._began = time.monotonic()
        self._listener = Listener(address, backlog=128)
        self._here: dict[str, Connection] = {}
        self._came: set[str] = set()
        self._versions: dict[str, dict[str, str]] = {}
        self._ready: set[str] = set()
        self._failed: str | None = None
        self._outcome: dict[str, Any] | None = None
        self._changed, self._telling = threading.Condition(), threading.Lock()
        self._closed, self._over = threading.Event(), threading.Event()
        for run in (self._accept, self._show_life):
            threading.Thread(target=run, daemon=True).start()

    @property
    def address(self) -> Address:
        """The address where it listens."""
        host, port = self._listener.address
        return host, port

    def check(self) -> None:
        """Raise ConfigError if a host has failed, with its name and its reason, or has left."""
        with self._changed:
            self._check()

    def gather(self, versions: Mapping[str, str], deadline_s: float) -> None:
        """Wait until all hosts are prepared, with the same versions as this one, such as ``{"Ray": "2.60.0"}``.

        Raises ConfigError, with names and reasons, if hosts are late, have other versions, or failed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._trouble or self._difference(versions) or self._hosts <= self._versions.keys(), deadline_s
            )
            self._check()
            if difference := self._difference(versions):
                raise ConfigError(difference)
            missing, late = sorted(self._hosts - self._came), sorted(self._came - self._versions.keys())
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} did not come within {deadline_s:g} s; {len(self._came)} of {len(self._hosts)} other hosts are "
                "here. The job's log has the output of these hosts; in a VPC, the security group must allow all TCP from itself."
            )
        if late:
            raise ConfigError(
                f"{', '.join(late)} came, but did not finish installing within {deadline_s:g} s: see the job's log, or launch with a "
                "longer deadline (offload launch sagemaker --hosts-deadline)."
            )

    def await_ready(self, deadline_s: float) -> None:
        """Wait until all hosts have reported that they are ready.

        Raises ConfigError, with names and reasons, if hosts are late or failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._trouble or self._hosts <= self._ready, deadline_s)
            self._check()
            late = sorted(self._hosts - self._ready)
        if late:
            raise ConfigError(f"Ray did not start within {deadline_s:g} s on {', '.join(late)}.")

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message to all hosts that are still connected."""
        with self._changed:
            here = list(self._here.values())
        with self._telling:
            for connection in here:
                with contextlib.suppress(OSError):  # its reader will notice that it is gone
                    connection.send_bytes(json.dumps(message).encode())

    def close(self, outcome: Mapping[str, Any], late_s: float = 0.0) -> None:
        """Tell the outcome to all hosts, and end.

        A host that has not come yet would look for the head until its own deadline. The head tells it the outcome if it comes within
        ``late_s`` of the start.
        """
        self._closed.set()  # a host that leaves from now on is not lost
        with self._changed:
            self._outcome = {"outcome": dict(outcome)}
        self.tell(self._outcome)
        with self._changed:
            self._changed.wait_for(lambda: self._hosts <= self._came, max(self._began + late_s - time.monotonic(), 0.0))
        self._over.set()
        self._listener.close()

    @property
    def _trouble(self) -> bool:
        return self._failed is not None or not self._came <= self._here.keys()

    def _check(self) -> None:
        if self._failed is not None:
            raise ConfigError(self._failed)
        if gone := sorted(self._came - self._here.keys()):
            raise ConfigError(f"{', '.join(gone)} left before training began: the job's log has the last output.")

    def _difference(self, versions: Mapping[str, str]) -> str | None:
        """The first host whose versions differ from this one's, in words; None if all agree."""
        differ = sorted(host for host, theirs in self._versions.items() if theirs != versions)
        return _difference(differ[0], self._versions[differ[0]], versions) if differ else None

    def _show_life(self) -> None:
        while not self._closed.wait(ALIVE_S):
            self.tell({})

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection = self._listener.accept()
            except OSError:  # closed, or the peer is gone again
                continue
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: Connection) -> None:
        """Admit a host that knows the token. Drop any other host, and one that stays silent."""
        watch = threading.Timer(HANDSHAKE_S, connection.close)
        watch.daemon = True
        watch.start()
        try:
            deliver_challenge(connection, self._token)
            answer_challenge(connection, self._token)
            host = str(json.loads(connection.recv_bytes())["host"])
        except (AuthenticationError, OSError, EOFError, ValueError, KeyError, TypeError):
            connection.close()
            return
        finally:
            watch.cancel()
        if host not in self._hosts:
            connection.close()
            return
        with self._changed:
            self._here[host], outcome = connection, self._outcome
        if outcome is not None:
            with self._telling, contextlib.suppress(OSError):
                connection.send_bytes(json.dumps(outcome).encode())
        with self._changed:
            self._came.add(host)
            self._changed.notify_all()
        self._listen(host, connection)

    def _listen(self, host: str, connection: Connection) -> None:
        """Receive a host's messages until it is gone."""
        with contextlib.closing(connection), contextlib.suppress(OSError, EOFError, ValueError, TypeError):
            while connection.poll(SILENT_S):
                said = json.loads(connection.recv_bytes())
                with self._changed:
                    if "versions" in said:
                        self._versions[host] = dict(said["versions"])
                    if "ready" in said:
                        self._ready.add(host)
                    if "failed" in said:
                        self._failed = self._failed or f"{host}: {said['failed']}"
                    self._changed.notify_all()
        with self._changed:
            if self._here.get(host) is connection:
                del self._here[host]
            self._changed.notify_all()
        if not self._closed.is_set():
            self._lost(host)


class Follower:
    """The side of any other host, which connects to the head. The head may start later.

    Raises ConfigError if the head does not answer within the deadline, or has another token.
    """

    def __init__(self, address: Address, token: str, host: str, deadline_s: float) -> None:
        self._connection = _connect(address, token, deadline_s)
        self._saying, self._closed = threading.Lock(), threading.Event()
        self.say(host=host)
        threading.Thread(target=self._show_life, daemon=True).start()

    def say(self, **message: Any) -> None:
        """Send a message to the head, if it is still connected; :meth:`messages` notices if not."""
        with self._saying, contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the head's messages; the last is ``{"outcome": …}``. Raises HeadLost if the head falls silent earlier."""
        with contextlib.closing(self):
            while True:
                try:
                    if not self._connection.poll(SILENT_S):
                        raise HeadLost(f"the head has been silent for {SILENT_S:g} s: its host or its process is gone.")
                    message = json.loads(self._connection.recv_bytes())
                except (OSError, EOFError):
                    raise HeadLost("the head's process ended without reporting the job's outcome.") from None
                if message:
                    yield message
                if "outcome" in message:
                    return

    def close(self) -> None:
        """Leave."""
        self._closed.set()
        with self._saying:
            self._connection.close()

    def _show_life(self) -> None:
        while not self._closed.wait(ALIVE_S):
            self.say()


def _connect(address: Address, token: str, deadline_s: float) -> Connection:
    until = time.monotonic() + deadline_s
    while True:
        try:
            return Client(address, authkey=token.encode())
        except AuthenticationError:
            raise ConfigError(
                f"the head at {address[0]} has another token: this host does not belong to its job."
            ) from None
        except (OSError, EOFError) as error:
            if time.monotonic() > until:
                raise ConfigError(
                    f"the head at {address[0]}:{address[1]} could not be reached within {deadline_s:g} s ({error})."
                ) from None
            time.sleep(RETRY_S)


def _difference(host: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    differ = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    versions = ", ".join(f"{name} {theirs.get(name, 'none')} and the head {ours.get(name, 'none')}" for name in differ)
    return f"{host} has {versions}: all hosts of a job need the same. Use one image, and pin the packages in requirements.txt."
