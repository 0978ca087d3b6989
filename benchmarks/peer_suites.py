"""Runs the tests of other libraries with offload in the place of what they test: nothing but the expected tests fails.

    python benchmarks/peer_suites.py --torchdata CHECKOUT --torch CHECKOUT --webdataset CHECKOUT [-o benchmarks/results/peer_suites.json]
    python benchmarks/peer_suites.py --download

Each suite comes from a checkout, a source archive, or single files. `--download` lets pip fetch the source archives of the installed
libraries whose archives hold tests (webdataset's does), and the packages that the tests import.

* torchdata: `test_state_dict.py`, with `offload.DataLoader` as StatefulDataLoader.
* torch: `test_dataloader.py` of torch, or torchdata's version of it, with `offload.DataLoader` as DataLoader.
* webdataset: `test_compat.py`, `test_pipeline.py`, `test_loaders.py` and `test_handlers.py`. offload reads the shards and loads the
  batches. The shards are made here, since the archive has none.

`suites/expected.toml` says which tests fail, and why. The command exits with 1 if another one fails, or if one of them passes.
[The table](../docs/dataloader-tests.md) says what that means for a program.
"""

import hashlib
import importlib.metadata
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side
from benchmarks.suites import finding, shards
from benchmarks.suites.finding import NotFound
from benchmarks.suites.rewriting import rewritten
from benchmarks.suites.running import Settings, SuiteFailed, run
from benchmarks.suites.verdicts import CALLED, Outcome, Verdict, counts, expectations, verdicts
from offload.process.interrupts import handled

