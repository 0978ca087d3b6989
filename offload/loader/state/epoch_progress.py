"""The place of a DataLoader in its epochs, as a state that a checkpoint can hold.

A sampler is the user's own code, and usually cannot tell its place. So the state holds the random generators at the beginning of the epoch,
and the number of batches that the program has had since. A resumed loader draws the epoch's indices again and skips these batches. That is
right only if it draws the same indices. So the state also holds the arguments that decide them, and the checksum of the skipped batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.errors import ConfigError
from offload.loader.epoch_arguments import GENERATOR, other_rank
from offload.loader.state.draws import read, read_version_1, written
from offload.loader.state.trail import Trail
from offload.model.checks import check_count, check_mapping

VERSION = 2


@dataclass(eq=False, kw_only=True)
class EpochProgress:
    """The place in an epoch.

    Args:
        epoch: the number of epochs begun before.
        batches: the number of batches that the program has had.
        start: the state at the beginning of the epoch: :func:`offload.loader.state.draws.state_of`, and entries of the loader.
        between: before the epoch has begun, the state of the loader's own generators:
            :func:`offload.loader.state.draws.generators_of`.
        arguments: those of the epoch, see :func:`offload.loader.epoch_arguments.arguments_of`.
        trail: the checksums of the batches that the sampler has drawn.
        over: whether the epoch has ended.
    """

    epoch: int = 0
    batches: int = 0
    start: Mapping[str, Any] | None = None
    between: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trail: Trail = field(default_factory=Trail)
    over: bool = False
    _written: Mapping[str, Any] | None = None  # ``start``: a program may ask for the state after each batch

    def state(self) -> dict[str, Any]:
        """The place as plain data, for JSON and for ``torch.load(weights_only=True)``."""
        if self.over or self.start is None:
            # At the end of an epoch, the loader adds the state of its generators.
            between = None if self.over or self.between is None else written(self.between)
            epoch = self.epoch + self.over
            return {"version": VERSION, "epoch": epoch, "batches": 0, "start": None, "between": between}
        if self._written is None:
            self._written = written(self.start)
        batches = self.batches
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "batches": batches,
            "start": dict(self._written),
            "arguments": dict(self.arguments),
            "checksum": self.trail.after(batches),
        }

    @classmethod
    def of(cls, state: object) -> EpochProgress:
        """The place that :meth:`state` described, in this release or in those that wrote tensors. Raises ConfigError for anything else."""
        saved = check_mapping("DataLoader: the state", state, sane="the result of state_dict()")
        if saved.get("version") not in (1, VERSION) or not {"epoch", "batches", "start"} <= saved.keys():
            raise ConfigError(
                f"this release of offload.DataLoader cannot read this state: it has the keys {', '.join(map(str, saved)) or 'none'}. "
                "Load the result of its state_dict()."
            )
        epoch = check_count("DataLoader: the state's epoch", saved["epoch"])
        batches = check_count("DataLoader: the state's batches", saved["batches"])
        reads = read if saved["version"] == VERSION else read_version_1
        try:
            start, between = (None if part is None else reads(part) for part in (saved["start"], saved.get("between")))
            arguments = dict(saved.get("arguments", {}))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"the state of the DataLoader is damaged ({type(error).__name__}: {error}). Load the result of state_dict() as it was."
            ) from None
        if reads is read_version_1 and start is not None:  # that version holds no other argument
            arguments = {"generator": None if start["generator"] is None else GENERATOR}
        return cls(
            epoch=epoch,
            batches=batches,
            start=start,
            between=between,
            arguments=arguments,
            trail=Trail(batches, saved.get("checksum")),
        )

    def check_order(self, trail: Trail, *, random: bool, rank: int) -> None:
        """Compare the order of a resumed epoch with the one that the program has read so far.

        Args:
            trail: the checksums of the batches that the sampler has drawn again.
            random: whether it drew them from random generators of the state.
            rank: this process's rank. If the state is another rank's, the orders differ, which is fine only without random numbers.

        Raises ConfigError if it is another order.
        """
        if not self.batches or self.start is None:
            return
        of_state = self.arguments.get("rank", rank)
        if rank != of_state:
            if random or any("own" in sampler for sampler in self.start["samplers"]):
                raise other_rank(of_state, rank)
            return
        before, now = self.trail.after(self.batches), trail.after(self.batches)
        if None not in (before, now) and before != now:
            raise ConfigError(
                f"the state of the DataLoader was taken after {self.batches} batches of an epoch, and the sampler gives other batches now: "
                "the rest of that epoch would repeat samples or leave some out. Resume with the sampler and the data set of the state, or "
                "load no state and begin the epoch anew. A sampler with random numbers of its own needs a state_dict and a "
                "load_state_dict."
            )


def too_few(batches: int, source: str, now: int) -> ConfigError:
    """The error for an epoch that now has fewer batches than a state skips. ``source``: where the batches come from."""
    return ConfigError(
        f"the state of the DataLoader was taken after {batches} batches of an epoch, and the {source} gives {now} now. "
        "Resume with the data set, the sampler and the batch size with which the state was taken."
    )
