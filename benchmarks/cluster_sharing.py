"""Average completion time of many jobs on one cluster, in the simulator that Pollux was published with.

    git clone --branch osdi21-artifact https://github.com/petuum/adaptdl CHECKOUT
    pip install autograd
    python benchmarks/cluster_sharing.py --pollux CHECKOUT --load 1.0 -o benchmarks/results/cluster_sharing.json
    python benchmarks/cluster_sharing.py --pollux CHECKOUT --input-bound --policy joint --policy shorter [...]

Set OPENBLAS_NUM_THREADS=1: with more threads, small matrices take longer. Rows that the file holds are not simulated again.

The simulator, its traces and its workloads are the checkout's: 160 jobs in 8 hours on 16 nodes of 4 GPUs, 8 workloads at each of 4 loads.
The benchmark puts its own policy in the place of Pollux's, and leaves the rest as it is, with two exceptions. The fit of a job's step time
minimises the simulator's own objective from the simulator's own start, with a slope in closed form: the simulator's way takes a second
each. And a job's input may limit it: half of the jobs (``--input-bound``) need as many cores for each GPU as Synergy measured for five
image models, the others one, of 3 that there are.

Policies: ``joint`` chooses workers and cores together. ``shorter`` is the same with ``Rules(shorter_first=0.35, fairness=0)``: it knows how
many epochs each job is to train, and jobs count more that end sooner. ``proportional`` chooses workers as if no job had an input, and gives
each GPU its 3 cores. ``tuned`` is the same, after which each node's jobs leave the cores that they do not need to those that need more, as
Synergy's tuning does. The last two take workers from this project's solver of Pollux's objective, not from Pollux's genetic search.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import shlex
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.side_by_side import machine, versions
from offload.model import GradientNoise, JointGoodput, StepTime
from offload.model.allocation.allocate import allocate
from offload.model.allocation.values import Holding, Job, Rules
from offload.model.overlap import overlapped
from offload.model.placement import NodeResources, WorkerResources

PUBLISHED = {
    "0.5": 1534.0,
    "1.0": 2751.0,
    "1.5": 3685.0,
    "2.0": 5289.0,
}  # the checkout's results-jobload, means of 8 workloads
NODES, GPUS, CORES_PER_GPU = 16, 4, 3
WORKLOADS = 8
OVERLAP = 8.0
# How much faster a GPU trains with enough cores than with 3, all data in memory: AlexNet, ShuffleNet, ResNet-18, MobileNet, ResNet-50.
# Source: msr-fiddle/synergy, simulator/jobs/model.py at 1b013c2, `use_real_scores` (Mohan et al., "Looking Beyond GPUs for DNN
# Scheduling on Multi-Tenant Clusters", OSDI'22).
SENSITIVITIES = (2.94, 2.89, 2.4, 1.55, 1.15)
HEADROOM = (
    1.5  # of the cores that a job keeps under `tuned`: with as many as it needs, it would still wait 8 % of its time
)
CORES_OF_OTHERS = 1.0  # for each GPU: Synergy's language models
COUNTS = ("num_nodes", "num_replicas")  # what the simulator calls N and K
POLICIES = ("joint", "shorter", "proportional", "tuned")
JOINT = ("joint", "shorter")
SHORTER_FIRST, ITS_FAIRNESS = 0.35, 0.0


class Unusable(click.ClickException):
    """What the simulator's checkout lacks."""


def simulator_of(checkout: Path) -> Any:
    """The checkout's simulator as a module, on current versions of numpy and pandas.

    This benchmark's policy is in the place of Pollux's own, which needs pymoo 0.4.2. The other two are not run.
    """
    folder = checkout / "simulator"
    if not (folder / "simulator.py").is_file():
        raise Unusable(f"{folder} holds no simulator.py: give a checkout of petuum/adaptdl, branch osdi21-artifact.")
    on_current_versions()
    # The simulator asks by the type of its policy what to tell it.
    for name, policy in {"Pollux": Sharing, "Optimus": type(None), "Tiresias": type(None)}.items():
        sys.modules[name.lower()] = types.ModuleType(name.lower())
        setattr(sys.modules[name.lower()], f"{name}Policy", policy)
    sys.path.insert(0, str(folder.resolve()))
    simulator: Any = importlib.import_module("simulator")
    goodput = importlib.import_module("goodput")
    simulator.fit_perf_params = Fits(goodput)
    optimised_once(goodput)
    simulator.Job.get_speedup_fn = lambda job: None  # what Pollux's own policy asks for
    triangulated_once(importlib.import_module("applications"))
    return simulator


