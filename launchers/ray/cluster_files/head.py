"""The head of each file: what it is for, and the commands that make use of it."""

from __future__ import annotations

import textwrap

from launchers.ray.cluster_files.planned import Planned
from launchers.ray.cluster_files.text import WIDTH

DASHBOARD = "http://127.0.0.1:8265"
STORAGE = "s3://YOUR-BUCKET/runs/train"
TOKEN_FILE = "auth_token"  # the name under which Ray looks for it in ~/.ray


def token_folder(cluster: str) -> str:
    """Where the cluster's token lies, here: only its owner may read it, and no cluster file holds it."""
    return f"~/.offload/{cluster}"


def make_token(cluster: str) -> str:
    """The shell command that makes a token, unless there is one: folder and file are for their owner alone, and a cluster that
    runs goes on with the token that it has."""
    file = f"{token_folder(cluster)}/{TOKEN_FILE}"
    return f"(umask 077; mkdir -p {token_folder(cluster)}; [ -s {file} ] || openssl rand -hex 32 > {file})"


def head_of(kind: str, planned: Planned, cluster: str, prices: str, steps: dict[str, list[str]]) -> str:
    """What was planned, and the steps: each a name, and lines to type."""
    made = (
        f"A Ray cluster of {planned} for offload, made by offload plan --emit {kind}. Planned: {planned.samples_per_s:,.0f} samples/s "
        f"for ${planned.usd_per_hour:.2f} an hour{prices}."
    )
    wide = max(map(len, steps)) + 2
    typed = [
        f"{f'{name}:' if at == 0 else '':{wide}}{line}"
        for name, lines in steps.items()
        for at, line in enumerate(lines)
    ]
    return "\n".join([*textwrap.wrap(made, WIDTH), "", *typed, ""])


def submit(cluster: str, tunnel: str) -> list[str]:
    """How a script gets there, from any machine that has the token: through a tunnel, since the dashboard listens on its own host
    alone. Checkpoints need a place that all nodes reach, and a run that begins before the GPUs are there must not do without."""
    return [
        f"{tunnel}   # and, beside it:",
        f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token_folder(cluster)}/{TOKEN_FILE}",
        f"offload launch ray train.py --address {DASHBOARD} --gpus-per-worker 1 --storage-path {STORAGE}",
    ]
