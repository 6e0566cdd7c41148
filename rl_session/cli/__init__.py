"""The command line, ``rl-session``. Imports neither torch nor ray, so that help and audit tools start at once."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

__all__ = ["main"]

_app = typer.Typer(
    name="rl-session", help="Scoped GPU residency for RL post-training.", no_args_is_help=True, add_completion=False
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"rl-session {version('rl-session')}")
        raise typer.Exit


@_app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Scoped GPU residency for RL post-training."""


def main() -> None:
    """Run the command line."""
    _app()
