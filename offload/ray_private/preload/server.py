"""The server that imports modules once, and forks itself for every process that :mod:`offload.preload.python` hands over.

    python server.py SOCKET MODULE[,MODULE…] OWNER LOCK [THEN [LISTENER]]

It listens before it imports, so that launchers wait for its answer and need not look for it again and again. THEN names modules that it
imports once no launcher waits. LISTENER is the socket's file descriptor, if the server has started itself anew.

OWNER is the process id of the raylet whose processes it starts. If it is ``-``, a driver has started the server
(:mod:`offload.preload.ahead`), with a socket as standard input. The driver writes a line of JSON, Ray's settings for the raylet's
processes, once it has started the raylet. It closes the socket at the end.

The server ends with its owner, and kills the processes that do not end by themselves. It also ends once it has had no process for a
while. It records next to its socket how each of them ended, since nobody else learns it: Ray only sees a broken connection. The server
has one thread and no connection except its sockets, so that a fork of it is as good as a new process. Forks end as those of
:mod:`multiprocessing` do: they run Python's exit handlers, but not those of C++ libraries.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

if __name__ == "__main__":
    # A script's own folder comes first on the path, but nobody should import the modules there by their short names.
    sys.path.pop(0)
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from offload.ray_private.preload import ray_ids

IDLE_S = 30.0  # time without a living process of ours after which the server ends
ORPHANS_S = 3.0  # time for processes to end after their raylet; a starting one would look for it for a minute
LOOK_S = 0.5
ENDED = ".ended"  # the file with lines of PID, STATUS (negative for a signal) and seconds since 1970
REQUEST_S = 5.0
STDIN = "-"  # the owner is the other end of standard input
LARGEST = 16 << 20
RAY = ("ray", "offload")  # modules that import Ray


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A process to start, as the launcher described it. ``also``: modules that it needs beside the server's; ``files``: its standard
    input, output and error."""

    command: list[str]
    also: list[str]
    env: dict[str, str]
    folder: str
    oom_score_adj: str
    files: list[int]


def main(argv: list[str]) -> None:
    """Serve until the owner ends."""
    path, names, owner, lock, then, listening = (*argv, "", "")[:6]
    modules, later = ([name for name in text.split(",") if name] for text in (names, then))
    by_driver = owner == STDIN
    owner_ended = os.dup(0) if by_driver else os.pidfd_open(int(owner))
    with socket.socket(fileno=int(listening)) if listening else _listener(path) as listener:
        if by_driver and not listening:
            others = [name for name in modules if not _with_ray(name)]
            later = _told(owner_ended, path, others, later)
        if not _imported(modules, owner_ended, path):
            without = ",".join(name for name in modules if not _with_ray(name))
            for kept in (int(lock), listener.fileno()):
                os.set_inheritable(kept, True)
            anew = [sys.executable, __file__, path, without, owner, lock, ",".join(later), str(listener.fileno())]
            os.execv(sys.executable, anew)
        wanted = _serve(listener, owner_ended, path, set(modules), later, patient=by_driver)
    os.close(owner_ended)
    if wanted is None:
        _forget(path)
    os.close(int(lock))  # processes that wait for it find nothing of this server
    if wanted is not None:
        _live(wanted)


def _with_ray(module: str) -> bool:
    return module.split(".")[0] in RAY


def _told(owner: int, path: str, modules: list[str], later: list[str]) -> list[str]:
    """Import ``modules``, and then of ``later`` what there is time for, until the driver has started its raylet: Ray reads its settings
    as it is imported. Return the rest of ``later``."""
    _imported(modules, owner, path, signs=select.POLLRDHUP)
    while later and not _readable(owner):
        _imported(later[:1], owner, path, signs=select.POLLRDHUP)
        later = later[1:]
    with open(owner, encoding="utf-8", closefd=False) as pipe:
        line = pipe.readline()
    if not line:  # the driver has no use for a server any more
        _forget(path)
        os._exit(0)
    os.environ.update(json.loads(line))
    return later


def _readable(file: int) -> bool:
    return bool(select.select([file], [], [], 0)[0])


