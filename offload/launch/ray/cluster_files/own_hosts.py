"""A cluster file for ``ray up`` on your own hosts: the first host is the head, and also works like the others.

Where it stops: the hosts already have Python, Ray and offload's requirements; nothing is installed there.
"""

from __future__ import annotations

import re

from offload.errors import ConfigError, argument
from offload.launch.ray.cluster_files.header import TOKEN_FILE, head_of, make_token, submit, token_folder
from offload.launch.ray.cluster_files.planned import Planned
from offload.launch.ray.cluster_files.software import Software
from offload.launch.ray.cluster_files.text import YamlFile, YamlPart

_ADDRESS = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,251}[A-Za-z0-9])?")


def parse_hosts(text: str, source: str) -> tuple[str, ...]:
    """The addresses in a file, one per line, without comments. Raises ConfigError for an invalid or repeated address."""
    hosts: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        address = line.partition("#")[0].strip()
        if not address:
            continue
        if not _ADDRESS.fullmatch(address) or address.count(":") == 1:  # an IPv6 address has more
            raise ConfigError(
                f"{source}, line {number}: {address!r} is not an address: write one host name or IP address per line, without a port."
            )
        if address in hosts:
            raise ConfigError(f"{source}, line {number}: {address} is repeated; each host is one node.")
        hosts.append(address)
    return tuple(hosts)


def cluster_file(planned: Planned, software: Software, *, cluster: str, hosts: tuple[str, ...] | None) -> YamlFile:
    """The cluster file. ``hosts``: as many hosts as planned, those with GPUs first; None leaves placeholder names.

    Raises ConfigError if their number differs from the plan's.
    """
    if hosts is not None and len(hosts) != planned.count:
        raise ConfigError(
            f"{argument('hosts')} lists {len(hosts)} hosts, and the plan is for {planned.count} ({planned}): list as many, those "
            "with GPUs first."
        )
    head, *others = hosts or _names(planned)
    on_head, on_others = _starts(planned, cluster)
    return YamlFile(
        head=_head(planned, software, cluster, head, on_head, on_others),
        parts=(
            YamlPart(content={"cluster_name": cluster, "max_workers": len(others)}),
            YamlPart(
                content={"provider": {"type": "local", "head_ip": head, "worker_ips": others}},
                why="Hosts with GPUs first. The head must reach the others by ssh, too.",
            ),
            YamlPart(
                content={"auth": {"ssh_user": "ubuntu"}},
                why="The user who logs in on all hosts. Add ssh_private_key: FILE if the key is not ssh's default.",
            ),
            YamlPart(
                content={"file_mounts": {token_folder(cluster): token_folder(cluster)}},
                why="The token travels as a file.",
            ),
            YamlPart(
                content={
                    "head_start_ray_commands": [
                        "ray stop",
                        f"{on_head} --autoscaling-config=~/ray_bootstrap_config.yaml",
                    ],
                    "worker_start_ray_commands": ["ray stop", f"{on_others} --address=$RAY_HEAD_IP:6379"],
                },
                why="ray stop ends any Ray that already runs there. A run finds prices by the label instance-type. The "
                "dashboard, which takes jobs, can be reached through ssh only. Ray's other ports are open on the hosts' "
                "network, which needs a firewall around it.",
            ),
        ),
    )


def _names(planned: Planned) -> list[str]:
    """Placeholder names, for the user to replace with addresses."""
    return [
        f"{'gpu' if group.kind.gpus else 'cpu'}-host-{number}"
        for group in planned.groups
        for number in range(1, group.count + 1)
    ]


def _starts(planned: Planned, cluster: str) -> tuple[str, str]:
    """The commands that start Ray on the head and on the other hosts, without addresses."""
    kind = planned.gpu.kind.name
    if planned.cpu is not None:  # ray up has one command for all hosts: each host detects which of the two types it is
        kind = f"$(nvidia-smi -L >/dev/null 2>&1 && echo {kind} || echo {planned.cpu.kind.name})"
    token = f"$HOME/{token_folder(cluster).removeprefix('~/')}/{TOKEN_FILE}"
    prepare = f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}; ulimit -n 65536; ray start"
    labels = f"--labels=instance-type={kind}"
    return f"{prepare} --head --port=6379 --dashboard-host=127.0.0.1 {labels}", f"{prepare} {labels}"


def _head(planned: Planned, software: Software, cluster: str, head: str, on_head: str, on_others: str) -> str:
    major, minor = software.python
    joined = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token_folder(cluster)}/{TOKEN_FILE}"
    return head_of(
        "hosts",
        planned,
        cluster,
        " if such nodes were rented",
        {
            "Before": [
                make_token(cluster),
                f"on all hosts Python {major}.{minor} and",
                software.pip_install_with_dashboard,
            ],
            "Up": ["ray up -y cluster.yaml"],
            "Or by hand": [
                f"the token as {token_folder(cluster)}/{TOKEN_FILE} on all hosts (mode 600), then on {head}",
                on_head,
                "and on the others",
                f"{on_others} --address={head}:6379",
            ],
            "Wait": [f"ray exec cluster.yaml '{joined} ray status'   # until it shows {planned.count} nodes"],
            "Submit": submit(cluster, "ray dashboard cluster.yaml"),
            "Down": [
                "ray down -y cluster.yaml   # stops Ray on the head only"
                + ("; run ray stop on the others" if planned.count > 1 else "")
            ],
        },
    )
