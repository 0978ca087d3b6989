"""`offload launch sagemaker`: what is refused before any call, what is sent, and what AWS's refusals become."""

from __future__ import annotations

import io
import json
import re
import runpy
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError
from botocore.validate import ParamValidator
from click.testing import CliRunner, Result

from offload.cli.main import main
from offload.errors import ConfigError
from offload.launch.launcher import launch
from offload.launch.sagemaker import bundle, limits, running_job, submit
from offload.launch.sagemaker.groups import groups_of, groups_of_plan
from offload.launch.sagemaker.images import Contents
from offload.launch.sagemaker.job import ENTRY, SageMakerJob
from offload.launch.sagemaker.job_template import JobTemplate, channel_of, job_name
from offload.launch.sagemaker.launcher import SageMakerLauncher, prepare
from offload.launch.sagemaker.service import Service, asking
from offload.launch.sagemaker.settings import TO_INSTALL, read_settings
from offload.model.planning.plans import Plan
from offload.prices import built_in
from tests.emulation.aws_json import aws_json_server
from tests.helpers import ROOT, moto_server, plan_document
from tests.launch import contract

ROLE = "arn:aws:iam::123456789012:role/training"
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.8-gpu-py312"
USUAL = ["--gpu", "ml.g5.xlarge:1", "--cpu", "ml.c5.4xlarge:1", "--role", ROLE, "--bucket", "my-bucket"]
WITH_IMAGE = [*USUAL, "--image-uri", IMAGE]
AS_TYPED = {
    "lr": "1e-4", "version": "1.10", "quoted": '"hello"', "commit": "7e12345", "flag": "true", "sizes": "[1, 2]", "empty": "",
    "name": "Zoë 好", "n": "-1", "lines": "a\nb", "path": "C:\\n", "half": '"',
}  # fmt: skip
NO_AWS = {
    "AWS_ACCESS_KEY_ID": None,
    "AWS_SECRET_ACCESS_KEY": None,
    "AWS_PROFILE": None,
    "AWS_CONFIG_FILE": "/nowhere",
    "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",  # whoever asks, fails
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    path = folder / "train_it.py"
    path.write_text("import offload\n\ndef build():\n    raise RuntimeError('only where it trains')\n")
    return path


def run(*args: str, env: dict[str, str | None] | None = None) -> Result:
    return CliRunner().invoke(main, ["launch", "sagemaker", *args], env={**NO_AWS, **(env or {})})


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_a_request_that_the_service_would_take() -> None:
    """As a user would type it, without credentials, without a network, and from `python -m` too."""
    argv = ["examples/vit_blur.py", *WITH_IMAGE, "--dry-run", "--json", "--", "--epochs", "3"]
    documents = []
    for command in (["offload", "launch", "sagemaker"], ["offload.launch.sagemaker"]):
        done = subprocess.run(
            [sys.executable, "-m", *command, *argv],
            cwd=ROOT, capture_output=True, text=True, timeout=800,
            env={"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "AWS_EC2_METADATA_DISABLED": "true"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        documents.append(json.loads(done.stdout))
    for document in documents:
        assert not ParamValidator().validate(document, limits.create_training_job().input_shape).has_errors()
        assert not [*limits.violations(document, limits.create_training_job().input_shape)]
        groups = document["ResourceConfig"]["InstanceGroups"]
        assert [(g["InstanceGroupName"], g["InstanceType"]) for g in groups] == [
            ("gpu", "ml.g5.xlarge"),
            ("cpu", "ml.c5.4xlarge"),
        ]
        assert json.loads(document["HyperParameters"]["offload_job"])["args"] == ["--epochs", "3"]


def test_a_dry_run_says_what_it_costs_first(script: Path) -> None:
    done = run(str(script), *WITH_IMAGE, "--max-usd", "10", "--dry-run")
    assert done.exit_code == 0, done.output
    assert re.search(r"cost +\$2.22 an hour on demand; at most \$9.\d\d", done.output)
    assert re.search(r"instances +1 × ml.g5.xlarge \(gpu\) \+ 1 × ml.c5.4xlarge \(cpu\)", done.output)


def test_every_option_reaches_the_request(script: Path) -> None:
    done = run(
        str(script), *WITH_IMAGE, "--cpu", "ml.m5.large:2", "--name", "mine", "--input", "train@gpu,cpu,cpu-2=s3://d/train",
        "--input-mode", "FastFile",
        "--max-hours", "2", "--spot",
        "--checkpoints", "s3://d/ck", "--hyperparameter", "lr=0.1", "--env", "A=b=c",
        "--tag", "team=vision", "--subnet", "subnet-1", "--security-group", "sg-1", "--kms-key", "1234abcd",
        "--encrypt-traffic", "--volume-gib", "100", "--hosts-deadline", "90", "--region", "eu-west-1", "--dry-run",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    request = json.loads(done.output[done.output.index("{") :])
    assert request["TrainingJobName"] == "mine"
    assert request["ResourceConfig"]["InstanceGroups"][2]["InstanceGroupName"] == "cpu-2"
    assert request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["InstanceGroupNames"] == ["gpu", "cpu", "cpu-2"]
    assert request["InputDataConfig"][0]["InputMode"] == "FastFile"
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 14400}
    assert request["EnableManagedSpotTraining"] is True
    assert request["CheckpointConfig"] == {"S3Uri": "s3://d/ck", "LocalPath": "/opt/ml/checkpoints"}
    assert request["HyperParameters"]["lr"] == '"0.1"'
    assert json.loads(request["HyperParameters"]["offload_job"])["hosts_deadline_s"] == 90
    assert json.loads(request["HyperParameters"]["sagemaker_region"]) == "eu-west-1"
    assert request["Environment"] == {"A": "b=c"}
    assert request["Tags"] == [{"Key": "team", "Value": "vision"}]
    assert request["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert request["OutputDataConfig"]["KmsKeyId"] == "1234abcd"
    assert "encrypted by their hardware" in done.output
    assert request["EnableInterContainerTrafficEncryption"] is True


def test_workers_on_several_hosts_keep_checkpoints_where_all_reach_them(script: Path) -> None:
    two = [each.replace("ml.g5.xlarge:1", "ml.g5.xlarge:2") for each in WITH_IMAGE]
    done = run(str(script), *two, "--dry-run", "--name", "mine")
    request = json.loads(done.output[done.output.index("{") :])
    storage = json.loads(request["HyperParameters"]["offload_job"])["storage"]
    assert storage == "s3://my-bucket/offload/mine/checkpoints-of-workers"


def test_the_frameworks_own_image_is_found(script: Path) -> None:
    done = run(str(script), *USUAL, "--framework-version", "2.8", "--dry-run")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output[done.output.index("{") :])["AlgorithmSpecification"]["TrainingImage"] == IMAGE


def plan(tmp_path: Path, *shapes: dict[str, int]) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_document(*shapes)))
    return path


def test_a_plan_says_which_instances(script: Path, tmp_path: Path) -> None:
    path = plan(tmp_path, {"ml.c5.4xlarge": 2, "ml.g5.xlarge": 1}, {"ml.g5.xlarge": 1, "ml.c5.4xlarge": 0})
    done = run(str(script), "--plan", str(path), "--role", ROLE, "--bucket", "b-b", "--image-uri", IMAGE, "--dry-run")
    assert done.exit_code == 0, done.output
    assert re.search(r"instances +1 × ml.g5.xlarge \(gpu\) \+ 2 × ml.c5.4xlarge \(cpu\)", done.output)
    assert "the next combination of the plan is tried" in done.output


def test_what_misses_the_plans_limits_or_trains_nothing_is_no_alternative() -> None:
    document = plan_document(*({"ml.g5.xlarge": 1, "ml.c5.4xlarge": count} for count in (4, 3, 2, 1)), budget_usd=10.0)
    dollars, goodputs = (9.0, 11.0, 8.0, 1.0), (300.0, 300.0, 200.0, 0.0)
    for candidate, usd, goodput in zip(document["candidates"], dollars, goodputs, strict=True):
        candidate.update(usd=usd, hours=1.0, goodput=goodput)
    found = groups_of_plan(Plan.from_document(document, "plan.json"), "plan.json")
    assert [groups[1].count for groups in found] == [4, 2]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--cpu", "ml.c5.xlargee:1"], "'ml.c5.xlargee'; nearest: ml.c5.xlarge"),
        (["--cpu", "ml.c6g.large:1"], "ml.c6g.large serves models and does not train"),
        (["--cpu", "ml.m5.large:1"] * 4, "InstanceGroups: 6 entries, at most 5"),
        (["--cpu", "ml.c5.xlarge"], "a group must be TYPE:COUNT, such as ml.c5.4xlarge:2; found 'ml.c5.xlarge'"),
        (["--name", "a_b"], "TrainingJobName: 'a_b' does not match"),
        (["--role", "training"], "RoleArn: 'training' does not match"),
        (["--volume-gib", "-1"], "VolumeSizeInGB: -1, at least 0"),
        (["--max-usd", "0.1"], r"\$0.1 buys \d+ s of these instances"),
        (["--max-hours", "10000"], "MaxRuntimeInSeconds: 36000000, at most 2,419,200 (28 days)"),
        (["--input", "train"], "an input must be NAME=s3://... or NAME@GROUP,GROUP=s3://..., found 'train'"),
        (["--input", "train=/data"], "an input must be NAME=s3://"),
        (["--input", "a@gpu=s3://b/a", "--input", "b=s3://b/b"], "either all channels name their groups or none does"),
        (
            ["--input", "a@cpu=s3://b/a"],
            "channel 'a' leaves out the group 'gpu', whose hosts list the data and preprocess, too: --input a@gpu,cpu=",
        ),
        (["--input", "a=s3://b/a", "--input-mode", "Pipe"], "'Pipe' is not one of 'File', 'FastFile'"),
        (["--input-mode", "FastFile"], "--input-mode FastFile says how to read --input, and there is no --input"),
        (["--env", "A"], "--env must be NAME=VALUE, found 'A'"),
        (["--tag", "A=1", "--tag", "A=2"], "--tag A is given twice"),
        (["--env", "MY_PASSWORD=hunter2"], "MY_PASSWORD looks like a secret"),
        (["--", "--api-key", "hunter2"], "api-key looks like a secret"),
        (["--cpu", "ml.g5.xlarge:1"], "group 'cpu-2' is of ml.g5.xlarge, which has GPUs"),
        (["--bucket", "My_Bucket"], "--bucket 'My_Bucket' is not a valid bucket name"),
        (["--region", "nowhere"], "there is no AWS region 'nowhere'"),
        (["--max-usd", "nan"], "'nan' is not a number above 0"),
        (["--max-hours", "inf"], "'inf' is not a number above 0"),
        (["--hosts-deadline", "-1"], "'-1' is not a number above 0"),
        (["--hosts-deadline", "1e10"], "'1e10' is not a number above 0, 1,000,000,000 at most"),
        (["--max-hours", "1e306"], "'1e306' is not a number above 0, 1,000,000,000 at most"),
        (["--max-usd", "1e306"], "'1e306' is not a number above 0, 1,000,000,000 at most"),
        (["--cpu", "ml.g5.xlarge:" + "9" * 5000], "a group must be TYPE:COUNT"),
        (["--gpu", "ml.g6.xlarge:1"], "--gpu is given 2 times (ml.g5.xlarge:1, ml.g6.xlarge:1)"),
        (["--env", "URL=postgres://me:hunter2@db/x"], "URL has an address with a password or a token in it"),
        (["--", "a", "postgres://me:hunter2@db/x"], "argument 2 of the script has an address with a password"),
        (["--checkpoints", "s3://bucket"], "--checkpoints must be a folder in a bucket"),
        (["--requirements"], "SCRIPT has no effect beside --requirements"),
        (["--status", "j1", "--stop", "j2"], "SCRIPT has no effect beside --status"),
        (["--subnet", "subnet-1"], "a VPC needs both subnets and security groups"),
        (["--framework-version", "2.8"], "name the image: either --image-uri URI, or --framework-version"),
        (["--plan", "plan.json"], "name the instances: either --gpu TYPE:COUNT"),
        (["--hyperparameter", "note=" + "x" * 2500], r"HyperParameters.note: \d+ characters"),
        (["--hyperparameter", "sagemaker_program=x.py"], "the hyperparameter 'sagemaker_program' cannot be set"),
        (["--hyperparameter", "--lr=1"], "the hyperparameter '--lr' would reach the script as ----lr: give its name"),
        (
            ["--image-uri", IMAGE.replace("2.8-gpu-py312", "2.2-gpu-py310")],
            "has Python 3.10 and torch 2.2: offload needs Python >=3.11",
        ),
        (["--image-uri", IMAGE.replace("2.8", "2.5.1")], "has Python 3.12 and torch 2.5.1: offload needs"),
        (
            ["--image-uri", "account.dkr.ecr.us-east-1.amazonaws.com/mine:7-python3.10.4-x"],
            "has Python 3.10: offload needs",
        ),
        (
            ["--image-uri", "account.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.2.0-cuda12.1"],
            "has torch 2.2.0: offload needs",
        ),
        (["--catalog", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_bad_input_is_refused_before_any_call(script: Path, args: list[str], text: str) -> None:
    done = run(str(script), *WITH_IMAGE, *args)
    assert done.exit_code == 2, done.output
    assert re.search(text if "\\" in text else re.escape(text), done.output)
    assert "hunter2" not in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--role", ROLE, "--bucket", "b-b", "--image-uri", IMAGE], "name the instances"),
        (["--cpu", "ml.c5.xlarge:1", "--role", ROLE, "--bucket", "b-b", "--image-uri", IMAGE], "--gpu is missing"),
        (["--gpu", "ml.g5.xlarge:1", "--bucket", "b-b", "--image-uri", IMAGE], "--role is missing"),
        (["--gpu", "ml.g5.xlarge:1", "--role", ROLE, "--image-uri", IMAGE], "--bucket is missing"),
        (USUAL, "name the image"),
        *(
            ([*USUAL, "--framework-version", version], text)
            for version, text in {
                "1.99": "the SageMaker SDK knows no image for PyTorch 1.99. AWS's images that work: 2.6.0, ",
                "1.13": "AWS's image for PyTorch 1.13 has Python 3.9 and torch 1.13.1: offload needs Python >=3.11,<3.15 and torch>=2.6.",
                "2.2": "has Python 3.10 and torch 2.2.0",
                "2.5": "has Python 3.11 and torch 2.5.1",
            }.items()
        ),
    ],
)
def test_what_is_missing_is_named(script: Path, args: list[str], text: str) -> None:
    done = run(str(script), *args)
    assert done.exit_code == 2, done.output
    assert text in done.output


def test_a_type_is_checked_before_its_image_is_looked_up(script: Path) -> None:
    rest = ["--role", ROLE, "--bucket", "my-bucket", "--framework-version", "2.8", "--dry-run"]
    for kind, said in [("g5.xlarge", "nearest: ml.g5.xlarge"), ("ml.m5.xlarge", "which has no GPU")]:
        done = run(str(script), "--gpu", f"{kind}:1", *rest)
        assert done.exit_code == 2, done.output
        assert said in done.output


@pytest.mark.parametrize("region", ["us-east-1", "us-gov-west-1", "cn-north-1", "us-isob-east-1", "eusc-de-east-1"])
def test_regions_of_all_partitions_are_known(script: Path, region: str) -> None:
    done = run(str(script), *WITH_IMAGE, "--region", region, "--dry-run")
    assert done.exit_code == 0, done.output
    request = json.loads(done.output[done.output.index("{") :])
    assert json.loads(request["HyperParameters"]["sagemaker_region"]) == region


def test_a_broken_aws_configuration_needs_no_traceback(script: Path) -> None:
    for more in (["--region", "us-west-2"], []):
        done = run(str(script), *WITH_IMAGE, *more, "--dry-run", env={"AWS_PROFILE": "nope"})
        assert done.exit_code == 0, done.output
    done = run(str(script), *WITH_IMAGE, env={"AWS_PROFILE": "nope"})
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("more", [["--framework-version", "2.8"], ["--image-uri", IMAGE, "--submitter", "estimator"]])
def test_a_profile_that_the_sdk_does_not_find_needs_no_traceback(script: Path, more: list[str]) -> None:
    """The SDK looks for it when it is imported, so in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "offload", "launch", "sagemaker", script, *USUAL, *more, "--region", "us-east-1", "--dry-run"],
        cwd=ROOT, capture_output=True, text=True, timeout=800,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "AWS_EC2_METADATA_DISABLED": "true", "AWS_PROFILE": "nope"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "cannot be imported: The config profile (nope) could not be found. Correct AWS_PROFILE" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_endpoint_that_is_no_url_is_named() -> None:
    done = run("--status", "mine", env={"AWS_ENDPOINT_URL": "localhost:4566"})
    assert done.exit_code == 2, done.output
    assert "cannot reach sagemaker: Invalid endpoint: localhost:4566. Check the AWS_ENDPOINT_URL" in done.output


def test_what_stays_behind_is_said_and_packages_travel(script: Path, tmp_path: Path) -> None:
    for name in ("build/__init__.py", "checkpoints/a.pt", "mine/runs/b.txt", "secrets_manager.py"):
        path = script.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "shared").mkdir()
    (script.parent / "shared").symlink_to(tmp_path / "shared")
    done = run(str(script), *WITH_IMAGE, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "folders of these names are not uploaded: 'checkpoints', 'mine/runs'" in done.output
    assert "links out of the folder, or to folders, are not uploaded: 'shared'" in done.output
    with tarfile.open(fileobj=io.BytesIO(bundle.pack(script, "entry.py", "token"))) as archive:
        names = archive.getnames()
    assert {"build/__init__.py", "secrets_manager.py"} <= set(names)


def test_a_script_that_is_a_link_is_packed_or_named(script: Path, tmp_path: Path) -> None:
    link = script.with_name("other.py")
    link.symlink_to(script)
    assert run(str(link), *WITH_IMAGE, "--dry-run").exit_code == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.py").symlink_to(script)
    done = run(str(elsewhere / "train.py"), *WITH_IMAGE, "--dry-run")
    assert done.exit_code == 2
    assert "outside of its folder, which is uploaded: launch that file, or copy it here" in done.output


def test_a_script_that_is_a_link_into_a_subfolder_runs_beside_its_modules(script: Path) -> None:
    """As `offload run` does: it imports modules from the folder of the link's target."""
    inner = script.parent / "experiments" / "train_it.py"
    inner.parent.mkdir()
    script.rename(inner)
    script.symlink_to(inner)
    done = run(str(script), *WITH_IMAGE, "--dry-run")
    assert done.exit_code == 0, done.output
    request = json.loads(done.output[done.output.index("{") :])
    assert json.loads(request["HyperParameters"]["offload_job"])["script"] == "experiments/train_it.py"


@pytest.mark.parametrize("line", ["-r ../base.txt", "--constraint=../c.txt", "-e ../lib", "./missing", "../lib[extra]"])
def test_requirements_that_lead_out_of_the_folder_are_refused(script: Path, line: str) -> None:
    script.with_name("requirements.txt").write_text(f"einops\n{line}\n")
    done = run(str(script), *WITH_IMAGE, "--dry-run")
    assert done.exit_code == 2, done.output
    assert f"has the line {line!r}" in done.output
    assert "is not uploaded" in done.output


def test_requirements_that_are_a_link_out_of_the_folder_are_refused(script: Path, tmp_path: Path) -> None:
    (tmp_path / "shared.txt").write_text("einops\n")
    script.with_name("requirements.txt").symlink_to(tmp_path / "shared.txt")
    done = run(str(script), *WITH_IMAGE, "--dry-run")
    assert done.exit_code == 2, done.output
    assert f"requirements.txt is a link to {tmp_path / 'shared.txt'}, which is not uploaded" in done.output


@pytest.mark.parametrize(
    "line", ["./dist/mine-1.0-py3-none-any.whl", "-r .base.txt", "-f dist", "--constraint=build/c.txt", "./link"]
)
def test_requirements_that_stay_behind_are_refused(script: Path, line: str) -> None:
    for name in ("dist/mine-1.0-py3-none-any.whl", ".base.txt", "build/c.txt"):
        path = script.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    (script.parent / "real").mkdir()
    (script.parent / "real" / "pyproject.toml").write_text("")
    (script.parent / "link").symlink_to("real")
    script.with_name("requirements.txt").write_text(f"{line}\n")
    done = run(str(script), *WITH_IMAGE, "--dry-run")
    assert done.exit_code == 2, done.output
    assert f"has the line {line!r}" in done.output
    assert "Move it elsewhere in the folder" in done.output


@pytest.mark.parametrize(
    "line",
    ["./wheels/mine-1.0-py3-none-any.whl", "-r more/base.txt", "-f wheels", "./build/lib", "-e ./build/lib[fast]"],
)
def test_requirements_within_the_folder_travel(script: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr("offload.launch.sagemaker.launcher.check_requirements", lambda own, image: "a note on them.")
    for name in ("wheels/mine-1.0-py3-none-any.whl", "more/base.txt", "build/__init__.py", "build/lib/pyproject.toml"):
        path = script.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    script.with_name("requirements.txt").write_text(f"{line}\n")
    done = run(str(script), *WITH_IMAGE, "--dry-run")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("line", "project", "taken"),
    [
        ("-e .", "setup.py", False),
        (".", "setup.py", False),
        ("-e .", "pyproject.toml", True),
        ("-f .", "setup.py", True),
    ],
)
def test_a_line_that_installs_the_folder_needs_a_project_that_travels(
    script: Path, monkeypatch: pytest.MonkeyPatch, line: str, project: str, taken: bool
) -> None:
    monkeypatch.setattr("offload.launch.sagemaker.launcher.check_requirements", lambda own, image: "a note on them.")
    script.with_name(project).write_text("")
    script.with_name("requirements.txt").write_text(f"{line}\n")
    done = run(str(script), *WITH_IMAGE, "--dry-run")
    assert done.exit_code == (0 if taken else 2), done.output
    assert taken or f"has the line {line!r}, and the setup.py of {script.parent} is not uploaded" in done.output


def test_a_spot_plan_says_where_the_job_pays_more(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    rest = ["--plan", str(path), "--role", ROLE, "--bucket", "my-bucket", "--image-uri", IMAGE, "--dry-run"]
    for spot, more, said in [
        ("all", [], "the plan is for spot capacity, and the job is on demand: pass --spot"),
        ("cpu", [], "spot CPU nodes alone, which SageMaker does not offer: all of the job is on demand"),
        ("all", ["--spot"], None),
    ]:
        path.write_text(json.dumps(plan_document({"ml.g5.xlarge": 1, "ml.c5.4xlarge": 1}) | {"spot": spot}))
        done = run(str(script), *rest, *more)
        assert done.exit_code == 0, done.output
        assert ("the plan is for spot" in done.output) == (said is not None)
        assert said is None or said in done.output


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "there is no script"),
        ("def build(:", "is not Python"),
        ("def make(): ...", "defines no build()"),
    ],
)
def test_a_script_that_could_not_run_is_refused(script: Path, content: str | None, text: str) -> None:
    script.unlink() if content is None else script.write_text(content)
    done = run(str(script), *WITH_IMAGE, "--dry-run")
    assert done.exit_code == 2
    assert text in done.output
    assert "SCRIPT is missing" in run().output


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON: Expecting"),
        ("[]", "is not a plan"),
        ('{"schema": "offload.plan/2", "candidates": [], "recommended": 0}', "has schema 'offload.plan/2'"),
        ('{"schema": "offload.plan/1", "candidates": [], "recommended": 0}', "recommends no candidate"),
        (json.dumps(plan_document({"ml.c5.large": 1})), "0 types of GPU"),
        (
            json.dumps(plan_document({"big": 1, "ml.c5.large": 1})),
            "nodes of type 'big', which is no instance type of SageMaker",
        ),
    ],
)
def test_a_plan_that_is_none_is_refused(script: Path, tmp_path: Path, content: str | None, text: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    done = run(str(script), "--plan", str(path), "--role", ROLE, "--bucket", "b-b", "--image-uri", IMAGE)
    assert done.exit_code == 2, done.output
    assert text in done.output


@pytest.mark.parametrize(("there", "said"), [(False, "it is not installed"), (True, "version 3.27.0 is installed")])
def test_an_estimator_that_is_not_there_is_missed_before_anything_is_uploaded(
    script: Path,
    aws: tuple[dict[str, str | None], SageMaker, Any],
    monkeypatch: pytest.MonkeyPatch,
    there: bool,
    said: str,
) -> None:
    """Without the SDK, and with version 3, boto3 submits unless the estimator is asked for."""
    environment, service, s3 = aws
    submit._sdk.cache_clear()
    monkeypatch.setitem(sys.modules, "sagemaker.pytorch", None)  # as version 3 answers
    monkeypatch.setattr(submit, "_installed", lambda package: "3.27.0" if there else None)
    for more in ([], ["--dry-run"]):
        done = run(str(script), *WITH_IMAGE, "--submitter", "estimator", *more, env=environment)
        assert done.exit_code == 2, done.output
        assert "--submitter estimator needs version 2 of the SageMaker SDK, and " + said in done.output
        assert "--submitter boto3" in done.output
    assert "Contents" not in s3.list_objects_v2(Bucket="my-bucket")
    done = run(str(script), *WITH_IMAGE, "--name", "mine", env=environment)
    assert done.exit_code == 0, done.output
    assert [request["TrainingJobName"] for request in service.requests] == ["mine"]


def test_without_an_sdk_no_image_is_looked_up(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sagemaker.image_uris", "sagemaker.core.image_uris"):
        monkeypatch.setitem(sys.modules, name, None)
    done = run(str(script), *USUAL, "--framework-version", "2.8", "--dry-run")
    assert done.exit_code == 2, done.output
    assert "--framework-version needs the SageMaker SDK" in done.output
    assert "--image-uri" in done.output
    done = run(str(script), *USUAL, "--image-uri", IMAGE.replace("312", "310"), "--dry-run")
    assert done.exit_code == 2, done.output
    assert "has Python 3.10 and torch 2.8: offload needs Python" in done.output


def test_requirements_are_checked_against_the_image_before_anything_is_sent(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def check(own: Path, image: Contents) -> str:
        asked.append((own.name, image.python, image.torch))
        return "a note on them."

    script.with_name("requirements.txt").write_text("einops\n")
    monkeypatch.setattr("offload.launch.sagemaker.launcher.check_requirements", check)
    done = run(str(script), *WITH_IMAGE, "--dry-run")
    assert done.exit_code == 0, done.output
    assert asked == [("requirements.txt", "3.12", "2.8")]
    assert "a note on them." in done.output


def test_too_large_a_bundle_is_refused(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "LARGEST_BYTES", 1000)
    done = run(str(script), *WITH_IMAGE, "--dry-run")
    assert done.exit_code == 2
    assert "to upload with the script, and at most" in done.output


def test_without_credentials_a_launch_says_so(script: Path) -> None:
    done = run(str(script), *WITH_IMAGE)
    assert done.exit_code == 2, done.output
    assert "no usable AWS credentials" in done.output
    assert "aws configure" in done.output


# --- AWS, as it answers -----------------------------------------------------------------------------------------------


@dataclass
class SageMaker:
    """Answers as the service does, and keeps what it was sent (moto's drops parts of it)."""

    answers: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    describes: tuple[int, dict[str, Any]] | None = None
    takes_and_refuses: bool = False

    def answer(self, action: str, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = document["TrainingJobName"]
        if action == "CreateTrainingJob":
            if any(name == sent["TrainingJobName"] and sent != document for sent in self.requests):
                return refusal("ResourceInUse", "Training job names must be unique")
            if self.answers and (refused := self.answers.pop(0)):
                return refused
            self.requests.append(document)
            arn = f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}"
            return refusal("ResourceInUse") if self.takes_and_refuses else (200, {"TrainingJobArn": arn})
        sent = next((r for r in reversed(self.requests) if r["TrainingJobName"] == name), None)
        if self.describes:
            return self.describes
        if sent is None:
            return refusal("ValidationException", "Requested resource not found.")
        if action == "StopTrainingJob":
            self.jobs[name] = {"TrainingJobStatus": "Stopping", "SecondaryStatus": "Stopping"}
            return 200, {}
        now = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Starting"}
        return 200, {**now, **sent, **self.jobs.get(name, {})}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, str | None], SageMaker, Any]]:
    """The variables that lead to S3 (moto's) and to SageMaker, that one, and a client of the other."""
    monkeypatch.setattr(running_job.follow, "__defaults__", (0.05,))  # seconds between two looks
    service = SageMaker()
    with moto_server() as (environment, s3), aws_json_server(service.answer) as url:
        s3.create_bucket(Bucket="my-bucket")
        yield {**environment, "AWS_ENDPOINT_URL_SAGEMAKER": url}, service, s3


