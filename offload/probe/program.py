"""Probe a program that iterates over an :class:`offload.DataLoader`: run it, measure inside its loop, and end it there."""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.errors import ConfigError, OffloadError, RunError, argument
from offload.loader import probing
from offload.loader.job.session import end_unused
from offload.machine import usable_cores
from offload.measure.findings import Findings
from offload.measure.sizes import MeasuredStep
from offload.probe.driver import bar
from offload.probe.work import LoaderWork, SampleWork
from offload.process.interrupts import handled
from offload.train.worker.data.slice_fetcher import PREFETCH_BLOCKS


def probe_program(
    script: Path,
    args: Sequence[str],
    *,
    loader: str,
    address: str | None,
    quiet: bool,
    known: dict[str, Any],
    drain_s: float = probing.DRAIN_S,
    replay_s: float = probing.REPLAY_S,
    then: Callable[[SampleWork | None], None] | None = None,
) -> Findings | None:
    """Measure the loader in the variable ``loader`` of a script; None if the user interrupted it. ``known``: facts to store with the
    findings. ``drain_s``, ``replay_s``: the seconds for the two measurements. ``then`` gets the work of some samples of the loader, which
    this process can repeat; None for an iterable data set.

    Raises ConfigError if the script never iterates over such a loader, RunError if it fails.
    """
    began = time.monotonic()
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    with bar(quiet) as progress:
        task = progress.add_task("starting", total=1.0)
        probe = probing.LoaderProbe(
            name=loader,
            tell=lambda phase, share: progress.update(task, description=phase, completed=share),
            drain_s=drain_s,
            replay_s=replay_s,
        )
        try:
            _run(script, args, probe)
        except KeyboardInterrupt:
            return None
    if not probe.step_s:
        raise ConfigError(
            f"{script} came to its end without iterating over an offload.DataLoader in a variable {loader!r}, or its loop took too few "
            f"batches. {probe.iterated} Name the variable of the training loader ({argument('loader', 'NAME')})."
        )
    if then is not None:
        then(None if probe.source is None else LoaderWork.of(probe.source))
    cuda = torch.cuda.is_available()
    return Findings(
        workload=known["workload"],
        buffered_blocks=PREFETCH_BLOCKS,
        core_seconds=[cpu_s for cpu_s, _ in probe.costs if cpu_s > 0],
        wire_bytes=float(np.median([size for _, size in probe.costs])),
        raw_bytes=0.0,
        ingest_samples_per_s=None,
        stages=[],
        exact_over_auto=None,
        constant=None,
        steps=[MeasuredStep(size=probe.samples, step_s=probe.step_s)],
        blocks=0,
        gradient_bytes=None,
        nodes=1,
        workers=1,
        gradients=[],
        samples_each=0,
        gradients_s=0.0,
        batch_size=probe.samples,
        local_batch_size=probe.samples,
        device=torch.cuda.get_device_name() if cuda else "cpu",
        device_memory_bytes=float(torch.cuda.get_device_properties(0).total_memory) if cuda else None,
        cores=max(round(usable_cores() - min(probe.beside_cpus, 1.0)), 1),
        host_cpus_per_worker=min(probe.beside_cpus, 1.0),
        measured={
            **known["measured"],
            "seconds": round(probe.measuring_s, 1),
            "seconds_with_start": round(time.monotonic() - began, 1),
        },
    )


def _run(script: Path, args: Sequence[str], probe: probing.LoaderProbe) -> None:
    """Run the script as Python would, until the probe ends it."""
    with _as_program(script, args), handled():
        probing.active = probe
        try:
            runpy.run_path(str(script), run_name="__main__")
        except probing.ProbedError:
            pass
        except OffloadError:
            raise
        except SystemExit as error:
            if error.code in (None, 0) and {"-h", "--help"} & set(args):  # it has shown its help
                raise
            if error.code not in (None, 0):
                raise RunError(f"{script} called sys.exit({error.code!r}) before its loader was measured.") from None
        except Exception as error:
            own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(script)]
            line = f" (line {own[-1].lineno})" if own else ""
            raise RunError(
                f"{script} failed before its loader was measured: {type(error).__name__}: {error}{line}."
            ) from None
        finally:
            probing.active = None
            end_unused()


@contextmanager
def _as_program(script: Path, args: Sequence[str]) -> Iterator[None]:
    """A context in which ``sys.argv`` and ``sys.path`` are those of ``python SCRIPT ARGS``."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
