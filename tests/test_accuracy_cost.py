"""The arithmetic of the benchmark of dollars to an accuracy: the bill, interruptions, policies' inputs, ratios; and its bad input."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import accuracy_cost, spot_clusters
from benchmarks.accuracy_cost import PARTS, Training, interval_of, parts_of, ratios, summary
from benchmarks.cluster_policies import COUNTS, INITIAL, LARGEST, NEAR, AdaptDL, Offload, Seeing
from benchmarks.spot_clusters import BOOT_S, CORE_USD, GPU_USD, REPLACEMENT_S, STEP, WORKLOADS, Cluster
from offload.model.batch_split import BatchSplit
from offload.model.noise import GradientNoise

GPU_BOUND, INPUT_BOUND = WORKLOADS
counts = st.sampled_from(COUNTS)


def splits() -> st.SearchStrategy[BatchSplit]:
    return st.builds(BatchSplit, workers=counts, local_batch_size=st.integers(4, 64), accum_steps=st.integers(0, 3))


@given(splits(), st.integers(0, 500), st.floats(1, 100))
@settings(max_examples=30)
def test_a_bill_is_hours_times_prices(split: BatchSplit, bought: int, steps: float) -> None:
    cluster = Cluster(INPUT_BOUND, split.workers, True, 3.0, seed=0)
    cluster.change(split.workers, NEAR * split.workers + bought)
    booted = BOOT_S * (split.workers * GPU_USD + bought * CORE_USD)
    cluster.run(split, steps)
    running = cluster.seconds * (split.workers * GPU_USD + bought * CORE_USD)
    interrupted = cluster.interruptions * BOOT_S * GPU_USD
    assert cluster.usd * 3600 == pytest.approx(booted + running + interrupted)


def test_a_fixed_cluster_waits_for_a_lost_node_and_an_elastic_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_clusters, "INTERRUPTIONS_PER_HOUR", 0.5)
    split = BatchSplit(workers=16, local_batch_size=8, accum_steps=0)
    fixed, elastic = (Cluster(GPU_BOUND, 16, goes_on, 3.0, seed=4) for goes_on in (False, True))
    alone = [cluster.run(split, 1e5) for cluster in (fixed, elastic)]
    assert alone[0] == alone[1]
    assert fixed.interruptions == elastic.interruptions > 3
    lost = [(cluster.seconds - alone[0]) / cluster.interruptions for cluster in (fixed, elastic)]
    assert lost[0] > REPLACEMENT_S + 3.0
    assert lost[1] == pytest.approx(2 * 3.0 + REPLACEMENT_S / 16)


@given(splits(), st.integers(0, 300))
@settings(max_examples=30)
def test_cores_help_until_the_accelerators_bind(split: BatchSplit, more: int) -> None:
    cluster = Cluster(INPUT_BOUND, split.workers, True, 3.0, seed=0)
    before = cluster.step_s(split)
    cluster.change(split.workers, cluster.cores + more)
    device = float(STEP.predict(split.workers, split.workers, split.local_batch_size, split.accum_steps))
    assert device * (1 - 1e-9) <= cluster.step_s(split) <= before * (1 + 1e-9)


@given(splits(), st.sampled_from(WORKLOADS), st.floats(1, 1000))
@settings(max_examples=30)
def test_an_interval_shows_what_the_model_of_the_world_holds(
    split: BatchSplit, workload: spot_clusters.Workload, steps: float
) -> None:
    cluster = Cluster(workload, split.workers, True, 3.0, seed=0)
    interval = interval_of(cluster, split, steps, 1.1 * steps * cluster.step_s(split))
    device = float(STEP.predict(split.workers, split.workers, split.local_batch_size, split.accum_steps))
    assert interval.samples_per_s == pytest.approx(split.global_batch_size / (1.1 * cluster.step_s(split)))
    assert interval.device_samples_per_s == pytest.approx(split.global_batch_size / (1.1 * device))
    assert interval.stall == pytest.approx(1 - device / cluster.step_s(split), abs=1e-9)


@given(splits())
def test_parts_are_whole_micro_batches(split: BatchSplit) -> None:
    parts = parts_of(split)
    assert 1 <= parts <= PARTS
    assert split.workers * (split.accum_steps + 1) % parts == 0


def seeing(workload: spot_clusters.Workload, split: BatchSplit) -> Seeing:
    cluster = Cluster(workload, split.workers, True, 3.0, seed=0)
    return Seeing(
        cluster=cluster, split=split, interval=interval_of(cluster, split, 100, 100 * cluster.step_s(split)),
        noise=GradientNoise(sqr=1.0, var=10.0, batch_size=INITIAL), work_left=1e7,
    )  # fmt: skip


def test_adaptdl_decides_alike_whatever_the_input_and_offload_buys_cores_where_it_binds() -> None:
    split = BatchSplit(workers=4, local_batch_size=8, accum_steps=0)
    seen = [seeing(workload, split) for workload in WORKLOADS]
    alike = [AdaptDL().decide(each) for each in seen]
    assert alike[0] == alike[1]
    assert alike[0][1] == NEAR * alike[0][0].workers
    bought = [Offload("cost").decide(each)[1] - NEAR * split.workers for each in seen]
    assert bought[0] == 0 < bought[1]


def test_adaptdl_keeps_workers_only_while_they_bring_half_of_their_share() -> None:
    policy, split = AdaptDL(), BatchSplit(workers=1, local_batch_size=INITIAL, accum_steps=0)
    for _ in range(5):
        split, _ = policy.decide(dataclasses.replace(seeing(GPU_BOUND, split), noise=GradientNoise(1.0, 1e-6, INITIAL)))
    # Without noise, a larger batch brings nothing: only the split of one batch helps.
    assert split.workers <= INITIAL // 4
    assert split.global_batch_size < 2 * INITIAL
    policy, split = AdaptDL(), BatchSplit(workers=1, local_batch_size=INITIAL, accum_steps=0)
    for _ in range(5):
        split, _ = policy.decide(dataclasses.replace(seeing(GPU_BOUND, split), noise=GradientNoise(1e-9, 1.0, INITIAL)))
    assert split.workers == max(COUNTS)
    assert split.global_batch_size == pytest.approx(LARGEST, rel=0.05)


def test_a_pass_trains_each_sample_once_and_measures_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    training, seen = Training(0, adaptive=True, rate=0.01), Counter[int]()
    whole = torch.arange(len(accuracy_cost.pasted_digits(held_out=False)))

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.update(labels.tolist())
        return logits.square().mean()

    data = dataclasses.replace(accuracy_cost.pasted_digits(held_out=False), labels=whole)
    monkeypatch.setattr(accuracy_cost, "pasted_digits", lambda held_out: data)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", loss)
    rows = [training.train(BatchSplit(workers=8, local_batch_size=64, accum_steps=0)) for _ in range(3)]
    assert rows == [512, 512, len(whole) - 1024]
    assert seen == Counter(whole.tolist())
    assert training.scaling is not None
    assert training.scaling.noise.whole is not None
    assert not training.scaling.noise.paired


def test_ratios_pair_seeds_and_leave_out_runs_that_never_got_there() -> None:
    def row(policy: str, seed: int, seconds: float | None) -> dict[str, Any]:
        lines = [{"accuracy": 0.9 if seconds else 0.5, "workers": 4, "cores": 12, "batch": 32}]
        usd = None if seconds is None else 2 * seconds
        return {
            "workload": "GPU-bound", "policy": policy, "seed": seed, "seconds": seconds, "usd": usd, "samples": 5,
            "interruptions": 0, "lines": lines,
        }  # fmt: skip

    rows = [row("offload, cost", seed, 10.0 * (seed + 1)) for seed in range(3)]
    rows += [row("4 fixed", seed, None if seed == 1 else 30.0 * (seed + 1)) for seed in range(3)]
    (line,) = ratios(rows)
    assert (line["policy"], line["over"], line["runs"]) == ("offload, cost", "4 fixed", 2)
    assert [line["seconds"], *line["usd_interval"]] == pytest.approx([3.0, 3.0, 3.0])
    assert [(each["policy"], each["reached"], each["runs"]) for each in summary(rows)] == [
        ("4 fixed", 2, 3),
        ("offload, cost", 3, 3),
    ]


def test_rows_of_the_file_are_not_trained_again_and_json_is_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"samples": 700, "seconds": 7.0, "usd": 0.1, "accuracy": 0.9, "workers": 4, "cores": 12, "batch": 32}
    rows = [
        {
            "workload": workload.name, "policy": "4 fixed", "seed": 0, "seconds": 7.0, "usd": 0.1, "samples": 700,
            "interruptions": 0, "restarts": 0, "lines": [line],
        }
        for workload in WORKLOADS
    ]  # fmt: skip
    file, picture = tmp_path / "result.json", tmp_path / "plot.png"
    file.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    monkeypatch.setattr(accuracy_cost, "rows_of", lambda key: pytest.fail(f"trained {key}"))
    chosen = ["--seeds", "1", "--policy", "4 fixed", "--json", "-o", str(file), "--plot", str(picture)]
    done = CliRunner().invoke(accuracy_cost.main, chosen)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document == json.loads(file.read_text(encoding="utf-8"))
    assert [line["usd"] for line in document["summary"]] == [0.1, 0.1]
    assert picture.stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seeds", "0"], "0 is not in the range x>=1"),
        (["--policy", "mine"], "'mine' is not one of '4 fixed'"),
        (["-o", "damaged.json"], "holds no rows of a result: remove it, or name another file"),
    ],
)
def test_bad_input_is_named_before_anything_trains(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged.json").write_text("[]", encoding="utf-8")
    done = CliRunner().invoke(accuracy_cost.main, arguments)
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())
