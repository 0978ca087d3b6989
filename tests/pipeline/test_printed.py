"""The limit of what other processes print."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from offload.pipeline.program.printed import (
    BURST,
    MOST_COUNTS,
    PER_S,
    SAME,
    TELL_S,
    Limit,
    Outlet,
    Printed,
    PrintedLine,
)

lines = st.builds(PrintedLine, st.sampled_from(["stdout", "stderr"]), st.sampled_from(["a", "b", "c", "d"]))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.lists(lines)))
def test_each_line_is_shown_or_counted_once_and_the_order_stays(parts: list[list[PrintedLine]]) -> None:
    limit = Limit(Clock())
    shown = [line for part in parts for line in limit.admit(part)]
    held = limit.held_back()
    printed = [line for part in parts for line in part]
    assert Counter(shown) + Counter(held.more) == Counter(printed)
    assert max(Counter(shown).values(), default=0) <= SAME
    rest = iter(printed)
    assert all(line in rest for line in shown)
    assert not limit.held_back()


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2 * BURST)), max_size=8))
def test_a_burst_passes_and_then_so_many_lines_per_second(floods: list[tuple[float, int]]) -> None:
    clock = Clock()
    limit = Limit(clock)
    printed = shown = 0
    for pause_s, count in floods:
        clock.now_s += pause_s
        shown += len(limit.admit(PrintedLine("stderr", f"line {printed + number}") for number in range(count)))
        printed += count
        assert shown <= BURST + PER_S * clock.now_s + 1
    assert shown + sum(limit.held_back().beyond.values()) == printed
    assert shown == printed or printed > BURST


@given(st.lists(st.lists(lines), max_size=5))
def test_what_a_process_holds_back_counts_in_the_end(processes: list[list[PrintedLine]]) -> None:
    outlet = Outlet(Limit(Clock()))
    shown = []
    for printed in processes:
        limit = Limit(Clock())
        passed = limit.admit(printed)
        held = limit.held_back()
        outlet.put(Printed(lines=tuple(passed), more=held.more, beyond=held.beyond))
        shown += outlet.collect()
    total = Counter(line for printed in processes for line in printed)
    told = {PrintedLine(line.stream, line.text.rpartition(": ")[2]): line.text for line in outlet.collect(last=True)}
    for line, count in total.items():
        more = count - Counter(shown)[line]
        assert (line in told) == (more > 0)
        if more > 1:
            assert told[line] == f"… and {more:,} more lines like this: {line.text}"
    assert outlet.collect(last=True) == []


def test_counts_come_once_a_minute_and_then_the_text_is_shown_again() -> None:
    clock = Clock()
    outlet = Outlet(Limit(clock))
    warning = PrintedLine("stderr", "Corrupt JPEG data")
    for _ in range(2):
        outlet.put(Printed(lines=(warning,) * 1200))
        assert outlet.collect() == [warning] * SAME
        assert outlet.holds_back
        clock.now_s += TELL_S
        outlet.put(Printed())
        assert outlet.collect() == [
            PrintedLine("stderr", f"… and {1200 - SAME:,} more lines like this: Corrupt JPEG data"),
        ]
        assert not outlet.holds_back


def test_many_texts_share_a_count() -> None:
    limit = Limit(Clock())
    texts = [PrintedLine("stdout", f"sample {number}") for number in range(3 * MOST_COUNTS)]
    limit.pass_on(Printed(more=dict.fromkeys(texts, 2), beyond={"stdout": 5}))
    *most, rest = limit.counts(last=True)
    assert len(most) == MOST_COUNTS
    assert rest.text.startswith(f"… and {2 * 2 * MOST_COUNTS + 5} more lines")


def test_empty_lines_are_no_flood() -> None:
    assert len(Limit(Clock()).admit([PrintedLine("stdout", "")] * 10)) == 10
