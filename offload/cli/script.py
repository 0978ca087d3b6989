"""Load a user's script, a Python file that defines ``build() -> offload.Trainer``, or ``predictor() -> offload.Predictor``."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import cloudpickle

from offload import engine
from offload.errors import ConfigError, OffloadError
from offload.files import is_file
from offload.model.checks import shown
from offload.pipeline.program.main_module import imported

if TYPE_CHECKING:
    from offload.inference.predictor import Predictor
    from offload.train.driver.trainer import Trainer


_Result = TypeVar("_Result")

USAGE = 2  # the exit code with which argparse, click and others refuse arguments


def check_script(script: Path, what: str = "a Python file that defines build() -> offload.Trainer") -> None:
    """Raise ConfigError if the script is not a file; for example a named pipe, which may never deliver anything. ``what``: what to give
    instead."""
    if not is_file(script, "the script"):
        raise ConfigError(f"{script} is not a file. Give {what}.")


def load_script(script: Path, args: tuple[str, ...]) -> Any:
    """Return a user's script as a module, imported by its path with ``sys.argv`` set to the arguments after ``--``. Workers get the
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
    cloudpickle.register_pickle_by_value(module)
    rays = sys.modules.get("ray.cloudpickle")
    if rays is not None:  # the script's functions may be steps of a ray.data.Dataset
        rays.register_pickle_by_value(module)
    imported(module)
    return module


def build_trainer(script: Path, args: tuple[str, ...], address: str | None = None) -> Trainer:
    """Return the Trainer of the script's ``build()``. Raises ConfigError if it cannot be called, or returns something else.

    ``address``: the address of the run's cluster. Without one, a script that uses Ray in ``build()``, such as ``ray.data.range``, gets
    a Ray of its own. By itself, Ray would join any cluster that it finds on this machine, or wait for one that refuses it.
    """

    def kind() -> type[Trainer]:
        from offload.train.driver.trainer import Trainer

        return Trainer

    remedy = (
        "Add one that returns an offload.Trainer. A program that iterates over an offload.DataLoader runs by itself (python SCRIPT); "
        "offload probe measures it with --loader NAME."
    )

    def needs_ray(trainer: Trainer) -> bool:
        return any(pipeline.dataset is not None for pipeline in trainer.datasets.values())

    return _built(script, args, address, _Function("build", kind, remedy, needs_ray))


def build_predictor(script: Path, args: tuple[str, ...], address: str | None = None) -> Predictor:
    """Return the Predictor of the script's ``predictor()``. Raises ConfigError as :func:`build_trainer` does."""

    def kind() -> type[Predictor]:
        from offload.inference.predictor import Predictor

        return Predictor

    remedy = (
        "Add one that returns an offload.Predictor: the function that builds the model, the data and their preprocessing, such as "
        'return offload.Predictor(build_model, build().datasets["val"]).'
    )
    return _built(script, args, address, _Function("predictor", kind, remedy, lambda predictor: predictor.needs_ray))


class _Function(NamedTuple, Generic[_Result]):
    """A function that a script defines for a command.

    Args:
        kind: the class of its result. Only called after the script: mistakes in a script show before torch is imported.
        remedy: what to say where it is missing.
        needs_ray: whether its result needs Ray.
    """

    name: str
    kind: Callable[[], type[_Result]]
    remedy: str
    needs_ray: Callable[[_Result], bool]


def _built(script: Path, args: tuple[str, ...], address: str | None, function: _Function[_Result]) -> _Result:
    """The result of a function of the script."""
    local = address is None and engine.ADDRESS not in os.environ
    if local:
        os.environ[engine.ADDRESS] = "local"
    build = getattr(load_script(script, args), function.name, None)
    called = f"{function.name}()"
    if not callable(build):
        raise ConfigError(f"{script} defines no {called}. {function.remedy}")
    try:
        result = build()
    except OffloadError:
        raise
    except SystemExit as error:
        raise _exited(error, f"{called} in {script}", script, args) from None
    except Exception as error:
        raise ConfigError(f"{called} in {script} raised {_say(error, script)}.") from None
    kind = function.kind()
    if not isinstance(result, kind):
        raise ConfigError(
            f"{called} in {script} returned {type(result).__name__}; it must return an offload.{kind.__name__}."
        )
    if local and not engine.program_uses_ray() and not function.needs_ray(result):
        del os.environ[engine.ADDRESS]  # the run needs no Ray
    return result


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
