"""Average completion time and fairness of many jobs on GPUs of three types, in the simulator that Sia was published with.

    git clone https://github.com/siasosp23/artifacts CHECKOUT
    pip install autograd "cvxpy-base<2" cylp osqp qdldl rich
    python benchmarks/cluster_sharing_sia.py --sia CHECKOUT --workload 1 -o benchmarks/results/cluster_sharing_sia.json

The simulator, its traces and its workloads are the checkout's: 160 jobs of the Philly trace in 8 hours on 64 GPUs, 6 nodes of 4 (``aws``),
3 of 8 (``rtx``) and 2 of 8 (``dgx-ext``). ``sia`` is the checkout's own policy with its own solver and the settings of its
``run_experiment.sh``. ``joint`` is this project's, in its place; it knows what Sia's knows. ``shorter`` also knows how many epochs
each job is to train, as in ``cluster_sharing.py``. The fit of a job's step time is that of ``cluster_sharing.py``, for all.

A job's fairness ratio is its completion time over that of the same job alone on its share. The share is that of all GPUs among as many jobs
as there were on average while it was in the cluster. Alone, it doubles its workers from 1 to the best count that the share
holds. The checkout's ``ftf_simulator.py`` defines the share and the mean over GPU types; between whole GPUs, the time is linear.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.cluster_sharing import (
    Fits,
    Results,
    Unusable,
    on_current_versions,
    rules_of,
    step_time_of,
    triangulated_once,
    work_left,
)
from offload.model import GradientNoise, StepTime
from offload.model.allocation.allocate import allocate
from offload.model.allocation.values import Holding, Job
from offload.model.placement import NodeResources, WorkerResources

KINDS = {"aws": (6, 4), "dgx-ext": (2, 8), "rtx": (3, 8)}  # nodes and GPUs of a node: the checkout's default
GPUS = sum(nodes * gpus for nodes, gpus in KINDS.values())
ROUND_S, ROUNDS_WHEN_GROWN = 60, 10
POLICIES = ("sia", "joint", "shorter")
COUNTS = (1, 2, 4, 8, 16, 24)  # workers of a job that is alone on its share, where they fit


class Simulator:
    """The checkout's modules, on current versions of numpy and pandas. Policies other than Sia's are not run."""

    def __init__(self, checkout: Path) -> None:
        folder = checkout / "sia-simulator"
        if not (folder / "cluster.py").is_file():
            raise Unusable(f"{folder} holds no cluster.py: give a checkout of siasosp23/artifacts.")
        on_current_versions()
        for name, policy in {"gavel": "GavelPolicy", "sia_fix": "SiaFixPolicy"}.items():
            sys.modules[name] = types.ModuleType(name)
            setattr(sys.modules[name], policy, type(None))
        sys.path.insert(0, str(folder.resolve()))
        config, applications = _module("simulator_config"), _module("applications")
        config.sia_solver_verbose, config.sia_solver_num_threads = False, 1
        triangulated_once(applications)
        applications.Application.get_max_local_bsz = cache(applications.Application.get_max_local_bsz)
        self.config, self.sia, self.cluster, self.job = config, _module("sia"), _module("cluster"), _module("job")
        self.job.fit_perf_params = Fits(_module("goodput"))
        # The simulator asks by the type of its policy what to tell it.
        self.cluster.SiaPolicy = (self.sia.SiaPolicy, Sharing)

    def policy(self, name: str) -> Any:
        """One of ``POLICIES``."""
        if name != "sia":
            return Sharing(name)
        # The checkout's run_experiment.sh.
        return self.sia.SiaPolicy(
            p_fairness=-0.5,
            restart_penalty=30,
            lambda_a=0.01,
            lambda_n=1.1,
            project_throughputs=True,
            share_max_replicas=True,
        )


def _module(name: str) -> Any:
    return importlib.import_module(name)


class Sharing:
    """This project's allocation in the place of Sia's."""

    def __init__(self, policy: str) -> None:
        self.cluster: Any = None
        self._rules = rules_of(policy, first_cores=0)
        self._nodes = [
            NodeResources(name=f"{kind}/{i}", cpus=0.0, gpus=gpus, gpu_type=kind)
            for kind, (nodes, gpus) in KINDS.items()
            for i in range(nodes)
        ]

    def populate_valid_configs(self, *_: Any) -> None:
        """Nothing: any number of workers is valid."""

    def optimize(self, infos: Any, _nodes: Any, present: Any) -> dict[str, tuple[str | None, Any]]:
        """The simulator's question: GPU type and nodes of each job's workers."""
        by_name = {job.name: job for job in self.cluster.jobs}
        jobs = [_job(by_name[name], info, present.get(name, (None, ()))) for name, info in infos.items()]
        if self._rules.shorter_first:
            jobs = [replace(job, work_left=_work_left(by_name[job.name])) for job in jobs]
        shared = allocate(jobs, self._nodes, self._rules)
        return {name: _placed(allotment.holding) for name, allotment in shared.items()}


def _placed(holding: Holding) -> tuple[str | None, Any]:
    if not holding.workers:
        return None, ()
    nodes = [int(name.split("/")[1]) for name, count in holding.workers.items() for _ in range(count)]
    return holding.kind, sorted(nodes)


def _job(job: Any, info: Any, held: tuple[str | None, Any]) -> Job:
    kind, nodes = held
    workers = {f"{kind}/{node}": list(nodes).count(node) for node in sorted(set(nodes))}
    starting = bool(nodes) and info.scaling_underway  # it is let start, as under Sia's policy
    measured: dict[str, Any] = {}
    known = [name for name in KINDS if job.perf_params[name] is not None]
    if known and job.grad_params is not None:
        application = job.applications[known[0]]
        sqr, var = job.grad_params
        measured = {
            "step_times": {name: _step_time(job, info, name, known) for name in KINDS},
            "noise": GradientNoise(max(float(sqr), 0.0), max(float(var), 0.0), float(application.init_batch_size)),
            "max_batch_size": float(application.max_batch_size),
            "local_batch_sizes": {
                name: (int(job.applications[name].min_local_bsz), int(job.applications[name].max_local_bsz))
                for name in KINDS
            },
        }
    return Job(
        name=job.name,
        worker=WorkerResources(cpus=0.0, gpus=1.0),
        workers=(len(nodes),) * 2 if starting else (1, int(max(info.max_replicas.values()))),
        age_s=float(info.age),
        restarts=int(info.num_restarts),
        restart_s=float(job.max_rescale_time),
        preemptible=not starting,
        present=Holding(kind=kind, workers=workers),
        **measured,
    )


def _work_left(job: Any) -> float:
    return work_left(job, job.applications[next(iter(KINDS))])


def _step_time(job: Any, info: Any, kind: str, known: list[str]) -> StepTime:
    """As fitted; on a kind where the job did not run, that of another kind by the ratio of their traced rates on one GPU, as under Sia."""
    if kind in known:
        return step_time_of(job.perf_params[kind])
    other = step_time_of(job.perf_params[known[0]])
    slower = 1 / float(info.cluster_throughput_ratios[kind][known[0]])
    times = ("alpha_compute", "beta_compute", "alpha_intra", "beta_intra", "alpha_inter", "beta_inter")
    return replace(other, **{name: getattr(other, name) * slower for name in times})


class Alone:
    """Completion times of jobs that share with nobody, and whose step times are known."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._on, self._fitted = cache(self._simulated), cache(self._fitted_to_traces)

    def completion_s(self, applications: Any, share: float) -> float:
        """With ``share`` GPUs, less than one of which is a whole one for as much of the time."""
        low, high = max(math.floor(share), 1), max(math.ceil(share), 1)
        total = 0.0
        for kind, (nodes, gpus) in KINDS.items():
            times = [self._best(applications[kind], kind, min(count, nodes * gpus)) for count in (low, high)]
            mean = times[0] + (times[1] - times[0]) * (share - low) if share >= 1 else times[1] / share
            total += mean * nodes * gpus / GPUS
        return total

    def _best(self, application: Any, kind: str, most: int) -> float:
        return min(self._on(application, kind, count) for count in {*(c for c in COUNTS if c <= most), most})

    def _simulated(self, application: Any, kind: str, workers: int) -> float:
        """Seconds from half a round before the job's first one, as of a job that arrives at any time."""
        everywhere = self._simulator.cluster.APPLICATIONS
        job = self._simulator.job.Job("alone", {k: everywhere[k][application.name] for k in everywhere}, 0)
        wanted = min(workers, application.max_batch_size // application.min_local_bsz)
        job.perf_params[kind] = self._fitted(application)
        job.update_params = lambda *measured: setattr(job, "grad_params", measured[-2:])
        now = 0
        while job.completion_time is None:
            if now < wanted and not job.rescale_time:
                now = min(max(2 * now, 1), wanted)
                whole, rest = divmod(now, KINDS[kind][1])
                placement = [KINDS[kind][1]] * whole + [rest] * bool(rest)
                job.reallocate(placement) if job.current_cluster else job.migrate(kind, placement)
            job.step(ROUND_S if now < wanted else ROUNDS_WHEN_GROWN * ROUND_S)
        return float(job.completion_time + ROUND_S / 2)

    def _fitted_to_traces(self, application: Any) -> Any:
        traces = application.placements
        columns = (
            traces[name].to_numpy(float)
            for name in ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        )
        nodes, workers, sizes, step, sync = columns
        return self._simulator.job.fit_perf_params(nodes, workers, sizes, step - sync, step)


def run(simulator: Simulator, workload: Path, name: str, first: int | None) -> dict[str, Any]:
    """Simulate one workload, or its first jobs, to its end."""
    pandas = importlib.import_module("pandas")
    seconds: list[float] = []
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):  # the simulator prints each round
        policy = simulator.policy(name)
        nodes, gpus = ({kind: pair[i] for kind, pair in KINDS.items()} for i in (0, 1))
        policy.populate_valid_configs(nodes, gpus, simulator.config.cluster_max_physical_nnodes)
        policy.optimize = _timed(policy.optimize, seconds)
        most = simulator.config.cluster_max_physical_nnodes
        cluster = simulator.cluster.Cluster(pandas.read_csv(workload, nrows=first), policy, nodes, gpus, most)
        policy.cluster = cluster
        while not cluster.all_complete():
            cluster.step(ROUND_S)
            del cluster.logs[:-1]
        times = cluster.get_jcts()
        alone = Alone(simulator)
        ratios = [
            times[job.name] / alone.completion_s(job.applications, GPUS / statistics.fmean(job.contention))
            for job in cluster.jobs
        ]
    return {
        "jobs": len(times),
        "average_completion_s": round(statistics.fmean(times.values()), 1),
        "worst_fairness_ratio": round(max(ratios), 3),
        "unfair_share": round(sum(ratio > 1 for ratio in ratios) / len(ratios), 3),
        "restarts": sum(job.num_restarts or 0 for job in cluster.jobs),
        "decision_s_p95": round(float(np.percentile(seconds, 95)), 3),
    }


