"""The format of a checkpoint, written and read.

A checkpoint is a folder with four files. ``model.pt`` is the model's plain ``state_dict``, which loads without offload.
``training.pt`` holds everything else that a resume needs. Both load under ``weights_only=True``. ``metrics.json`` describes the model,
for those who choose between checkpoints. ``checksums.json`` reveals truncated or changed files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.adapt.noise_average import NoiseAverage
from offload.adapt.observe import Seen
from offload.errors import RunError, argument
from offload.pipeline.order.ranges import Ranges
from offload.train.checkpoints.plain import from_plain
from offload.train.checkpoints.storage import CHECKSUMS_FILE, METRICS_FILE, MODEL_FILE, TRAINING_FILE

SCHEMA = "offload.checkpoint/1"
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of training.

    Args:
        epoch: the current epoch, from 0.
        trained: the positions of the epoch's pass that are trained.
        passes: the finished passes of this epoch over each other data set.
        step, samples: optimizer steps and samples of all ranks since the start.
        useful: the worth of these samples, in samples of initial batches.
        seconds: the time spent on training.
        stopped: whether the user's code ended training early.
    """

    epoch: int = 0
    trained: Ranges = field(default_factory=Ranges)
    passes: Mapping[str, int] = field(default_factory=dict)
    step: int = 0
    samples: int = 0
    useful: float = 0.0
    seconds: float = 0.0
    stopped: bool = False

    def to_state(self) -> dict[str, Any]:
        """The state as plain numbers and lists."""
        return {
            "epoch": self.epoch,
            "trained": self.trained.to_list(),
            "passes": dict(self.passes),
            "step": self.step,
            "samples": self.samples,
            "useful": self.useful,
            "seconds": self.seconds,
            "stopped": self.stopped,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """The inverse of :meth:`to_state`. Raises ValueError for impossible numbers, KeyError for a missing one."""
        progress = cls(
            epoch=int(state["epoch"]),
            trained=Ranges.from_list(state["trained"]),
            passes={str(name): int(ended) for name, ended in dict(state.get("passes", {})).items()},
            step=int(state["step"]),
            samples=int(state["samples"]),
            # Older checkpoints lack it. Their batches were fixed, so each sample was worth one.
            useful=float(state.get("useful", state["samples"])),
            seconds=float(state.get("seconds", 0.0)),
            stopped=bool(state.get("stopped", False)),
        )
        totals = (progress.epoch, progress.step, progress.samples, progress.useful, progress.seconds)
        least = min(*totals, *progress.passes.values())
        if not (least >= 0 and math.isfinite(progress.useful) and math.isfinite(progress.seconds)):
            raise ValueError(f"numbers below 0, or not finite: {progress}")
        return progress


@dataclass(frozen=True, kw_only=True)
class Training:
    """The content of a checkpoint besides the model.

    Args:
        progress: the progress of training.
        optimizers, others: their ``state_dict``, in the order in which ``ctx.prepare`` got them.
        loose: the parameters that only an optimizer holds, in its order.
        scaler: the state of the gradient scaler, for fp16.
        rng: the states of each rank's generators.
        adapting: the state of adaptation: ``noise``, ``learned``, and ``workers`` and ``batch`` of the newest step. Empty if nothing
            adapts.
        sums: the epoch's sums over all ranks.
        seed, samples, source: the seed, the number of samples, and their identity, which determine the order of an epoch; None if unknown.
    """

    progress: Progress
    optimizers: Sequence[Any] = ()
    others: Sequence[Any] = ()
    loose: Sequence[torch.Tensor] = ()
    scaler: Mapping[str, Any] | None = None
    rng: Sequence[Mapping[str, Any]] = ()
    adapting: Mapping[str, Any] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None
    samples: int | None = None
    source: str | None = None

    def to_state(self) -> dict[str, Any]:
        """The state as containers, numbers and tensors."""
        fields = {member.name: getattr(self, member.name) for member in dataclasses.fields(self)}
        lists = {name: list(getattr(self, name)) for name in ("optimizers", "others", "loose", "rng")}
        return {**fields, **lists, "progress": self.progress.to_state(), "schema": SCHEMA}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Training:
        """The inverse of :meth:`to_state`. Raises ValueError, with the name of the first invalid part."""
        part = "progress"  # what is being read, for the error message
        try:
            progress = Progress.from_state(state["progress"])
            part = "optimizers"
            optimizers = [_mapping(item) for item in _list(state["optimizers"])]
            part = "others"
            others = _list(state["others"])
            part = "loose"
            loose = [_tensor(item) for item in _list(state.get("loose", []))]
            part = "scaler"
            scaler = None if state["scaler"] is None else _mapping(state["scaler"])
            part = "rng"
            rng = [_checked_rng(item) for item in _list(state["rng"])]
            part = "adapting"
            adapting = _checked_adapting(_mapping(state.get("adapting", {})))
            part = "sums"
            sums = {str(name): float(value) for name, value in _mapping(state.get("sums", {})).items()}
            part = "seed"
            seed, samples = (None if state.get(name) is None else int(state[name]) for name in ("seed", "samples"))
            pairs = progress.trained.pairs
            first, last = (pairs[0][0], pairs[-1][1]) if pairs else (0, 0)
            source = None if state.get("source") is None else str(state["source"])
            # If Ray Data executes the Dataset, the positions are the user's ids, which may be any numbers.
            if source is None and samples is not None and not 0 <= first <= last <= samples:
                part = "progress"
                raise ValueError(f"positions {first} to {last - 1} are trained, of {samples} samples")
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            what = "is missing" if isinstance(error, KeyError) and error.args == (part,) else f"is wrong: {error!r}"
            raise ValueError(f"{part!r} {what}") from None
        return cls(
            progress=progress,
            optimizers=optimizers,
            others=others,
            loose=loose,
            scaler=scaler,
            rng=rng,
            adapting=adapting,
            sums=sums,
            seed=seed,
            samples=samples,
            source=source,
        )


def save(
    folder: Path, model: Mapping[str, Any], training: Mapping[str, Any], metrics: Mapping[str, float] | None = None
) -> None:
    """Write all files: a model's state and :meth:`Training.to_state`, both as plain data
    (:func:`offload.train.checkpoints.plain.to_plain`), and the metrics that describe the model.

    Raises OSError for a full or read-only disk.
    """
    try:
        torch.save(model, folder / MODEL_FILE)
        torch.save(training, folder / TRAINING_FILE)
    except RuntimeError as error:  # torch's zip writer hides the operating system's error
        raise OSError(f"cannot write {folder}: {error}") from error
    # JSON has no infinity: a metric without a finite value is null.
    finite = {name: value if math.isfinite(value) else None for name, value in (metrics or {}).items()}
    (folder / METRICS_FILE).write_text(json.dumps(finite))
    sums = {name: checksum(folder / name) for name in (MODEL_FILE, TRAINING_FILE, METRICS_FILE)}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(sums))


