"""Container images: AWS's own for a version of PyTorch, and the versions of Python and torch that an image's tag reveals.

Offload's own metadata decide which images suit. Where it stops: it does not pull images, so the hosts check images whose tags reveal
nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import re
from dataclasses import dataclass
from typing import Any

import botocore.exceptions
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from offload.errors import ConfigError, argument
from offload.launch.requirements import requirement

_TORCH = re.compile(
    r"(?P<torch>\d+\.\d+(\.\d+)?)-(transformers[\d.]+-)?((gpu|cpu)-py|cuda)\d"
)  # AWS's tags, and PyTorch's own
_PYTHON = re.compile(r"(?:^|[-_])py(?:thon)?-?3\.?(\d{1,2})(?!\d)")
_TABLES = ("sagemaker.image_uris", "sagemaker.core.image_uris")  # version 2 of the SDK, and version 3


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The versions of Python and torch in an image, such as 3.12 and 2.8; None if unknown."""

    python: str | None = None
    torch: str | None = None

    def __str__(self) -> str:
        known = [f"{name} {version}" for name, version in (("Python", self.python), ("torch", self.torch)) if version]
        return " and ".join(known)

    @property
    def suits(self) -> bool:
        """Whether offload runs in the image, as far as the tag reveals."""
        return (self.python is None or self.python in pythons()) and (
            self.torch is None or requirement("torch").specifier.contains(self.torch, prereleases=True)
        )


def pythons() -> SpecifierSet:
    """The versions of Python that offload runs on."""
    return SpecifierSet(importlib.metadata.metadata("offload")["Requires-Python"])


def contents_of(uri: str) -> Contents:
    """The versions in an image's tag: ``…/pytorch-training:2.8-gpu-py312`` has Python 3.12 and torch 2.8."""
    repository, _, tag = uri.partition("@")[0].rpartition("/")[2].partition(":")
    python, torch = _PYTHON.search(tag), _TORCH.match(tag) if "pytorch" in repository else None
    return Contents(python=f"3.{python[1]}" if python else None, torch=torch["torch"] if torch else None)


def check_image(uri: str) -> Contents:
    """The known contents of an image. Raises ConfigError if offload does not run in it."""
    contents = contents_of(uri)
    if contents.suits:
        return contents
    works = ""
    with contextlib.suppress(ConfigError):  # without an SDK, AWS's images are unknown
        works = f" {_those_that_work(_table())}"
    raise ConfigError(f"the image {uri} has {contents}: {_needs()}{works}")


def image_for(version: str, region: str, instance_type: str) -> str:
    """The URI of AWS's own image for a PyTorch version, from the table of the installed SageMaker SDK.

    Raises ConfigError if no SDK is installed, the table lacks the version, or offload does not run in its image.
    """
    table = _table()
    known = _versions(table)
    full = next((name for name in known if name == version or name.startswith(f"{version}.")), None)
    if full is None:
        raise ConfigError(
            f"the SageMaker SDK knows no image for PyTorch {version}. {_those_that_work(table)} Pass {argument('image_uri')} for others."
        )
    if not known[full].suits:
        raise ConfigError(
            f"AWS's image for PyTorch {version} has {known[full]}: {_needs()} {_those_that_work(table)} Pass "
            f"{argument('image_uri')} for newer ones."
        )
    try:
        uri: str = table.retrieve(
            "pytorch", region, version=version if "." in version else full, py_version=_tag(known[full].python),
            instance_type=instance_type, image_scope="training",
        )  # fmt: skip
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"there is no image of PyTorch {version} in {region}: {error} Pass {argument('image_uri')}."
        ) from None
    return uri


def quiet_sdk() -> None:
    """Silence messages of the SDK that are useless here."""
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")  # it recommends version 3, which has no estimators
    for name in ("sagemaker", "sagemaker.config"):  # it prints on stdout when it finds no configuration
        logging.getLogger(name).setLevel(logging.WARNING)


def _table() -> Any:
    """The SDK's module of images. It takes seconds to import."""
    quiet_sdk()
    try:
        for name in _TABLES:
            with contextlib.suppress(ImportError):
                return importlib.import_module(name)
    except botocore.exceptions.BotoCoreError as error:  # it reads the AWS configuration
        raise ConfigError(
            f"{argument('framework_version')} needs the SageMaker SDK, which cannot be imported: {error}. Correct AWS_PROFILE and the AWS "
            f"configuration, or pass {argument('image_uri')}."
        ) from None
    raise ConfigError(
        f"{argument('framework_version')} needs the SageMaker SDK, whose table of images it reads: pip install "
        f"'offload[sagemaker]', or pass {argument('image_uri')} with an image from https://github.com/aws/deep-learning-containers."
    )


def _versions(table: Any) -> dict[str, Contents]:
    """The contents of AWS's images by their version of PyTorch, newest first."""
    listed = table.config_for_framework("pytorch")["training"]["versions"]
    return {
        name: Contents(python=_python(listed[name]["py_versions"]), torch=name)
        for name in sorted(listed, key=_numbers, reverse=True)
    }


def _python(tags: list[str]) -> str:
    """The newest Python that an image offers; ``py3`` dates from before 3.6."""
    return max((f"3.{match[1]}" if (match := _PYTHON.search(tag)) else "3.5" for tag in tags), key=_numbers)


def _tag(python: str | None) -> str:
    return f"py{(python or '').replace('.', '')}"


def _those_that_work(table: Any) -> str:
    works = [name for name, contents in _versions(table).items() if contents.suits]
    return f"AWS's images that work: {', '.join(reversed(works)) or 'none that this SDK knows'}."


def _needs() -> str:
    python = ",".join(sorted(map(str, pythons()), reverse=True))  # ">=3.11,<3.15", in this order
    return f"offload needs Python {python} and torch{requirement('torch').specifier}."


def _numbers(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return Version("0")
