"""Cluster files rendered from a plan: accepted by those who read them, with the nodes that were planned, and without secrets."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from referencing import Registry, Resource

from offload.errors import ConfigError
from offload.launch.ray.cluster_files import aws, kuberay, own_hosts
from offload.launch.ray.cluster_files.planned import Planned, planned
from offload.launch.ray.cluster_files.software import Software, installed
from offload.launch.ray.cluster_files.text import YamlFile
from offload.model import Catalog
from offload.model.planning.plans import Plan
from offload.prices import built_in
from tests.emulation.hosts import Hosts
from tests.emulation.netns import HostSpec
from tests.helpers import DATA, PROGRAMS, moto_server, offload_here, plan_document, require_hosts
from tests.model.test_profile import WHOLE

CATALOG = built_in()
SOFTWARE = Software(ray="2.60.0", python=(3, 11), requirements=("ray[data]==2.60.0", "torch==2.15.0"))
AMI = "ami-0123456789abcdef0"


def plan_of(shape: dict[str, int], spot: str = "all") -> Planned:
    return planned(Plan.from_document(plan_document(shape, spot=spot), "plan.json"), CATALOG, "plan.json")


RENDER: dict[str, Callable[[Planned], YamlFile]] = {
    "ray-aws": lambda plan: aws.cluster_file(plan, SOFTWARE, cluster="train", region="eu-west-1", ami=AMI, image=None),
    "kuberay": lambda plan: kuberay.cluster_file(plan, SOFTWARE, cluster="train", image=None),
    "hosts": lambda plan: own_hosts.cluster_file(plan, SOFTWARE, cluster="train", hosts=None),
}
SHAPE = {"ml.g5.xlarge": 2, "ml.c5.4xlarge": 3}
shapes = st.builds(
    lambda gpu, gpus, cpu, cpus: {gpu: gpus, cpu: cpus},
    st.sampled_from([name for name, kind in CATALOG.nodes.items() if kind.gpus]),
    st.integers(1, 20),
    st.sampled_from([name for name, kind in CATALOG.nodes.items() if not kind.gpus]),
    st.integers(0, 40),
)


spots = st.sampled_from(["none", "cpu", "all"])
few = settings(max_examples=30)  # each goes through a schema, which takes its time


def rendered(kind: str, shape: dict[str, int], spot: str = "all") -> dict[str, Any]:
    """The file as its reader sees it: comments and all went through YAML."""
    file = RENDER[kind](plan_of(shape, spot))
    read: dict[str, Any] = yaml.safe_load(file.text())
    assert read == file.document()
    return read


# --- accepted by those who read them ----------------------------------------------------------------------------------


def accepted_by_ray(config: dict[str, Any]) -> dict[str, Any]:
    """The file with Ray's defaults, checked by Ray's schema as it is and by Ray itself once it is filled in."""
    import ray.autoscaler
    from ray.autoscaler._private.util import prepare_config, validate_config

    schema = json.loads((Path(str(ray.autoscaler.__file__)).parent / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    filled: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(filled)
    return filled


def _kuberay(kind: str) -> jsonschema.protocols.Validator:
    def schema(name: str) -> Any:
        return json.loads((DATA / name).read_text())

    referred = {"kubernetes": "kubernetes-1.34-podtemplate.json", "raycluster": "kuberay-1.6-raycluster.json"}
    registry: Registry[Any] = Registry().with_resources(
        (name, Resource.from_contents(schema(file))) for name, file in referred.items()
    )
    return jsonschema.Draft202012Validator(schema(f"kuberay-1.6-{kind}.json"), registry=registry)


KUBERAY, KUBERAY_JOB = _kuberay("raycluster"), _kuberay("rayjob")


@few
@given(shape=shapes, spot=spots)
def test_a_job_brings_up_the_same_cluster_and_takes_it_down(shape: dict[str, int], spot: str) -> None:
    command = "offload run /app/train.py --gpus-per-worker 1 -- --name 'a: b' #1"
    plan = plan_of(shape, spot)
    job = yaml.safe_load(kuberay.cluster_file(plan, SOFTWARE, cluster="train", image="mine:1", job=command).text())
    cluster = yaml.safe_load(kuberay.cluster_file(plan, SOFTWARE, cluster="train", image="mine:1").text())
    KUBERAY_JOB.validate(job)
    assert (job["kind"], job["metadata"]) == ("RayJob", cluster["metadata"])
    spec = job.pop("spec")
    assert spec.pop("rayClusterSpec") == cluster["spec"]
    KUBERAY.validate(cluster)
    assert spec == {"entrypoint": command, "shutdownAfterJobFinishes": True, "backoffLimit": 0}


@few
@given(shape=shapes)
def test_any_planned_shape_makes_a_file_for_aws_with_its_nodes(shape: dict[str, int]) -> None:
    filled = accepted_by_ray(rendered("ray-aws", shape))
    gpus, cpus = shape.values()
    types = filled["available_node_types"]
    assert filled["max_workers"] == gpus + cpus
    assert (types["gpu-spot"]["min_workers"], types["gpu-spot"]["max_workers"]) == (gpus, gpus)
    assert types["head"]["max_workers"] == 0
    assert types["head"]["resources"] == {"CPU": 0}
    if not cpus:
        assert set(types) == {"head", "gpu-spot"}
        return
    assert (types["cpu-spot"]["min_workers"], types["cpu-spot"]["max_workers"]) == (cpus, cpus)
    assert (types["cpu-on-demand"]["min_workers"], types["cpu-on-demand"]["max_workers"]) == (0, cpus)


@few
@given(shape=shapes, spot=spots)
def test_on_aws_as_many_nodes_as_planned_are_of_the_market_that_was_planned(shape: dict[str, int], spot: str) -> None:
    types = accepted_by_ray(rendered("ray-aws", shape, spot))["available_node_types"]
    kept: dict[str, list[bool]] = {"GPU": [], "CPU": []}
    for name, each in types.items():
        on_spot = each["node_config"].get("InstanceMarketOptions") == {"MarketType": "spot"}
        assert each["labels"]["ray.io/market-type"] == ("spot" if on_spot else "on-demand")
        if name != "head":
            kept["GPU" if "GPU" in each["resources"] else "CPU"] += [on_spot] * each["min_workers"]
    gpus, cpus = shape.values()
    assert kept == {"GPU": [spot == "all"] * gpus, "CPU": [spot != "none"] * cpus}


@few
@given(shape=shapes, spot=spots)
def test_pods_are_on_spot_nodes_where_that_was_planned_and_nowhere_else(shape: dict[str, int], spot: str) -> None:
    manifest = rendered("kuberay", shape, spot)
    KUBERAY.validate(manifest)
    for group in manifest["spec"]["workerGroupSpecs"]:
        planned_on_spot = spot == "all" or (spot == "cpu" and group["groupName"] == "cpu")
        assert group["labels"]["ray.io/market-type"] == ("spot" if planned_on_spot else "on-demand")
        pod = group["template"]["spec"]
        terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]

        def taken(node: dict[str, str], terms: list[Any] = terms) -> bool:
            return any(
                all((node.get(e["key"]) in e["values"]) == (e["operator"] == "In") for e in term["matchExpressions"])
                for term in terms
            )

        assert all(taken({key: value}) == planned_on_spot for key, value in kuberay.SPOT.items())
        assert taken({}) == (not planned_on_spot)
        assert taken({"karpenter.sh/capacity-type": "on-demand"}) == (not planned_on_spot)
        tolerated = {each["key"] for each in pod["tolerations"]}
        assert (set(kuberay.SPOT_TAINTS) <= tolerated) == planned_on_spot


@pytest.mark.parametrize("kind", ["ray-aws", "kuberay"])
def test_a_plan_without_a_word_on_spot_is_on_demand(kind: str) -> None:
    old = planned(Plan.from_document(plan_document(SHAPE), "plan.json"), CATALOG, "plan.json")
    assert RENDER[kind](old).text() == RENDER[kind](plan_of(SHAPE, "none")).text()


@pytest.mark.parametrize(
    ("spot", "prices"),
    [
        ("none", "at the plan's prices on demand"),
        ("cpu", "at the plan's prices, spot for the CPU nodes"),
        ("all", "at the plan's spot prices"),
    ],
)
def test_the_head_says_of_which_prices_the_cost_is(spot: str, prices: str) -> None:
    for kind in ("ray-aws", "kuberay"):
        assert prices in re.sub(r"\s+#? *", " ", RENDER[kind](plan_of(SHAPE, spot)).text())


def test_spot_capacity_may_be_asked_for_beside_a_plan(folder: Path) -> None:
    done = offload_plan("--plan", "plan.json", "--emit", "ray-aws", "--spot", "all", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "gpu-spot" in yaml.safe_load(done.stdout)["available_node_types"]
    assert "prices on demand, and less on spot capacity" in re.sub(r"\s+#? *", " ", done.stdout)


@few
@given(shape=shapes)
def test_any_planned_shape_makes_a_manifest_with_its_nodes(shape: dict[str, int]) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler._private.util import validate_config

    manifest = rendered("kuberay", shape)
    KUBERAY.validate(manifest)
    # What Ray's autoscaler, which runs beside the head, makes of it.
    manifest["metadata"]["namespace"] = "default"
    config = _derive_autoscaling_config_from_ray_cr(manifest)
    validate_config(config)
    found = {
        group["labels"]["instance-type"]: (group["min_workers"], group["max_workers"], group["resources"].get("GPU", 0))
        for name, group in config["available_node_types"].items()
        if name != "headgroup"
    }
    assert found == {name: (count, count, CATALOG[name].gpus) for name, count in shape.items() if count}
    assert config["available_node_types"]["headgroup"]["resources"]["CPU"] == 0
    for group in manifest["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        kind = CATALOG[group["labels"]["instance-type"]]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert (
            1 <= int(container["resources"]["limits"]["cpu"]) < kind.vcpus
        )  # what fits on a node beside Kubernetes' own


@few
@given(shape=shapes)
def test_any_planned_shape_makes_a_file_for_as_many_hosts(shape: dict[str, int]) -> None:
    config = rendered("hosts", shape)
    accepted_by_ray(config)
    listed = [config["provider"]["head_ip"], *config["provider"]["worker_ips"]]
    assert len(listed) == len(set(listed)) == sum(shape.values())
    assert config["max_workers"] == len(config["provider"]["worker_ips"])


@pytest.mark.parametrize(
    "where",
    [
        ["spec"],
        ["spec", "authOptions"],
        ["spec", "headGroupSpec"],
        ["spec", "workerGroupSpecs", 0],
        ["spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "lifecycle"],
        ["spec", "workerGroupSpecs", 0, "template", "spec", "volumes", 0, "emptyDir"],
    ],
)
def test_the_schema_refuses_a_field_that_kubernetes_would_drop(where: list[Any]) -> None:
    manifest = rendered("kuberay", SHAPE)
    at: Any = manifest
    for step in where:
        at = at[step]
    at["maxReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="maxReplica"):
        KUBERAY.validate(manifest)


@pytest.mark.parametrize("kind", RENDER)
def test_the_same_plan_gives_the_same_file_without_secrets(kind: str) -> None:
    text, again = (RENDER[kind](plan_of(SHAPE)).text() for _ in range(2))
    assert text == again
    assert not re.search(r"\b[0-9a-f]{32,}\b", text)
    assert "RAY_AUTH_TOKEN:" not in text
    assert "AWS_SECRET" not in text
    assert "310 samples/s for $3.04 an hour" in " ".join(text.replace("# ", "").split())
    assert "2 × ml.g5.xlarge + 3 × ml.c5.4xlarge" in text


# --- AWS --------------------------------------------------------------------------------------------------------------


def test_nodes_on_aws_are_what_the_catalog_says_and_their_metadata_is_guarded() -> None:
    types = rendered("ray-aws", SHAPE)["available_node_types"]
    for name, node in types.items():
        made = node["node_config"]
        assert made["ImageId"] == AMI
        assert made["MetadataOptions"]["HttpTokens"] == "required"
        (disk,) = made["BlockDeviceMappings"]
        assert disk["Ebs"]["VolumeType"] == "gp3"
        assert disk["Ebs"]["VolumeSize"] >= 100
        market = "spot" if name.endswith("-spot") else "on-demand"
        assert node["labels"]["ray.io/market-type"] == market
        assert ("InstanceMarketOptions" in made) == (market == "spot")
    assert types["gpu-spot"]["node_config"]["InstanceType"] == "g5.xlarge"
    assert types["gpu-spot"]["resources"] == {"CPU": 4, "GPU": 1}
    assert types["gpu-spot"]["labels"]["instance-type"] == "ml.g5.xlarge"
    assert types["cpu-spot"]["priority"] > types["cpu-on-demand"].get("priority", 0)


@pytest.mark.slow
def test_ray_up_makes_of_it_what_was_meant(tmp_path: Path) -> None:
    """Ray's own code, against a server that answers as EC2 and IAM do."""
    text = aws.cluster_file(
        plan_of(SHAPE), SOFTWARE, cluster="train", region="us-east-1", ami="ami-12c6146b", image=None
    ).text()
    script = PROGRAMS / "ray_up_on_aws.py"
    with moto_server() as (environment, _):
        done = subprocess.run(
            [sys.executable, script], input=text, capture_output=True, text=True, timeout=800,
            env={**os.environ, **environment, "HOME": str(tmp_path)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["open"] == [
        {"port": None, "from": [], "itself": [True]},
        {"port": 22, "from": ["0.0.0.0/0"], "itself": []},
    ]
    assert {name: (node["type"], node["spot"]) for name, node in told["nodes"].items()} == {
        "head": ("m5.large", False),
        "gpu-spot": ("g5.xlarge", True),
        "cpu-spot": ("c5.4xlarge", True),
        "cpu-on-demand": ("c5.4xlarge", False),
    }
    for name, node in told["nodes"].items():
        assert node["zone"] == "us-east-1a"
        assert node["tokens"] == "required"
        assert node["groups"] == ["offload-train"]
        assert node["disk"] == ["gp3", aws.HEAD_GIB if name == "head" else aws.NODE_GIB, True]
    # What EC2 says of a type leaves alone what the file says.
    assert told["resources"]["head"]["CPU"] == 0
    assert {key: told["resources"]["gpu-spot"][key] for key in ("CPU", "GPU")} == {"CPU": 4, "GPU": 1}


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        *((name, True) for name in ("c7g.4xlarge", "ml.m6gd.2xlarge", "c6gn.xlarge", "im4gn.large", "a1.4xlarge")),
        *((name, False) for name in ("g6e.xlarge", "ml.g4dn.xlarge", "c5n.9xlarge", "i3en.large")),
    ],
)
def test_on_aws_nodes_whose_processors_cannot_run_the_image_are_refused(name: str, arm: bool) -> None:
    catalog = Catalog({**CATALOG.nodes, name: dataclasses.replace(CATALOG["ml.c5.4xlarge"], name=name)})
    asked = Plan.from_document(plan_document({"ml.g5.xlarge": 1, name: 2}, spot="none"), "plan.json")
    with pytest.raises(ConfigError, match=f"{name} has Arm processors") if arm else contextlib.nullcontext():
        RENDER["ray-aws"](planned(asked, catalog, "plan.json"))


