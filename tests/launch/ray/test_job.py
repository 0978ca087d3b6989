"""`offload launch ray` without a cluster: what would be submitted, what is refused, and what is told of addresses that lead to
something else."""

from __future__ import annotations

import ast
import contextlib
import getpass
import io
import json
import os
import platform
import random
import re
import shlex
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from ray.exceptions import RuntimeEnvSetupError

from offload.cli.main import main
from offload.errors import ConfigError
from offload.launch.archives import zipped
from offload.launch.arguments import check_script, holds_a_login, names_a_secret
from offload.launch.ray import bundle, entry, job_api, running_job
from offload.launch.ray.address import dashboard_url
from offload.launch.ray.bundle import pack, read_requirements
from offload.launch.ray.job import RayJob
from offload.launch.uploaded_files import check_size
from tests.helpers import ROOT

NO_CLUSTER: dict[str, str | None] = {
    "OFFLOAD_RAY_ADDRESS": None,
    "RAY_API_SERVER_ADDRESS": None,
    "RAY_ADDRESS": None,
    "RAY_AUTH_MODE": "disabled",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    (folder / "helpers").mkdir(parents=True)
    (folder / "helpers" / "checkpointing.py").write_text("x = 1\n")
    path = folder / "train_it.py"
    path.write_text("import offload\n\ndef build():\n    raise RuntimeError('only where it trains')\n")
    return path


def run(*args: str | Path, env: dict[str, str | None] | None = None) -> Result:
    return CliRunner().invoke(main, ["launch", "ray", *map(str, args)], env={**NO_CLUSTER, **(env or {})})


@contextlib.contextmanager
def patched(environment: dict[str, str | None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        yield


def refused(*args: str | Path, env: dict[str, str | None] | None = None) -> str:
    done = run(*args, env=env)
    assert done.exit_code == 2, done.output
    return done.output.strip().removeprefix("offload: ")


# --- what is submitted ------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_what_would_be_submitted_without_a_cluster(script: Path, tmp_path: Path) -> None:
    (tmp_path / "needed.txt").write_text("# for the transform\neinops==0.8.0\n\nalbumentations  # newest\n")
    done = run(
        script, "--name", "mine", "--max-workers", "4", "--cpus-per-worker", "2", "--gpus-per-worker", "0.5", "--requirements",
        tmp_path / "needed.txt", "--env", "A=b=c", "--run-dir", "/data/runs/mine", "--storage-path", "s3://b/mine", "--overwrite",
        "--dry-run", "--", "--epochs", "3", "two words",
        env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789" * 4},
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    request = json.loads(done.output[done.output.index("\n{") :])
    assert re.fullmatch(r"mine-\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d-\d{3}", request["submission_id"])
    assert shlex.split(request["entrypoint"]) == [
        "exec", "python3", "-m", "offload.launch.ray.entry", platform.python_version(), "run", "train_it.py", "--address", "auto",
        "--run-dir", "/data/runs/mine", "--storage-path", "s3://b/mine", "--max-workers", "4", "--cpus-per-worker", "2",
        "--gpus-per-worker", "0.5", "--overwrite", "--", "--epochs", "3", "two words",
    ]  # fmt: skip
    assert request["runtime_env"] == {
        "working_dir": "working_dir.zip",
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300", "A": "b=c"},
        "pip": ["einops==0.8.0", "albumentations"],
    }
    assert request["metadata"] == {"offload_name": "mine", "offload_run_dir": "/data/runs/mine"}
    assert "0123456789" not in done.output


@pytest.mark.parametrize("address", ["", "http://[::1", "http://h:99999", "ray://x:10001"])
def test_a_dry_run_checks_the_address_too(script: Path, address: str) -> None:
    assert refused(script, "--dry-run", "--address", address).startswith("--address ")


def test_a_dry_run_says_first_what_one_wants_to_know(script: Path) -> None:
    done = run(script, "--dry-run")
    assert done.exit_code == 0, done.output
    assert re.search(r"command +exec python3 -m offload.launch.ray.entry \S+ run train_it.py ", done.output)
    assert re.search(r"upload +\d+\.\d MiB: the working directory and offload", done.output)
    assert f"--run-dir '~/offload-runs/{getpass.getuser()}/train_it'" in done.output


def test_two_who_share_a_cluster_do_not_share_a_run(script: Path) -> None:
    def directory(user: str) -> str:
        done = run(script, "--dry-run", env={"LOGNAME": user})
        return str(json.loads(done.output[done.output.index("\n{") :])["metadata"]["offload_run_dir"])

    assert directory("ann") == "~/offload-runs/ann/train_it"
    assert directory("bob@corp") == "~/offload-runs/bob-corp/train_it"
    assert directory("..") == "~/offload-runs/user/train_it"


def test_it_runs_where_nothing_else_of_it_is_installed(script: Path, tmp_path: Path) -> None:
    """The version that packed is the version that runs."""
    out = tmp_path / "out"
    zipfile.ZipFile(io.BytesIO(pack(script).archive)).extractall(out)
    code = "import offload, offload.launch.ray.entry, helpers.checkpointing, ray; print(offload.__file__); print(ray.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=out, capture_output=True, text=True, timeout=800, check=True
    )
    ours, rays = done.stdout.split()
    assert ours == str(out / "offload" / "__init__.py")
    assert str(out) not in rays


def test_the_same_files_make_the_same_bytes(script: Path) -> None:
    assert pack(script).archive == pack(script).archive


def test_the_working_directory_may_lie_above_the_script(script: Path, tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text("")
    packed = pack(script, tmp_path)
    assert packed.script == "mine/train_it.py"
    assert "shared.py" in zipfile.ZipFile(io.BytesIO(packed.archive)).namelist()


def test_hidden_files_runs_environments_and_links_out_of_the_folder_stay_at_home(script: Path, tmp_path: Path) -> None:
    folder = script.parent
    for name in (
        ".env",
        "runs/a/model.pt",
        "checkpoints/x",
        "helpers/__pycache__/x.pyc",
        "my-env/pyvenv.cfg",
        "my-env/x",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("SECRET")
    (tmp_path / "elsewhere").write_text("SECRET")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    names = zipfile.ZipFile(io.BytesIO(pack(script).archive)).namelist()
    assert {n for n in names if n.split("/")[0] != "offload"} == {
        "train_it.py",
        "helpers/checkpointing.py",
    }


def test_links_that_stay_here_are_named(script: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").write_text("")
    (script.parent / "to-data").symlink_to(tmp_path / "data")
    (script.parent / "to-file").symlink_to(tmp_path / "elsewhere")
    (script.parent / "within").symlink_to(script)
    done = run(script, "--dry-run")
    assert done.exit_code == 0
    assert "links out of the folder, or to folders, are not uploaded: 'to-data', 'to-file'\n" in done.stderr


# --- what is refused before any call ----------------------------------------------------------------------------------


def test_files_that_must_not_or_cannot_travel(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "READ_BYTES", 3 << 20)
    (script.parent / "data.bin").write_bytes(bytes(4 << 20))
    assert re.search(
        r"MiB to upload .* and at most 3 MiB are allowed: .* Largest: data.bin \(4.0 MiB\), ", refused(script)
    )
    (script.parent / "data.bin").unlink()
    (script.parent / "id_rsa").write_text("x")
    assert "id_rsa looks like a key or a password" in refused(script)
    (tmp_path / "other").mkdir()
    assert "would not be uploaded: pass a folder with both as --working-dir" in refused(
        script, "--working-dir", tmp_path / "other"
    )
    assert "is not a folder" in refused(script, "--working-dir", tmp_path / "nowhere")
    (script.parent / "runs").mkdir()
    hidden = script.rename(script.parent / "runs" / "train_it.py")
    (hidden.parents[1] / "id_rsa").unlink()
    assert "train_it.py would not be uploaded" in refused(hidden, "--working-dir", hidden.parents[1])


@pytest.mark.parametrize("name", ["auth_token", "my_auth_token.txt", "service-account-7.json", "kubeconfig.yaml"])
def test_files_that_let_somebody_in(script: Path, name: str) -> None:
    (script.parent / name).write_text("x")
    assert f"{name} looks like a key or a password" in refused(script)


def test_the_clusters_token_does_not_travel_whatever_it_is_called(script: Path) -> None:
    token = script.parent / "cluster"
    token.write_text("0123456789")
    assert "cluster looks like a key or a password" in refused(script, env={"RAY_AUTH_TOKEN_PATH": str(token)})


def test_a_name_that_no_archive_can_hold(script: Path) -> None:
    Path(os.fsdecode(os.fsencode(script.parent) + b"/caf\xe9.txt")).write_text("")
    assert r"the name of 'caf\udce9.txt' in " in refused(script)


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone cannot be read, and would be uploaded with the script: No such file"):
        check_size(tmp_path, {"gone": tmp_path / "gone"}, 1, "")


def test_an_archive_that_the_dashboard_would_refuse_is_not_sent(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script.parent / "noise.bin").write_bytes(random.Random(0).randbytes(2 << 20))
    (script.parent / "zeros.bin").write_bytes(bytes(4 << 20))
    monkeypatch.setattr(bundle, "PACKED_BYTES", 2 << 20)
    text = refused(script)
    assert re.search(r"makes an archive of \d\.\d MiB, and Ray's dashboard takes less than 2 MiB: ", text)
    assert re.search(r"Largest, packed: noise.bin \(2.0 MiB\), \S+ \(0.\d MiB\), ", text)


def test_the_limit_is_that_of_rays_dashboard() -> None:
    from ray._private import ray_constants

    assert bundle.PACKED_BYTES == ray_constants.DASHBOARD_CLIENT_MAX_SIZE


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--run-dir", "runs/a"], "--run-dir runs/a is relative, and Ray removes a job's working directory"),
        (["--name", "my run"], "--name must consist of letters, digits, - _ and dots, 100 at most, found 'my run'"),
        (["--env", "AWS_SECRET_ACCESS_KEY=x"], "AWS_SECRET_ACCESS_KEY looks like a secret"),
        (["--env", "A"], "--env must be NAME=VALUE, found 'A'"),
        (["--env", "RAY_JOB_STOP_WAIT_TIME_S=long"], "must be a whole number of seconds, found 'long'"),
        (["--requirements", "/nowhere"], "--requirements /nowhere cannot be read: No such file or directory"),
        (["--max-workers", "0"], "--max-workers must be at least 1 (such as 4), found 0"),
        (["--cpus-per-worker", "-1"], "--cpus-per-worker must be at least 0 (such as 2), found -1"),
        (
            ["--gpus-per-worker", "1.5"],
            "--gpus-per-worker must be a whole number, or a share of one GPU such as 0.5, found 1.5",
        ),
        (["--", "--api-key", "x"], "api-key looks like a secret"),
        (["--", "-token", "abc"], "token looks like a secret"),
        (["--", "--token", "-abc"], "token looks like a secret"),
        (["--", "--api-key", "AbC123=="], "api-key looks like a secret"),
        (["--", "model.token=abc"], "model.token looks like a secret"),
        (["--", "+model.token=abc"], "model.token looks like a secret"),
        (["--env", "MIRROR=https://me:hunter2@host/"], "--env MIRROR has an address with a password or a token in it"),
        (["--storage-path", "s3://k:hunter2@host/b"], "--storage-path has an address with a password or a token in it"),
        (["--", "3", "--db=postgres://me:hunter2@db/x"], "argument 2 of the script has an address with a password"),
        (["--storage-path", "relative/dir"], "--storage-path relative/dir is relative"),
        (["--env", "WANDB_KEY=0123456789abcdef0123456789abcdef"], "WANDB_KEY looks like a secret"),
        (["--env", "TEAM_TOKEN=hf_AbCdEf"], "TEAM_TOKEN looks like a secret"),
        ([], "--address is missing: pass the address of the cluster's dashboard, such as http://head:8265"),
    ],
)
def test_options_that_cannot_be(script: Path, options: list[str], says: str) -> None:
    text = refused(script, *options)
    assert says in text
    assert "hunter2" not in text


def test_keys_and_tokens_of_data_are_no_secrets(script: Path) -> None:
    done = run(
        script, "--dry-run", "--env", "S3_KEY=data/train.tar", "--env", "USE_AUTH_TOKEN=true", "--",
        "data.prompt_key=question", "--ignore-token", "-100", "--gt-key=gt", "--eod_token", "<eod>".strip("<>"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("after", [[], ["--lr", "0.1"], ["-n", "3"]])
def test_a_flag_has_no_value_that_could_be_a_secret(script: Path, after: list[str]) -> None:
    done = run(script, "--dry-run", "--env", "HF_TOKEN=", "--", "--use_auth_token", *after)
    assert done.exit_code == 0, done.output


def test_a_token_in_a_requirement_is_not_shown(script: Path, tmp_path: Path) -> None:
    needed = tmp_path / "needed.txt"
    needed.write_text("einops\nmine @ git+https://hunter2@github.com/me/mine\n")
    text = refused(script, "--requirements", needed)
    assert "--requirements, package 2, has an address with a password or a token in it" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    "name",
    [
        "token", "hf_token", "HF_TOKEN", "model.token", "authToken", "use_auth_token", "AWS_SESSION_TOKEN", "token_id", "PGPASSWORD",
        "MYSQL_PWD", "pwd", "SMTP_PASS", "db-passwd", "GITHUB_PAT", "WANDB_KEY", "apikey", "apiKey", "OPENAI_API_KEY", "API_KEY_2",
        "AZURE_STORAGE_CONNECTION_STRING", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "client-secret", "account_key",
    ],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert names_a_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer", "num-tokens", "max_tokens", "tokens-per-batch", "pad-token-id", "eos_token", "cls_token", "image_token_index",
        "decoder_start_token_id", "mask-token", "key-frames", "keyboard", "KEYBOARD", "key", "image-key", "label_key", "sort.key",
        "kms-key", "KMS_KEY_ID", "monkey", "forward-pass", "low_pass", "pass", "bypass", "compass", "PWD", "OLDPWD", "pattern", "patience",
        "path", "string", "author", "secretary", "lr", "",
    ],
)  # fmt: skip
def test_names_that_only_look_like_those_of_secrets(name: str) -> None:
    assert not names_a_secret(name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("https://me:pw@host/simple", True),
        ("--index-url https://token@host/simple", True),
        ("git+https://token:x-oauth-basic@github.com/a/b", True),
        ("git+https://token:@github.com/a/b", True),
        ("redis://:pw@host", True),
        ("ssh://me:pw@host", True),
        ("https://${USER_NAME}:${PASSWORD}@host/simple", False),
        ("https://${TOKEN}@host/simple", False),
        ("git+https://git@github.com/a/b", False),
        ("git+ssh://git@github.com/a/b", False),
        ("ssh://me@host", False),
        ("abfs://container@account.dfs.core.windows.net/runs", False),
        ("s3://bucket/a@b", False),
        ("https://host:8080/a@b", False),
        ("https://host/path?mail=a@b.c", False),
        ("me@example.com", False),
    ],
)
def test_addresses_that_carry_a_login(text: str, found: bool) -> None:
    assert holds_a_login(text) == found


def test_what_a_script_is_told_is_no_secret(script: Path) -> None:
    done = run(
        script, "--dry-run", "--", "--tokenizer", "bert", "--pad-token-id=0", "-n", "-5", "image.key=jpg", "a=b=token"
    )
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "source", [b"\xef\xbb\xbfdef build(): ...\n", b"# coding: latin-1\nname = '\xe9'\ndef build(): ...\n"]
)
def test_a_script_may_be_in_any_encoding_that_python_reads(script: Path, source: bytes) -> None:
    script.write_bytes(source)
    check_script(script)


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nif sys.argv[1:]:\n    def build(): ...\nelse:\n    def build(): ...\n",
        "try:\n    from mine import build\nexcept ImportError:\n    from yours import make as build\n",
        "try:\n    from mine import *\nfinally:\n    pass\n",
        "from typing import Any\nbuild: Any = print\n",
        "build, other = print, 1\n",
    ],
    ids=["if", "try", "star", "annotated", "unpacked"],
)
def test_build_may_be_defined_in_any_way(script: Path, source: str) -> None:
    script.write_text(source)
    check_script(script)


