"""Callbacks of a real run: what each method gets, in which order, and what happens if one fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.report.events import Decided, RunStarted, WorkerCountWanted
from offload.report.page.records import read_run
from offload.report.run_dir import EVENTS, METRICS, REPORT, SUMMARY, read_lines
from offload.train.driver import listeners
from offload.train.driver.listeners import Listeners, decision_of
from offload.train.driver.platform import ray_platform
from tests.emulation.numbers import Line
from tests.helpers import eventually

METHODS = ("started", "interval", "metrics", "decision", "checkpoint", "ended")


def train(ctx: offload.Context) -> None:
    model, _ = ctx.prepare(m := torch.nn.Linear(2, 1), torch.optim.SGD(m.parameters(), lr=0.01))
    for _ in ctx.epochs(2):
        for batch in ctx.batches("train"):
            loss = ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss)


class Recorder(offload.Callback):
    """Keeps what it hears, and whether the run directory was complete at the end."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.complete = False

    def started(self, started: Any) -> None:
        self.heard.append(("started", started))

    def interval(self, interval: Any) -> None:
        self.heard.append(("interval", interval))

    def metrics(self, metrics: Any) -> None:
        self.heard.append(("metrics", metrics))

    def decision(self, decision: Any) -> None:
        self.heard.append(("decision", decision))

    def checkpoint(self, checkpoint: Any) -> None:
        self.heard.append(("checkpoint", checkpoint))

    def ended(self, ended: Any) -> None:
        self.heard.append(("ended", ended))
        run_dir = self.of("started")[0].run_dir
        self.complete = all((run_dir / name).exists() for name in (SUMMARY, REPORT))

    def of(self, method: str) -> list[Any]:
        return [document for name, document in self.heard if name == method]


class Failing(offload.Callback):
    """Raises in each method."""

    def started(self, started: Any) -> None:
        raise SystemExit(3)

    def interval(self, interval: Any) -> None:
        raise ValueError("no room\non the other side")

    def ended(self, ended: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_tells_its_callbacks_everything_in_order_and_outlives_their_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    result = offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Line(103))},
        batch_size=16,
        workers=1,
        callbacks=[Failing(), recorder],
    ).fit(run_dir=tmp_path / "run")
    assert result.status == "finished"

    names = [name for name, _ in recorder.heard]
    assert names[0] == "started"
    assert names[-1] == "ended"
    assert {name: names.count(name) for name in ("started", "ended", "metrics")} == {
        "started": 1,
        "ended": 1,
        "metrics": 2,
    }
    events, lines = read_lines(tmp_path / "run" / EVENTS), read_lines(tmp_path / "run" / METRICS)
    started, ended = recorder.of("started")[0], recorder.of("ended")[0]
    assert (started.run_dir, started.resumed, started.workers) == (tmp_path / "run", False, 1)
    assert started.at == events[0]["at"]
    assert [each.document["at"] for each in recorder.of("interval")] == [line["at"] for line in lines]
    assert recorder.of("interval")[-1].step == lines[-1]["step"] > 0
    reports = [event for event in events if event["event"] == "report"]
    assert [dict(each.values) for each in recorder.of("metrics")] == [event["metrics"] for event in reports]
    written = [event["step"] for event in events if event["event"] == "checkpoint"]
    assert [each.step for each in recorder.of("checkpoint")] == written
    assert written
    assert (ended.status, ended.error, ended.summary["samples"]) == ("finished", None, 206)
    assert recorder.complete

    failures = [event for event in events if event["event"] == "callback_failed"]
    assert [(each["callback"], each["method"], each["error"]) for each in failures] == [
        ("Failing", "started", "SystemExit: 3")
    ]
    assert "raise SystemExit(3)" in failures[0]["traceback"]
    said = "callback Failing failed in started (SystemExit: 3): the run goes on"
    assert capsys.readouterr().err.replace("\n", " ").count(said) == 1
    assert not read_run(tmp_path / "run").notes


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("error", "status", "text"),
    [(KeyboardInterrupt(), "interrupted", None), (RuntimeError("no room"), "failed", "RuntimeError: no room")],
)
def test_callbacks_hear_of_the_end_of_a_run_that_ends_before_its_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: str, text: str | None
) -> None:
    def fails(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(ray_platform, "named_hub", fails)
    recorder = Recorder()
    data = {"train": offload.from_torch(Line(103))}
    trainer = offload.Trainer(train, datasets=data, batch_size=16, workers=1, callbacks=[recorder])
    with pytest.raises(type(error)):
        trainer.fit(run_dir=tmp_path / "run", quiet=True)
    assert [name for name, _ in recorder.heard] == ["started", "ended"]
    assert [(each.status, each.error) for each in recorder.of("ended")] == [(status, text)]
    assert recorder.complete


def test_a_callback_that_hangs_delays_no_other_and_is_named(tmp_path: Path) -> None:
    release, recorder = threading.Event(), Recorder()

    class Hanging(offload.Callback):
        def ended(self, ended: Any) -> None:
            release.wait()

    both = Listeners([Hanging(), recorder])
    began = RunStarted(
        at=1.0, workers=1, preprocessing_cores=3, global_batch_size=8, local_batch_size=8, accum_steps=0, nodes=[],
        usd_per_hour={}, datasets={},
    )  # fmt: skip
    try:
        both.started(tmp_path, began)
        both.ended({"status": "failed", "error": "no space"})
        eventually(lambda: bool(recorder.of("ended")))
        both.close(timeout_s=0.2)
        assert [name for name, _ in recorder.heard] == ["started", "ended"]
        assert recorder.of("ended")[0].error == "no space"
        (failure,) = both.failures()
        assert "Hanging" in failure.callback
        assert failure.error.startswith("it was still busy when ")
        assert both.failures() == []
    finally:
        release.set()


def test_each_decision_has_a_reason() -> None:
    resize = Decided(at=1.0, decision="resize", reason="two more feed")
    wanted = WorkerCountWanted(at=1.0, workers=4, before=2)
    assert (decision_of(resize).kind, decision_of(resize).reason) == ("resize", "two more feed")
    assert (decision_of(wanted).kind, decision_of(wanted).reason) == (
        "workers_wanted",
        "the run wants 4 workers and has room for 2: it asks for nodes",
    )


def test_a_callback_does_nothing_by_default() -> None:
    assert all(getattr(offload.Callback(), method)(None) is None for method in METHODS)


def test_callbacks_that_hear_nothing_start_no_thread() -> None:
    before = threading.active_count()
    listeners.Listeners([Recorder()]).close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Recorder(), r"callbacks must be a list of offload\.Callback objects, found <tests.*Pass callbacks=\[\.\.\.\]"),
        ("mlflow", r"callbacks must be a list of offload\.Callback objects, found 'mlflow'"),
        ([Recorder()] * 2 + [print], r"callbacks\[2\] must be an offload\.Callback, found <built-in .*derive its class"),
        ([Recorder], r"callbacks\[0\] must be an offload\.Callback, found <class .*: pass an object of this class"),
    ],
)  # fmt: skip
def test_what_is_no_callback_is_refused(given: Any, said: str) -> None:
    with pytest.raises(offload.ConfigError, match=said):
        offload.Trainer(train, datasets={"train": offload.from_torch(Line(103))}, batch_size=16, callbacks=given)
