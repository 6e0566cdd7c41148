"""What the commands are built from: click, with the little that it lacks.

Arguments say what they are for, commands are listed in the order of the code, and Ctrl-C ends with the shells' status. Knows
no command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

__all__ = ["Command", "Group", "argument", "json_option"]

_Target = TypeVar("_Target", bound=Callable[..., Any] | click.Command)
_INTERRUPTED = 130
"""The status of a program that Ctrl-C ended, as shells give it."""


class _Argument(click.Argument):
    """A positional argument that says what it is for; click has such a text since 8.5 only."""

    def __init__(self, declarations: Sequence[str], *, about: str, **settings: Any) -> None:
        super().__init__(declarations, **settings)
        self.about = about


class Command(click.Command):
    """A command."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the arguments are for, then the options."""
        rows = [(each.human_readable_name, each.about) for each in self.get_params(ctx) if isinstance(each, _Argument)]
        if rows:
            with formatter.section("Arguments"):
                formatter.write_dl(rows)
        super().format_options(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; Ctrl-C ends it without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(_INTERRUPTED) from None


class Group(click.Group):
    """Commands under one name; without one of them, help is printed."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands in the order in which they were added."""
        return list(self.commands)


def argument(name: str, about: str, **settings: Any) -> Callable[[_Target], _Target]:
    """Add a positional argument.

    Args:
        name: Of the parameter; in capitals it stands in the help.
        about: What it is for.
        settings: As for ``click.argument``.
    """
    return click.argument(name, cls=_Argument, about=about, **settings)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