def checksum(path: Path) -> dict[str, int]:
    """The length and CRC-32 of a file."""
    value = length = 0
    with path.open("rb") as file:
        while part := file.read(CHUNK_BYTES):
            value, length = zlib.crc32(part, value), length + len(part)
    return {"bytes": length, "crc32": value}


def _verify(folder: Path) -> None:
    """Raise ValueError for a file that differs from the one written."""
    known: Any = json.loads((folder / CHECKSUMS_FILE).read_bytes())
    if not isinstance(known, dict) or not all(isinstance(entry, dict) and "bytes" in entry for entry in known.values()):
        raise ValueError(f"{CHECKSUMS_FILE} does not hold the sizes and sums of files")
    for name, expected in known.items():
        actual = checksum(folder / name)
        if actual["bytes"] != expected["bytes"]:
            raise ValueError(f"{name} has {actual['bytes']:,} bytes, and {expected['bytes']:,} were written")
        if actual != expected:
            raise ValueError(f"{name} has other content than was written")


def load(folder: Path, called: str | None = None) -> tuple[dict[str, Any], Training]:
    """Return (model state, training state), on the CPU. ``called``: the checkpoint's name for messages.

    Raises RunError for a damaged checkpoint: truncated, altered, or with foreign content.
    """
    name = called or str(folder)
    try:
        if (folder / CHECKSUMS_FILE).exists():
            _verify(folder)
        model, training = (_read(folder / file) for file in (MODEL_FILE, TRAINING_FILE))
        schema = training.get("schema")
        if isinstance(schema, str) and schema != SCHEMA:
            raise RunError(
                f"the checkpoint {name} has schema {schema!r}; this version reads {SCHEMA!r}. Resume with the version of "
                f"offload that wrote it, or start again with {argument('overwrite', True)}."
            )
        if not all(isinstance(key, str) for key in model):
            raise ValueError(f"{MODEL_FILE} is not a state_dict: its keys are not all names")
        return model, Training.from_state(training)
    except (ValueError, OSError) as error:
        what = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise RunError(
            f"the checkpoint {name} is damaged: {what}. Remove it to resume from the one before it, or start again with "
            f"{argument('overwrite', True)}."
        ) from None


