"""The checks of ``offload doctor``: each checks one thing and gives a remedy.

Facts about the machine are arguments, so that tests can use any machine's figures. Where it stops: the caller,
``offload.cli.doctor``, does everything that may hang or crash (importing torch, calling a cluster).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from offload.ray_private.part import FoundPart
from offload.versions import INSTALL_RAY, PYTHONS, TESTED_RAY, python_range, ray_refusal, ray_version_warning

Status = Literal["ok", "warn", "fail"]

STORE_SHARE = 0.3  # share of memory that Ray gives its object store by default
STORE_CAP_BYTES = 200 * 10**9  # the largest default size of Ray's object store
MIN_MEMORY_BYTES = 4 * 2**30  # Ray's processes and one worker with torch loaded take about 3 GiB
GIB = 2**30

_AUTH_REMEDY = (
    "set RAY_AUTH_MODE explicitly, to the cluster's mode (token or disabled), in every process that joins it or "
    "connects to it"
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check. ``warn`` means a slow or unsafe run, ``fail`` no run; ``remedy`` says what to do."""

    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """Facts from a child process that imported torch. ``error``: the reason if it could not; ``warnings``: CUDA's messages."""

    torch: str | None = None
    torchvision: str | None = None
    cuda: str | None = None
    gpus: tuple[str, ...] = ()
    ops_error: str | None = None
    error: str | None = None
    warnings: str = ""


# --- Python, Ray ------------------------------------------------------------------------------------------------------


def check_python(version: tuple[int, int, int]) -> Check:
    """Check the running interpreter against the supported range."""
    finding = ".".join(map(str, version))
    lowest, limit = PYTHONS
    if lowest <= version[:2] < limit:
        return Check(name="python", status="ok", found=finding)
    remedy = f"use {python_range()}, e.g. make install PYTHON=python3.11"
    return Check(name="python", status="fail", found=finding, remedy=remedy)


def check_ray(version: str | None) -> Check:
    """Check the installed Ray (None: not installed) against the tested range."""
    if version is None:
        return Check(name="ray", status="fail", found="not installed", remedy=INSTALL_RAY)
    if (refusal := ray_refusal(version)) is not None:
        return Check(name="ray", status="fail", found=version, remedy=refusal)
    warning = ray_version_warning(version)
    if warning is None:
        tested = f">={TESTED_RAY[0]},<{TESTED_RAY[1]}"
        return Check(name="ray", status="ok", found=f"{version} (tested: {tested})")
    return Check(name="ray", status="warn", found=version, remedy=warning)


def check_ray_parts(parts: Sequence[FoundPart] | str) -> Check:
    """Check which parts of Ray's private interface are in use; the remedy says what the missing ones cost. A text: why nobody knows."""
    if isinstance(parts, str):
        remedy = "without them, a run is slower: see the check of ray, and its remedy"
        return Check(name="ray-parts", status="warn", found=parts, remedy=remedy)
    missing = [part for part in parts if not part.active]
    found = f"{len(parts) - len(missing)} of {len(parts)} in use"
    if not missing:
        return Check(name="ray-parts", status="ok", found=found)
    lines = [f"{part.name} (this Ray lacks {part.lacking}): {part.without}. Its cost: {part.cost}." for part in missing]
    tested = f"A run works without them. Ray >={TESTED_RAY[0]},<{TESTED_RAY[1]} has all of them."
    return Check(name="ray-parts", status="warn", found=found, remedy="\n  ".join([tested, *lines]))


