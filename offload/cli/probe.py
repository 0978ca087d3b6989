"""``offload probe``, which measures a script and writes its profile."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from offload.cli.apply import Applying
from offload.cli.output import stdout_for_json
from offload.cli.script import build_trainer, check_script
from offload.errors import ConfigError
from offload.files import write_text
from offload.measure.findings import Findings, profile_document
from offload.model.checks import check_number
from offload.probe import profile_age
from offload.probe.profile_age import check_usable
from offload.process.interrupts import INTERRUPTED
from offload.report.run_dir import to_json
from offload.report.terminal.probe_text import format_probe


@click.command()
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write profile.json there.")
@click.option(
    "--address",
    metavar="HOST:PORT",
    help='A Ray cluster ("auto": RAY_ADDRESS, or else this host\'s). Default: RAY_ADDRESS, or this machine without Ray.',
)
@click.option(
    "--core-speed",
    type=float,
    default=1.0,
    show_default=True,
    help="Speed of this machine's cores, all of them busy, relative to an ml.c5 vCPU.",
)
@click.option(
    "--loader",
    metavar="NAME",
    help="SCRIPT is a program that iterates over the offload.DataLoader in this variable, and has no build().",
)
@click.option(
    "--apply",
    is_flag=True,
    help="Measure faster equivalents of transforms, and show the change of SCRIPT as a diff. On a terminal, ask whether to write it.",
)
@click.option("--yes", is_flag=True, help="With --apply: write the change without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print profile.json on stdout, everything else on stderr.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def probe(
    script: Path,
    args: tuple[str, ...],
    output: Path | None,
    address: str | None,
    core_speed: float,
    loader: str | None,
    apply: bool,
    yes: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure SCRIPT in about a minute: the rates of its input and of its GPU, and the bottleneck.

    \b
        offload probe train.py -o profile.json -- --epochs 20
        offload plan --profile profile.json --gpu-type ml.g5.xlarge --cpu-type ml.c5.4xlarge

    SCRIPT is a Python file that defines build() -> offload.Trainer. A worker first drains its input without training; then its loop
    runs on replayed batches of several sizes. The probe trains and stores nothing, and leaves nothing behind. Ctrl-C ends the probe
    and writes nothing.

    With --loader NAME, SCRIPT is any program that iterates over an offload.DataLoader. The probe runs it, drains the loader,
    replays some of its batches, and ends the program inside its loop. Files that the program itself writes before its loop stay.

    With --apply, the probe also runs samples of the data set with the classes of offload.transforms in place of torchvision's. It
    prints the core-ms before and after, how far the outputs differ, the predicted input ceiling, and a diff of SCRIPT and of the modules
    beside it.
    """
    from offload.train.driver.platform.choice import check_address

    with stdout_for_json(as_json) as emit:
        # What a profile may hold.
        check_number("--core-speed", core_speed, least=0.01, most=100.0, sane="1 is an ml.c5 vCPU")
        if output is not None and not (os.path.isdir(output.parent) and os.access(output.parent, os.W_OK)):
            raise ConfigError(f"{output} cannot be written: {output.parent} is not a writable folder.")
        if yes and not apply:
            raise ConfigError("--yes writes what --apply shows. Pass --apply, too.")
        applying = Applying(script, yes=yes) if apply else None
        address = check_address(address)
        then = None if applying is None else applying.keep
        known = {"workload": str(script), "measured": _measured(script, core_speed)}
        if loader is not None:
            findings = _of_program(script, args, loader, address=address, quiet=quiet, known=known, then=then)
        else:
            findings = _of_trainer(script, args, address=address, quiet=quiet, known=known, then=then)
        if findings is None:
            click.echo("offload: the probe was interrupted; it has written nothing.", err=True)
            sys.exit(INTERRUPTED)
        document = profile_document(findings)
        check_usable(document)
        said = [format_probe(document)]
        if applying is not None:
            if not quiet:
                click.echo("offload: measuring faster equivalents of transforms", err=True)
            document["equivalents"], text = applying.result(findings)
            said.append(text)
        if output is not None:
            write_text(output, to_json(document, indent=2) + "\n")
        emit(document, "\n\n".join(said))
        if applying is not None and not as_json:
            applying.offer()


def _of_trainer(script: Path, args: tuple[str, ...], *, address: str | None, **named: Any) -> Findings | None:
    from offload.probe.driver import probe as measure

    return measure(build_trainer(script, args, address), address=address, **named)


def _of_program(script: Path, args: tuple[str, ...], loader: str, **named: Any) -> Findings | None:
    from offload.probe.program import probe_program

    check_script(script, "a Python program that iterates over an offload.DataLoader")
    return probe_program(script, args, loader=loader, **named)


def _measured(script: Path, core_speed: float) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"at": now, "core_speed": core_speed, **profile_age.facts(script)}