def refusal(code: str, message: str = "no") -> tuple[int, dict[str, Any]]:
    return 400, {"__type": code, "message": message}


def full_template() -> JobTemplate:
    return JobTemplate(
        script="train_it.py",
        args=("--epochs", "3"),
        role=ROLE,
        bucket="my-bucket",
        image=IMAGE,
        region="us-east-1",
        channels=(channel_of("train@gpu,cpu=s3://d/train", "FastFile"), channel_of("val@gpu,cpu=s3://d/val")),
        hyperparameters=AS_TYPED,
        environment={"A": "b"},
        tags={"team": "vision"},
        spot=True,
        subnets=("subnet-1",),
        security_groups=("sg-1",),
        kms_key="1234abcd-12ab-34cd-56ef-1234567890ab",
        encrypt_traffic=True,
    )


@pytest.mark.parametrize("submitter", ["auto", "estimator", "boto3"])
def test_both_ways_send_the_request_that_was_checked(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any], monkeypatch: pytest.MonkeyPatch, submitter: Any
) -> None:
    environment, service, s3 = aws
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    groups = groups_of("ml.g5.xlarge:1", ["ml.c5.4xlarge:2"])
    prepared = prepare(full_template(), "mine-1", [groups], script, built_in())
    # A session of one's own is used, and no other: it alone has credentials.
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    session = boto3.Session("testing", "testing", region_name="us-east-1")
    launcher = SageMakerLauncher(Service(session=session), built_in(), submitter)
    state = launch(launcher, prepared.jobs, wait=False, show=print)
    assert state["status"] == "InProgress"
    [sent] = service.requests
    job = prepared.jobs[0].job
    assert sent == job.request()
    # What the container reads of it is what was typed.
    stored = script.parent.parent / "input" / "config" / "hyperparameters.json"
    stored.parent.mkdir(parents=True)
    stored.write_text(json.dumps(sent["HyperParameters"]))
    assert read_settings(script.parent.parent)[1] == AS_TYPED
    uploaded = s3.get_object(Bucket="my-bucket", Key=job.source.removeprefix("s3://my-bucket/"))["Body"].read()
    assert uploaded[:2] == b"\x1f\x8b"


