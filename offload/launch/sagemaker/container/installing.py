"""Install a job's packages on one of its hosts, and report the reason if that fails.

pip runs here rather than under the training toolkit: the toolkit would end this host with an empty failure file while the others
wait. This module needs only the standard library. Where it stops: :mod:`offload.launch.sagemaker.bundle` chooses the packages.
"""

from __future__ import annotations

import collections
import importlib
import os
import re
import site
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.launch.sagemaker.settings import TO_INSTALL

LINES_KEPT = 200
LOOK_S = 0.1
CODE_ARTIFACT = "CA_REPOSITORY_ARN"  # the training toolkit's name for it
_REPOSITORY = re.compile(
    r"arn:[^:]+:codeartifact:(?P<region>[^:]+):(?P<owner>[^:]+):repository/(?P<domain>[^/]+)/(?P<repository>.+)"
)
_ADVICE = ("To fix this you could try to:", "1. loosen", "2. remove", "ERROR: ResolutionImpossible")
_NO_NETWORK = re.compile(r"WARNING: Retrying|Failed to establish a new connection|Temporary failure in name resolution")


def install(folder: Path, check: Callable[[], None] = lambda: None) -> None:
    """Install the requirements of the bundle in ``folder``, and show pip's output. ``check`` is called meanwhile and may raise to end
    the installation.

    Raises ConfigError with pip's reason.
    """
    if not (folder / TO_INSTALL).exists():
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "pip", "install", "-r", TO_INSTALL], cwd=folder,
        env={**os.environ, **_pip_environment(os.environ)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    said: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
    reading = threading.Thread(target=_show, args=(process.stdout, said), daemon=True)
    reading.start()
    try:
        while process.poll() is None:
            check()
            time.sleep(LOOK_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reading.join()
    if process.returncode != 0:
        raise ConfigError(f"pip could not install the requirements: {reason_of(said)}")
    _find_new_packages()


def reason_of(lines: Iterable[str]) -> str:
    """The reason why pip failed: its output from the first error on, without its advice.

    >>> reason_of(["Collecting x", "ERROR: No matching distribution found for x==3"])
    'No matching distribution found for x==3'
    """
    text = [line.rstrip() for line in lines if line.strip()]
    first = next((n for n, line in enumerate(text) if line.startswith("ERROR:")), max(len(text) - 3, 0))
    complaints = [line.removeprefix("ERROR: ") for line in text[first:] if not line.startswith(_ADVICE)]
    if any(_NO_NETWORK.search(line) for line in text):
        complaints.append("No package index was reached: without a network, use an image that has the requirements.")
    return "\n".join(dict.fromkeys(complaints)) or "it said nothing"


def _show(stream: Any, said: collections.deque[str]) -> None:
    with stream:
        for line in stream:
            said.append(line)
            print(line, end="", flush=True)


def _find_new_packages() -> None:
    """Make this process see the packages that pip installed meanwhile."""
    users = site.getusersitepackages()  # pip installs there if the user may not write to the image's own folder
    if site.ENABLE_USER_SITE and os.path.isdir(users) and users not in sys.path:
        site.addsitedir(users)
    importlib.invalidate_caches()


def _pip_environment(environment: Mapping[str, str]) -> dict[str, str]:
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    if repository := environment.get(CODE_ARTIFACT):
        settings["PIP_INDEX_URL"] = code_artifact_index(repository)  # not on the command line: it holds a token
    return settings


def code_artifact_index(arn: str, client_of: Callable[..., Any] | None = None) -> str:
    """The index URL of an AWS CodeArtifact repository, with a token. Raises ConfigError if AWS refuses it."""
    named = _REPOSITORY.fullmatch(arn)
    if named is None:
        raise ConfigError(f"{CODE_ARTIFACT} is {arn!r}, which is not the ARN of a CodeArtifact repository.")
    owner = {"domain": named["domain"], "domainOwner": named["owner"]}
    try:
        if client_of is None:
            import boto3

            client_of = boto3.client
        client = client_of("codeartifact", region_name=named["region"])
        token = client.get_authorization_token(**owner)["authorizationToken"]
        endpoint = client.get_repository_endpoint(**owner, repository=named["repository"], format="pypi")
    except Exception as error:
        raise ConfigError(f"the CodeArtifact repository {arn} cannot be used: {error}") from None
    address = str(endpoint["repositoryEndpoint"]).removeprefix("https://").rstrip("/")
    return f"https://aws:{token}@{address}/simple/"
