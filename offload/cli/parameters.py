"""The options of a command, and the parameters that a user passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click
from click.core import ParameterSource

from offload.errors import ConfigError


def options_of(command: click.Command | None) -> set[str]:
    """The options of a command and of the commands below it."""
    options = {option for param in command.params for option in param.opts} if command is not None else set()
    if isinstance(command, click.Group):
        options.update(*(options_of(subcommand) for subcommand in command.commands.values()))
    return options


def said_on_the_command_line(ctx: click.Context) -> list[click.Parameter]:
    """The parameters that the user passed on the command line, not those from defaults and the environment."""
    return [
        param
        for param in ctx.command.params
        if ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    ]


def check_together(ctx: click.Context, others: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for what has no effect beside an option that asks for something else, such as --status.

    ``others``: these options' names, with the names of the options that may stand beside each.
    """
    said = {str(param.name): param for param in said_on_the_command_line(ctx)}
    for name, goes_with in others.items():
        if name not in said:
            continue
        option = said[name].opts[0]
        for other, param in said.items():
            if other != name and other not in goes_with and ctx.params[other] not in (None, ()):
                what = param.opts[0] if isinstance(param, click.Option) else str(param.name).upper()
                raise ConfigError(f"{what} has no effect beside {option}: drop one of them.")
