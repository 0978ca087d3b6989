"""``offload probe --apply``: what is shown, what is written, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from offload.cli.apply import NOT_MAP_STYLE, NOTHING, Applying
from offload.cli.main import main
from offload.cli.script import build_trainer
from offload.errors import ConfigError
from offload.files import write_text
from offload.measure.findings import profile_document
from offload.model.profile import Profile
from offload.probe.work import RowWork
from offload.train.messages import TRAIN
from tests.measure.test_findings import FOUND

SCRIPT = '''"""Trains on noise."""
import numpy as np
import torch
from torchvision.transforms import v2

import offload
MORE


class Noise(torch.utils.data.Dataset):
    def __init__(self):
        self.transform = TRANSFORM

    def __len__(self):
        return 16

    def __getitem__(self, i):
        image = torch.from_numpy(np.random.randint(0, 256, (3, 64, 64), dtype=np.uint8))
        return self.transform(image), np.int64(i % 10)


def train(ctx):
    pass


def build():
    return offload.Trainer(train, datasets={"train": offload.from_torch(Noise())}, batch_size=4)
'''
BLURS = "v2.Compose([v2.GaussianBlur(23)] * 3)"


@pytest.fixture(autouse=True)
def _as_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]


def write(tmp_path: Path, transform: str = BLURS, more: str = "", name: str = "noise.py") -> Path:
    path = tmp_path / name
    path.write_text(SCRIPT.replace("TRANSFORM", transform).replace("MORE", more))
    return path


def work_of(script: Path) -> RowWork:
    trainer = build_trainer(script, (), address="auto")
    listed = trainer.listed(TRAIN, lambda text: None)
    assert listed.index is not None
    return RowWork(listed.recipe(trainer.seed).ready(), listed.index.table)


def applied(script: Path, *, yes: bool = False) -> tuple[dict[str, Any], str, Applying]:
    applying = Applying(script, yes=yes, seconds=0.1)
    applying.keep(work_of(script))
    facts, text = applying.result(FOUND)
    return facts, text, applying


def test_the_change_is_shown_and_the_script_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path)
    before = script.read_bytes()
    facts, text, applying = applied(script)
    assert facts["taken"] == ["offload.transforms.GaussianBlur"]
    assert facts["files"] == [str(script)]
    assert not facts["written"]
    assert "--- a/noise.py\n+++ b/noise.py\n" in text
    assert "\n+        self.transform = v2.Compose([offload.transforms.GaussianBlur(23)] * 3)\n" in text
    assert "Prediction: an input ceiling of" in text
    applying.offer()
    assert "Nothing was written; --apply --yes writes this change." in capsys.readouterr().err
    assert script.read_bytes() == before
    # Plans take the profile with it.
    Profile.from_document({**profile_document(FOUND), "equivalents": facts})


def test_the_change_is_written_whole_with_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "views.py").write_bytes(
        b"from torchvision import transforms as T\r\n\r\nview = T.Compose([T.GaussianBlur(11)])\r\n"
    )
    (tmp_path / "views.py").chmod(0o750)
    script = write(tmp_path, "v2.Compose([views.view, v2.GaussianBlur(23)])", "import views")
    link = tmp_path / "link.py"
    link.symlink_to(script)
    facts, text, _ = applied(link, yes=True)
    assert facts["written"]
    assert facts["files"] == [str(script), str(tmp_path / "views.py")]
    assert (
        "Wrote noise.py, views.py. Each machine that preprocesses needs OpenCV now: pip install 'offload[opencv]'."
        in text
    )
    assert (tmp_path / "views.py").read_bytes() == (
        b"from torchvision import transforms as T\r\nimport offload\r\n\r\nview = T.Compose([offload.transforms.GaussianBlur(11)])\r\n"
    )
    assert (tmp_path / "views.py").stat().st_mode & 0o777 == 0o750
    assert link.is_symlink()
    assert "offload.transforms.GaussianBlur(23)" in script.read_text()
    # A second time, there is nothing left.
    for name in ("views", "noise", "link"):
        sys.modules.pop(name, None)
    assert applied(script)[1] == NOTHING


def test_the_edited_script_trains_as_the_original_does(tmp_path: Path) -> None:
    script = write(tmp_path, "v2.Compose([v2.ColorJitter(hue=0.3), v2.GaussianBlur(23)])")
    other = write(tmp_path, "v2.Compose([v2.ColorJitter(hue=0.3), v2.GaussianBlur(23)])", name="edited.py")
    assert applied(other, yes=True)[0]["written"]
    sys.modules.pop("edited", None)

    def losses(path: Path) -> torch.Tensor:
        work = work_of(path)
        torch.manual_seed(0)
        model = torch.nn.Linear(3 * 64 * 64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        found = []
        for start in range(0, work.samples, 4):
            batch = work.make(start, 4)
            images = torch.tensor(batch["image"]).float().flatten(1) / 255
            loss = torch.nn.functional.cross_entropy(model(images), torch.tensor(batch["label"]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found)

    assert torch.allclose(losses(script), losses(other), atol=1e-3)


@pytest.mark.parametrize(
    ("transform", "more", "said"),
    [
        ("v2.RandomHorizontalFlip()", "", NOTHING),
        (
            "Blur(23)",
            "Blur = v2.GaussianBlur",
            "noise.py, line 7: GaussianBlur is used as v2.GaussianBlur, which is not a call of an imported name. Write "
            "offload.transforms.GaussianBlur there by hand: it takes the same arguments.",
        ),
        (
            "vars(v2)['Gaussian' + 'Blur'](23)",
            "",
            "No file of this script makes a GaussianBlur that can be replaced. Find the place, and make "
            "offload.transforms.GaussianBlur there: it takes the same arguments.",
        ),
    ],
)
def test_what_cannot_be_edited_is_said_and_left(tmp_path: Path, transform: str, more: str, said: str) -> None:
    script = write(tmp_path, transform, more)
    before = script.read_bytes()
    facts, text, _ = applied(script, yes=True)
    assert said in text.splitlines()
    assert (facts["diff"], facts["files"], facts["written"]) == ("", [], False)
    assert script.read_bytes() == before


def test_a_data_set_without_single_samples_is_named(tmp_path: Path) -> None:
    applying = Applying(write(tmp_path), yes=False)
    applying.keep(None)
    assert applying.result(FOUND)[1] == NOT_MAP_STYLE


def test_a_data_set_that_fails_here_keeps_its_profile(tmp_path: Path) -> None:
    script = write(tmp_path, "(lambda image: 1 / 0)")
    facts, text, _ = applied(script)
    assert text.startswith("--apply could not repeat samples in this process: ")
    assert "division by zero" in text
    assert facts["diff"] == ""


def test_a_script_that_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    script = write(tmp_path)
    applying = Applying(script, yes=True, seconds=0.1)
    applying.keep(work_of(script))
    script.write_text(script.read_text() + "# mine\n")
    with pytest.raises(ConfigError, match=r"noise.py has changed since the probe read it. Nothing was written"):
        applying.result(FOUND)
    assert script.read_text().endswith("# mine\n")
    assert "offload.transforms" not in script.read_text()


def test_a_script_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    script = write(tmp_path)
    script.write_bytes(b"# coding: latin-1\n# \xe9\n" + script.read_bytes())
    assert "noise.py cannot be edited: it is not Python in UTF-8." in applied(script)[1]


def test_a_byte_order_mark_stays(tmp_path: Path) -> None:
    script = write(tmp_path)
    script.write_bytes(b"\xef\xbb\xbf" + script.read_bytes())
    assert applied(script, yes=True)[0]["written"]
    assert script.read_bytes().startswith(b'\xef\xbb\xbf"""Trains')