def test_what_every_launcher_promises(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, service, _ = aws
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))

    def time_passes(_: float) -> None:
        for job in service.jobs.values():
            job["TrainingJobStatus"] = job["SecondaryStatus"] = "Stopped"

    monkeypatch.setattr(time, "sleep", time_passes)
    groups = groups_of("ml.g5.xlarge:1", ["ml.c5.4xlarge:2"])
    first, second = (prepare(full_template(), "mine-1", [groups], script, built_in()).jobs[0] for _ in range(2))
    contract.rendering_is_pure(first, first.token)
    assert first.token != second.token
    launcher = SageMakerLauncher(Service(), built_in(), "boto3")
    contract.holds(launcher, first, lambda: True)
    with pytest.raises(ConfigError, match="already has a job 'mine-1'"):
        launcher.submit(second)


def test_the_token_is_in_the_bundle_alone_and_another_each_time(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any]
) -> None:
    environment, service, s3 = aws
    tokens = []
    for name in ("one", "two"):
        done = run(str(script), *WITH_IMAGE, "--submitter", "boto3", "--name", name, env=environment)
        assert done.exit_code == 0, done.output
        source = json.loads(service.requests[-1]["HyperParameters"]["sagemaker_submit_directory"])
        body = s3.get_object(Bucket="my-bucket", Key=source.removeprefix("s3://my-bucket/"))["Body"].read()
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            member = archive.extractfile(bundle.TOKEN)
            assert member is not None
            tokens.append(member.read().decode())
        assert tokens[-1] not in done.output
        assert tokens[-1] not in json.dumps(service.requests)
    assert len(set(tokens)) == 2
    assert all(len(token) == 64 for token in tokens)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (refusal("AccessDeniedException", "User x is not authorized"), "access is denied to CreateTrainingJob"),
        (
            refusal("ResourceLimitExceeded", "limit for ml.g5.xlarge is 0"),
            "limit for ml.g5.xlarge is 0 Ask for more under",
        ),
        (refusal("ExpiredTokenException"), "AWS does not accept the credentials"),
        (refusal("ValidationException", "odd"), "cannot start the training job: ValidationException: odd"),
    ],
)
def test_what_aws_refuses_is_said_with_a_remedy(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any], answer: Any, text: str
) -> None:
    environment, service, _ = aws
    service.answers = [answer]
    done = run(str(script), *WITH_IMAGE, "--submitter", "boto3", env=environment)
    assert done.exit_code == 2, done.output
    assert text in done.output
    assert "Traceback" not in done.output


