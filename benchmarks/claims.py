"""What this project and the articles that it answers claim, each with the figure that was measured, its file and its command.

`make map` writes docs/evidence.md from this list, and `benchmarks/history.py` draws the figures over the commits that recorded them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
TWO_HOSTS = "two emulated hosts, a core each"

Step = str | int | Mapping[str, str | int | bool]
"""A step into a JSON document: a key, a number in a list, or what the wanted element of a list has."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number of a record.

    Raises:
        KeyError: by :meth:`of`, if the record does not hold it.
    """

    file: str
    """Under benchmarks/results."""
    at: tuple[Step, ...]
    shown: str = "{:.2f}"
    """How a page spells it, as a format string."""
    over: tuple[Step, ...] | None = None
    """Another number of the same record, by which it is divided."""

    def of(self, document: Any) -> float:
        """Return the number from a record."""
        value = _at(document, self.at)
        return value if self.over is None else value / _at(document, self.over)

    def text(self) -> str:
        """Return the number of the present record as a page spells it."""
        return self.shown.format(self.of(json.loads((RESULTS / self.file).read_text(encoding="utf-8"))))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A line of the page of evidence. Without figures, it was never shown, and ``remark`` says why."""

    says: str
    source: str
    """Who claims it: this project's README, or an article."""
    where: str = ""
    figures: tuple[Figure, ...] = ()
    command: str = ""
    picture: str | None = None
    """A file under benchmarks/results."""
    remark: str = ""
    """What a reader must know: a goal that was missed, a case that is left out."""


def _at(document: Any, steps: Sequence[Step]) -> float:
    for step in steps:
        if isinstance(step, Mapping):
            document = next(
                (each for each in document if all(each.get(key) == value for key, value in step.items())), None
            )
            if document is None:
                raise KeyError(dict(step))
        else:
            document = document[step]
    return float(document)


def _row(name: str, workload: str, measure: str) -> tuple[Step, ...]:
    return ("rows", {"name": name, "workload": workload}, measure)


def _hosts(workload: str, measure: str, shown: str, over: str | None = None) -> Figure:
    """A figure of offload on two hosts, over that of another row."""
    beside = None if over is None else _row(over, workload, measure)
    file = f"offload_vs_single-{workload}.json"
    return Figure(file=file, at=_row("offload-2-hosts", workload, measure), over=beside, shown=shown)


def _converged(program: str, schedule: str, what: str, shown: str) -> Figure:
    """How the accuracy under a schedule compares with that of eight fixed workers."""
    line: dict[str, str | int | bool] = {"program": program, "schedule": schedule}
    return Figure(file="convergence.json", at=("summary", line, "over_8_fixed", what), shown=shown)


def _cost(workload: str, policy: str, over: str, what: str, shown: str) -> Figure:
    """How many times as much another policy takes to the accuracy."""
    line: dict[str, str | int | bool] = {"workload": workload, "policy": policy, "over": over}
    return Figure(file="accuracy_cost.json", at=("ratios", line, what), shown=shown)


def _regret(policy: str, measure: str, shown: str) -> Figure:
    """How much more than the optimum a policy's choices cost in the simulation."""
    return Figure(
        file="simulation.json", at=("regret", "with the hub's limit", "summary", policy, measure), shown=shown
    )


def _adaptation(case: str, other: str, ours: str, measure: str, shown: str, model: str = "cnn") -> Figure:
    """Another policy's figure over that of offload's."""
    theirs = ("summary", {"case": case, "model": model, "policy": other}, measure)
    return Figure(
        file="adaptation.json",
        at=theirs,
        over=("summary", {"case": case, "model": model, "policy": ours}, measure),
        shown=shown,
    )


def _arbitrated(row: str, repeat: int, measure: str, shown: str, over: str | None = None) -> Figure:
    """A figure of two real runs that share a cluster, over that of another arrangement."""

    def at(name: str) -> tuple[Step, ...]:
        step: Step = {"row": name, "repeat": repeat}
        return "rows", step, measure

    return Figure(file="arbitrated_runs.json", at=at(row), shown=shown, over=None if over is None else at(over))


def _beside_joint(policy: str, shown: str) -> Figure:
    """How many times as long jobs take with another policy, where half of them are input-bound."""
    of = ("input_bound", policy), ("input_bound", "joint")
    return Figure(file="cluster_sharing.json", at=of[0], over=of[1], shown=shown)


