"""How several processes share out the tests: the longest first, and what a process leaves when it dies goes to the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

# Files whose tests take long, the longest first: several processes share out their tests one by one, before all others. The tests
# of any other file stay in one process, with what their module sets up.
LONGEST = (
    "train/driver/test_training_on_hosts.py",
    "launch/ray/test_cli.py",
    "launch/sagemaker/test_jobs.py",
    "train/driver/test_this_machine.py",
    "train/driver/test_nodes.py",
    "train/cluster/test_notices.py",
    "test_examples.py",
    "probe/test_probe.py",
    "train/driver/test_elastic.py",
    "train/driver/test_steered.py",
    "train/group/test_group.py",
    "train/test_training.py",
    "cli/test_cli.py",
    "cli/test_endings.py",
    "train/checkpoints/test_storage.py",
    "train/driver/test_shared_cluster.py",
    "test_code_blocks.py",
    "test_site.py",
    "test_notebook.py",
)
SHARE_A_SETUP = (
    "launch/ray/test_cli.py",
    "train/driver/test_this_machine.py",
    "test_examples.py",
    "train/group/test_group.py",
    "test_site.py",
)


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def rank(nodeid: str) -> int:
    """The place of a test's file among those that begin first."""
    file = _file_of(nodeid)
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


class OneByOneOrByFile(LoadScopeScheduling):
    """The tests of a long file one by one, those of any other file together.

    pytest-xdist's own class does not survive the death of a process: it runs the test that ended the process again, hands out units
    without a test left, after which a process waits for ever, and raises KeyError for one that has not collected yet.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = _file_of(nodeid)
        return nodeid if file in LONGEST and file not in SHARE_A_SETUP else file

    def remove_node(self, node: WorkerController) -> str | None:
        """Take away a process that has ended, and return the test that it ran, if any. Its other tests go to the rest."""
        units = self.assigned_work.pop(node)
        left = {
            scope: {nodeid: False for nodeid, completed in unit.items() if not completed}
            for scope, unit in units.items()
            if not all(unit.values())
        }
        if not left:
            return None
        scope, unit = next(iter(left.items()))  # a process runs its units, and their tests, in order
        crashed = next(iter(unit))
        del unit[crashed]
        if not unit:
            del left[scope]
        self.workqueue.update(left)
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:  # the successor of a process that has died collects first
            return
        super()._reschedule(node)
        # A process holds back its last test until more come, or it knows that none will.
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()
