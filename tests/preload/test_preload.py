"""Processes that start with their imports done: a real server, launched as Ray would, and a real Ray on top."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from offload import preload
from offload.preload import ahead, ended, python
from offload.ray_private.preload import SERVER, setup_worker
from tests.helpers import eventually

LAUNCHER = Path(preload.__file__).with_name("python.py")
SCRIPT = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "folder": os.getcwd(), "value": os.environ.get("VALUE"), "main": __name__,
    "loaded": "colorsys" in sys.modules, "also": "this" in sys.modules, "parent": os.getppid(), "pid": os.getpid(), "group": os.getpgrp(),
    "no_user_site": os.environ.get("PYTHONNOUSERSITE"),
}))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where servers put their sockets, whose paths must be short; pytest's may not be."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        yield Path(name)


@pytest.fixture
def start(tmp_path: Path, folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Launches a script as Ray would; servers end with the test."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # The launcher's parent counts as its raylet: this test process does. Servers are found by their socket's folder.

    def launched(
        *arguments: str,
        key: str = "key",
        modules: str = "colorsys",
        also: str = "",
        flags: Sequence[str] = (),
        **env: str,
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-S", str(LAUNCHER), key, modules, also, *flags, str(script), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(folder), **env},
        )  # fmt: skip

    yield launched
    for process in _servers(folder):
        process.kill()
        eventually(lambda pid=process.pid: has_ended(pid))  # type: ignore[misc]


def has_ended(pid: int) -> bool:
    """Whether it runs no more, even if its parent has not asked how it ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _servers(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if any(str(folder) in part for part in command) and any(part.endswith("server.py") for part in command):
            found.append(process)
    return found


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=800)
    told: dict[str, Any] = json.loads(out)
    return told


def test_a_process_is_what_was_asked_for_and_has_its_imports(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("0", "--name=a b", VALUE="x\ny")
    told = _told(process)
    assert told["argv"] == [str(tmp_path / "script.py"), "0", "--name=a b"]
    assert (told["folder"], told["value"], told["main"]) == (str(tmp_path), "x\ny", "__main__")
    assert told["path0"] == str(tmp_path)
    assert told["loaded"]
    assert told["pid"] not in (process.pid, told["parent"])
    assert told["group"] == told["pid"]  # a signal to its group reaches no sibling


@pytest.mark.parametrize(("flags", "forked"), [(["-s"], True), (["-S", "-s"], False)], ids=str)
def test_flags_of_the_driver_are_kept(
    start: Callable[..., subprocess.Popen[str]], flags: list[str], forked: bool, tmp_path: Path, folder: Path
) -> None:
    """Ray puts ``-s`` before the script where PYTHONNOUSERSITE is set, as on many clusters."""
    told = _told(start("0", flags=flags))
    assert told["argv"] == [str(tmp_path / "script.py"), "0"]
    assert told["loaded"] == forked
    assert told["no_user_site"] == "1"


def test_all_processes_of_a_node_come_from_one_server(
    start: Callable[..., subprocess.Popen[str]], folder: Path
) -> None:
    running = [start("0", VALUE=str(number)) for number in range(5)]
    told = [_told(process) for process in running]
    assert sorted(each["value"] for each in told) == list("01234")
    assert len({each["parent"] for each in told}) == 1
    assert len(_servers(folder)) == 1


def test_a_process_gets_more_modules_than_others_that_came_before(start: Callable[..., subprocess.Popen[str]]) -> None:
    first, second = _told(start("0")), _told(start("0", also="no_such_module_at_all,this"))
    assert (first["also"], second["also"]) == (False, True)
    assert first["parent"] == second["parent"]


def test_who_gave_up_while_the_server_imports_is_not_started(tmp_path: Path, folder: Path) -> None:
    """Ray kills processes that do not report in time, and starts others."""
    (tmp_path / "waits.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    )
    for name in ("given_up", "waits_for_it"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / name)!r} + '.started', 'w')")
    with server_of_a_raylet(tmp_path, folder, "waits") as (_, _, path), connected(path) as other:
        with connected(path) as connection, pytest.MonkeyPatch.context() as patch:
            patch.setattr(python, "WAIT_S", 0.1)
            with pytest.raises(TimeoutError):
                python._ask(connection, [str(tmp_path / "given_up.py")])
        (tmp_path / "go").touch()
        assert python._ask(other, [str(tmp_path / "waits_for_it.py")])
        eventually((tmp_path / "waits_for_it.started").exists)
    assert not (tmp_path / "given_up.started").exists()


