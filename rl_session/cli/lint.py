"""``rl-session lint``: mistakes in training loops, found without running them.

Parses arguments, shows progress and findings, and turns them into an exit status; what is found is decided in
:mod:`rl_session_migrate.lint`. Modules that the command needs are imported when it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rl_session_migrate.lint import Finding, Report

__all__ = ["EPILOG", "lint"]

_MANY = 20
"""Files from which a progress bar is worth drawing."""

EPILOG = (
    "\b\nExamples:\n"
    "  rl-session lint train.py\n"
    "  rl-session lint loops/ --ignore RLM005\n"
    "  rl-session lint loops/ --format github          # beside the lines of a pull request\n"
    "  rl-session lint --explain RLM004\n"
    "\b\nExit status: 0 nothing found, 1 something found, 2 wrong usage or a file that cannot be parsed."
)


class Format(StrEnum):
    """How findings are printed."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


def lint(
    paths: Annotated[list[Path] | None, typer.Argument(metavar="PATHS", help="Files and folders.")] = None,
    output: Annotated[Format, typer.Option("--format", "-f", help="How to print the findings.")] = Format.TEXT,
    select: Annotated[
        list[str] | None, typer.Option(metavar="CODES", help="Only these codes; RLM1 means all of RLM1...")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="CODES", help="Not these codes.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes; one a core by default.")] = None,
    explain: Annotated[str | None, typer.Option(metavar="CODE", help="Explain a code and exit.")] = None,
) -> None:
    """Find mistakes in training loops without running them.

    Configuration comes from [tool.rl-session.lint] and [tool.rl-session.migrate] of the nearest pyproject.toml.
    A comment "# noqa: RLM001" silences a line.
    """
    from rl_session.errors import RLSessionError

    try:
        status = _explain(explain) if explain is not None else _run(paths or [], output, select, ignore, jobs)
    except RLSessionError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def _run(
    paths: list[Path], output: Format, select: list[str] | None, ignore: list[str] | None, jobs: int | None
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
    typer.echo(
        f"{found.code} {found.name} ({found.severity})\n\n{found.why}\n\nWrong:\n\n{indented[0]}\n\nRight:\n\n{indented[1]}"
    )
    if found.more:
        typer.echo(f"\n{found.more}")
    return 0


# -- showing -----------------------------------------------------------------------------------------------------


def _print(report: Report, output: Format) -> None:
    match output:
        case Format.JSON:
            import orjson

            document = {"num_files": report.num_files, "findings": [finding.as_json() for finding in report.findings]}
            sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
        case Format.GITHUB:
            for finding in report.findings:
                typer.echo(finding.as_github())
        case Format.TEXT:
            for finding in report.findings:
                typer.echo(_text(finding))
            typer.echo(_summary(report), err=True)


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
