"""What `launchers/` holds for users to start or copy: the scripts run, and the cluster files are what `--emit` prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from offload.cli.main import main
from tests.helpers import ROOT

LAUNCHERS = ROOT / "launchers"
CLUSTERS = LAUNCHERS / "clusters"
IMAGE = ["--image", "registry.example.com/training:1"]
EMITTED = {
    "ray-aws.yaml": ["--emit", "ray-aws"],
    "kuberay.yaml": ["--emit", "kuberay", *IMAGE],
    "kuberay-job.yaml": ["--emit", "kuberay", *IMAGE, "--job", "offload run /app/train.py --gpus-per-worker 1"],
    "hosts.yaml": ["--emit", "hosts", "--hosts", str(CLUSTERS / "hosts.txt")],
}


def without_versions(text: str) -> str:
    """Those of the environment that printed it, and so the width of its comments."""
    return " ".join(re.sub(r"\b\d+(\.\d+)+\b|py3\d+", "N", text).replace("#", " ").split())


@pytest.mark.parametrize("name", EMITTED)
def test_the_cluster_files_are_what_emit_prints(name: str) -> None:
    done = CliRunner().invoke(main, ["plan", "--plan", str(CLUSTERS / "plan.json"), *EMITTED[name]])
    assert done.exit_code == 0, done.output
    written = (CLUSTERS / name).read_text()
    assert without_versions(done.stdout) == without_versions(written), (
        f"offload plan {' '.join(EMITTED[name])} > {name}"
    )


def started(script: str, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """A script that ran without credentials, without an AWS configuration and without a network."""
    return subprocess.run(
        [sys.executable, str(LAUNCHERS / script), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=800, check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true"},
    )  # fmt: skip


def printed(script: str, *arguments: str, home: Path) -> dict[str, object]:
    """The request that a script prints under --dry-run."""
    done = started(script, *arguments, home=home)
    assert done.returncode == 0, done.stderr
    document: dict[str, object] = json.loads(done.stdout)
    return document


def test_the_estimator_script_prints_the_request_of_the_command(tmp_path: Path) -> None:
    arguments = [
        "examples/vit_blur.py", "--gpu", "ml.g5.xlarge:1", "--cpu", "ml.c5.4xlarge:2", "--bucket", "my-bucket",
        "--role", "arn:aws:iam::123456789012:role/training", "--region", "eu-west-1", "--dry-run",
        "--image-uri", "763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.8-gpu-py312",
    ]  # fmt: skip
    document = printed("sagemaker_estimator.py", *arguments, "--", "--epochs", "3", home=tmp_path)
    name = str(document["TrainingJobName"])
    command = ["launch", "sagemaker", *arguments, "--name", name, "--json", "--", "--epochs", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "offload", *command], cwd=ROOT, capture_output=True, text=True, timeout=800, check=True
    )
    unique = re.compile(r"source-[0-9a-f]{8}")
    assert unique.sub("", json.dumps(document)) == unique.sub("", json.dumps(json.loads(done.stdout)))


@pytest.mark.parametrize("script", ["sagemaker_estimator.py", "sagemaker_model_trainer.py"])
def test_a_script_needs_a_region_except_for_a_dry_run(tmp_path: Path, script: str) -> None:
    arguments = [
        "examples/vit_blur.py", "--gpu", "ml.g5.xlarge:1", "--bucket", "my-bucket", "--image-uri", "URI",
        "--role", "arn:aws:iam::123456789012:role/training",
    ]  # fmt: skip
    done = started(script, *arguments, home=tmp_path)
    assert done.returncode == 1
    assert "the AWS region is unknown: pass, for example, --region us-east-1, or set" in done.stderr
    dry = started(script, *arguments, "--dry-run", home=tmp_path)
    assert "the AWS region is unknown: the request uses us-east-1" in dry.stderr
    if script == "sagemaker_estimator.py":  # the other one needs version 3 of the SDK
        assert json.loads(dry.stdout)["AlgorithmSpecification"]["TrainingImage"] == "URI"


def test_the_ray_script_prints_what_would_be_submitted(tmp_path: Path) -> None:
    document = printed("ray_job.py", "examples/quickstart.py", "--dry-run", "--", "DATA", home=tmp_path)
    assert re.search(r" run quickstart.py --address auto --run-dir .* -- DATA$", str(document["entrypoint"]))