EXPECTED = Path(__file__).parent / "suites" / "expected.toml"
_LOADER = "offload.DataLoader"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tests of a library.

    Args:
        files: the names of its test modules.
        stand_ins, texts: see :func:`benchmarks.suites.rewriting.rewritten`.
        imports: packages that its tests import, beside offload's own.
        shipped: whether its tests are in the source archive that pip finds.
        shards: whether its tests read tar shards.
    """

    name: str
    files: tuple[str, ...]
    stand_ins: Mapping[str, str]
    texts: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    shipped: bool = False
    shards: bool = False


SUITES = (
    Suite(
        name="torchdata",
        files=("test_state_dict.py",),
        stand_ins={
            "torchdata.stateful_dataloader.Stateful": "benchmarks.suites.stateful.Stateful",
            "torchdata.stateful_dataloader.StatefulDataLoader": "benchmarks.suites.stateful.StatefulDataLoader",
        },
        imports=("expecttest", "parameterized"),
        shipped=True,
    ),
    Suite(
        name="torch",
        files=("test_dataloader.py",),
        stand_ins={
            "torch.utils.data.DataLoader": _LOADER,
            "torchdata.stateful_dataloader.StatefulDataLoader": "benchmarks.suites.stateful.StatefulDataLoader",
        },
        imports=("expecttest",),
    ),
    Suite(
        name="webdataset",
        files=("test_compat.py", "test_pipeline.py", "test_loaders.py", "test_handlers.py"),
        stand_ins={"torch.utils.data.DataLoader": _LOADER},
        texts={"imagenet-000000.tgz": "imagenet-000000.tar"},
        imports=("webdataset",),
        shipped=True,
        shards=True,
    ),
)


def prepare(suite: Suite, modules: Sequence[Path], folder: Path) -> list[str]:
    """Write the rewritten test modules, and what they read, into a folder. Return their paths there."""
    if suite.shards:
        shards.write(folder)
        (folder / "tests").mkdir()
        (folder / "tests" / "__init__.py").touch()
        (folder / "tests" / "conftest.py").write_text(shards.CONFTEST)
    written = []
    for module in modules:
        path = folder / ("tests" if suite.shards else "") / module.name
        path.write_text(rewritten(module.read_text(encoding="utf-8"), suite.stand_ins, suite.texts), encoding="utf-8")
        written.append(str(path.relative_to(folder)))
    return written


def _table(found: Mapping[str, Sequence[Verdict]]) -> Table:
    table = Table("tests", *found)
    for called in CALLED:
        table.add_row(called, *(str(counts(each)[called]) for each in found.values()))
    table.add_row("all", *(str(len(each)) for each in found.values()))
    return table


def _known(output: Path | None) -> dict[str, Any]:
    """Return the suites that an earlier run has written to this file. Raises click.UsageError for another file."""
    if output is None or not output.exists():
        return {}
    try:
        known: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))["suites"]
    except (OSError, ValueError, KeyError, TypeError):
        raise click.UsageError(f"{output} is no result of this benchmark. Pass the path of another file.") from None
    return known


def _record(output: Path, suites: Mapping[str, Any]) -> None:
    output.write_text(json.dumps({"benchmark": "peer_suites", "suites": suites}, indent=1) + "\n", encoding="utf-8")


def _entry(found: Sequence[Verdict], modules: Sequence[Path], command: Sequence[str]) -> dict[str, Any]:
    return {
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in modules},
        "tests": len(found),
        "counts": {called: number for called in CALLED if (number := counts(found)[called])},
        "not_same": {
            verdict.outcome.test: {"called": verdict.called, "outcome": verdict.outcome.outcome, "why": verdict.why}
            for verdict in found
            if verdict.called != "same"
        },
        "command": shlex.join(command),
        "machine": side_by_side.hardware(),
        "versions": side_by_side.versions() | _webdataset(),
    }


def _webdataset() -> dict[str, str]:
    try:
        return {"webdataset": importlib.metadata.version("webdataset")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def _given(paths: Mapping[str, Path | None], downloads: bool, folder: Path, console: Console) -> dict[str, list[Path]]:
    """Return the test modules of each suite that is at hand. Raises NotFound."""
    found: dict[str, list[Path]] = {}
    for suite in SUITES:
        given = paths[suite.name]
        if given is None and downloads and suite.shipped:
            try:
                given = finding.download(suite.name, folder / "archives")
            except NotFound as reason:
                console.print(f"{suite.name} is left out: {reason}", highlight=False, soft_wrap=True)
        if given is not None:
            found[suite.name] = finding.modules(given, suite.files, folder / suite.name)
    return found


def _packages(chosen: Sequence[Suite], downloads: bool, folder: Path) -> Path | None:
    """Return a folder with the packages that the tests import and this Python lacks. Raises NotFound."""
    lacking = finding.missing(sorted({package for suite in chosen for package in suite.imports}))
    if not lacking:
        return None
    if not downloads:
        raise NotFound(
            f"The tests import {' and '.join(lacking)}. Pass --download, or: pip install {' '.join(lacking)}"
        )
    finding.add_packages(lacking, folder / "packages")
    return folder / "packages"


@click.command(help=__doc__)
@click.option("--torchdata", type=click.Path(path_type=Path), help="torchdata's tests: a folder, an archive or a file.")
@click.option("--torch", type=click.Path(path_type=Path), help="torch's tests of its DataLoader.")
@click.option("--webdataset", type=click.Path(path_type=Path), help="webdataset's tests.")
@click.option(
    "--download", is_flag=True, help="Let pip fetch archives of installed libraries, and what the tests import."
)
@click.option("--only", multiple=True, help="A pattern of tests, such as 'TestJson*'. All by default.")
@click.option("--cores", type=click.IntRange(min=1), default=4, show_default=True, help="The CPUs of the Ray cluster.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Seconds a test."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write each suite's result there as JSON. Suites that do not run keep theirs.",
)
def main(
    torchdata: Path | None, torch: Path | None, webdataset: Path | None, download: bool, only: tuple[str, ...], cores: int,
    timeout_s: float, output: Path | None,
) -> None:  # fmt: skip
    console = Console()
    paths = {"torchdata": torchdata, "torch": torch, "webdataset": webdataset}
    if not download and not any(paths.values()):
        raise click.UsageError(
            "No tests are given. Pass --torchdata, --torch or --webdataset with a checkout, or --download."
        )
    expected = expectations(EXPECTED.read_text(encoding="utf-8"))
    recorded = _known(output)
    found: dict[str, list[Verdict]] = {}
    with handled(), tempfile.TemporaryDirectory(prefix="suites-", dir="/tmp") as name:
        folder = Path(name)
        try:
            modules = _given(paths, download, folder, console)
            if not modules:
                raise NotFound("pip found no tests. Pass --torchdata, --torch or --webdataset with a checkout.")
            chosen = [suite for suite in SUITES if suite.name in modules]
            settings = Settings(
                cores=cores,
                test_timeout_s=timeout_s,
                only=only,
                packages=_packages(chosen, download, folder),
                tell=_tell,
            )
        except NotFound as reason:
            raise click.UsageError(str(reason)) from None
        for suite in chosen:
            at = folder / f"{suite.name}-suite"
            at.mkdir()
            try:
                outcomes = run(at, prepare(suite, modules[suite.name], at), settings)
            except SuiteFailed as failed:
                raise click.ClickException(
                    f"{suite.name}: no test ran. The end of what pytest said:\n{failed}"
                ) from None
            found[suite.name] = verdicts(outcomes, expected.get(suite.name, []))
            if output is not None:
                recorded[suite.name] = _entry(found[suite.name], modules[suite.name], _command(sys.argv[1:]))
                _record(output, recorded)
    console.print(_table(found))
    unexpected = [verdict for each in found.values() for verdict in each if verdict.called == "unexpected"]
    for verdict in unexpected:
        console.print(
            f"{verdict.outcome.test}: {verdict.outcome.outcome}: {verdict.why}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    sys.exit(1 if unexpected else 0)


def _tell(outcome: Outcome) -> None:
    print(json.dumps({name: value for name, value in asdict(outcome).items() if value}), flush=True)


def _command(arguments: Sequence[str]) -> list[str]:
    """The command without the folders of this machine."""
    return [
        "python",
        "benchmarks/peer_suites.py",
        *(Path(argument).name if os.path.isabs(argument) else argument for argument in arguments),
    ]


if __name__ == "__main__":
    main()
