"""The pool as an engine: it takes tasks of several passes, the oldest pass first."""

from __future__ import annotations

import threading
from collections import deque

from offload.pipeline.feed.engine import HELD_SHARE, OWN_SHARE, EngineFeed
from offload.pipeline.feed.pace import ANY, BlockRoom
from offload.pipeline.feed.passes import Pass, PassKey, Slice
from offload.pipeline.feed.tasks import IndexTasks, PassTasks, RepeatedTask, UnitTasks
from offload.pipeline.pool.pool import Pool, PoolMaker
from offload.pipeline.pool.task import Assignment

ORDERED_WEIGHT = 0.7
"""How much a task under way counts against its node in an ordered pass. By simulation (``benchmarks/model_check.py``), slow links hold up a
third more with 0.5, and cores are idle behind fast ones with 1."""


class PoolEngine:
    """Makes blocks in one process per core. ``pool`` makes the pool that runs the tasks."""

    def __init__(self, feed: EngineFeed, pool: PoolMaker = Pool) -> None:
        self.handle = feed.handle
        self._feed = feed
        self._passes: dict[PassKey, tuple[Pass, PassTasks]] = {}
        self._repeats: deque[RepeatedTask] = deque()
        # Ray Data, which executes other data sets of the run, needs CPUs that Ray sees as free, and actors never give theirs back.
        shared = not all(stream.pooled for stream in feed.streams.values())
        cpus = 0.0 if shared else feed.cores.task_cpus
        self._pool: Pool = pool(feed.cores.nodes, cpus, self, feed.cores.runtime_env)
        for stream in feed.streams.values():
            if stream.pooled:
                self._pool.warm(stream.recipe)

    def start(self, current: Pass) -> None:
        """See :class:`Engine`."""
        feed, stream, meter = self._feed, self._feed.streams[current.key.name], self._feed.meters[current.key.name]
        tasks: PassTasks
        if stream.units is not None:
            tasks = UnitTasks(stream, stream.units, current, meter, lambda: feed.cores)
        else:
            assert stream.rows is not None
            tasks = IndexTasks(stream, stream.rows, current, meter, lambda: feed.cores)
        self._passes[current.key] = current, tasks
        self.look()

    def exhausted(self, key: PassKey) -> bool:
        """See :class:`Engine`."""
        return key in self._passes and self._passes[key][1].exhausted()

    def again(self, current: Pass, rank: int, piece: Slice) -> None:
        """See :class:`Engine`."""
        with self._feed.lock:
            if current.key not in self._passes:
                return
            _, tasks = self._passes[current.key]
            self._repeats.append(tasks.repeat(piece, rank))
            current.owe(rank)
        self.look()

    def drop(self, key: PassKey) -> None:
        """See :class:`Engine`."""
        self._passes.pop(key, None)

    def look(self) -> None:
        """See :class:`Engine`."""
        self._pool.look()

    def reshape(self) -> threading.Event:
        """See :class:`Engine`."""
        return self._pool.reshape(self._feed.cores.nodes)

    def close(self) -> None:
        """See :meth:`Pool.close`."""
        self._pool.close()

    def starting(self) -> int:
        """See :class:`Engine`."""
        return self._pool.starting()

    def reserves(self) -> bool:
        """Return whether its processes reserve CPUs of Ray, and all of them run."""
        return self._pool.reserves and not self._pool.starting()

    def runs(self) -> bool:
        """See :meth:`Pool.runs`."""
        return self._pool.runs

    def share(self) -> None:
        """See :meth:`Pool.share`."""
        self._pool.share()

    def next_task(self, node: str) -> Assignment | None:
        """A task for a core of this node, from the first opened pass that may go on, or else from one made ahead; None if none may."""
        with self._feed.lock:
            if self._repeats:
                return self._repeats.popleft()
            current_passes = [
                (current, tasks)
                for current, tasks in list(self._passes.values())
                if not (tasks.exhausted() or current.closed or current.error is not None)
            ]
            if len(current_passes) > 1:
                # Nobody waits for the next epoch yet, and a validation would come after all of it that the store holds.
                current_passes.sort(key=lambda entry: entry[0].abandoned())
            room = bool(current_passes) and self._has_room(node)
            for current, tasks in current_passes:
                # Exceed the limit only if the pass starves and none of its tasks is running. Otherwise, workers may be waiting
                # for the running task, and all other cores would fill the store behind one slow task.
                if current.starving() and not tasks.under_way():
                    assignment = tasks.next_task(node)
                elif room or self._has_own_room(node, current):
                    assignment = tasks.next_task(node, self._room_on_link(node, current, tasks))
                else:
                    assignment = None
                if assignment is not None:
                    if tasks.exhausted():
                        self._feed.issued(current)
                    return assignment
        return None

    def failed(self, error: BaseException) -> None:
        """The pool reports that it cannot go on."""
        self._feed.failed(error)

    def lost(self, node: str, error: BaseException) -> None:
        """The pool reports that a core's process died."""
        self._feed.lost(node, error)

    def works(self, node: str) -> None:
        """The pool reports a node's first block."""
        self._feed.works(node)

    def _room_on_link(self, node: str, current: Pass, tasks: PassTasks) -> BlockRoom:
        """The room for a node's next block, so that links have carried all blocks before the workers' own nodes could make the rest of a
        pass."""
        feed, homes = self._feed, self._feed.homes()
        meter, cores = feed.meters[current.key.name], feed.cores.by_node
        rates, near = meter.rates(), sum(cores[home] for home in homes)
        if node in homes or not near:
            return ANY
        if (rates is None or not feed.pace.knows(node)) and tasks.tasks_under_way(node) >= cores[node]:
            return BlockRoom(0.0)  # the first blocks may be large, and the link slow
        if rates is None:
            return ANY
        near_samples_per_s = meter.samples_per_s(homes) or near / max(rates.core_seconds_per_sample, 1e-9)
        size, held, travelling = rates.bytes_per_sample, feed.held(), feed.travelling()
        # In an ordered pass, a block is due once the workers have what comes before it, not at the end.
        weight = ORDERED_WEIGHT if current.ordered else 1.0
        all_tasks = [of_pass for _, of_pass in self._passes.values()]
        # Every core of a large cluster may ask at once: sums of all nodes, less the few near ones.
        near_held, near_travelling = (sum(of[home] for home in homes) for of in (held, travelling))
        far_made = sum(of_pass.bytes_under_way_beyond(homes) for of_pass in all_tasks)
        rows = tasks.rows_under_way()
        return feed.pace.room(
            node,
            held_bytes=held[node],
            travelling_bytes=travelling[node],
            made_bytes=weight * sum(of_pass.bytes_under_way(node) for of_pass in all_tasks),
            far_bytes=held.total() - near_held + travelling.total() - near_travelling + weight * far_made,
            near=homes,
            left_bytes=near_held + sum(rows[home] for home in homes) * size if current.ordered else tasks.left() * size,
            near_bytes_per_s=near_samples_per_s * size,
            makes_bytes_per_s=meter.samples_per_s([node]) * size,
        )

    def _has_room(self, node: str) -> bool:
        """Return whether the blocks that no worker has taken yet leave room for more, on this node and in total."""
        return self._feed.cores.have_room(self._feed.held(), node, HELD_SHARE)

    def _has_own_room(self, node: str, current: Pass) -> bool:
        """Return whether a pass has room beside what others hold. A validation would otherwise get one core: workers take nothing of the
        training data meanwhile, whose next blocks fill the store."""
        if len(self._passes) == 1 or current.abandoned():
            return False
        held = current.held_bytes.copy()  # a copy at once: blocks arrive meanwhile
        return self._feed.cores.have_room(held, node, OWN_SHARE)