def test_throttling_is_retried(script: Path, aws: tuple[dict[str, str | None], SageMaker, Any]) -> None:
    environment, service, _ = aws
    service.answers = [refusal("ThrottlingException", "Rate exceeded")] * 2
    done = run(str(script), *WITH_IMAGE, "--submitter", "boto3", env=environment)
    assert done.exit_code == 0, done.output
    assert len(service.requests) == 1


def test_a_bucket_that_is_not_there_is_named(script: Path, aws: tuple[dict[str, str | None], SageMaker, Any]) -> None:
    environment, service, _ = aws
    done = run(str(script), *WITH_IMAGE, "--bucket", "other-bucket", "--submitter", "boto3", env=environment)
    assert done.exit_code == 2
    assert "cannot upload the script to s3://other-bucket/" in done.output
    assert not service.requests


def test_where_there_is_no_capacity_the_plans_next_best_is_tried(
    script: Path, tmp_path: Path, aws: tuple[dict[str, str | None], SageMaker, Any]
) -> None:
    environment, service, _ = aws
    service.answers = [refusal("ResourceLimitExceeded", "no ml.c5.4xlarge")]
    shapes = [{"ml.g5.xlarge": 1, "ml.c5.4xlarge": n} for n in (2, 3)] + [{"ml.g5.xlarge": 1, "ml.m5.4xlarge": 2}]
    args = ["--plan", str(plan(tmp_path, *shapes)), "--role", ROLE, "--bucket", "my-bucket", "--image-uri", IMAGE]
    done = run(str(script), *args, "--submitter", "boto3", "--name", "mine", env=environment)
    assert done.exit_code == 0, done.output
    [sent] = service.requests
    assert sent["TrainingJobName"] == "mine-2"
    assert sent["ResourceConfig"]["InstanceGroups"][1]["InstanceType"] == "ml.m5.4xlarge"
    assert "no ml.c5.4xlarge" in done.output


