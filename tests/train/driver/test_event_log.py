"""What a run writes down for its report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from offload.measure.steps import Totals
from offload.model.batch_split import BatchSplit
from offload.model.placement import NodeResources, Placement
from offload.report.events import HUB, ClusterChanged, DataPrinted, RunStarted, SampleSkipped, WorkerPrinted
from offload.report.run_dir import METRICS, PRINTED, REPORT, SKIPPED, RunDirectory, read_lines
from offload.report.terminal.live_line import LiveLine
from offload.train.driver import event_log
from offload.train.driver.event_log import EventLog
from offload.train.messages import News

GPU = NodeResources(name="10.0.0.1", node_id="g", cpus=4.0, gpus=1.0, instance_type="ml.g5.xlarge")
STARTS = RunStarted(
    workers=1,
    preprocessing_cores=3,
    local_batch_size=64,
    accum_steps=0,
    global_batch_size=64,
    nodes=[],
    usd_per_hour={},
    datasets={},
)
CPUS = [NodeResources(name=f"10.0.1.{n}", node_id=f"c{n}", cpus=16.0) for n in range(2)]


def log_in(path: Path) -> EventLog:
    placement = Placement(workers=1, held=(1,), free_cpus=(3.0,))
    split = BatchSplit(workers=1, local_batch_size=64, accum_steps=0)
    return EventLog(RunDirectory(path), LiveLine(quiet=True), placement, split, on_gpus=True)


def news(steps: int, **changes: Any) -> News:
    totals = Totals(
        steps=steps, samples=64 * steps, step_time_s=0.1 * steps, compute_s=0.1 * steps, useful=64.0 * steps
    )
    return News(
        cursor=0,
        totals={0: totals},
        epoch=0,
        step=steps,
        samples=64 * steps,
        metrics={},
        events=(),
        attempts=1,
        **changes,
    )


def test_intervals_tell_what_each_kind_of_node_spent_on_preprocessing(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.know([GPU, *CPUS])
    log.take(news(10, spent={"g": (3, 1.0), "c0": (16, 5.0)}, cores=(19, 0)))
    log.take(news(20, spent={"g": (3, 2.5), "c0": (16, 9.0), "c1": (16, 3.0), "?": (1, 0.5)}, cores=(36, 1)))
    first, second = read_lines(tmp_path / METRICS)
    assert first["preprocessing"]["ml.g5.xlarge"] == {"cores": 3, "busy_s": 1.0}
    assert second["preprocessing"] == {
        "ml.g5.xlarge": {"cores": 3, "busy_s": 1.5},
        "CPU nodes": {"cores": 32, "busy_s": 7.0},
        "other nodes": {"cores": 1, "busy_s": 0.5},
    }
    assert (first["preprocessing_cores"], second["preprocessing_cores"]) == (19, 35)
    assert second["seconds"] > 0


def test_a_node_that_joins_is_known_from_then_on(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.tell(
        ClusterChanged(
            left=[],
            leaving=[],
            joined=["10.0.1.0"],
            joined_nodes=[dataclasses.asdict(CPUS[0])],
            workers=1,
            preprocessing_cores=16,
        )
    )
    log.take(news(10, spent={"c0": (16, 5.0)}))
    assert set(read_lines(tmp_path / METRICS)[0]["preprocessing"]) == {"CPU nodes"}


def test_events_tell_which_nodes_hold_workers(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    for nodes in ((), ("g",), ("g",), (), ("g", "c0")):
        log.take(news(1, worker_nodes=nodes))
    told = [event["nodes"] for event in read_lines(tmp_path / "events.jsonl") if event["event"] == "training_nodes"]
    assert told == [["g"], [], ["c0", "g"]]


def test_a_defect_of_the_page_does_not_cost_the_run_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(directory: RunDirectory) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(event_log, "write_report", broken)
    log = log_in(tmp_path)
    log.take(news(10))
    assert log.finish("finished", None)["status"] == "finished"
    assert (tmp_path / "summary.json").exists()
    assert not (tmp_path / REPORT).exists()


def test_a_sample_that_several_sessions_skip_is_listed_and_counted_once(tmp_path: Path) -> None:
    def session(*samples: int) -> int:
        log = log_in(tmp_path)
        log.start(STARTS)
        skipped = [SampleSkipped(dataset="train", sample_id=n, reason="damaged", epoch=0) for n in samples]
        log.take(dataclasses.replace(news(1), events=tuple(skipped)))
        return int(log.finish("interrupted", None)["skipped"])

    assert session(3, 5, 3) == 2
    assert session(5, 8) == 3
    assert [each["sample_id"] for each in read_lines(tmp_path / SKIPPED)] == [3, 5, 8]


def test_what_data_sets_print_is_shown_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_in(tmp_path)
    log.start(STARTS)
    printed = [
        DataPrinted(at=1.0, by=HUB, stream="stdout", text="hello"),
        DataPrinted(at=2.0, by=HUB, stream="stderr", text="a warning"),
        WorkerPrinted(at=3.0, by=1, stream="stdout", text="the function\nprints"),
    ]
    log.take(dataclasses.replace(news(1), events=tuple(printed)))
    out, err = capsys.readouterr()
    assert out == "hello\n[rank 1] the function\n[rank 1] prints\n"
    assert "a warning" in err.splitlines()
    assert [(each["stream"], each["text"]) for each in read_lines(tmp_path / PRINTED)] == [
        ("stdout", "hello"),
        ("stderr", "a warning"),
    ]
