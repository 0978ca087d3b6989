"""The options of a command, and the parameters that a user passed."""

from __future__ import annotations

import click
from click.core import ParameterSource


def options_of(command: click.Command | None) -> set[str]:
    """The options of a command and of the commands below it."""
    found = {option for param in command.params for option in param.opts} if command is not None else set()
    if isinstance(command, click.Group):
        found.update(*(options_of(each) for each in command.commands.values()))
    return found


def said_on_the_command_line(ctx: click.Context) -> list[click.Parameter]:
    """The parameters that the user passed on the command line, not those from defaults and the environment."""
    return [
        param
        for param in ctx.command.params
        if ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    ]
