"""What follows if somebody waits for CPUs that preprocessing or others hold."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from offload.pipeline.pool.core_watch import LOOK_S, NEVER_S, SAY_S, SHARE_S, CoreUse, Patience
from offload.pipeline.pool.ray_state import Held, Holder

WORKER, OTHER = Holder(what="r worker", cpus=1.0, ours=True), Holder(what="actor Counter", cpus=1.0)
LOOKS = int(NEVER_S / LOOK_S) + 2


def stays(what: str) -> bool:
    return what == "r worker"


def verdicts(looks: int = LOOKS, **seen: Any) -> list[str]:
    """What follows from so many looks that find the same."""
    patience = Patience(stays)
    made = [patience.verdict(CoreUse(now_s=LOOK_S * i, **seen)) for i in range(looks)]
    return [each for each in made if each is not None]


IN_VAIN = {"awaited": 1.0, "held": Held(holders=(WORKER, OTHER))}


def test_who_waits_for_others_hears_who_holds_the_cpus_and_not_too_often() -> None:
    assert verdicts(int(SAY_S / LOOK_S), starving="val", **IN_VAIN) == []
    assert verdicts(int(SAY_S / LOOK_S) + 1, starving="val", **IN_VAIN) == ["say"]
    assert verdicts(LOOKS, starving="val", executed=True, **IN_VAIN) == ["say"]


def test_a_wait_for_what_holds_its_cpus_until_the_end_of_the_run_ends() -> None:
    held = Held(holders=(WORKER,))
    assert verdicts(starving="val", executed=True, awaited=2.0, held=held)[:2] == ["say", "never"]
    assert "never" not in verdicts(starving="val", executed=False, awaited=2.0, held=held), "the pool's own wait"


def test_preprocessing_shares_its_cores_with_its_own_program_alone() -> None:
    reserved = {"reserves": True, **IN_VAIN}
    assert verdicts(int(SHARE_S / LOOK_S), alone=True, **reserved) == []
    assert verdicts(int(SHARE_S / LOOK_S) + 1, alone=True, **reserved) == ["share"]
    assert verdicts(alone=False, **reserved) == []
    assert verdicts(alone=False, starving="val", **reserved)[0] == "say"


@given(
    looks=st.lists(
        st.builds(
            dict,
            starving=st.sampled_from(("", "val")),
            awaited=st.sampled_from((0.0, 1.0)),
            held=st.builds(
                Held, holders=st.sampled_from(((), (WORKER,), (WORKER, OTHER))), tasks=st.sampled_from((0.0, 1.0))
            ),
            executed=st.booleans(),
            reserves=st.booleans(),
            alone=st.booleans(),
        ),
        max_size=80,
    )
)
def test_nothing_follows_where_nobody_waits_or_tasks_run(looks: list[dict[str, Any]]) -> None:
    """Tasks that run come to an end, and whoever waits has its turn."""
    patience = Patience(stays)
    for i, each in enumerate(looks):
        made = patience.verdict(CoreUse(now_s=10 * LOOK_S * i, **each))
        if not each["awaited"] or each["held"].tasks:
            assert made is None
        if made in ("say", "never"):
            assert each["starving"]
        if made == "never":
            assert each["executed"]
        if made == "share":
            assert each["reserves"]
            assert each["alone"]
