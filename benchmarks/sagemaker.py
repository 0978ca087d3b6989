"""A single GPU instance against the same instance with additional CPU instances, as SageMaker jobs: time, utilisation, price efficiency.

    # On AWS, with the published workload (examples/vit_blur.py). This costs money: at most --max-usd per job.
    python benchmarks/sagemaker.py --role ARN --bucket BUCKET --image-uri URI --profile profile.json

    # Here, without an account: the same launcher, requests, bundle, `train` command and entry, on emulated hosts of one core each, with
    # a paced accelerator instead of a GPU.
    python benchmarks/sagemaker.py --emulate [-o benchmarks/results/sagemaker.json]

Times come from the jobs' descriptions, rates and utilisation (1 - stall) from the metrics that the entry prints, and predictions from
`offload plan` before the jobs run; with --emulate, on a probe before each pair of jobs. Repeats alternate, and the benchmark prints
medians. With --emulate it also measures the time from the last host's start to the first batch.
"""

import contextlib
import json
import logging
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script
sys.path.sort(key=lambda path: path == str(Path(__file__).resolve().parent))  # last: `sagemaker` is the SDK

from benchmarks.rows.protocol import STEADY_FROM, STEADY_TO
from benchmarks.side_by_side import cores, machine, versions
from offload.errors import ConfigError, OffloadError
from offload.launch.sagemaker.container.progress_lines import over_all, read_progress
from offload.launch.sagemaker.groups import groups_of
from offload.launch.sagemaker.job_template import JobTemplate, job_name
from offload.launch.sagemaker.launcher import SageMakerLauncher, prepare
from offload.launch.sagemaker.service import Service
from offload.model import Catalog, NodeType, Profile
from offload.model.planning.planner import plan
from offload.prices import built_in
from tests.emulation import Hosts, HostSpec
from tests.emulation.training_service import TrainingService

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "examples" / "vit_blur.py"
PACED = ROOT / "benchmarks" / "jobs" / "paced_blur.py"
RATE = 200.0  # of the paced accelerator, samples/s: above what two cores preprocess
BATCH_SIZE = 32
PROBED_SAMPLES = 10_000
SINGLE, OFFLOADED = "single", "offloaded"

say = Console(stderr=True, highlight=False).print


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where the benchmark launches, and what. ``profile``: the workload's, as probed before each pair of jobs."""

    service: Service
    template: JobTemplate
    script: Path
    catalog: Catalog
    profile: Callable[[], Profile]
    batch_size: int
    emulated: TrainingService | None = None


@click.command()
@click.option("--emulate", is_flag=True, help="Run on emulated hosts with a paced accelerator. Needs no account.")
@click.option("--role", metavar="ARN")
@click.option("--bucket")
@click.option("--image-uri")
@click.option("--region")
@click.option(
    "--profile", "profile_path", type=click.Path(path_type=Path), help="The workload's profile (offload probe)."
)
@click.option("--gpu-speed", type=float, help="As for offload plan.")
@click.option("--gpu", default="ml.g5.xlarge:1", show_default=True, metavar="TYPE:COUNT")
@click.option("--cpu", default="ml.c5.4xlarge:1", show_default=True, metavar="TYPE:COUNT")
@click.option("--samples", type=int, help="Default: 64,000 (as published); emulated, 3,000.")
@click.option("--max-usd", default=5.0, show_default=True, help="Most dollars that each job may cost.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Repeats of both jobs.")
@click.option("--json", "as_json", is_flag=True)
@click.option("-o", "--output", type=click.Path(path_type=Path))
def main(
    emulate: bool, gpu: str, cpu: str, gpu_speed: float | None, repeats: int, as_json: bool, output: Path | None, **given: Any,
) -> None:  # fmt: skip
    """Compare a single instance with an offloaded job."""
    with _emulated(given) if emulate else _on_aws(given) as setting:
        shapes = {SINGLE: groups_of(gpu, []), OFFLOADED: groups_of(gpu, [cpu])}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in shapes}
        predicted: dict[str, list[dict[str, float]]] = {name: [] for name in shapes}
        profiles: list[dict[str, float]] = []
        for number in range(1, repeats + 1):
            profile = setting.profile()
            profiles.append(
                {
                    "core_seconds_per_sample": profile.input.core_seconds_per_sample,
                    "wire_bytes_per_sample": profile.input.wire_bytes_per_sample,
                }
            )
            for name, groups in shapes.items():
                shape = {group.instance_type: group.count for group in groups}
                predicted[name].append(_predicted(setting, profile, shape, gpu_speed))
            for name, groups in shapes.items():
                say(f"{name}, {number} of {repeats}")
                runs[name].append(_run(setting, groups))
            document = _document(runs, predicted, emulate) | {"profiles": profiles}
            if output is not None:  # keep what has been paid for, whatever happens next
                output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1)) if as_json else _show(document)