def test_an_image_of_ones_own_needs_no_installation() -> None:
    def commands(image: str | None) -> tuple[list[str], str]:
        file = aws.cluster_file(plan_of(SHAPE), SOFTWARE, cluster="c", region="us-east-1", ami=AMI, image=image)
        made = file.document()
        return made["setup_commands"], made["docker"]["image"]

    assert commands("registry/mine:1") == ([], "registry/mine:1")
    assert commands(None) == (
        ["pip install --no-cache-dir 'ray[data]==2.60.0' torch==2.15.0"],
        "rayproject/ray:2.60.0-py311-gpu",
    )


def test_nodes_get_the_ray_that_the_user_chose() -> None:
    software = installed("2.55.1")
    assert software.image.startswith("rayproject/ray:2.55.1-py3")
    assert "ray[data]==2.55.1" in software.requirements
    manifest = kuberay.cluster_file(plan_of(SHAPE), software, cluster="c", image=None, job=None).document()
    assert manifest["spec"]["rayVersion"] == "2.55.1"


def test_nodes_get_the_versions_that_are_installed_here() -> None:
    here = installed()
    assert here.python == sys.version_info[:2]
    assert here.ray == importlib.metadata.version("ray")
    assert f"torch=={importlib.metadata.version('torch').split('+')[0]}" in here.requirements
    assert any(line.startswith("ray[") and line.endswith(f"=={here.ray}") for line in here.requirements)


