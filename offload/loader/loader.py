"""``offload.DataLoader``: torch's DataLoader, with the batches made on every CPU of the machine, or of a cluster."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, MapDataPipe, Sampler

from offload.engine import uses_ray
from offload.errors import ConfigError
from offload.loader import probing
from offload.loader.batch_recipe import BatchOrder, IterableRecipe, MapRecipe
from offload.loader.device import Finish
from offload.loader.epoch_arguments import arguments_of, check_same, samplers_of
from offload.loader.in_program import InProgram, seeded
from offload.loader.iterator import Fetcher, Iteration, IterationPlan
from offload.loader.job.ranks import Ranks
from offload.loader.orders import orders_of
from offload.loader.remarks import Remarks
from offload.loader.state.draws import SecondGenerators, generators_of, restore, restore_own, state_of, written
from offload.loader.state.epoch_progress import EpochProgress
from offload.loader.state.trail import Trail
from offload.loader.stats import LoaderStats, WaitClock
from offload.model.checks import check_callable, check_choice, check_count, check_text
from offload.pipeline.order.shuffling import mix
from offload.pipeline.program.main_module import refuse_again
from offload.pipeline.program.remedies import warning

T_co = TypeVar("T_co", covariant=True)
_ON_DEVICE = "a function from a batch to a batch"
PLACEMENTS = ("all", "other_nodes", "this_node")


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A ``torch.utils.data.DataLoader`` whose batches every CPU of this machine makes, or of a Ray cluster.

    It uses Ray with an ``address``, ``$RAY_ADDRESS``, or a Ray that the program has started. All arguments of torch's DataLoader are
    accepted and mean the same, with these differences:

    * ``num_workers`` does not limit the number of processes: all CPUs work (on one machine, all that the program may use). If it is not
      0, data sets see the same ``get_worker_info()`` as with torch, and an iterable data set is read by as many processes. If it is 0, the
      program itself reads an iterable data set, as with torch.
    * The random numbers of a sample depend on ``seed``, the epoch, and the sample's place in the order of the sampler: they are the same
      in every run and on every cluster. The generators of Python, NumPy, torch and OpenCV are seeded.
    * On a cluster, ``prefetch_factor``, ``multiprocessing_context`` and ``persistent_workers`` have no effect.
    * Batches always come in order.

    Args:
        dataset: a map-style or iterable data set, or a list. Forked processes inherit it, others get it pickled, in each epoch as it
            then is.
        address: the cluster, ``host:port`` or ``"auto"``, or ``"local"`` for a new one on this machine; by default ``$RAY_ADDRESS``, or
            else none. A process that is already connected to a Ray cluster uses that one; an address of another is an error.
        seed: the seed of augmentations. By default, torch's generator draws one in each epoch, as torch does.
        on_device: a function of the batch. The loader first moves the batch to this process's accelerator, if there is one.
        placement: the nodes whose CPUs work: ``"all"``, ``"other_nodes"`` or ``"this_node"``.

    Raises:
        ValueError, TypeError: from the constructor, as torch's.
        ConfigError: from the constructor for offload's own arguments, and from ``iter()`` if the cluster cannot be used or a loaded state
            belongs to other batches.
    """

    says_engine = True  # whether a remark names what makes the batches

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        address: str | None = None,
        seed: int | None = None,
        on_device: Callable[[Any], Any] | None = None,
        placement: str = "all",
    ) -> None:
        if isinstance(dataset, IterDataPipe | MapDataPipe):
            raise ConfigError(
                f"offload.DataLoader does not take a DataPipe ({type(dataset).__name__}), whose sharding and shuffling belong to torch's "
                "loader. Pass a Dataset or an IterableDataset."
            )
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        sane = '"auto", "local" or host:port'
        self.address = None if address is None else check_text("DataLoader: address", address, sane=sane)
        self.seed = None if seed is None else check_count("DataLoader: seed", seed)
        self.on_device = (
            None if on_device is None else check_callable("DataLoader: on_device", on_device, sane=_ON_DEVICE)
        )
        self.placement = check_choice("DataLoader: placement", placement, PLACEMENTS)
        self._progress = EpochProgress(over=True, epoch=-1)
        self._loaded: EpochProgress | None = None
        self._drawn: int | None = None
        self._remarks = Remarks()
        self._check_workers()
        self._begin()

    def _begin(self) -> None:
        """Set up what belongs to this process alone."""
        self._engine: _OnRay | _OnThisMachine | None = None
        self._clock = WaitClock()
        self._current: weakref.ref[Iteration | InProgram] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_engine", "_clock", "_current")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __iter__(self) -> Iteration | InProgram:  # type: ignore[override]
        return self._get_iterator()

    def _get_iterator(self) -> Iteration | InProgram:  # type: ignore[override]
        """A new iteration. It leaves earlier ones alone, with ``persistent_workers`` too."""
        refuse_again("an iteration over an offload.DataLoader")
        progress = self._loaded or EpochProgress(epoch=self._progress.epoch + 1)
        job = Ranks.of()
        arguments, trail = arguments_of(self, job), Trail()
        drawn_from = (self._samplers(), self.generator, self.dataset)
        if progress.start is None:
            if progress.between is not None:
                restore_own(progress.between, *drawn_from)
                self._drawn = progress.between["drawn"]
            progress.start = {
                **state_of(*drawn_from),
                "drawn": self._drawn,
                "persistent_workers": self.persistent_workers,
            }
            aside = None
        else:
            if progress.batches:
                check_same(progress.arguments, arguments)
            self._drawn = progress.start["drawn"]
            aside = restore(progress.start, *drawn_from)
        iteration = self._read(progress, aside) if self._in_program else self._feed(progress, trail, job, aside)
        # Only now: if the cluster cannot be reached, the next attempt begins at the same place.
        progress.arguments, progress.trail = arguments, trail
        self._progress, self._loaded = progress, None
        self._clock.pause()  # the program may have left the last iteration early, and done something else since
        iteration.loader = self
        probe = probing.active
        if probe is not None and probe.wants(self):
            return probe.measure(iteration)  # type: ignore[return-value]
        self._current = weakref.ref(iteration)
        return iteration

    def _feed(self, progress: EpochProgress, trail: Trail, job: Ranks, aside: SecondGenerators | None) -> Iteration:
        """An iteration over batches that the cluster makes."""
        seed, orders = self._draw(progress, trail, job, aside)
        plan = IterationPlan(
            recipe=self._recipe(seed),
            workers=self.num_workers,
            fresh=self.worker_init_fn is not None,  # it may do what a process can do only once
            orders=orders,
            skip=progress.batches,
            finish=Finish(pin=self.pin_memory, on_device=self.on_device),
            timeout_s=self.timeout,
            told_length=self._IterableDataset_len_called,
            remarks=self._remarks,
        )
        return Iteration(plan, self._fetcher(plan), progress, self._clock)

    def _fetcher(self, plan: IterationPlan) -> Fetcher:
        """The fetcher of an iteration, from the engine that the loader's first iteration has chosen."""
        if self._engine is None:
            self._engine = (
                _OnRay() if uses_ray(self.address) else _OnThisMachine(self.persistent_workers, says=self.says_engine)
            )
        return self._engine.fetcher(self, plan)

    @property
    def _in_program(self) -> bool:
        """Whether the program itself reads."""
        return isinstance(self.dataset, IterableDataset) and not self.num_workers

    def _read(self, progress: EpochProgress, aside: SecondGenerators | None) -> InProgram:
        """An iteration over batches that the program itself makes."""
        self._check_workers()
        if self.seed is not None:
            aside = seeded(mix(self.seed, progress.epoch, Ranks.of().rank))
        finish = Finish(pin=False, on_device=self.on_device)  # torch's iterator pins
        iteration = InProgram(self, aside=aside, finish=finish, progress=progress, clock=self._clock)
        self._remarks.once(
            "in program",
            f"the program itself reads the iterable data set {type(self.dataset).__name__}, as num_workers=0 says; pass num_workers=N to "
            "read it by N processes, ahead of the program",
        )
        return iteration

    def _check_workers(self) -> None:
        if self._in_program and (self.timeout or self.placement == "other_nodes"):
            option = f"timeout={self.timeout:g}" if self.timeout else 'placement="other_nodes"'
            raise ConfigError(
                f"DataLoader: {option} is not possible with num_workers=0 and an iterable data set: the program itself reads it. Pass "
                "num_workers of 1 or more, to read it by as many processes."
            )

    def check_worker_number_rationality(self) -> None:
        """Do nothing. torch warns of more workers than this machine has cores, but here ``num_workers`` starts no processes."""

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch of the newest iteration, as plain data that JSON holds. A loader with the same arguments goes on from
        there."""
        if self._loaded is not None:
            return self._loaded.state()
        state = self._progress.state()
        if state["start"] is None:  # between two epochs: the next one draws from the generators as they are then
            state["between"] = written({**generators_of(self._samplers(), self.generator), "drawn": self._drawn})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken: after the last batch that the program had got.

        A map-style data set reads only the rest. An iterable one is read again from the beginning.

        Raises ConfigError if ``state`` does not come from :meth:`state_dict`. If ``state`` was taken in the middle of an epoch, and that
        epoch would have other batches with this loader, the next ``iter()`` raises it.
        """
        self._loaded = EpochProgress.of(state)

    def stats(self) -> LoaderStats:
        """The measurements since the loader was made, or since :meth:`reset_stats`."""
        if self._current is not None and (current := self._current()) is not None:
            current.measure()
        return self._clock.stats()

    def reset_stats(self) -> None:
        """Measure anew from now on."""
        self._clock.reset()

    def _samplers(self) -> list[Any]:
        """Everything that may draw random numbers for the order of samples."""
        return samplers_of(self.sampler, self.batch_sampler)

    def _draw(
        self, progress: EpochProgress, trail: Trail, job: Ranks, aside: SecondGenerators | None
    ) -> tuple[int, Iterator[BatchOrder] | None]:
        """Draw the seed of the epoch and the order of its samples: (seed, orders). torch draws in the same sequence.

        A resumed epoch draws from ``aside``, with the arguments of the loader with which it began. ``trail`` records the order.
        """
        assert progress.start is not None
        persistent = progress.start.get("persistent_workers", self.persistent_workers)
        with contextlib.nullcontext() if aside is None else aside.used():
            before = None if aside is None else self._random()
            indices = iter(self._index_sampler)
            drew = aside is not None and self._random() != before  # some samplers draw the whole order in iter()
            # torch's persistent workers keep the first epoch's seed.
            if self._drawn is None or not persistent:
                self._drawn = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        if aside is not None:
            indices = aside.iterate(indices)
        seed = self._drawn if self.seed is None else self.seed
        iterable = isinstance(self.dataset, IterableDataset)
        # The workers of an iterable data set are seeded as in torch. Otherwise, every rank draws its own augmentations.
        if self.seed is not None or (not iterable and (persistent or job.rank)):
            seed = mix(seed, progress.epoch, job.rank)
        if iterable:
            return seed, None
        if aside is not None:
            with aside.used():
                before = self._random()
        orders = orders_of(
            indices,
            batches=self._auto_collation,
            skip=progress.batches,
            seed=seed,
            note=lambda batch: trail.add(batch, progress.batches),
        )
        if aside is not None:
            with aside.used():
                drew = drew or self._random() != before
            progress.check_order(trail, random=drew, rank=job.rank)
        return seed, orders

    def _random(self) -> dict[str, Any]:
        """The state of the generators from which samplers may draw, without samplers' own states, which may not be comparable."""
        state = state_of(self._samplers(), self.generator)
        for sampler in state["samplers"]:
            sampler.pop("own", None)
        return written(state)

    def _recipe(self, seed: int) -> MapRecipe | IterableRecipe:
        """The recipe for the processes. It holds the data set as it is now, as a fork would."""
        if not isinstance(self.dataset, IterableDataset):
            return MapRecipe(
                dataset=self.dataset,
                collate_fn=self.collate_fn,
                batches=self._auto_collation,
                num_workers=self.num_workers,
                worker_init_fn=self.worker_init_fn,
            )
        return IterableRecipe(
            dataset=self.dataset,
            collate_fn=self.collate_fn,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            seed=seed,
            worker_init_fn=self.worker_init_fn,
            variables=Ranks.of().variables(),
        )


