"""A DataLoader on several hosts, one of which is lost while another one joins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation import Hosts, HostSpec
from tests.helpers import RAY_STARTS_NOTHING_AHEAD, ROOT, eventually, require_hosts

pytestmark = [pytest.mark.hosts, pytest.mark.soak]

PROGRAM = """
import json, socket, sys, time
from pathlib import Path
import torch, offload

folder = Path(sys.argv[1])

class Where(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, i):
        time.sleep(0.002)
        return i, socket.gethostname()

def meet(name):
    (folder / f"at-{name}").touch()
    while not (folder / f"past-{name}").exists():
        time.sleep(0.05)

seen, hosts = [], set()
loader = offload.DataLoader(Where(), batch_size=8)

def read(until):
    \"\"\"Whole epochs, until samples came from there.\"\"\"
    while until not in hosts:
        values = []
        for numbers, where in loader:
            values += numbers.tolist()
            hosts.update(where)
            if until == "cpu-1" and until in where and not (folder / "at-lost").exists():
                meet("lost")
        seen.append(values)

read("cpu-1")
meet("joined")
read("cpu-2")
print(json.dumps({"right": all(values == list(range(400)) for values in seen), "hosts": sorted(hosts)}))
"""


@pytest.fixture(autouse=True, scope="module")
def _hosts_can_be_emulated() -> None:
    require_hosts()


def test_batches_stay_whole_and_in_order_while_hosts_leave_and_join(tmp_path: Path) -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    names = ("gpu-1", "cpu-1", "cpu-2")
    env = {"PYTHONPATH": str(ROOT)}
    with Hosts({name: HostSpec(core=cores, shm_bytes=256 << 20) for name in names}) as hosts:
        hosts.start_ray(
            head="gpu-1", workers=["cpu-1"], num_cpus=dict.fromkeys(names, 1), env={**env, **RAY_STARTS_NOTHING_AHEAD}
        )
        program = hosts["gpu-1"].popen([sys.executable, "-c", PROGRAM, str(tmp_path)], env=env, stdout=subprocess.PIPE)

        def meets(name: str) -> None:
            eventually(lambda: (tmp_path / f"at-{name}").exists() or program.poll() is not None)
            assert program.poll() is None

        meets("lost")  # with batches of cpu-1 on their way
        hosts["cpu-1"].kill()
        (tmp_path / "past-lost").touch()
        meets("joined")
        hosts.join_ray("cpu-2", env={**env, **RAY_STARTS_NOTHING_AHEAD})
        (tmp_path / "past-joined").touch()
        said = program.communicate(timeout=800)[0]
    assert program.returncode == 0
    told = json.loads(said.strip().splitlines()[-1])
    assert told["right"]
    assert {"cpu-1", "cpu-2"} <= set(told["hosts"])
