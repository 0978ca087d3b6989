"""How often nodes without a task are asked for again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.pipeline.pool.free_cores import SHARE, Refusals

seconds = st.floats(0.0, 10.0)


@given(
    cost_s=st.floats(1e-6, 0.1),
    nodes=st.integers(1, 50),
    events=st.lists(st.tuples(seconds, st.booleans()), max_size=30),  # the time before it, and whether it is a look
)
def test_questions_in_vain_take_a_limited_share_of_the_time_and_news_lead_to_one_for_every_node(
    cost_s: float, nodes: int, events: list[tuple[float, bool]]
) -> None:
    refusals, now, spent_s = Refusals(), 0.0, 0.0
    unheard = set[str]()  # nodes for which nobody has asked since the last look
    for apart_s, look in events:
        now += apart_s
        if look:
            refusals.look()
            unheard = {str(node) for node in range(nodes)}
        wait_s = refusals.due_in(now)
        assert (wait_s is None) == (not unheard)
        for _ in range(2):
            refusals.renew(now)
            for node in {str(node) for node in range(nodes)} - refusals.nodes:
                now += cost_s
                spent_s += cost_s
                refusals.add(node, cost_s)
                unheard.discard(node)
            assert spent_s <= SHARE * now + nodes * cost_s * 2
            now += (refusals.due_in(now) or 0.0) + 1e-6  # so that rounding leaves nothing to wait for
        assert not unheard


def test_a_node_with_news_of_its_own_is_asked_for_at_once() -> None:
    refusals = Refusals()
    refusals.add("a", 1.0)
    refusals.add("b", 1.0)
    refusals.drop("a")
    assert refusals.nodes == {"b"}
    assert refusals.due_in(0.0) is None
