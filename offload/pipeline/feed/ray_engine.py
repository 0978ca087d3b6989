"""Ray Data as an engine: every pass is an execution of its own, at the pace of the workers."""

from __future__ import annotations

import threading

from offload.errors import RunError
from offload.pipeline.feed.engine import DATA_SHARE, HELD_SHARE, EngineFeed
from offload.pipeline.feed.passes import Pass, PassKey, Slice
from offload.pipeline.order.ranges import Ranges


class RayDataEngine:
    """Makes blocks by executing a ``ray.data.Dataset``, whose plan the pool cannot take over."""

    def __init__(self, feed: EngineFeed) -> None:
        self._feed = feed

    def start(self, current: Pass) -> None:
        """See :class:`Engine`."""
        threading.Thread(target=self._execute, args=(current,), daemon=True).start()

    def exhausted(self, key: PassKey) -> bool:
        """Return False: an execution tells only its end."""
        return False

    def again(self, current: Pass, rank: int, piece: Slice) -> None:
        """Fail the pass."""
        current.fail(
            RunError(
                "a node was lost with blocks of a ray.data.Dataset that no worker had fetched yet, and Ray Data cannot "
                "make single blocks again. The same command resumes from the last checkpoint."
            )
        )

    def drop(self, key: PassKey) -> None:
        """Do nothing: the execution ends by itself, since its pass is closed."""

    def look(self) -> None:
        """Do nothing: the execution waits for room by itself."""

    def reshape(self) -> threading.Event:
        """Return an event that is set: Ray Data takes the cores that it finds."""
        free = threading.Event()
        free.set()
        return free

    def starting(self) -> int:
        """Return 0: Ray Data does not tell."""
        return 0

    def _execute(self, current: Pass) -> None:
        from offload.pipeline.raydata import execution  # most runs do not need it, and start sooner

        stream, cores = self._feed.streams[current.key.name], self._feed.cores
        assert stream.dataset is not None
        execution.be_quiet()
        limit = HELD_SHARE * cores.store_bytes
        try:
            blocks = execution.encode_dataset(
                stream.dataset,
                stream.recipe,
                id_column=stream.id_column,
                done=Ranges(current.request.done),
                epoch=current.request.epoch,
                task_cpus=cores.task_cpus,
                store_bytes=DATA_SHARE * cores.store_bytes,
            )
            for number, block in enumerate(blocks):
                self._feed.meters[current.key.name].add(block)
                current.put(number, block)
                if not current.wait_for_room(limit):
                    return
            current.end()
        except BaseException as error:
            current.fail(error)
