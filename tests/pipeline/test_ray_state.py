"""Who holds the CPUs of a cluster, as made-up tables say, and as Ray says."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.util.placement_group import placement_group, remove_placement_group

from offload.pipeline.pool import ray_state
from offload.pipeline.pool.ray_state import Held, Holder, awaited_cpus, held, holders
from offload.ray_private.cluster_tables import ActorRow, GroupRow
from tests.helpers import eventually

DEADLINE_S = 800.0
HERE, JOB, GROUP = "driver", "job", "group0123"


def actor(name: str, cpus: float, *, owner: str = HERE, group: str = "") -> ActorRow:
    return ActorRow(
        actor_id=name,
        worker=name,
        owner=owner,
        group=group,
        name=f"actor {name}",
        cpus=cpus,
        holds=True,
        node="",
        pid=0,
    )


def group(cpus: float, *, maker: str | None = "", job: str = JOB) -> GroupRow:
    return GroupRow(group_id=GROUP, name="", maker=maker, job=job, cpus=cpus, created=True, removed=False)


def told(actors: list[ActorRow], groups: list[GroupRow], taken: float) -> Held:
    return holders(actors, groups, in_use=taken, here=HERE, job=JOB)


def test_what_a_program_holds_is_what_it_made_and_what_that_made() -> None:
    mine = [actor("hub", 0), actor("pool", 2, owner="hub"), actor("other", 1, owner="elsewhere")]
    found = told(mine, [], 4.0)
    assert [(each.what, each.ours) for each in found.holders] == [("actor pool", True), ("actor other", False)]
    assert found.in_words == "actor pool 2 CPUs, actor other 1 CPU, tasks 1 CPU"
    assert not found.by_us_alone
    assert told(mine[:2], [], 2.0).by_us_alone
    assert not told([], [], 0.0).by_us_alone


def test_a_placement_group_goes_by_the_names_of_its_actors_and_counts_once() -> None:
    inside = actor("worker", 1, group=GROUP)
    assert told([inside], [group(1)], 1.0).in_words == "actor worker 1 CPU"
    assert told([], [group(1)], 1.0).in_words == f"placement group {GROUP[:8]} 1 CPU"
    assert [each.ours for each in told([inside], [group(1, job="another")], 1.0).holders] == [False]
    assert [each.ours for each in told([], [group(1, maker=None)], 1.0).holders] == [False], "nobody knows its maker"


@given(
    amounts=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 8.0), st.booleans()), max_size=6),
    tasks=st.floats(0.0, 8.0),
)
def test_everybody_who_holds_something_is_named(amounts: list[tuple[str, float, bool]], tasks: float) -> None:
    found = Held(holders=tuple(Holder(what=n, cpus=c, ours=o) for n, c, o in amounts), tasks=tasks)
    for name, cpus, _ in amounts:
        assert cpus <= ray_state.SLACK or f"{name} " in found.in_words
    assert ("tasks" in found.in_words) == (tasks > ray_state.SLACK)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_the_tables_of_ray() -> None:
    @ray.remote(num_cpus=2)
    class Counter:
        def ready(self) -> None: ...

    @ray.remote(num_cpus=1)
    def task() -> None:
        time.sleep(DEADLINE_S)

    counter: Any = Counter.remote()
    ray.get(counter.ready.remote())
    room = placement_group([{"CPU": 1}], name="room")
    assert room.wait(DEADLINE_S)
    eventually(lambda: held().in_words == "actor Counter 2 CPUs, placement group room 1 CPU", DEADLINE_S)
    assert held().by_us_alone
    assert awaited_cpus() == 0
    running, waiting = task.remote(), task.remote()
    eventually(lambda: held().tasks == 1.0, DEADLINE_S)
    eventually(lambda: awaited_cpus() == 1.0, DEADLINE_S)
    assert not held().by_us_alone
    assert ray_state.programs() == 1
    ray.cancel(waiting, force=True)
    ray.cancel(running, force=True)
    ray.kill(counter)
    remove_placement_group(room)
    eventually(lambda: held() == Held(), DEADLINE_S)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_placement_group_outlives_the_actor_that_was_asking_for_it_until_it_is_removed() -> None:
    @ray.remote(num_cpus=0)
    class Maker:
        def make(self) -> str | None:
            self.room = placement_group([{"CPU": 1}], lifetime="detached", name="left")
            return ray.get_runtime_context().get_actor_id()

    maker: Any = Maker.remote()
    actor_id = ray.get(maker.make.remote())
    ray.kill(maker)
    eventually(lambda: held().in_words == "placement group left 1 CPU", DEADLINE_S)
    eventually(lambda: ray_state.remove_groups_of({actor_id}), DEADLINE_S)
    eventually(lambda: held() == Held(), DEADLINE_S)
