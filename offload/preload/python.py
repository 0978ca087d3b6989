"""The stand-in for ``python`` when Ray starts a process: fork it from a process that has already imported its modules.

    python -S python.py KEY MODULE[,MODULE…] ALSO [-S] [-s] SCRIPT [ARGUMENT…]

Ray runs this as the ``py_executable`` of a runtime environment; SCRIPT and its arguments are Ray's. It asks the node's server
(:mod:`offload.ray_private.preload.server`) for a fork that takes over this process's arguments, environment, folder and standard
files, and ends. If the driver has started no server (:mod:`offload.preload.ahead`), the first such process starts one and waits with
the others: one import serves all of them. ALSO names more modules, or is empty: the server has imported these, too, before it forks
this process. On any error, this process becomes the plain ``python SCRIPT``.

It imports little, and only from the standard library: every process start still waits for these imports.
"""

import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import time

RAYLET = "RAY_RAYLET_PID"  # Ray sets it for every process that it starts; after the raylet's end, the parent differs
WAIT_S = 40.0  # Ray gives a new process 60 s to report
POLL_S = 0.02  # time between two looks for the server, which listens before its imports


def main(argv: list[str]) -> None:
    """Hand the process over, or become it."""
    key, modules, also, *command = argv
    flags = [text for text in command[:2] if text in ("-s", "-S")]  # Ray puts the driver's own before SCRIPT
    if "-s" in flags:
        os.environ["PYTHONNOUSERSITE"] = "1"  # for a server, too
    command = command[len(flags) :]
    raylet = int(os.environ.get(RAYLET, os.getppid()))
    try:
        handed = "-S" not in flags and (
            _handed_to_drivers(key, also, command)
            or hand_over(socket_path(key, raylet), modules, also, command, raylet)
        )
    except (OSError, ValueError):
        handed = False
    if not handed and os.getppid() == raylet:
        os.execv(sys.executable, [sys.executable, *flags, *command])


def driver_path(key: str) -> str:
    """The socket of the server that the driver itself has started. Raises PermissionError as :func:`own_folder` does."""
    return os.path.join(own_folder(), key)


def _handed_to_drivers(key: str, also: str, command: list[str]) -> bool:
    """Return whether the driver's server took this process over; False if there is none. Waits for one that does not listen yet."""
    path, deadline = driver_path(key), time.monotonic() + WAIT_S
    while (connection := _connect(path)) is None:
        if not _lives(path) or time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    with connection:
        return _ask(connection, command, also)


def _lives(path: str) -> bool:
    """Return whether a server with this socket lives: it holds the lock."""
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def socket_path(key: str, raylet: int) -> str:
    """The socket of the server with this key that belongs to this raylet. Raises PermissionError as :func:`own_folder` does."""
    folder = own_folder()
    # Hosts that share a folder may have raylets with the same process id, in different PID namespaces.
    namespace = os.readlink("/proc/self/ns/pid")
    text = "\0".join((key, namespace, str(raylet), sys.executable, os.environ.get("PYTHONPATH", "")))
    return os.path.join(folder, hashlib.sha256(text.encode()).hexdigest()[:24])


def own_folder() -> str:
    """The folder with the sockets, which exists and which nobody else can enter. Raises PermissionError if another user made it: a
    listener there gets this process's environment."""
    folder = socket_folder()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.stat(folder, follow_symlinks=False)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(folder)
    return folder


def socket_folder() -> str:
    """The folder with the sockets of this user's servers."""
    return os.path.join(os.environ.get("TMPDIR") or "/tmp", f"offload-{os.getuid()}")


def hand_over(path: str, modules: str, also: str, command: list[str], raylet: int) -> bool:
    """Return whether a server took this process over. Start a server if there is none. Without its raylet, nobody needs this process."""
    deadline = time.monotonic() + WAIT_S
    server: subprocess.Popen[bytes] | None = None
    while time.monotonic() < deadline and os.getppid() == raylet:
        if (connection := _connect(path)) is not None:
            with connection:
                return _ask(connection, command, also)
        if server is not None and server.poll() is not None:
            return False
        if server is None:
            server = _start_server(path, modules, raylet)
        time.sleep(POLL_S)
    return False


def _connect(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def _start_server(path: str, modules: str, raylet: int) -> "subprocess.Popen[bytes] | None":
    """Start the server, unless another process is about to start it. The server keeps the lock as long as it lives."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        server = os.path.join(package, "ray_private", "preload", "server.py")
        return subprocess.Popen(
            [sys.executable, server, path, modules, str(raylet), str(lock)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,  # it outlives this process
            pass_fds=[lock], start_new_session=True,
        )  # fmt: skip
    except BlockingIOError:
        return None
    finally:
        os.close(lock)


def _ask(connection: socket.socket, command: list[str], also: str = "") -> bool:
    """Hand this process over. The server answers once its imports are done; its end breaks the connection."""
    connection.settimeout(WAIT_S)
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        oom_score_adj = file.read()
    wanted = {
        "command": command,
        "also": also.split(",") if also else [],
        "env": dict(os.environ),
        "folder": os.getcwd(),
        "oom_score_adj": oom_score_adj,
    }
    message = json.dumps(wanted).encode()
    socket.send_fds(connection, [len(message).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(message)
    return bool(connection.recv(1))


if __name__ == "__main__":
    main(sys.argv[1:])