def on_current_versions() -> None:
    """Give numpy and pandas the names back that the published simulators use."""
    pandas = importlib.import_module("pandas")
    for name, kind in (("int", int), ("float", float)):
        setattr(np, name, kind)
    pandas.DataFrame.append = lambda self, other, ignore_index=False: pandas.concat(
        [self, other], ignore_index=ignore_index
    )


def triangulated_once(applications: Any) -> None:
    """Let the simulator's step times between traces come from one triangulation of them, not from one for each question."""
    triangulate, made = applications.LinearNDInterpolator, {}

    def remembered(points: Any, values: Any) -> Any:
        key = (points.tobytes(), values.tobytes())
        if key not in made:
            made[key] = triangulate(points, values)
        return made[key]

    applications.LinearNDInterpolator = remembered


def optimised_once(goodput: Any) -> None:
    """Let the simulator remember the best batches of its jobs: from round to round, most have the same fit and noise."""
    kind = goodput.GoodputFunction
    optimize = kind.optimize

    @lru_cache(maxsize=4096)
    def of(perf: Any, grad: Any, initial: Any, arguments: Any, options: Any) -> Any:
        return optimize(kind(perf, grad, initial), *arguments, **dict(options))

    def remembered(self: Any, *arguments: Any, **options: Any) -> Any:
        if not all(np.isscalar(count) for count in (*arguments[:2], *(options.get(n, 1) for n in COUNTS))):
            return optimize(self, *arguments, **options)
        key = tuple(sorted(options.items()))
        return of(self._perf_params, self._grad_params, self._init_batch_size, arguments, key)

    kind.optimize = remembered


class Results:
    """The rows of a result, each written when it is measured, so that what was interrupted goes on where it ended.

    Args:
        output: the file; None: rows are printed only.
        command: what makes the rows, without a machine's own paths.
        more: what else the result says.
        summary: what the result says of all rows so far.
        show: shows each new row; by default, as a line of JSON.
    """

    def __init__(
        self,
        output: Path | None,
        command: Sequence[str],
        more: dict[str, Any],
        summary: Callable[[Sequence[dict[str, Any]]], dict[str, Any]] = lambda rows: {},
        show: Callable[[dict[str, Any]], None] = lambda row: print(json.dumps(row), flush=True),
    ) -> None:
        self._output, self._command, self._more = output, command, more
        self._summary, self._show = summary, show
        self.rows: list[dict[str, Any]] = [] if output is None else _rows_of(output)

    def has(self, key: dict[str, Any]) -> bool:
        """Return whether there is a row with these values."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, key: dict[str, Any], measured: dict[str, Any]) -> None:
        """A row with its key's values and the measured ones."""
        self.rows.append(key | measured)
        self._show(self.rows[-1])
        self.write()

    def write(self) -> None:
        """Write the result, if it has a file."""
        if self._output:
            self._output.write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")

    def document(self) -> dict[str, Any]:
        """The whole result."""
        return {
            "command": shlex.join(self._command),
            "machine": machine(),
            "versions": {**versions(), "numpy": np.__version__, "scipy": scipy.__version__},
            **self._more,
            **self._summary(self.rows),
            "rows": self.rows,
        }


def _rows_of(output: Path) -> list[dict[str, Any]]:
    """The rows of an earlier result. Raises click.BadParameter if it holds something else, or lies in no folder."""
    if not output.exists():
        if not output.parent.is_dir():
            raise click.BadParameter(f"{output} lies in no folder: make {output.parent} first.", param_hint="-o")
        return []
    try:
        rows = json.loads(output.read_text("utf-8"))["rows"]
    except (ValueError, KeyError, TypeError):
        rows = None
    if not isinstance(rows, list):
        raise click.BadParameter(
            f"{output} exists, and holds no rows of a result: remove it, or name another file.", param_hint="-o"
        )
    return rows


