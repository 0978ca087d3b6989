"""A Ray cluster with an autoscaler on this machine: Ray's own, with its stand-in for a provider, which starts real raylets.

For scripts that run in process, network and mount namespaces of their own (:data:`ALONE`): the stand-in wants Ray's usual ports, and
ends every Ray process that it can see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--net", "--mount", "--kill-child"]
"""What such a script is run by, with its command behind it, once :func:`inside` was put before that."""

IDLE_S = 10.0
HEAD_ID = "f" * 51 + "00000"
PLACE = {"place": 1}  # what a worker reserves: only some nodes have it, as only some have GPUs


def inside(folder: Path, command: list[str]) -> list[str]:
    """``command`` in namespaces of its own, with Ray's session files below ``folder``."""
    session = folder / "ray"
    session.mkdir()
    shell = f'export RAY_TMPDIR=/tmp && mkdir -p /tmp/ray && mount --bind {session} /tmp/ray && ip link set lo up && exec "$@"'
    return [*ALONE, "sh", "-c", shell, "sh", *command]


def start(folder: Path, *, version: int, types: dict[str, Any], idle_s: float = IDLE_S) -> None:
    """Start the head, with 2 CPUs and a place for a worker, and join it. ``version``: of Ray's autoscaler, 1 or 2; ``types``: of
    nodes that it may add."""
    lists = (
        "initialization_commands",
        "setup_commands",
        "head_setup_commands",
        "worker_setup_commands",
        "head_start_ray_commands",
    )
    lists += ("worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter")
    config = {
        "cluster_name": "autoscaled",
        "max_workers": 8,
        # By its module: what the type "fake_multinode" reads is not in Ray's wheel.
        "provider": {
            "type": "external", "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "disable_node_updaters": True, "disable_launch_config_check": True, "worker_liveness_check": False,
            "use_node_id_as_ip": True, "launch_multiple": version == 2, "head_node_id": HEAD_ID,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 2, **PLACE}, "node_config": {}, "max_workers": 0},
            **types,
        },
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": idle_s / 60,
        "file_mounts_sync_continuously": False,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in lists},
    }  # fmt: skip
    path = folder / "cluster.json"  # YAML holds JSON
    path.write_text(json.dumps(config))
    ray_command = str(Path(sys.executable).with_name("ray"))
    subprocess.run(
        [ray_command, "start", "--head", "--num-cpus=2", f"--resources={json.dumps(PLACE)}", f"--autoscaling-config={path}",
         "--disable-usage-stats", "--include-dashboard=false"],
        env={
            **os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID, "RAY_enable_autoscaler_v2": str(version - 1),
        },
        check=True, stdout=sys.stderr,
    )  # fmt: skip
    ray.init(address="auto", log_to_driver=False)


class NodeCount(threading.Thread):
    """How many nodes there are beside the head, whenever that changes: (time, count with a place, count without)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, int, int]] = []
        self.start()

    def run(self) -> None:
        while ray.is_initialized():
            alive = [n["Resources"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != HEAD_ID]
            placed = sum(not resources.keys().isdisjoint(("place", "machine")) for resources in alive)
            if not self.seen or self.seen[-1][1:] != (placed, len(alive) - placed):
                self.seen.append((time.time(), placed, len(alive) - placed))
            time.sleep(0.25)
