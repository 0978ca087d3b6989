"""What the model says of other nodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from offload.model import Profile, Shape, feeds
from offload.model.blocks import STORE_SHARE
from offload.prices import built_in
from offload.report.page.records import read_run
from offload.report.page.story import Story
from offload.report.page.verdict import against_alone, bottleneck, money_missing, what_next
from offload.report.page.what_if import RunModel, alone, best_step
from tests.report.runs import Writer, cpu_node, gpu_node, plain


def story_of(path: Path, **given: float) -> Story:
    return Story(read_run(path), built_in(), given)


def model_of(path: Path) -> RunModel:
    model = story_of(path).model
    assert isinstance(model, RunModel), model
    return model


@pytest.mark.parametrize("cpu_nodes", [0, 1, 2, 6])
def test_with_the_runs_own_nodes_the_model_gives_the_measured_rate(tmp_path: Path, cpu_nodes: int) -> None:
    model = model_of(plain(tmp_path / "run", cpu_nodes=cpu_nodes, noise=0.0))
    now = model.at(model.now)
    assert now is not None
    assert now.samples_per_s == pytest.approx(model.measured.samples_per_s, rel=0.03)


def test_the_prediction_for_the_gpu_alone_is_what_the_gpu_alone_does(tmp_path: Path) -> None:
    together = model_of(plain(tmp_path / "both", cpu_nodes=1, noise=0.0))
    found = alone(together)
    assert found is not None
    single = story_of(plain(tmp_path / "alone", cpu_nodes=0, noise=0.0))
    assert single.whole is not None
    assert found.samples_per_s == pytest.approx(single.whole.samples_per_s, rel=0.1)
    assert found.usd_per_hour == pytest.approx(1.408)
    assert alone(model_of(tmp_path / "alone")) is None


def test_more_nodes_never_slow_the_run_down(tmp_path: Path) -> None:
    model = model_of(plain(tmp_path / "run", cpu_nodes=1))
    rates = [
        found.samples_per_s for n in range(20) if (found := model.at({**model.now, "ml.c5.4xlarge": n})) is not None
    ]
    assert len(rates) == 20
    assert rates == sorted(rates)
    assert rates[-1] <= 1.01 * model.measured.global_batch_size / model.measured.working_s


def test_an_input_bound_run_gets_more_nodes_of_its_own_kind(tmp_path: Path) -> None:
    model = model_of(plain(tmp_path / "run", cpu_nodes=1, core_seconds=0.2))
    found = best_step(model)
    assert found is not None
    kind, more, predicted = found
    assert kind == "ml.c5.4xlarge"
    assert more >= 1
    now = model.at(model.now)
    assert now is not None
    assert predicted.samples_per_s > 1.5 * now.samples_per_s
    assert predicted.usd_per_million is not None
    assert now.usd_per_million is not None
    assert predicted.usd_per_million < now.usd_per_million


def test_an_advice_that_costs_more_says_so(tmp_path: Path) -> None:
    path = plain(tmp_path / "run", cpu_nodes=1)
    assert what_next(story_of(path)).startswith("Next, if time matters more than money: 1 more ml.c5.4xlarge node: ")
    free = story_of(path, **{"ml.c5.4xlarge": 0.01})
    assert what_next(free).startswith("Next: ")


def test_a_gpu_alone_gets_the_cheapest_cpu_nodes_of_the_catalog(tmp_path: Path) -> None:
    found = best_step(model_of(plain(tmp_path / "run", cpu_nodes=0)))
    assert found is not None
    assert found[0].startswith("ml.c")


def test_a_device_bound_run_gives_nodes_back(tmp_path: Path) -> None:
    path = plain(tmp_path / "run", cpu_nodes=6, noise=0.0)
    kind, change, predicted = best_step(model_of(path)) or pytest.fail("no step")
    assert (kind, change < 0) == ("ml.c5.4xlarge", True)
    assert predicted.samples_per_s > 0.96 * 610
    assert "fewer ml.c5.4xlarge nodes" in what_next(story_of(path))


def test_the_sentences_of_an_input_bound_run(tmp_path: Path) -> None:
    story = story_of(plain(tmp_path / "run", cpu_nodes=1, core_seconds=0.2))
    assert bottleneck(story).startswith("Preprocessing was the bottleneck for 8")
    said = what_next(story)
    assert said.startswith("Next: ")
    assert "more ml.c5.4xlarge nodes: " in said
    assert "samples/s predicted, $" in said
    assert "per million samples." in said
    said = against_alone(story)
    assert said.startswith("1 × ml.g5.xlarge node alone would train ")
    assert "as the model predicts from this run's measurements" in said


def test_a_run_on_its_gpu_nodes_has_nothing_to_compare_with(tmp_path: Path) -> None:
    assert "nothing to compare it with" in against_alone(story_of(plain(tmp_path / "run", cpu_nodes=0)))


def test_a_run_whose_bottleneck_changed_says_both(tmp_path: Path) -> None:
    run = Writer(tmp_path, cpu_nodes=0)
    run.begin()
    run.train(60)
    for number in range(5):
        run.join(number)
    run.train(10)
    run.end()
    said = bottleneck(story_of(tmp_path))
    assert said.startswith("At its last size, the GPU was the bottleneck. Over the whole run, preprocessing was for ")


def test_a_run_that_waits_for_storage_is_not_promised_cores(tmp_path: Path) -> None:
    run = Writer(tmp_path, cpu_nodes=1, core_seconds=0.2)
    run.begin()
    run.train(30, blocked=0.8)
    run.end()
    story = story_of(tmp_path)
    assert "Reading was the bottleneck" in bottleneck(story)
    assert "faster storage" in what_next(story)


def test_machines_that_nobody_sells_get_cores_in_general(tmp_path: Path) -> None:
    run = Writer(tmp_path, cpu_nodes=0, core_seconds=0.2)
    run.nodes = [gpu_node(instance_type=None)]
    run.begin()
    run.train(30)
    run.end()
    story = story_of(tmp_path)
    assert "3 more preprocessing cores: " in what_next(story)
    missing = money_missing(story)
    assert missing is not None
    assert "Pass --usd-per-hour 10.0.0.1=1.40" in missing


def test_more_nodes_of_an_unsold_kind_are_advised_without_prices(tmp_path: Path) -> None:
    run = Writer(tmp_path, cpu_nodes=0, core_seconds=0.1)
    run.nodes = [gpu_node(instance_type=None), cpu_node(instance_type=None)]
    run.cores = 19
    run.begin()
    run.train(30)
    run.end()
    said = what_next(story_of(tmp_path))
    assert "more CPU node" in said
    assert "$" not in said


def test_without_measurements_the_report_says_so(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.begin()
    run.train(5, core_seconds_per_sample=None)
    story = story_of(tmp_path)
    assert what_next(story) == (
        "The model cannot say what other nodes would bring: the run directory has no measurement of the preprocessing cores."
    )
    assert "not known, since the run directory has no measurement" in against_alone(story)


def test_a_network_that_is_full_gets_no_further_nodes(tmp_path: Path) -> None:
    run = Writer(tmp_path, cpu_nodes=1, core_seconds=0.029)
    run.begin()
    run.train(40, wire_bytes_per_sample=4e7, stall=0.5)
    run.end()
    assert "network" in what_next(story_of(tmp_path))


# --- the hub -----------------------------------------------------------------------------------------------------------

# Light samples on many cores: with some 20 CPU nodes, these make more blocks than one feed hands out. A block holds two local batches.
LIGHT = {"gpu_nodes": 64, "core_seconds": 0.004, "device_samples_per_s": 1e5, "batch": 64 * 300, "noise": 0.0}
G5, C5 = "ml.g5.xlarge", "ml.c5.4xlarge"


@pytest.fixture
def one_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a run never took more: 16 of them end with more nodes than a test should write records of."""
    monkeypatch.setattr(feeds, "MOST_FEEDS", 1)