# --- Kubernetes -------------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.hosts
@pytest.mark.soak
def test_a_pod_that_is_deleted_leaves_the_cluster_in_order() -> None:
    """The hook as the kubelet runs it: inside, with the container's environment."""
    require_hosts()
    manifest = rendered("kuberay", SHAPE)
    for group in manifest["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert pod["terminationGracePeriodSeconds"] >= 120
    # Waits until the node has gone, and prints what Ray says of it.
    look = (
        "import ray, time\n"
        "ray.init(log_to_driver=False)\n"
        "while not (gone := [n for n in ray.nodes() if not n['Alive']]): time.sleep(0.1)\n"
        "print(gone[0]['NodeName'], gone[0]['DeathReasonMessage'], sep=': ')\n"
    )
    with Hosts({"head": HostSpec(cpus=1.0), "pod": HostSpec(cpus=1.0)}) as two:
        two.start_ray(head="head")
        path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        hook = two["pod"].popen(command, env=path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seen = two["head"].run([sys.executable, "-c", look], timeout=800, check=True)
        assert hook.poll() is None  # it keeps the pod until its container ends, which this host's does not
    assert seen.stdout.strip() == "pod: the pod is being deleted"


# --- hosts ------------------------------------------------------------------------------------------------------------


def test_listed_hosts_stand_in_the_file_the_first_as_head() -> None:
    listed = own_hosts.parse_hosts("# ours\n10.0.0.1\ngpu-2.example  # the other one\n\n10.0.0.3\n", "hosts.txt")
    plan = plan_of({"ml.g5.xlarge": 2, "ml.c5.4xlarge": 1})
    config = own_hosts.cluster_file(plan, SOFTWARE, cluster="c", hosts=listed).document()
    accepted_by_ray(config)
    assert config["provider"] == {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["gpu-2.example", "10.0.0.3"]}


def test_hosts_of_ones_own_get_the_dashboard_through_which_jobs_come() -> None:
    text = RENDER["hosts"](plan_of(SHAPE)).text()
    assert "pip install --no-cache-dir 'ray[data,default]==2.60.0' torch==2.15.0" in text


def test_a_job_needs_offload_in_its_image() -> None:
    def head(job: str | None) -> str:
        file = kuberay.cluster_file(plan_of(SHAPE), SOFTWARE, cluster="train", image="registry/mine:1", job=job)
        return file.text().partition("\n\n")[0]

    assert "pip install ./offload" in head("offload run /app/train.py")
    assert "pip install ./offload" not in head(None)  # a job that is submitted ships offload


@pytest.mark.parametrize("has_gpus", [True, False])
def test_a_host_says_which_of_the_planned_types_it_is(tmp_path: Path, has_gpus: bool) -> None:
    """The command that starts Ray, run by a shell, with stand-ins for the two programs that it calls."""
    commands = rendered("hosts", SHAPE)
    for name, script in {
        "ray": 'echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN_PATH $@"',
        "nvidia-smi": f"exit {int(not has_gpus)}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "HOME": "/home/me", "RAY_HEAD_IP": "10.0.0.1"}
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        done = subprocess.run(
            ["bash", "-c", commands[key][-1]], capture_output=True, text=True, check=True, env=environment, timeout=800
        )
        assert done.stdout.startswith("token /home/me/.offload/train/auth_token start ")
        assert f"--labels=instance-type={'ml.g5.xlarge' if has_gpus else 'ml.c5.4xlarge'} " in done.stdout
        assert ("--address=10.0.0.1:6379" in done.stdout) == (key == "worker_start_ray_commands")


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.hosts
@pytest.mark.slow
def test_the_commands_in_the_head_bring_the_cluster_up_by_hand(tmp_path: Path) -> None:
    require_hosts()
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text("#!/bin/sh\n")
    stand_in.chmod(0o755)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    with Hosts({"first": HostSpec(cpus=1.0), "second": HostSpec(cpus=1.0)}) as two:
        plan = plan_of({"ml.g5.xlarge": 1, "ml.c5.4xlarge": 1})
        addresses = tuple(host.address for host in (two["first"], two["second"]))
        text = own_hosts.cluster_file(plan, SOFTWARE, cluster="train", hosts=addresses).text()
        (token,) = re.findall(r"^# Before: +(.*)$", text, re.MULTILINE)
        starts = re.findall(r"^# +(export .*; ray start .*)$", text, re.MULTILINE)
        assert len(starts) == 2
        secret = tmp_path / "token"
        for name, start in zip(("first", "second"), starts, strict=True):
            environment = {"PATH": f"{tmp_path}:{path}" if name == "first" else path}
            run = functools.partial(two[name].run, timeout=800, check=True, env=environment)
            run(["bash", "-c", token])
            # All have the same one.
            kept = "$HOME/.offload/train/auth_token"
            run(["bash", "-c", f"cp {kept} {secret}" if name == "first" else f"cp {secret} {kept}"])
            # No route leads out of these hosts, by which Ray would find their addresses.
            run(["bash", "-c", f"{start} --node-ip-address={two[name].address}"])
        look = "import json, ray; ray.init(address='auto', log_to_driver=False); print(json.dumps([n['Labels'] for n in ray.nodes()]))"
        joined = "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$HOME/.offload/train/auth_token"
        done = two["second"].run(
            ["bash", "-c", f'{joined}; {sys.executable} -c "{look}"'], timeout=800, check=True, env={"PATH": path}
        )
    labels = json.loads(done.stdout.splitlines()[-1])
    assert sorted(label["instance-type"] for label in labels) == ["ml.c5.4xlarge", "ml.g5.xlarge"]


# --- the commands in the head -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RENDER)
def test_a_script_is_submitted_once_the_gpus_are_there_with_a_place_for_checkpoints(kind: str) -> None:
    text = RENDER[kind](plan_of(SHAPE)).text()
    (wait,) = re.findall(r"^# Wait: +(.*)$", text, re.MULTILINE)
    assert "until" in wait
    (launch,) = re.findall(r"^# +(offload launch ray .*)$", text, re.MULTILINE)
    assert "--gpus-per-worker 1" in launch
    assert "--storage-path s3://" in launch
    assert text.index(wait) < text.index(launch)


def test_the_token_is_fetched_once_the_operator_has_made_it(tmp_path: Path) -> None:
    """The commands, run by a shell, with a stand-in for kubectl that knows the Secret at the third time of asking."""
    text = RENDER["kuberay"](plan_of(SHAPE)).text()
    _, after = text.split("kubectl apply -f cluster.yaml\n")
    commands = re.sub("^# ", "", after.split("# Wait:")[0], flags=re.MULTILINE)
    (tmp_path / "kubectl").write_text(
        '#!/bin/sh\necho >> "$HOME/asked"\n[ $(wc -l < "$HOME/asked") -gt 2 ] || exit 1\necho c2VjcmV0\n'
    )
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for name in ("kubectl", "sleep"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "HOME": str(tmp_path)}
    subprocess.run(["bash", "-c", commands], check=True, env=environment, timeout=800)
    assert (tmp_path / ".offload" / "train" / "auth_token").read_text() == "secret"


def test_hosts_that_ray_down_leaves_running_are_named() -> None:
    def down(shape: dict[str, int]) -> str:
        (line,) = re.findall(r"^# Down: +(.*)$", RENDER["hosts"](plan_of(shape)).text(), re.MULTILINE)
        return str(line)

    assert "run ray stop on the others" in down(SHAPE)
    assert "the others" not in down({"ml.g5.xlarge": 1})


# --- the token --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ray-aws", "hosts"])
def test_the_command_in_the_head_makes_a_token_for_its_owner_alone(tmp_path: Path, kind: str) -> None:
    text = RENDER[kind](plan_of(SHAPE)).text()
    (command,) = re.findall(r"^# Before: +(.*)$", text, re.MULTILINE)
    subprocess.run(
        ["bash", "-c", command], check=True, env={"PATH": "/bin:/usr/bin", "HOME": str(tmp_path)}, timeout=800
    )
    token = tmp_path / ".offload" / "train" / "auth_token"
    first = token.read_text()
    subprocess.run(
        ["bash", "-c", command], check=True, env={"PATH": "/bin:/usr/bin", "HOME": str(tmp_path)}, timeout=800
    )
    assert token.read_text() == first, "a cluster that runs would refuse another"
    assert re.fullmatch(r"[0-9a-f]{64}\n", token.read_text())
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ([], "is not a plan"),
        ({"schema": "offload.profile/1"}, "has schema 'offload.profile/1', not 'offload.plan/1'"),
        ({"schema": "offload.plan/1"}, "is not a plan: it has no field 'candidates'. Make it with offload plan -o"),
        (plan_document(SHAPE, recommended=None), "recommends no candidate"),
        (plan_document(SHAPE, candidates=[]), "recommends no candidate"),
        (
            plan_document(SHAPE, recommended=3),
            "recommended must be at most 0 (the number of a candidate, from 0), found 3",
        ),
        (plan_document(SHAPE, recommended=-1), "recommended must be at least 0"),
        (plan_document({"ml.c5.4xlarge": 2}), "recommends 0 types of nodes with GPUs and 1 without (ml.c5.4xlarge)"),
        (plan_document({"ml.g5.xlarge": 0}), "recommends 0 types of nodes with GPUs and 0 without (no nodes)"),
        (plan_document({"ml.g5.xlarge": 1, "ml.p3.2xlarge": 1}), "recommends 2 types of nodes with GPUs"),
        (plan_document({"ml.g5.xlrage": 1}), "no instance type 'ml.g5.xlrage'. Nearest: ml.g5.xlarge"),
        (plan_document({"ml.g5.xlarge": 1.5}), "candidates[0].shape['ml.g5.xlarge'] must be a whole number"),
        (plan_document({"ml.g5.xlarge": 10**7}), "candidates[0].shape['ml.g5.xlarge'] must be at most 100,000"),
        (plan_document(SHAPE, spot="some"), 'spot must be "none", "cpu" or "all"'),
        (plan_document({"our box": 1}), "'our box' cannot be the label of a node"),
    ],
)
def test_what_is_no_plan_for_a_cluster_is_refused(plan: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        planned(Plan.from_document(plan, "plan.json"), CATALOG, "plan.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10.0.0.1\n10.0.0.2; rm -rf /\n", "hosts.txt, line 2: '10.0.0.2; rm -rf /' is not an address"),
        ("10.0.0.1:22\n", "hosts.txt, line 1: '10.0.0.1:22' is not an address"),
        ("a\nb\na\n", "hosts.txt, line 3: a is repeated"),
        ("a\nb\n", "hosts lists 2 hosts, and the plan is for 5 (2 × ml.g5.xlarge + 3 × ml.c5.4xlarge)"),
    ],
)
def test_hosts_that_are_none_or_not_as_many_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        own_hosts.cluster_file(plan_of(SHAPE), SOFTWARE, cluster="c", hosts=own_hosts.parse_hosts(text, "hosts.txt"))