def load_model(path: Path, called: str) -> dict[str, Any]:
    """The model's state alone, on the CPU: of a checkpoint, or of a file with a ``state_dict``. ``called``: its name for messages.

    Raises RunError if it is damaged, or holds something else.
    """
    try:
        if path.is_dir() and (path / CHECKSUMS_FILE).exists():
            _verify(path)
        state = _read(path / MODEL_FILE if path.is_dir() else path)
        if not all(isinstance(key, str) for key in state):
            raise ValueError(f"{path.name} is not a state_dict: its keys are not all names")
        return state
    except (ValueError, OSError) as error:
        what = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise RunError(f"the checkpoint {called} is damaged, or none: {what}. Name another one.") from None


def _read(path: Path) -> dict[str, Any]:
    """Read a dict from a file. Raises ValueError, with a message for users, if the file does not hold one."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises any error of its unpickler
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        why = f"it holds a {refused[1]}, which could run code" if refused else "torch cannot read it"
        raise ValueError(f"{path.name} cannot be loaded: {why}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}, not a dict")
    plain: dict[str, Any] = from_plain(content)
    return plain


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a {type(value).__name__} instead of a dict")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} instead of a list")
    return value


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a {type(value).__name__} instead of a tensor")
    return value


def _checked_adapting(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state, if adaptation can read it: damage must show here, not after training has resumed."""
    if state:
        NoiseAverage.from_state(state["noise"], 1)
        _, _ = (int(size) for size in state["batch"])
        int(state["workers"])
        if state["learned"] is not None:
            Seen.from_state(state["learned"])
    return state


def rng_state() -> dict[str, Any]:
    """The state of every generator of this process, as tensors and plain numbers."""
    numpy_state: Any = np.random.get_state(legacy=True)
    python_state = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {
            "keys": torch.from_numpy(np.asarray(numpy_state[1]).astype(np.int64)),
            "rest": [int(numpy_state[2]), int(numpy_state[3]), float(numpy_state[4])],
        },
        "python": {"version": python_state[0], "keys": list(python_state[1]), "gauss": python_state[2]},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the result of :func:`rng_state`."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(_numpy_state(state["numpy"]))
    random.setstate(_python_state(state["python"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _numpy_state(saved: Mapping[str, Any]) -> tuple[str, Any, int, int, float]:
    keys, (position, has_gauss, gauss) = saved["keys"].numpy().astype(np.uint32), saved["rest"]
    return "MT19937", keys, position, has_gauss, gauss


def _python_state(saved: Mapping[str, Any]) -> tuple[Any, ...]:
    return saved["version"], tuple(saved["keys"]), saved["gauss"]


def _checked_rng(state: Any) -> Mapping[str, Any]:
    """The state, if the generators accept it."""
    torch.Generator().set_state(_mapping(state)["torch"])
    np.random.RandomState().set_state(_numpy_state(state["numpy"]))
    random.Random().setstate(_python_state(state["python"]))
    return _mapping(state)
