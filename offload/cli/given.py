"""What was said on a command line, as against defaults and the environment."""

from __future__ import annotations

import click
from click.core import ParameterSource


def given(ctx: click.Context) -> list[click.Parameter]:
    """What was said on the command line."""
    return [
        param
        for param in ctx.command.params
        if ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    ]
