"""A user's script: what is none is refused with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offload.cli.script import build_trainer
from offload.errors import ConfigError


@pytest.fixture(autouse=True)
def _this_process_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("RAY_ADDRESS", "local")


def refusal(script: Path, *arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build_trainer(script, arguments)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        pytest.param("x = 1", "SCRIPT defines no build()", id="no build"),
        pytest.param("def build():\n    return 5", "build() in SCRIPT returned int; it must return an offload.Trainer", id="no trainer"),
        pytest.param("def build(:\n    pass", "SCRIPT cannot be loaded: SyntaxError", id="syntax"),
        pytest.param(
            "import no_such_package",
            "SCRIPT cannot be loaded: ModuleNotFoundError: No module named 'no_such_package' (line 1)",
            id="import",
        ),
        pytest.param(
            "\ndef build():\n    return 1 / 0",
            "build() in SCRIPT raised ZeroDivisionError: division by zero (line 3)",
            id="build",
        ),
        pytest.param(
            "import offload\ndef build():\n    return offload.Trainer(print, datasets={}, batch_size=1)",
            'datasets must name a "train" data set',
            id="arguments",
        ),
        pytest.param("import sys\nsys.exit('not like this')", "SCRIPT called sys.exit('not like this') (line 2)", id="exit"),
    ],
)  # fmt: skip
def test_scripts_that_are_none(tmp_path: Path, code: str, says: str) -> None:
    script = tmp_path / "broken.py"
    script.write_text(code)
    assert says.replace("SCRIPT", str(script)) in refusal(script)


EXITS = """
import argparse, sys

def build():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, help="how long")
    epochs = parser.parse_args().epochs
    sys.exit({1: None, 2: "no data today"}.get(epochs, epochs))
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--epochs", "3"], "build() in SCRIPT called sys.exit(3) (line 8). Return an offload.Trainer from build()"),
        (["--epochs", "0"], "build() in SCRIPT called sys.exit(0)"),
        (["--epochs", "1"], "build() in SCRIPT called sys.exit() (line 8)"),
        (["--epochs", "2"], "build() in SCRIPT called sys.exit('no data today')"),
        (
            ["--epocs", "3"],
            "build() in SCRIPT rejected its arguments (line 7); its message is above. It received --epocs 3: "
            "put the script's arguments after --",
        ),
    ],
)
def test_a_script_that_exits_while_it_is_built(tmp_path: Path, arguments: list[str], says: str) -> None:
    script = tmp_path / "exits.py"
    script.write_text(EXITS)
    assert says.replace("SCRIPT", str(script)) in refusal(script, *arguments)


def test_a_script_that_is_missing_or_no_python(tmp_path: Path) -> None:
    assert "nowhere.py is not a file" in refusal(tmp_path / "nowhere.py")
    assert "is not a file" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("buy milk")
    assert "is not a Python file" in refusal(tmp_path / "notes.txt")