def _beside_sia(measure: str, shown: str, policy: str = "joint", over: str | None = None) -> Figure:
    """A figure of one policy over all workloads of Sia's simulator, over that of another."""
    beside = None if over is None else ("summary", over, measure)
    return Figure(file="cluster_sharing_sia.json", at=("summary", policy, measure), over=beside, shown=shown)


HOSTS = "python benchmarks/offload_vs_single.py"
README, ARTICLES = "README", "articles"

CLAIMS = (
    Claim(
        says="A second host with CPUs nearly doubles the rate of an input-bound loop",
        source="README; SageMaker's heterogeneous clusters",
        where=TWO_HOSTS,
        figures=(
            _hosts("jpeg", "samples_per_s", "jpeg {:.2f} × a DataLoader on one host", over="dataloader-1-host"),
            _hosts("blur", "samples_per_s", "ten blurs {:.2f} ×", over="dataloader-1-host"),
        ),
        command=HOSTS,
        picture="offload_vs_single.png",
    ),
    Claim(
        says="All cores work: what arrives is what plain loops on the same cores would make",
        source=README,
        where=TWO_HOSTS,
        figures=(
            _hosts("blur", "delivered_over_ideal", "ten blurs {:.2f} of the ideal"),
            _hosts("jpeg", "delivered_over_ideal", "jpeg {:.2f}"),
        ),
        command=HOSTS,
        picture="offload_vs_single.png",
        remark="Goals were 0.97 and 0.90.",
    ),
    Claim(
        says="On a GPU host with 4 cores, a CPU host makes ResNet-50 train at the GPU's own rate",
        source=README,
        where="one NVIDIA H100; both hosts emulated",
        figures=(
            Figure(file="offload_vs_single-gpu.json", at=("cases", 0, "rows", "offload, both hosts", "samples_per_s"),
                   over=("cases", 0, "rows", "device", "samples_per_s"), shown="{:.2f} of the GPU alone"),
            Figure(file="offload_vs_single-gpu.json", at=("cases", 0, "rows", "offload, both hosts", "samples_per_s"),
                   over=("cases", 0, "rows", "dataloader, GPU host", "samples_per_s"), shown="{:.2f} × a DataLoader on the GPU host"),
        ),
        command="python benchmarks/offload_vs_single_gpu.py",
    ),
    Claim(
        says="A heterogeneous job is cheaper per sample than a single instance (23 % published)",
        source="article on SageMaker's heterogeneous clusters",
        where="two emulated hosts under the training toolkit, paced accelerator, AWS's prices",
        figures=(Figure(file="sagemaker.json", at=("offloaded_over_single", "price_efficiency"), shown="{:.2f} × the samples per dollar"),),
        command="python benchmarks/sagemaker.py --emulate",
    ),
    Claim(
        says="On one machine, offload.DataLoader is no slower than torch's",
        source=README,
        where="one machine of two cores",
        figures=tuple(
            Figure(file="one_machine_all.json", at=("rows", name, "offload", "samples_per_s_over_torch"), shown=f"{name} {{:.2f}} ×")
            for name in ("jpeg", "blur", "blur-uint8", "text", "tabular")
        ),
        command="python benchmarks/one_machine.py",
        remark="On a faster machine, tabular was 0.69 ×.",
    ),
    Claim(
        says="The first batch comes as soon as from torch's DataLoader",
        source=README,
        where="one machine of two cores, from the start of the script",
        figures=(
            Figure(file="one_machine_all.json", at=("rows", "jpeg", "offload", "first_batch_s_over_torch"), shown="jpeg {:.2f} ×"),
            Figure(file="one_machine_all.json", at=("rows", "text", "offload", "first_batch_s_over_torch"), shown="text {:.2f} ×"),
        ),
        command="python benchmarks/one_machine.py",
        remark="A Trainer's first step takes 1.5 to 2.8 × as long.",
    ),
    Claim(
        says="A plan predicts samples/s before anyone pays",
        source=README,
        where="18 cases on up to three emulated hosts, paced accelerators",
        figures=(
            Figure(file="prediction.json", at=("error", "median"), shown="error {:.1%} in the median"),
            Figure(file="prediction.json", at=("error", "worst"), shown="{:.1%} at worst"),
        ),
        command="python benchmarks/prediction.py",
        picture="prediction.png",
    ),
    Claim(
        says="The planner's recommendation is the best that enumeration finds",
        source=README,
        where="1,000 random profiles",
        figures=(Figure(file="planning.json", at=("gap", "worst"), shown="{:.1%} worse at most"),),
        command="python benchmarks/planning.py",
    ),
    Claim(
        says="A plan for hundreds of GPUs is nearly the best, though it knows only a probe's measurements",
        source=README,
        where="simulation, 1,000 random jobs and price tables on 8 to 1,024 GPUs",
        figures=(
            _regret("offload plan", "median", "{:.1%} above the optimum in the median"),
            _regret("offload plan", "p99", "{:.1%} in 99 % of jobs"),
            _regret("offload plan", "worst", "{:.1%} at worst"),
            _regret("FastFlow", "p90", "90 % of jobs: FastFlow's rule {:.0%}"),
            _regret("Pecan", "p90", "Pecan's {:.0%}"),
            _regret("offload plan", "p90", "offload {:.1%}"),
        ),
        command="python benchmarks/simulation.py",
        picture="simulation.png",
        remark="Goals were 3 % in the median and 10 % at worst: 6 of the 1,000 plans miss the second.",
    ),
    Claim(
        says="The simulator agrees with what was measured",
        source=README,
        where="recorded runs of this project that a probe or plain loops calibrate",
        figures=(
            Figure(file="simulation.json", at=("validation", "cases"), shown="{:.0f} cases"),
            Figure(file="simulation.json", at=("validation", "median_error"), shown="error {:.1%} in the median"),
            Figure(file="simulation.json", at=("validation", "within_goal"), shown="{:.0f} within 10 %"),
            Figure(file="simulation.json", at=("validation", "worst_error"), shown="{:.0%} at worst"),
        ),
        command="python benchmarks/simulation.py --part validation",
    ),
    Claim(
        says="Kills, drains, joins and resizes lose no sample and repeat none",
        source="README; article on elastic Horovod",
        where="100 random schedules rehearsed, 10 with real processes",
        figures=(
            Figure(file="elastic.json", at=("lost",), shown="{:.0f} lost"),
            Figure(file="elastic.json", at=("repeated",), shown="{:.0f} repeated"),
            Figure(file="elastic.json", at=("hangs",), shown="{:.0f} hangs"),
        ),
        command="python benchmarks/elastic.py",
        picture="elastic.png",
    ),
    Claim(
        says="A resize interrupts training less than a restart of Ray Train",
        source="README; article on elastic Horovod",
        where="two emulated hosts",
        figures=(
            Figure(file="elastic.json", at=("short_run", "resize", "offload_s"), shown="{:.1f} s"),
            Figure(file="elastic.json", at=("short_run", "resize", "ray_train_s"), shown="Ray Train {:.0f} s"),
        ),
        command="python benchmarks/elastic.py --schedules 20 --real 2 --resizes 1",
        picture="elastic.png",
        remark="One run. Three repeats on a faster machine gave 3.2 s (goal 2.0).",
    ),
    Claim(
        says="A killed worker, and a killed host, cost seconds",
        source="article on elastic Horovod",
        where="two emulated hosts",
        figures=(
            Figure(file="elastic.json", at=("recovery", "medians", "offload", "worker"), shown="worker {:.1f} s"),
            Figure(file="elastic.json", at=("recovery", "medians", "offload", "host"), shown="host {:.1f} s"),
        ),
        command="python benchmarks/recovery.py",
    ),
    Claim(
        says="A spot notice leaves time for a checkpoint",
        source="articles on AdaptDL and elastic Horovod",
        where="an emulated metadata service, a cluster of this machine",
        figures=(
            Figure(file="spot_notice.json", at=("examples", "vit_blur", "checkpoint_s"), shown="committed after {:.1f} s (ViT)"),
            Figure(file="spot_notice.json", at=("examples", "image_classification", "checkpoint_s"), shown="{:.1f} s (CNN)"),
        ),
        command="python benchmarks/spot_notice.py",
    ),
    Claim(
        says="Knowing the input saves dollars to an accuracy where it binds",
        source="articles on AdaptDL, whose policy has no input term",
        where="one to four workers, digits, a paced accelerator and input, two seeds",
        figures=(
            _adaptation("input-bound", "without input term", "joint", "usd", "{:.1f} × fewer dollars"),
            _adaptation("input-bound", "without input term", "joint", "time_to_accuracy_s", "{:.1f} × less time"),
        ),
        command="python benchmarks/adaptation.py",
        picture="adaptation.png",
    ),
    Claim(
        says="Adaptive batches reach an accuracy sooner than the small fixed batch",
        source="articles on AdaptDL",
        where="one worker, digits, a paced accelerator, three seeds",
        figures=(
            _adaptation("statistics", "fixed 16", "adaptive", "time_to_accuracy_s", "ViT {:.2f} ×", model="vit"),
            _adaptation("statistics", "fixed 16", "adaptive", "time_to_accuracy_s", "CNN {:.2f} ×"),
        ),
        command="python benchmarks/adaptation.py",
        picture="adaptation.png",
        remark="A fixed batch of 64 is as fast with the CNN, and never gets there with the ViT.",
    ),
    Claim(
        says="A checkpoint predicts a data set with the preprocessing of its validation data, on all cores",
        source=README,
        where="600 JPEG files on two cores, from the call to the written file",
        figures=(
            Figure(file="inference.json", at=("rows", "offload", "speed_over_ray_data"), shown="{:.1f} × as fast as Ray Data"),
            Figure(file="inference.json", at=("rows", "offload-ray", "speed_over_ray_data"), shown="{:.2f} × on the same Ray"),
        ),
        command="python benchmarks/inference.py",
        remark="On Ray, both mostly start processes.",
    ),
    Claim(
        says="A search of eight trials under ASHA ends sooner than with plain Ray Tune, and decodes each image about once",
        source="README; articles on Ray and on elastic Horovod",
        where="two emulated hosts, paced accelerators and preprocessing, two seeds",
        figures=(
            Figure(file="tuning.json", at=("summary", "offload", "over_plain"), shown="{:.2f} of plain Tune's time"),
            Figure(file="tuning.json", at=("summary", "one-folder", "decoded_over_one_trial"), shown="{:.2f} × the decoding of one trial"),
            Figure(file="tuning.json", at=("summary", "offload", "workers_again_s", "median"),
                   shown="accelerators in use again after {:.1f} s"),
        ),
        command="python benchmarks/tuning.py",
        picture="tuning.png",
        remark="The goal was 0.6. The goal of 5 s was met after 22 of 24 ends of trials; the others took 5.5 and 5.7 s.",
    ),
    Claim(
        says="A served request costs little beyond the transform, the model and Ray Serve",
        source=README,
        where="JPEG files on two cores, one replica of each part",
        figures=(
            Figure(file="serving.json", at=("rows", "served", "median_ms"), shown="{:.0f} ms"),
            Figure(file="serving.json", at=("rows", "serve_alone", "median_ms"), shown="Serve with empty parts {:.0f} ms"),
            Figure(file="serving.json", at=("rows", "bare", "median_ms"), shown="the bare work {:.0f} ms"),
        ),
        command="python benchmarks/serving.py",
    ),
    Claim(
        says="Jobs that share a cluster by goodput finish sooner",
        source="article on AdaptDL in shared clusters",
        where="Pollux's own simulator, its 8 workloads of 160 jobs",
        figures=(
            Figure(file="cluster_sharing.json", at=("means_s", "1.0"), shown="{:,.0f} s on average (published for Pollux: 2,751 s)"),
            Figure(file="cluster_sharing.json", at=("means_s", "0.5"), shown="{:,.0f} s at half of the load (published: 1,534 s)"),
            Figure(file="cluster_sharing.json", at=("means_s", "1.5"), shown="{:,.0f} s at 1.5 of it (3,685 s)"),
            Figure(file="cluster_sharing.json", at=("means_s", "2.0"), shown="{:,.0f} s at 2.0 of it (5,289 s)"),
        ),
        command="python benchmarks/cluster_sharing.py --pollux CHECKOUT",
    ),
    Claim(
        says="Cores shared by goodput, together with workers, help where half of the jobs are input-bound",
        source=README,
        where="the same simulator and its 8 workloads, 3 cores for each GPU",
        figures=(
            _beside_joint("proportional", "{:.2f} × as fast as cores in proportion to GPUs"),
            _beside_joint("tuned", "{:.2f} × as fast as Synergy's tuning"),
            Figure(file="cluster_sharing.json", at=("input_bound", "proportional"), over=("input_bound", "shorter"),
                   shown="{:.2f} × as fast as in proportion where jobs go first that end sooner"),
        ),
        command="python benchmarks/cluster_sharing.py --pollux CHECKOUT --input-bound --policy joint --policy shorter "
        "--policy proportional --policy tuned",
        remark="Goals were 1.5 and 1.15. The other policies run in this project's solver of Pollux's objective.",
    ),
    Claim(
        says="Two runs under the arbiter end sooner than one after the other, or with half of the cluster each",
        source=README,
        where="two emulated hosts, real runs, paced accelerators and preprocessing",
        figures=(
            _arbitrated("arbiter", 1, "seconds", "{:.2f} of the time of a split on a machine at rest", over="split"),
            _arbitrated("arbiter", 0, "seconds", "{:.2f} on a busy one", over="split"),
            _arbitrated("weights", 0, "ratio", "weights 2 and 1 give goodput {:.2f} to 1"),
            _arbitrated("priority", 0, "least_workers_after_s", "an urgent run has its worker after {:.1f} s"),
        ),
        command="python benchmarks/arbitrated_runs.py",
        remark="The goal was 0.8.",
    ),
    Claim(
        says="On GPUs of three types, sharing is as fast as Sia's, and fair",
        source=README,
        where="Sia's own simulator, its 8 workloads of 160 jobs",
        figures=(
            _beside_sia("average_completion_s", "{:.3f} × Sia's mean completion time", over="sia"),
            _beside_sia("worst_fairness_ratio", "worst fairness ratio {:.2f}"),
            _beside_sia("worst_fairness_ratio", "Sia's {:.2f}", policy="sia"),
        ),
        command="python benchmarks/cluster_sharing_sia.py --sia CHECKOUT",
    ),
    Claim(
        says="One hub feeds a thousand cores",
        source=README,
        where="one process stands for 125 cores, on two real ones",
        figures=(
            Figure(file="scale.json", at=("cases", "alone-1000-64", "medians", "cpu_ms_per_block"),
                   shown="{:.2f} ms of CPU a block in the feed's own code"),
        ),
        command="python benchmarks/scale.py",
        remark="With Ray's part of the calls, a hub ends at 190 to 280 blocks a second. In the simulation, light samples reach that "
        "with less than a thousand cores: decoded JPEG files with 160. A run then has several feeds: with stand-ins for a thousand cores, "
        "two and four of them hand out as many blocks as their number says.",
    ),
    Claim(
        says="Accuracy stays when workers come and go",
        source="article on elastic Horovod",
        where="a real ResNet on digits, four schedules of two to eight workers, twenty seeds; time emulated",
        figures=(
            _converged("offload", "±1 each interval", "difference", "a change every minute: {:+.1%} of accuracy beside 8 fixed workers"),
            _converged("offload", "2 → 4 → 8", "difference", "2 → 4 → 8: {:+.1%}"),
            _converged("horovod", "2 → 4 → 8", "difference", "with Horovod's fixed local batch {:+.1%}"),
        ),
        command="python benchmarks/convergence.py",
        picture="convergence.png",
        remark="No worse within a point for changes every one and every three minutes; not shown for 2 → 4 → 8. On Ray, three resizes end "
        "with the emulation's weights to the last bit.",
    ),
    Claim(
        says="Training costs 2 to 20 × less, and takes 10 to 30 × less time",
        source="article on AdaptDL on Ray",
        where="emulated spot clusters, a real ResNet on digits to 80 %, five seeds",
        figures=(
            _cost("input-bound", "offload, cost", "16 fixed", "usd", "{:.1f} × fewer dollars than 16 fixed nodes where the input binds"),
            _cost("GPU-bound", "offload, cost", "16 fixed", "usd", "{:.1f} × where the GPU does"),
            _cost("input-bound", "offload, time", "16 fixed", "seconds", "{:.1f} × less time where the input binds"),
            _cost("GPU-bound", "offload, time", "16 fixed", "seconds", "{:.1f} × where the GPU does"),
            _cost("GPU-bound", "AdaptDL", "16 fixed", "seconds", "AdaptDL's own policy: {:.1f} × less time"),
            _cost("GPU-bound", "AdaptDL", "16 fixed", "usd", "and {:.2f} × fewer dollars where the GPU binds"),
        ),
        command="python benchmarks/accuracy_cost.py",
        picture="accuracy_cost.png",
        remark="Dollars: reproduced where the input binds, and beside clusters that are too large. Time: only where the input binds. "
        "No policy saves both.",
    ),
    Claim(says="Several GPUs, with nccl between them", source=README, remark="No machine with two GPUs has run it."),
    Claim(says="Jobs on AWS", source=README, remark="Emulated hosts, the real training toolkit and moto stand for it."),
    Claim(says="KubeRay", source=README, remark="No cluster has run an emitted file."),
)  # fmt: skip
"""Every claim, in the order of the page."""
