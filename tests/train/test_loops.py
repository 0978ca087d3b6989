"""Loops of every kind on a real cluster with two workers: the weights stay equal, each sample counts once, and misuse is named."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.data
import torch

import offload
from offload import collate
from offload.report.events import read_event
from offload.report.run_dir import EVENTS, read_lines

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

SAMPLES = 37


def as_points(batch: dict[str, Any]) -> dict[str, Any]:
    """The samples of :class:`Points`, as a step of a ``ray.data.Dataset`` makes them."""
    return {"x": np.stack([batch["id"]] * 4, axis=1).astype(np.float32), "y": batch["id"].astype(np.float32)}


class Points:
    """Points on a plane, with noise."""

    def __init__(self, n: int = SAMPLES) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        generator = np.random.default_rng(i)
        x = generator.normal(size=4).astype(np.float32)
        return {"x": x, "y": np.float32(x.sum() + generator.normal() / 10)}


def fit(
    train: Callable[[Any], None], folder: Path, data: Any = None, *, others: Any = None, **options: Any
) -> dict[str, float]:
    """The metrics of a run with two workers and batches of eight. ``others``: its data sets besides the training data."""
    training = offload.from_torch(Points()) if data is None else data
    datasets = {"train": training, **({"val": offload.from_torch(Points(10))} if others is None else others)}
    given = {"workers": 2, "batch_size": 8, "seed": 1, **options}
    result = offload.Trainer(train, datasets=datasets, **given).fit(run_dir=folder, quiet=True)
    return dict(result.metrics)


def linear(inputs: int = 4, outputs: int = 1) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(inputs, outputs)


def report_equal(ctx: Any, *models: torch.nn.Module, **more: Any) -> None:
    """Report the sum of the weights, which all ranks must share to the last bit."""
    mine = torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])
    assert all(torch.equal(theirs, mine) for theirs in ctx.gather(mine))
    assert bool(mine.isfinite().all())
    ctx.report({"weights": float(mine.double().sum()), "steps": ctx.global_step, **more})


def ending_epochs_with(then: Callable[[Any], None]) -> Callable[[Any], None]:
    """A loop of two epochs that do not learn, each of which ends with ``then``."""

    def train(ctx: Any) -> None:
        ctx.prepare(linear())
        for _ in ctx.epochs(2):
            for _batch in ctx.batches("train"):
                ctx.backward(torch.zeros((), requires_grad=True))
                ctx.step()
            then(ctx)

    return train


def report_on_one(ctx: Any) -> None:
    if ctx.rank == 0:
        ctx.report(loss=1.0)


def report_own_names(ctx: Any) -> None:
    ctx.report({f"rank{ctx.rank}/loss": 1.0})


def report_more_on_one(ctx: Any) -> None:
    ctx.report({"a": 1.0, "b": 2.0} if ctx.rank == 0 else {"a": 1.0})


def report_or_sum(ctx: Any) -> None:
    if ctx.rank == 0:
        ctx.report(loss=1.0)
    ctx.sum(1.0)


@pytest.mark.parametrize(
    ("at_the_end_of_an_epoch", "made"),
    [
        pytest.param(
            report_on_one,
            "worker 0 made ctx.report(loss) where worker 1 made none of these",
            marks=pytest.mark.soak,
        ),
        (report_own_names, "worker 0 made ctx.report(rank0/loss) where worker 1 made ctx.report(rank1/loss)"),
        pytest.param(
            report_more_on_one,
            "worker 0 made ctx.report(a, b) where worker 1 made ctx.report(a)",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            report_or_sum,
            "worker 0 made ctx.report(loss) where worker 1 made ctx.sum() of a number",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_workers_that_make_different_calls_are_told_which_instead_of_hanging(
    tmp_path: Path, at_the_end_of_an_epoch: Callable[[Any], None], made: str
) -> None:
    with pytest.raises(offload.RunError) as raised:
        fit(ending_epochs_with(at_the_end_of_an_epoch), tmp_path / "run")
    assert made in str(raised.value)


@pytest.mark.parametrize(
    "ranks", [(0,), pytest.param((1,), marks=pytest.mark.soak), pytest.param((0, 1), marks=pytest.mark.soak)]
)
def test_a_validation_on_some_workers_alone_is_told_once(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    def validate(ctx: Any) -> None:
        rows = sum(len(batch["y"]) for batch in ctx.batches("val")) if ctx.rank in ranks else 0
        ctx.report(rows=ctx.sum(rows))

    assert fit(ending_epochs_with(validate), tmp_path / "run") == {"rows": 10 / 2 * len(ranks)}
    differ = [event for event in read_lines(tmp_path / "run" / EVENTS) if event["event"] == "passes_differ"]
    if len(ranks) == 2:
        assert differ == []
        return
    (event,) = differ
    times = "1 time and worker 1 0 times" if ranks == (0,) else "0 times and worker 1 1 time"
    assert f"in epoch 1, worker 0 went through 'val' {times}, and each" in read_event(event).sentence({})


def fail_at(ctx: Any, step: int) -> None:
    if ctx.config["fails"] and ctx.global_step == step:
        raise ValueError("on purpose")


def error(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()


def test_a_plain_loop_trains_as_one_with_ctx_even_with_an_unequal_last_batch(tmp_path: Path) -> None:
    def train(ctx: Any) -> None:
        model = linear()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), ddp=ctx.config["ddp"])
        for _ in ctx.epochs(2):
            for batch in ctx.batches("train"):
                loss = error(model, batch)
                if ctx.config["plain"]:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                else:
                    ctx.backward(loss)
                    ctx.step()
        report_equal(ctx, model)

    found = [
        fit(train, tmp_path / f"{plain}{ddp}", train_loop_config={"plain": plain, "ddp": ddp}, deterministic=True)
        for plain, ddp in ((False, True), (True, True))  # without DDP: see the skipped part
    ]
    assert {each["steps"] for each in found} == {10.0}
    assert [each["weights"] for each in found] == pytest.approx([found[0]["weights"]] * 2, rel=1e-6)


@pytest.mark.soak
def test_two_models_step_one_after_the_other(tmp_path: Path) -> None:
    def train(ctx: Any) -> None:
        maker, judge = linear(2, 4), linear(4, 1)
        of_maker, of_judge = (torch.optim.Adam(model.parameters(), lr=0.01) for model in (maker, judge))
        maker, judge, of_maker, of_judge = ctx.prepare(maker, judge, of_maker, of_judge)
        for _ in ctx.epochs(2):
            for batch in ctx.batches("train"):
                noise = torch.ones(len(batch["x"]), 2)
                of_judge.zero_grad()
                ctx.backward((judge(maker(noise).detach()) - judge(batch["x"])).mean())
                ctx.step(of_judge)
                ctx.backward(-judge(maker(noise)).mean())
                ctx.step(of_maker)
                fail_at(ctx, 7)
        report_equal(ctx, maker, judge)

    whole = fit(train, tmp_path / "whole", deterministic=True, train_loop_config={"fails": False})
    assert whole["steps"] == 10
    with pytest.raises(offload.OffloadError, match="on purpose"):
        fit(train, tmp_path / "run", deterministic=True, train_loop_config={"fails": True})
    assert fit(train, tmp_path / "run", deterministic=True, train_loop_config={"fails": False}) == whole


def test_a_skipped_part_adds_nothing_and_the_ranks_stay_equal(tmp_path: Path) -> None:
    def train(ctx: Any) -> None:
        model = linear()
        model, _ = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05), ddp=ctx.config["ddp"])
        number = 0
        for _ in ctx.epochs(2):
            for batch in ctx.batches("train"):
                number += 1
                loss = error(model, batch)
                if number == 3 and ctx.rank == 0:
                    ctx.skip()  # and no step: the one of the last batch repeats
                    continue
                if number == 4:
                    before = [p.detach().clone() for p in model.parameters()]
                    ctx.skip()
                    ctx.step(clip_norm=1.0)
                    assert all(map(torch.equal, before, model.parameters())), "nobody's part counts: no step"
                    continue
                if number == 5 and ctx.rank == 1:
                    loss = loss * float("nan")
                    ctx.skip()
                else:
                    ctx.backward(loss)
                ctx.step(clip_norm=1.0)
        report_equal(ctx, model)

    found = [
        fit(train, tmp_path / str(ddp), train_loop_config={"ddp": ddp}, deterministic=True) for ddp in (True, False)
    ]
    assert found[0]["weights"] == pytest.approx(found[1]["weights"], rel=1e-6)


@pytest.mark.soak
def test_replicas_begin_and_stay_equal(tmp_path: Path) -> None:
    """Of models that differ by worker at first, with a loss that does not come from a call of the joined model, in accumulated batches."""

    def train(ctx: Any) -> None:
        model = linear()
        torch.nn.init.constant_(model.weight, 0.1 * ctx.rank)
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), ddp=ctx.config["ddp"])
        for _ in ctx.epochs(2):
            for batch in ctx.batches("train"):
                ctx.backward(error(getattr(model, "module", model), batch))
                ctx.step()
        report_equal(ctx, model)

    found = [
        fit(train, tmp_path / str(ddp), train_loop_config={"ddp": ddp}, deterministic=True, **ACCUMULATES)
        for ddp in (True, False)
    ]
    assert found[0]["weights"] == pytest.approx(found[1]["weights"], rel=1e-6)


def test_steps_validation_within_a_pass_and_a_moving_average(tmp_path: Path) -> None:
    def train(ctx: Any) -> None:
        model = linear()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        average = torch.optim.swa_utils.AveragedModel(model)
        model, optimizer, average = ctx.prepare(model, optimizer, average)
        validated = 0
        for x, y in ctx.steps(13, "x", "y"):
            ctx.backward(((model(x)[:, 0] - y) ** 2).mean())
            if ctx.step():
                average.update_parameters(getattr(model, "module", model))
            if ctx.global_step % 5 == 0:
                rows = ctx.rows
                validated += sum(ctx.rows for _ in ctx.batches("val"))
                assert ctx.rows == rows
            fail_at(ctx, 8)
        report_equal(ctx, model, validated=ctx.sum(validated), epoch=ctx.epoch, averaged=int(average.n_averaged))

    with pytest.raises(offload.OffloadError, match="on purpose"):
        fit(train, tmp_path / "run", train_loop_config={"fails": True})
    found = fit(train, tmp_path / "run", train_loop_config={"fails": False})
    assert (found["steps"], found["epoch"], found["averaged"]) == (13, 2, 13)
    assert found["validated"] == 10, "at step 10; the run resumed after step 5"


def drawing(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample, with a random number of its own."""
    return {**sample, "drawn": np.random.random()}