# --- following a job --------------------------------------------------------------------------------------------------


def printed(environment: dict[str, Any], job: str, lines: dict[str, list[str]]) -> None:
    """Put what hosts printed where the service does."""
    logs = boto3.client("logs", endpoint_url=environment["AWS_ENDPOINT_URL"], region_name="us-east-1",
                        aws_access_key_id="testing", aws_secret_access_key="testing")  # fmt: skip
    logs.create_log_group(logGroupName=running_job.LOG_GROUP)
    for host, texts in lines.items():
        stream = f"{job}/{host}-1234567890"
        logs.create_log_stream(logGroupName=running_job.LOG_GROUP, logStreamName=stream)
        events = [{"timestamp": int(time.time() * 1000) + n, "message": text} for n, text in enumerate(texts)]
        logs.put_log_events(logGroupName=running_job.LOG_GROUP, logStreamName=stream, logEvents=events)
    logs.close()


def progress(step: int, rate: float) -> str:
    return f"offload: epoch=0 step={step} samples/s={rate} stall=0.02 goodput={rate} loss=0.5 workers=1 batch=64"


def test_a_job_is_followed_to_its_end_with_cost_and_throughput(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any]
) -> None:
    environment, service, _ = aws
    service.jobs["mine"] = {
        "TrainingJobStatus": "Completed", "SecondaryStatus": "Completed", "TrainingTimeInSeconds": 3600,
        "BillableTimeInSeconds": 0,
    }  # fmt: skip
    lines = {
        "algo-1": ["offload: this is algo-1 of group cpu (ml.c5.4xlarge); the head is algo-2", "preparing"],
        "algo-2": [
            "offload: this is algo-2 of group gpu (ml.g5.xlarge); the head is algo-2",
            *map(progress, (9, 10, 11), (90, 100, 50)),
        ],
    }
    printed(environment, "mine", lines)
    done = run(str(script), *WITH_IMAGE, "--submitter", "boto3", "--name", "mine", "--wait", env=environment)
    assert done.exit_code == 0, done.output
    assert "[cpu algo-1] preparing" in done.output
    assert "[gpu algo-2] offload: epoch=0" in done.output
    assert re.search(r"cost +\$2.22 \(\$2.22 an hour on demand\)", done.output)
    # 64 samples at 100 a second, and 64 at 50: by time, not by lines. The first line counts from nowhere.
    assert re.search(r"throughput +66.7 samples/s", done.output)
    assert re.search(r"a million samples +\$9.27 at that rate", done.output)


