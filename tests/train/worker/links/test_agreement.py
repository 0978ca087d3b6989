"""Measurements on their way to all ranks: complete at the same batch everywhere, and none lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.model.batch_split import BatchSplit
from offload.train.messages import Orders
from offload.train.worker.links.agreement import Mailbox, NoisePart, TrainingAgreement

WIDTH = 5


def part(value: float) -> NoisePart:
    return NoisePart(count=2, samples_each=8, paired=False, squares=(value,), total=(value / 3,))


@given(posted=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=30))
def test_measurements_arrive_whole_and_at_the_same_batch_on_every_rank(posted: list[list[bool]]) -> None:
    """Ranks post at different times; each batch every rank sends at most one."""
    boxes = [Mailbox(WIDTH) for _ in range(3)]
    waiting = [list(range(10)) for _ in range(3)]
    arrived: list[list[int]] = [[], [], []]
    for now in [*posted, *[[True] * 3] * 20]:
        for rank, ready in enumerate(now):
            if ready and waiting[rank]:
                step = waiting[rank].pop(0)
                boxes[rank].post(step, part(rank + step / 7))
        told = [box.outgoing() for box in boxes]
        assert all(len(each) == 1 + WIDTH for each in told)
        for rank, box in enumerate(boxes):
            for measured in box.incoming(told):
                assert measured.parts == tuple(part(r + measured.step / 7) for r in range(3))
                arrived[rank].append(measured.step)
        assert arrived[0] == arrived[1] == arrived[2]
    assert arrived[0] == list(range(10))


def agreement(rank: int, orders: Orders, *, due: bool = False) -> TrainingAgreement:
    return TrainingAgreement(
        rank,
        2,
        end=lambda: orders.end_of(1),
        split=lambda: orders.split,
        due=lambda: due,
        over=lambda: "",
        mail=Mailbox(WIDTH),
    )


def test_any_rank_may_say_to_stop_and_only_rank_0_what_comes_next() -> None:
    batch = Orders(split=BatchSplit(workers=2, local_batch_size=16, accum_steps=1))
    zero, one = (
        agreement(0, Orders(), due=False),
        agreement(1, Orders(stop=True, split=BatchSplit(workers=2, local_batch_size=4, accum_steps=0)), due=True),
    )
    told = [zero.message(), one.message()]
    assert zero.agreed(told) == one.agreed(told)
    assert (one.agreed(told).end, one.agreed(told).due, one.agreed(told).split) == ("stop", False, None)
    told = [agreement(0, batch, due=True).message(), agreement(1, Orders(ends_group=1)).message()]
    agreed = zero.agreed(told)
    assert (agreed.end, agreed.due) == ("resize", True)
    assert agreed.split == BatchSplit(local_batch_size=16, accum_steps=1, workers=2)
    told = [agreement(0, Orders(stop=True)).message(), agreement(1, Orders(ends_group=1)).message()]
    assert zero.agreed(told).end == "stop"
