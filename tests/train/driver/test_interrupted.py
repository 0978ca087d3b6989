"""A run that is interrupted, at whatever moment, in a program that keeps its own Ray: it leaves no cores held, and the next one trains."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table

import offload
from offload.model.placement import bundle_of
from offload.train.cluster import holdings as holdings_module
from offload.train.cluster.holdings import Holdings, left
from offload.train.cluster.node_requests import NodeRequests
from offload.train.driver import conductor as conductor_module
from offload.train.driver import run as run_module
from offload.train.driver.platform import ray_platform
from offload.train.driver.supervisor import Supervisor
from offload.train.group.ray_group import RayGroups
from offload.train.hub.run_names import runs
from tests.conftest import LOGICAL_CPUS
from tests.helpers import eventually
from tests.loops import one_epoch

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
DEADLINE_S = 800.0


def press() -> None:
    """As Ctrl-C does, whichever thread is about to run."""
    os.kill(os.getpid(), signal.SIGINT)


def fit(folder: Path) -> dict[str, Any]:
    data = torch.utils.data.TensorDataset(torch.zeros(64, 1))
    source = offload.from_torch(data, columns=["x"])
    trainer = offload.Trainer(one_epoch, datasets={"train": source}, batch_size=16, workers=1)
    return trainer.fit(run_dir=folder, quiet=True).document


def groups() -> list[Any]:
    return [each for each in placement_group_table().values() if each["state"] != "REMOVED"]


def all_is_free() -> bool:
    return ray.available_resources().get("CPU") == LOGICAL_CPUS and not runs() and not groups()


def after(function: Callable[..., Any], then: Callable[[], Any]) -> Callable[..., Any]:
    """The function, with something that happens once it has returned and before its caller has the result."""

    def called(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        then()
        return result

    return called


def hub_has_started(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ray_platform, "named_hub", after(ray_platform.named_hub, press))


def workers_are_about_to_start(patch: pytest.MonkeyPatch) -> None:
    """The thread that starts them goes on only once the run has ended."""
    released, real = threading.Event(), Supervisor._train

    def late(supervisor: Supervisor, main: Any) -> str:
        press()
        assert released.wait(DEADLINE_S)
        return real(supervisor, main)

    patch.setattr(Supervisor, "_train", late)
    patch.setattr(Holdings, "release", after(Holdings.release, released.set))


def workers_get_their_room(patch: pytest.MonkeyPatch) -> None:
    real = RayGroups.start

    def start(groups: RayGroups, *arguments: Any) -> Any:
        group = real(groups, *arguments)
        press()  # once is enough: nothing is trained yet
        return group

    patch.setattr(RayGroups, "start", start)


def the_run_ends(patch: pytest.MonkeyPatch) -> None:
    real = Holdings.release

    def release(holdings: Holdings) -> None:
        if not pressed.is_set():
            pressed.set()
            press()
        real(holdings)

    pressed = threading.Event()
    patch.setattr(Holdings, "release", release)


def no_signal_but_an_exception(patch: pytest.MonkeyPatch) -> None:
    """As a debugger's or another library's, which no handler counts."""

    def conductor(*arguments: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    patch.setattr(run_module, "Conductor", conductor)


def an_exception_in_the_clean_up(patch: pytest.MonkeyPatch) -> None:
    def release(holdings: Holdings) -> None:
        raise KeyboardInterrupt

    patch.setattr(ray_platform, "named_hub", after(ray_platform.named_hub, press))
    patch.setattr(Holdings, "release", release)


@pytest.mark.parametrize(
    "moment",
    [
        hub_has_started,
        workers_are_about_to_start,
        workers_get_their_room,
        the_run_ends,
        no_signal_but_an_exception,
    ],
)
def test_an_interrupted_run_leaves_no_cores_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with monkeypatch.context() as patch:
        moment(patch)
        try:
            status = fit(tmp_path / "run")["status"]
        except KeyboardInterrupt:
            status = "interrupted"
    assert status == "interrupted"
    eventually(all_is_free, DEADLINE_S)


def test_what_an_interrupted_clean_up_has_left_the_next_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        an_exception_in_the_clean_up(patch)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "first")
    assert left()
    assert fit(tmp_path / "second")["status"] == "finished"
    eventually(all_is_free, DEADLINE_S)


def test_room_that_was_granted_before_its_handle_came_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was interrupted between the two."""
    holdings = Holdings()
    requests, bundle = NodeRequests(holdings), bundle_of({"CPU": 1.0})

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(holdings_module, "placement_group", after(placement_group, interrupted))
        with pytest.raises(KeyboardInterrupt):
            requests.ask({bundle: 1}, hold=True)
    requests.close()
    assert len(groups()) == 1
    assert holdings in left()
    holdings.release()
    eventually(all_is_free, DEADLINE_S)
    holdings.release()  # once more does nothing
    holdings.drop()
    assert holdings not in left()


def test_a_closed_request_asks_no_more() -> None:
    """A thread of a run that ends at once may still be about to ask."""
    requests = NodeRequests(Holdings())
    requests.close()
    requests.ask({bundle_of({"CPU": 1.0}): 1})
    assert not groups()


def test_a_run_that_waits_for_room_says_who_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @ray.remote(num_cpus=LOGICAL_CPUS)
    class Counter:
        def ready(self) -> None: ...

    counter: Any = Counter.remote()
    ray.get(counter.ready.remote())
    shown: list[Any] = []
    real = conductor_module._cluster_seen

    def seen(platform: Any, cluster: Any) -> Any:
        shown.append(real(platform, cluster))
        return shown[-1]

    monkeypatch.setattr(conductor_module, "_cluster_seen", seen)
    monkeypatch.setattr("offload.train.driver.fleet.state_machine.OWN_ROOM_S", 0.0)
    try:
        with pytest.raises(
            offload.ConfigError, match=r"that this program itself holds, 4 of 4 CPU \(actor Counter 4 CPUs\)\. End"
        ):
            fit(tmp_path / "run")
    finally:
        ray.kill(counter)
    assert shown[0].by_us
    eventually(all_is_free, DEADLINE_S)