@pytest.mark.parametrize(
    "source", ["import build\n", "print(build)\n", "def f():\n    build = 1\n", "class A:\n    def build(self): ...\n"]
)
def test_a_name_elsewhere_is_no_build(script: Path, source: str) -> None:
    script.write_text(source)
    with pytest.raises(ConfigError, match="defines no build"):
        check_script(script)


def test_scripts_that_are_none(script: Path) -> None:
    assert "SCRIPT is missing" in refused()
    assert "there is no script" in refused(script.with_name("other.py"))
    for name in ("train", "train.PY", "train.py.txt"):
        other = script.with_name(name)
        other.write_text(script.read_text())
        assert f"{other} is not Python: the name of a script ends in .py" in refused(other)
    script.write_text("x = 1\n")
    assert "defines no build()" in refused(script)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--status", "a", "--stop", "a"], "--stop has no effect beside --status"),
        (["x.py", "--status", "a"], "SCRIPT has no effect beside --status"),
        (["--stop", "a", "x.py"], "SCRIPT has no effect beside --stop"),
        (["--status", "a", "--dry-run"], "--dry-run has no effect beside --status"),
        (["--stop", "a", "--name", "b"], "--name has no effect beside --stop"),
        (["--status", "a", "--no-wait"], "--no-wait has no effect beside --status"),
        (["--status", ""], "--status must be the id of a job, as the launch printed it, found ''"),
        (["--stop", ""], "--stop must be the id of a job, as the launch printed it, found ''"),
    ],
)
def test_a_job_is_launched_or_looked_at_or_stopped(options: list[str], says: str) -> None:
    assert says in refused(*options, "--address", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    "line",
    [
        "-r more.txt", "-rmore.txt", "--requirement=more.txt", "-c c.txt", "--constraint=c.txt", "-e .", "-e git+file:///x", "-f wheels",
        "--find-links /wheels", "./wheels/x.whl", "/wheels/x.whl", "wheels/x.whl", "x-1-py3-none-any.whl", "x.whl ; python_version > '3'",
        "file:///x.whl", "x @ file:///x.whl", "..",
    ],
)  # fmt: skip
def test_requirements_that_lead_to_files_here(tmp_path: Path, line: str) -> None:
    (tmp_path / "needed.txt").write_text(f"click\n{line}\n")
    with pytest.raises(ConfigError, match=re.escape(f"has the line {line!r}")):
        read_requirements(tmp_path / "needed.txt")