@pytest.mark.soak
def test_each_pass_over_a_shuffled_data_set_has_random_numbers_of_its_own_which_outlive_a_restart(
    tmp_path: Path,
) -> None:
    made = offload.from_torch(Points(20), drawing, per_sample=True)
    shuffled = offload.from_torch(Points(20), drawing, per_sample=True, shuffle=True)
    others = {
        "val": made,
        "unlabeled": shuffled,
        "twin": shuffled,
        "drawn": offload.weighted(made, range(20)),
        "mixed": offload.mix({"a": shuffled, "b": shuffled}),
        "rows": offload.from_ray(ray.data.range(20).map_batches(as_points), drawing, per_sample=True, shuffle=True),
    }

    def train(ctx: Any) -> None:
        model = linear()
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for _ in ctx.epochs(2):
            for batch in ctx.batches("train"):
                ctx.backward(error(model, batch))
                ctx.step()
                if ctx.global_step % 3 == 0:
                    for name in others:
                        numbers = [number for (each,) in ctx.batches(name, "drawn") for number in each.tolist()]
                        every = sorted(number for part in ctx.gather(numbers) for number in part)
                        if ctx.rank == 0:
                            with Path(ctx.config["log"]).open("a") as log:
                                log.write(json.dumps([name, ctx.global_step, every]) + "\n")
                fail_at(ctx, 8)

    def run(fails: bool) -> dict[tuple[str, int], tuple[float, ...]]:
        log = tmp_path / f"fails-{fails}.jsonl"
        options: dict[str, Any] = {"checkpoints": offload.Checkpoints(every_s=0.001)}
        config = {"log": str(log), "fails": fails}
        with pytest.raises(offload.OffloadError, match="on purpose") if fails else contextlib.nullcontext():
            fit(train, tmp_path / f"run-{fails}", others=others, train_loop_config=config, **options)
        if fails:
            fit(
                train, tmp_path / f"run-{fails}", others=others, train_loop_config={**config, "fails": False}, **options
            )
        found: dict[tuple[str, int], tuple[float, ...]] = {}
        for line in log.read_text().splitlines():
            name, step, numbers = json.loads(line)
            assert found.setdefault((name, step), tuple(numbers)) == tuple(numbers)
        return found

    whole = run(fails=False)
    assert run(fails=True) == whole
    assert len(whole) == 6 * 3, "at steps 3, 6 and 9"
    fixed = {numbers for (name, _), numbers in whole.items() if name == "val"}
    assert len(fixed) == 1
    assert len(set(whole.values())) == 1 + 5 * 3


