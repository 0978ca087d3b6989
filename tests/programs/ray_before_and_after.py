"""Run by test_ray_settings.py, in a process of its own: a program that uses Ray itself, a run and a loader, one after the other.

    python ray_before_and_after.py RUNS|LOADERS

It checks after each call of offload that the process is as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import ray.data
import torch

import offload
from offload import uncaught
from offload.loader.job import session
from offload.train.cluster.ray_processes import minimal_agents

TRIES = 5


def state(*, numbers: bool = True) -> dict[str, Any]:
    """What offload must leave as it is. ``numbers``: the random state of torch, too, from which a loader draws as torch's does."""
    loggers = {name: found for name, found in logging.root.manager.loggerDict.items() if name in known}
    return {
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "folder": os.getcwd(),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "loggers": {name: (found.level, found.handlers) for name, found in loggers.items() if hasattr(found, "level")},
        "root logger": (logging.root.level, list(logging.root.handlers)),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "path": list(sys.path),
        "asyncio": type(asyncio.get_event_loop_policy()),
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),  # a program's own
        "torch": torch.get_rng_state().tolist() if numbers else None,
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


@contextlib.contextmanager
def unchanged(what: str, *, numbers: bool = True) -> Iterator[None]:
    """A context that must leave the process as it is."""
    before = state(numbers=numbers)
    yield
    after = state(numbers=numbers)
    for name, value in before.items():
        if isinstance(value, dict):
            changed = {key for key in {*value, *after[name]} if value.get(key) != after[name].get(key)}
            assert not changed, (
                f"{what} changes {name}: {[(key, value.get(key), after[name].get(key)) for key in changed]}"
            )
        assert after[name] == value, f"{what} changes {name}"
    print(what, flush=True)


def train(ctx: offload.Context) -> None:
    """Train a little, or fail."""
    if ctx.config["fails"]:
        raise ValueError("this training fails")
    model = torch.nn.Linear(1, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["x"][:, None]).mean())
            ctx.step()


def fit(*, fails: bool = False, **named: Any) -> None:
    """Run a training of two steps."""
    rows = [{"x": np.float32(i)} for i in range(8)]
    trainer = offload.Trainer(
        train,
        datasets={"train": offload.from_torch(rows)},
        workers=1,
        batch_size=4,
        train_loop_config={"fails": fails},
    )
    trainer.fit(run_dir=tempfile.mkdtemp(), quiet=True, **named)


@ray.remote
def doubled(number: int) -> int:
    """A task of the user's."""
    return 2 * number


def use() -> None:
    """Use the user's Ray."""
    assert ray.get(doubled.remote(4)) == 8


def use_own() -> None:
    """Start a Ray as users do, use it and stop it."""
    start()
    use()
    ray.shutdown()


def start() -> None:
    """Start a Ray as users do. On a busy machine, Ray gives up after half a minute."""
    for _ in range(TRIES):
        try:
            with minimal_agents():
                ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
        else:
            return
    raise TimeoutError("Ray did not start")


class Numbers(torch.utils.data.Dataset[int]):
    """The numbers up to 40."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


def read() -> None:
    """Read an epoch."""
    assert torch.cat(list(offload.DataLoader(Numbers(), batch_size=8))).tolist() == list(range(40))


def runs() -> None:
    """Runs, with the user's own Ray before, between and after them."""
    use_own()
    with unchanged("a run after the user's Ray"):
        fit()
    assert ray.data.range(8).count() == 8  # starts a Ray
    ray.shutdown()
    uncaught.install()  # which the first error of offload's does
    with unchanged("a run that fails"), contextlib.suppress(offload.RunError):
        fit(fails=True)
    with unchanged("a run that is refused"), contextlib.suppress(offload.ConfigError):
        fit(address="127.0.0.1:1")
    start()
    with unchanged("a run in the user's Ray"):
        fit()
    use()
    ray.shutdown()


def loaders() -> None:
    """Loaders, and the user's Ray while their Ray is still there, instead of it and after it."""
    with unchanged("a loader, until its Ray has ended", numbers=False):
        read()
        session.end_unused()
    assert not ray.is_initialized()
    use_own()
    read()
    ray.init(ignore_reinit_error=True, logging_level=logging.ERROR)  # the loader's
    with unchanged("a loader whose Ray the program uses", numbers=False):
        ours = ray.get_runtime_context().gcs_address
        number = ray.put(5)
        assert ray.data.range(8).count() == 8
        session.end_unused()  # but the program uses its Ray
        assert (ray.get_runtime_context().gcs_address, ray.get(number)) == (ours, 5)
        read()
        session.end_unused()
    ray.shutdown()
    session.end_unused()
    read()
    logging.getLogger("ray").setLevel(logging.DEBUG)
    ray.shutdown()  # the user's code ends the loader's
    assert logging.getLogger("ray").level == logging.DEBUG  # as the user has set it
    start()
    session.end_unused()
    use()  # the loader's end is not the end of the user's Ray
    with unchanged("a loader in the user's Ray", numbers=False):
        read()
        session.end_unused()
    use()
    ray.shutdown()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    known = {name for name, found in logging.root.manager.loggerDict.items() if isinstance(found, logging.Logger)}
    assert {"offload", "ray"} & known
    {"RUNS": runs, "LOADERS": loaders}[sys.argv[1]]()
    print("done")