def check_auth(env: Mapping[str, str], home: Path, address: str | None) -> Check:
    """Check Ray's authentication mode, as the processes started from here will see it.

    Ray looks for a token in RAY_AUTH_TOKEN, then the file RAY_AUTH_TOKEN_PATH, then ``~/.ray/auth_token``. If RAY_AUTH_MODE is
    unset, a new local ``ray.init()`` switches to token mode and creates the file; any other process uses a token if there is one.
    """
    mode = env.get("RAY_AUTH_MODE")
    token, token_error = _find_token(env, home)
    finding = f"RAY_AUTH_MODE={mode or '(unset)'}, token: {token or 'none'}"

    def result(status: Status, remedy: str = "") -> Check:
        return Check(name="ray-auth", status=status, found=finding, remedy=remedy)

    if mode is None:
        if address is None:  # the processes of a local Ray inherit the decision of the first
            return result("ok")
        has = f"a token ({token}) switches token mode on here" if token else "no token is set here"
        return result("warn", f"{has}, and a cluster in another mode refuses or hangs; {_AUTH_REMEDY}")
    if mode.lower() not in ("token", "disabled"):
        return result("fail", f"Ray knows the modes token and disabled, found {mode!r}; {_AUTH_REMEDY}")
    if mode.lower() == "disabled":
        return result("ok")
    if token_error is not None:
        return result("fail", f"{token_error}; put the cluster's token there, or unset RAY_AUTH_TOKEN_PATH")
    if token is None and address is not None:
        return result(
            "fail", "copy the cluster's token to ~/.ray/auth_token, or give it in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        )
    return result("ok")


def _find_token(env: Mapping[str, str], home: Path) -> tuple[str | None, str | None]:
    """Return (the place of the token, or None; the problem of the named file, or None). The token itself is never shown."""
    if env.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN", None
    named = env.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else home / ".ray" / "auth_token"
    try:
        if path.read_text().strip():
            return str(path), None
        problem = "is empty"
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or 'not text'})"
    return None, f"the token file {path} (RAY_AUTH_TOKEN_PATH) {problem}" if named else None


# --- torch, GPUs ------------------------------------------------------------------------------------------------------


def check_torch(facts: TorchFacts) -> Check:
    """Check that torch and torchvision are installed and fit together."""
    remedy = (
        "install both in one command from the same place, e.g. pip install --force-reinstall torch torchvision: "
        "a CUDA build of the one does not work with a CPU-only build of the other"
    )
    finding = f"torch {facts.torch or 'not installed'}, torchvision {facts.torchvision or 'not installed'}"
    if facts.torch is None or facts.torchvision is None:
        return Check(name="torch", status="fail", found=finding, remedy="pip install torch torchvision")
    problem = facts.error or facts.ops_error
    if problem:
        return Check(name="torch", status="fail", found=f"{finding}; importing them failed: {problem}", remedy=remedy)
    return Check(name="torch", status="ok", found=f"{finding} ({f'CUDA {facts.cuda}' if facts.cuda else 'CPU only'})")


def check_gpus(facts: TorchFacts, device_present: bool) -> Check:
    """Check the GPUs that torch can use. ``device_present``: whether the machine has an NVIDIA driver or device file."""

    def result(status: Status, finding: str, remedy: str = "") -> Check:
        return Check(name="gpus", status=status, found=finding, remedy=remedy)

    if facts.gpus:
        names = [f"{facts.gpus.count(name)} × {name}" for name in dict.fromkeys(facts.gpus)]
        return result("ok", ", ".join(names))
    if not device_present:
        return result("ok", "none, CPU (gloo) training")
    if facts.error or facts.torch is None:
        return result("warn", "an NVIDIA driver, but torch could not be asked", "repair torch first (see above)")
    if facts.cuda is None:
        return result(
            "fail",
            f"an NVIDIA driver, but torch {facts.torch} is CPU only",
            "install a CUDA build of torch + torchvision",
        )
    return result(
        "fail",
        f"an NVIDIA driver, but torch (CUDA {facts.cuda}) cannot use it. {facts.warnings}".strip(),
        "update the NVIDIA driver, or install a torch built for an older CUDA; start a container with --gpus all; "
        "check whether CUDA_VISIBLE_DEVICES is empty",
    )


# --- memory, cores ----------------------------------------------------------------------------------------------------