def _timed(decide: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        decision = decide(*arguments)
        seconds.append(time.perf_counter() - began)
        return decision

    return timed


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each policy, over the workloads that all have run."""
    by_policy = {
        name: {row["workload"]: row for row in rows if row["policy"] == name}
        for name in POLICIES
        if any(row["policy"] == name for row in rows)
    }
    all_ran = sorted(set.intersection(*(set(of) for of in by_policy.values()))) if by_policy else []
    if not all_ran:
        return {}
    return {
        "summary": {
            name: {
                "workloads": len(all_ran),
                "average_completion_s": round(statistics.fmean(of[w]["average_completion_s"] for w in all_ran), 1),
                "worst_fairness_ratio": max(of[w]["worst_fairness_ratio"] for w in all_ran),
                "restarts": sum(of[w]["restarts"] for w in all_ran),
                "decision_s_p95": max(of[w]["decision_s_p95"] for w in all_ran),
            }
            for name, of in by_policy.items()
        }
    }


@click.command()
@click.option(
    "--sia",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="A checkout of siasosp23/artifacts.",
)
@click.option("--workload", "numbers", multiple=True, type=click.IntRange(1, 8), default=tuple(range(1, 9)))
@click.option("--policy", "policies", multiple=True, type=click.Choice(POLICIES), default=POLICIES, show_default=True)
@click.option("--first", type=click.IntRange(min=1), help="Only the first jobs of a workload, for a quick look.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Rows that this file lacks are added to it."
)
def main(
    sia: Path, numbers: tuple[int, ...], policies: tuple[str, ...], first: int | None, output: Path | None
) -> None:
    """Share a simulated cluster of three GPU types among the jobs of published workloads."""
    simulator = Simulator(sia)
    command = ["python", "benchmarks/cluster_sharing_sia.py", "--sia", "CHECKOUT", "..."]
    solver = {name: importlib.metadata.version(name) for name in ("cvxpy-base", "cylp")}
    results = Results(output, command, {"sias_solver": solver}, summary)
    for number in numbers:
        for policy in policies:
            workload = sia / "sia-simulator" / "workloads" / "philly" / f"workload-{number}.csv"
            key = {"workload": f"philly/{workload.stem}", "policy": policy, "first_jobs": first}
            if not results.has(key):
                results.add(key, run(simulator, workload, policy, first))


if __name__ == "__main__":
    main()
