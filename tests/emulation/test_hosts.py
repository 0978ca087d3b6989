"""Emulated hosts are hosts: own address, name, processes and files; their CPU time is right; nothing of them stays."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation import Hosts, HostsError, HostSpec, netns
from tests.emulation.cpu_accounting import cgroups_of
from tests.emulation.procfs import every, in_pid_namespace
from tests.emulation.sandbox import sandboxes_folder
from tests.helpers import eventually, require_hosts

pytestmark = pytest.mark.hosts

_CORES = sorted(os.sched_getaffinity(0))
_PYTHON = sys.executable
_BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"


@pytest.fixture(autouse=True, scope="module")
def _hosts_can_be_emulated() -> None:
    require_hosts()


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with Hosts({"gpu-1": HostSpec(core=_CORES[0], shm_bytes=64 << 20), "cpu-1": HostSpec(core=_CORES[-1])}) as hosts:
        yield hosts


def traces(run: str) -> list[str]:
    """Whatever of a run can be found on this machine."""
    remains = [str(folder) for folder in cgroups_of(run)]
    if (sandboxes_folder() / run).exists():
        remains.append(str(sandboxes_folder() / run))
    links = subprocess.run(["ip", "-json", "link"], check=True, capture_output=True, text=True).stdout
    remains += [link["ifname"] for link in json.loads(links) if run in link["ifname"]]
    remains += [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"offload-hosts/{run}" in line
    ]
    remains += [process.command for process in every() if f"offload-hosts/{run}/" in process.command]
    return remains


def test_the_reason_is_given_where_hosts_cannot_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netns.unavailable.__wrapped__() == "emulated hosts need root, and the user id is 1000"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "iproute2" in str(netns.unavailable.__wrapped__())


def test_each_host_has_its_own_name_address_processes_and_files(two: Hosts) -> None:
    look = """