def check_shm(shm_bytes: int | None, memory_bytes: int) -> Check:
    """Check that Ray's object store fits into /dev/shm (None: there is no /dev/shm)."""
    wanted = min(STORE_SHARE * memory_bytes, STORE_CAP_BYTES)
    if shm_bytes is None:
        return Check(
            name="shm",
            status="warn",
            found="no /dev/shm",
            remedy="Ray keeps its object store on disk without it, which is slow; mount a tmpfs on /dev/shm",
        )
    finding = f"{shm_bytes / GIB:.1f} GiB free; Ray wants {wanted / GIB:.1f} GiB for its object store"
    if shm_bytes >= wanted:
        return Check(name="shm", status="ok", found=finding)
    fits_gib = shm_bytes / GIB * 0.9  # leaves a tenth of /dev/shm to others
    return Check(
        name="shm",
        status="warn",
        found=finding,
        remedy="Ray falls back to disk and crawls. In docker: --shm-size="
        f"{wanted / GIB + 1:.0f}g; elsewhere: mount -o remount,size={wanted / GIB + 1:.0f}G /dev/shm; "
        f"or let the store fit: ray start --object-store-memory {int(fits_gib * GIB)}",
    )


def check_memory(memory_bytes: int, available_bytes: int) -> Check:
    """Check the memory of this machine or container, and its free part."""
    finding = f"{memory_bytes / GIB:.1f} GiB, {available_bytes / GIB:.1f} GiB available"
    if available_bytes >= MIN_MEMORY_BYTES:
        return Check(name="memory", status="ok", found=finding)
    remedy = (
        f"Ray and one worker need about {MIN_MEMORY_BYTES / GIB:.0f} GiB; end other programs or take a larger machine"
    )
    return Check(name="memory", status="warn", found=finding, remedy=remedy)


def check_cores(affinity: int, quota: float | None, count: int) -> Check:
    """Check the cores that processes started here can use: the smaller of CPU affinity and the cgroup's quota."""
    usable = affinity if quota is None else min(affinity, quota)
    limits = [f"affinity {affinity}"] if affinity < count else []
    if quota is not None:
        limits.append(f"cgroup quota {quota:g}")
    finding = f"{usable:g} of {count}" + (f" ({', '.join(limits)})" if limits else "")
    if usable < 2:
        return Check(
            name="cores",
            status="warn",
            found=finding,
            remedy="a worker would take the only core, and preprocessing needs one: give at least 2, add hosts to the cluster, or "
            'reserve none for the worker (resources_per_worker={"CPU": 0})',
        )
    if quota is not None and quota < affinity:
        return Check(
            name="cores",
            status="warn",
            found=finding,
            remedy=f"the quota is less than what processes see; tell Ray: ray start --num-cpus {max(1, int(quota))}",
        )
    return Check(name="cores", status="ok", found=finding)


# --- the cluster ------------------------------------------------------------------------------------------------------


def resolve_address(address: str | None, env: Mapping[str, str], temp_dir: Path) -> str | None:
    """Resolve ``address``: ``auto`` and None read RAY_ADDRESS; ``auto`` then reads the file of ``ray start``.

    None means a local Ray; ``auto`` stays if nothing is found.
    """
    if address in (None, "", "auto"):
        named = env.get("RAY_ADDRESS")
        if named:
            address = named
    if address == "auto":
        try:
            return (temp_dir / "ray" / "ray_current_cluster").read_text().strip() or "auto"
        except OSError:
            return "auto"
    return None if address in (None, "", "local") else address