def light(path: Path, cpu_nodes: int, **changes: Any) -> RunModel:
    return model_of(plain(path, cpu_nodes=cpu_nodes, intervals=20, **{**LIGHT, **changes}))


def planned_rate(cpu_nodes: int) -> float:
    """The input's samples/s by which ``offload plan`` chooses, with the profile that says the same of the samples."""
    profile = Profile.from_document(
        {
            "schema": "offload.profile/1",
            "input": {"core_seconds_per_sample": LIGHT["core_seconds"], "wire_bytes_per_sample": 150_528},
            "step": {"alpha_compute": 0.001, "beta_compute": 0.0001},
        }
    )
    nodes = built_in().nodes
    return float(profile.input.samples_per_s(Shape({nodes[G5]: 64, nodes[C5]: cpu_nodes}), 64, 300))


@pytest.mark.usefixtures("one_feed")
@pytest.mark.parametrize("cpu_nodes", [0, 40])
def test_other_nodes_bring_what_a_plan_says_of_them_the_hub_included(tmp_path: Path, cpu_nodes: int) -> None:
    # Where the hub binds, the run is as slow as a plan says.
    model = light(tmp_path / "run", cpu_nodes, handed_out_per_s=planned_rate(40))
    now = model.at(model.now)
    assert now is not None
    assert now.samples_per_s == pytest.approx(model.measured.samples_per_s, rel=0.01)
    binds = set()
    for others in (0, 10, 20, 30, 40, 80):
        found = model.at({G5: 64, C5: others})
        assert found is not None
        expected = planned_rate(others) / planned_rate(cpu_nodes)
        assert found.samples_per_s / now.samples_per_s == pytest.approx(expected, rel=0.01)
        binds.add(model.bottleneck({G5: 64, C5: others}))
    assert binds == {"cpu", "hub"}


