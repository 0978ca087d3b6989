"""``--emit`` of ``offload plan``, which prints a file that brings up the recommended cluster, instead of the table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from offload.cli.parameters import said_on_the_command_line
from offload.errors import ConfigError
from offload.files import read_text
from offload.model.catalog import Catalog
from offload.model.planning.plans import Plan, Spot

KINDS = ("ray-aws", "kuberay", "hosts")
NEEDS = {
    "cluster_name": KINDS,
    "region": ("ray-aws",),
    "ami": ("ray-aws",),
    "image": ("ray-aws", "kuberay"),
    "ray": KINDS,
    "job": ("kuberay",),
    "hosts_path": ("hosts",),
}
"""The kinds of file to which each option applies."""
EMIT_PARAMETERS = ("emit_kind", *NEEDS)
FILE = click.Path(path_type=Path)
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-\d")


def emit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``--emit`` to a command."""
    options = [
        click.option("--emit", "emit_kind", type=click.Choice(KINDS), help="Print a file that brings up the recommended cluster."),
        click.option("--plan", "plan_path", type=FILE, help="Emit a file for this plan.json, without planning."),
        click.option("--cluster-name", default="offload", show_default=True, help="Name of the cluster (--emit)."),
        click.option("--region", default="us-east-1", show_default=True, help="AWS region of the cluster (--emit ray-aws)."),
        click.option("--ami", metavar="ID", help="Machine image of all nodes (--emit ray-aws)."),
        click.option("--image", metavar="NAME", help="Container image with all requirements (--emit ray-aws, kuberay)."),
        click.option("--ray", "ray", metavar="VERSION", help="Version of Ray on the nodes (--emit; default: the one installed here)."),
        click.option("--job", metavar="COMMAND", help="A cluster for this command alone, as a RayJob (--emit kuberay)."),
        click.option("--hosts", "hosts_path", type=FILE, help="One address per line, hosts with GPUs first (--emit hosts)."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True, kw_only=True)
class Emission:
    """The requested cluster file, and its options. ``spot`` replaces the plan's choice; None keeps it. ``ray``: the version of Ray on the
    nodes; None: the one installed here."""

    kind: str
    cluster: str
    region: str
    ami: str | None
    image: str | None
    ray: str | None
    job: str | None
    hosts: tuple[str, ...] | None
    spot: Spot | None

    def of(self, plan: Plan, catalog: Catalog, source: str) -> str:
        """The file for a plan, called ``source`` in messages. Raises ConfigError if this kind of cluster does not support the plan."""
        from offload.launch.ray.cluster_files import aws, kuberay, own_hosts
        from offload.launch.ray.cluster_files.planned import planned
        from offload.launch.ray.cluster_files.software import installed

        nodes, software = planned(plan, catalog, source, self.spot), installed(self.ray)
        match self.kind:
            case "ray-aws":
                file = aws.cluster_file(
                    nodes, software, cluster=self.cluster, region=self.region, ami=self.ami, image=self.image
                )
            case "kuberay":
                file = kuberay.cluster_file(nodes, software, cluster=self.cluster, image=self.image, job=self.job)
            case _:
                file = own_hosts.cluster_file(nodes, software, cluster=self.cluster, hosts=self.hosts)
        return file.text()


def emission(
    ctx: click.Context,
    kind: str | None,
    *,
    cluster: str,
    region: str,
    ami: str | None,
    image: str | None,
    ray: str | None,
    job: str | None,
    hosts_path: Path | None,
    spot: Spot | None,
) -> Emission | None:
    """The requested file; None without --emit.

    Raises ConfigError if options contradict each other or are malformed, or the hosts file cannot be read.
    """
    for param in said_on_the_command_line(ctx):
        kinds = NEEDS.get(str(param.name))
        if kinds is not None and kind not in kinds:
            raise ConfigError(f"{param.opts[0]} is for --emit {' and '.join(kinds)}: drop it, or add that.")
    if kind is None:
        return None
    if ctx.params["as_json"]:
        raise ConfigError("--emit and --json both print on stdout: write the plan with -o plan.json, and drop --json.")
    if not _NAME.fullmatch(cluster):
        raise ConfigError(
            f"--cluster-name must be at most 40 lower-case letters, digits and dashes, with a letter first, found {cluster!r}."
        )
    if not _REGION.fullmatch(region):
        raise ConfigError(f"--region must be an AWS region, such as us-east-1, found {region!r}.")
    if ami is not None and not re.fullmatch(r"ami-[0-9a-f]{8,17}", ami):
        raise ConfigError(f"--ami must be the id of a machine image, such as ami-0123456789abcdef0, found {ami!r}.")
    if image is not None and not re.fullmatch(r"\S+", image):
        raise ConfigError(f"--image must be the name of a container image, such as registry/mine:1, found {image!r}.")
    if job is not None and (not job.strip() or not job.isprintable()):
        raise ConfigError(
            f"--job must be a command on one line, such as 'offload run /app/train.py --gpus-per-worker 1', found {job!r}."
        )
    return Emission(
        kind=kind, cluster=cluster, region=region, ami=ami, image=image, ray=ray, job=job, spot=spot,
        hosts=None if hosts_path is None else _hosts(hosts_path),
    )  # fmt: skip


def _hosts(path: Path) -> tuple[str, ...]:
    from offload.launch.ray.cluster_files.own_hosts import parse_hosts

    return parse_hosts(read_text(path, "the hosts file"), str(path))
