"""A spot notice: the seconds from the notice in the instance's metadata service until the run has committed and left the node.

    python benchmarks/spot_notice.py [--json] [-o benchmarks/results/spot_notice.json]

Two emulated hosts have one core and one worker each. The second is a spot node. Its metadata service, an emulated one that speaks IMDSv2
over HTTP, gives notice once the example trains. AWS leaves two minutes; the goal is a checkpoint within 20 s.

All times count from the notice. `checkpoint_s`: the checkpoint is written. `left_s`: no part of the run is on the node any more, so that
Ray ends the node. `going_on_s`: the first step without the node. Then the hosts end. Nothing is lost or repeated if the run resumed from
what the workers recorded, no sample comes twice in a pass, and no step was made twice.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.side_by_side import ENVIRONMENT, ROOT, SHM_BYTES, cores, machine, versions
from offload.demo_data import make_demo_data
from offload.report.run_dir import read_lines
from tests.emulation import Host, HostProcess, Hosts, HostSpec
from tests.emulation.history import each_pass, read_history
from tests.emulation.metadata_service import MetadataService

HEAD, SPOT = "head", "spot-1"
GOAL_S = 20.0
START_S, NOTICE_S = 120.0, 120.0
STEPS_BEFORE = 4  # trained before the notice, so that the run has settled
LOOK_S = 0.1
EXAMPLES = {
    "vit_blur": ["--uint8", "--samples", "20000", "--batch-size", "16", "--depth", "1"],
    "image_classification": ["DATA", "--model", "resnet10t", "--pixels", "64", "--epochs", "1000"],
}
MEDIANS = ("noticed_s", "checkpoint_s", "left_s", "going_on_s")

say = Console(stderr=True, highlight=False).print


@click.command(help=__doc__)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Of each example.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(repeats: int, as_json: bool, output: Path | None) -> None:
    load = os.getloadavg()  # of other programs: the benchmark needs an idle machine
    results = {}
    for example, arguments in EXAMPLES.items():
        each = [_one(example, arguments) for _ in range(repeats)]
        results[example] = {
            **{name: statistics.median(one[name] for one in each) for name in MEDIANS},
            **{name: sum(one[name] for one in each) for name in ("lost", "repeated", "repeated_steps")},
            "arguments": arguments,
            "each": each,
        }
        say(f"{example}: { {k: v for k, v in results[example].items() if k != 'each'} }")
    document = {
        "benchmark": "spot_notice",
        "claim": "from a spot notice to a committed checkpoint, and to the node being left",
        "goal": {"checkpoint_s": GOAL_S},
        "emulated": True,
        "examples": results,
        "load_average_before": load,
        "machine": machine(),
        "versions": versions(),
        "command": " ".join(["python", "benchmarks/spot_notice.py", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document) if as_json else json.dumps(document, indent=1))


def _one(example: str, arguments: list[str]) -> dict[str, Any]:
    """Run the example once, and give notice."""
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    specs = {name: HostSpec(core=core, shm_bytes=SHM_BYTES) for name, core in zip((HEAD, SPOT), cores(), strict=True)}
    with Hosts(specs) as hosts, MetadataService(hosts.gateway) as service:
        place = '--resources={"place": 1}'
        hosts.start_ray(
            HEAD,
            num_cpus=dict.fromkeys(specs, 2),  # half a CPU for a worker, and one that preprocesses
            env={**environment, "AWS_EC2_METADATA_SERVICE_ENDPOINT": service.url},
            extra_args={HEAD: [place], SPOT: [place, "--labels=ray.io/market-type=spot"]},
        )
        folder = hosts.folder / "job"
        folder.mkdir()
        if "DATA" in arguments:
            data = make_demo_data(folder / "data", images=1000).train.parent
            arguments = [str(data) if argument == "DATA" else argument for argument in arguments]
        with (folder / "output").open("w") as said:
            job = hosts[HEAD].popen(
                [sys.executable, "-m", "benchmarks.jobs.spot_example", str(folder), example, *arguments],
                env=environment,
                cwd=ROOT,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        return {**_notice(hosts[SPOT], service, folder, job), **_counted(folder)}


def _notice(spot: Host, service: MetadataService, folder: Path, job: HostProcess) -> dict[str, float]:
    """Give notice once the run has settled. Return when it did what, in seconds from the notice."""

    def wait_for(what: Callable[[], float | None], deadline_s: float) -> float:
        until = time.monotonic() + deadline_s
        while (found := what()) is None:
            if job.poll() is not None or time.monotonic() > until:
                raise click.ClickException(f"the run ended or hung:\n{(folder / 'output').read_text()[-3000:]}")
            time.sleep(LOOK_S)
        return found

    def event(kind: str, **values: Any) -> Callable[[], float | None]:
        def look() -> float | None:
            for each in read_lines(folder / "run" / "events.jsonl"):
                if each["event"] == kind and each["at"] > noticed_at and values.items() <= each.items():
                    return float(each["at"])
            return None

        return look

    def left() -> float | None:
        return None if any(map(_is_raylet, spot.pids())) else time.time()

    noticed_at = 0.0
    wait_for(lambda: time.time() if _steps(folder) >= STEPS_BEFORE else None, START_S)
    noticed_at = time.time()
    service.give_notice()
    told_at = wait_for(event("spot_notice"), NOTICE_S)
    left_at = wait_for(left, NOTICE_S)
    going_on_at = wait_for(event("first_step"), NOTICE_S)
    # The checkpoint that the run resumed from: the notice's, or an epoch's last one if the two coincided.
    (step,) = (each["step"] for each in read_lines(folder / "run" / "events.jsonl") if each["event"] == "resumed")
    ats = {
        "noticed_s": told_at,
        "checkpoint_s": wait_for(event("checkpoint", step=step), NOTICE_S),
        "left_s": left_at,
        "going_on_s": going_on_at,
    }
    return {name: round(at - noticed_at, 2) for name, at in ats.items()}


def _is_raylet(pid: int) -> bool:
    try:
        return psutil.Process(pid).name() == "raylet"
    except psutil.Error:  # the process ended meanwhile
        return False


def _steps(folder: Path) -> int:
    return max((len(read_lines(path)) for path in (folder / "log").glob("*-0.jsonl")), default=0)


def _counted(folder: Path) -> dict[str, int]:
    """Count what the run lost or repeated when it left the node: compare the workers' records with the checkpoint resumed from."""
    events = read_lines(folder / "run" / "events.jsonl")
    (began,) = (each for each in events if each["event"] == "run_started")
    (resumed,) = (each for each in events if each["event"] == "resumed")
    history, epoch = read_history(folder / "log"), resumed["epoch"]
    before = each_pass([line for line in history if line["step"] < resumed["step"]])
    samples = began["datasets"]["train"]["samples"]
    credited = sum(samples for each in before if each < epoch) + resumed["trained"]
    seen = sum(each.total() for each in each_pass(history).values())
    distinct = sum(map(len, each_pass(history).values()))
    steps = [line["step"] for path in (folder / "log").glob("*-0.jsonl") for line in read_lines(path)]
    return {
        "steps": resumed["step"],
        "lost": credited - sum(map(len, before.values())),
        "repeated": seen - distinct,
        "repeated_steps": len(steps) - len(set(steps)),
    }


if __name__ == "__main__":
    main()
