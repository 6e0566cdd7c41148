"""``rl-session migrate``: rewrites loops that move models by hand into loops with scopes.

Parses arguments, shows progress and results, writes files, and turns errors into exit statuses; what is rewritten is decided in
:mod:`rl_session_migrate.codemod`. Modules that the command needs are imported when it runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_session.cli.parsing import Command, argument
from rl_session.cli.refusing import refusing

if TYPE_CHECKING:
    from rl_session_migrate.codemod.batch import FileResult
    from rl_session_migrate.codemod.report import Count, Totals

__all__ = ["migrate"]

MANY = 20
"""Files from which a progress bar is worth drawing."""

_EPILOG = (
    "\b\nExamples:\n"
    "  rl-session migrate loops/                     # what would happen\n"
    "  rl-session migrate loops/ --diff              # and how\n"
    "  rl-session migrate loops/ --write             # do it\n"
    "  rl-session migrate loops/ --report report.json\n"
    "\b\nExit status: 0 done, 1 a file could not be read, parsed or written (or, with --check, something is left to do), 2 usage."
)


@click.command(cls=Command, epilog=_EPILOG)
@argument("paths", "Files and folders.", nargs=-1, required=True, type=Path)
@click.option("--write", "-w", is_flag=True, help="Write the files; without it nothing is changed.")
@click.option("--diff", "-d", is_flag=True, help="Print the changes as a unified diff.")
@click.option("--report", type=Path, metavar="FILE", help="Write every site, with what became of it, as JSON.")
@click.option("--check", is_flag=True, help="Exit with 1 if a file would change or a site stays.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out files and folders. May be given again.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), metavar="N", help="Processes; one a core by default.")
@click.option("--quiet", "-q", is_flag=True, help="Print no summary and no progress.")
def migrate(
    *,
    paths: tuple[Path, ...],
    write: bool,
    diff: bool,
    report: Path | None,
    check: bool,
    exclude: tuple[str, ...],
    jobs: int | None,
    quiet: bool,
) -> None:
    """Rewrite loops that move models by hand into loops with scopes."""
    from rl_session_migrate.codemod.batch import FileStatus
    from rl_session_migrate.codemod.report import to_json, totals

    with refusing():
        results, seconds = _run(paths, exclude, jobs, quiet)
    changed = [result for result in results if result.status is FileStatus.REWRITTEN]
    failures = [(result.path, result.error) for result in results if result.status is FileStatus.FAILED]
    if diff:
        for result in changed:
            click.echo(_diff(result), nl=False)
    if write:
        failures += [failure for result in changed if (failure := _write(result)) is not None]
    if report is not None:
        report.write_bytes(to_json(results))
    counted = totals(results)
    if not quiet:
        _summary(results, counted, seconds, written=write)
    for path, why in failures:
        click.echo(f"{path}: {why}", err=True)
    is_open = bool(changed) or counted.trainers.left + counted.engines.left > 0
    raise click.exceptions.Exit(1 if failures or (check and is_open) else 0)


def _run(
    paths: tuple[Path, ...], exclude: tuple[str, ...], jobs: int | None, quiet: bool
) -> tuple[list[FileResult], float]:
    """What becomes of each file, and the seconds that it took; writes nothing."""
    from rl_session_migrate.codemod.batch import migrate_files
    from rl_session_migrate.codemod.files import discover
    from rl_session_migrate.settings import read_settings

    settings = read_settings(paths[0])
    files = discover(paths, (*settings.exclude, *exclude))
    start = time.perf_counter()
    with _progress(len(files), quiet=quiet) as advance:
        results = migrate_files(files, names=settings.names, jobs=jobs, on_done=advance)
    return results, time.perf_counter() - start


def _write(result: FileResult) -> tuple[Path, str] | None:
    from rl_session_migrate.codemod.files import write_atomically

    assert result.result is not None
    try:
        write_atomically(result.path, result.result.after, expected=result.result.before)
    except OSError as error:
        return result.path, f"not written: {error.strerror or error}"
    return None


def _diff(result: FileResult) -> str:
    import difflib

    assert result.result is not None
    before, after = (
        data.decode("utf-8", errors="replace").splitlines(keepends=True)
        for data in (result.result.before, result.result.after)
    )
    name = result.path.as_posix()
    lines = difflib.unified_diff(before, after, fromfile=f"a/{name}", tofile=f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


# -- showing -------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(num_files: int, *, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A progress bar on standard error, where somebody looks at it and it takes a while."""
    if quiet or num_files < MANY or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda result: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("migrating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[path]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_files, path="")
        yield lambda result: progress.update(task, advance=1, path=str(result.path))


def _summary(results: Sequence[FileResult], counted: Totals, seconds: float, *, written: bool) -> None:
    rewritten, failed = counted.files["rewritten"], counted.files["failed"]
    verb = "rewritten" if written else "to rewrite (nothing written; --write does)"
    speed = f"{counted.num_lines / seconds:,.0f} lines/s" if seconds > 0 else ""
    click.echo(
        f"{len(results)} files, {counted.num_lines:,} lines in {seconds:.1f} s ({speed}): {rewritten} {verb}, {failed} failed"
    )
    click.echo(_line("policy and value sites", counted.trainers))
    click.echo(_line("engine sites", counted.engines))
    if counted.unknown.found:
        click.echo(f"sites of nobody who is known: {counted.unknown.found} found, left as they are")
    for result in results:
        for outcome in result.result.outcomes if result.result is not None else ():
            if outcome.status == "left":
                target = f"{outcome.receiver}.{outcome.method}" if outcome.receiver else outcome.method
                click.echo(f"  {result.path}:{outcome.line}:{outcome.column}: {target} stays: {outcome.why}")
    if counted.reasons:
        click.echo("why sites stay:")
        for why, number in counted.reasons.most_common():
            click.echo(f"  {number:4d}  {why}")
    assumed = [(result.path, text) for result in results if result.result is not None for text in result.result.assumed]
    if assumed:
        click.echo("taken for granted:")
        for path, text in assumed:
            click.echo(f"  {path}: {text}")


def _line(name: str, count: Count) -> str:
    return f"{name}: {count.found} found, {count.rewritten} rewritten, {count.left} left ({count.share:.0%} rewritten)"
