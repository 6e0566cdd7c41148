"""The command line, ``rl-session``. Imports neither torch nor ray, so that help and audit tools start at once."""

from __future__ import annotations

import sys

import click

from rl_session.cli.audit import app as _audit
from rl_session.cli.doctor import doctor as _doctor
from rl_session.cli.lint import lint as _lint
from rl_session.cli.migrate import migrate as _migrate
from rl_session.cli.parsing import Group as _Group

__all__ = ["main"]


@click.group("rl-session", cls=_Group)
@click.version_option(package_name="rl-session", message="%(package)s %(version)s", help="Print the version.")
def _app() -> None:
    """Scoped GPU residency for RL post-training."""


for _command in (_audit, _doctor, _lint, _migrate):
    _app.add_command(_command)


def main() -> None:
    """Run the command line."""
    # A name in a log may hold what the terminal's encoding cannot: written as an escape, not refused.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    _app(prog_name="rl-session")