def test_modules_that_cannot_be_imported_are_left_to_the_process(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    assert _told(start("0", modules="no_such_module_at_all,colorsys"))["loaded"]


ENDS = """
import atexit, ctypes, os, sys, threading, time

def note(word):
    with open("ends", "a") as file:
        print(word, file=file)

libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.__cxa_atexit(libc.system, ctypes.c_void_p(libc.strdup(b"echo c++ >> ends")), None)
atexit.register(note, "atexit")
threading.Thread(target=lambda: (time.sleep(0.2), note("thread"))).start()
print("said", end="")
if sys.argv[1] == "raise":
    raise ValueError("no such colour")
sys.exit(sys.argv[1])
"""


@pytest.mark.parametrize(("how", "told"), [("a reason", "a reason"), ("raise", "ValueError: no such colour")])
def test_a_process_ends_as_python_does_but_for_what_cpp_does_at_exit(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, how: str, told: str
) -> None:
    _told(start("0"))  # there is a server now
    (tmp_path / "script.py").write_text(ENDS)
    said, errors = start(how).communicate(timeout=800)
    assert said == "said"
    assert errors.strip().endswith(told)
    assert (tmp_path / "ends").read_text().split() == ["thread", "atexit"]


def test_where_the_server_cannot_run_the_process_starts_plainly(
    start: Callable[..., subprocess.Popen[str]], folder: Path
) -> None:
    own = folder / f"offload-{os.getuid()}"
    own.mkdir()
    own.chmod(0o755)  # others might listen there
    process = start("3")
    told = _told(process)
    assert told["pid"] == process.pid
    assert not told["loaded"]
    assert process.returncode == 3


def test_the_socket_is_for_its_user_alone(start: Callable[..., subprocess.Popen[str]], folder: Path) -> None:
    _told(start("0"))
    own = folder / f"offload-{os.getuid()}"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_what_is_no_launcher_does_not_disturb_the_server(
    start: Callable[..., subprocess.Popen[str]], folder: Path
) -> None:
    _told(start("0"))
    (path,) = [p for p in folder.rglob("*") if p.is_socket()]
    for junk in (b"", b"12345678", (1 << 60).to_bytes(8, "big"), (4).to_bytes(8, "big") + b"nope"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(junk)
    assert _told(start("0"))["loaded"]


@contextlib.contextmanager
def server_of_a_raylet(
    tmp_path: Path, folder: Path, modules: str = "colorsys"
) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes], Path]]:
    """A process that stands for a raylet, a server of its own, and where that listens."""
    path = folder / "socket"
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    with (
        subprocess.Popen(["sleep", "600"]) as raylet,
        subprocess.Popen(
            [sys.executable, str(SERVER), str(path), modules, str(raylet.pid), str(lock)],
            pass_fds=[lock],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        ) as server,
    ):
        os.close(lock)
        try:
            yield raylet, server, path
        finally:
            raylet.kill()
            server.kill()


def connected(path: Path) -> socket.socket:
    """To a server, as soon as it listens."""
    until = time.monotonic() + 800
    while (connection := python._connect(str(path))) is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    return connection


