"""Predicted against measured: the joint model's samples/s before each run, and the run's own.

    python benchmarks/prediction.py [-o benchmarks/results/prediction.json]

`offload probe` measures each workload once, on one emulated host with a *paced accelerator*. From this profile the benchmark predicts
every case before it runs it. Cases have one to three hosts with a CPU quota each, one or two workers, two batch sizes, and accelerators
from starved to the bottleneck. The result also has the prediction of AdaptDL's model, which knows only the step.

A machine's speed drifts by a fifth within minutes. So a plain loop runs on each host for some seconds before and after the probe and
before each case. It shows how fast the core is now, and the prediction takes that as the node's `core_speed`. The same loop after the
case shows whether that still held. If the speed is off by more than 8 %, the machine that ran is not the one predicted, and the benchmark
repeats the case, up to twice. The result also records the discarded tries, with their errors. The same rule holds for a probe, which is
also repeated if its own error bar is wider than that.

    python benchmarks/prediction.py --here 2 --workload blur-uint8 --seconds 20 --loop-seconds 5

measures one case in a hundred seconds, on this machine as it is, without emulated hosts and without Ray: one worker that starves beside
all cores. A short probe comes first, then so many runs. Nothing is repeated: the prediction is that for the cores that other programs left
during the run.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import workloads
from benchmarks.rows import protocol
from benchmarks.rows.predicted import Arrivals, answered, trainer
from benchmarks.side_by_side import ENVIRONMENT, ROOT, SHM_BYTES, machine, versions
from offload.machine import usable_cores
from offload.model import GradientNoise, JointGoodput, NodeType, Profile, Shape
from offload.notebook import probe
from tests.emulation import Host, Hosts, HostSpec
from tests.programs import cpu_minutes

SCRIPT = "benchmarks/rows/predicted.py"
ALPHA_S = 0.01  # of the paced accelerator, per step; at most a quarter of the step
# While slow hosts still start their workers, preprocessing gains a lead, which must be used up within 40 % of the samples. So two workers
# on such hosts get accelerators that are fast enough for that.
RUN_S = 75.0
LEAST_BATCHES = 40
SPEED_S = 20.0
BRIDGE_GBPS = 20.0  # the emulated hosts' network; nothing here comes near it
TRAIN_RESOURCE = '{"train_host": 1}'
TIMEOUT_S = 400.0
STEADY = 0.08  # relative change of the cores' speed during a case
TRIES = 3
# With --here: seconds of the probe's measurements, of a plain loop before it counts, and a batch that a core makes in half a second.
HERE_PROBE_S, HERE_LEAD_S, HERE_BATCH = 12.0, 3.0, 16
LOOK_S = 0.5
BUSY = ("user", "nice", "system", "irq", "softirq", "steal")  # the kinds of time in which a core is not idle


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination. ``pace`` is the accelerators' rate ÷ the input ceiling as probed: above 1 they starve."""

    workload: str
    gpu_hosts: tuple[float, ...]
    cpu_hosts: tuple[float, ...] = ()
    pace: float
    batch_size: int

    @property
    def workers(self) -> int:
        """The number of workers: one on each host that stands for a GPU instance."""
        return len(self.gpu_hosts)

    @property
    def quotas(self) -> dict[str, float]:
        """CPU quota by host."""
        gpu = {f"gpu-{i + 1}": quota for i, quota in enumerate(self.gpu_hosts)}
        return gpu | {f"cpu-{i + 1}": quota for i, quota in enumerate(self.cpu_hosts)}


THIRD = 0.62  # quota of each of three hosts on two cores, which leaves a little for the machine


def cases(names: Sequence[str]) -> list[Case]:
    """Return six cases for each workload, with two batch sizes. A fast input gets larger batches: a quota stops a host once in each tenth
    of a second. With only one or two steps in that time, a case would measure whether two hosts stop together or in turns."""
    made = []
    for name in names:
        small, large = (256, 512) if name == "jpeg" else (32, 64)
        made += [
            Case(workload=name, gpu_hosts=(1.0,), pace=4.0, batch_size=large),
            Case(workload=name, gpu_hosts=(0.95,), cpu_hosts=(0.95,), pace=4.0, batch_size=small),
            Case(workload=name, gpu_hosts=(0.95,), cpu_hosts=(0.95,), pace=1.0, batch_size=large),
            Case(workload=name, gpu_hosts=(0.95,), cpu_hosts=(0.95,), pace=0.5, batch_size=small),
            Case(workload=name, gpu_hosts=(THIRD,), cpu_hosts=(THIRD, THIRD), pace=2.0, batch_size=large),
            Case(workload=name, gpu_hosts=(THIRD, THIRD), cpu_hosts=(THIRD,), pace=4.0, batch_size=large),
        ]
    return made