class Fits:
    """The simulator's fit of a step time: its objective, minimised from its start. Where the minimum ends depends on that: a start at the
    last fit's end keeps what few measurements said of many nodes, and jobs then stay on one."""

    def __init__(self, goodput: Any) -> None:
        self._goodput = goodput
        self._ended: dict[tuple[bytes, ...], Any] = {}

    def __call__(self, nodes: Any, workers: Any, sizes: Any, compute: Any, step: Any) -> Any:
        data = [np.asarray(column, dtype=float) for column in (nodes, workers, sizes, compute, step)]
        key = tuple(column.tobytes() for column in data)
        if key not in self._ended:
            self._ended[key] = self._fit(data)
        return self._goodput.PerfParams(*self._ended[key])

    def _fit(self, data: list[Any]) -> Any:
        nodes, workers, sizes, compute, _ = data
        start = np.array([0.1, 0.01] * 3 + [1.001])
        lower, upper = np.array([1e-8] * 6 + [1.0]), np.array([np.inf] * 6 + [10.0])
        # In the order of the simulator: compute, several nodes, one node, gamma. What was not observed stays at its lower bound.
        seen = [True, True, *[bool(np.any(nodes > 1))] * 2, *[bool(np.any((nodes == 1) & (workers > 1)))] * 2, True]
        seen[3] &= bool(np.any(workers > 2))
        seen[5] &= bool(np.any(workers > 2))
        free = np.array(seen)
        start[~free] = lower[~free]
        if len(np.unique(sizes)) == 1:
            free[0], start[0] = False, float(np.mean(compute)) / 2

        def value(x: Any) -> tuple[float, Any]:
            whole = start.copy()
            whole[free] = x
            error, slope = fit_error(whole, *data)
            return error, slope[free]

        bounds = scipy.optimize.Bounds(lower[free], upper[free])
        fitted = start.copy()
        fitted[free] = scipy.optimize.minimize(value, start[free], jac=True, bounds=bounds).x
        if not np.any(nodes > 1):
            fitted[2:4] = np.maximum(fitted[2:4], 1.1 * fitted[4:6])
        return fitted


def fit_error(x: Any, nodes: Any, workers: Any, sizes: Any, compute: Any, step: Any) -> tuple[float, Any]:
    """The objective of the simulator's fit (``_obj_fn`` of its ``goodput.py``) and its slope along each parameter.

    Both errors are the root mean squares of logarithms: that of the computing time, and that of the whole step's.
    """
    alpha, beta, gamma = x[0:6:2], x[1:6:2], x[6]
    several, one = nodes > 1, (nodes == 1) & (workers > 1)
    beyond = np.maximum(workers - 2, 1e-8)
    computing = alpha[0] + beta[0] * sizes
    sync = np.select([several, one], [alpha[1] + beta[1] * beyond, alpha[2] + beta[2] * beyond], 1e-8)
    # The larger time is the p-norm's scale, so that no power is 0.
    largest = np.maximum(computing, sync)
    of_computing, of_sync = (computing / largest) ** gamma, (sync / largest) ** gamma
    both = of_computing + of_sync
    whole = np.log(largest) + np.log(both) / gamma
    off = (np.log(computing) - np.log(compute), whole - np.log(step))
    errors = [float(np.sqrt(np.mean(values**2))) for values in off]
    toward = [values / max(len(values) * error, 1e-300) for values, error in zip(off, errors, strict=True)]
    by_computing = toward[0] / computing + toward[1] * of_computing / (both * computing)
    by_sync = toward[1] * of_sync / (both * sync)
    by_gamma = (of_computing * np.log(computing) + of_sync * np.log(sync)) / both - whole
    ratio = beta[1:] / alpha[1:]
    slope = np.array(
        [
            np.sum(by_computing),
            np.sum(by_computing * sizes),
            *(
                part
                for spread, r, a in zip((several, one), ratio, alpha[1:], strict=True)
                for part in (
                    np.sum(by_sync[spread]) - 2e-2 * r * r / a,
                    np.sum((by_sync * beyond)[spread]) + 2e-2 * r / a,
                )
            ),
            np.sum(toward[1] * by_gamma) / gamma + 2e-3 * (gamma - 1),
        ]
    )
    return sum(errors) + 1e-3 * (gamma - 1) ** 2 + 1e-2 * float(np.sum(ratio**2)), slope


