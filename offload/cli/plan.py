"""``offload plan``, which recommends the nodes to rent for a profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from offload.cli.emit import EMIT_PARAMETERS, Emission, emission, emit_options
from offload.cli.output import stdout_for_json
from offload.cli.parameters import said_on_the_command_line
from offload.errors import ConfigError
from offload.files import read_json
from offload.model.catalog import Catalog
from offload.model.planning.planner import plan as make_plan
from offload.model.planning.plans import Plan
from offload.model.profile import Profile
from offload.prices import load_catalog, refreshed
from offload.probe import profile_age
from offload.report.page.charts.plan_chart import draw_plan
from offload.report.run_dir import to_json
from offload.report.terminal.plan_table import format_plan

CHARTS = (".png", ".svg", ".pdf")


class CountRange(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """``4`` or ``1..4``, as (least, most)."""

    name = "N|A..B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        first, dots, last = str(value).partition("..")
        try:
            return int(first), int(last) if dots else int(first)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor a range such as 1..4.", param, ctx)


class Pair(click.ParamType):  # type: ignore[type-arg]
    """``ALPHA,BETA``: two numbers."""

    name = "ALPHA,BETA"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        if isinstance(value, tuple):
            return value
        try:
            alpha, beta = map(float, str(value).split(","))
        except ValueError:
            self.fail(
                f"{value!r} is not two numbers such as 0.01,0.0016 (seconds per micro-batch and per sample).",
                param,
                ctx,
            )
        return alpha, beta


class Speed(click.ParamType):  # type: ignore[type-arg]
    """``X`` or ``TYPE=X``, as (type or None, speed)."""

    name = "[TYPE=]X"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str | None, float]:
        if isinstance(value, tuple):
            return value
        kind, equals, speed = str(value).rpartition("=")
        try:
            return (kind if equals else None), float(speed)
        except ValueError:
            self.fail(
                f"{value!r} is neither a number nor a type with one, such as 2.5 or ml.g5.xlarge=2.5.", param, ctx
            )


FILE = click.Path(path_type=Path)
OF_A_MADE_PLAN = ("plan_path", "catalog_path", "spot", *EMIT_PARAMETERS)
"""The options that are valid with an existing plan."""


@click.command()
@click.option("--profile", "profile_path", type=FILE, help="profile.json from offload probe.")
@click.option(
    "--gpu-type",
    "gpu_types",
    multiple=True,
    metavar="TYPE",
    help="Type of the worker nodes; may be repeated.",
)
@click.option("--gpu-nodes", type=CountRange(), default="1", show_default=True, help="Number of worker nodes.")
@click.option(
    "--cpu-type",
    "cpu_types",
    multiple=True,
    metavar="TYPE",
    help="Type of the nodes that only preprocess; may be repeated.",
)
@click.option("--cpu-nodes", type=CountRange(), default="0..8", show_default=True, help="Number of CPU nodes.")
@click.option("--batch-size", type=int, help="Global batch (default: the profile's).")
@click.option("--max-batch-size", type=int, help="Choose the global batch by goodput, up to this.")
@click.option("--samples", type=int, help="Amount of work: samples of an epoch × epochs. Gives hours and dollars.")
@click.option(
    "--objective",
    type=click.Choice(["cost", "time"]),
    default="cost",
    show_default=True,
    help="Fewest dollars per useful sample, or the fastest.",
)
@click.option("--budget", type=float, metavar="USD", help="The most that the job may cost.")
@click.option("--deadline", type=float, metavar="HOURS", help="The longest time that the job may take.")
@click.option(
    "--spot",
    type=click.Choice(["none", "cpu", "all"]),
    default="none",
    show_default=True,
    help="The nodes on spot capacity (with --plan: instead of the plan's choice).",
)
@click.option(
    "--gpu-speed",
    "gpu_speeds",
    type=Speed(),
    multiple=True,
    help="The planned GPU is X times as fast as the profile's device; with TYPE=, that of one type. May be repeated.",
)
@click.option(
    "--step", type=Pair(), help="Compute terms of the planned GPU instead: seconds per micro-batch, and per sample."
)
@click.option("--catalog", "catalog_path", type=FILE, help="TOML file with more node types, or other prices.")
@click.option(
    "--refresh-prices", metavar="REGION", help="Use AWS's current on-demand prices in this region (needs credentials)."
)
@click.option("--chart", type=FILE, help=f"Draw samples/s and cost against CPU nodes ({', '.join(CHARTS)}).")
@click.option("-o", "--output", type=FILE, help="Write plan.json there.")
@click.option("--json", "as_json", is_flag=True, help="Print plan.json on stdout.")
@emit_options
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    profile_path: Path | None,
    catalog_path: Path | None,
    refresh_prices: str | None,
    chart: Path | None,
    output: Path | None,
    as_json: bool,
    budget: float | None,
    deadline: float | None,
    gpu_types: tuple[str, ...],
    cpu_types: tuple[str, ...],
    gpu_speeds: tuple[tuple[str | None, float], ...],
    plan_path: Path | None,
    emit_kind: str | None,
    cluster_name: str,
    region: str,
    ami: str | None,
    image: str | None,
    ray: str | None,
    job: str | None,
    hosts_path: Path | None,
    **asked: Any,
) -> None:
    """Recommend the nodes to rent, with their rate and their cost, before you pay.

    \b
        offload probe train.py -o profile.json
        offload plan --profile profile.json --gpu-type ml.g5.xlarge \\
            --cpu-type ml.c5.4xlarge --cpu-nodes 0..8

    The joint model of GPUs and input pipeline evaluates every combination of the given types and ranges: nodes of one GPU type, and
    nodes of at most one CPU type. The plan recommends what is best on average over what the profile leaves open.

    For a profile measured on another device than the planned GPU, say its speed (--gpu-speed, --step, or gpu_speed in the catalog).
    Otherwise the plan guesses it from data sheets. A profile measured on a CPU needs one of the three.

    --emit prints a file that brings up the recommended cluster, and the table on stderr. With --plan, it uses an existing plan:

    \b
        offload plan --plan plan.json --emit kuberay > cluster.yaml
    """
    with stdout_for_json(as_json) as emit:
        to_emit = emission(
            ctx, emit_kind, cluster=cluster_name, region=region, ami=ami, image=image, ray=ray, job=job, hosts_path=hosts_path,
            spot=asked["spot"] if "spot" in (param.name for param in said_on_the_command_line(ctx)) else None,
        )  # fmt: skip
        if plan_path is not None:
            _emit_of_plan(ctx, plan_path, to_emit, load_catalog(catalog_path))
            return
        if profile_path is None:
            raise click.UsageError("Missing option '--profile'.", ctx)
        if not gpu_types:
            raise click.UsageError("Missing option '--gpu-type'.", ctx)
        if chart is not None and chart.suffix not in CHARTS:
            raise ConfigError(f"--chart {chart} must end in {', '.join(CHARTS)}.")
        document = read_json(profile_path, "the profile", "Was offload probe interrupted?")
        profile = Profile.from_document(document, source=str(profile_path))
        catalog = load_catalog(catalog_path)
        if refresh_prices:
            names = [catalog[name].name for name in (*gpu_types, *cpu_types)]
            catalog = refreshed(catalog, refresh_prices, names=names)
        result = make_plan(
            profile,
            catalog,
            gpu_types=gpu_types,
            cpu_types=cpu_types,
            budget_usd=budget,
            deadline_hours=deadline,
            gpu_speed=_gpu_speed(gpu_speeds),
            **asked,
        ).document()
        result["warnings"] += profile_age.warnings(profile)
        text = to_json(result, indent=2)
        cluster_file = (
            None if to_emit is None else to_emit.of(Plan.from_document(result, "the plan"), catalog, "the plan")
        )
        if output is not None:
            _write(output, lambda: output.write_text(text + "\n", encoding="utf-8"))
        if chart is not None:
            _write(chart, lambda: draw_plan(result, chart))
        if cluster_file is None:
            emit(result, format_plan(result))
            return
        click.echo(format_plan(result), err=True)
        click.echo(cluster_file, nl=False)


def _emit_of_plan(ctx: click.Context, path: Path, to_emit: Emission | None, catalog: Catalog) -> None:
    if to_emit is None:
        raise ConfigError(f"--plan {path} needs --emit: add --emit ray-aws, kuberay or hosts.")
    for param in said_on_the_command_line(ctx):
        if param.name == "spot" and to_emit.kind == "hosts":
            raise ConfigError("--spot is for --emit ray-aws and kuberay: it has no effect on your own hosts.")
        if param.name not in OF_A_MADE_PLAN:
            raise ConfigError(
                f"--plan {path} is already a plan, and {param.opts[-1]} is for making one: drop one of the two."
            )
    plan = Plan.from_document(read_json(path, "the plan", "Make it with offload plan -o."), str(path))
    click.echo(to_emit.of(plan, catalog, str(path)), nl=False)


def _gpu_speed(pairs: tuple[tuple[str | None, float], ...]) -> float | dict[str, float] | None:
    """One speed for all types, or a speed for each of some."""
    speeds = dict(pairs)
    if None not in speeds:
        if len(speeds) < len(pairs):
            raise ConfigError("--gpu-speed gives a type two speeds: give one for each type.")
        return {kind: speed for kind, speed in speeds.items() if kind is not None} or None
    if len(pairs) > 1:
        raise ConfigError(
            "--gpu-speed takes one number for all types, or TYPE=X for each: a plain number beside others says nothing clear."
        )
    return speeds[None]


def _write(path: Path, write: Callable[[], Any]) -> None:
    try:
        if path.is_fifo():  # without a reader, writing waits forever
            raise ConfigError(f"{path} cannot be written: it is a named pipe. Name an ordinary file.")
        write()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from None