def test_a_server_ends_with_its_raylet(tmp_path: Path, folder: Path) -> None:
    with server_of_a_raylet(tmp_path, folder) as (raylet, server, path):
        eventually(lambda: path.exists() or server.poll() is not None)
        raylet.kill()
        raylet.wait()
        assert server.wait(800) == 0
        assert not path.exists()


def test_a_server_ends_with_its_raylet_while_it_imports(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "takes_long.py").write_text(f"import time\nopen({str(tmp_path / 'begun')!r}, 'w')\ntime.sleep(600)")
    with server_of_a_raylet(tmp_path, folder, "takes_long") as (raylet, server, _):
        eventually((tmp_path / "begun").exists)
        raylet.kill()
        raylet.wait()
        assert server.wait(800) == 0
        assert not list(folder.glob("socket*"))


def test_processes_that_outlive_their_raylet_are_ended(tmp_path: Path, folder: Path) -> None:
    """As those do that are just starting: they would look for Ray for a minute."""
    script = tmp_path / "stays.py"
    script.write_text(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    with server_of_a_raylet(tmp_path, folder) as (raylet, server, path):
        with connected(path) as connection:
            assert python._ask(connection, [str(script)])
        eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        raylet.kill()
        raylet.wait()
        assert server.wait(800) == 0
        fork = int((tmp_path / "pid").read_text())
        eventually(lambda: has_ended(fork))


@contextlib.contextmanager
def servers_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch, *modules: str) -> Iterator[psutil.Process]:
    """A server of this process, as a driver starts it."""
    monkeypatch.setenv("TMPDIR", str(folder))
    with ahead.serving(modules, ["this"], mark_name="MARK", mark="m", env={}):
        assert ahead._now is not None
        yield psutil.Process(ahead._now.process.pid)


def test_an_empty_variable_for_temporary_files_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As :mod:`tempfile` takes it. The folder would lie in the working directory, a different one for each process."""
    monkeypatch.setenv("TMPDIR", "")
    assert python.socket_folder() == f"/tmp/offload-{os.getuid()}"


def test_a_driver_s_server_forks_once_it_knows_the_raylet(
    start: Callable[..., subprocess.Popen[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers_ahead(folder, monkeypatch, "colorsys") as server:
        ahead.tell(os.getpid(), os.environ)
        key = ahead.key()
        assert key is not None
        told = [_told(start("0", key=key, also="this")) for _ in range(2)]
        assert [(each["loaded"], each["also"], each["parent"]) for each in told] == [(True, True, server.pid)] * 2
        assert server.environ()["MARK"] == "m"
    eventually(lambda: has_ended(server.pid))
    assert ahead.key() is None
    assert list(folder.glob("*/*")) == []
    assert _told(start("0", key=key))["loaded"]  # a launcher that comes later starts a server of its own


def test_a_driver_s_server_that_was_told_nothing_ends_with_its_context(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers_ahead(folder, monkeypatch, "colorsys") as server:
        pass
    eventually(lambda: has_ended(server.pid))
    eventually(lambda: not list(folder.glob("*/*")))


def test_a_driver_s_server_ends_where_python_starts_no_thread_any_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the exit handler with which a DataLoader ends its Ray, from Python 3.12 on."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with servers_ahead(folder, monkeypatch, "colorsys"):
        assert ahead._now is not None
        process = ahead._now.process
        monkeypatch.setattr(threading.Thread, "start", start)
    assert ahead.key() is None
    assert process.wait(800) == 0


def test_a_driver_s_server_ends_with_a_driver_that_was_killed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(600)")
    driver = """
import sys, time
from offload.preload import ahead
with ahead.serving(sys.argv[1:], [], mark_name="MARK", mark="m", env={}):
    print("started", flush=True)
    time.sleep(600)