class Sharing:
    """The simulated cluster under one policy, in the place of the simulator's own."""

    def __init__(self, simulator: Any, policy: str, *, input_bound: bool) -> None:
        self.policy, self.input_bound = policy, input_bound
        self.cluster: Any = None
        self.cores: dict[str, int] = {}
        self.seconds: list[float] = []
        self.held: list[tuple[float, float]] = []  # shares of all GPUs and of all cores that are held, in each round
        # Seconds of all workers and of all cores that jobs held; of these, workers waited for input, and cores preprocessed.
        self.totals = {"workers": 0.0, "waited": 0.0, "cores": 0.0, "preprocessed": 0.0}
        self._simulator = simulator

    def core_seconds(self, job: Any) -> float:
        """Of one sample: such that a GPU at full speed needs as many cores as were measured; 0 without input."""
        if not self.input_bound:
            return 0.0
        number, other = divmod(_number(job.name), 2)
        needed = CORES_OF_OTHERS if other else CORES_PER_GPU * SENSITIVITIES[number % len(SENSITIVITIES)]
        return needed / full_rate(job.application)

    def optimize(self, infos: Any, nodes: Any, present: Any, _template: Any) -> tuple[dict[str, list[int]], int]:
        """The simulator's question: nodes of each job's workers."""
        by_name = {job.name: job for job in self.cluster.jobs}
        cluster = [
            NodeResources(name=f"{i:02}", cpus=GPUS * CORES_PER_GPU, gpus=GPUS, gpu_type="GPU")
            for i in range(len(nodes))
        ]
        jobs = [self._job(by_name[name], info, present.get(name, [])) for name, info in infos.items()]
        began = time.perf_counter()
        shared = allocate(jobs, cluster, rules_of(self.policy, first_cores=CORES_PER_GPU))
        self.seconds.append(time.perf_counter() - began)
        placed = {
            name: [int(node) for node, count in sorted(a.holding.workers.items()) for _ in range(count)]
            for name, a in shared.items()
        }
        if self.policy in JOINT:
            self.cores = {name: a.holding.core_count for name, a in shared.items()}
        else:
            self.cores = {name: CORES_PER_GPU * len(held) for name, held in placed.items()}
            if self.policy == "tuned":
                self.cores = self._tuned(placed, by_name)
        gpus = sum(len(held) for held in placed.values()) / (len(nodes) * GPUS)
        self.held.append((gpus, sum(self.cores.values()) / (len(nodes) * GPUS * CORES_PER_GPU)))
        return placed, len(nodes)

    def _job(self, job: Any, info: Any, held: Sequence[int]) -> Job:
        measured: dict[str, Any] = {}
        if job.perf_params is not None:
            measured = {
                "step_times": {"GPU": step_time_of(job.perf_params)},
                "noise": noise(job),
                "max_batch_size": float(job.application.max_batch_size),
                "local_batch_sizes": local_sizes(job.application),
                "core_seconds_per_sample": self.core_seconds(job) if self.policy in JOINT else 0.0,
                "overlap": OVERLAP,
            }
        workers = {f"{i:02}": list(held).count(i) for i in sorted(set(held))}
        return Job(
            name=job.name,
            worker=WorkerResources(cpus=0.0, gpus=1.0),
            workers=(1, int(info.max_replicas)),
            age_s=float(info.age),
            restarts=int(info.num_restarts),
            present=Holding(kind="GPU" if held else None, workers=workers),
            work_left=work_left(job, job.application) if self.policy == "shorter" else None,
            **measured,
        )

    def _tuned(self, placed: dict[str, list[int]], by_name: dict[str, Any]) -> dict[str, int]:
        """On each node, jobs give what is above their need to those below it, in equal shares of what these lack."""
        cores = dict.fromkeys(placed, 0.0)
        for node in range(NODES):
            here = {name: held.count(node) for name, held in placed.items() if node in held}
            need = {
                name: n * self.core_seconds(by_name[name]) * full_rate(by_name[name].application)
                for name, n in here.items()
            }
            fair = {name: float(CORES_PER_GPU * n) for name, n in here.items()}
            lack = {name: max(need[name] - fair[name], 0.0) for name in here}
            spare = sum(max(fair[name] - HEADROOM * need[name], 0.0) for name in here) + CORES_PER_GPU * (
                GPUS - sum(here.values())
            )
            share = min(spare / sum(lack.values()), 1.0) if sum(lack.values()) else 0.0
            for name in here:
                cores[name] += fair[name] + share * lack[name] if lack[name] else min(fair[name], HEADROOM * need[name])
        return {name: max(int(count), 1) for name, count in cores.items()}

    def rate(self, job: Any) -> float:
        """Samples/s of the job's input; infinite without one."""
        cost = self.core_seconds(job)
        return self.cores.get(job.name, 0) / cost if cost else math.inf

    def busy(self, part: str, whole: str) -> float:
        """One of ``totals`` relative to another."""
        return round(self.totals[part] / max(self.totals[whole], 1.0), 3)

    @contextlib.contextmanager
    def in_charge(self) -> Iterator[None]:
        """The simulator's jobs wait for their input meanwhile; under the joint policies, they choose their batch with it."""
        kind = self._simulator.Job
        step, choose_batch = kind.step, kind.update_local_bsz

        def waiting_step(job: Any, seconds: float, interference: float = 0.0) -> None:
            speed, preprocessing = self._shares(job)
            if job.completion_time is None:  # one that ended keeps its placement
                training = seconds - min(job.rescale_time, seconds)
                self.totals["workers"] += sum(job.placement) * seconds
                self.totals["waited"] += sum(job.placement) * training * (1 - speed)
                self.totals["cores"] += self.cores.get(job.name, 0) * seconds
                self.totals["preprocessed"] += self.cores.get(job.name, 0) * training * preprocessing
            step(job, seconds, interference=1 - (1 - interference) * speed)

        def choose(job: Any, placement: Any) -> None:
            rate = self.rate(job)
            if (
                self.policy in JOINT
                and job.perf_params is not None
                and job.target_batch_size is None
                and 0 < rate < math.inf
            ):
                spots = [n for n in placement if n]
                model = JointGoodput(step_time_of(job.perf_params), noise(job), rate, OVERLAP)
                job.atomic_bsz, job.accum_steps = best_batch(
                    model, len(spots), sum(spots), job.application.max_batch_size, local_sizes(job.application)
                )
            else:
                choose_batch(job, placement)

        kind.step, kind.update_local_bsz = waiting_step, choose
        try:
            yield
        finally:
            kind.step, kind.update_local_bsz = step, choose_batch

    def _shares(self, job: Any) -> tuple[float, float]:
        """The job's speed relative to that with an infinitely fast input, and the share of the time in which its cores work."""
        rate = self.rate(job)
        if math.isinf(rate) or not job.placement or not job.atomic_bsz:
            return 1.0, 0.0
        if not rate:
            return 0.0, 0.0
        placement = tuple(filter(None, job.placement))
        whole, sync = job.application.get_throughput(placement, job.atomic_bsz)
        gpu = whole + (whole - sync) * job.accum_steps
        batch = sum(placement) * job.atomic_bsz * (job.accum_steps + 1)
        together = float(overlapped(gpu, batch / rate, OVERLAP))
        return float(gpu) / together, float(batch / rate) / together