@pytest.mark.usefixtures("one_feed")
def test_a_run_whose_hub_is_busy_gets_no_cores(tmp_path: Path) -> None:
    model = light(tmp_path / "run", 40, handed_out_per_s=planned_rate(40))
    assert best_step(model) is None
    assert what_next(story_of(tmp_path / "run")).startswith(
        "Next: nodes with more memory for each core, or smaller samples"
    )
    # Without the hub's limit, the same cores and samples are worth another node.
    free = dataclasses.replace(model, input=dataclasses.replace(model.input, hub_block_s=0.0))
    assert best_step(free) is not None


@pytest.mark.usefixtures("one_feed")
def test_a_hub_is_as_fast_as_its_run_has_shown(tmp_path: Path) -> None:
    shown = 1.2 * planned_rate(40)
    model = light(tmp_path / "run", 40, handed_out_per_s=shown)
    single = alone(model)
    assert single is not None
    assert single.samples_per_s == pytest.approx(3 * 64 / LIGHT["core_seconds"], rel=0.01)


@pytest.mark.usefixtures("one_feed")
def test_idle_nodes_that_the_hub_cannot_use_are_counted_as_idle(tmp_path: Path) -> None:
    rate = 100_000.0
    model = light(tmp_path / "run", 40, device_samples_per_s=rate / 64)
    kind, change, predicted = best_step(model) or pytest.fail("no step")
    assert (kind, predicted.samples_per_s > 0.96 * rate) == (C5, True)
    assert -40 < change < 0
    assert (3 * 64 + 16 * (40 + change)) / LIGHT["core_seconds"] >= 0.96 * rate


def test_a_run_on_many_cores_gets_more_of_them_as_several_feeds_serve_it(tmp_path: Path) -> None:
    model = light(tmp_path / "run", 40, handed_out_per_s=planned_rate(40))
    assert model.bottleneck(model.now) == "cpu"
    assert best_step(model) is not None


def test_a_small_object_store_makes_blocks_small_and_the_hub_busy(tmp_path: Path) -> None:
    binds = []
    for name, changes in (("roomy", {"store_bytes": STORE_SHARE * 32 * 2**30}), ("small", {"store_bytes": 64e6})):
        run = Writer(tmp_path / name, core_seconds=0.0005, device_samples_per_s=1e6, handed_out_per_s=4000.0)
        run.nodes = [gpu_node(**changes), cpu_node(**changes)]
        run.begin()
        run.train(20)
        model = model_of(tmp_path / name)
        binds.append(model.bottleneck(model.now))
    assert binds == ["network", "hub"]
