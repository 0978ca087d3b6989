"""``offload doctor``, which checks this machine for the needs of a run, and gives a remedy for each problem.

Actions that may hang or crash (importing torch, calling a cluster) happen in a child process with a deadline; the checks themselves
are in ``offload.cli.doctor_checks``. Where it stops: it changes nothing on the machine and measures nothing; ``offload probe`` measures.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from offload.cli.doctor_checks import (
    Check,
    TorchFacts,
    check_auth,
    check_cache,
    check_cluster,
    check_cores,
    check_gpus,
    check_memory,
    check_packages,
    check_python,
    check_ray,
    check_ray_parts,
    check_regions,
    check_shm,
    check_torch,
    resolve_address,
)
from offload.cli.output import error_document, said_document
from offload.errors import OffloadError, argument
from offload.machine import cpu_quota, memory_limit
from offload.process.interrupts import INTERRUPTED
from offload.ray_private.part import FoundPart

CONNECT_DEADLINE_S = 5.0
PARTS_DEADLINE_S = 120.0
RAY_DEADLINE_S = 60.0  # Ray itself gives up on a cluster that refuses its token after about 20 s
REGIONS_DEADLINE_S = 60.0
TORCH_DEADLINE_S = 120.0  # a first import from a cold disk takes most of a minute

# A program that prints one JSON line: importing a broken pair can end the whole process, not just raise.
_TORCH_PROBE = """
import json, warnings
out = {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    out["torch"], out["cuda"] = torch.__version__, torch.version.cuda
    if torch.cuda.is_available():
        out["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    out["warnings"] = " ".join(str(w.message).split(chr(10))[0] for w in caught if "CUDA" in str(w.message))
try:
    import torchvision.ops
except Exception as error:
    out["ops_error"] = f"{type(error).__name__}: {error}".split(chr(10))[0]
print("\\n" + json.dumps(out))
"""

_REGIONS_PROBE = """
import json
from offload.pipeline.images import turbojpeg
found = turbojpeg.library()
print("\\n" + json.dumps({"library": found and found.path}))
"""

_PARTS_PROBE = """
import json
from dataclasses import asdict
from offload.ray_private.parts import found_parts
print("\\n" + json.dumps({"parts": [asdict(part) for part in found_parts()]}))
"""

# It runs a task, because a driver with another authentication may connect and hang in its first task.
_RAY_PROBE = """
import json, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
@ray.remote(num_cpus=0)
def version():
    return ray.__version__
alive = sum(node["Alive"] for node in ray.nodes())
resources = ray.cluster_resources()
print("\\n" + json.dumps({"ray": ray.get(version.remote()), "nodes": alive,
                         "cpus": resources.get("CPU", 0), "gpus": resources.get("GPU", 0)}))
"""


@click.command()
@click.option(
    "--address",
    metavar="HOST:PORT",
    help='A Ray cluster to try as well ("auto": RAY_ADDRESS, or else this host\'s). Default: RAY_ADDRESS.',
)
@click.option("--cache", metavar="ssd:PATH:SIZE", help="The cache= of a data set, to try on this machine as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def doctor(context: click.Context, address: str | None, cache: str | None, as_json: bool) -> None:
    """Check Python, Ray, torch, GPUs, memory, cores, the cluster and a cache, and say what to do.

    Exit code 0 if nothing fails (warnings may remain), else 2.
    """
    try:
        parts = ray_parts()
        checks = [*run_checks(address), check_ray_parts(parts), *([] if cache is None else [cache_check(cache)])]
    except (OffloadError, KeyboardInterrupt) as end:
        if as_json:
            interrupted = said_document("interrupted", INTERRUPTED)
            click.echo(json.dumps(error_document(end) if isinstance(end, OffloadError) else interrupted, indent=2))
        raise
    ok = all(check.status != "fail" for check in checks)
    if as_json:
        known = () if isinstance(parts, str) else parts
        document = {
            "schema": "offload.doctor/1",
            "ok": ok,
            "checks": [asdict(check) for check in checks],
            "ray_parts": [{"active": part.active, **asdict(part)} for part in known],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        _print_table(checks, ok, () if isinstance(parts, str) else parts)
    context.exit(0 if ok else 2)


def _print_table(checks: list[Check], ok: bool, parts: Sequence[FoundPart]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    # Without a terminal, lines are not wrapped: a line of the file is a line of the report.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    table = Table(box=None, pad_edge=False)
    for column in ("check", "status", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, Text(check.status, style=colours[check.status]), Text(check.found))
    console.print(table)
    if active := ", ".join(part.name for part in parts if part.active):
        console.print(Text(f"\nprivate parts of Ray in use: {active}"))
    for check in checks:
        if check.remedy:
            console.print(Text(f"\n{check.name}: ", style=colours[check.status]) + Text(check.remedy, style=""))
    console.print("\nready" if ok else "\nnot ready: see the remedies above")


def run_checks(address: str | None) -> list[Check]:
    """Check this machine and, if an address is given or RAY_ADDRESS is set, the cluster."""
    import psutil

    env = os.environ
    resolved = resolve_address(address, env, Path(env.get("RAY_TMPDIR") or "/tmp"))
    memory = psutil.virtual_memory()
    limit = memory_limit(memory.total)
    facts = torch_facts()
    return [
        check_python(sys.version_info[:3]),
        check_ray(_version("ray")),
        check_auth(env, Path.home(), resolved),
        check_torch(facts),
        check_gpus(facts, any(Path(p).exists() for p in ("/proc/driver/nvidia/version", "/dev/nvidia0"))),
        check_shm(_free_shm(), limit),
        check_memory(limit, min(memory.available, limit)),
        check_cores(_affinity(), cpu_quota(), os.cpu_count() or 1),
        check_cluster(resolved, connect=connect, call=call_cluster),
        regions(),
        *check_packages(_version),
    ]


def cache_check(text: str) -> Check:
    """Try whether this machine can hold a cache. Raises ConfigError for a text that describes none."""
    from offload.pipeline.cache.spec import obstacle_here, parse_cache

    spec = parse_cache(argument("cache"), text)
    assert spec is not None
    return check_cache(str(spec.path), obstacle_here(spec))


def regions() -> Check:
    """Look for a decoder of JPEG regions in a child process: a library that does not fit may crash it."""
    ran = _run_child(_REGIONS_PROBE, [], REGIONS_DEADLINE_S)
    return check_regions(None, ran) if isinstance(ran, str) else check_regions(ran["library"])


def ray_parts() -> list[FoundPart] | str:
    """Look for the parts of Ray's private interface in a child process, which imports much of Ray; the error in a sentence if it
    cannot."""
    if _version("ray") is None:
        return "Ray is not installed"
    ran = _run_child(_PARTS_PROBE, [], PARTS_DEADLINE_S)
    return ran if isinstance(ran, str) else [FoundPart(**part) for part in ran["parts"]]


def torch_facts(deadline_s: float = TORCH_DEADLINE_S) -> TorchFacts:
    """Import torch and torchvision in a child process and return the facts."""
    versions = TorchFacts(torch=_version("torch"), torchvision=_version("torchvision"))
    if versions.torch is None:
        return versions
    ran = _run_child(_TORCH_PROBE, [], deadline_s)
    if isinstance(ran, str):
        return TorchFacts(torch=versions.torch, torchvision=versions.torchvision, error=ran)
    return TorchFacts(
        torch=ran["torch"],
        torchvision=versions.torchvision,
        cuda=ran["cuda"],
        gpus=tuple(ran.get("gpus", ())),
        ops_error=ran.get("ops_error"),
        warnings=ran.get("warnings", ""),
    )


def connect(host: str, port: int, deadline_s: float = CONNECT_DEADLINE_S) -> str | None:
    try:
        socket.create_connection((host, port), timeout=deadline_s).close()
    except TimeoutError:
        return f"no answer within {deadline_s:g} s"
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def call_cluster(address: str, deadline_s: float = RAY_DEADLINE_S) -> dict[str, Any] | str:
    return _run_child(_RAY_PROBE, [address], deadline_s)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _free_shm() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def _affinity() -> int:
    # macOS has no CPU affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_child(program: str, arguments: list[str], deadline_s: float) -> dict[str, Any] | str:
    """Run Python code whose last line of output is a JSON object. Return that object, or the error in a sentence."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as child:
        try:
            output, errors = child.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            child.kill()
            return f"no answer within {deadline_s:g} s"
    if child.returncode == 0:
        try:
            result = json.loads(output.strip().splitlines()[-1])
        except (IndexError, ValueError):
            return "the answer could not be read"
        return result if isinstance(result, dict) else "the answer could not be read"
    if child.returncode < 0:
        return f"the process died from signal {-child.returncode}"
    lines = errors.strip().splitlines()
    return lines[-1] if lines else f"the process ended with exit code {child.returncode}"
