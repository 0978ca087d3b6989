"""The arithmetic of the benchmark of convergence: schedules, emulated time, other programs' samplers, paired tests; and its bad input."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import convergence
from benchmarks.other_resizes import distributed_batches, horovod_batches
from benchmarks.paired import no_worse, ratio_interval
from benchmarks.rows.pasted_digits import RankNorm
from benchmarks.side_processes import in_processes
from benchmarks.thread_ranks import ThreadRanks, make_way
from benchmarks.worker_schedules import LEAST, MOST, NAMES, Ledger, Name, Schedule, step_s
from offload.train.config import BatchSize
from offload.train.worker.context import Context

accuracies = st.floats(0.0, 1.0)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 100), waits=st.lists(st.floats(0.0, 500.0), min_size=30, max_size=30))
@settings(max_examples=20)
def test_a_schedule_stays_within_its_workers_and_never_stands_still(name: Name, seed: int, waits: list[float]) -> None:
    schedule, twin = Schedule(name, seed, 15), Schedule(name, seed, 15)
    workers, seconds, counts = schedule.first, 0.0, [schedule.first]
    for wait in waits:
        seconds += wait
        change = schedule.next_change(workers, seconds)
        assert change == twin.next_change(workers, seconds)
        if change is None:
            break
        assert LEAST <= change.workers <= MOST
        assert change.workers != workers
        assert change.seconds > seconds
        assert not change.due(seconds, 0.0)
        workers = change.workers
        counts.append(workers)
    if name == "2 → 4 → 8":
        assert counts == [2, 4, 8]
    elif "fixed" in name:
        assert counts == [schedule.first]
    else:
        assert max(abs(b - a) for a, b in itertools.pairwise(counts)) <= (1 if "±1" in name else 3)


def test_workers_on_their_own_devices_share_a_batch_but_not_the_exchange() -> None:
    times = [step_s(workers, 96 // workers) for workers in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] > times[0] / 8


samplers = st.tuples(st.integers(1, 60), st.integers(1, 8), st.integers(1, 7))


@given(samplers, st.data())
def test_horovod_deals_out_the_rest_and_repeats_fewer_samples_than_it_has_workers(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    samples, workers, local = sizes
    done = data.draw(st.integers(0, samples - 1))
    order = np.random.default_rng(samples).permutation(samples).tolist()
    batches = list(horovod_batches(order, done, workers, local))
    seen = Counter(sample for batch in batches for sample in batch)
    assert all(len(batch) % workers == 0 and len(batch) <= workers * local for batch in batches)
    assert set(seen) == set(order[done:])
    assert sum(seen.values()) - len(seen) < workers


@given(samplers, st.integers(0, 5))
@settings(max_examples=30)
def test_torchs_sampler_gives_all_ranks_equal_parts(sizes: tuple[int, int, int], epoch: int) -> None:
    samples, workers, local = sizes
    batches = distributed_batches(samples, epoch, workers, local, seed=3)
    seen = Counter(sample for batch in batches for sample in batch)
    assert set(seen) == set(range(samples))
    assert sum(seen.values()) - samples < workers


def test_a_ledger_tells_lost_samples_from_repeated_ones() -> None:
    ledger = Ledger()
    ledger.count([0, 1, 1, 1, 3], samples=5)
    ledger.count([0, 1, 2, 3, 4], samples=5)
    assert (ledger.lost, ledger.repeated) == (2, 2)


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_forward_pass_normalises_as_that_many_ranks_would(ranks: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4 * ranks, 2, 3, 3, requires_grad=True)
    together, alone = RankNorm(2), torch.nn.BatchNorm2d(2)
    together.ranks = ranks
    weights = torch.randn(x.shape)
    (got,) = torch.autograd.grad((together(x) * weights).sum(), x)
    wanted = []
    for part in x.split(4):
        wanted.append(alone(part))
    (gradient,) = torch.autograd.grad((torch.cat(wanted) * weights).sum(), x)
    torch.testing.assert_close(together(x), torch.cat(wanted))
    torch.testing.assert_close(got, gradient)


def test_running_statistics_are_those_of_rank_0() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 2, 3, 3)
    together, alone = RankNorm(2), torch.nn.BatchNorm2d(2)
    together.ranks = 2
    together(x), alone(x[:4])
    for name, of_rank in alone.state_dict().items():
        assert torch.equal(together.state_dict()[name], of_rank)


@given(st.lists(st.tuples(accuracies, accuracies), min_size=3, max_size=9), st.floats(0.001, 0.1))
def test_no_worse_is_the_one_sided_paired_t_test(pairs: list[tuple[float, float]], margin: float) -> None:
    values, base = (list(column) for column in zip(*pairs, strict=True))
    test = no_worse(values, base, margin)
    assert test.shown == (test.p < 0.05) or test.p == pytest.approx(0.05, abs=1e-6)
    if test.deviation > 1e-6:
        wanted = scipy.stats.ttest_rel([v + margin for v in values], base, alternative="greater")
        assert test.p == pytest.approx(wanted.pvalue, abs=1e-6)
    assert no_worse(values, base, 2 * margin).p <= test.p


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=6))
@settings(max_examples=20)
def test_the_interval_of_a_ratio_holds_it_and_turns_with_it(pairs: list[tuple[float, float]]) -> None:
    values, base = (list(column) for column in zip(*pairs, strict=True))
    ratio, low, high = ratio_interval(values, base, draws=300)
    assert low * (1 - 1e-9) <= ratio <= high * (1 + 1e-9)
    assert ratio_interval(base, values, draws=300) == pytest.approx((1 / ratio, 1 / high, 1 / low), rel=1e-6)


@pytest.mark.parametrize(("values", "base"), [([1.0], [1.0]), ([1.0, 2.0], [1.0])])
def test_a_paired_test_needs_pairs(values: list[float], base: list[float]) -> None:
    with pytest.raises(ValueError, match="two seeds"):
        no_worse(values, base, 0.01)
    with pytest.raises(ValueError, match="pairs of positive numbers"):
        ratio_interval([], [])


def test_groups_of_threads_make_way_for_one_another_and_train_each_sample_once(tmp_path: Path) -> None:
    samples, lock = 50, threading.Lock()
    trained: list[tuple[int, int]] = []

    def until(steps: int | None) -> object:
        def train(ctx: Context) -> None:
            model = torch.nn.Linear(1, 1)
            model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ddp=False)
            for epoch in ctx.epochs(2):
                for batch in ctx.batches("train"):
                    with lock:
                        trained.extend((epoch, int(i)) for i in batch["sample_id"][: ctx.rows])
                    ctx.backward(model(torch.ones(len(batch["sample_id"]), 1)).mean())
                    ctx.step()
                    if ctx.global_step == steps:
                        make_way(ctx)

        return train

    run = ThreadRanks(tmp_path, samples=samples, sizes=BatchSize(initial=8), seed=1)
    assert [run.train(until(steps), workers) for workers, steps in ((2, 3), (3, 9), (1, None))] == [False, False, True]  # type: ignore[arg-type]
    assert sorted(trained) == [(epoch, i) for epoch in range(2) for i in range(samples)]


def test_no_training_begins_after_the_minutes_are_over() -> None:
    assert list(in_processes(str, [1, 2, 3], 1)) == [(1, "1"), (2, "2"), (3, "3")]
    assert list(in_processes(str, [1, 2, 3], 1, minutes=0.0)) == []
    assert list(in_processes(str, [1, 2, 3], 2, minutes=0.0)) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seeds", "1"], "1 is not in the range x>=2"),
        (["--minutes", "-1"], "-1.0 is not in the range x>=0"),
        (["--program", "mine"], "'mine' is not one of 'offload', 'horovod', 'restarted'"),
        (["-o", "damaged.json"], "holds no rows of a result: remove it, or name another file"),
        (["-o", "nowhere/result.json"], "lies in no folder: make nowhere first"),
    ],
)
def test_bad_input_is_named_before_anything_trains(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged.json").write_text("{}", encoding="utf-8")
    done = CliRunner().invoke(convergence.main, arguments)
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def test_rows_of_the_file_are_not_trained_again_and_json_is_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"seconds": 30.0 * epoch, "accuracy": 0.06 * epoch} for epoch in range(1, 16)]
    rows = [
        {
            "program": "offload", "schedule": name, "seed": seed, "seconds": 450.0, "steps": 225, "resizes": 1, "lost": 0,
            "repeated": 15, "undone": 2, "lines": lines,
        }
        for name in ("8 fixed", "2 fixed") for seed in range(2)
    ]  # fmt: skip
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    monkeypatch.setattr(convergence, "row_of", lambda key: pytest.fail(f"trained {key}"))
    chosen = ["--seeds", "2", "--program", "offload", "--schedule", "8 fixed", "--schedule", "2 fixed"]
    picture = tmp_path / "plot.png"
    done = CliRunner().invoke(convergence.main, [*chosen, "--json", "-o", str(file), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document == json.loads(file.read_text(encoding="utf-8"))
    assert picture.stat().st_size > 0
    _, other = document["summary"]
    assert (other["schedule"], other["accuracy"], other["repeated_per_epoch"]) == ("2 fixed", pytest.approx(0.87), 1.0)
    assert other["over_8_fixed"]["no_worse"]
    assert other["seconds_to_target"] == 420.0