"""
    for module in ("colorsys", "takes_long"):
        with subprocess.Popen(
            [sys.executable, "-c", driver, module], stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                process.stdout.readline()
                eventually(
                    lambda: len(_servers(folder)) == 1
                )  # its command line is empty for a moment, while it begins
                (server,) = _servers(folder)
            finally:
                process.kill()
        eventually(lambda pid=server.pid: has_ended(pid))  # type: ignore[misc]


def test_a_driver_s_server_is_replaced_if_settings_have_changed_that_libraries_read_at_import(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers_ahead(folder, monkeypatch, "colorsys"):
        with ahead.serving(["colorsys"], [], mark_name="MARK", mark="n", env={}) as mark:
            assert mark == "m"
        assert ahead.key() is None  # it served one Ray
    with servers_ahead(folder, monkeypatch, "colorsys") as before:
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        with ahead.serving(["colorsys"], [], mark_name="MARK", mark="n", env={}) as mark:
            assert mark == "n"
            eventually(lambda: has_ended(before.pid))


def test_a_process_whose_raylet_has_ended_is_not_started(
    start: Callable[..., subprocess.Popen[str]], folder: Path
) -> None:
    with subprocess.Popen(["true"]) as raylet:
        raylet.wait()
    out, _ = start("0", RAY_RAYLET_PID=str(raylet.pid)).communicate(timeout=800)
    assert out == ""
    assert _servers(folder) == []


def test_how_a_process_ended_can_be_asked(
    start: Callable[..., subprocess.Popen[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    fork = _told(start("3"))["pid"]
    assert ended.exit_status(fork, within_s=800) == 3
    assert ended.exit_status(1) is None


def test_raylets_of_one_number_in_two_namespaces_have_servers_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    here = python.socket_path("key", 7)
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
    assert python.socket_path("key", 7) != here


@pytest.mark.parametrize("job", [{"pip": ["x"]}, {"conda": "e"}, {"py_executable": "uv run"}, {"image_uri": "i"}])
def test_a_job_with_a_python_of_its_own_keeps_it(job: dict[str, Any]) -> None:
    assert preload.runtime_env(job) == {}
    assert preload.runtime_env({"env_vars": {"A": "b"}})


def test_the_user_can_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_PRELOAD", "0")
    assert preload.runtime_env({}) == {}
    monkeypatch.setenv("OFFLOAD_PRELOAD", "1")
    assert preload.runtime_env({})


@pytest.mark.parametrize("module", [*preload.ALWAYS, *preload.TRAINING])
def test_each_module_that_is_always_preloaded_imports(module: str) -> None:
    """The server swallows import errors: a node may lack a module. A misspelt one would only cost every process its start."""
    importlib.import_module(module)


FORKS = """
import os, sys
from offload.ray_private.preload import ray_ids, server
if sys.argv[1] == "as usual":
    import ray.train.torch
    print(ray_ids.repeat_in_forks())
else:
    modules = ["torch", "ray.train.torch", "ray.data", "offload.train.worker.process", "offload.pipeline.pool.pool"]
    print(server._imported(modules, os.pidfd_open(os.getpid()), "unused"))
