"""The first lines of each file: its purpose, and the commands that use it."""

from __future__ import annotations

import textwrap

from offload.formatting import rate_shown
from offload.launch.ray.cluster_files.planned import Planned
from offload.launch.ray.cluster_files.text import WIDTH

DASHBOARD = "http://127.0.0.1:8265"
STORAGE = "s3://YOUR-BUCKET/runs/train"
TOKEN_FILE = "auth_token"  # the name that Ray expects in ~/.ray


def token_folder(cluster: str) -> str:
    """The folder of the cluster's token on this machine. Only its owner may read it, and no cluster file holds it."""
    return f"~/.offload/{cluster}"


def make_token(cluster: str) -> str:
    """The shell command that makes a token unless one exists: a running cluster keeps its token. Only the owner may read the folder
    and the file."""
    file = f"{token_folder(cluster)}/{TOKEN_FILE}"
    return f"(umask 077; mkdir -p {token_folder(cluster)}; [ -s {file} ] || openssl rand -hex 32 > {file})"


def head_of(kind: str, planned: Planned, cluster: str, prices: str, steps: dict[str, list[str]]) -> str:
    """The plan in a sentence, and the steps. Each step has a name, and lines to type."""
    origin = (
        f"A Ray cluster of {planned} for offload, made by offload plan --emit {kind}. Planned: "
        f"{rate_shown(planned.samples_per_s)} samples/s for ${planned.usd_per_hour:.2f} an hour{prices}."
    )
    wide = max(map(len, steps)) + 2
    typed = [
        f"{f'{name}:' if at == 0 else '':{wide}}{line}"
        for name, lines in steps.items()
        for at, line in enumerate(lines)
    ]
    return "\n".join([*textwrap.wrap(origin, WIDTH), "", *typed, ""])


def submit(cluster: str, tunnel: str) -> list[str]:
    """The commands that submit a script from any machine with the token: through a tunnel, since the dashboard listens only on its own
    host. Checkpoints need a place that all nodes reach. A run that begins before the GPUs arrive must still reserve them."""
    return [
        f"{tunnel}   # keep it open, and in another shell:",
        f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token_folder(cluster)}/{TOKEN_FILE}",
        f"offload launch ray train.py --address {DASHBOARD} --gpus-per-worker 1 --storage-path {STORAGE}",
    ]
