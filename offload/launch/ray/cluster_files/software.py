"""The software that a cluster's nodes need for a run of this offload: the same Python, Ray and packages as here."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version

from packaging.requirements import Requirement

from offload.errors import ConfigError, argument
from offload.launch.requirements import IN_IMAGE, requirements
from offload.versions import is_too_old, ray_range


@dataclass(frozen=True, kw_only=True)
class Software:
    """The versions of the software. A job uploads offload itself; the nodes must have offload's requirements."""

    ray: str
    python: tuple[int, int]
    requirements: tuple[str, ...]

    @property
    def image(self) -> str:
        """Ray's own image with these versions. It has Ray, but not the requirements."""
        major, minor = self.python
        return f"rayproject/ray:{self.ray}-py{major}{minor}-gpu"

    @property
    def pip_install(self) -> str:
        """The shell command that installs the requirements."""
        return _pip_install(self.requirements)

    @property
    def pip_install_with_dashboard(self) -> str:
        """The same where Ray's own image, which has the dashboard, is not used. Jobs come through the dashboard."""
        return _pip_install(map(_with_dashboard, self.requirements))


def installed(ray: str | None = None) -> Software:
    """The software that is installed here, with another version of Ray if ``ray`` names one.

    Raises ConfigError for a Ray that offload cannot work with.
    """
    if ray is not None:
        _check_ray(ray)
    # "2.8.0+cpu" is a build for this machine; nodes take the build that their index offers.
    torch = [f"{package}=={version(package).split('+')[0]}" for package in IN_IMAGE]
    return Software(
        ray=ray or version("ray"),
        python=(sys.version_info.major, sys.version_info.minor),
        requirements=(*requirements(ray=ray), *torch),
    )


def _check_ray(ray: str) -> None:
    if not re.fullmatch(r"\d+\.\d+\.\d+", ray):
        raise ConfigError(
            f"{argument('ray')} must be the full version of a Ray release, such as {version('ray')}, found {ray!r}."
        )
    if is_too_old(ray):
        raise ConfigError(
            f"{argument('ray')} is {ray}, and offload needs {ray_range()}: pass one of these, or leave it out."
        )


def _pip_install(requirements: Iterable[str]) -> str:
    return f"pip install --no-cache-dir {' '.join(map(shlex.quote, requirements))}"


def _with_dashboard(requirement: str) -> str:
    parsed = Requirement(requirement)
    if parsed.name != "ray":
        return requirement
    parsed.extras.add("default")
    return str(parsed)