def test_one_worker_stops_all_for_good(tmp_path: Path) -> None:
    def train(ctx: Any) -> None:
        model = linear()
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for _ in ctx.epochs(50):
            for batch in ctx.batches("train"):
                ctx.backward(error(model, batch))
                ctx.step()
                if ctx.global_step == 7 and ctx.rank == 1:
                    ctx.stop()
        report_equal(ctx, model)

    found = fit(train, tmp_path / "run")
    assert 7 <= found["steps"] <= 12


def test_a_worker_that_leaves_its_loop_alone_is_told(tmp_path: Path) -> None:
    def train(ctx: Any) -> None:
        model = linear()
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for _ in ctx.epochs(2):
            for number, batch in enumerate(ctx.batches("train")):
                ctx.backward(error(model, batch))
                ctx.step()
                if number == 2 and ctx.rank == 1:
                    break

    text = r"worker 1 left the loop over ctx.batches\('train'\) in epoch 1, at step 3, and worker 0 went on"
    with pytest.raises(offload.RunError, match=text):
        fit(train, tmp_path / "run", offload.from_torch(Points(400)))


class Ragged:
    """Token sequences of several lengths, with targets as dicts, one of them without boxes."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        return torch.arange(3 + i % 5), {"boxes": torch.zeros(i % 3, 4), "id": i, "name": f"s{i}"}


@pytest.mark.soak
def test_ragged_samples_reach_collate_fn_as_the_data_set_returned_them(tmp_path: Path) -> None:
    def train(ctx: Any) -> None:
        model = linear(1)
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        seen: list[int] = []
        for _ in ctx.epochs(1):
            for tokens, targets in ctx.batches("train"):
                for sequence, target in zip(tokens, targets, strict=True):
                    assert len(sequence) == 3 + target["id"] % 5
                    assert target["name"] == f"s{target['id']}"
                    assert target["boxes"].shape == (target["id"] % 3, 4)
                seen += [target["id"] for target in targets][: ctx.rows]
                ctx.backward(model(tokens[0][:1, None].float()).mean())
                ctx.step()
        assert sorted(i for each in ctx.gather(seen) for i in each) == list(range(40))
        report_equal(ctx, model)

    assert fit(train, tmp_path / "run", offload.from_torch(Ragged(), collate_fn=collate.lists()))["steps"] == 5


def some(sample: dict[str, Any]) -> Any:
    """Nothing for every third sample, up to three samples for the others."""
    if sample["i"] % 3:
        for part in range(int(sample["i"]) % 4):
            yield {"value": int(sample["i"]) * 10 + part}


def test_a_generator_drops_and_multiplies_samples_and_each_input_counts_once(tmp_path: Path) -> None:
    def train(ctx: Any) -> None:
        model = linear(1)
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        seen: list[int] = []
        with pytest.raises(TypeError, match="its transform is a generator"):
            len(ctx.batches("train"))
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                seen += batch["value"].tolist()[: ctx.rows]
                ctx.backward(model(batch["value"][:, None].float()).mean())
                ctx.step()
        assert sorted(i for each in ctx.gather(seen) for i in each) == [
            i * 10 + part for i in range(60) if i % 3 for part in range(i % 4)
        ]
        report_equal(ctx, model)

    fit(train, tmp_path / "run", offload.from_torch([{"i": i} for i in range(60)], some))


def twice(sample: dict[str, Any]) -> Any:
    yield from ({"value": 2 * int(sample["i"]) + part} for part in range(2))


@pytest.mark.soak
def test_an_epoch_of_batches_that_adapt_holds_all_samples_of_a_generator(tmp_path: Path) -> None:
    def train(ctx: Any) -> None:
        model = linear(1)
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        seen: list[int] = []
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                seen += batch["value"].tolist()[: ctx.rows]
                ctx.backward(model(batch["value"][:, None].float()).mean())
                ctx.step()
        assert sorted(i for each in ctx.gather(seen) for i in each) == list(range(80))
        report_equal(ctx, model)

    data = offload.from_torch([{"i": i} for i in range(40)], twice)
    fit(train, tmp_path / "run", data, batch_size=offload.BatchSize(initial=8, max=16))


@pytest.mark.parametrize("samples", [pytest.param(33, marks=pytest.mark.soak), 34])
def test_batch_normalisation_trains_on_sizes_that_leave_one_row(tmp_path: Path, samples: int) -> None:
    def train(ctx: Any) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        found = {}
        for epoch in ctx.epochs(2):
            rows = 0
            for batch in ctx.batches("train", drop_last=epoch == 1):
                assert len(batch["x"]) >= 2
                rows += ctx.rows
                ctx.backward(error(model, batch))
                ctx.step()
            found["dropped" if epoch else "whole"] = ctx.sum(rows)
        ctx.report(**found)

    assert fit(train, tmp_path / "run", offload.from_torch(Points(samples))) == {"whole": samples, "dropped": 32}


ACCUMULATES = {"batch_size": offload.BatchSize(initial=8, local=(1, 2))}
ADAPTS = {"batch_size": offload.BatchSize(initial=8, max=64)}


@pytest.mark.parametrize(
    ("loop", "options", "text"),
    [
        pytest.param(
            "one by one",
            ACCUMULATES,
            "the loop steps its optimizers one by one, and a global batch of 8 accumulates 2",
            marks=pytest.mark.soak,
        ),
        ("plain", ADAPTS, "the loop calls optimizer.step() itself, and its batch size adapts"),
        pytest.param("twice", {}, "ctx.backward(loss) was called twice after one forward pass", marks=pytest.mark.soak),
        pytest.param("late skip", {}, "ctx.skip() was called after ctx.backward(loss)", marks=pytest.mark.soak),
        pytest.param(
            "stranger", {}, "ctx.step(optimizer) takes optimizers that ctx.prepare got", marks=pytest.mark.soak
        ),
    ],
)
def test_what_a_loop_may_not_do_is_named(tmp_path: Path, loop: str, options: dict[str, Any], text: str) -> None:
    def train(ctx: Any) -> None:
        model = linear()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                loss = error(model, batch)
                if loop == "plain":
                    loss.backward()
                    optimizer.step()
                    continue
                ctx.backward(loss, retain_graph=loop == "twice")
                if loop == "twice":
                    ctx.backward(loss)
                if loop == "late skip":
                    ctx.skip()
                ctx.step(torch.optim.SGD(linear().parameters(), lr=0.1) if loop == "stranger" else optimizer)

    with pytest.raises(offload.RunError) as caught:
        fit(train, tmp_path / "run", **options)
    assert text in str(caught.value)
