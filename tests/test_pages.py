"""Pages that quote the code say what the code says: the bottleneck page, the FAQ, the tutorial, the pictures, the docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest

import offload
from offload import collate, notebook, runs, transforms, tune
from offload.cli import apply
from offload.loader.stats import LoaderStats
from offload.measure import replacement
from offload.measure.equivalents import Constant
from offload.measure.findings import Findings, verdict
from offload.model.planning.advice import _BINDS
from offload.report.terminal import live_line, plan_table, probe_text, summary
from offload.train.driver.fleet.state import Phase, Starting
from tests.helpers import ROOT
from tests.measure.test_findings import FOUND
from tests.measure.test_replacement import MEASURED
from tests.programs.messages import messages, template
from tests.programs.tutorial_page import written

BOTTLENECK = (ROOT / "docs" / "bottleneck.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """A section of the bottleneck page."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", BOTTLENECK, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def quotes(text: str) -> list[str]:
    """What the first column of a section's tables quotes."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]


def shows(quote: str, text: str) -> bool:
    """Whether a text is this quote with values for each ``…``."""
    return re.fullmatch(re.escape(quote).replace("…", ".+?"), text, re.DOTALL) is not None


def test_the_tutorial_is_current() -> None:
    assert (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8") == written(), "make map writes it anew"


# --- Find your bottleneck ----------------------------------------------------------------------------------------------


def probed() -> Iterator[Findings]:
    """Findings that lead to every sentence of a verdict."""
    for w, ingest, device, exact in itertools.product(
        (0.0001, 0.5), (None, 10.0), ("cpu", "NVIDIA A10G"), (None, 0.8, 1.5)
    ):
        yield dataclasses.replace(
            FOUND, core_seconds=[w, w], ingest_samples_per_s=ingest, device=device, exact_over_auto=exact, blocks=12,
            local_batch_size=256,
        )  # fmt: skip
    yield dataclasses.replace(FOUND, workers=2)
    for until in (None, "RandomCrop"):
        yield dataclasses.replace(FOUND, constant=Constant(until=until, share=0.8, bytes_out=150_528))
    yield dataclasses.replace(FOUND, gradients=[(6.0, 0.0), (8.0, -4.0), (7.0, 4.0), (7.0, 2.0)])


def check_quotes(quoted: list[str], said: set[str]) -> None:
    """Every sentence is explained, and every explained sentence is said."""
    assert [text for text in sorted(said) if not any(shows(quote, text) for quote in quoted)] == []
    assert [quote for quote in quoted if not any(shows(quote, text) for text in said)] == []


def test_every_sentence_of_a_probe_is_explained() -> None:
    said = {sentence for found in probed() for sentence in verdict(found)}
    page = section("What the probe says")
    sentences, columns = page.split("\n| column |")
    check_quotes(quotes(sentences), said | {"Measured in 58 s."})
    document = {
        "workload": "train.py",
        "input": {
            "core_seconds_per_sample": 0.03,
            "wire_bytes_per_sample": 2.0,
            "stages": [{"name": "decode", "core_seconds_per_sample": 0.03, "bytes_out": 1.0}],
        },
        "verdict": [],
        "measured": {"seconds": 58.0},
    }
    printed = probe_text.format_probe(document)
    assert "Measured in 58 s." in printed
    head = re.split(r"\s{2,}| (?=share|kB)", printed.splitlines()[1].strip())
    assert quotes(columns) == [*head, printed.splitlines()[3].split()[0]]


def test_every_sentence_of_apply_is_explained() -> None:
    sentences, fields = section("Take a faster equivalent").split("\n| field |")
    outcomes = [
        MEASURED,
        *(dataclasses.replace(MEASURED, **change) for change in ({"distances": None}, {"distances": []})),
    ]
    outcomes += [dataclasses.replace(MEASURED, over=0.9, unlike=MEASURED.chosen)]
    said = {sentence for outcome in outcomes for sentence in replacement.sentences(FOUND, outcome)}
    quoted = quotes(sentences)
    of_apply = [quote for quote in quoted if any(shows(quote, text) for text in said)]
    check_quotes(of_apply, said)
    texts = [template(node) for node in ast.walk(ast.parse(inspect.getsource(apply))) if isinstance(node, ast.expr)]
    texts = [text for text in texts if text.strip("… ")]
    assert [quote for quote in quoted if quote not in of_apply and not any(shows(text, quote) for text in texts)] == []
    document = replacement.document(FOUND, MEASURED)
    assert {name.partition(".")[0] for name in quotes(fields)} >= set(document)


SUMMARY: dict[str, Any] = {
    "status": "finished", "samples": 640, "steps": 10, "epochs": 1, "wall_s": 60.0, "samples_per_s": 100.0, "goodput": 50.0, "workers": 2,
    "local_batch_size": 16, "accum_steps": 1, "global_batch_size": 64, "device": "GPU", "stall": 0.3, "step_count_all_ranks": 20,
    "data_wait_s": 1.0, "peer_wait_s": 1.0, "compute_s": 1.0, "sync_s": 1.0, "preprocessing_cores": 4, "first_batch_s": 9.0, "skipped": 1,
    "input": {
        "train": {
            "core_seconds_per_sample": 0.03, "wire_bytes_per_sample": 2.0, "input_ceiling_samples_per_s": 100.0, "blocked": 0.1,
            "cache_bytes": 3e9, "storage_bytes": 1e9,
        }
    },
    "metrics": {}, "checkpoint": "runs/a/checkpoints/1", "run_dir": "runs/a",
}  # fmt: skip


def test_every_line_of_the_summary_is_explained() -> None:
    lines, parts, verdicts = re.split(r"\n\| part \||\n\| the summary says \|", section("The summary"))
    printed = dict(summary.summary_rows(SUMMARY))
    quoted = quotes(lines)
    assert len(quoted) == len(printed)
    assert all(shows(quote, line) for quote, line in zip(quoted, printed, strict=True))
    assert quotes(parts) == re.findall(
        r"([a-z ]+?) [\d.]+ ms", printed["a step"].replace("  ", " ").replace("ms ", "ms")
    )
    blocked = {**SUMMARY, "input": {"train": {**SUMMARY["input"]["train"], "blocked": 0.9}}}
    said = {summary.verdict(each) for each in (SUMMARY, {**SUMMARY, "stall": 0.0}, {**SUMMARY, "steps": 0}, blocked)}
    check_quotes(quotes(verdicts), said)


@pytest.mark.parametrize("device", ["GPU", "worker"])
def test_every_part_of_the_live_line_is_explained(device: str) -> None:
    values = {
        "metrics": {"loss": 2.31}, "epoch": 2, "step": 1200, "samples_per_s": 2710.0, "input_ceiling_samples_per_s": 2950.0,
        "device_ceiling_samples_per_s": 2800.0, "device": device, "workers": 4, "local_batch_size": 64, "accum_steps": 0, "stall": 0.03,
        "goodput": 2240.0,
    }  # fmt: skip
    line = live_line.format_line(values)
    assert line.replace("worker 2", "GPU 2") in section("The live line")
    parts = re.split(r" \| |  | \(|, |\)", line)
    quoted = quotes(section("The live line"))
    assert [part for part in parts if part and not any(shows(quote, part) for quote in quoted)] == []
    assert {quote for quote in quoted if not any(shows(quote, part) for part in parts)} <= {"GPU …", "worker …"}


def test_every_number_of_a_loader_is_explained() -> None:
    fields, verdicts = section("The loader").split("\n| the loader says |")
    assert quotes(fields) == [field.name for field in dataclasses.fields(LoaderStats)]
    stats = LoaderStats(
        batches=9, samples_per_s=100.0, stall=0.5, cores=4, input_ceiling_samples_per_s=100.0, core_seconds_per_sample=0.1,
        bytes_per_sample=1.0,
    )  # fmt: skip
    changes: list[dict[str, Any]] = [
        {}, {"batches": 0}, {"stall": 0.01}, {"core_seconds_per_sample": 0.0}, {"core_seconds_per_sample": 0.001},
    ]  # fmt: skip
    check_quotes(quotes(verdicts), {dataclasses.replace(stats, **change).verdict for change in changes})


def test_every_column_of_a_plan_is_explained() -> None:
    columns, binds = section("A plan").split("\n\n| `binds` |")
    assert quotes(columns) == ["nodes", *(name.replace("\n", " ") for name in plan_table._COLUMNS)]
    assert all(mark in columns for mark in plan_table.MARKS.values())
    assert quotes(binds) == list(_BINDS)


# --- The FAQ -----------------------------------------------------------------------------------------------------------


def test_the_faq_quotes_messages_of_the_code() -> None:
    there = list(messages().values())
    quoted = quotes((ROOT / "docs" / "faq.md").read_text(encoding="utf-8"))
    assert len(quoted) > 40
    assert [quote for quote in quoted if not any(text.startswith(quote) for text in there)] == []


# --- Pictures ----------------------------------------------------------------------------------------------------------


def test_the_picture_and_the_table_have_all_phases() -> None:
    phases = [phase.__name__ for phase in (Starting, *get_args(Phase))]
    picture = (ROOT / "docs" / "images" / "phases.svg").read_text(encoding="utf-8")
    concepts = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert [name for name in phases if f">{name}<" not in picture] == []
    assert [name for name in phases if f"\n| {name} |" not in concepts] == []


# --- Docstrings --------------------------------------------------------------------------------------------------------

NO_MEMBERS = ("__version__", "arbiter", "collate", "notebook", "runs", "transforms", "tune")
PUBLIC = {name: getattr(offload, name) for name in offload.__all__ if name not in NO_MEMBERS}
PUBLIC |= {f"collate.{name}": getattr(collate, name) for name in collate.__all__}
PUBLIC |= {f"transforms.{name}": getattr(transforms, name) for name in transforms.__all__}
PUBLIC |= {f"tune.{name}": getattr(tune, name) for name in tune.__all__}
PUBLIC |= {f"notebook.{name}": getattr(notebook, name) for name in notebook.__all__ if not name.endswith("Result")}
PUBLIC |= {f"runs.{name}": getattr(runs, name) for name in runs.__all__ if name != "RunState"}
PUBLIC |= {
    f"{owner.__name__}.{name}": member
    for owner in (offload.Context, offload.Trainer)
    for name, member in vars(owner).items()
    if inspect.isfunction(member) and not name.startswith("_")
}
GIVEN = (
    "Callback",
    "Context",
    "LoaderStats",
    "Pipeline",
    "Prediction",
    "Result",
    "ConfigError",
    "OffloadError",
    "RunError",
    "Trainer.listed",
)
"""What users get and never make, and what takes no arguments."""


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in GIVEN])
def test_a_docstring_explains_every_parameter(name: str) -> None:
    """In words of its own, or by reference to torch or a sibling."""
    said = inspect.getdoc(PUBLIC[name]) or ""
    parameters = [each for each in inspect.signature(PUBLIC[name]).parameters if each != "self"]
    if name == "DataLoader":  # all others are torch's
        parameters = ["dataset", "address", "seed", "on_device", "placement"]
    assert [each for each in parameters if not re.search(rf"\b{each}\b", said)] == []


@pytest.mark.parametrize(
    "name", [name for name, member in PUBLIC.items() if inspect.isclass(member) and name not in GIVEN]
)
def test_a_constructor_says_what_it_raises(name: str) -> None:
    assert "Raises" in (inspect.getdoc(PUBLIC[name]) or "")