def _document(
    runs: Mapping[str, Sequence[Mapping[str, float]]],
    predicted: Mapping[str, Sequence[Mapping[str, float]]],
    emulate: bool,
) -> dict[str, Any]:
    rows = {name: _row(runs[name], predicted[name]) for name in runs}
    return {
        "benchmark": "sagemaker",
        "claim": "the published workload: a single instance against an offloaded heterogeneous job",
        "accelerator": "paced accelerator" if emulate else "GPU",
        "emulated": emulate,
        "command": " ".join(["python", "benchmarks/sagemaker.py", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "rows": rows,
        "offloaded_over_single": _ratios(rows),
    }


def _run(setting: Setting, groups: Any) -> dict[str, Any]:
    """Run one job, from its request to its end. Whatever happens here, no job is left running."""
    name = job_name(setting.script, datetime.now(UTC))
    [job] = prepare(setting.template, name, [groups], setting.script, setting.catalog).jobs
    launcher = SageMakerLauncher(setting.service, setting.catalog, "estimator")
    lines: list[str] = []
    try:
        say(f"  {launcher.submit(job)}")
        state = launcher.watch(name, lines.append, lines.append)
    except BaseException:
        with contextlib.suppress(OffloadError):  # the job may not have been started
            launcher.stop(name, say, wait=False)
        raise
    progress = [found for line in lines if (found := read_progress(line))]
    if state["status"] != "Completed" or not progress:
        why = state["failure_reason"] or "no metrics were found in its log"
        raise click.ClickException("\n".join([*lines[-30:], f"{name} ended as {state['status']}: {why}"]))
    # The steady state, as in the other benchmarks. Before it, the worker consumes what was preprocessed while it started.
    steps = progress[-1]["step"]
    steadily = [each for each in progress if STEADY_FROM * steps <= each["step"] <= STEADY_TO * steps]
    steady = over_all(steadily[1:], since=steadily[0])
    found = {
        "time_s": state["seconds"],
        "samples_per_s": steady["samples_per_s"],
        "step_time_s": setting.batch_size / steady["samples_per_s"],
        "utilisation": 1 - steady["stall"],
        "usd_per_million_samples": state["usd_per_hour"] / 3600 / steady["samples_per_s"] * 1e6,
    }
    if setting.emulated is not None:
        first = re.search(r"first batch at ([\d.]+)", "\n".join(lines))
        assert first is not None
        found["start_to_first_batch_s"] = float(first[1]) - setting.emulated.jobs[name].started_at
    say("  " + "  ".join(f"{key} {value:.4g}" for key, value in found.items()))
    return found


def _predicted(
    setting: Setting, profile: Profile, shape: Mapping[str, int], gpu_speed: float | None
) -> dict[str, float]:
    gpu, *cpus = shape
    made = plan(
        profile,
        setting.catalog,
        gpu_types=[gpu],
        gpu_nodes=(shape[gpu], shape[gpu]),
        cpu_types=cpus,
        cpu_nodes=(shape[cpus[0]], shape[cpus[0]]) if cpus else (0, 0),
        batch_size=setting.batch_size,
        gpu_speed=gpu_speed,
    )
    found = next(c for c in made.candidates if {k: n for k, n in c.shape.items() if n} == shape)
    return {
        "samples_per_s": found.samples_per_s,
        "step_time_s": found.step_time_s,
        "utilisation": 1 - found.stall,
        "usd_per_million_samples": found.usd_per_million_samples,
    }


def _row(runs: Sequence[Mapping[str, float]], predicted: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {**_medians(runs), "predicted": _medians(predicted), "repeats": [*runs], "predictions": [*predicted]}


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def _ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return what offloading changed, as medians of the pairs' ratios. Efficiency is samples per dollar."""
    pairs = list(zip(rows[OFFLOADED]["repeats"], rows[SINGLE]["repeats"], strict=True))

    def ratio(key: str) -> float:
        return float(statistics.median(a[key] / b[key] for a, b in pairs))

    found = {"samples_per_s": ratio("samples_per_s"), "price_efficiency": 1 / ratio("usd_per_million_samples")}
    if "start_to_first_batch_s" in pairs[0][0]:
        found["start_to_first_batch"] = ratio("start_to_first_batch_s")
    told = [rows[name]["predicted"]["usd_per_million_samples"] for name in (SINGLE, OFFLOADED)]
    return {**found, "predicted_price_efficiency": told[0] / told[1]}


def _show(document: Mapping[str, Any]) -> None:
    table = Table("", "time", "step time", "utilisation", "samples/s", "$ per million", title="measured (predicted)")
    for name, row in document["rows"].items():
        told = row["predicted"]
        table.add_row(
            name,
            f"{row['time_s']:,.0f} s",
            f"{row['step_time_s']:.3f} s ({told['step_time_s']:.3f})",
            f"{row['utilisation']:.0%} ({told['utilisation']:.0%})",
            f"{row['samples_per_s']:,.1f} ({told['samples_per_s']:,.1f})",
            f"{row['usd_per_million_samples']:,.2f} ({told['usd_per_million_samples']:,.2f})",
        )
    console = Console(highlight=False)
    console.print(table)
    ratios = document["offloaded_over_single"]
    console.print(
        f"price efficiency {ratios['price_efficiency'] - 1:+.0%} (predicted {ratios['predicted_price_efficiency'] - 1:+.0%}), "
        f"{ratios['samples_per_s']:.2f} × the samples/s; utilisation refers to the {document['accelerator']}"
    )
    if "start_to_first_batch" in ratios:
        console.print(f"start to first batch: {ratios['start_to_first_batch']:.2f} × that of one host")


@contextmanager
def _on_aws(given: Mapping[str, Any]) -> Iterator[Setting]:
    missing = [f"--{name.replace('_', '-')}" for name in ("role", "bucket", "image_uri") if not given[name]]
    if given["profile_path"] is None or missing:
        raise click.UsageError(f"{', '.join([*missing, '--profile'])} is needed on AWS; --emulate needs none.")
    service = Service(given["region"])
    profile = Profile.from_document(json.loads(given["profile_path"].read_text()), source=str(given["profile_path"]))
    samples = given["samples"] or 64_000
    yield Setting(
        service=service,
        template=JobTemplate(
            script=PUBLISHED.name,
            args=("--samples", str(samples)),
            role=given["role"],
            bucket=given["bucket"],
            image=given["image_uri"],
            region=service.region,
            max_usd=given["max_usd"],
        ),
        script=PUBLISHED,
        catalog=built_in(),
        profile=lambda: profile,
        batch_size=64,
    )


@contextmanager
def _emulated(given: Mapping[str, Any]) -> Iterator[Setting]:
    """Emulate two hosts with one core each, under the names and prices of the real instances."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    first, last = cores()
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts({"algo-1": HostSpec(core=first), "algo-2": HostSpec(core=last)}))
        moto = ThreadedMotoServer(hosts.gateway, 5555, verbose=False)
        moto.start()
        stack.callback(moto.stop)
        environment = {
            "AWS_ENDPOINT_URL": f"http://{hosts.gateway}:5555",
            "AWS_ACCESS_KEY_ID": "emulated",
            "AWS_SECRET_ACCESS_KEY": "emulated",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "OMP_NUM_THREADS": "1",
        }
        emulated = stack.enter_context(TrainingService(hosts, environment))
        os.environ.update(environment, AWS_ENDPOINT_URL_SAGEMAKER=emulated.url)
        service = Service("us-east-1")
        service.s3.create_bucket(Bucket="emulated")
        samples = given["samples"] or 3000
        yield Setting(
            service=service,
            template=JobTemplate(
                script=PACED.name,
                args=("--samples", str(samples), "--rate", str(RATE), "--batch-size", str(BATCH_SIZE)),
                role="arn:aws:iam::123456789012:role/emulated",
                bucket="emulated",
                image="emulated/image:1",
                region="us-east-1",
            ),
            script=PACED,
            catalog=_catalog_of_cores(),
            profile=lambda: _profile(hosts),
            batch_size=BATCH_SIZE,
            emulated=emulated,
        )


def _profile(hosts: Hosts) -> Profile:
    """The paced workload's profile, probed on both hosts at once."""
    command = [sys.executable, "-m", "offload", "probe", str(PACED), "--json", "--quiet", "--"]
    arguments = ["--samples", str(PROBED_SAMPLES), "--batch-size", str(BATCH_SIZE), "--any-host"]
    runs = [
        host.popen([*command, *arguments], env={"OMP_NUM_THREADS": "1"}, cwd=ROOT, stdout=subprocess.PIPE)
        for host in hosts.values()
    ]
    documents = [json.loads(run.communicate()[0]) for run in runs]
    if any(run.returncode for run in runs):
        raise click.ClickException("the probe failed: see above.")
    costs = [document["input"]["core_seconds_per_sample"] for document in documents]
    say(f"a sample costs {', '.join(f'{1000 * cost:.1f}' for cost in costs)} core-ms on the two hosts")
    document = documents[0]
    document["input"]["core_seconds_per_sample"] = statistics.mean(costs)
    # The paced accelerator is the planned one.
    document["step"]["device"] = None
    return Profile.from_document(document, source="the emulation")


def _catalog_of_cores() -> Catalog:
    """Return a catalog with the real instances' names and prices, and the emulated hosts' cores."""
    real = built_in()
    return Catalog(
        {
            name: NodeType(
                name=name,
                vcpus=1,
                memory_gib=8,
                gpus=real[name].gpus,
                gpu_model=real[name].gpu_model,
                network_gbps=10,
                usd_per_hour=real[name].usd_per_hour,
            )
            for name in ("ml.g5.xlarge", "ml.c5.4xlarge")
        }
    )


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"sagemaker: {error}")