import json, os, shutil, socket
print(json.dumps({
    "name": socket.gethostname(),
    "address": socket.gethostbyname(socket.gethostname()),
    "pids": sum(entry.isdigit() for entry in os.listdir("/proc")),
    "shm": shutil.disk_usage("/dev/shm").total,
    "cores": sorted(os.sched_getaffinity(0)),
    "home": os.listdir(os.path.expanduser("~")),
    "files": [open(p).read() for p in ("/opt/ml/mark", "/tmp/ray/mark", "/dev/shm/mark")],
    "cwd": os.getcwd(),
    "extra": os.environ["EXTRA"],
}))
"""
    for name, host in two.items():
        mark = f"for d in /opt/ml /tmp/ray /dev/shm ~; do printf {name} > $d/mark; done"
        host.run(["sh", "-c", mark], timeout=800, check=True)
    seen = {
        name: json.loads(host.run([_PYTHON, "-c", look], timeout=800, env={"EXTRA": name}, cwd="/", check=True).stdout)
        for name, host in two.items()
    }
    for name, host in two.items():
        assert seen[name] == {
            "name": name,
            "address": host.address,
            "pids": 2,  # its process 1 and the one that looks
            "shm": host.spec.shm_bytes,
            "cores": list(host.spec.cores),
            "home": ["mark"],
            "files": [name] * 3,
            "cwd": "/",
            "extra": name,
        }
    assert not Path("/dev/shm/mark").exists()
    assert (two["cpu-1"].folder / "tmp_ray" / "mark").read_text() == "cpu-1"


def test_a_hidden_package_is_missing_on_that_host_alone(two: Hosts) -> None:
    two["gpu-1"].hide("click")
    look = [_PYTHON, "-c", "import click"]
    assert "ModuleNotFoundError: click is hidden on this host" in two["gpu-1"].run(look, timeout=800).stderr
    two["cpu-1"].run(look, timeout=800, check=True)


def test_hosts_reach_each_other_by_name_and_their_owner(two: Hosts) -> None:
    server = two["gpu-1"].popen(
        [
            _PYTHON,
            "-c",
            "import socket; s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1], flush=True);"
            "c, peer = s.accept(); c.sendall(peer[0].encode())",
        ],
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    ask = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 10).recv(99).decode())"
    answer = two["cpu-1"].run([_PYTHON, "-c", ask, "gpu-1", port], timeout=800, check=True)
    assert answer.stdout.strip() == two["cpu-1"].address
    assert server.wait(800) == 0
    server.stdout.close()
    with socket.create_server((two.gateway, 0)) as own:
        client = two["cpu-1"].popen([_PYTHON, "-c", ask, "gateway", str(own.getsockname()[1])])
        own.settimeout(10)
        connection, peer = own.accept()
        connection.close()
        assert peer[0] == two["cpu-1"].address
        assert client.wait(800) == 0


def test_signals_and_exit_status_are_the_process_s_own(two: Hosts) -> None:
    polite = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('ready', flush=True); signal.pause()"
    process = two["cpu-1"].popen([_PYTHON, "-c", polite], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(800) == 7
    sleeper = two["cpu-1"].popen(["sleep", "1000"])
    sleeper.kill()
    assert sleeper.wait(800) == -signal.SIGKILL
    assert two["cpu-1"].run(["sh", "-c", "exit 3"], timeout=800).returncode == 3
    with pytest.raises(HostsError, match=r"cpu-1.*ended with 3"):
        two["cpu-1"].run(["sh", "-c", "exit 3"], timeout=800, check=True)


def test_a_command_that_takes_too_long_is_killed(two: Hosts) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        two["cpu-1"].run(["sleep", "1000"], timeout=0.2)
    eventually(lambda: len(two["cpu-1"].pids()) == 1)


def test_a_killed_host_is_gone_at_once_and_alone() -> None:
    with Hosts({"a": HostSpec(), "b": HostSpec()}) as hosts:
        victims = [hosts["a"].popen(["sh", "-c", "sleep 1000 & sleep 1000"]) for _ in range(2)]
        eventually(lambda: len(hosts["a"].pids()) == 7)
        hosts["a"].kill()
        assert hosts["a"].pids() == []
        assert [victim.wait(800) for victim in victims] == [-signal.SIGKILL] * 2
        with pytest.raises(HostsError, match="host a is dead"):
            hosts["a"].run(["true"], timeout=800)
        assert hosts["b"].run(["true"], timeout=800).returncode == 0


@pytest.mark.parametrize("method", ["cgroup", "proc"])
def test_cpu_time_includes_children_that_died_and_nobody_else_s(method: str) -> None:
    # A child of a child burns, and both are dead when we look; then a process that still lives.
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_BURN.format(seconds=0.4)!r}])"
    try:
        hosts = Hosts({"busy": HostSpec(core=_CORES[0]), "idle": HostSpec(core=_CORES[-1])}, accounting=method)
        hosts.__enter__()
    except OSError as error:
        pytest.skip(str(error))
    with hosts:
        start = hosts.cpu_seconds()
        hosts["busy"].run([_PYTHON, "-S", "-c", nested], timeout=800, check=True)
        assert (hosts.cpu_seconds() - start).work_s == pytest.approx(0.4, abs=0.15)
        live = hosts["busy"].popen(
            [_PYTHON, "-S", "-c", _BURN.format(seconds=0.4) + "print(1, flush=True)\ninput()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with live:
            assert live.stdout is not None
            live.stdout.readline()
            assert (hosts.cpu_seconds() - start).work_s == pytest.approx(0.8, abs=0.25)
            assert hosts["idle"].cpu_seconds().total_s < 0.1
            assert hosts.cpu_seconds().daemons_s == 0
            live.kill()


def test_a_quota_slows_a_host_down_or_says_why_it_cannot() -> None:
    try:
        hosts = Hosts({"slow": HostSpec(cpus=0.25)})
        hosts.__enter__()
    except HostsError as error:
        assert "CPU quota" in str(error)  # noqa: PT017
        assert "core=" in str(error)  # noqa: PT017
        return
    with hosts:
        start = time.monotonic()
        hosts["slow"].run([_PYTHON, "-S", "-c", _BURN.format(seconds=0.3)], timeout=800, check=True)
        # One period's quota may be spent at full speed.
        assert time.monotonic() - start > 0.9
        assert hosts["slow"].spec.num_cpus == 1


def test_a_link_carries_no_more_than_it_should_in_either_direction() -> None:
    with Hosts({"slow": HostSpec(mbit_per_s=25.0), "fast": HostSpec()}) as hosts:
        limited, free = (
            hosts[name].run(["tc", "qdisc", "show", "dev", "eth0"], timeout=800).stdout for name in ("slow", "fast")
        )
        assert hosts._switch is not None
        switch = subprocess.run(
            ["nsenter", "--target", str(hosts._switch._process.pid), "--net", "tc", "qdisc"],
            capture_output=True,
            text=True,
        ).stdout
    assert "tbf" in limited
    assert "rate 25Mbit" in limited
    assert "tbf" not in free
    assert switch.count("rate 25Mbit") == 1
    with pytest.raises(ValueError, match=r"mbit_per_s must be ≥ 1, found 0\.5"):
        HostSpec(mbit_per_s=0.5)


def test_two_runs_at_a_time_do_not_clash() -> None:
    with Hosts({"same": HostSpec()}) as one, Hosts({"same": HostSpec()}) as other:
        assert one["same"].address != other["same"].address
        assert one.gateway != other.gateway
        for hosts in (one, other):
            hosts["same"].run(["getent", "hosts", "gateway"], timeout=800, check=True)
        lonely = "import socket, sys; socket.create_connection((sys.argv[1], 1), 0.3)"
        assert one["same"].run([_PYTHON, "-c", lonely, other["same"].address], timeout=800).returncode != 0


def test_nothing_is_left_after_an_exit_or_an_exception() -> None:
    names = []
    for error in (None, RuntimeError("as if"), KeyboardInterrupt()):
        with contextlib.suppress(RuntimeError, KeyboardInterrupt), Hosts({"a": HostSpec(), "b": HostSpec()}) as hosts:
            names.append(hosts.folder.name)
            init = hosts["a"].init_pid
            hosts["a"].popen(["sleep", "1000"])
            assert traces(names[-1]) != []
            if error is not None:
                raise error
        assert not Path(f"/proc/{init}").exists()
    assert [traces(name) for name in names] == [[]] * 3


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_an_owner_that_died_once_another_run_started(sig: signal.Signals) -> None:
    script = """