def _listener(path: str) -> socket.socket:
    """A socket that listens at ``path``, in a folder that only this user may enter."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(128)
    return listener


def _forget(path: str) -> None:
    """Remove this server's files."""
    for left in (path, f"{path}.lock", f"{path}{ENDED}"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(left)


@contextlib.contextmanager
def _ending_with(owner_ended: int, path: str, signs: int) -> Iterator[None]:
    """A context, for long work, in which this process ends if its owner does. Afterwards, there is one thread again."""
    done = os.eventfd(0)

    def watch() -> None:
        poll = select.poll()
        poll.register(owner_ended, signs)
        poll.register(done, select.POLLIN)
        if owner_ended in [file for file, _ in poll.poll()]:
            _forget(path)
            os._exit(0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(done, 1)
        thread.join()
        os.close(done)


def _imported(modules: list[str], owner_ended: int, path: str, signs: int = select.POLLIN) -> bool:
    """Import the modules, for this process and its forks. Return False if Ray could not tell the forks apart. ``signs``: the events of
    ``owner_ended`` that mean its end."""
    with_ray = any(map(_with_ray, modules))
    gc.disable()  # a fifth of the imports' time, for collections that find nothing
    with ray_ids.drawn_elsewhere() if with_ray else contextlib.nullcontext(), _ending_with(owner_ended, path, signs):
        for module in modules:
            # If a node lacks a module, its processes lack it, too, and report that.
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each fork would print again what a module has printed
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, all these objects
    gc.enable()
    return not (with_ray and ray_ids.repeat_in_forks())


def _serve(
    listener: socket.socket, owner_ended: int, path: str, tried: set[str], later: list[str], *, patient: bool
) -> Wanted | None:
    """Fork for every request. Return the wanted process in each fork, and None in the server once it should end. Record how forks
    end beside ``path``.

    Args:
        tried: the modules that the server has imported, or failed to.
        later: those that it imports once nobody waits.
        patient: whether it waits for the first request without an end.
    """
    alive: set[int] = set()
    ended = f"{path}{ENDED}"
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        for source in (listener, owner_ended, woken):
            selector.register(source, selectors.EVENT_READ)
        while True:
            idle_s = None if alive or patient else IDLE_S
            ready = [key.fileobj for key, _ in selector.select(0 if later else idle_s)]
            if later and not ready:
                _imported([later[0]], owner_ended, path)
                tried.add(later.pop(0))
                continue
            if woken in ready:
                os.read(woken, 4096)
                alive -= _ended(alive, ended)
            elif owner_ended in ready or not ready:
                _end(alive, ended)
                return None
            elif listener in ready:
                connection, _ = listener.accept()
                with connection:
                    wanted = _read(connection)
                    if wanted is None:
                        continue
                    patient = False
                    if missing := [module for module in wanted.also if module not in tried]:
                        tried.update(missing)
                        _imported(missing, owner_ended, path)
                    child = os.fork()
                    if child == 0:
                        break
                    alive.add(child)
                    for file in wanted.files:
                        os.close(file)
                    with contextlib.suppress(OSError):
                        connection.sendall(b"\1")
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(woken)
    os.close(wake)
    return wanted


def _ended(alive: set[int], ended: str) -> set[int]:
    """Record the processes that have ended, and return them."""
    reaped = set()
    for child in alive:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            reaped.add(child)
            with contextlib.suppress(OSError), open(ended, "a", encoding="ascii") as file:
                file.write(f"{child} {os.waitstatus_to_exitcode(status)} {time.time():.0f}\n")
    return reaped


def _end(alive: set[int], ended: str) -> None:
    """Wait for the processes to end, and kill those that do not."""
    until = time.monotonic() + ORPHANS_S
    while (alive := alive - _ended(alive, ended)) and time.monotonic() < until:
        time.sleep(LOOK_S / 10)
    for child in alive:
        os.kill(child, signal.SIGKILL)


def _read(connection: socket.socket) -> Wanted | None:
    """The process that the other end asks for; None if the connection breaks."""
    connection.settimeout(REQUEST_S)
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(connection, 8, 3)
        left = int.from_bytes(head, "big")
        if len(head) != 8 or len(files) != 3 or left > LARGEST:
            raise ValueError("not a launcher")
        parts = []
        while left:
            if not (part := connection.recv(min(left, 1 << 16))):
                raise ValueError("broken off")
            parts.append(part)
            left -= len(part)
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            if not connection.recv(1):
                raise ValueError("the launcher has given up")  # it has become the process, or was killed
        connection.setblocking(True)
        return Wanted(**json.loads(b"".join(parts)), files=files)
    except (OSError, ValueError, TypeError):
        for file in files:
            os.close(file)
        return None


def _live(wanted: Wanted) -> NoReturn:
    """Become the wanted process, and run it to its end.

    This skips the exit handlers of C++: Ray 2.60 sometimes waits there forever for a lock that it holds itself (a message to a
    subscriber is still queued when its queue is destroyed), and the process outlives its cluster. It also skips the teardown of
    imported modules, which took most of the time of an exit.
    """
    status = 1
    try:
        status = _status(wanted)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for all threads but daemons, as every interpreter does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status(wanted: Wanted) -> int:
    """Run the script to its end. Return its exit status, after Python's own message about it is printed."""
    try:
        _become(wanted)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _become(wanted: Wanted) -> None:
    """Take over the launcher's arguments, environment, folder and files, and run its script."""
    os.setsid()
    for number, file in enumerate(wanted.files):
        os.dup2(file, number)
        os.close(file)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as adjustment:
        adjustment.write(wanted.oom_score_adj)
    os.environ.clear()
    os.environ.update(wanted.env)
    os.chdir(wanted.folder)
    if "numpy" in sys.modules:  # every new process has its own seed
        sys.modules["numpy"].random.seed()
    script = wanted.command[0]
    sys.argv = wanted.command
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