_of_program = Remarks()  # made once, not by each loader


class _OnRay:
    """A loader's use of Ray, which is only imported with it."""

    def __init__(self) -> None:
        from offload.loader.job.session import User

        self._user = User()

    def fetcher(self, loader: DataLoader[Any], plan: IterationPlan) -> Fetcher:
        from offload.loader.job.feed_fetcher import FeedFetcher

        if (missing := warning()) and loader.worker_init_fn is None:
            _of_program.once("settings", missing)
        return FeedFetcher(self._user.session(loader.address, loader.placement), plan, self._user.name)


class _OnThisMachine:
    """A loader's use of this machine's cores, without Ray."""

    def __init__(self, persistent: bool, *, says: bool) -> None:
        from offload.loader.local.this_machine import ThisMachine

        self._machine = ThisMachine(persistent=persistent, says=says)

    def fetcher(self, loader: DataLoader[Any], plan: IterationPlan) -> Fetcher:
        if loader.placement == "other_nodes":
            raise ConfigError(
                'DataLoader: placement="other_nodes" needs a cluster, and there is none. Pass address="host:port", or set RAY_ADDRESS.'
            )
        return self._machine.fetcher(
            plan, context=loader.multiprocessing_context, prefetch_factor=loader.prefetch_factor
        )
