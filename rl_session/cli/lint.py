"""``rl-session lint``: mistakes in training loops, found without running them.

Parses arguments, shows progress and findings, and turns them into an exit status; what is found is decided in
:mod:`rl_session_migrate.lint`. Modules that the command needs are imported when it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from rl_session.cli.parsing import Command, argument
from rl_session.cli.refusing import refusing

if TYPE_CHECKING:
    from rl_session_migrate.lint import Finding, Report

__all__ = ["lint"]

_MANY = 20
"""Files from which a progress bar is worth drawing."""

_EPILOG = (
    "\b\nExamples:\n"
    "  rl-session lint train.py\n"
    "  rl-session lint loops/ --ignore RLM005\n"
    "  rl-session lint loops/ --format github          # beside the lines of a pull request\n"
    "  rl-session lint --explain RLM004\n"
    "\b\nExit status: 0 nothing found, 1 something found, 2 wrong usage or a file that cannot be parsed."
)


_Format = Literal["text", "json", "github"]


@click.command(cls=Command, epilog=_EPILOG)
@argument("paths", "Files and folders.", nargs=-1, type=Path)
@click.option(
    "--format",
    "-f",
    "output",
    type=click.Choice(["text", "json", "github"]),
    default="text",
    show_default=True,
    help="How to print the findings.",
)
@click.option("--select", multiple=True, metavar="CODES", help="Only these codes; RLM1 means all of RLM1...")
@click.option("--ignore", multiple=True, metavar="CODES", help="Not these codes.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), metavar="N", help="Processes; one a core by default.")
@click.option("--explain", metavar="CODE", help="Explain a code and exit.")
def lint(
    *,
    paths: tuple[Path, ...],
    output: _Format,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    jobs: int | None,
    explain: str | None,
) -> None:
    """Find mistakes in training loops without running them.

    Configuration comes from [tool.rl-session.lint] and [tool.rl-session.migrate] of the nearest pyproject.toml.
    A comment "# noqa: RLM001" silences a line.
    """
    with refusing():
        status = _explain(explain) if explain is not None else _run(paths, output, select, ignore, jobs)
    raise click.exceptions.Exit(status)


def _run(
    paths: tuple[Path, ...],
    output: _Format,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    jobs: int | None,
) -> int:
    from rl_session.errors import ConfigError
    from rl_session_migrate.lint import lint_files, load_config
    from rl_session_migrate.lint.engine import find_files

    if not paths:
        raise ConfigError("rl-session lint", ("no path was given",), "rl-session lint train.py")
    config = load_config(paths[0]).chosen(select, ignore)
    files = find_files(paths, config)
    with _progress(len(files)) as advance:
        report = lint_files(files, config, jobs=jobs, progress=advance)
    _print(report, output)
    if report.num_unreadable:
        return 2
    return 1 if report.findings else 0


def _explain(code: str) -> int:
    from rl_session.errors import ConfigError
    from rl_session_migrate.lint import CODES

    found = CODES.get(code.upper())
    if found is None:
        raise ConfigError(f"--explain {code}", ("there is no such code",), f"one of {', '.join(CODES)}")
    indented = ["\n".join(f"    {line}" for line in text.splitlines()) for text in (found.wrong, found.right)]
    click.echo(
        f"{found.code} {found.name} ({found.severity})\n\n{found.why}\n\nWrong:\n\n{indented[0]}\n\nRight:\n\n{indented[1]}"
    )
    if found.more:
        click.echo(f"\n{found.more}")
    return 0


# -- showing -----------------------------------------------------------------------------------------------------


def _print(report: Report, output: _Format) -> None:
    match output:
        case "json":
            import orjson

            document = {"num_files": report.num_files, "findings": [finding.as_json() for finding in report.findings]}
            sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
        case "github":
            for finding in report.findings:
                click.echo(finding.as_github())
        case "text":
            for finding in report.findings:
                click.echo(_text(finding))
            click.echo(_summary(report), err=True)


def _text(finding: Finding) -> str:
    from rl_session.cli.text import printable

    return "\n".join(printable(line) for line in str(finding).split("\n"))


def _summary(report: Report) -> str:
    files = f"{report.num_files} file{'' if report.num_files == 1 else 's'}"
    if not report.findings:
        return f"{files}: nothing found"
    num = len(report.findings)
    return f"{files}: {num} finding{'' if num == 1 else 's'}; rl-session lint --explain {report.findings[0].code} says more"


@contextmanager
def _progress(num_files: int) -> Iterator[Callable[[Path], None]]:
    """A progress bar on standard error, where somebody looks at it and it takes a while."""
    if num_files < _MANY or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda path: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: tuple[Any, ...] = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_files)
        yield lambda path: progress.update(task, advance=1)
