"""Programs that use an offload.DataLoader on one machine: nothing of Ray is there, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from offload.loader.local.shares import share_of
from tests.helpers import eventually, without_ray

SCRIPT = """
import json, os, sys, time
import torch, offload

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return i * i

class Slow(Squares):
    def __getitem__(self, i):
        print("working", os.getpid(), flush=True)
        time.sleep(3600)

loader = offload.DataLoader(Squares(), batch_size=8)
seen = [value for batch in loader for value in batch.tolist()]
assert seen == [i * i for i in range(64)]
if "ray" in sys.argv:
    import ray
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    assert len(list(loader)) == 8
    ray.shutdown()
else:
    print(json.dumps({"ray": "ray" in sys.modules, "cores": loader.stats().cores}), flush=True)
if "early" in sys.argv:
    held = iter(offload.DataLoader(Slow(), batch_size=8))
if "killed" in sys.argv:
    next(iter(offload.DataLoader(Slow(), batch_size=8)))
"""


def written(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def marked(mark: str) -> list[psutil.Process]:
    """The processes whose environment holds the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("OFFLOAD_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def run(command: list[str], mark: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=without_ray(OFFLOAD_TEST=mark), capture_output=True, text=True, timeout=800, check=False
    )


def test_a_program_imports_no_ray_and_leaves_no_process(tmp_path: Path) -> None:
    """It reads one loader to the end, and leaves another in the middle."""
    mark = uuid.uuid4().hex
    done = run([sys.executable, written(tmp_path), "early"], mark)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["ray"] is False
    assert done.stderr.count("of this machine") == 1  # which engine runs, and how to bring a cluster
    assert "address=" in done.stderr
    eventually(lambda: not marked(mark))


SPEAKING = """
import torch, offload

class Speaking(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, i):
        print(f"sample {i} says {'so ' * 20}")
        return i

for _ in offload.DataLoader(Speaking(), batch_size=4):
    pass
"""


def test_each_line_that_a_data_set_prints_appears_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "speaking.py"
    path.write_text(SPEAKING)
    for flags in ([], ["-u"]):
        done = run([sys.executable, *flags, str(path)], uuid.uuid4().hex)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == sorted(f"sample {i} says {'so ' * 20}" for i in range(400))


def test_a_program_may_start_its_own_ray_later(tmp_path: Path) -> None:
    done = run([sys.executable, written(tmp_path), "ray"], uuid.uuid4().hex)
    assert done.returncode == 0, done.stderr


def test_preprocessing_ends_with_a_killed_program(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    program = subprocess.Popen(
        [sys.executable, written(tmp_path), "killed"],
        env=without_ray(OFFLOAD_TEST=mark),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert any(line.startswith("working") for line in program.stdout)
    program.send_signal(signal.SIGKILL)
    program.wait()
    eventually(lambda: not marked(mark))
    program.stdout.close()


def test_an_interrupted_program_ends_without_words_of_its_processes(tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches the processes of preprocessing, too."""
    mark = uuid.uuid4().hex
    program = subprocess.Popen(
        [sys.executable, written(tmp_path), "killed"],
        env=without_ray(OFFLOAD_TEST=mark), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert program.stdout is not None
    assert any(line.startswith("working") for line in program.stdout)
    os.killpg(program.pid, signal.SIGINT)
    _, said = program.communicate(timeout=800)
    assert said.count("Traceback") == 1, said
    assert "KeyboardInterrupt" in said
    eventually(lambda: not marked(mark))


def test_the_ranks_of_torchrun_share_the_cores(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([sys.executable, *launcher, written(tmp_path)], uuid.uuid4().hex)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [rank["cores"] for rank in told] == [max(len(os.sched_getaffinity(0)) // 2, 1)] * 2
    assert done.stderr.count("of this machine") == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
def test_the_shares_of_all_ranks_are_the_cores(ranks: int) -> None:
    for cores in range(1, 20):
        shares = [share_of(cores, {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}) for rank in range(ranks)]
        assert sum(shares) == max(cores, ranks)
        assert max(shares) - min(shares) <= 1
    assert share_of(7, {}) == share_of(7, {"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "2"}) == 7