@pytest.mark.parametrize(
    "line",
    [
        "einops==0.8.0", "ray[data]>=2.60", "-f https://example.com/wheels", "--find-links=https://example.com/wheels",
        "-e git+https://github.com/a/b#egg=b", "x @ https://example.com/x.whl", "git+https://github.com/a/b", "--extra-index-url https://x/y",
        "-r https://example.com/more.txt", "--no-binary :all:", "x; sys_platform == 'linux'", "filelock==3.0",
    ],
)  # fmt: skip
def test_requirements_that_the_nodes_can_reach(tmp_path: Path, line: str) -> None:
    (tmp_path / "needed.txt").write_text(f"{line}\n")
    assert read_requirements(tmp_path / "needed.txt") == [line]


def test_an_address_is_a_dashboards() -> None:
    for address, url in {
        "http://head:8265": "http://head:8265",
        "https://ray.example.com/": "https://ray.example.com",
        "https://example.com/cluster/": "https://example.com/cluster",
        "http://[fd00::1]:8265": "http://[fd00::1]:8265",
    }.items():
        assert dashboard_url(address) == url


@pytest.mark.parametrize(
    ("address", "instead"),
    [
        ("ray://head:10001", "http://head:8265"),
        ("head:6379", "http://head:8265"),
        ("head", "http://head:8265"),
        ("head:9000", "http://head:9000"),
        ("auto", "http://127.0.0.1:8265"),
    ],
)
def test_another_address_is_answered_with_the_one_that_is_meant(script: Path, address: str, instead: str) -> None:
    assert refused(script, "--address", address).endswith(f"pass --address {instead}.")


