"""What a checkpoint holds, and how it is read back.

Two files in a folder: ``model.pt``, the plain ``state_dict`` of the model as torch.save writes it, which needs no offload
to be loaded; and ``training.pt``, all else that resuming takes. Both load under ``weights_only=True``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.errors import RunError
from offload.pipeline.ranges import Ranges

MODEL_FILE = "model.pt"
TRAINING_FILE = "training.pt"
SCHEMA = "offload.checkpoint/1"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far training is: the epoch under way, what of its pass is trained, and steps since the start."""

    epoch: int = 0
    trained: Ranges = field(default_factory=Ranges)
    step: int = 0
    samples: int = 0

    def to_state(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {"epoch": self.epoch, "trained": self.trained.to_list(), "step": self.step, "samples": self.samples}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """The inverse of :meth:`to_state`."""
        return cls(
            epoch=int(state["epoch"]),
            trained=Ranges.from_list(state["trained"]),
            step=int(state["step"]),
            samples=int(state["samples"]),
        )


def save(folder: Path, model: dict[str, Any], training: dict[str, Any]) -> None:
    """Write both files. Raises OSError for a full or read-only disk."""
    try:
        torch.save(model, folder / MODEL_FILE)
        torch.save({"schema": SCHEMA, **training}, folder / TRAINING_FILE)
    except RuntimeError as error:  # torch's zip writer hides the operating system's reason
        raise OSError(f"cannot write {folder}: {error}") from error


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(model state, training state), on the CPU. Raises RunError for a checkpoint that is none, or damaged."""
    try:
        model = torch.load(folder / MODEL_FILE, map_location="cpu", weights_only=True)
        training = torch.load(folder / TRAINING_FILE, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RunError(
            f"the checkpoint in {folder} cannot be loaded ({type(error).__name__}: {error}). Remove it to resume from the one "
            "before it, or start again with --overwrite."
        ) from None
    if training.get("schema") != SCHEMA:
        raise RunError(
            f"the checkpoint in {folder} has schema {training.get('schema')!r}; this version reads {SCHEMA!r}."
        )
    return model, training


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
    """The inverse of :func:`rng_state`."""
    torch.set_rng_state(state["torch"])
    keys, rest = state["numpy"]["keys"].numpy().astype(np.uint32), state["numpy"]["rest"]
    np.random.set_state(("MT19937", keys, rest[0], rest[1], rest[2]))
    saved = state["python"]
    random.setstate((saved["version"], tuple(saved["keys"]), saved["gauss"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
