"""What travels to a SageMaker job: all that it needs, and nothing that is nobody's business."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import offload
from offload.errors import ConfigError
from offload.launch.requirements import requirements
from offload.launch.sagemaker import bundle
from offload.launch.sagemaker.bundle import PLAN, TOKEN, pack
from offload.launch.sagemaker.settings import TO_INSTALL, Settings
from offload.launch.uploaded_files import left_behind

ENTRY = "offload_entry.py"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    (folder / "helpers").mkdir(parents=True)
    (folder / "helpers" / "checkpointing.py").write_text("x = 1\n")
    (folder / "train.py").write_text("import helpers.checkpointing\n")
    return folder / "train.py"


def opened(archive: bytes) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(archive))


def test_it_runs_where_nothing_else_is_installed_of_it(script: Path, tmp_path: Path) -> None:
    """The version that packed is the version that runs, whatever the image holds."""
    out = tmp_path / "out"
    opened(pack(script, ENTRY, "token")).extractall(out, filter="data")
    code = (
        "import offload, offload.launch.sagemaker.job, offload.train.checkpoints.format, train; "
        "print(offload.__file__, offload.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=out, capture_output=True, text=True, timeout=800, check=True
    )
    assert done.stdout.split() == [str(out / "offload" / "__init__.py"), offload.__version__]
    assert (out / ENTRY).exists()
    assert (out / TOKEN).read_text() == "token"
    assert (out / TOKEN).stat().st_mode & 0o077 == 0


def test_where_nothing_can_be_installed_the_failure_file_says_so(script: Path, tmp_path: Path) -> None:
    """The entry begins with the standard library alone."""
    out, config = tmp_path / "out", tmp_path / "input" / "config"
    config.mkdir(parents=True)
    resources = {
        "current_host": "localhost",
        "instance_groups": [{"instance_group_name": "gpu", "instance_type": "ml.g5.xlarge", "hosts": ["localhost"]}],
    }
    settings = Settings(script="train.py").hyperparameter()
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    (config / "hyperparameters.json").write_text(json.dumps({name: json.dumps(v) for name, v in settings.items()}))
    script.with_name("requirements.txt").write_text("no-such-package==1\n")
    opened(pack(script, ENTRY, "token")).extractall(out, filter="data")
    done = subprocess.run(
        [sys.executable, "-S", ENTRY],  # without site-packages
        cwd=out, capture_output=True, text=True, timeout=800, env={"SAGEMAKER_BASE_DIR": str(tmp_path), "PIP_NO_INDEX": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    text = (tmp_path / "output" / "failure").read_text()
    assert re.match(r"pip could not install the requirements: Could not find .* requirement no-such-package==1", text)
    assert "Traceback" not in done.stderr


def test_the_same_files_make_the_same_bytes(script: Path) -> None:
    assert pack(script, ENTRY, "token") == pack(script, ENTRY, "token")


def test_a_script_may_zip_what_travelled_with_it(script: Path, tmp_path: Path) -> None:
    opened(pack(script, ENTRY, "token")).extractall(tmp_path / "there", filter="data")
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:  # which knows no time before 1980
        archive.write(tmp_path / "there" / "train.py", "train.py")
        assert archive.namelist() == ["train.py"]


def test_hidden_files_runs_and_links_out_of_the_folder_stay_at_home(script: Path, tmp_path: Path) -> None:
    folder = script.parent
    for name in (".env", ".aws/config", "setup.py", "runs/a/model.pt", "helpers/__pycache__/x.pyc", "venv/bin/python"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("SECRET")
    (tmp_path / "elsewhere").write_text("SECRET")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    archive = opened(pack(script, ENTRY, "token"))
    mine = {n for n in archive.getnames() if n.split("/")[0] != "offload"}
    assert mine == {"train.py", "helpers/checkpointing.py", ENTRY, TOKEN, TO_INSTALL}


def test_a_link_behind_which_nobody_may_look_stays_at_home_and_is_named(script: Path) -> None:
    (script.parent / "weights.pt").symlink_to("x" * 300)  # too long for a name
    assert "weights.pt" not in opened(pack(script, ENTRY, "token")).getnames()
    assert left_behind(script.parent) == ["links out of the folder, or to folders, are not uploaded: 'weights.pt'"]


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights, which only root can")
def test_a_folder_that_cannot_be_read_stays_at_home_and_is_named(script: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:3]):  # with tests side by side one folder deeper
        folder.chmod(folder.stat().st_mode | 0o055)
    (script.parent / "wandb").mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        notes = left_behind(script.parent)
    finally:
        os.seteuid(0)
    assert notes == ["folders that cannot be read are not uploaded: 'wandb'"]


@pytest.mark.parametrize("name", ["server.pem", "id_rsa", "Credentials.json", "helpers/secrets.yaml"])
def test_a_file_that_looks_like_a_key_is_refused(script: Path, name: str) -> None:
    (script.parent / name).write_text("x")
    with pytest.raises(ConfigError, match=re.escape(name)):
        pack(script, ENTRY, "token")


def test_too_many_bytes_are_refused_with_the_largest_files(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "LARGEST_BYTES", 3 << 20)
    (script.parent / "data.bin").write_bytes(bytes(4 << 20))
    with pytest.raises(ConfigError, match=r"MiB to upload .* at most 3 MiB .* channels, .* Largest: data.bin"):
        pack(script, ENTRY, "token")


def test_what_cannot_be_packed_is_named(script: Path) -> None:
    script.with_name("requirements.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ConfigError, match=r"requirements\.txt is not UTF-8 text"):
        pack(script, ENTRY, "token")
    script.with_name("requirements.txt").unlink()
    (script.parent / "offload").mkdir()
    (script.parent / "offload" / "mine.py").write_text("")
    with pytest.raises(ConfigError, match="holds a package 'offload', which is the name of offload's own: rename it"):
        pack(script, ENTRY, "token")


def test_the_plan_travels_too(script: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    assert PLAN in opened(pack(script, ENTRY, "token", plan)).getnames()


def test_a_script_that_is_not_there_or_a_name_that_is_taken(script: Path) -> None:
    with pytest.raises(ConfigError, match="there is no script"):
        pack(script.with_name("other.py"), ENTRY, "token")
    script.with_name(ENTRY).write_text("")
    with pytest.raises(ConfigError, match=f"holds {ENTRY}, which the launcher makes itself"):
        pack(script, ENTRY, "token")


@pytest.mark.parametrize("name", [".train.py", "setup.py"])
def test_a_script_that_would_stay_at_home_is_refused(script: Path, name: str) -> None:
    script.rename(script.with_name(name))
    with pytest.raises(ConfigError, match=f"{re.escape(name)} would not be uploaded: .* Rename or move it"):
        pack(script.with_name(name), ENTRY, "token")


def test_requirements_leave_the_images_torch_alone_and_the_users_follow(script: Path) -> None:
    script.with_name("requirements.txt").write_text("einops==0.8.0\nnumpy==1.26.4\n")
    member = opened(pack(script, ENTRY, "token")).extractfile(TO_INSTALL)
    assert member is not None
    lines = member.read().decode().split()
    assert lines[-2:] == ["einops==0.8.0", "numpy==1.26.4"]
    assert lines[:-2] == requirements()
    assert not {"torch", "torchvision"} & {re.split(r"[\[=>]", line)[0] for line in lines}
