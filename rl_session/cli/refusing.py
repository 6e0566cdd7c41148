"""How a command refuses: in the three parts that the library's errors have, and with words for a shell.

What the library raises says what to write in Python; who gave a command is told which command to give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from rl_session.errors import RLSessionError

__all__ = ["clean", "fail", "refusing", "report"]

USAGE_STATUS = 2


def fail(attempted: str, fact: str, remedy: str) -> NoReturn:
    """Say what was attempted, what is known and what to write instead, and end with the status of wrong usage."""
    click.echo(clean(f"AuditError: {attempted}\n  {fact}\n  write: {remedy}"), err=True)
    raise click.exceptions.Exit(USAGE_STATUS)


def report(error: RLSessionError) -> None:
    """Say what the library said of a log."""
    from rl_session.errors import AuditError

    name = next(cls.__name__ for cls in type(error).__mro__ if not cls.__name__.startswith("_"))
    if isinstance(error, AuditError):
        remedy = f"{_usage()}, with the file that the run was given as audit_path"
        error = AuditError(error.attempted, error.facts, remedy, error.cause)
    click.echo(clean(f"{name}: {error}"), err=True)


@contextmanager
def refusing() -> Iterator[None]:
    """What the library raises in the block is said, and ends the command with the status of wrong usage."""
    from rl_session.errors import RLSessionError

    try:
        yield
    except RLSessionError as error:
        click.echo(str(error), err=True)
        raise click.exceptions.Exit(USAGE_STATUS) from None


def _usage() -> str:
    """The command that is running, with the names of its arguments: ``rl-session audit diff A B``."""
    context = click.get_current_context()
    names = [each.human_readable_name for each in context.command.params if isinstance(each, click.Argument)]
    return " ".join([context.command_path, *names])


def clean(text: str) -> str:
    """Return a message with everything a terminal would obey written out as an escape, but for its line ends."""
    from rl_session.cli.text import printable

    return "\n".join(printable(line) for line in text.split("\n"))
