"""A program whose data sets and training function print, and fail in several ways.

    python -m tests.programs.printing FOLDER WHO CASE…

WHO starts Ray: ``us`` (the first loader or run), ``program`` or, with RAY_ADDRESS, somebody else. Between cases, it prints a line with the
next one's name to both streams. Errors are shown as Python shows those that nobody catches. It must be in the folder of the checkout.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import ray
import torch

import offload
from tests.helpers import RAY_STARTS_NOTHING_AHEAD

SAMPLES, BAD, FLOOD = 24, 7, 400


class Speaking(torch.utils.data.Dataset[Any]):
    """Prints in all ways at sample 3, and may fail at sample BAD."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        print(f"sample {index} on stdout")
        if index == 3 and not self.fails:
            print("sample 3 on stderr", file=sys.stderr)
            warnings.warn("sample 3 warns", stacklevel=1)
            logging.getLogger("data").warning("sample 3 logs")
            os.write(1, b"sample 3 writes to descriptor 1\n")
            os.write(2, b"sample 3 writes to descriptor 2\n")
            print("half a line of sample 3", end="")
        if self.fails == "flood":
            for _ in range(FLOOD):
                os.write(2, b"Corrupt JPEG data: premature end of data segment\n")
        if index == BAD and self.fails == "getitem":
            raise ValueError("this sample is bad")
        if index == BAD and self.fails == "crash":
            os.abort()
        if index == BAD and self.fails == "hang":
            time.sleep(1000)
        return {"x": torch.ones(1) * index}


def transform(sample: Any) -> Any:
    if sample["x"][0] == BAD:
        raise ValueError("this sample is bad")
    return sample


def collate(samples: Any) -> Any:
    raise ValueError("these samples do not fit")


def initialise(worker: int) -> None:
    raise ValueError("no worker begins")


def train(ctx: offload.Context) -> None:
    print("the function on stdout")
    print("the function on stderr", file=sys.stderr)
    os.write(2, b"the function writes to descriptor 2\n")
    logging.getLogger("function").warning("the function logs")
    logging.getLogger("function").info("nobody wants to read this")
    subprocess.run(["echo", "a program of the function"], check=True)
    model, _ = ctx.prepare(m := torch.nn.Linear(1, 1), torch.optim.SGD(m.parameters(), lr=1e-6))
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["x"]).mean())
            ctx.step()
    for number in range(100):
        print(f"line {number} of the function")
    if ctx.config["fails"]:
        raise ValueError("this step is bad")
    print("its last line", end="")


def fit(folder: Path, data: Any, name: str = "run", *, fails: bool = False) -> None:
    trainer = offload.Trainer(
        train, datasets={"train": data}, batch_size=8, workers=1, train_loop_config={"fails": fails}
    )
    trainer.fit(run_dir=folder / name, quiet=True, overwrite=True)


def load(data: Any, **options: Any) -> None:
    address = None if ray.is_initialized() or "RAY_ADDRESS" in os.environ else "local"
    for _ in offload.DataLoader(data, batch_size=4, num_workers=2, address=address, **options):
        pass


def interrupted() -> None:
    timer = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    load(Speaking("hang"))


def run(case: str, folder: Path) -> None:
    if case == "trainer":
        fit(folder, offload.from_torch(Speaking()))
    elif case == "trainer flood":
        fit(folder, offload.from_torch(Speaking("flood")), "flood")
    elif case == "trainer getitem":
        fit(folder, offload.from_torch(Speaking("getitem")), "getitem")
    elif case == "trainer transform":
        fit(folder, offload.from_torch(Speaking("none"), transform, per_sample=True), "transform")
    elif case == "trainer timeout":
        fit(folder, offload.from_torch(Speaking("hang"), sample_timeout_s=1.0), "timeout")
    elif case == "trainer crash":
        fit(folder, offload.from_torch(Speaking("crash")), "crash")
    elif case == "trainer function":
        fit(folder, offload.from_torch(Speaking("none")), "function", fails=True)
    elif case == "loader":
        load(Speaking())
    elif case in ("loader flood", "loader getitem", "loader crash"):
        load(Speaking(case.split()[1]))
    elif case == "loader timeout":
        load(Speaking("hang"), timeout=2)
    elif case == "loader collate":
        load(Speaking("none"), collate_fn=collate)
    elif case == "loader init":
        load(Speaking("none"), worker_init_fn=initialise)
    elif case == "loader interrupted":
        interrupted()
    elif case.startswith("joined"):
        program = [sys.executable, "-m", __spec__.name, str(folder), "somebody", *case.split(":")[1].split(",")]
        address = ray.get_runtime_context().gcs_address
        subprocess.run(program, env=os.environ | {"RAY_ADDRESS": address}, check=False)
    elif case != "end":
        raise ValueError(case)


def main(folder: Path, who: str, cases: list[str]) -> None:
    if who == "program":
        ray.init(num_cpus=3, include_dashboard=False)
    kept = None if who == "us" else offload.DataLoader(Speaking("none"))  # the Ray of the first lasts
    for case in [*cases, "end"]:
        for stream in (sys.stdout, sys.stderr):
            print(f"=== {case}", file=stream, flush=True)
        try:
            run(case, folder)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    del kept


if __name__ == "__main__":
    os.environ |= {"RAY_AUTH_MODE": "disabled", **RAY_STARTS_NOTHING_AHEAD}
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
