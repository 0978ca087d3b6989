"""The ``offload`` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import offload
from offload.cli.doctor import doctor
from offload.errors import ConfigError, OffloadError

INTERRUPTED = 130


class OffloadGroup(click.Group):
    """Turns the errors meant for users into one paragraph and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OffloadError as error:
            click.echo(f"offload: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("offload: ended at once; the same command resumes from the last checkpoint.", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=OffloadGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(offload.__version__, prog_name="offload")
def main() -> None:
    """Preprocess on every CPU of the cluster, so that GPUs never wait.

    A first look: `offload doctor` checks this machine, `offload demo` trains on real images in a few minutes,
    `offload run SCRIPT` runs your own script (a file that defines build() -> offload.Trainer).
    """


main.add_command(doctor)


def _run_options(command: Any) -> Any:
    options = [
        click.option(
            "--run-dir", type=click.Path(path_type=Path), help="Where the run's files go (default: runs/<name>)."
        ),
        click.option(
            "--overwrite", is_flag=True, help="Replace the run that the directory holds, instead of resuming it."
        ),
        click.option(
            "--address", metavar="HOST:PORT", help='A Ray cluster ("auto": this host\'s). Default: one on this machine.'
        ),
        click.option("--json", "as_json", is_flag=True, help="Print summary.json on stdout, all else on stderr."),
        click.option("--quiet", is_flag=True, help="No live line."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command(context_settings={"ignore_unknown_options": False})
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@_run_options
def run(
    script: Path,
    args: tuple[str, ...],
    run_dir: Path | None,
    overwrite: bool,
    address: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run SCRIPT: a Python file that defines build() -> offload.Trainer.

    Arguments after -- go to the script (its sys.argv):

        offload run train.py --run-dir runs/a -- --epochs 20

    An unfinished run in the directory is resumed. Ctrl-C commits a checkpoint and ends; twice ends at once.
    """
    with _stdout_for_json(as_json) as emit:
        trainer = _guarded(load_script(script, args), script)
        if not isinstance(trainer, offload.Trainer):
            raise ConfigError(
                f"build() in {script} returned {type(trainer).__name__}; it must return an offload.Trainer."
            )
        _fit(trainer, run_dir or Path("runs") / script.stem, overwrite, address, quiet, emit)


@main.command()
@click.option("--images", default=3000, show_default=True, help="How many JPEG files to make.")
@click.option("--epochs", default=5, show_default=True, type=click.IntRange(1), help="How long to train.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=Path("runs/demo-data"),
    show_default=True,
    help="Where the data set goes.",
)
@_run_options
def demo(
    images: int,
    epochs: int,
    data: Path,
    run_dir: Path | None,
    overwrite: bool,
    address: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train a ResNet on a few thousand real JPEGs, preprocessed by every CPU of this machine.

    Makes the data set (once), trains, prints the summary and writes the run directory with a report.
    """
    from offload.cli.demo import build_demo

    with _stdout_for_json(as_json) as emit:
        trainer = build_demo(data, images=images, epochs=epochs)
        _fit(trainer, run_dir or Path("runs/demo"), overwrite, address, quiet, emit)


def _fit(trainer: offload.Trainer, run_dir: Path, overwrite: bool, address: str | None, quiet: bool, emit: Any) -> None:
    from offload.report.run_dir import REPORT

    result = trainer.fit(run_dir=run_dir, overwrite=overwrite, address=address, quiet=quiet)
    emit(result.document, f"{result.summary()}\n\nreport: {result.run_dir / REPORT}")
    if result.status == "interrupted":
        sys.exit(INTERRUPTED)


@contextmanager
def _stdout_for_json(as_json: bool) -> Iterator[Any]:
    """Give a function (document, text) that prints one of them. Under --json stdout is kept for it alone: whatever else
    writes there until the process ends, the user's script and native libraries included, lands on stderr."""
    from offload.report.run_dir import to_json

    if not as_json:
        yield lambda document, text: click.echo(text)
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)

    def emit(document: dict[str, Any], text: str) -> None:
        os.write(kept, (to_json(document, indent=2) + "\n").encode())

    try:
        yield emit
    except OffloadError as error:
        emit({"schema": "offload.error/1", "error": str(error), "exit_code": error.exit_code}, str(error))
        raise
    finally:
        sys.stdout.flush()
        os.close(kept)


def load_script(script: Path, args: tuple[str, ...]) -> Any:
    """The ``build`` of a user's script, imported by its path with ``sys.argv`` set to what follows ``--``. Workers get the
    script by value: they need not be able to import it."""
    import importlib.util

    from ray import cloudpickle

    if not script.is_file():
        raise ConfigError(f"{script} is not a file. Give a Python file that defines build() -> offload.Trainer.")
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    name = script.stem if script.stem.isidentifier() and script.stem not in sys.modules else "offload_user_script"
    spec = importlib.util.spec_from_file_location(name, script.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"{script} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except OffloadError:
        raise
    except Exception as error:
        raise ConfigError(f"{script} cannot be loaded: {_say(error, script)}.") from None
    if not callable(getattr(module, "build", None)):
        raise ConfigError(f"{script} defines no build(). Add one that returns an offload.Trainer.")
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module.build


def _guarded(build: Any, script: Path) -> Any:
    try:
        return build()
    except OffloadError:
        raise
    except Exception as error:
        raise ConfigError(f"build() in {script} raised {_say(error, script)}.") from None


def _say(error: Exception, script: Path) -> str:
    import traceback

    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(script.resolve())]
    return f"{type(error).__name__}: {error}" + (f" (line {own[-1].lineno})" if own else "")