def test_bad_options_end_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = write(tmp_path, "1 / 0")  # never loaded

    def refused(*options: str) -> str:
        done = CliRunner().invoke(main, ["probe", str(script), *options])
        assert done.exit_code == 2
        assert "Traceback" not in done.output
        return done.output

    assert "--yes writes what --apply shows. Pass --apply, too." in refused("--yes")
    script.chmod(0o444)
    assert "noise.py cannot be written: it is read-only. Make it writable, or leave out --yes." in refused(
        "--apply", "--yes"
    )
    monkeypatch.setitem(sys.modules, "cv2", None)
    assert "cv2 cannot be imported" in (said := refused("--apply"))
    assert "pip install 'offload[opencv]'" in said


ASKS = """
import sys
from pathlib import Path
from offload.cli.apply import Applying, FileChange
path = Path(sys.argv[1]).resolve()
applying = Applying(path, yes=False)
applying._changes.append(FileChange(path=path, before=path.read_bytes(), text="after", diff=""))
applying.offer()
"""


@pytest.mark.parametrize(
    ("answer", "mode", "content"), [("y", 0o644, "after"), ("", 0o644, "before"), (None, 0o444, "before")]
)
def test_on_a_terminal_the_user_decides(tmp_path: Path, answer: str | None, mode: int, content: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("before")
    script.chmod(mode)
    ours, theirs = os.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        if answer is not None:
            terminal.write(f"{answer}\n".encode())
        subprocess.run(
            [sys.executable, "-c", ASKS, script], stdin=theirs, stdout=theirs, stderr=theirs, check=True, timeout=800
        )
        os.close(theirs)
        said = terminal.read(4096).decode()
    assert ("Write this change? [y/N]" in said) == (answer is not None)
    assert ("train.py is read-only, so nothing was written." in said) == (answer is None)
    assert script.read_text() == content


def test_a_file_that_is_written_anew_keeps_its_permissions_and_newlines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(0o640)
    write_text(path, "a\r\nb\n")
    assert path.read_bytes() == b"a\r\nb\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_the_figures_are_those_of_the_probe(tmp_path: Path) -> None:
    facts, text, _ = applied(write(tmp_path))
    found = dataclasses.replace(FOUND, core_seconds=[0.029])
    assert facts["predicted"]["input_samples_per_s"] > found.input_ceiling
    assert "instead of 103" in text
