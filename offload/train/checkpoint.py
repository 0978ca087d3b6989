"""What a checkpoint holds, and how it is read back.

Two files in a folder: ``model.pt``, the plain ``state_dict`` of the model as torch.save writes it, which needs no offload
to be loaded; and ``training.pt``, all else that resuming takes. Both load under ``weights_only=True``. A third,
``checksums.json``, tells one that was cut off or changed.
"""

from __future__ import annotations

import json
import random
import zlib
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
CHECKSUMS_FILE = "checksums.json"
SCHEMA = "offload.checkpoint/1"
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far training is: the epoch under way, what of its pass is trained, and since the start: steps, samples, and
    ``useful``, the samples of initial batches that those were worth."""

    epoch: int = 0
    trained: Ranges = field(default_factory=Ranges)
    step: int = 0
    samples: int = 0
    useful: float = 0.0

    def to_state(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "epoch": self.epoch,
            "trained": self.trained.to_list(),
            "step": self.step,
            "samples": self.samples,
            "useful": self.useful,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """The inverse of :meth:`to_state`."""
        return cls(
            epoch=int(state["epoch"]),
            trained=Ranges.from_list(state["trained"]),
            step=int(state["step"]),
            samples=int(state["samples"]),
            useful=float(state.get("useful", state["samples"])),
        )


def save(folder: Path, model: dict[str, Any], training: dict[str, Any]) -> None:
    """Write all files. Raises OSError for a full or read-only disk."""
    try:
        torch.save(model, folder / MODEL_FILE)
        torch.save({"schema": SCHEMA, **training}, folder / TRAINING_FILE)
    except RuntimeError as error:  # torch's zip writer hides the operating system's reason
        raise OSError(f"cannot write {folder}: {error}") from error
    sums = {name: checksum(folder / name) for name in (MODEL_FILE, TRAINING_FILE)}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(sums))


def checksum(path: Path) -> dict[str, int]:
    """Length and CRC-32 of a file."""
    value = length = 0
    with path.open("rb") as file:
        while part := file.read(CHUNK_BYTES):
            value, length = zlib.crc32(part, value), length + len(part)
    return {"bytes": length, "crc32": value}


def _verify(folder: Path) -> None:
    """Raises ValueError for a file that is not what was written."""
    known: dict[str, dict[str, int]] = json.loads((folder / CHECKSUMS_FILE).read_text())
    for name, expected in known.items():
        found = checksum(folder / name)
        if found["bytes"] != expected["bytes"]:
            raise ValueError(f"{name} has {found['bytes']:,} bytes, and {expected['bytes']:,} were written")
        if found != expected:
            raise ValueError(f"{name} has other content than was written")


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(model state, training state), on the CPU. Raises RunError for a checkpoint that is none, or damaged."""
    try:
        if (folder / CHECKSUMS_FILE).exists():
            _verify(folder)
        model = torch.load(folder / MODEL_FILE, map_location="cpu", weights_only=True)
        training = torch.load(folder / TRAINING_FILE, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RunError(
            f"the checkpoint in {folder} cannot be loaded ({type(error).__name__}: {error}). Remove it to resume from the one "
            "before it, or start again with --overwrite."
        ) from None
    if training.get("schema") != SCHEMA:
        raise RunError(
            f"the checkpoint in {folder} has schema {training.get('schema')!r}; this version reads {SCHEMA!r}. Resume with the "
            "version of offload that wrote it, or start again with --overwrite."
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