def test_a_job_that_fails_ends_with_its_reason(script: Path, aws: tuple[dict[str, str | None], SageMaker, Any]) -> None:
    environment, service, _ = aws
    service.jobs["mine"] = {"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: ValueError: cursed"}
    done = run(str(script), *WITH_IMAGE, "--submitter", "boto3", "--name", "mine", "--wait", env=environment)
    assert done.exit_code == 1, done.output
    assert "AlgorithmError: ValueError: cursed" in done.output


def test_a_job_that_was_started_is_named_when_it_cannot_be_followed(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any]
) -> None:
    environment, service, _ = aws
    service.describes = refusal("AccessDeniedException", "not authorized")
    done = run(str(script), *WITH_IMAGE, "--submitter", "boto3", "--name", "mine", env=environment)
    assert done.exit_code == 1, done.output
    assert re.search(
        r"cannot describe the job mine: access is denied .* mine was started: `.* --status mine` shows it", done.output
    )


@pytest.mark.parametrize("silence_s", [running_job.SILENCE_S, 0.0])
def test_a_job_is_followed_through_an_outage_of_the_network(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any], monkeypatch: pytest.MonkeyPatch, silence_s: float
) -> None:
    environment, service, _ = aws
    service.jobs["mine"] = {"TrainingJobStatus": "Completed", "TrainingTimeInSeconds": 10}
    describe, failures = running_job.describe, iter(range(3))

    def flaky(service: Service, name: str) -> dict[str, Any]:
        if next(failures, None) is None:
            return describe(service, name)
        with asking(f"describe the job {name}"):
            raise EndpointConnectionError(endpoint_url="https://sagemaker")

    monkeypatch.setattr(running_job, "describe", flaky)
    monkeypatch.setattr(running_job, "SILENCE_S", silence_s)
    done = run(str(script), *WITH_IMAGE, "--submitter", "boto3", "--name", "mine", "--wait", env=environment)
    if silence_s:
        assert done.exit_code == 0, done.output
        assert done.output.count("Check the network") == 1
        assert "The job goes on; trying again" in done.output
    else:
        assert done.exit_code == 1, done.output
        assert "mine was started: `" in done.output