@click.command(help=__doc__)
@click.option("--workload", "names", multiple=True, type=click.Choice(workloads.NAMES), help="Default: all.")
@click.option(
    "--data", type=click.Path(path_type=Path), default=Path("/tmp/offload-benchmark-jpegs"), show_default=True
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
@click.option("--resume", is_flag=True, help="Keep the cases in the output file, and run only the missing ones.")
@click.option(
    "--cases", "count", type=click.IntRange(min=1), help="The first so many cases of each workload. [default: all]"
)
@click.option("--seconds", default=RUN_S, show_default=True, type=click.FloatRange(min=10), help="Of a case, about.")
@click.option(
    "--loop-seconds", default=SPEED_S, show_default=True, type=click.FloatRange(min=1), help="Of each plain loop."
)
@click.option(
    "--tries",
    default=TRIES,
    show_default=True,
    type=click.IntRange(min=1),
    help="Of a case or probe while speeds drift.",
)
@click.option(
    "--here",
    "runs",
    type=click.IntRange(min=1),
    help="So many runs on this machine as it is, without Ray, instead of cases.",
)
def main(
    names: tuple[str, ...],
    data: Path,
    output: Path | None,
    resume: bool,
    count: int | None,
    seconds: float,
    loop_seconds: float,
    tries: int,
    runs: int | None,
) -> None:
    names = names or workloads.NAMES
    chosen = [case for name in names for case in cases([name])[:count]]
    folder = workloads.jpeg_files(data) if "jpeg" in names else None
    rows: list[dict[str, Any]] = []
    profiles: dict[str, dict[str, Any]] = {}
    if runs is not None:
        for name in names:
            profiles[name], measured = _here(name, folder, runs, seconds, loop_seconds)
            rows += measured
        if output is not None:
            output.write_text(json.dumps(_document(rows, profiles), indent=1) + "\n")
        _show(rows)
        return
    if resume and output is not None and output.exists():
        before = json.loads(output.read_text())
        rows = [row for row in before["cases"] if _case_of(row) in chosen]
        profiles = before["profiles"]
    for case in chosen:
        if case in map(_case_of, rows):
            continue
        if case.workload not in profiles:
            found: list[dict[str, Any]] = []
            while len(found) < tries and not (found and found[-1]["unsure"] <= STEADY):
                found.append(_probe(case.workload, folder, loop_seconds))
            profiles[case.workload] = min(found, key=lambda each: each["unsure"])
        attempts: list[dict[str, Any]] = []
        while len(attempts) < tries and not (attempts and attempts[-1]["drift"] <= STEADY):
            attempts.append(_predict_and_run(case, profiles[case.workload], folder, seconds, loop_seconds))
        row = min(attempts, key=lambda each: each["drift"])
        row["set_aside"] = [each for each in attempts if each is not row]
        rows.append(row)
        print(
            f"{len(rows)}: {case.workload} {row['hosts']}: predicted {row['predicted']:.1f}, measured {row['measured']:.1f} "
            f"({row['error']:+.1%}); AdaptDL {row['adaptdl']:.1f}; drift {row['drift']:.1%}, "
            f"{len(attempts) - 1} set aside",
            flush=True,
        )
        if output is not None:
            output.write_text(json.dumps(_document(rows, profiles), indent=1) + "\n")
    _show(rows)


def _case_of(row: dict[str, Any]) -> Case:
    """Return the case of a row of an earlier result. JSON has no tuples."""
    given: dict[str, Any] = {field.name: row[field.name] for field in fields(Case)}
    given.update({name: tuple(value) for name, value in given.items() if isinstance(value, list)})
    return Case(**given)


def _document(rows: list[dict[str, Any]], profiles: dict[str, dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows]
    return {
        "cases": rows,
        "error": {"median": statistics.median(errors), "worst": max(errors)},
        "profiles": profiles,
        "accelerator": "paced accelerator",
        "machine": machine(),
        "versions": versions(),
        "command": f"python {' '.join(sys.argv)}",
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="samples/s")
    for name in (
        "workload",
        "hosts",
        "workers",
        "batch",
        "pace",
        "predicted",
        "measured",
        "error",
        "AdaptDL ÷ measured",
    ):
        table.add_column(name, justify="left" if name in ("workload", "hosts") else "right")
    for row in rows:
        table.add_row(
            row["workload"], row["hosts"], str(row["workers"]), str(row["batch_size"]), f"{row['pace']:g}",
            f"{row['predicted']:,.1f}", f"{row['measured']:,.1f}", f"{row['error']:+.1%}", f"{row['adaptdl'] / row['measured']:.1f}",
        )  # fmt: skip
    Console(width=140).print(table)
    errors = [abs(row["error"]) for row in rows]
    print(f"error: median {statistics.median(errors):.1%}, worst {max(errors):.1%} over {len(errors)} cases")


def _probe(workload: str, data: Path | None, loop_s: float) -> dict[str, Any]:
    """Probe a workload on one host. Returns its profile, the speed of the core at the time, and the accelerator of the probe."""
    with Hosts({"gpu-1": HostSpec(core=0, shm_bytes=SHM_BYTES)}) as hosts:
        host = hosts["gpu-1"]
        before = _speeds(hosts, workload, data, loop_s)["gpu-1"]
        beta = 0.25 / before
        argv = [*_arguments(workload, data, 1_000_000, 64), f"--alpha={ALPHA_S}", f"--beta={beta}"]
        done = host.run(
            [sys.executable, "-m", "offload", "probe", SCRIPT, "--json", "--quiet", "--", *argv],
            env={**ENVIRONMENT, "RAY_AUTH_MODE": "disabled"}, cwd=ROOT, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
        after = _speeds(hosts, workload, data, loop_s)["gpu-1"]
    document = json.loads(done.stdout)
    return {
        "document": document,
        "plain": statistics.mean((before, after)),
        "unsure": max(abs(after / before - 1), document["uncertainty"]["core_seconds_per_sample"]),
        "alpha_s": ALPHA_S,
        "beta_s": beta,
    }


def _predict_and_run(
    case: Case, probed: dict[str, Any], data: Path | None, seconds: float, loop_s: float
) -> dict[str, Any]:
    profile = Profile.from_document(probed["document"])
    specs = {name: HostSpec(cpus=quota, shm_bytes=SHM_BYTES) for name, quota in case.quotas.items()}
    if len(specs) <= 2 and max(case.quotas.values()) >= 0.9:
        specs = {
            name: HostSpec(core=core, cpus=None if quota >= 1 else quota, shm_bytes=SHM_BYTES)
            for core, (name, quota) in enumerate(case.quotas.items())
        }
    with Hosts(specs) as hosts:
        # A host's speed: the samples/s of a plain loop under its quota, divided by those of the probed core.
        speeds = {name: rate / probed["plain"] for name, rate in _speeds(hosts, case.workload, data, loop_s).items()}
        predicted, alone, pace = _predict(case, profile, probed, speeds)
        samples = int(max(LEAST_BATCHES * case.batch_size, seconds * predicted))
        samples -= samples % case.batch_size
        measured = _run(hosts, case, data, samples, pace)
        after = {name: rate / probed["plain"] for name, rate in _speeds(hosts, case.workload, data, loop_s).items()}
    return _row(case, (speeds, after), (predicted, measured, alone), samples)


def _row(
    case: Case, speeds: tuple[dict[str, float], dict[str, float]], rates: tuple[float, float, float], samples: int
) -> dict[str, Any]:
    """The result of a case. ``speeds``: of the cores before it and after it. ``rates``: samples/s as predicted, as measured, and by
    AdaptDL's model."""
    (before, after), (predicted, measured, alone) = speeds, rates
    return {
        **asdict(case),
        "hosts": ", ".join(f"{name} {quota:g}" for name, quota in case.quotas.items()),
        "workers": case.workers,
        "core_speeds": before,
        "core_speeds_after": after,
        "drift": abs(sum(after.values()) / sum(before.values()) - 1),
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1,
        "adaptdl": alone,
        "samples": samples,
    }


def _predict(
    case: Case, profile: Profile, probed: dict[str, Any], speeds: dict[str, float]
) -> tuple[float, float, tuple[float, float]]:
    """Return (samples/s by the joint model, samples/s by AdaptDL's, alpha and beta of the paced accelerators)."""
    nodes = {
        NodeType(
            name=name, vcpus=max(1, int(case.quotas[name])), memory_gib=8, network_gbps=BRIDGE_GBPS, usd_per_hour=1.0, core_speed=speed,
            gpus=int(name.startswith("gpu")), gpu_model="paced" if name.startswith("gpu") else None,
        ): 1
        for name, speed in speeds.items()
    }  # fmt: skip
    shape = Shape(nodes)
    ceiling = profile.input.samples_per_s(shape, case.workers)
    local = case.batch_size // case.workers
    # The accelerators together take `pace` times what the input delivers.
    step_s = case.workers * local / (case.pace * ceiling)
    alpha = min(ALPHA_S, step_s / 4)
    speed = (ALPHA_S + probed["beta_s"] * local) / step_s
    step = profile.step_time.on_faster_device(speed)
    joint = JointGoodput(step, None, ceiling, overlap=profile.overlap)
    at = (case.workers, case.workers, local, 0)
    return joint.throughput(*at), _adaptdl(step, case, local), (alpha, (step_s - alpha) / local)


def _adaptdl(step: Any, case: Case, local: int) -> float:
    """Return the samples/s that AdaptDL's own code predicts with the same step."""
    np.int = int  # type: ignore[attr-defined]  # AdaptDL predates numpy 1.24
    from adaptdl import goodput

    perf = goodput.PerfParams(
        step.alpha_compute,
        step.beta_compute,
        step.alpha_inter,
        step.beta_inter,
        step.alpha_intra,
        step.beta_intra,
        step.gamma,
    )
    noise = GradientNoise(1.0, 1.0, case.batch_size)
    function = goodput.GoodputFunction(perf, goodput.GradParams(noise.sqr, noise.var), case.batch_size)
    return float(function.throughput(*map(np.asarray, (case.workers, case.workers, local, 0))))


def _run(hosts: Hosts, case: Case, data: Path | None, samples: int, pace: tuple[float, float]) -> float:
    head = "gpu-1"
    marked = {name: [f"--resources={TRAIN_RESOURCE}"] for name in hosts if name.startswith("gpu")}
    hosts.start_ray(head=head, env=ENVIRONMENT, num_cpus=dict.fromkeys(hosts, 1), extra_args=marked)
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            *_arguments(case.workload, data, samples, case.batch_size), f"--alpha={pace[0]}", f"--beta={pace[1]}",
            f"--workers={case.workers}", f"--answers={folder}", "--on-hosts",
        ]  # fmt: skip
        hosts[head].run(
            [sys.executable, "-m", "offload", "run", SCRIPT, "--quiet", f"--run-dir={folder}/run", "--", *argv],
            env=ENVIRONMENT, cwd=ROOT, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
        return sum(rank.samples_per_s() for rank in answered(Path(folder)))


def _here(
    workload: str, data: Path | None, runs: int, seconds: float, loop_s: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Probe a workload on all cores of this machine, then run it with one worker that starves. Returns the profile and a row for each run.

    The probe counts CPU time. So plain loops around it and around each run say how fast the cores are by their CPU time, and the prediction
    is that for the cores that other programs left during the run's steady state.
    """
    cores = usable_cores()
    case = Case(workload=workload, gpu_hosts=(float(cores),), pace=4.0, batch_size=HERE_BATCH)
    with contextlib.closing(_Others()) as others, _loops(workload, data, loop_s, cores) as rates:
        around = [rates()]
        beta = 0.25 / around[0][1]
        task = protocol.Task(
            workload=workload, samples=1_000_000, batch_size=HERE_BATCH, alpha_s=ALPHA_S, beta_s=beta,
            data=None if data is None else str(data),
        )  # fmt: skip
        document = probe(trainer(task), name=workload, seconds=HERE_PROBE_S, quiet=True).document
        around.append(rates())
        cpu_rates = [cpu_rate for _, cpu_rate in around]
        probed = {
            "document": document,
            "plain": statistics.mean(cpu_rates) / cores,
            "unsure": max(abs(cpu_rates[1] / cpu_rates[0] - 1), document["uncertainty"]["core_seconds_per_sample"]),
            "alpha_s": ALPHA_S,
            "beta_s": beta,
        }
        profile = Profile.from_document(document)
        rows: list[dict[str, Any]] = []
        for _ in range(runs):
            by_clock, by_cpu = around[-1]
            before = by_cpu / cores / probed["plain"]
            expected, _, (alpha, beta) = _predict(case, profile, probed, {"gpu-1": before})
            samples = int(max(LEAST_BATCHES * HERE_BATCH, seconds * expected * by_clock / by_cpu))
            samples -= samples % HERE_BATCH
            arrivals = _run_here(replace(task, samples=samples, alpha_s=alpha, beta_s=beta))
            around.append(rates())
            after = around[-1][1] / cores / probed["plain"]
            left = others.left(cores, *arrivals.steady_s())
            # The accelerator does not bind, so that its pace, of all cores and the speed before, may stay.
            predicted, alone, _ = _predict(case, profile, probed, {"gpu-1": (before + after) / 2 * left / cores})
            figures = (predicted, arrivals.samples_per_s(), alone)
            rows.append({**_row(case, ({"gpu-1": before}, {"gpu-1": after}), figures, samples), "cores_left": left})
    return probed, rows


def _run_here(task: protocol.Task) -> Arrivals:
    """Return the arrivals at the only worker of a run of this process, which needs no Ray."""
    with tempfile.TemporaryDirectory() as folder:
        trainer(task, answers=folder).fit(run_dir=f"{folder}/run", quiet=True)
        (arrivals,) = answered(Path(folder))
        return arrivals


class _Others:
    """The CPU time that other programs spend on the cores of this process, looked at twice a second."""

    def __init__(self) -> None:
        """Begin. What this process has started before counts as another program."""
        self._cores = sorted(os.sched_getaffinity(0))
        self._own = cpu_minutes.meter()
        self.looks: list[tuple[float, float]] = []  # times of the monotonic clock, and the CPU seconds up to then
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def left(self, cores: int, began_s: float, ended_s: float) -> float:
        """Return how many of so many cores the others left between two times, on average."""
        at_s, spent_s = zip(*self.looks, strict=True)
        began, ended = np.interp([began_s, ended_s], at_s, spent_s)
        return min(cores, len(self._cores) - float(ended - began) / (ended_s - began_s))

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()
        self._own.close()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            each = psutil.cpu_times(percpu=True)
            busy_s = sum(getattr(each[core], kind) for core in self._cores for kind in BUSY)
            self.looks.append((time.monotonic(), busy_s - self._own.cpu_s()))


@contextlib.contextmanager
def _loops(workload: str, data: Path | None, loop_s: float, cores: int) -> Iterator[Callable[[], tuple[float, float]]]:
    """Start a plain loop for each core, and wait until their imports are done. Each call of the function that the block gets runs all of
    them once, and returns the sum of their samples/s: by the clock, and by CPU time."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [*_loop(workload, data, loop_s), f"--lead={HERE_LEAD_S}"],
                    env={**os.environ, **ENVIRONMENT}, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )
            for _ in range(cores)
        ]  # fmt: skip

        def lines() -> list[str]:
            return [process.stdout.readline() for process in processes if process.stdout is not None]

        def rates() -> tuple[float, float]:
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            found = [list(map(float, line.split())) for line in lines()]
            return sum(by_clock for by_clock, _ in found), sum(by_cpu for _, by_cpu in found)

        lines()  # they say that they are ready
        yield rates


def _speeds(hosts: Hosts, workload: str, data: Path | None, loop_s: float) -> dict[str, float]:
    """Return the samples/s of plain loops that run on all hosts at the same time, by host."""

    def start(host: Host) -> Any:
        return host.popen(_loop(workload, data, loop_s), env=ENVIRONMENT, cwd=ROOT, stdin=-1, stdout=-1)

    running = {name: start(host) for name, host in hosts.items()}
    # The loops begin together, when all have finished their imports.
    for process in running.values():
        process.stdout.readline()
    for process in running.values():
        process.stdin.write("\n")
        process.stdin.flush()
    return {name: float(process.communicate(timeout=TIMEOUT_S)[0].split()[-2]) for name, process in running.items()}


def _loop(workload: str, data: Path | None, seconds: float) -> list[str]:
    """The command of a plain loop on one core."""
    command = [sys.executable, "-m", "benchmarks.rows.speed", f"--workload={workload}", f"--seconds={seconds}"]
    return command + ([f"--data={data}"] if data is not None else [])


def _arguments(workload: str, data: Path | None, samples: int, batch_size: int) -> list[str]:
    given = [f"--workload={workload}", f"--samples={samples}", f"--batch-size={batch_size}"]
    return given + ([f"--data={data}"] if data is not None else [])


if __name__ == "__main__":
    main()
