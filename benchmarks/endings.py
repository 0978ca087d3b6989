"""How a run ends on a signal, or when a process that it needs dies: exit code, seconds, and remaining processes.

    python benchmarks/endings.py [--every 1] [--until 20] [-o benchmarks/results/endings.json]

The benchmark starts `python -m offload run` on a tiny training again and again, each time in a process group of its own. At several
moments of the start it sends Ctrl-C once, Ctrl-C twice, SIGTERM, SIGHUP and SIGKILL. Like a terminal, it sends Ctrl-C and SIGHUP to the
group; SIGTERM and SIGKILL go only to the command. In runs that already train it kills Ray's processes. Ten seconds after the command has
ended it counts the remaining processes, which it recognises by an inherited environment variable.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side

SCRIPT = """
import time
import numpy as np
import torch
import offload

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 6400
    def __getitem__(self, i):
        return {"x": np.full(2, i / 6400, dtype=np.float32)}

def train(ctx):
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in ctx.epochs(1000):
        for batch in ctx.batches("train"):
            ctx.backward((model(batch["x"]) ** 2).mean())
            ctx.step()
            time.sleep(0.02)

def build():
    return offload.Trainer(train, datasets={"train": offload.from_torch(Numbers())}, workers=1, batch_size=16)
"""
MARK = "OFFLOAD_ENDINGS"
BETWEEN_S = 0.3  # two presses of Ctrl-C
LEFT_AFTER_S = 10.0
TRAINS_WITHIN_S = 120.0
ENDS_WITHIN_S = 120.0
WAYS = ("Ctrl-C", "Ctrl-C twice", "SIGTERM", "SIGHUP", "SIGKILL")
KILLED = ("gcs_server", "raylet")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """One run.

    Args:
        way: the signal sent, or the process killed.
        at_s: when, in seconds after the command was started.
    """

    way: str
    at_s: float
    exit_code: int | None
    ended_after_s: float
    traceback: bool
    left: list[str]
    said: list[str]


def of_run(mark: str) -> Iterator[psutil.Process]:
    """The live processes of a run."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


def ending(way: str, send: Callable[[int, str], float], folder: Path) -> Ending:
    """Start a run, call ``send``, and record how the run ends. ``send`` returns the seconds from the start to the signal."""
    script = folder / "training.py"
    script.write_text(SCRIPT)
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "offload", "run", str(script), "--run-dir", str(folder / "run")]
    with (folder / "said").open("w+") as said, subprocess.Popen(
        command, stdout=said, stderr=said, env={**os.environ, "RAY_TMPDIR": "/tmp", MARK: mark}, start_new_session=True
    ) as run:  # fmt: skip
        at_s = send(run.pid, mark)
        sent = time.monotonic()
        try:
            run.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            run.kill()
        took_s = time.monotonic() - sent
        time.sleep(LEFT_AFTER_S)
        left = list(of_run(mark))
        names = [_name(each) for each in left]
        for each in left:
            each.kill()
        said.seek(0)
        lines = said.read().splitlines()
    return Ending(
        way=way,
        at_s=round(at_s, 1),
        exit_code=run.returncode,
        ended_after_s=round(took_s, 1),
        traceback=any("Traceback" in line for line in lines),
        left=names,
        said=[line for line in lines if line.strip()][-6:],
    )


def at(moment_s: float, way: str) -> Callable[[int, str], float]:
    """Return a function that sends the signal of ``way`` this long after the start."""

    def send(pid: int, mark: str) -> float:
        began = time.monotonic()
        time.sleep(moment_s)
        number = getattr(signal, way) if way.startswith("SIG") else signal.SIGINT
        for press in range(2 if way.endswith("twice") else 1):
            time.sleep(BETWEEN_S if press else 0.0)
            try:
                (os.kill if number in (signal.SIGTERM, signal.SIGKILL) else os.killpg)(pid, number)
            except ProcessLookupError:
                break
        return time.monotonic() - began

    return send


def killing(name: str, folder: Path) -> Callable[[int, str], float]:
    """Return a function that kills a Ray process once the run trains."""

    def send(pid: int, mark: str) -> float:
        began = time.monotonic()
        while not (folder / "run" / "metrics.jsonl").exists():
            if time.monotonic() - began > TRAINS_WITHIN_S:
                raise TimeoutError("the run never trained")
            time.sleep(0.1)
        (found,) = [each for each in of_run(mark) if _name(each) == name]
        found.kill()
        return time.monotonic() - began

    return send


def _name(process: psutil.Process) -> str:
    try:
        words = process.cmdline() or [process.name()]
    except psutil.Error:
        return "?"
    return next((Path(word).name for word in words if word.endswith(".py")), Path(words[0]).name)


@click.command(help=__doc__)
@click.option("--every", default=1.0, show_default=True, help="Seconds between two moments.")
@click.option("--first", default=0.0, show_default=True)
@click.option("--until", default=20.0, show_default=True)
@click.option("--way", "ways", multiple=True, type=click.Choice([*WAYS, *KILLED]), help="All by default.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(every: float, first: float, until: float, ways: tuple[str, ...], output: Path | None) -> None:
    machine = side_by_side.machine()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # child processes would inherit an ignored signal
    moments = [first + every * number for number in range(int((until - first) / every) + 1)]
    seen: list[Ending] = []
    for way in ways or (*WAYS, *KILLED):
        for moment_s in moments if way in WAYS else [0.0]:
            with tempfile.TemporaryDirectory(prefix="endings-", dir="/tmp") as folder:
                send = at(moment_s, way) if way in WAYS else killing(way, Path(folder))
                seen.append(ending(way, send, Path(folder)))
            print(json.dumps(asdict(seen[-1])), flush=True)
    found = {way: _together([each for each in seen if each.way == way]) for way in ways or (*WAYS, *KILLED)}
    document = {
        "ways": found,
        "command": shlex.join(["python", "benchmarks/endings.py", *sys.argv[1:]]),
        "machine": machine,
        "versions": side_by_side.versions(),
        "runs": [{name: value for name, value in asdict(each).items() if name != "said"} for each in seen],
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    for way, together in found.items():
        print(f"{way}: {together}")


def _together(endings: list[Ending]) -> dict[str, Any]:
    return {
        "runs": len(endings),
        "exit_codes": dict(Counter(str(each.exit_code) for each in endings)),
        "longest_s": max(each.ended_after_s for each in endings),
        "with_traceback": sum(each.traceback for each in endings),
        "with_processes_left": sum(bool(each.left) for each in endings),
    }


if __name__ == "__main__":
    main()