def test_a_name_that_is_taken_is_refused_and_the_other_job_keeps_its_bundle(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any]
) -> None:
    environment, service, s3 = aws
    args = [str(script), *WITH_IMAGE, "--submitter", "boto3", "--name", "mine"]
    assert run(*args, env=environment).exit_code == 0
    [first] = s3.list_objects_v2(Bucket="my-bucket")["Contents"]
    service.answers = [refusal("ResourceInUse", "Training job names must be unique")]
    done = run(*args, env=environment)
    assert done.exit_code == 2, done.output
    assert "this account already has a job 'mine': choose another --name" in done.output
    there = {each["Key"]: each["ETag"] for each in s3.list_objects_v2(Bucket="my-bucket")["Contents"]}
    assert there[first["Key"]] == first["ETag"]


@pytest.mark.parametrize("hyperparameters", [None, {}, {"sagemaker_submit_directory": "s3://b/not-json"}])
def test_a_name_that_another_tools_job_has_is_refused(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any], hyperparameters: dict[str, str] | None
) -> None:
    environment, service, _ = aws
    given = {} if hyperparameters is None else {"HyperParameters": hyperparameters}
    service.requests.append({"TrainingJobName": "mine", **given})
    done = run(str(script), *WITH_IMAGE, "--submitter", "boto3", "--name", "mine", env=environment)
    assert done.exit_code == 2, done.output
    assert "this account already has a job 'mine': choose another --name" in done.output


