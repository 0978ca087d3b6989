"""A KubeRay manifest: a RayCluster, or a RayJob that brings this cluster up for one command and takes it down.

The cluster has a head that neither trains nor preprocesses, a group of GPU pods and a group of CPU pods. Each pod takes one node of the
planned type, on spot capacity or not as planned. Where it stops: Kubernetes' own autoscaler, or a person, adds the nodes.
"""

from __future__ import annotations

import math
from typing import Any

from offload.launch.ray.cluster_files.header import TOKEN_FILE, head_of, submit, token_folder
from offload.launch.ray.cluster_files.planned import Planned, PlannedNodes
from offload.launch.ray.cluster_files.software import Software
from offload.launch.ray.cluster_files.text import YamlFile, YamlPart

OPERATOR = "1.5.1"  # the first version with authOptions
IDLE_S = 300
GRACE_S = 120  # the time after a spot notice
DRAIN_S = 110  # the part of it in which Ray learns of the notice, and training commits and leaves
HEAD_GIB = 8
GPU = "nvidia.com/gpu"
FOR_POD = 0.85  # share of a node's memory: the rest is for the kubelet and daemon sets, and not all of it is usable
FOR_SHM = 0.35  # share of the pod's memory: Ray's object store takes 30 %
SPOT = {
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
"""The labels of spot nodes on EKS, Karpenter, GKE, AKS."""
SPOT_TAINTS = ("cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority")
"""Taints with which GKE and AKS keep other pods off spot nodes."""

# Without a node's id, ray drain-node drains its own node. Once Ray's processes there end, the container ends, and this command with it.
LEAVE = (
    "ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod is being deleted' "
    f"--deadline-remaining-seconds {DRAIN_S} && sleep {DRAIN_S}"
)
_GROUPS = (
    "The operator makes the token, keeps it in a Secret and gives it to all pods (authOptions). Both groups keep their planned size, and "
    "an interrupted pod is replaced, since a run uses the nodes that it finds. If the script itself asks for cores "
    "(offload.Cluster(preprocessing_cores=...)), set the group cpu's minReplicas to 0. A pod leaves one core and 15 % of its node's "
    "memory to Kubernetes. Before a pod ends (a spot notice, a drained node), its preStop hook tells Ray, so that training commits and "
    "leaves first."
)
_JOB = (
    "The command runs on the head once all pods are there. KubeRay does not repeat it on another cluster: the run itself survives "
    "the loss of workers, and its checkpoints are at its --storage-path. The cluster ends with the command."
)

_FOR_JOB = (
    "the script in the image, or on a volume that you add to the head's pod; and offload itself in the image, for all pods:",
    "    COPY a checkout as ./offload, and RUN pip install ./offload",
)


def cluster_file(
    planned: Planned, software: Software, *, cluster: str, image: str | None, job: str | None = None
) -> YamlFile:
    """The manifest. ``image``: an image with the requirements; None: Ray's own, on which the user must build one. ``job``: the command
    of a RayJob; None: a RayCluster, which stays."""
    spec, groups = _spec(planned, software, image or software.image), _GROUPS
    if job is not None:
        spec = {"entrypoint": job, "shutdownAfterJobFinishes": True, "backoffLimit": 0, "rayClusterSpec": spec}
        groups = f"{_JOB} {groups}"
    return YamlFile(
        head=_head(planned, software, cluster, own_image=image is not None, job=job is not None),
        parts=(
            YamlPart(
                content={
                    "apiVersion": "ray.io/v1",
                    "kind": "RayCluster" if job is None else "RayJob",
                    "metadata": {"name": cluster, "labels": {"app.kubernetes.io/part-of": "offload"}},
                }
            ),
            YamlPart(content={"spec": spec}, why=groups),
        ),
    )


def _head(planned: Planned, software: Software, cluster: str, *, own_image: bool, job: bool) -> str:
    image = [
        "an image with offload's requirements (--image); this file names Ray's own, which lacks them:",
        f"    FROM {software.image}",
        f"    RUN {software.pip_install}",
    ]
    before = [
        f"the KubeRay operator, {OPERATOR} or later, and NVIDIA's device plugin",
        *([] if own_image else image),
        *(_FOR_JOB if job else []),
    ]
    return head_of(
        "kuberay",
        planned,
        cluster,
        f" {planned.prices}, without the head and your Kubernetes",
        {"Before": before, **(_job_steps(cluster) if job else _cluster_steps(planned, cluster))},
    )


def _cluster_steps(planned: Planned, cluster: str) -> dict[str, list[str]]:
    folder = token_folder(cluster)
    return {
        "Up": [
            "kubectl apply -f cluster.yaml",
            f"until kubectl get secret {cluster} >/dev/null 2>&1; do sleep 1; done   # the operator makes it",
            f"(umask 077; mkdir -p {folder}; kubectl get secret {cluster} -o jsonpath='{{.data.auth_token}}' \\",
            f"    | base64 -d > {folder}/{TOKEN_FILE})",
        ],
        "Wait": [f"kubectl get pods --selector ray.io/cluster={cluster}   # until those of {planned.gpu} run"],
        "Submit": submit(cluster, f"kubectl port-forward service/{cluster}-head-svc 8265:8265"),
        "Down": ["kubectl delete -f cluster.yaml   # your Kubernetes then takes the nodes back"],
    }


def _job_steps(cluster: str) -> dict[str, list[str]]:
    return {
        "Run": ["kubectl apply -f cluster.yaml"],
        "Watch": [f"kubectl get rayjob {cluster} --watch"],
        "Log": [f"kubectl logs --follow job/{cluster}   # once its pods run"],
        "Delete": ["kubectl delete -f cluster.yaml   # also ends a running job"],
    }


def _spec(planned: Planned, software: Software, image: str) -> dict[str, Any]:
    head = _container("ray-head", image, {"cpu": "2"}, HEAD_GIB) | {
        "ports": [{"name": "gcs-server", "containerPort": 6379}, {"name": "dashboard", "containerPort": 8265}]
    }
    return {
        "rayVersion": software.ray,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": IDLE_S},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},
            "template": {"spec": _pod(head, HEAD_GIB)},
        },
        "workerGroupSpecs": [_group(nodes, image) for nodes in planned.groups],
    }


