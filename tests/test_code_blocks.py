"""Every code block of the README and the docs is run or checked. `WAYS` says how, by the kind of block:

* Python: the pages in `RUN` run, in one namespace for each page. mypy checks all others in one go; `WORDS` declares what a block
  takes from the reader's own program. The examples run those of the tutorial.
* Diffs: both sides are Python; of the pages in `SIDES`, each line stands in a script that other tests run.
* Commands: those of offload are parsed by the command line itself, without running. Of others, files, extras and targets exist.
* JSON, TOML and YAML: loaded, where offload reads such a file by what reads it.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import runpy
import shlex
import subprocess
import symtable
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from offload.cli.main import main
from offload.model.catalog import Catalog
from offload.model.profile import Profile
from tests.helpers import ROOT, end_loaders
from tests.programs.markdown import Block, all_blocks

BLOCKS = all_blocks()
WAYS = {
    "python": "run, or checked by mypy",
    "diff": "both sides parsed, or found in scripts that tests run",
    "console": "parsed by the command line",
    "json": "loaded",
    "toml": "loaded as a catalog",
    "yaml": "loaded",
    "dockerfile": "instructions known",
    "math": "converted when the site is built",
    "{eval-rst}": "read when the site is built",
    "text": "output",
    "": "a drawing",
}
RUN = ("docs/concepts.md", "docs/quickstart.md")
EXAMPLES_RUN = ("docs/tutorial.md",)
SIDES: dict[str, tuple[str | None, str | None]] = {
    "docs/tutorial.md": (None, None),
    "docs/migrate/ray.md": ("examples/migrate/ray_before.py", "examples/migrate/ray_after.py"),
    "docs/migrate/adaptdl.md": (None, "examples/migrate/adaptdl.py"),
    "docs/migrate/horovod.md": (None, "examples/migrate/horovod_elastic.py"),
    "docs/migrate/tf_data_service.md": (None, "examples/migrate/tf_data_service.py"),
}
"""The scripts that hold the lines before and after; None: that side is only parsed. The tutorial is made from its scripts."""

WORDS = {
    "offload": "import offload",
    "torch": "import torch",
    "h5py": "import h5py",
    "ray": "import ray.data",
    "DataLoader": "from torch.utils.data import DataLoader",
    "DistributedSampler": "from torch.utils.data import DistributedSampler",
    "collate": "from offload import collate",
    "ctx": "ctx: offload.Context",
    "loader": "loader: offload.DataLoader[Any]",
    "train": "def train(ctx: offload.Context) -> None: ...",
    "model": "model: torch.nn.Module",
    "build_model": "def build_model() -> torch.nn.Module: ...  # type: ignore[empty-body]",
    "predictor": "def predictor() -> offload.Predictor: ...  # type: ignore[empty-body]",
    "validation_data": "validation_data: offload.Pipeline",
    "transform": "transform: Any",
    "MyData": "MyData: Any",
    **{name: f"{name}: int" for name in ("RATE", "epochs")},
    **{name: f"{name}: Any" for name in ("augment", "clips", "coco", "dataset", "day", "features", "night", "path")},
    **{name: f"{name}: Any" for name in ("rows", "texts", "weights", "Resize", "RandomCrop")},
}
"""What blocks take from the reader's own program or from an earlier block."""

MYPY = (
    "# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-any-generics, allow-subclassing-any\n"
    '# mypy: no-warn-unreachable, disable-error-code="import-untyped,var-annotated"\n'
    "import offload, torch, torch.nn\n"
    "from typing import Any\n"
)
FOREIGN = ("aws", "curl", "export", "for", "helm", "kubectl", "ray", "serve", "(umask", ".venv/bin/pre-commit")
"""Commands of other programs, which this test cannot check."""


def of_kind(kind: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind == kind]


def test_every_kind_of_block_has_a_way() -> None:
    assert {block.kind for block in BLOCKS} == set(WAYS)


# --- Python ------------------------------------------------------------------------------------------------------------


