"""Checks everything of offload that only a GPU can show, in ten minutes at most.

    make gpu-check       # or: python benchmarks/gpu_check.py [-o benchmarks/results/gpu.json]

Each check runs in a process of its own with a deadline. A crash or a hang of one ends that one alone. A check that needs a second GPU,
or a package that is not installed, is "not applicable", with the reason. A check that no longer fits into the budget is "not run".
Nothing is downloaded. A machine without an index gets what its Python lacks, such as Ray, from a folder of wheels (--wheel).
With --resume, checks that passed in the output file on the same GPUs keep their results, and only the others run.

Exit code 0 if nothing failed, 1 if a check failed, 2 for wrong options or no GPU.
"""

import json
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side
from benchmarks.gpu.checks import CHECKS, NAMES
from benchmarks.gpu.supervise import Check, Outcome, run_all
from benchmarks.gpu.wheels import install
from offload.cli.doctor import torch_facts

GPU_RESULT = "gpu.json"
COLOURS = {"passed": "green", "failed": "red", "not applicable": "cyan", "not run": "yellow"}


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the document there as JSON."
)
@click.option(
    "--budget-s",
    default=600.0,
    show_default=True,
    type=click.FloatRange(min=1, max=86400),
    help="Seconds for all checks.",
)
@click.option("--resume", is_flag=True, help="Keep what passed in the output file, and run the rest.")
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="Run this check; may be repeated.")
@click.option(
    "--wheel",
    type=click.Path(path_type=Path, exists=True),
    help="A wheel, or a folder of wheels: packages that this Python lacks, such as Ray, come from there for this run.",
)
@click.option(
    "--cpu", is_flag=True, help="Run stand-ins with tiny sizes on the CPU, as tests do. They yield no GPU figures."
)
def main(
    as_json: bool,
    output: Path | None,
    budget_s: float,
    resume: bool,
    only: Sequence[str],
    wheel: Path | None,
    cpu: bool,
) -> None:
    began = time.monotonic()
    if output is not None and not (output.parent.is_dir() and os.access(output.parent, os.W_OK)):
        raise click.ClickException(f"{output} cannot be written: {output.parent} is not a writable folder.")
    if cpu and output is not None and output.name == GPU_RESULT:
        raise click.ClickException(f"--cpu yields no GPU figures: pass another name than {GPU_RESULT} to -o.")
    with tempfile.TemporaryDirectory(prefix="offload-wheels-") as folder:
        path = install(wheel, Path(folder)) if wheel is not None else []
        gpus = [] if cpu else _gpus()
        kept = _passed(output, gpus) if resume else {}
        chosen = [check for check in CHECKS if check.name not in kept and (not only or check.name in only)]
        console = Console(stderr=True)

        def told(check: Check) -> None:
            console.print(f"{time.monotonic() - began:4.0f} s  {check.name}", highlight=False)

        found = run_all(
            chosen, device="cpu" if cpu else "cuda", gpus=len(gpus), until=began + budget_s, path=path, told=told
        )
        every = {each.name: each for each in found} | kept
        outcomes = [every[check.name] for check in CHECKS if check.name in every]
        document = document_of(outcomes, gpus=gpus, cpu=cpu, budget_s=budget_s, seconds=time.monotonic() - began)
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        _print_table(outcomes, document)
    sys.exit(int(any(each.status == "failed" for each in outcomes)))


def _passed(output: Path | None, gpus: Sequence[str]) -> dict[str, Outcome]:
    """The outcomes in the output file that passed, by name. Raises ClickException if they are of other GPUs."""
    if output is None:
        raise click.ClickException("--resume needs the file of an earlier run: name it with -o.")
    if not output.exists():
        return {}
    try:
        document = json.loads(output.read_text())
        before, outcomes = document["gpus"], [Outcome(**each) for each in document["checks"]]
    except (ValueError, TypeError, KeyError):
        raise click.ClickException(f"--resume: {output} is no result of this command. Remove it.") from None
    if before != list(gpus):
        had, has = (", ".join(names) or "no GPU" for names in (before, gpus))
        raise click.ClickException(f"--resume: {output} was measured on {had}, and this machine has {has}. Remove it.")
    return {each.name: each for each in outcomes if each.status == "passed"}


def _gpus() -> list[str]:
    """The names of the GPUs. Raises ClickException, with the remedy, if torch cannot use any."""
    facts = torch_facts()
    if facts.gpus:
        return list(facts.gpus)
    if facts.error or facts.torch is None:
        why = f"torch cannot be imported ({facts.error or 'it is not installed'})"
    elif facts.cuda is None:
        why = f"torch {facts.torch} is built for CPUs only"
    else:
        why = "torch finds no GPU"
    raise click.ClickException(
        f"{why}: run this on a machine with an NVIDIA GPU and a CUDA build of torch, or pass --cpu for stand-ins without GPU figures."
    )


def document_of(
    outcomes: Sequence[Outcome], *, gpus: Sequence[str], cpu: bool, budget_s: float, seconds: float
) -> dict[str, Any]:
    """The content of the file."""
    return {
        "benchmark": "gpu_check",
        "claim": "nothing fails of what only a GPU can show",
        "command": shlex.join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": side_by_side.hardware(),
        "versions": side_by_side.versions(),
        "device": "cpu" if cpu else "cuda",
        "gpus": list(gpus),
        "note": "stand-ins on the CPU: no figure here is a GPU's" if cpu else "",
        "budget_s": budget_s,
        "seconds": round(seconds, 1),
        "outcomes": dict(Counter(each.status for each in outcomes)),
        "checks": [asdict(each) for each in outcomes],
    }


def _print_table(outcomes: Sequence[Outcome], document: dict[str, Any]) -> None:
    # Without a terminal, a line of the file is a line of the table.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    table = Table(box=None, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("found", overflow="fold")
    for each in outcomes:
        status = Text(each.status, style=COLOURS[each.status])
        table.add_row(each.name, status, f"{each.seconds:.1f}", Text(each.said or each.reason))
    console.print(table)
    where = ", ".join(f"{document['gpus'].count(name)} × {name}" for name in dict.fromkeys(document["gpus"]))
    counts = ", ".join(f"{count} {status}" for status, count in document["outcomes"].items())
    console.print(Text(f"\n{counts} in {document['seconds']:.0f} s on {where or document['note']}"))


def run(arguments: Sequence[str] | None = None) -> None:
    """The command; a wrong option gives one sentence and exit code 2."""
    try:
        main(arguments, standalone_mode=False)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        print(f"gpu-check: {error.format_message()}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run()