def _group(nodes: PlannedNodes, image: str) -> dict[str, Any]:
    kind = nodes.kind
    memory_gib = max(1, math.floor(kind.memory_gib * FOR_POD))
    asked = {"cpu": str(max(1, kind.vcpus - 1))} | ({GPU: str(kind.gpus)} if kind.gpus else {})
    worker = _container("ray-worker", image, asked, memory_gib) | {
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", LEAVE]}}}
    }
    return {
        "groupName": "gpu" if kind.gpus else "cpu",
        "replicas": nodes.count,
        "minReplicas": nodes.count,
        "maxReplicas": nodes.count,
        "labels": {"instance-type": kind.name, "ray.io/market-type": "spot" if nodes.spot else "on-demand"},
        "rayStartParams": {},
        "template": {
            "spec": {
                "terminationGracePeriodSeconds": GRACE_S,
                "nodeSelector": {"node.kubernetes.io/instance-type": kind.name.removeprefix("ml.")},
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": _where(nodes)}},
                "tolerations": [
                    {"key": key, "operator": "Exists", "effect": "NoSchedule"}
                    for key in (*(SPOT_TAINTS if nodes.spot else ()), *((GPU,) if kind.gpus else ()))
                ],
                **_pod(worker, memory_gib),
            }
        },
    }


def _container(name: str, image: str, asked: dict[str, str], memory_gib: int) -> dict[str, Any]:
    """A container whose requests equal its limits: Ray would rely on resources that Kubernetes only lends."""
    resources = asked | {"memory": f"{memory_gib}Gi"}
    return {
        "name": name,
        "image": image,
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }


def _pod(container: dict[str, Any], memory_gib: int) -> dict[str, Any]:
    """A pod with room for the object store: Kubernetes' default /dev/shm has 64 MiB."""
    shm_mib = math.ceil(memory_gib * 1024 * FOR_SHM)
    return {
        "restartPolicy": "Never",  # a restarted pod would be a node that Ray does not know
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_mib}Mi"}}],
    }


def _where(nodes: PlannedNodes) -> dict[str, Any]:
    """Node affinity: spot nodes only, or no spot nodes. The label of spot nodes depends on the provider, so any of them counts."""
    labels = [
        {"key": key, "operator": "In" if nodes.spot else "NotIn", "values": [value]} for key, value in SPOT.items()
    ]
    # One term must hold, with all its expressions.
    return {
        "nodeSelectorTerms": [{"matchExpressions": [label]} for label in labels]
        if nodes.spot
        else [{"matchExpressions": labels}]
    }
