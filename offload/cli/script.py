"""Load a user's script, a Python file that defines ``build() -> offload.Trainer``."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from offload import engine
from offload.errors import ConfigError, OffloadError
from offload.files import is_file
from offload.model.checks import shown
from offload.pipeline.program.main_module import imported

if TYPE_CHECKING:
    from offload.train.driver.trainer import Trainer


USAGE = 2  # the exit code with which argparse, click and others refuse arguments


def check_script(script: Path, what: str = "a Python file that defines build() -> offload.Trainer") -> None:
    """Raise ConfigError if the script is not a file; for example a named pipe, which may never deliver anything. ``what``: what to give
    instead."""
    if not is_file(script, "the script"):
        raise ConfigError(f"{script} is not a file. Give {what}.")


def load_script(script: Path, args: tuple[str, ...]) -> Any:
    """Return ``build`` of a user's script, imported by its path with ``sys.argv`` set to the arguments after ``--``. Workers get the
    script by value, so they need not be able to import it."""
    check_script(script)
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
    except SystemExit as error:
        raise _exited(error, str(script), script, args) from None
    except Exception as error:
        raise ConfigError(f"{script} cannot be loaded: {_say(error, script)}.") from None
    if not callable(getattr(module, "build", None)):
        raise ConfigError(
            f"{script} defines no build(). Add one that returns an offload.Trainer. A program that iterates over an offload.DataLoader "
            "runs by itself (python SCRIPT); offload probe measures it with --loader NAME."
        )
    cloudpickle.register_pickle_by_value(module)
    rays = sys.modules.get("ray.cloudpickle")
    if rays is not None:  # the script's functions may be steps of a ray.data.Dataset
        rays.register_pickle_by_value(module)
    imported(module)
    return module.build


def build_trainer(script: Path, args: tuple[str, ...], address: str | None = None) -> Trainer:
    """Return the Trainer of the script's ``build()``. Raises ConfigError if it cannot be called, or returns something else.

    ``address``: the address of the run's cluster. Without one, a script that uses Ray in ``build()``, such as ``ray.data.range``, gets
    a Ray of its own. By itself, Ray would join any cluster that it finds on this machine, or wait for one that refuses it.
    """
    local = address is None and engine.ADDRESS not in os.environ
    if local:
        os.environ[engine.ADDRESS] = "local"
    build = load_script(script, args)
    try:
        trainer = build()
    except OffloadError:
        raise
    except SystemExit as error:
        raise _exited(error, f"build() in {script}", script, args) from None
    except Exception as error:
        raise ConfigError(f"build() in {script} raised {_say(error, script)}.") from None
    from offload.train.driver.trainer import Trainer  # late: mistakes in a script show before torch is imported

    if not isinstance(trainer, Trainer):
        raise ConfigError(f"build() in {script} returned {type(trainer).__name__}; it must return an offload.Trainer.")
    if (
        local
        and not engine.program_uses_ray()
        and all(pipeline.dataset is None for pipeline in trainer.datasets.values())
    ):
        del os.environ[engine.ADDRESS]  # the run needs no Ray
    return trainer


def _exited(error: SystemExit, who: str, script: Path, args: tuple[str, ...]) -> BaseException:
    """The exception to raise after the script exited. A parser of arguments exits after it has printed help or an error."""
    if error.code in (None, 0) and {"-h", "--help"} & set(args):
        return SystemExit(0)
    if error.code == USAGE:
        arguments = shlex.join(args) if args else "none"
        return ConfigError(
            f"{who} rejected its arguments{_line(error, script)}; its message is above. It received {arguments}: put the "
            "script's arguments after --."
        )
    code = "" if error.code is None else shown(error.code)
    return ConfigError(
        f"{who} called sys.exit({code}){_line(error, script)}. Return an offload.Trainer from build(), or raise an exception that "
        "describes the problem."
    )


def _say(error: Exception, script: Path) -> str:
    return f"{type(error).__name__}: {error}{_line(error, script)}"


def _line(error: BaseException, script: Path) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(script.resolve())]
    return f" (line {own[-1].lineno})" if own else ""
