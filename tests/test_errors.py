"""Errors name arguments in Python and options on the command line, by one mechanism."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest
import ray
from click.testing import CliRunner

import offload
from offload.cli.main import COMMANDS, main
from offload.cli.parameters import options_of
from offload.errors import ConfigError, RunError, argument, find_offload_error
from offload.train.config import WorkerOverrides
from tests.helpers import ROOT

OTHERS = re.compile(
    r"\b(ray (start|job)|docker run|offload (launch|plan|run|probe)|uv|pip|pip install|ssh)\b[^.;:)]*|ALPHA"
)
"""Commands with options of their own, as far as the options may reach."""


def test_an_argument_reads_as_one_in_python_and_as_an_option_of_a_command_that_has_it() -> None:
    error = ConfigError(
        f"{argument('max_workers')} is 0. Pass {argument('storage_path', 's3://b/r')}, {argument('overwrite', True)} or "
        f"{argument('workers', 4)}."
    )
    options = {"--max-workers", "--storage-path", "--overwrite"}
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert str(each) == "max_workers is 0. Pass storage_path='s3://b/r', overwrite=True or workers=4."
        assert each.naming(options) == "--max-workers is 0. Pass --storage-path s3://b/r, --overwrite or workers=4."
    assert str(RunError(error)) == str(error)


def test_the_same_mistake_is_told_in_both_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^max_workers must be at least 1 \(such as 4\), found 0\.$"):
        WorkerOverrides(max_workers=0)
    script = tmp_path / "train.py"
    script.write_text("import offload\ndef build():\n    return None\n")
    done = CliRunner().invoke(main, ["run", str(script), "--max-workers", "0"])
    assert done.exit_code == 2
    assert "offload: --max-workers must be at least 1 (such as 4), found 0." in done.output
    as_json = CliRunner().invoke(main, ["launch", "ray", str(script), "--max-workers", "0", "--dry-run"])
    assert "offload: --max-workers must be at least 1" in as_json.output


def test_an_error_that_came_through_ray_reads_as_it_was_raised() -> None:
    """Ray's wrappers have the type of the error, too, and tell of Ray's processes and frames."""
    error: BaseException = ConfigError("the file is empty. Give another.")
    for _ in range(2):  # through two tasks
        wrapper = ray.exceptions.RayTaskError(
            "task", "Traceback (most recent call last):", error, "ray::task", 1, "::1"
        )
        error = wrapper.as_instanceof_cause()
    found = find_offload_error(error)
    assert (type(found), str(found)) == (ConfigError, "the file is empty. Give another.")


def test_no_error_of_the_library_spells_an_option_itself() -> None:
    """Whoever calls the library has no command line: arguments are named with `argument`."""
    options = set().union(*(options_of(command) for command in main.commands.values()))
    options |= {option for name in COMMANDS for option in options_of(main.get_command(None, name))}  # type: ignore[arg-type]
    assert len(options) > 50
    package = Path(offload.__file__).parent
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        if where.parts[0] in ("cli", "preload") or where.name == "entry.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                text = "".join(
                    each.value
                    for each in ast.walk(node.exc)
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                )
                named = set(re.findall(r"--[a-z][a-z-]+", OTHERS.sub("", text))) & options
                assert not named, f"{path.relative_to(ROOT)}:{node.lineno}: {text}"
