"""``offload launch``, which starts a training on other machines."""

from __future__ import annotations

import click

from offload.cli.launch.ray import ray
from offload.cli.launch.sagemaker import sagemaker


@click.group()
def launch() -> None:
    """Start a training on other machines."""


launch.add_command(ray)
launch.add_command(sagemaker)
