"""The ``offload`` command."""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

import offload
from offload.cli.output import print_error, stdout_for_json
from offload.cli.parameters import options_of
from offload.cli.script import build_trainer, check_script
from offload.errors import OffloadError, argument
from offload.process.interrupts import (
    INTERRUPTED,
    SAID,
    SAID_OF_OTHERS,
    Interrupts,
    LastResort,
    install,
    say_interrupted,
)
from offload.versions import check_versions

COMMANDS = (
    "arbiter",
    "doctor",
    "launch",
    "plan",
    "predict",
    "probe",
    "report",
    "runs",
    "watch",
)  # imported at first use: the handlers of signals come first
_RESUMED = ("run", "demo")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class OffloadGroup(click.Group):
    """A group that turns the errors meant for users into one paragraph and an exit code, and Ctrl-C, SIGTERM and SIGHUP into another
    code."""

    def main(self, args: Sequence[str] | None = None, *others: Any, **named: Any) -> Any:
        if args is not None:  # within another program, which handles its own signals
            return super().main(args, *others, **named)
        interrupts = Interrupts()
        last_resort = LastResort(interrupts)
        install(interrupts)
        try:
            super().main(args, *others, **named)
        except SystemExit as end:
            interrupts.only_count()  # nothing is left to interrupt
            if not interrupts.presses and end.code in (0, None):
                raise
            last_resort.all_said()
            _leave(INTERRUPTED if isinstance(end.__context__, click.Abort) else end.code)
        except OSError as error:
            if error.errno not in _FULL or error.filename is not None:
                raise
            click.echo(
                f"offload: the output cannot be written: {error.strerror}. The command's files are complete.", err=True
            )
            _leave(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *COMMANDS])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[:1] != ["doctor"]:  # which reports versions
            check_versions()  # before any module of a command, which may import Ray
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _RESUMED:
            say_interrupted()
        if cmd_name in COMMANDS:
            command: click.Command = getattr(importlib.import_module(f"offload.cli.{cmd_name}"), cmd_name)
            return command
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            words = sys.argv[1:]
            if "--json" in words[: words.index("--") if "--" in words else None]:
                print_error(error.format_message(), error.exit_code)
            raise
        except OffloadError as error:
            options = options_of(self.get_command(ctx, ctx.invoked_subcommand or ""))
            if not getattr(error, "told", False):
                click.echo("\n".join((f"offload: {error.naming(options)}", *getattr(error, "__notes__", ()))), err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo(SAID if ctx.invoked_subcommand in _RESUMED else SAID_OF_OTHERS, err=True)
            ctx.exit(INTERRUPTED)


def _leave(code: Any) -> None:
    """End the process as Python does, but without tearing down C++ libraries, which may crash in the middle of their work."""
    if not isinstance(code, int | None):  # sys.exit("a message")
        click.echo(code, err=True)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


@click.group(cls=OffloadGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(offload.__version__, prog_name="offload")
def main() -> None:
    """Preprocess on every CPU of the cluster, so that GPUs never wait.

    A first look: `offload doctor` checks this machine, `offload demo` shows in a minute what offloading brings here,
    `offload run SCRIPT` runs your own script (a file that defines build() -> offload.Trainer). Before you rent machines,
    `offload probe SCRIPT` measures it, and `offload plan` recommends machines. `offload watch RUN_DIR` follows a run,
    `offload report RUN_DIR` shows what it did, `offload predict RUN_DIR SCRIPT` writes the outputs of its model. `offload runs` lists the
    runs of a Ray cluster, and pauses, resumes, stops or resizes one.
    """


def _run_options(command: Any) -> Any:
    options = [
        click.option("--run-dir", type=click.Path(), help="Folder of the run's files (default: runs/<name>)."),
        click.option(
            "--overwrite", is_flag=True, help="Replace the run that the directory holds, instead of resuming it."
        ),
        click.option(
            "--address",
            metavar="HOST:PORT",
            help='A Ray cluster ("auto": RAY_ADDRESS, or else this host\'s). Default: RAY_ADDRESS, or this machine without Ray.',
        ),
        click.option(
            "--storage-path",
            metavar="URI",
            help="Folder of checkpoints (default: the script's setting, or the run directory).",
        ),
        click.option(
            "--json", "as_json", is_flag=True, help="Print summary.json on stdout, everything else on stderr."
        ),
        click.option("--quiet", is_flag=True, help="No live line; only what your code prints."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command(context_settings={"ignore_unknown_options": False})
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--max-workers", type=int, metavar="N", help="The most workers, instead of the script's setting.")
@click.option("--cpus-per-worker", type=float, metavar="N", help="CPUs that each worker reserves.")
@click.option("--gpus-per-worker", type=float, metavar="N", help="GPUs that each worker reserves.")
@click.option(
    "--arbiter", is_flag=True, help="Let the cluster's arbiter choose workers and cores (see offload arbiter --help)."
)
@click.option("--weight", type=float, metavar="W", help="With --arbiter: the run's share beside others. Default: 1.")
@click.option("--priority", type=int, metavar="P", help="With --arbiter: higher ones go first. Default: 0.")
@click.option("--watch", is_flag=True, help="A full-screen view instead of the live line.")
@_run_options
def run(
    script: Path,
    args: tuple[str, ...],
    max_workers: int | None,
    cpus_per_worker: float | None,
    gpus_per_worker: float | None,
    arbiter: bool,
    weight: float | None,
    priority: int | None,
    watch: bool,
    run_dir: str | None,
    overwrite: bool,
    address: str | None,
    storage_path: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run SCRIPT: a Python file that defines build() -> offload.Trainer.

    Arguments after -- go to the script (its sys.argv):

        offload run train.py --run-dir runs/a -- --epochs 20

    The command resumes an unfinished run in the directory. Ctrl-C commits a checkpoint and ends; twice ends at once. SIGTERM and
    SIGHUP do the same. Exit codes: 0 success, 130 interrupted, 2 an error before the first step, 1 a later failure.
    """
    from offload.report.terminal.full_screen import check_view
    from offload.train.config import WorkerOverrides
    from offload.train.driver.platform.choice import check_address

    numbers = {"max_workers": max_workers, "cpus_per_worker": cpus_per_worker, "gpus_per_worker": gpus_per_worker}
    with stdout_for_json(as_json) as emit:
        # Check these before the script runs, which may take long.
        WorkerOverrides(**numbers)  # type: ignore[arg-type]
        check_view(quiet=quiet, watch=watch)
        check_script(script)
        address = check_address(address)
        trainer = build_trainer(script, args, address).with_workers(**numbers)  # type: ignore[arg-type]
        trainer = trainer.with_sharing(arbiter=arbiter, weight=weight, priority=priority)
        where: str | Path = Path("runs") / script.stem if run_dir is None else run_dir
        _fit(trainer, where, overwrite, address, storage_path, quiet, emit, watch=watch)


@main.command()
@click.option("--images", default=1500, show_default=True, type=click.IntRange(50), help="How many JPEG files to make.")
@click.option("--epochs", default=3, show_default=True, type=click.IntRange(1), help="How long to train.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=Path("runs/demo-data"),
    show_default=True,
    help="Folder of the data set.",
)
@click.option(
    "--compare/--no-compare",
    default=True,
    help="Whether to compare a DataLoader on a part of the cores with offload on all, before the training.  [default: compare]",
)
@_run_options
def demo(
    images: int,
    epochs: int,
    data: Path,
    compare: bool,
    run_dir: str | None,
    overwrite: bool,
    address: str | None,
    storage_path: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show what offloading brings on this machine, then train a small ResNet on the same images.

    First it makes the data set of real JPEGs (once). Then a loop runs for 5 s with torch's DataLoader, whose workers have the GPU host's
    share of the cores (a quarter, at least one), and for 5 s with offload.DataLoader on every CPU. Before the second loop, the model
    predicts its rate. This emulates a GPU host and a CPU host on one machine. Without a GPU, a paced accelerator stands in for it,
    which takes time and computes nothing. With an address, the cluster may have other machines, and there is no comparison.

    At last it trains, prints the summary, and writes the run directory with a report. The training computes on the GPU, or on a CPU core
    in its place, which then is the bottleneck. RUN_DIR also gets comparison.html, .png and .json.

    \b
        offload demo                                # resumes the training if it was interrupted
        offload demo --overwrite                    # begins again
        offload demo --no-compare --epochs 10       # only trains
    """
    from offload.cli.demo.picture import compare_and_show
    from offload.cli.demo.workload import build_demo, make_data
    from offload.machine import usable_cores
    from offload.model.checks import check_path
    from offload.report.run_dir import RunDirectory
    from offload.report.terminal.live_line import stderr_console
    from offload.train.driver.platform.choice import check_address

    with stdout_for_json(as_json) as emit:
        # Check these before anything takes time.
        address = check_address(address)
        where = check_path(
            argument("run_dir"), "runs/demo" if run_dir is None else run_dir, sane="a folder, such as runs/a"
        )
        RunDirectory(Path(where), overwrite=overwrite)
        console = stderr_console(quiet=quiet)
        try:
            made = make_data(data, images, console)
            here = address in (None, "local")
            if compare and not here:
                console.print(f"no comparison: the cluster at {address} may have other machines", soft_wrap=True)
            after = compare_and_show(made.train, console) if compare and here else None
        except KeyboardInterrupt:
            click.echo(SAID_OF_OTHERS, err=True)
            sys.exit(INTERRUPTED)
        trainer = build_demo(made, epochs=epochs)
        if here and usable_cores() < 2:  # the worker and preprocessing share it
            trainer = trainer.with_workers(cpus_per_worker=0.0)
        _fit(trainer, where, overwrite, address, storage_path, quiet, emit, after)


def _fit(
    trainer: offload.Trainer,
    run_dir: str | Path,
    overwrite: bool,
    address: str | None,
    storage_path: str | None,
    quiet: bool,
    emit: Any,
    after: Callable[[Path], tuple[dict[str, Any], str]] | None = None,
    *,
    watch: bool = False,
) -> None:
    """Train and print the result. ``after`` may add fields to the document and a line to the text of a finished run."""
    from offload.report.run_dir import REPORT

    result = trainer.fit(
        run_dir=run_dir, overwrite=overwrite, address=address, storage_path=storage_path, quiet=quiet, watch=watch
    )
    document, text = result.document, f"{result.summary()}\n\nreport: {result.run_dir / REPORT}"
    if after is not None and result.status == "finished":
        fields, line = after(result.run_dir)
        document, text = document | fields, f"{text}\n{line}".rstrip()
    emit(document, text)
    if result.status == "interrupted":
        sys.exit(INTERRUPTED)