# --- as a user meets it -----------------------------------------------------------------------------------------------


def offload_plan(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return offload_here("plan", *arguments, cwd=cwd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "p.json").write_text(json.dumps(WHOLE))
    (tmp_path / "plan.json").write_text(json.dumps(plan_document(SHAPE)))
    (tmp_path / "nothing.json").write_text(json.dumps(plan_document(SHAPE, recommended=None)))
    (tmp_path / "half.json").write_text('{"schema": "off')
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "own.toml").write_text(
        "[nodes.tower]\nvcpus = 8\nmemory_gib = 32\ngpus = 1\nnetwork_gbps = 1\nusd_per_hour = 0.1\n"
    )
    (tmp_path / "own.json").write_text(json.dumps(plan_document({"tower": 1})))
    return tmp_path


PROFILE = ("--profile", "p.json", "--gpu-type", "ml.g5.xlarge", "--cpu-type", "ml.c5.4xlarge", "--cpu-nodes", "0..4")


@pytest.mark.parametrize("kind", RENDER)
def test_a_profile_becomes_a_cluster_file_on_stdout_and_a_table_on_stderr(folder: Path, kind: str) -> None:
    done = offload_plan(*PROFILE, "--emit", kind, "-o", "made.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    made = json.loads((folder / "made.json").read_text())
    (folder / "cluster.yaml").write_text(done.stdout)
    assert yaml.safe_load(done.stdout)
    assert "recommended, = the single instance" in done.stderr
    assert "→" not in done.stdout
    # The plan that was written gives the same file.
    again = offload_plan("--plan", "made.json", "--emit", kind, cwd=folder)
    assert again.stdout == done.stdout
    assert again.stderr == ""
    shape = made["candidates"][made["recommended"]]["shape"]
    assert all(f"{count} × {name}" in done.stdout for name, count in shape.items())


def test_options_reach_the_file(folder: Path) -> None:
    done = offload_plan(
        "--plan", "plan.json", "--emit", "ray-aws", "--region", "eu-central-1", "--ami", AMI, "--cluster-name", "mine", cwd=folder
    )  # fmt: skip
    config = yaml.safe_load(done.stdout)
    assert config["cluster_name"] == "mine"
    assert config["provider"]["region"] == "eu-central-1"
    assert config["available_node_types"]["head"]["node_config"]["ImageId"] == AMI
    (folder / "hosts.txt").write_text("a\nb\nc\nd\ne\n")
    done = offload_plan("--plan", "plan.json", "--emit", "hosts", "--hosts", "hosts.txt", "--ray", "2.55.1", cwd=folder)
    assert "'ray[data,default]==2.55.1'" in done.stdout
    assert yaml.safe_load(done.stdout)["provider"]["worker_ips"] == ["b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--plan", "none.json", "--emit", "hosts"), "the plan none.json cannot be read: No such file"),
        (("--plan", "half.json", "--emit", "hosts"), "the plan half.json is not JSON"),
        (("--plan", "p.json", "--emit", "hosts"), "p.json has schema 'offload.profile/1'"),
        (("--plan", "nothing.json", "--emit", "kuberay"), "nothing.json recommends no candidate"),
        (("--plan", "own.json", "--emit", "kuberay"), "no instance type 'tower'"),
        (("--plan", "own.json", "--emit", "ray-aws", "--catalog", "own.toml"), "tower is not an EC2 instance type"),
        (("--plan", "plan.json"), "--plan plan.json needs --emit"),
        (("--plan", "plan.json", "--emit", "kuberay", "--ray", "2.49.2"), "--ray is 2.49.2, and offload needs Ray 2.50 or newer"),
        (("--plan", "plan.json", "--emit", "kuberay", "--ray", "newest"), "--ray must be the full version of a Ray release"),
        (("--plan", "plan.json", "--emit", "hosts", *PROFILE), "--profile is for making one"),
        (("--plan", "plan.json", "--emit", "hosts", "--spot", "all"), "--spot is for --emit ray-aws and kuberay"),
        (("--plan", "plan.json", "--emit", "hosts", "-o", "x.json"), "--output is for making one"),
        (("--plan", "plan.json", "--emit", "hosts", "--hosts", "none.txt"), "the hosts file none.txt cannot be read: No such"),
        (("--plan", "plan.json", "--emit", "hosts", "--hosts", "binary"), "the hosts file binary cannot be read"),
        (("--plan", "plan.json", "--emit", "hosts", "--image", "i"), "--image is for --emit ray-aws and kuberay"),
        (("--plan", "plan.json", "--emit", "kuberay", "--region", "eu-west-1"), "--region is for --emit ray-aws"),
        (("--plan", "plan.json", "--emit", "ray-aws", "--region", "Ireland"), "--region must be an AWS region"),
        (("--plan", "plan.json", "--emit", "ray-aws", "--ami", "ubuntu"), "found 'ubuntu'"),
        (("--plan", "plan.json", "--emit", "hosts", "--cluster-name", "My Cluster"), "found 'My Cluster'"),
        (("--plan", "plan.json", "--emit", "kuberay", "--image", ""), "--image must be the name of a container image"),
        (("--plan", "plan.json", "--emit", "kuberay", "--job", " "), "--job must be a command on one line"),
        (("--plan", "plan.json", "--emit", "kuberay", "--job", "a\nb"), "found 'a\\nb'"),
        (("--plan", "plan.json", "--emit", "ray-aws", "--job", "a"), "--job is for --emit kuberay"),
        ((*PROFILE, "--ami", AMI), "--ami is for --emit ray-aws"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_2(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    done = offload_plan(*arguments, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_one_document_on_stdout_at_a_time(folder: Path) -> None:
    done = offload_plan("--plan", "plan.json", "--emit", "hosts", "--json", cwd=folder)
    assert done.returncode == 2
    assert "--emit and --json both print on stdout" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize(("arguments", "missing"), [((), "--profile"), (("--profile", "p.json"), "--gpu-type")])
def test_what_planning_needs_is_named(folder: Path, arguments: tuple[str, ...], missing: str) -> None:
    done = offload_plan(*arguments, cwd=folder)
    assert done.returncode == 2
    assert f"Missing option '{missing}'" in done.stderr