"""


def said_of_forks(how: str) -> str:
    done = subprocess.run([sys.executable, "-c", FORKS, how], capture_output=True, text=True, check=True, timeout=800)
    return done.stdout.strip()


def test_forks_draw_ids_of_their_own() -> None:
    assert said_of_forks("kept apart") == "True"


@pytest.mark.soak
def test_forks_repeat_the_ids_of_ray_as_usual() -> None:
    """What ray_ids.py is for: when Ray mends it, that can go."""
    assert said_of_forks("as usual") == "True"


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_an_actor_of_ray_is_forked_and_ends_with_its_handle() -> None:
    import ray

    class Actor:
        def tell(self) -> dict[str, Any]:
            return {
                "missing": [name for name in modules if name not in sys.modules],
                "parent": psutil.Process(os.getppid()).cmdline(),
                "pid": os.getpid(),
                "value": os.environ.get("OFFLOAD_TEST"),
            }

    modules = [*preload.ALWAYS, *preload.TRAINING]
    env = {**preload.runtime_env({}, also=preload.TRAINING), "env_vars": {"OFFLOAD_TEST": "1"}}
    actor = ray.remote(Actor).options(num_cpus=0, runtime_env=env).remote()
    told = ray.get(actor.tell.remote())
    assert told["missing"] == []
    assert any(part.endswith("preload/server.py") for part in told["parent"])
    assert told["value"] == "1"
    ray.kill(actor)
    eventually(lambda: has_ended(told["pid"]))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_drivers_in_processes_of_one_job_share_its_servers() -> None:
    """As the trials of a search are."""
    import ray

    @ray.remote(num_cpus=0)
    class Driver:
        def env(self) -> tuple[int, dict[str, Any]]:
            return os.getpid(), preload.runtime_env({})

    drivers = [Driver.remote() for _ in range(2)]
    (one, env), (other, same) = ray.get([driver.env.remote() for driver in drivers])
    assert one != other
    assert env == same != {}


@pytest.mark.ray
@pytest.mark.parametrize(
    ("token", "user_site"),
    [
        pytest.param(True, True, marks=pytest.mark.soak),
        (True, False),
        pytest.param(False, True, marks=pytest.mark.soak),
    ],
)
def test_the_processes_of_a_ray_that_a_run_starts_come_from_its_driver_s_server(token: bool, user_site: bool) -> None:
    program = """
import os, ray
from offload import preload
from offload.preload import ahead
from offload.train.cluster.connection import connected, preparing

class Actor:
    def parent(self):
        return os.getppid()

with preparing(None), connected(None):
    server = ahead._now.process.pid
    actor = ray.remote(Actor).options(num_cpus=0, runtime_env=preload.runtime_env({})).remote()
    assert ray.get_runtime_context().get_job_id() == ahead.FIRST_JOB
    assert ray.get(actor.parent.remote()) == server
"""
    env = {**os.environ}
    if token:
        env.pop("RAY_AUTH_MODE", None)  # Ray then authenticates processes by a token, which the run makes
    else:
        env["RAY_AUTH_MODE"] = "disabled"
    if not user_site:
        env["PYTHONNOUSERSITE"] = "1"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=800, check=False, env=env
    )
    assert run.returncode == 0, run.stderr


CONTEXTS: list[dict[str, Any]] = [
    {},
    {"py_executable": "sh -c 'exec python3 \"$@\"' sh"},
    {"py_executable": sys.executable, "command_prefix": ["cd", "/tmp", "&&"]},
    {"env_vars": {"A": "b c"}},
    {"env_vars": {"A": "${HOME}/b"}},
    {"override_worker_entrypoint": "/other/worker.py"},
]


@pytest.mark.parametrize(
    ("context", "language"),
    [
        *((context, "PYTHON") for context in CONTEXTS),
        # Another language changes how the command is put together, not what a context adds to it.
        *(pytest.param(context, "CPP", marks=[pytest.mark.soak] if context else []) for context in CONTEXTS),
    ],
    ids=str,
)
def test_a_worker_is_set_up_as_by_rays_own_script(tmp_path: Path, context: dict[str, Any], language: str) -> None:
    """Contract: both become the same command in the same environment."""
    from ray._private.runtime_env.context import RuntimeEnvContext

    assert set(vars(RuntimeEnvContext())) == setup_worker.FIELDS
    shell = tmp_path / "bash"
    shell.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "A=$A"\n')
    shell.chmod(0o755)
    arguments = ["/ray/default_worker.py", "--name=a b", f"--language={language}"]
    command = [*arguments, f"--serialized-runtime-env-context={RuntimeEnvContext(**context).serialize()}"]

    def said(script: str) -> str:
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(
            [sys.executable, script, *command], capture_output=True, text=True, timeout=800, check=True, env=environment
        ).stdout

    assert said(setup_worker.__file__) == said(setup_worker.rays_own())