def check_cluster(
    address: str | None,
    *,
    connect: Callable[[str, int], str | None],
    call: Callable[[str], dict[str, Any] | str],
) -> Check:
    """Check that the cluster at a resolved ``address`` can be reached and runs a task.

    ``connect`` (host, port) returns None or an error; ``call`` (address) returns the cluster's figures or an error. This probes the
    port before any call to Ray, since Ray waits forever for a missing head.
    """

    def fail(finding: str, remedy: str) -> Check:
        return Check(name="cluster", status="fail", found=finding, remedy=remedy)

    if address is None:
        return Check(name="cluster", status="ok", found="no address given: a run uses this machine, without Ray")
    if address == "auto":
        return fail(
            "no cluster known here", "give --address HOST:PORT or set RAY_ADDRESS; or start one: ray start --head"
        )
    if "://" in address:  # Ray's client, or a dashboard: no run joins through them
        rest = address.partition("://")[2].split("/")[0]
        host = rest.rpartition(":")[0] or rest or "HOST"
        return fail(
            f"{address!r} is not HOST:PORT",
            f"give the head's address as HOST:PORT, e.g. --address {host}:6379, on one of the cluster's nodes; from elsewhere, "
            "offload launch ray sends a training there",
        )
    target = _host_and_port(address)
    if target is None:
        return fail(
            f"{address!r} is not HOST:PORT", "give the head's address as HOST:PORT, e.g. --address 10.0.0.5:6379"
        )
    host, port = target
    refused = connect(host, port)
    if refused is not None:
        return fail(
            f"{host}:{port} cannot be reached: {refused}",
            f"check that the head runs (there: ray start --head --port {port}), that the name resolves and that no "
            "firewall or security group closes the port",
        )
    answer = call(address)
    if isinstance(answer, str):
        return fail(
            f"{host}:{port} is open, but no task could be run there: {answer}",
            "check that it is Ray's port on the head (6379) and that this host has joined it (ray start --address); "
            + _AUTH_REMEDY,
        )
    finding = f"{address}: {answer['nodes']:g} nodes, {answer['cpus']:g} CPUs, {answer['gpus']:g} GPUs"
    return Check(name="cluster", status="ok", found=f"{finding}, Ray {answer['ray']}")


def _host_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)


# --- optional packages ------------------------------------------------------------------------------------------------


def check_regions(library: str | None, error: str = "") -> Check:
    """Check for a library that decodes regions of JPEGs. ``library``: its file, None without one; ``error``: why the search failed."""
    if library is not None:
        return Check(name="jpeg-regions", status="ok", found=library)
    return Check(
        name="jpeg-regions",
        status="warn",
        found=f"{error or 'no TurboJPEG 3'}: transforms that begin with a crop decode whole JPEGs",
        remedy="pip install 'offload[regions]', on every node",
    )


def check_cache(path: str, obstacle: str | None) -> Check:
    """Check a cache of this machine. ``obstacle``: why the machine cannot hold it, and a remedy, in two sentences."""
    if obstacle is None:
        return Check(name="cache", status="ok", found=path)
    finding, _, remedy = obstacle.partition(". ")
    return Check(name="cache", status="fail", found=finding, remedy=remedy[:1].lower() + remedy[1:])


def check_packages(version: Callable[[str], str | None]) -> list[Check]:
    """Check optional packages, and tell what is slower or missing without them."""
    wanted = {
        "simplejpeg": ("JPEGs are decoded by Pillow, at about 0.6 of the speed", "pip install simplejpeg"),
        "scikit-learn": ("offload demo cannot make its data set", "pip install 'offload[demo]'"),
        "aiohttp": ("offload launch ray is not available", "pip install 'offload[ray]'"),
        "boto3": ("offload launch sagemaker is not available", "pip install 'offload[sagemaker]'"),
        "sagemaker": (
            "offload launch sagemaker needs --image-uri, and submits with boto3",
            "pip install 'offload[sagemaker]'",
        ),
    }
    checks = []
    for name, (without, remedy) in wanted.items():
        installed = version(name)
        if installed is None:
            checks.append(Check(name=name, status="warn", found=f"not installed: {without}", remedy=remedy))
        elif name == "sagemaker" and not installed.startswith("2."):
            finding = f"{installed}: offload launch sagemaker submits with boto3, since only version 2 has estimators"
            checks.append(Check(name=name, status="warn", found=finding, remedy="pip install 'offload[sagemaker]'"))
        else:
            checks.append(Check(name=name, status="ok", found=installed))
    return checks
