"""A cluster file for ``ray up`` on AWS: a small on-demand head that neither trains nor preprocesses, and GPU and CPU nodes, each on spot
capacity or on demand as planned. On-demand CPU nodes can replace spot CPU nodes when there is no spot capacity.

Where it stops: Ray itself makes the network, key pair, head's role and security group.
"""

from __future__ import annotations

import re
from typing import Any

from offload.errors import ConfigError, argument
from offload.launch.ray.cluster_files.header import TOKEN_FILE, head_of, make_token, submit, token_folder
from offload.launch.ray.cluster_files.planned import Planned, PlannedNodes
from offload.launch.ray.cluster_files.software import Software
from offload.launch.ray.cluster_files.text import YamlFile, YamlPart

HEAD_TYPE = "m5.large"
HEAD_GIB, NODE_GIB = 150, 200
"""The size of disks: the image with torch and CUDA unpacks to some 20 GiB, and Ray spills objects that do not fit into memory."""
NO_AMI = "ami-FILL-IN"
DRIVER_AMI = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
IDLE_MINUTES = 5
CONTAINER = "offload"
_ARM = re.compile(r"(a1|[a-z]+\d+[a-z]*g[a-z]*)\.")
"""Types with Graviton processors: AWS puts a g after the number of their family."""


def cluster_file(
    planned: Planned, software: Software, *, cluster: str, region: str, ami: str | None, image: str | None
) -> YamlFile:
    """The cluster file. ``ami``: the image of all nodes, with NVIDIA's driver and Docker; None leaves a gap that AWS refuses.
    ``image``: a container image with the requirements; None: Ray's own, in which the nodes install them.

    Raises ConfigError for a type that EC2 does not have, or that cannot start the image of the others.
    """
    return YamlFile(
        head=_head(planned, cluster, region),
        parts=(
            YamlPart(
                content={"cluster_name": cluster},
                why="ray up takes nodes with this name in this region as this cluster's.",
            ),
            YamlPart(
                content={"max_workers": planned.count, "idle_timeout_minutes": IDLE_MINUTES},
                why=f"At most the planned nodes of all types ({planned}), without the head. Idle nodes beyond their type's "
                "min_workers are ended.",
            ),
            YamlPart(
                content={
                    "provider": {
                        "type": "aws",
                        "region": region,
                        "availability_zone": f"{region}a",
                        "cache_stopped_nodes": False,
                        "security_group": {"GroupName": f"offload-{cluster}"},
                    }
                },
                why="One zone: traffic between zones is slower and costs money (with several, separated by commas, Ray tries "
                "them in turn). Nodes are terminated, not stopped, since the disks of stopped nodes cost money. Ray makes "
                "the security group: all traffic between these nodes, and from outside ssh only (from anywhere, with the "
                "key that Ray makes; to use your own group, give each node_config SecurityGroupIds).",
            ),
            YamlPart(content={"auth": {"ssh_user": "ubuntu"}}),
            YamlPart(
                content={"available_node_types": _types(planned, ami or NO_AMI), "head_node_type": "head"},
                why="min_workers: Ray keeps all planned nodes and replaces an interrupted one, since a run uses the nodes "
                "that it finds. If the script itself asks for cores (offload.Cluster(preprocessing_cores=...)), set the CPU "
                "nodes' min_workers to 0, and they come and go. The type cpu-on-demand beside cpu-spot serves requests for "
                "cores that spot capacity does not meet. The head offers no CPUs, so Ray places nothing on it. To read from "
                "S3, nodes need an IamInstanceProfile. A run finds prices by the label instance-type.",
            ),
            YamlPart(
                content={
                    "docker": {
                        "image": image or software.image,
                        "container_name": CONTAINER,
                        "pull_before_run": True,
                        "run_options": ["--ulimit nofile=65536:65536", "--env RAY_AUTH_MODE=token"],
                    }
                },
                why="Ray sizes each container's /dev/shm for its object store. All of Ray's processes require the "
                "token.",
            ),
            YamlPart(
                content={"file_mounts": {"~/.ray": token_folder(cluster)}},
                why=f"The token travels as a file: Ray finds it as ~/.ray/{TOKEN_FILE}, and the head passes it on to the "
                "nodes.",
            ),
            YamlPart(
                content={"setup_commands": [] if image else [software.pip_install]},
                why="The image holds all requirements."
                if image
                else "offload's requirements, at the versions of the machine that printed this file. Installing them takes "
                "minutes on each new node; your own image with them (--image) starts sooner.",
            ),
            YamlPart(
                content={
                    "head_start_ray_commands": [
                        "ray stop",
                        "ulimit -n 65536; ray start --head --port=6379 --object-manager-port=8076 "
                        "--autoscaling-config=~/ray_bootstrap_config.yaml --dashboard-host=127.0.0.1",
                    ],
                    "worker_start_ray_commands": [
                        "ray stop",
                        "ulimit -n 65536; ray start --address=$RAY_HEAD_IP:6379 --object-manager-port=8076",
                    ],
                },
                why="The dashboard, which takes jobs, can be reached through ssh only.",
            ),
        ),
    )