import os, signal, sys
from tests.emulation import Hosts, HostSpec
with Hosts({"a": HostSpec(), "b": HostSpec()}) as hosts:
    hosts["a"].popen(["sleep", "1000"])
    print(hosts.folder.name, os.readlink(f"/proc/{hosts['a'].init_pid}/ns/pid"), flush=True)
    signal.pause()
"""
    with subprocess.Popen([_PYTHON, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        run, namespace = owner.stdout.readline().split()
        owner.send_signal(sig)
        owner.wait(800)
    # The kernel ends the hosts with their owner: no next run is needed for that.
    eventually(lambda: in_pid_namespace(namespace) == [])
    with Hosts({"c": HostSpec()}):
        eventually(lambda: traces(run) == [])


def test_a_host_name_must_be_one() -> None:
    with pytest.raises(ValueError, match="found 'Not_a_host'"):
        Hosts({"Not_a_host": HostSpec()})


def test_a_core_must_exist() -> None:
    with pytest.raises(ValueError, match=r"found \[4096\]"):
        HostSpec(core=4096)


_TASKS = """
import json, os, socket, time
import ray
ray.init(logging_level="ERROR")

@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def where(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass
    return socket.gethostname(), sorted(os.sched_getaffinity(0))

print(json.dumps({
    "found": ray.get([where.remote(1.0) for _ in range(2)]),
    "nodes": sorted(node["NodeName"] for node in ray.nodes() if node["Alive"]),
    "cluster": ray.cluster_resources(),
}))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.soak
def test_a_real_ray_cluster_runs_on_them() -> None:
    shm_bytes = 256 << 20
    specs = {
        "gpu-1": HostSpec(core=_CORES[0], shm_bytes=shm_bytes),
        "cpu-1": HostSpec(core=_CORES[-1], shm_bytes=shm_bytes),
    }
    with Hosts(specs) as hosts:
        address = hosts.start_ray(head="gpu-1", num_gpus={"gpu-1": 1})
        assert address == f"{hosts['gpu-1'].address}:6379"
        before = hosts.cpu_seconds()
        answer = hosts["gpu-1"].run([_PYTHON, "-c", _TASKS], timeout=800, check=True)
        used = hosts.cpu_seconds() - before
        result = json.loads(answer.stdout.splitlines()[-1])
        assert sorted(result["found"]) == [["cpu-1", [_CORES[-1]]], ["gpu-1", [_CORES[0]]]]
        assert result["nodes"] == ["cpu-1", "gpu-1"]
        assert result["cluster"]["CPU"] == 2
        assert result["cluster"]["GPU"] == 1
        # The driver's and two workers' imports come on top of two seconds of tasks; daemons are told apart.
        assert 2.0 < used.work_s < 40.0
        assert 0.0 < used.daemons_s < used.total_s
        hosts.stop_ray()
        assert hosts.ray_address is None
        for host in hosts.values():
            eventually(lambda host=host: len(host.pids()) == 1)  # type: ignore[misc]
            assert "RAY_AUTH_TOKEN" not in host.env


@pytest.mark.ray
def test_a_ray_cluster_that_does_not_come_up_in_time_is_an_error(two: Hosts) -> None:
    with pytest.raises(HostsError, match=r"no Ray head answers at .* on host gpu-1"):
        two.start_ray(head="gpu-1", deadline_s=0.2)
    assert two.ray_address is None
    with Hosts({"head": HostSpec(), "lost": HostSpec()}) as hosts:
        hosts["lost"].kill()
        with pytest.raises(HostsError, match="host lost is dead"):
            hosts.start_ray(head="head")