@pytest.mark.parametrize("address", ["http://", "http://head:port", ""])
def test_addresses_that_are_none(script: Path, address: str) -> None:
    assert "--address must be the address" in refused(script, "--address", address)


# --- what is told of what answers -------------------------------------------------------------------------------------


@dataclass
class Asked:
    """What answers a request: a status, and a body."""

    version: tuple[int, str]
    jobs: tuple[int, str] = (200, "[]")


@contextlib.contextmanager
def answering(asked: Asked) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = asked.version if self.path == "/api/version" else asked.jobs
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        yield url


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler], receive_bytes: int | None = None) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if receive_bytes is not None:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def of_ray(version: str) -> str:
    return json.dumps({"version": "4", "ray_version": version, "ray_commit": "x", "session_name": "s"})


def this_ray() -> str:
    import ray

    return of_ray(ray.__version__)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda: Asked((404, "not found")), "is not a Ray dashboard, or it takes no jobs"),
        (lambda: Asked((200, "<html>")), "is not a Ray dashboard, or it takes no jobs"),
        (lambda: Asked((500, "broken")), "is not a Ray dashboard, or it takes no jobs"),
        (lambda: Asked((401, "no")), "asks for a token, and got none"),
        (lambda: Asked((403, "no")), "refuses the token"),
        (lambda: Asked((200, of_ray("2.40.0"))), "runs Ray 2.40.0, and offload needs Ray 2.50 or newer"),
        (lambda: Asked((200, of_ray("2.40.0"))), "start a cluster with one of these"),
        (lambda: Asked((200, of_ray("2.50.1")), (404, "no")), "did not list its jobs: no."),  # a job runs with that Ray
        (lambda: Asked((200, this_ray()), (404, "no")), "did not list its jobs: no. The head needs ray[default]"),
    ],
)
def test_what_answers_is_not_what_is_needed(script: Path, asked: Callable[[], Asked], says: str) -> None:
    with answering(asked()) as url:
        text = refused(script, "--address", url)
        assert url in text
        assert says in text


