"""A user's script: a Python file that defines ``build() -> offload.Trainer``."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import ConfigError, OffloadError

if TYPE_CHECKING:
    from offload.train.trainer import Trainer


def load_script(script: Path, args: tuple[str, ...]) -> Any:
    """The ``build`` of a user's script, imported by its path with ``sys.argv`` set to what follows ``--``. Workers get the
    script by value: they need not be able to import it."""
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


def build_trainer(script: Path, args: tuple[str, ...], address: str | None = None) -> Trainer:
    """What the script's ``build()`` makes. Raises ConfigError where that is no Trainer, or it cannot be called.

    ``address``: of the run's cluster. Without one, a script that uses Ray while it is built (``ray.data.range``, say) gets a Ray
    of its own too: by itself Ray would join any that it finds on this machine, or wait for one that refuses it.
    """
    import offload

    if address is None:
        os.environ.setdefault("RAY_ADDRESS", "local")
    build = load_script(script, args)
    try:
        trainer = build()
    except OffloadError:
        raise
    except Exception as error:
        raise ConfigError(f"build() in {script} raised {_say(error, script)}.") from None
    if not isinstance(trainer, offload.Trainer):
        raise ConfigError(f"build() in {script} returned {type(trainer).__name__}; it must return an offload.Trainer.")
    return trainer


def _say(error: Exception, script: Path) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(script.resolve())]
    return f"{type(error).__name__}: {error}" + (f" (line {own[-1].lineno})" if own else "")
