"""A training script of one machine, as `benchmarks/one_machine.py` starts it: it reads a loader, and prints what it measured.

Everything counts, from the start of the process: imports, the loader, each batch, and the end, which the process that started it measures.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

BEGAN = time.monotonic()

STEADY_FROM, STEADY_TO = 0.4, 0.9  # of the batches: before that, processes start, and at the end they run out of work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--row", required=True, choices=("plain", "torch", "offload", "offload-ray", "trainer", "trainer-ray")
    )
    parser.add_argument("--workers", type=int, required=True)
    known, rest = parser.parse_known_args()

    import torch
    import torch.utils.data

    from benchmarks import tables
    from benchmarks.rows import protocol
    from benchmarks.rows.dataloader import OfTables, Samples

    task = protocol.parse(rest)
    if known.row.startswith("trainer"):
        _train(task, None if known.row == "trainer" else "local")
        return
    if known.row in ("plain", "torch"):
        make: Any = torch.utils.data.DataLoader
    else:
        import offload

        make = offload.DataLoader
    imported = time.monotonic()
    torch.set_num_threads(1)
    options: dict[str, Any] = {} if known.row == "plain" else {"num_workers": known.workers}
    if known.row == "offload-ray":
        options["address"] = "local"
    if task.workload in tables.NAMES:
        loader = make(OfTables(task), batch_size=None, **options)
    else:
        loader = make(Samples(task), batch_size=task.batch_size, **options)
    count = -(-task.samples // task.batch_size)
    first = at = 0.0
    samples = label_sum = 0
    steady: list[tuple[float, int, float]] = []  # time, samples, CPU seconds
    memory = 0
    for number, batch in enumerate(loader):
        at = time.monotonic()
        first = first or at
        if number in (int(STEADY_FROM * count), int(STEADY_TO * count)):
            steady.append((at, samples, _cpu_s()))
            if len(steady) == 2:
                memory = _memory_bytes()
        samples += len(batch["label"])
        label_sum += int(batch["label"].sum())
    (from_s, from_samples, from_cpu_s), (to_s, to_samples, to_cpu_s) = steady
    told = {
        "imports_s": imported - BEGAN,
        "first_batch_s": first - BEGAN,
        "samples_per_s": (to_samples - from_samples) / (to_s - from_s),
        "cpu_ms_per_sample": 1e3 * (to_cpu_s - from_cpu_s) / (to_samples - from_samples),
        "memory_mb": memory / 1e6,
        "samples": samples,
        "label_sum": label_sum,
        "last_batch_at": at,
    }
    print(protocol.ANSWER + json.dumps(told), flush=True)


def _train(task: Any, address: str | None) -> None:
    """A Trainer in the place of the loader. Its figures are those of the worker: the first step, and the rate."""
    import torch

    import offload
    from benchmarks.rows import protocol
    from benchmarks.rows.offload_row import data

    imported = time.monotonic()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        offload.Trainer(
            _steps,
            datasets={"train": data(task)},
            workers=1,
            batch_size=task.batch_size,
            train_loop_config={"task": asdict(task), "answer": str(answer)},
        ).fit(run_dir=Path(folder) / "run", address=address, quiet=True)
        told = json.loads(answer.read_text())
    told |= {"imports_s": imported - BEGAN, "first_batch_s": told["first_batch_s"] - BEGAN}
    print(protocol.ANSWER + json.dumps(told), flush=True)


def _steps(ctx: Any) -> None:
    import torch

    model, _ = ctx.prepare(net := torch.nn.Linear(1, 1), torch.optim.SGD(net.parameters(), lr=1e-6))
    count = -(-ctx.config["task"]["samples"] // ctx.config["task"]["batch_size"])
    first = at = 0.0
    samples = label_sum = 0
    steady: list[tuple[float, int]] = []
    for number, batch in enumerate(ctx.batches("train")):
        ctx.backward(model(torch.ones(1, 1)).sum())
        ctx.step()
        at = time.monotonic()
        first = first or at
        if number in (int(STEADY_FROM * count), int(STEADY_TO * count)):
            steady.append((at, samples))
        samples += len(batch["label"])
        label_sum += int(batch["label"].sum())
    (from_s, from_samples), (to_s, to_samples) = steady
    told = {
        "first_batch_s": first,
        "samples_per_s": (to_samples - from_samples) / (to_s - from_s),
        "samples": samples,
        "label_sum": label_sum,
        "last_batch_at": at,
    }
    Path(ctx.config["answer"]).write_text(json.dumps(told))


def _tree() -> "list[psutil.Process]":
    import psutil

    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _cpu_s() -> float:
    """CPU seconds of this process and its living descendants."""
    import psutil

    seconds = 0.0
    for process in _tree():
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        seconds += times.user + times.system
    return seconds


def _memory_bytes() -> int:
    """The memory of this process and its descendants: what several share counts once."""
    size = 0
    for process in _tree():
        try:
            with open(f"/proc/{process.pid}/smaps_rollup") as file:
                size += sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
        except OSError:
            continue
    return size


if __name__ == "__main__":
    main()