@lru_cache(maxsize=4096)
def best_batch(
    model: JointGoodput, nodes: int, workers: int, max_batch_size: float, local: tuple[int, int]
) -> tuple[int, int]:
    """The local batch and the accumulation steps with the highest goodput: most rounds ask what the last one asked."""
    _, size, accum = model.optimize(nodes, workers, max_batch_size, local, accumulate=True)
    return size, accum


def _number(job: str) -> int:
    """Jobs with even numbers are those that may be input-bound."""
    return int(job.rsplit("-", 1)[1])


@cache
def full_rate(application: Any) -> float:
    """Samples/s of one GPU with the largest local batch that was traced."""
    whole, _ = application.get_throughput((1,), int(application.max_local_bsz))
    return float(application.max_local_bsz / whole)


def step_time_of(p: Any) -> StepTime:
    """The simulator's parameters in this project's names."""
    return StepTime(
        p.alpha_c, max(p.beta_c, 1e-12), p.alpha_r, p.beta_r, p.alpha_n, p.beta_n, min(max(p.gamma, 1.0), 10.0)
    )


def noise(job: Any) -> GradientNoise:
    """The job's gradient noise as of its current epoch."""
    sqr, var = job.grad_params
    return GradientNoise(
        sqr=max(float(sqr), 0.0), var=max(float(var), 0.0), batch_size=float(job.application.init_batch_size)
    )


def rules_of(policy: str, *, first_cores: int) -> Rules:
    """The rules of a policy."""
    rules = Rules(first_cores=first_cores)
    return replace(rules, shorter_first=SHORTER_FIRST, fairness=ITS_FAIRNESS) if policy == "shorter" else rules


def work_left(job: Any, application: Any) -> float:
    """What the job's user knows: the rest of its epochs, in samples. The simulators count progress in steps of the initial batch."""
    steps = float(application.get_progress(application.max_epochs)) - float(job.progress)
    return max(steps, 1.0) * float(application.init_batch_size)


def local_sizes(application: Any) -> tuple[int, int]:
    """The local batches that were traced."""
    return int(application.min_local_bsz), int(application.max_local_bsz)


