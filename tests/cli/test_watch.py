"""``offload watch`` from the command line, on run directories as they grow."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from offload.cli.main import main
from offload.cli.watch import watch
from offload.model.catalog import Catalog
from offload.prices import load_catalog
from offload.report.events import NodeNames, RunEvent
from offload.report.page.records import read_run
from offload.report.page.story import Story
from offload.report.terminal.watched import Watched, screen, watched
from tests.report.runs import Writer, eventful, plain

COMMAND = [sys.executable, "-m", "offload", "watch"]


def state_of(path: Path, now: float) -> Watched:
    catalog: Catalog = load_catalog(None)
    return watched(Story(read_run(path), catalog, {}), now)


def test_a_run_that_trains_shows_rates_ceilings_nodes_checkpoint_and_cost(tmp_path: Path) -> None:
    run = Writer(tmp_path / "vit")
    run.begin()
    run.train(20)
    state = state_of(run.path, run.at + 1)
    facts = dict(state.facts)
    assert (state.status, state.warning) == ("unfinished", "")
    assert {"throughput", "input ceiling", "GPU ceiling", "stall", "workers", "cost"} <= facts.keys()
    assert facts["last checkpoint"] == "none yet"
    assert dict(state.nodes)["10.0.0.1"] == "ml.g5.xlarge: trains, preprocesses"
    assert dict(state.nodes)["10.0.1.1"] == "ml.c5.4xlarge: preprocesses"
    assert "may have crashed" in state_of(run.path, run.at + 600).warning


def test_a_view_puts_into_words_what_it_shows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that reports at each step has hundreds of thousands of events, and a view looks every two seconds."""
    run = Writer(tmp_path / "vit")
    run.begin()
    for number in range(500):
        run.event("report", epoch=0, step=number, metrics={"loss": 1.0})
    for step in range(20):
        run.event("checkpoint", reason="interval", epoch=0, step=step, seconds=1.0, waited=True)
        run.event("worker_lost", reason=f"signal {step}")
    told: list[str] = []
    real = RunEvent.words

    def counted(event: RunEvent, nodes: NodeNames) -> str:
        told.append(event.kind)
        return real(event, nodes)

    monkeypatch.setattr(RunEvent, "words", counted)
    state = state_of(run.path, run.at)
    assert "Step 19: a checkpoint (interval) took 1.0 s" in dict(state.facts)["last checkpoint"]
    assert [line.split("(")[1].split(")")[0] for line in state.errors] == [f"signal {step}" for step in range(14, 20)]
    assert (told.count("checkpoint"), told.count("worker_lost"), told.count("report")) == (1, 6, 0)


def test_a_run_of_an_earlier_version_shows_what_follows_from_the_rest(tmp_path: Path) -> None:
    run = Writer(tmp_path / "vit")
    run.begin()
    run.train(3, global_batch_size=None, preprocessing_cores=None, epoch=None)
    facts = dict(state_of(run.path, run.at).facts)
    assert (facts["workers"], facts["preprocessing"], facts["epoch"]) == ("1, global batch 64", "19 cores", "–")


def test_the_screen_fits_a_small_terminal(tmp_path: Path) -> None:
    path = eventful(tmp_path / "run")
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(screen(state_of(path, 2e9)))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 60
    assert all(word in text for word in ("throughput", "input ceiling", "decisions", "errors", "nodes"))


def test_a_run_that_has_ended_ends_the_view(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["watch", str(plain(tmp_path / "run"))], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("run: finished | trained step ")


def test_one_document_of_the_present_state(tmp_path: Path) -> None:
    run = Writer(tmp_path / "vit")
    run.begin()
    done = subprocess.run([*COMMAND, run.path, "--json"], capture_output=True, text=True, timeout=800)
    document = json.loads(done.stdout)
    assert (done.returncode, document["schema"], document["status"]) == (0, "offload.watch/1", "unfinished")


OVER = """
from contextlib import contextmanager
from offload.cli import watch
from offload.report.run_tail import RunOverError
@contextmanager
def reader(*arguments):
    raise RunOverError("the run 'vit' has ended")
    yield
watch._reader = reader
watch.watch(["--address", "auto", "--json"])
"""


def test_a_run_on_a_cluster_that_has_just_ended_is_a_document_too() -> None:
    done = subprocess.run([sys.executable, "-c", OVER], capture_output=True, text=True, timeout=800)
    assert (done.returncode, done.stderr) == (0, "offload: the run 'vit' has ended\n")
    assert json.loads(done.stdout) == {"schema": "offload.error/1", "error": "the run 'vit' has ended", "exit_code": 0}


def test_ctrl_c_ends_the_view_alone(tmp_path: Path) -> None:
    run = Writer(tmp_path / "vit")
    run.begin()
    process = subprocess.Popen([*COMMAND, run.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("vit: unfinished")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=800)
    assert (process.returncode, said) == (130, "offload: the view has ended; the run goes on.\n")


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_no_run_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(main, ["watch", str(tmp_path / name)])
    assert done.exit_code == 2
    assert "Name the folder of a run" in done.stderr
    assert watch.name == "watch"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name either the folder of a run, such as runs/demo, or --address HOST:PORT of the Ray cluster"),
        (["runs/a", "--address", "auto"], "name either the folder of a run"),
        (["runs/a", "--run", "vit"], "--run vit chooses among the runs of a cluster: pass its address, too."),
        (["--address", "local"], "no run trains on the Ray cluster at 'local'. For a run that has ended"),
    ],
)
def test_a_view_of_nothing_is_refused_in_a_sentence(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["watch", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith("offload: ")
    assert says in done.stderr


def test_a_cluster_that_is_not_there_is_named_with_its_remedy() -> None:
    """In a process of its own, which is not connected to a Ray."""
    done = subprocess.run([*COMMAND, "--address", "127.0.0.1:1"], capture_output=True, text=True, timeout=800)
    assert done.returncode == 2
    assert done.stderr.startswith("offload: no Ray cluster can be reached at '127.0.0.1:1': Connection refused.")


def test_a_run_that_shows_nothing_and_everything_is_refused_before_its_script_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(9)\n")
    done = CliRunner().invoke(main, ["run", str(tmp_path / "train.py"), "--watch", "--quiet"])
    assert done.exit_code == 2
    assert "--watch shows a full-screen view, and --quiet shows nothing: drop one of them." in done.stderr
