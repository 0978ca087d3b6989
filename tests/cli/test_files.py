"""Files named on a command line that are none, or have no end: told at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from offload import files
from offload.cli.main import main
from offload.errors import ConfigError


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--gpu-type", "ml.g5.xlarge", "--profile"],
        ["plan", "--emit", "kuberay", "--image", "x", "--plan"],
        ["plan", "--emit", "hosts", "--plan", "nowhere.json", "--hosts"],
        ["plan", "--plan", "nowhere.json", "--emit", "kuberay", "--image", "x", "--catalog"],
        ["run"],
        ["probe"],
        ["launch", "ray", "--dry-run"],
        ["launch", "sagemaker", "train.py", "--region", "us-east-1", "--plan"],
        ["launch", "sagemaker", "train.py", "--catalog"],
    ],
    ids=" ".join,
)
def test_a_named_pipe_is_refused_at_once(arguments: list[str], pipe: Path) -> None:
    done = CliRunner().invoke(main, [*arguments, str(pipe)])
    assert done.exit_code == 2, done.output
    assert (
        f"{pipe} cannot be read: it is a named pipe" in done.output
        or f"{pipe} is not a file" in done.output
        or (f"there is no script {pipe}" in done.output)
    )


TOO_LONG = "x" * 300  # for a name: nobody may look whether there is such a file


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["probe"],
        ["probe", "--apply"],
        ["launch", "ray", "--dry-run"],
        [
            *("launch", "sagemaker", "--dry-run", "--region", "us-east-1", "--gpu", "ml.g5.xlarge:1", "--bucket", "my-bucket"),
            *("--role", "arn:aws:iam::123456789012:role/training", "--image-uri", "pytorch-training:2.8-gpu-py312"),
        ],
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)  # fmt: skip
def test_a_script_at_which_nobody_may_look_is_told_with_the_reason(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, [*arguments, f"{TOO_LONG}.py"])
    assert done.exit_code == 2, done.output
    assert f"the script {TOO_LONG}.py cannot be read: File name too long" in done.output


PROFILE = """{"schema": "offload.profile/1", "input": {"core_seconds_per_sample": 0.03, "wire_bytes_per_sample": 150528},
    "step": {"device": "NVIDIA A10G", "alpha_compute": 0.01, "beta_compute": 0.0016}, "batch_size": 64}"""


def test_a_plan_is_not_written_where_nobody_may_look(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(PROFILE)
    made = ["plan", "--profile", str(tmp_path / "profile.json"), "--gpu-type", "ml.g5.xlarge", "-o", TOO_LONG]
    done = CliRunner().invoke(main, made)
    assert (done.exit_code, "cannot be written: File name too long" in done.output) == (2, True), done.output


def test_a_plan_is_not_written_to_a_named_pipe(pipe: Path, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(PROFILE)
    made = ["plan", "--profile", str(tmp_path / "profile.json"), "--gpu-type", "ml.g5.xlarge", "-o", str(pipe)]
    done = CliRunner().invoke(main, made)
    assert (done.exit_code, "it is a named pipe" in done.output) == (2, True), done.output


def test_only_ordinary_files_are_replaced(tmp_path: Path, pipe: Path) -> None:
    """Not a device: root would turn /dev/null into a file."""
    (tmp_path / "null").symlink_to("/dev/null")
    files.write_text(tmp_path / "null", "x")
    assert (tmp_path / "null").is_char_device()
    with pytest.raises(ConfigError, match="it is a named pipe"):
        files.write_text(pipe, "x")
    assert pipe.is_fifo()
    with pytest.raises(ConfigError, match="it is a folder"):
        files.write_text(tmp_path, "x")


def test_a_link_stays_one_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "profile.json", tmp_path / "latest.json"
    link.symlink_to(target)
    for text in ("new", "newer"):
        files.write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert os.listdir(target.parent) == ["profile.json"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/dev/zero", "it is a device"),
        ("/tmp", "it is a folder"),
        ("/nowhere/at/all", "No such file or directory"),
        ("a\0b", "null byte"),
    ],
)
def test_what_is_no_file(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"the profile .* cannot be read: .*{says}"):
        files.read_text(Path(path), "the profile")


def test_a_file_that_is_too_large_or_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        files.read_text(tmp_path / "bytes", "the plan")
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    (tmp_path / "large").write_bytes(b"1" * (1 << 20) + b"1")
    with pytest.raises(ConfigError, match="it is larger than 1 MiB"):
        files.read_text(tmp_path / "large", "the plan")


@pytest.mark.parametrize("text", ["{", "[" * 200_000, "1" * 6000, ""], ids=["cut", "deep", "digits", "empty"])
def test_what_is_no_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"the plan .*x.json is not JSON: .*Make it anew\."):
        files.read_json(tmp_path / "x.json", "the plan", "Make it anew.")
