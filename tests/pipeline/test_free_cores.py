"""Which core gets the next task: one of those with the fewest, on no refused node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.pipeline.pool.free_cores import FreeCores

MOST = 2
NODES = ("a", "b", "c")

changes = st.lists(
    st.tuples(st.integers(0, 8), st.one_of(st.none(), st.integers(0, MOST))), max_size=40
)  # a core, and its tasks; None: it takes no more


@given(changes=changes, refused=st.sets(st.sampled_from(NODES)))
def test_the_first_core_has_the_fewest_tasks_of_all_that_may_take_one(
    changes: list[tuple[int, int | None]], refused: set[str]
) -> None:
    free, tasks_of = FreeCores[int](MOST), dict[int, int]()
    for core, tasks in changes:
        tasks_of.pop(core, None)
        if tasks is None:
            free.remove(core)
            continue
        free.put(core, NODES[core % len(NODES)], tasks)
        tasks_of[core] = tasks
    able = {core: n for core, n in tasks_of.items() if n < MOST and NODES[core % len(NODES)] not in refused}
    found = free.first(refused)
    if found is None:
        assert not able
    else:
        assert able[found] == min(able.values())