def unknown_names(code: str) -> set[str]:
    """The names that a module uses and neither defines nor finds among the builtins."""
    top = symtable.symtable(code, "block", "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used: set[str] = set()
    todo = [top]
    while todo:
        table = todo.pop()
        todo += table.get_children()
        at_top = table is top
        used |= {
            each.get_name() for each in table.get_symbols() if each.is_referenced() and (at_top or each.is_global())
        }
    return used - defined - set(vars(builtins))


@pytest.mark.slow
def test_python_is_typed(tmp_path: Path) -> None:
    blocks = [block for block in of_kind("python") if block.page not in (*RUN, *EXAMPLES_RUN)]
    for at, block in enumerate(blocks):
        names = unknown_names(block.text)
        assert sorted(names - set(WORDS)) == [], f"{block}: declare these names in WORDS"
        head = MYPY + "".join(f"{WORDS[name]}\n" for name in sorted(names))
        (tmp_path / f"block_{at}.py").write_text(f"{head}# {block}\n{block.text}", encoding="utf-8")
    # With the project's own settings, so that the cache of `make check` serves.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *map(str, sorted(tmp_path.glob("*.py")))],
        cwd=ROOT, env={**os.environ, "MYPYPATH": str(tmp_path)}, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + "\n".join(f"block_{at}: {block}" for at, block in enumerate(blocks))


def run_page(page: str, folder: Path) -> dict[str, Any]:
    """Run the Python of a page, as one script after another."""
    names: dict[str, Any] = {}
    for block in of_kind("python"):
        if block.page == page:
            script = folder / f"line_{block.line}.py"
            script.write_text(block.text, encoding="utf-8")
            names |= runpy.run_path(str(script), init_globals=names)
    return names


def test_the_concepts_hold(tmp_path: Path) -> None:
    run_page("docs/concepts.md", tmp_path)


@pytest.mark.slow
@pytest.mark.ray
def test_the_quickstart_trains(tmp_path: Path, jpeg_folder: Path, ray_cluster: None) -> None:
    names = run_page("docs/quickstart.md", tmp_path)
    end_loaders()
    summary = names["build"](str(jpeg_folder)).fit(run_dir=tmp_path / "run", quiet=True).document
    assert (summary["status"], summary["epochs"], summary["samples"]) == ("finished", 3, 3 * 103)


# --- Diffs -------------------------------------------------------------------------------------------------------------


def sides(text: str) -> tuple[list[str], list[str]]:
    """The lines before and after a change; ``...`` stands for lines that are left out."""
    lines = [line or " " for line in text.splitlines()]
    assert all(line[0] in " +-" for line in lines), text
    return [line[1:] for line in lines if line[0] != "+"], [line[1:] for line in lines if line[0] != "-"]


def pieces(lines: list[str]) -> Iterator[list[str]]:
    """The parts between lines that are left out."""
    piece: list[str] = []
    for line in [*lines, "..."]:
        if line.strip() == "...":
            yield piece
            piece = []
        else:
            piece.append(line)


def parse(lines: list[str]) -> None:
    """Parse a piece of Python that may begin in the middle of a function."""
    depth = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    first = next((line for line in lines if line.strip()), "")
    begun = "if True:\n" if len(first) - len(first.lstrip()) > depth else ""  # its beginning is left out
    code = "\n".join(line[depth:] for line in lines).rstrip()
    ast.parse(begun + code + (" ..." if code.endswith(":") else ""))  # or its end


@pytest.mark.parametrize("block", of_kind("diff"), ids=str)
def test_both_sides_of_a_diff_are_python(block: Block) -> None:
    for lines, script in zip(sides(block.text), SIDES.get(block.page, (None, None)), strict=True):
        if script is not None:
            there = iter((ROOT / script).read_text(encoding="utf-8").splitlines())
            missing = [line for line in lines if line.strip() not in ("", "...") and line not in there]
            assert missing == [], f"{block}: not in {script}, in this order"
        elif block.page not in EXAMPLES_RUN:  # their pieces end where a diff ends
            for piece in pieces(lines):
                parse(piece)


# --- Commands ----------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """The commands of a block, as words without redirections: lines after ``$``, or all where there is none."""
    lines = text.replace("\\\n", " ").splitlines()
    told = [line[2:] for line in lines if line.startswith("$ ")] or lines
    split = [shlex.split(line, comments=True) for line in told]
    return [words[: words.index(">")] if ">" in words else words for words in split]


def parse_options(words: list[str]) -> None:
    """Parse an offload command without running it. Raises click.UsageError for what the command line would refuse."""
    command: click.Command = main
    context: click.Context | None = None
    while isinstance(command, click.Group):
        if command.invoke_without_command and (not words or words[0].startswith("-")):
            break
        context = click.Context(command, parent=context, info_name=command.name)
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
    command.make_context(command.name, list(words), parent=context)


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])


def check_command(words: list[str]) -> None:
    """Assert what can be known of a command without running it."""
    match words:
        case ["offload", *rest]:
            parse_options(rest)
        case ["pip", "install", *packages]:
            named = [re.fullmatch(r"(?:\.|offload)\[(.*)\]", package) for package in packages]
            assert {extra for found in named if found for extra in found[1].split(",")} <= extras()
        case [variable, *rest] if variable.startswith("RAY_ADDRESS="):
            check_command(rest)
        case ["python", "train.py"]:  # the reader's own script
            pass
        case ["python", script, *_]:
            assert (ROOT / script).exists()
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert all("=" in target or re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
        case [program, *_]:
            assert program in FOREIGN


@pytest.mark.parametrize("block", of_kind("console"), ids=str)
def test_commands_have_the_options_that_they_are_given(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OFFLOAD_ROLE", "OFFLOAD_BUCKET", "OFFLOAD_RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for words in commands(block.text):
        try:
            check_command(words)
        except click.ClickException as error:
            pytest.fail(f"{block}: {shlex.join(words)}: {error.format_message()}")


def test_commands_within_sentences_have_these_options() -> None:
    pages = {block.page for block in BLOCKS}
    texts = {
        page: re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL) for page in pages
    }
    quoted = [
        (page, name, words.split(" -- ")[0])
        for page, text in texts.items()
        for name, words in re.findall(
            r"`offload (run|demo|doctor|probe|plan|launch ray|launch sagemaker)\b([^`]*)`", text
        )
    ]
    assert len(quoted) > 20
    for page, name, words in quoted:
        options = {option for parameter in command_of(name.split()).params for option in parameter.opts}
        assert set(re.findall(r"--[a-z][a-z-]*", words)) <= options, f"{page}: offload {name}{words}"


def command_of(path: list[str]) -> click.Command:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    return command


# --- Files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", of_kind("json"), ids=str)
def test_json_is_what_its_reader_takes(block: Block) -> None:
    document = json.loads(block.text)
    if "schema" in document:
        Profile.from_document(document)
    else:
        assert set(document) == {"Version", "Statement"}  # a policy of AWS


@pytest.mark.parametrize("block", of_kind("toml"), ids=str)
def test_toml_is_a_catalog(block: Block) -> None:
    assert Catalog.from_toml(block.text)


@pytest.mark.parametrize("block", of_kind("yaml"), ids=str)
def test_yaml_loads(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


@pytest.mark.parametrize("block", of_kind("dockerfile"), ids=str)
def test_docker_knows_the_instructions(block: Block) -> None:
    assert {line.split()[0] for line in block.text.splitlines()} <= {"COPY", "ENV", "FROM", "RUN", "WORKDIR"}
