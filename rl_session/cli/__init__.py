"""The command line, ``rl-session``. Imports neither torch nor ray, so that help and audit tools start at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rl_session.cli.audit import app as _audit
from rl_session.cli.doctor import doctor as _doctor
from rl_session.cli.lint import EPILOG as _LINT_EPILOG
from rl_session.cli.lint import lint as _lint
from rl_session.cli.migrate import EPILOG as _MIGRATE_EPILOG
from rl_session.cli.migrate import migrate as _migrate

__all__ = ["main"]

_app = typer.Typer(
    name="rl-session",
    help="Scoped GPU residency for RL post-training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_app.add_typer(_audit, name="audit")
_app.command("doctor")(_doctor)
_app.command("lint", epilog=_LINT_EPILOG)(_lint)
_app.command("migrate", epilog=_MIGRATE_EPILOG)(_migrate)


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version  # takes as long as everything else here

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
    # A name in a log may hold what the terminal's encoding cannot: written as an escape, not refused.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    _app()
