"""Programs that use offload.DataLoader: what they print, how they end, and that nothing is left of them."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers import MARK, ROOT, eventually, marked, without_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DEADLINE_S = 800.0

ALONE = """
import multiprocessing, os, sys
import torch, offload

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return torch.tensor(i * i), os.getpid()

class Indices(Squares):
    def __getitems__(self, indices):
        return indices

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(28, 28)

def read(loader, queue):
    queue.put(sorted(int(square) for squares, _ in loader for square in squares))

if __name__ == "__main__":
    loader = offload.DataLoader(Squares(), batch_size=8, shuffle=True)
    seen = []
    for epoch in range(2):
        for squares, processes in loader:
            assert os.getpid() not in processes.tolist()
            seen += squares.tolist()
    assert sorted(seen) == sorted(2 * [i * i for i in range(40)])
    print(loader.stats().batches, "batches")
    if "spawn" in sys.argv:
        spawning = multiprocessing.get_context("spawn")
        queue = spawning.Queue()
        child = spawning.Process(target=read, args=(loader, queue))
        child.start()
        assert queue.get() == [i * i for i in range(40)]
        child.join()
    # The program ends in the middle of iterations, one with large orders under way, and one whose readers never end.
    large = offload.DataLoader(Indices(), batch_sampler=[[0] * 40_000] * 1000, collate_fn=len)
    endless = offload.DataLoader(Endless(), batch_size=16, num_workers=2, persistent_workers=True)
    held = [iter(loader), iter(large), iter(endless)]
    assert next(held[1]) == 40_000 and next(held[2]).shape == (16, 28, 28)
    if "raise" in sys.argv:
        raise RuntimeError("the training failed")
    if "kill" in sys.argv:
        os.kill(os.getpid(), 9)
"""

RANKS = """
import json, os, sys
import torch, torch.distributed, offload
from torch.utils.data import DistributedSampler

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 41
    def __getitem__(self, i):
        return i

class Shared(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(int(os.environ["RANK"]), 12, int(os.environ["WORLD_SIZE"]))

def main(*place):
    torch.distributed.init_process_group("gloo", **dict(zip(("rank", "world_size"), place)))
    rank = torch.distributed.get_rank()
    sampler = DistributedSampler(Numbers(), shuffle=True, seed=2)
    loader = offload.DataLoader(Numbers(), batch_size=4, sampler=sampler, address="local")
    seen, waits = [], "late" in sys.argv
    if waits and rank == 1:
        torch.distributed.barrier()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            if waits and rank == 0:
                torch.distributed.barrier()
                waits = False
            total = batch.sum()
            torch.distributed.all_reduce(total)
            seen += batch.tolist()
    import ray
    shared = [value for batch in offload.DataLoader(Shared(), batch_size=4, num_workers=1, address="local") for value in batch.tolist()]
    told = {"rank": rank, "seen": seen, "shared": shared, "cluster": ray.get_runtime_context().gcs_address}
    with open(os.path.join(sys.argv[1], f"rank{rank}.json"), "w") as file:
        json.dump(told, file)
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    if "spawn" in sys.argv:  # the ranks find nothing about their place in the environment
        import socket
        with socket.create_server(("127.0.0.1", 0)) as port:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port.getsockname()[1]))
        torch.multiprocessing.spawn(main, args=(2,), nprocs=2)
    else:
        main()
"""

CELLS = [
    """
import torch, offload

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return {"square": torch.tensor([float(i * i)])}

loader = offload.DataLoader(Squares(), batch_size=8, shuffle=True)

def squares():
    return sorted(square for batch in loader for square in batch["square"].flatten().tolist())
""",
    "assert squares() == [i * i for i in range(40)]",
    """
def train(ctx):
    model = torch.nn.Linear(1, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["square"]).square().mean())
            ctx.step()
    ctx.report(steps=ctx.global_step)

data = {"train": offload.from_torch(Squares())}
offload.Trainer(train, datasets=data, batch_size=8).fit(run_dir="run", quiet=True).metrics["steps"]
""",
    "squares() == [i * i for i in range(40)]",
]

NOTEBOOK = f"""
import nbformat, nbclient
cells = [nbformat.v4.new_code_cell(text) for text in {CELLS!r}]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout={DEADLINE_S:.0f}).execute()
for cell in cells:
    for output in cell.outputs:
        if output.output_type == "execute_result":
            print(output.data["text/plain"])
"""


def run(command: Sequence[str], folder: Path, mark: str) -> subprocess.CompletedProcess[str]:
    env = without_ray(**{MARK: mark})
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        pytest.param("raise", 1, "the training failed", marks=pytest.mark.soak),
        pytest.param("spawn", 0, "", marks=pytest.mark.soak),
        ("kill", -9, ""),
    ],
)
def test_nothing_is_left_of_a_program_however_it_ends(tmp_path: Path, how: str, code: int, said: str) -> None:
    """``spawn``: a process that the program has spawned reads the same loader."""
    mark = uuid.uuid4().hex
    done = run([sys.executable, script(tmp_path, ALONE), how], tmp_path, mark)
    assert done.returncode == code, done.stderr
    assert done.stdout in ("10 batches\n", "")
    assert said in done.stderr
    eventually(lambda: not marked(mark))


@pytest.mark.parametrize("how", ["late", pytest.param("spawn", marks=pytest.mark.soak)])
def test_the_ranks_of_a_job_share_one_ray_and_get_their_own_samples(tmp_path: Path, how: str) -> None:
    """``late``: under torchrun, and rank 1 comes when the feed that rank 0 made has taken all CPUs."""
    mark = uuid.uuid4().hex
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=0",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    command = [sys.executable, *([] if how == "spawn" else launcher), script(tmp_path, RANKS), str(tmp_path), how]
    done = run(command, tmp_path, mark)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert told[0]["cluster"] == told[1]["cluster"]
    assert [rank["shared"] for rank in told] == [[*range(0, 12, 2)], [*range(1, 12, 2)]]
    for epoch in range(2):  # 41 samples on two ranks: the sampler gives one of them twice
        of_epoch = [set(rank["seen"][21 * epoch : 21 * (epoch + 1)]) for rank in told]
        assert of_epoch[0] | of_epoch[1] == set(range(41))
    eventually(lambda: not marked(mark))


@pytest.mark.slow
def test_batches_of_another_node_come_directly_and_in_any_case() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.loader_on_two_nodes"],
        capture_output=True, text=True, timeout=800, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"after its sender died": True, "iterable": True, "without the node": True}


@pytest.mark.soak
def test_cells_of_a_notebook_define_data_sets_and_a_trainer_gets_the_cores_of_an_idle_loader(tmp_path: Path) -> None:
    """It repeats what shorter tests show apart: tests/test_notebook.py runs a trainer of cells, and tests/test_kinds.py trainers in a Ray
    with idle loaders."""
    mark = uuid.uuid4().hex
    done = run([sys.executable, script(tmp_path, NOTEBOOK)], tmp_path, mark)
    assert (done.returncode, done.stdout) == (0, "5.0\nTrue\n"), done.stderr
    eventually(lambda: not marked(mark))
