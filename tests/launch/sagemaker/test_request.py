"""The request for a heterogeneous SageMaker job: what the service would refuse is found before it is asked."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from botocore.validate import ParamValidator
from hypothesis import given, settings
from hypothesis import strategies as st
from sagemaker_training.params import SAGEMAKER_HYPERPARAMETERS

from offload.errors import ConfigError
from offload.launch.sagemaker import limits
from offload.launch.sagemaker.groups import ENDING_S, InstanceGroup, groups_of, seconds_for
from offload.launch.sagemaker.job import METRICS, Channel, SageMakerJob
from offload.launch.sagemaker.settings import Settings
from offload.prices import built_in

ROLE = "arn:aws:iam::123456789012:role/training"
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.8-gpu-py312"
JOB = SageMakerJob(
    name="vit-blur-1",
    groups=groups_of("ml.g5.xlarge:1", ["ml.c5.4xlarge:2", "ml.m5.large:1"]),
    role=ROLE,
    image=IMAGE,
    region="us-east-1",
    source="s3://bucket/vit-blur-1/source.tar.gz",
    settings=Settings(script="vit_blur.py"),
    output="s3://bucket/vit-blur-1/output",
)


def refused(**changed: Any) -> str:
    with pytest.raises(ConfigError) as error:
        replace(JOB, **changed)
    assert error.value.exit_code == 2
    return str(error.value)


def test_the_request_is_what_the_service_describes() -> None:
    job = replace(
        JOB,
        checkpoints="s3://bucket/vit-blur-1/checkpoints",
        channels=(Channel(name="train", uri="s3://bucket/train", groups=("gpu", "cpu", "cpu-2")),),
        hyperparameters={"epochs": 3},
        environment={"NCCL_DEBUG": "INFO"},
        tags={"team": "vision"},
        spot=True,
        subnets=("subnet-1",),
        security_groups=("sg-1",),
        kms_key="1234abcd-12ab-34cd-56ef-1234567890ab",
    )
    request = job.request()
    assert not ParamValidator().validate(request, limits.create_training_job().input_shape).has_errors()
    assert [g["InstanceGroupName"] for g in request["ResourceConfig"]["InstanceGroups"]] == ["gpu", "cpu", "cpu-2"]
    assert "InstanceType" not in request["ResourceConfig"]
    assert json.loads(request["HyperParameters"]["epochs"]) == 3
    assert json.loads(request["HyperParameters"]["sagemaker_submit_directory"]) == job.source
    assert request["StoppingCondition"]["MaxWaitTimeInSeconds"] > request["StoppingCondition"]["MaxRuntimeInSeconds"]


def test_what_was_not_asked_for_is_not_in_the_request() -> None:
    assert not {"VpcConfig", "CheckpointConfig", "InputDataConfig", "Environment", "Tags"} & JOB.request().keys()


def test_metrics_are_read_from_a_progress_line() -> None:
    line = "offload: epoch=0 step=9 samples/s=84.5 stall=0.02 goodput=81.3 loss=1.3e-05 workers=2 batch=64"
    found = {
        each["Name"]: float(re.search(each["Regex"], line)[1])  # type: ignore[index]
        for each in JOB.request()["AlgorithmSpecification"]["MetricDefinitions"]
    }
    assert found == {
        "samples_per_s": 84.5, "stall": 0.02, "goodput": 81.3, "loss": 1.3e-05, "workers": 2, "global_batch_size": 64,
    }  # fmt: skip
    assert found.keys() == METRICS.keys()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"groups": groups_of("ml.g5.xlargee:1", [])}, "'ml.g5.xlargee' is not known; nearest: ml.g5.xlarge"),
        ({"groups": groups_of("ml.g5.xlarge:1", ["ml.c6g.large:1"])}, "ml.c6g.large serves models and does not train"),
        ({"groups": groups_of("ml.g5.xlarge:1", ["ml.c5.xlarge:1"] * 5)}, "InstanceGroups: 6 entries, at most 5"),
        ({"groups": groups_of("ml.c5.xlarge:1", [])}, "ml.c5.xlarge, which has no GPU"),
        ({"groups": groups_of("ml.g5.xlarge:0", [])}, "group 'gpu' has 0 instances"),
        ({"groups": (InstanceGroup(name="cpu", instance_type="ml.c5.xlarge", count=1),)}, "no group is named 'gpu'"),
        ({"groups": groups_of("ml.g5.xlarge:1", []) * 2}, "2 groups are named 'gpu'"),
        ({"name": "vit_blur"}, "TrainingJobName: 'vit_blur' does not match"),
        ({"name": "x" * 64}, "TrainingJobName: 64 characters"),
        ({"role": "training"}, "RoleArn: 'training' does not match"),
        ({"output": "bucket"}, "OutputDataConfig.S3OutputPath: 'bucket' does not match"),
        ({"environment": {"A": "x" * 513}}, "Environment.A: 513 characters"),
        ({"environment": {f"A{i}": "" for i in range(101)}}, "Environment: 101 entries, at most 100"),
        ({"environment": {"1A": ""}}, "the key '1A' of Environment"),
        (
            {"groups": groups_of("ml.g5.xlarge:1", ["ml.g5.2xlarge:1"])},
            "group 'cpu' is of ml.g5.2xlarge, which has GPUs",
        ),
        (
            {"groups": groups_of("ml.p3.2xlarge:1", ["ml.c5.xlarge:1"]), "kms_key": "alias/x"},
            "the key of volumes must be an id or ARN, not an alias: 'alias/x'",
        ),
        ({"hyperparameters": {"note": "x" * 2500}}, "HyperParameters.note: 2502 characters"),
        ({"tags": {f"t{i}": "" for i in range(51)}}, "Tags: 51 entries, at most 50"),
        ({"subnets": ("subnet-1",)}, "a VPC needs both subnets and security groups"),
        ({"max_run_s": 0}, "MaxRuntimeInSeconds: 0, at least 1"),
        (
            {"channels": (Channel(name="a", uri="s3://b/a", groups=("gpu",)), Channel(name="b", uri="s3://b/b"))},
            "either all channels name their groups or none does: b name none",
        ),
        ({"channels": (Channel(name="a", uri="s3://b/a", groups=("tpu",)),)}, "channel 'a' is for group 'tpu'"),
        ({"channels": (Channel(name="a", uri="s3://b/a"),) * 2}, "2 channels are named 'a'"),
        ({"channels": (Channel(name="a b", uri="s3://b/a"),)}, "ChannelName: 'a b' does not match"),
    ],
)
def test_what_the_service_would_refuse_is_refused(changed: dict[str, Any], text: str) -> None:
    assert text in refused(**changed)


@pytest.mark.parametrize("name", ["offload_job", "sagemaker_mpi_enabled", *SAGEMAKER_HYPERPARAMETERS])
def test_a_hyperparameter_that_the_script_would_not_get_is_refused(name: str) -> None:
    assert f"the hyperparameter {name!r} cannot be set: the name is reserved" in refused(hyperparameters={name: "1"})


@pytest.mark.parametrize(
    "name",
    ["DB_PASSWORD", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "apikey", "my-secret"],
)
def test_a_secret_is_named_and_not_shown(name: str) -> None:
    for changed in (
        {"environment": {name: "hunter2"}},
        {"hyperparameters": {name: "hunter2"}},
        {"environment": {name: "hunter2"}, "hyperparameters": {name: "true"}},
        {"settings": Settings(script="x.py", args=(f"--{name}", "hunter2"))},
        {"settings": Settings(script="x.py", args=(f"--{name}=hunter2",))},
    ):
        text = refused(**changed)
        assert f"{name} looks like a secret" in text
        assert "hunter2" not in text


@pytest.mark.parametrize(
    "name", ["tokenizer", "max_tokens", "num_tokens", "TOKENIZERS_PARALLELISM", "key", "secretary"]
)
def test_names_that_only_look_a_little_like_it_are_no_secrets(name: str) -> None:
    replace(JOB, environment={"TOKENIZERS_PARALLELISM": "false"}, hyperparameters={name: 1})


def test_what_users_print_is_no_metric() -> None:
    for line in ("val-loss=3.0", "loss=3.0 batch=7", "offload: 3 workers=4", "x samples/s=7"):
        for each in JOB.request()["AlgorithmSpecification"]["MetricDefinitions"]:
            assert re.search(each["Regex"], line) is None, (line, each)


@pytest.mark.parametrize(
    ("gpu", "cpu", "sent"),
    [
        ("ml.p3.2xlarge:1", ["ml.c5.xlarge:1"], True),
        ("ml.g5.xlarge:1", ["ml.c5.xlarge:1"], False),
        ("ml.p3.2xlarge:1", ["ml.r5d.xlarge:1"], False),
        ("ml.g4dn.xlarge:1", ["ml.m5.large:1"], False),
    ],
)
def test_instances_with_disks_of_their_own_take_no_key_for_them(gpu: str, cpu: list[str], sent: bool) -> None:
    request = replace(JOB, groups=groups_of(gpu, cpu), kms_key="1234abcd-12ab-34cd-56ef-1234567890ab").request()
    assert ("VolumeKmsKeyId" in request["ResourceConfig"]) == sent
    assert "KmsKeyId" in request["OutputDataConfig"]


def test_everything_wrong_is_said_at_once() -> None:
    text = refused(name="a_b", role="x", output="y", groups=groups_of("ml.c5.xlarge:1", ["nonsense.large:1"]))
    assert all(word in text for word in ("a_b", "RoleArn", "S3OutputPath", "no GPU", "nonsense.large"))


@pytest.mark.parametrize("text", ["ml.g5.xlarge", "ml.g5.xlarge:", "ml.g5.xlarge:x", ":1", "ml.g5.xlarge:1:2", ""])
def test_a_group_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"such as ml.c5.4xlarge:2; found {text!r}")):
        groups_of(text, [])


def test_a_cap_on_spend_bounds_the_time() -> None:
    groups = groups_of("ml.g5.xlarge:1", ["ml.c5.4xlarge:2"])
    catalog = built_in()
    hourly = catalog["ml.g5.xlarge"].usd_per_hour + 2 * catalog["ml.c5.4xlarge"].usd_per_hour
    seconds = seconds_for(5.0, groups, catalog)
    # The service goes on for two minutes once it stops a job, and then uploads.
    assert (seconds + ENDING_S) * hourly / 3600 <= 5.0 < (seconds + ENDING_S + 1) * hourly / 3600
    with pytest.raises(ConfigError, match=r"\$0.01 buys \d+ s of these instances .* raise max_usd"):
        seconds_for(0.01, groups, catalog)
    with pytest.raises(ConfigError, match="catalog holds no instance type"):
        seconds_for(5.0, [InstanceGroup(name="gpu", instance_type="ml.p9.large", count=1)], catalog)


@settings(max_examples=200)
@given(
    name=st.text(max_size=80),
    key=st.text(max_size=20),
    value=st.text(max_size=600),
    count=st.integers(-1, 3),
    volume=st.integers(-1, 10),
)
def test_what_is_accepted_botocore_accepts_too(name: str, key: str, value: str, count: int, volume: int) -> None:
    """And nothing that users may write ends in another error than one meant for them."""
    group = InstanceGroup(name="gpu", instance_type="ml.g5.xlarge", count=count)
    try:
        job = replace(JOB, name=name, groups=(group,), environment={key: value}, tags={key: value}, volume_gib=volume)
    except ConfigError:
        return
    assert not ParamValidator().validate(job.request(), limits.create_training_job().input_shape).has_errors()