def test_a_head_that_starts_anew_may_be_asked_again() -> None:
    with answering(Asked((200, this_ray()), (503, "starting"))) as url:
        done = run("--status", "train-1", "--address", url)
        assert done.exit_code == 1
        assert f"the Ray cluster at {url} did not describe the job train-1: it answered with 503." in done.output


def test_nothing_answers(script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    text = refused(script, env={"OFFLOAD_RAY_ADDRESS": f"http://127.0.0.1:{port}"})
    assert f"no Ray dashboard can be reached at http://127.0.0.1:{port}: Connection refused" in text
    assert "ray start --head --dashboard-host=0.0.0.0" in text
    assert "Name or service not known" in refused(script, "--address", "http://no-such-host.invalid:8265")


def test_the_address_on_the_command_line_is_the_one_that_is_asked(script: Path) -> None:
    """Ray's own client takes those of its environment first."""
    with answering(Asked((200, of_ray("2.40.0")))) as url:
        env: dict[str, str | None] = {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1", "RAY_ADDRESS": "127.0.0.1:2"}
        assert f"at {url} runs Ray 2.40.0" in refused(script, "--address", url, env=env)


def test_a_slow_link_may_take_longer_to_send_than_to_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes its time over each part of the body, in buffers much smaller than the body."""
    monkeypatch.setattr(job_api, "REACH_S", 0.5)
    taken = []

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(this_ray())

        def do_PUT(self) -> None:
            left = int(self.headers["Content-Length"])
            paced = threading.Event()  # never set: it only paces
            while left:
                paced.wait(0.1)
                left -= len(self.rfile.read(min(left, 1 << 20)))
            taken.append(self.path)
            self.answer("{}")

        def answer(self, body: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving(Slow, receive_bytes=1 << 16) as url:
        cluster = job_api.JobApi(url)
        cluster.client._do_request("PUT", "/api/packages/gcs/x.zip", data=bytes(16 << 20))
    assert taken == ["/api/packages/gcs/x.zip"]


@pytest.mark.parametrize("answer", [None, b"SSH-2.0-OpenSSH\r\n"], ids=["hangs", "not HTTP"])
def test_what_listens_says_nothing_or_something_else(
    script: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    monkeypatch.setattr(job_api, "REACH_S", 0.5)
    links = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = server.accept()
                links.append(link)
                if answer is not None:
                    link.recv(1 << 12)
                    link.sendall(answer)
                    link.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        text = refused(script, "--address", f"http://127.0.0.1:{server.getsockname()[1]}")
        server.shutdown(socket.SHUT_RDWR)
    for link in links:
        link.close()
    assert ("timed out" if answer is None else "is not a Ray dashboard") in text


@pytest.mark.parametrize(
    ("content", "says"), [(None, "which cannot be read: No such file"), ("\n", "which is empty: put")]
)
def test_a_token_that_is_not_there_is_named_before_anything_is_asked(
    script: Path, tmp_path: Path, content: str | None, says: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    env: dict[str, str | None] = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": str(path)}
    assert f"RAY_AUTH_TOKEN_PATH is {path}, {says}" in refused(script, "--address", "http://127.0.0.1:1", env=env)


# --- a job, on a stand-in for Ray's dashboard -------------------------------------------------------------------------


@dataclass
class Dashboard:
    """One job: what it printed by each time of asking, what it is in each state of, and how a POST is answered."""

    logs: list[str]
    statuses: list[str]
    runtime_env: dict[str, object] | None = None
    submitted: int = 200
    odd: Mapping[str, bytes] = field(default_factory=dict)  # what is answered to these requests instead
    lacks: int = 0  # bytes of these answers that do not come
    tailed: int = 0


@contextlib.contextmanager
def dashboard(job: Dashboard) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.odd():
                return
            if self.path == "/api/version":
                self.answer(200, this_ray())
            elif self.path == "/api/jobs/":
                self.answer(200, "[]")
            elif self.path.endswith("/logs/tail"):  # as a proxy does that knows no WebSocket
                job.tailed += 1
                self.answer(400, "no upgrade here")
            elif self.path.endswith("/logs"):
                self.answer(200, json.dumps({"logs": job.logs.pop(0) if len(job.logs) > 1 else job.logs[0]}))
            elif self.path.startswith("/api/packages/"):
                self.answer(200, "{}")
            else:
                status = job.statuses.pop(0) if len(job.statuses) > 1 else job.statuses[0]
                details = {"type": "SUBMISSION", "submission_id": "train-1", "status": status, "entrypoint": "x"}
                ended = {"driver_exit_code": 0} if status == "SUCCEEDED" else {}
                self.answer(200, json.dumps({**details, **ended, "runtime_env": job.runtime_env}))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.odd():
                return
            self.answer(200, '{"stopped": true}') if self.path.endswith("/stop") else self.answer(
                job.submitted, '{"submission_id": "x"}'
            )

        def odd(self) -> bool:
            asked = f"{self.command} {re.sub('train[^/]*', 'ID', self.path)}"
            if asked not in job.odd:
                return False
            self.send_response(200)
            self.send_header("Content-Length", str(len(job.odd[asked])))
            self.end_headers()
            with contextlib.suppress(OSError):  # whoever has had enough hangs up
                self.wfile.write(job.odd[asked][: len(job.odd[asked]) - job.lacks])
            self.close_connection = True
            return True

        def answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        yield url


@pytest.mark.parametrize("body", [b"null", b"<html>\n<p>sign in</p>"], ids=["null", "HTML"])
@pytest.mark.parametrize(
    ("asked", "options", "code", "says"),
    [
        ("GET /api/version", [], 2, "is not a Ray dashboard, or it takes no jobs. It answered GET /api/version with "),
        ("GET /api/jobs/", [], 2, "instead of a list of jobs."),
        ("POST /api/jobs/", [], 1, "may have been started: `offload launch ray"),
        ("GET /api/jobs/ID", ["--no-wait"], 1, "was started: `offload launch ray"),
        ("GET /api/jobs/ID", [], 1, "was started: `offload launch ray"),
        ("GET /api/jobs/ID", ["--status", "train-1"], 2, "instead of a job."),
        ("GET /api/jobs/ID", ["--stop", "train-1"], 2, "instead of a job."),
        ("POST /api/jobs/ID/stop", ["--stop", "train-1"], 2, "instead of whether the job stops."),
    ],
)
def test_whatever_answers_in_a_dashboards_place_is_named(
    script: Path, asked: str, options: list[str], code: int, says: str, body: bytes
) -> None:
    """test_answers.py has all the other answers."""
    with dashboard(Dashboard(logs=[""], statuses=["RUNNING"], odd={asked: body})) as url:
        done = run(*options, *([] if options[1:] else [script]), "--address", url)
    assert done.exit_code == code, done.output
    assert isinstance(done.exception, SystemExit)
    last = done.output.strip().splitlines()[-1]
    assert f"server at {url} " in last
    assert says in last


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    with dashboard(Dashboard(logs=[""], statuses=["RUNNING"], odd={"GET /api/jobs/ID": b"{} "}, lacks=1)) as url:
        done = run("--status", "train-1", "--address", url)
    assert done.exit_code == 1, done.output
    assert f"the Ray cluster at {url} did not describe the job train-1: " in done.output


def test_an_answer_without_end_is_not_received_to_its_end(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_api, "ANSWER_BYTES", 1 << 20)
    with dashboard(Dashboard(logs=[""], statuses=["RUNNING"], odd={"GET /api/jobs/": b"[" + b" " * (64 << 20)})) as url:
        text = refused(script, "--address", url)
    assert f"the server at {url} answered GET /api/jobs/ with more than 1,048,576 bytes" in text
    with dashboard(Dashboard(logs=[""], statuses=["RUNNING"], odd={"POST /api/jobs/": b" " * (64 << 20)})) as url:
        done = run(script, "--address", url)
    assert done.exit_code == 1, done.output
    assert "may have been started" in done.output


def test_a_page_with_the_status_of_an_error_is_named(script: Path) -> None:
    with answering(Asked((200, this_ray()), (407, "<html>\n<p>who are you?</p>"))) as url:
        assert f"at {url} did not list its jobs: it answered with an HTML page. Check that" in refused(
            script, "--address", url
        )


def test_a_log_that_is_none_does_not_end_the_watch() -> None:
    job, said = Dashboard(logs=[""], statuses=["RUNNING"] * 12 + ["SUCCEEDED"]), list[str]()
    job.odd = {"GET /api/jobs/ID/logs": b"null"}
    with dashboard(job) as url, patched(NO_CLUSTER):
        end = running_job.follow(job_api.JobApi(url), "train-1", said.append, said.append, poll_s=0.05)
    assert end["exit_code"] == 0


@pytest.mark.parametrize(
    ("logs", "statuses"),
    [
        (["one\n", "one\ntwo\n", "one\ntwo\nthree\n"], ["RUNNING"] * 12 + ["SUCCEEDED"]),
        (["one\ntwo\nthree\n"], ["SUCCEEDED"]),
    ],
    ids=["long", "ended at once"],
)
def test_where_no_websocket_passes_the_log_is_asked_for(logs: list[str], statuses: list[str]) -> None:
    job, shown, said = Dashboard(logs=logs, statuses=statuses), list[str](), list[str]()
    with dashboard(job) as url, patched(NO_CLUSTER):
        end = running_job.follow(job_api.JobApi(url), "train-1", shown.append, said.append, poll_s=0.05)
    assert end["exit_code"] == 0
    assert "".join(shown) == "one\ntwo\nthree\n"
    assert len(said) == 1
    assert re.search(r"the log of train-1 at \S+ broke off: 400, .*\. Polling it every 0.05 s instead", said[0])
    assert job.tailed == running_job.FAILURES


@pytest.mark.parametrize("status", [502, 504])
def test_a_job_that_may_have_been_taken_is_named(script: Path, status: int) -> None:
    with dashboard(Dashboard(logs=[""], statuses=["RUNNING"], submitted=status)) as url:
        done = run(script, "--address", url)
    assert done.exit_code == 1
    assert re.search(
        rf"it answered with {status}. train_it-\S+ may have been started: `.* --status train_it-\S+` shows it",
        done.output,
    )


def test_a_job_that_does_not_stop_in_time_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_job, "LAST_LINES_S", 0.0)
    environment: dict[str, object] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "0"}}
    with dashboard(Dashboard(logs=[""], statuses=["RUNNING"], runtime_env=environment)) as url:
        done = run("--stop", "train-1", "--address", url)
        assert done.exit_code == 1
        assert "train-1 still runs, after its time to stop" in done.output
        assert run("--stop", "train-1", "--no-wait", "--address", url).exit_code == 0


@pytest.mark.parametrize("environment", [None, {}, {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "soon"}}])
def test_a_job_of_somebody_else_has_rays_patience(environment: dict[str, object] | None) -> None:
    job = Dashboard(logs=[""], statuses=["RUNNING", "STOPPED"], runtime_env=environment)
    with dashboard(job) as url:
        done = run("--stop", "raysubmit_1", "--address", url)
    assert done.exit_code == 0, done.output
    assert "within 3 s" in done.output


def test_ctrl_c_while_a_job_is_stopped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running_job.time, "sleep", pressed)
    with dashboard(Dashboard(logs=[""], statuses=["RUNNING"])) as url:
        done = run("--stop", "train-1", "--address", url)
    assert done.exit_code == 130
    assert "train-1 is stopping" in done.output
    assert "goes on" not in done.output


# --- how a job ended --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "of_driver", "error_type", "code"),
    [
        ("PENDING", None, None, None),
        ("RUNNING", None, None, None),
        ("SUCCEEDED", 0, None, 0),
        ("FAILED", 1, "JOB_ENTRYPOINT_COMMAND_ERROR", 1),
        ("FAILED", 2, "JOB_ENTRYPOINT_COMMAND_ERROR", 2),
        ("FAILED", 130, "JOB_ENTRYPOINT_COMMAND_ERROR", 130),
        ("FAILED", -9, "JOB_ENTRYPOINT_COMMAND_ERROR", 137),
        ("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE", 2),
        ("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED", 1),
        ("STOPPED", None, None, 130),
    ],
)
def test_a_command_that_waited_ends_as_the_run_did(
    status: str, of_driver: int | None, error_type: str | None, code: int | None
) -> None:
    assert running_job.exit_code(status, of_driver, error_type) == code


# --- on the cluster ---------------------------------------------------------------------------------------------------


def test_an_old_python_can_read_the_entry() -> None:
    for path in (
        "offload/__init__.py",
        "offload/launch/__init__.py",
        "offload/launch/ray/__init__.py",
        "offload/launch/ray/entry.py",
        "offload/process/program_state.py",
        "offload/versions.py",
        "offload/errors.py",
        "offload/uncaught.py",
    ):
        ast.parse((ROOT / path).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_a_python_that_offload_does_not_support_is_named_with_the_one_that_launched() -> None:
    code = (
        "import sys, platform; from offload.launch.ray.entry import main\n"
        "sys.version_info = (3, 9, 2, 'final', 0); platform.python_version = lambda: '3.9.2'\n"
        "main(['3.12.1', 'run', 'train.py', '--run-dir', '~/x'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 2
    assert "is Python 3.9.2, and offload needs Python 3.11 to 3.14 (the job was launched with 3.12.1)" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_missing_is_named_with_the_remedy() -> None:
    argv = ["-S", "-m", entry.__name__, "3.12.1", "run", "train.py", "--run-dir", "~/x"]  # without site-packages
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 2
    assert "has no Ray: start Ray there with its environment activated" in done.stderr


def test_all_packages_that_a_run_imports_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entry.unfit("3.12.1") == ""
    found = entry.importlib.util.find_spec
    monkeypatch.setattr(
        entry.importlib.util, "find_spec", lambda name: None if name in ("torch", "rich") else found(name)
    )
    assert "and lacks torch, rich: name it in a file that you pass with --requirements" in entry.unfit("3.12.1")


def test_a_run_imports_nothing_else_by_itself() -> None:
    """What a script does not use need not be on the cluster's nodes."""
    code = (
        "import sys\n"
        "for name in ('torchvision', 'timm', 'simplejpeg', 'aiohttp', 'boto3', 'sklearn'): sys.modules[name] = None\n"
        "import offload.cli.main, offload.train.driver.trainer, offload.train.worker.context, offload.report.page.html"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=800, check=True)


def test_a_home_directory_is_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of-the-head")
    command = ["run", "train.py", "--run-dir", "~/offload-runs/a", "--", "~/data"]
    assert entry.at_home(command) == [
        "run",
        "train.py",
        "--run-dir",
        "/home/of-the-head/offload-runs/a",
        "--",
        "~/data",
    ]


def test_an_older_client_that_uploads_folders_alone_gets_the_unpacked_archive(tmp_path: Path) -> None:
    uploaded: dict[str, str] = {}

    class Older:
        def submit_job(self, *, runtime_env: dict[str, Any], **_: Any) -> None:
            path = Path(runtime_env["working_dir"])
            if path.is_file():
                raise RuntimeEnvSetupError("Failed to store package in the GCS.")
            uploaded.update(
                {str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()}
            )

    for name in ("train.py", ".gitignore", "lib.py"):
        (tmp_path / name).write_text(name)
    files = {
        "train.py": tmp_path / "train.py",
        "src/lib.py": tmp_path / "lib.py",
        ".gitignore": tmp_path / ".gitignore",
    }
    cluster = object.__new__(job_api.JobApi)
    cluster.url, cluster.client = "http://head:8265", Older()
    job = RayJob(name="train", user="me", script="train.py", args=(), run_dir=None)
    cluster.submit(job, "train-1", zipped(files))
    assert uploaded == {"train.py": "train.py", "src/lib.py": "lib.py"}