def test_a_call_that_was_answered_too_late_started_the_job_all_the_same(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, service, _ = aws
    service.takes_and_refuses = True
    done = run(str(script), *WITH_IMAGE, "--submitter", "boto3", "--name", "mine", env=environment)
    assert done.exit_code == 0, done.output
    assert "started mine" in done.output


def test_an_alternative_that_the_cap_cannot_buy_is_left_out(script: Path, tmp_path: Path) -> None:
    path = plan(tmp_path, {"ml.g5.xlarge": 1, "ml.c5.4xlarge": 1}, {"ml.p4d.24xlarge": 1})
    args = ["--plan", str(path), "--role", ROLE, "--bucket", "b-b", "--image-uri", IMAGE, "--max-usd", "2", "--dry-run"]
    done = run(str(script), *args)
    assert done.exit_code == 0, done.output
    assert "not an alternative: 1 × ml.p4d.24xlarge" in done.output


def test_ctrl_c_names_the_job_that_goes_on(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    environment, _, _ = aws
    monkeypatch.setattr(running_job, "follow", interrupted)
    done = run(str(script), *WITH_IMAGE, "--submitter", "boto3", "--name", "mine", "--wait", env=environment)
    assert done.exit_code == 130, done.output
    assert "mine goes on: `offload launch sagemaker --region us-east-1 --status mine` shows it, `" in done.output


def test_a_running_jobs_status_says_what_it_has_cost() -> None:
    began = datetime(2026, 11, 22, 12, tzinfo=UTC)
    job = {
        "TrainingJobName": "mine",
        "TrainingJobStatus": "InProgress",
        "TrainingStartTime": began,
        "ResourceConfig": {
            "InstanceGroups": [{"InstanceGroupName": "gpu", "InstanceType": "ml.g5.xlarge", "InstanceCount": 2}]
        },
    }
    state = running_job.state(job, built_in(), now=began + timedelta(hours=2))
    assert state["usd"] == pytest.approx(4 * built_in()["ml.g5.xlarge"].usd_per_hour)


def test_the_requirements_of_an_image_are_printed() -> None:
    done = run("--requirements")
    assert done.exit_code == 0
    assert any(line.startswith("ray[data]==") for line in done.output.splitlines())


def test_want_of_capacity_found_later_is_met_with_the_next_best(
    script: Path, tmp_path: Path, aws: tuple[dict[str, str | None], SageMaker, Any]
) -> None:
    environment, service, _ = aws
    service.jobs["mine"] = {
        "TrainingJobStatus": "Failed", "FailureReason": "CapacityError: Unable to provision requested ML compute capacity.",
    }  # fmt: skip
    service.jobs["mine-2"] = {"TrainingJobStatus": "Completed", "TrainingTimeInSeconds": 10}
    path = plan(tmp_path, {"ml.g5.xlarge": 1, "ml.c5.4xlarge": 2}, {"ml.g5.xlarge": 1})
    args = ["--plan", str(path), "--role", ROLE, "--bucket", "my-bucket", "--image-uri", IMAGE]
    done = run(str(script), *args, "--submitter", "boto3", "--name", "mine", "--wait", env=environment)
    assert done.exit_code == 0, done.output
    assert [r["TrainingJobName"] for r in service.requests] == ["mine", "mine-2"]


def test_status_from_a_real_server(script: Path) -> None:
    """moto's SageMaker takes the estimator's request and describes the job."""
    with moto_server() as (environment, s3):
        s3.create_bucket(Bucket="my-bucket")
        given: dict[str, str | None] = {**environment}
        done = run(str(script), *WITH_IMAGE, "--name", "mine", env=given)
        assert done.exit_code == 0, done.output
        assert "1 × ml.g5.xlarge (gpu) + 1 × ml.c5.4xlarge (cpu)" in run("--status", "mine", env=given).output
        missing = run("--status", "other", env=given)
        assert missing.exit_code == 2
        assert "there is no training job 'other' in us-east-1" in missing.output


def test_the_example_for_version_3_of_the_sdk_runs_the_launchers_bundle(
    script: Path, aws: tuple[dict[str, str | None], SageMaker, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That version cannot be installed beside the one tested here: the request that it made of this was compared by hand."""
    environment, _, s3 = aws
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    example = runpy.run_path(str(ROOT / "launchers" / "sagemaker_model_trainer.py"))
    jobs = []

    class Trainer:
        def __init__(self, job: SageMakerJob, session: Any) -> None:
            jobs.append(job)

        def train(self) -> None:
            pass

    monkeypatch.setitem(example["main"].__globals__, "model_trainer", Trainer)
    monkeypatch.setattr(sys, "argv", ["x", str(script), *WITH_IMAGE, "--input", "a=s3://b/a", "--", "--epochs", "3"])
    example["main"]()
    [job] = jobs
    assert job.settings.args == ("--epochs", "3")
    uploaded = s3.get_object(Bucket="my-bucket", Key=job.source.removeprefix("s3://my-bucket/"))["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(uploaded)) as archive:
        assert {ENTRY, bundle.TOKEN, TO_INSTALL, script.name} <= set(archive.getnames())


def test_a_job_is_stopped(script: Path, aws: tuple[dict[str, str | None], SageMaker, Any]) -> None:
    environment, _, _ = aws
    assert run(str(script), *WITH_IMAGE, "--submitter", "boto3", "--name", "mine", env=environment).exit_code == 0
    done = run("--stop", "mine", env=environment)
    assert done.exit_code == 0, done.output
    assert re.search(r"status +Stopping", done.output)


@pytest.mark.parametrize("option", ["--status", "--stop"])
def test_a_job_without_a_name_is_none(option: str) -> None:
    """As a shell gives it of a variable that is not set."""
    done = run(option, "")
    assert done.exit_code == 2, done.output
    assert f"{option} must be the name of a job, as the launch printed it, found ''" in done.output


def test_a_job_is_named_after_its_script() -> None:
    now = datetime(2026, 11, 22, 13, 20, 5, 123456, tzinfo=UTC)
    assert job_name(Path("x/vit_blur.py"), now) == "vit-blur-2026-11-22-13-20-05-123"
    for script in ("___.py", "a" * 100 + ".py", "ünï.py"):
        name = job_name(Path(script), now)
        assert not [*limits.violations(name, limits.service_model().shape_for("TrainingJobName"), "name")], name
