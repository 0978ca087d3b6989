"""Run by test_cluster_files.py, in a process of its own: what `ray up` does on AWS before it logs in anywhere, with the file on
stdin: fills it in, makes key, security group and roles, and starts a node of each type. Prints what there is then."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import boto3
import yaml
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.tags import TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

ROLE = "ray-autoscaler-v1"  # Ray would make it too, and wait for half a minute until all of AWS knows it


def main() -> None:
    iam, ec2 = boto3.client("iam"), boto3.client("ec2")
    iam.create_role(RoleName=ROLE, AssumeRolePolicyDocument="{}")
    iam.create_instance_profile(InstanceProfileName=ROLE)
    iam.add_role_to_instance_profile(InstanceProfileName=ROLE, RoleName=ROLE)

    config: dict[str, Any] = prepare_config(yaml.safe_load(sys.stdin))
    config = AWSNodeProvider.fillout_available_node_types_resources(config)
    validate_config(config)
    config = AWSNodeProvider.bootstrap_config(config)
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    for name, node in config["available_node_types"].items():
        kind = "head" if name == config["head_node_type"] else "worker"
        provider.create_node(node["node_config"], {TAG_RAY_NODE_KIND: kind, TAG_RAY_USER_NODE_TYPE: name}, 1)

    made = [instance for group in ec2.describe_instances()["Reservations"] for instance in group["Instances"]]
    disks = {disk["Attachments"][0]["InstanceId"]: disk for disk in ec2.describe_volumes()["Volumes"]}
    group_name = config["provider"]["security_group"]["GroupName"]
    (group,) = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [group_name]}])["SecurityGroups"]
    told = {
        "resources": {name: node["resources"] for name, node in config["available_node_types"].items()},
        "open": [
            {
                "port": rule.get("FromPort"),
                "from": [source["CidrIp"] for source in rule["IpRanges"]],
                "itself": [pair["GroupId"] == group["GroupId"] for pair in rule["UserIdGroupPairs"]],
            }
            for rule in group["IpPermissions"]
        ],
        "nodes": {
            next(tag["Value"] for tag in instance["Tags"] if tag["Key"] == TAG_RAY_USER_NODE_TYPE): {
                "type": instance["InstanceType"],
                "zone": instance["Placement"]["AvailabilityZone"],
                "spot": instance.get("InstanceLifecycle") == "spot",
                "tokens": instance["MetadataOptions"]["HttpTokens"],
                "groups": [found["GroupName"] for found in instance["SecurityGroups"]],
                "disk": [disks[instance["InstanceId"]][key] for key in ("VolumeType", "Size", "Encrypted")],
            }
            for instance in made
        },
    }
    print(json.dumps(told), file=sys.__stdout__)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        main()