def run(simulator: Any, workload: Path, policy: str, *, input_bound: bool, first: int | None) -> dict[str, Any]:
    """Simulate one workload, or its first jobs, to its end."""
    pandas = importlib.import_module("pandas")
    sharing = Sharing(simulator, policy, input_bound=input_bound)
    sharing.cluster = simulator.Cluster(pandas.read_csv(workload, nrows=first), sharing, NODES, num_gpus=GPUS)
    with sharing.in_charge():
        while not sharing.cluster.all_complete():
            sharing.cluster.step(60)
    times = sharing.cluster.get_jcts()
    halves = [statistics.fmean(s for name, s in times.items() if _number(name) % 2 == other) for other in (0, 1)]
    gpus, cores = (round(statistics.fmean(column), 3) for column in zip(*sharing.held, strict=True))
    return {
        "jobs": len(times),
        "average_completion_s": round(statistics.fmean(times.values()), 1),
        **({"of_input_bound_s": round(halves[0], 1), "of_others_s": round(halves[1], 1)} if input_bound else {}),
        "gpus_held": gpus,
        **({"cores_held": cores} if input_bound else {}),
        **({"cores_busy": sharing.busy("preprocessed", "cores")} if input_bound else {}),
        **({"gpus_waiting_for_input": sharing.busy("waited", "workers")} if input_bound else {}),
        "restarts": sum(job.num_restarts or 0 for job in sharing.cluster.jobs),
        "decision_s_p95": round(float(np.percentile(sharing.seconds, 95)), 3),
    }


def means(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean completion times over whole workloads: without input, the joint policy's for each load of which all workloads are there; with
    input, each policy's at load 1.0 over the workloads that all policies have run."""
    times: dict[str, list[float]] = {load: [] for load in PUBLISHED}
    with_input: dict[str, dict[str, float]] = {policy: {} for policy in POLICIES}
    for row in rows:
        if row["first_jobs"] is not None:
            continue
        if row["input_bound"]:
            if row["load"] == "1.0":
                with_input[row["policy"]][row["workload"]] = row["average_completion_s"]
        elif row["policy"] == "joint":
            times[row["load"]].append(row["average_completion_s"])
    found: dict[str, Any] = {
        "means_s": {load: round(statistics.fmean(of), 1) for load, of in times.items() if len(of) == WORKLOADS}
    }
    if all_ran := set.intersection(*(set(of) for of in with_input.values())):
        found["input_bound"] = {
            "workloads": len(all_ran),
            **{name: round(statistics.fmean(of[w] for w in all_ran), 1) for name, of in with_input.items()},
        }
    return found


@click.command()
@click.option(
    "--pollux",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="A checkout of petuum/adaptdl.",
)
@click.option("--load", "loads", multiple=True, type=click.Choice(list(PUBLISHED)), default=("1.0",), show_default=True)
@click.option(
    "--workload", "numbers", multiple=True, type=click.IntRange(1, WORKLOADS), default=tuple(range(1, WORKLOADS + 1))
)
@click.option("--policy", "policies", multiple=True, type=click.Choice(POLICIES), default=("joint",), show_default=True)
@click.option("--input-bound", is_flag=True, help="Half of the jobs need more cores than 3 for each GPU.")
@click.option("--first", type=click.IntRange(min=2), help="Only the first jobs of a workload, for a quick look.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Rows that this file lacks are added to it."
)
def main(
    pollux: Path,
    loads: tuple[str, ...],
    numbers: tuple[int, ...],
    policies: tuple[str, ...],
    input_bound: bool,
    first: int | None,
    output: Path | None,
) -> None:
    """Share a simulated cluster among the jobs of published workloads, and average their completion times."""
    simulator = simulator_of(pollux)
    command = ["python", "benchmarks/cluster_sharing.py", "--pollux", "CHECKOUT", "..."]
    results = Results(output, command, {"published_means_s": PUBLISHED}, means)
    for load in loads:
        folder = pollux / "simulator" / ("workloads" if load == "1.0" else f"workloads-{load}")
        for number in numbers:
            for policy in policies:
                workload = folder / f"workload-{number}.csv"
                key = {
                    "load": load,
                    "workload": workload.stem,
                    "policy": policy,
                    "input_bound": input_bound,
                    "first_jobs": first,
                }
                if not results.has(key):
                    results.add(key, run(simulator, workload, policy, input_bound=input_bound, first=first))


if __name__ == "__main__":
    main()