def _head(planned: Planned, cluster: str, region: str) -> str:
    return head_of(
        "ray-aws",
        planned,
        cluster,
        f" {planned.prices} (SageMaker's unless a catalog says otherwise; EC2 costs less), without the head",
        {
            "Before": [
                make_token(cluster),
                "AMI: one with NVIDIA's driver and Docker (--ami, or ImageId below), such as the one that this prints:",
                f"aws ssm get-parameter --region {region} --query Parameter.Value --output text \\",
                f"    --name {DRIVER_AMI}",
            ],
            "Up": ["ray up -y cluster.yaml"],
            "Wait": [
                f"ray exec cluster.yaml 'ray status'   # until it shows {planned.gpu.count} {_type_name(planned.gpu)}; ray up ends earlier"
            ],
            "Submit": submit(cluster, "ray dashboard cluster.yaml"),
            "Down": ["ray down -y cluster.yaml   # ends all nodes: until then they cost money"],
        },
    )


def _types(planned: Planned, ami: str) -> dict[str, Any]:
    types: dict[str, Any] = {
        "head": {
            "resources": {"CPU": 0},
            "labels": {"ray.io/market-type": "on-demand"},
            "node_config": _node(HEAD_TYPE, ami, HEAD_GIB),
        },
    }
    for nodes in planned.groups:
        types[_type_name(nodes)] = _workers(nodes, ami, spot=nodes.spot, least=nodes.count)
    if planned.cpu is not None and planned.cpu.spot:
        # Of two suitable types, Ray takes the one with the higher priority, unless it was recently unavailable.
        types["cpu-spot"]["priority"] = 1
        types["cpu-on-demand"] = _workers(planned.cpu, ami, spot=False, least=0)
    return types


def _type_name(nodes: PlannedNodes) -> str:
    return f"{'gpu' if nodes.kind.gpus else 'cpu'}-{'spot' if nodes.spot else 'on-demand'}"


def _workers(nodes: PlannedNodes, ami: str, *, spot: bool, least: int) -> dict[str, Any]:
    kind = nodes.kind
    return {
        "min_workers": least,
        "max_workers": nodes.count,
        "resources": {"CPU": kind.vcpus} | ({"GPU": kind.gpus} if kind.gpus else {}),
        "labels": {"instance-type": kind.name, "ray.io/market-type": "spot" if spot else "on-demand"},
        "node_config": _node(_ec2_type(kind.name), ami, NODE_GIB)
        | ({"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}),
    }


def _node(instance_type: str, ami: str, disk_gib: int) -> dict[str, Any]:
    return {
        "InstanceType": instance_type,
        "ImageId": ami,
        "BlockDeviceMappings": [
            {
                "DeviceName": "/dev/sda1",
                "Ebs": {"VolumeSize": disk_gib, "VolumeType": "gp3", "DeleteOnTermination": True, "Encrypted": True},
            }
        ],
        # Version 2 of the metadata service, reachable only from the node: containers share its network, so one hop suffices.
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
    }


def _ec2_type(name: str) -> str:
    """EC2's name of SageMaker's ``ml.g5.xlarge``; other names are EC2's own."""
    instance_type = name.removeprefix("ml.")
    if instance_type.count(".") != 1:
        raise ConfigError(
            f"{name} is not an EC2 instance type; EC2's types have names such as g5.xlarge. Rename the catalog's nodes, or pass "
            f"{argument('emit', 'hosts', python='the plan to hosts.cluster_file')}."
        )
    if _ARM.match(instance_type):
        raise ConfigError(
            f"{name} has Arm processors, and all nodes of a cluster file start the same images, for Intel and AMD: plan with types such as "
            "ml.c5.4xlarge."
        )
    return instance_type
