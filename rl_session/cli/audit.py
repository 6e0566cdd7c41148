"""``rl-session audit``: what a run did, read from its log.

Parses arguments, opens logs, and turns errors into exit statuses; what is found is drawn by ``tree`` and ``report``.
Modules that a command needs are imported when it runs, so that help costs nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rl_session.audit.reader import AuditReader
    from rl_session.audit.show import Filters

app = typer.Typer(
    help="What a run did, read from its audit log: where the time went, what moved, who held the memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _examples(*commands: str) -> str:
    # \b keeps the lines of a paragraph as they are.
    return "\b\nExamples:\n" + "\n".join(f"  rl-session audit {command}" for command in commands)


_Run = Annotated[
    str, typer.Argument(metavar="RUN", help="The log: the file given as audit_path. - reads standard input.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_Output = Annotated[
    str | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="Where to write; - is standard output. Default: beside the log."
    ),
]


@app.command(
    epilog=_examples(
        "show run.jsonl",
        "show run.jsonl --step 7 --moves",
        "show run.jsonl --policy actor --event 'transition.*' --since 10 --until 12.5",
        "show run.jsonl --event guard.rejected        # was anything called in the wrong mode?",
        "show run.jsonl --json --step 7 | jq .bytes_moved",
    )
)
def show(
    run: _Run,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", metavar="NAME", help="Only this policy; * matches. May be given again."),
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="K", help="Only what this rank wrote.", min=0)] = None,
    step: Annotated[str | None, typer.Option("--step", "-s", metavar="N|N-M", help="Only these steps.")] = None,
    event: Annotated[
        list[str] | None,
        typer.Option(
            "--event", "-e", metavar="NAME", help="Only these events, such as 'transition.*'. May be given again."
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="From here: seconds since the start, or a date and time.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Up to here, likewise.")] = None,
    moves: Annotated[bool, typer.Option("--moves", "-m", help="Show each component that moved.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more, until the session closes or Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records, one JSON object a line.")] = False,
) -> None:
    """Show scopes, transitions and calls as a tree, step by step."""
    filters = _filters(policy, rank, step, event, since, until)
    with _reading(run, follow=follow) as reader:
        records = _until_closed(reader) if follow else reader.dicts()
        if as_json:
            from rl_session.audit.show import filter_records

            for record in filter_records(records, filters):
                _write_json(record, flush=follow)
            return
        from rl_session.cli.tree import follow_tree, print_tree

        draw = follow_tree if follow else print_tree
        if not draw(records, filters, moves=moves):
            typer.echo("nothing matches" if not filters.is_empty else "no records", err=True)


@app.command(
    epilog=_examples(
        "summary run.jsonl",
        "summary run.jsonl --step 7          # where did the time of step 7 go?",
        "summary run.jsonl --json | jq '.memory.actor'",
    )
)
def summary(
    run: _Run,
    step: Annotated[
        int | None, typer.Option("--step", "-s", metavar="N", help="Only this step: where did its time go?")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Sum up a run, or one step of it.

    Time and bytes per policy and mode, the slowest transitions, trouble, and who holds the memory at the end.
    """
    from rl_session.audit.summary import summarize

    with _reading(run) as reader:
        result = summarize(reader.dicts(), step=step)
        if step is not None and not result.num_records:
            _fail(
                f"summing up step {step} of {run!r}", "the log has no record of that step", "a step that is in the log"
            )
        if as_json:
            _write_json({**result.to_json(), "torn": reader.torn, "skipped": reader.skipped})
            return
        from rl_session.cli.report import print_summary

        print_summary(result)


@app.command(
    epilog=_examples(
        "check run.jsonl",
        "check run.jsonl --complete --json",
    )
)
def check(
    run: _Run,
    complete: Annotated[
        bool, typer.Option("--complete", help="Also fail where something began and did not end, as after a crash.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Check that a log is whole and makes sense.

    Exit status: 0 nothing wrong, 1 something is, 2 not an audit log.
    """
    from rl_session.audit.check import check as check_log

    with _reading(run) as reader:
        result = check_log(reader)
        if as_json:
            import attrs

            _write_json({"ok": result.ok, **attrs.asdict(result)})
        else:
            from rl_session.cli.report import print_check

            print_check(result)
    if result.findings or (complete and result.unfinished):
        raise typer.Exit(1)


@app.command(
    epilog=_examples(
        "diff before.jsonl after.jsonl",
        "diff before.jsonl after.jsonl --bytes --json",
        "diff legacy.jsonl scoped.jsonl               # does the loop in scopes do what the legacy loop did?",
        "diff legacy1.jsonl legacy2.jsonl --exact     # two legacy runs, record by record",
    )
)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="The log of one run. - reads standard input.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The log of another.")],
    with_bytes: Annotated[bool, typer.Option("--bytes", help="Also fail where other numbers of bytes moved.")] = False,
    migrated: Annotated[
        bool | None,
        typer.Option(
            "--migrated/--exact",
            help="A is a legacy loop, B the same loop in scopes: moves may differ. Assumed where A was run on the legacy API.",
            show_default=False,
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Compare two runs, and show where they part.

    Counts, transitions, bytes and seconds, and the first record that differs. Time is shown and never counts as a
    difference: it is the machine's. Where A was run on the legacy API (or with --migrated) only what was computed counts (calls,
    modes, weights, results), and what was on the device at a wake and at most; --exact compares the records all the same.

    Exit status: 0 both did the same in the same order, 1 they did not (or it is not proved: results need verify="checksum" in
    both runs), 2 one is not an audit log.
    """
    from rl_session.audit.diff import diff as compare

    if migrated or (migrated is None and "-" not in (a, b) and _is_by_hand(a)):
        _prove(a, b, as_json=as_json)
        return
    with _reading(a) as first, _reading(b) as second:
        result = compare(first.dicts(), second.dicts())
        if as_json:
            _write_json(result.to_json())
        else:
            from rl_session.cli.report import print_diff

            print_diff(result, a, b)
    if not result.is_same_shape or (with_bytes and result.bytes_differ):
        raise typer.Exit(1)


def _is_by_hand(run: str) -> bool:
    """Whether a run moved its models through the legacy API, and opened no scope."""
    with _reading(run) as reader:
        said = {
            record.get("via")
            for record in reader.dicts()
            if record["event"].startswith(("transition.", "scope.", "call."))
        }
    return "shim" in said and "scope" not in said


def _prove(legacy: str, scoped: str, *, as_json: bool) -> None:
    from rl_session_migrate.proof import verify

    with _reading(legacy) as first, _reading(scoped) as second:
        report = verify(first, second)
    if as_json:
        _write_json(report.to_json())
    else:
        typer.echo(str(report))
    if not report.equal:
        raise typer.Exit(1)


@app.command(
    epilog=_examples(
        "timeline run.jsonl                  # writes run.html",
        "timeline run.jsonl -o /tmp/run.html",
    )
)
def timeline(run: _Run, output: _Output = None, as_json: _Json = False) -> None:
    """Draw a run as one HTML page.

    Scopes, moves and calls in lanes, the memory below them. The page needs no network and can be mailed. --json
    writes what is drawn instead.
    """
    from rl_session.audit.timeline import render_page, timeline_data

    with _reading(run) as reader:
        data = timeline_data(reader.dicts())
        data["notes"] = _losses(reader)
        if as_json:
            import orjson

            _save(orjson.dumps(data) + b"\n", run, output or "-", ".json")
        else:
            _save(render_page(data).encode(), run, output, ".html")


@app.command(
    epilog=_examples(
        "trace run.jsonl                     # writes run.trace.json",
        "trace run.jsonl -o - | gzip > run.trace.json.gz",
    )
)
def trace(run: _Run, output: _Output = None) -> None:
    """Write a run as a Chrome trace.

    For https://ui.perfetto.dev: processes are policies, arrows lead from transitions to the moves on each rank.
    """
    from rl_session.audit.trace import trace_chunks

    with _reading(run) as reader:
        _save(trace_chunks(reader.dicts()), run, output, ".trace.json")


@app.command(
    epilog=_examples(
        "schema > audit-schema.json",
    )
)
def schema() -> None:
    """Print the JSON Schema of a line of the log."""
    import orjson

    from rl_session.audit.schema import schema as line_schema

    _write_bytes(orjson.dumps(line_schema(), option=orjson.OPT_INDENT_2) + b"\n")


# -- reading -----------------------------------------------------------------------------------------------------


@contextmanager
def _reading(run: str, *, follow: bool = False) -> Iterator[AuditReader]:
    """Open a log; tell of lines that could not be read, and end quietly where the other side of a pipe has gone."""
    from rl_session.audit.reader import AuditReader
    from rl_session.errors import RLSessionError

    try:
        reader = AuditReader(run, follow=follow)
        yield reader
        sys.stdout.flush()
        for loss in _losses(reader):
            typer.echo(_clean(f"warning: {run}: {loss}"), err=True)
    except RLSessionError as error:
        name = next(cls.__name__ for cls in type(error).__mro__ if not cls.__name__.startswith("_"))
        typer.echo(_clean(f"{name}: {error}"), err=True)
        raise typer.Exit(2) from error
    except BrokenPipeError:
        # What reads us, such as head, has seen enough. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        raise typer.Exit(0 if follow else 130) from None


def _losses(reader: AuditReader) -> list[str]:
    """Say what the latest reading could not read."""
    from rl_session.cli.text import count_text

    said = []
    if reader.torn:
        said.append(f"{count_text(reader.torn, 'file ends', 'files end')} in half a line, as after a crash")
    if reader.skipped:
        said.append(f"{count_text(reader.skipped, 'line is', 'lines are')} no record, and skipped")
    return said


def _until_closed(reader: AuditReader) -> Iterator[dict[str, Any]]:
    for record in reader.dicts():
        yield record
        if record["event"] == "session.closed":
            reader.stop()


def _filters(
    policies: list[str] | None,
    rank: int | None,
    step: str | None,
    events: list[str] | None,
    since: str | None,
    until: str | None,
) -> Filters:
    from rl_session.audit.show import Filters, parse_steps, parse_time

    try:
        return Filters(
            policies=tuple(policies or ()),
            rank=rank,
            steps=None if step is None else parse_steps(step),
            events=tuple(events or ()),
            since=None if since is None else parse_time(since),
            until=None if until is None else parse_time(until),
        )
    except ValueError as error:
        _fail("reading the filters", str(error), "--step 7, --step 3-9, --since 12.5, --until '2026-11-30 18:54:20'")


def _fail(attempted: str, fact: str, remedy: str) -> NoReturn:
    """Refuse in the three parts that the library's errors have."""
    typer.echo(_clean(f"AuditError: {attempted}\n  {fact}\n  write: {remedy}"), err=True)
    raise typer.Exit(2)


def _clean(text: str) -> str:
    from rl_session.cli.text import printable

    return "\n".join(printable(line) for line in text.split("\n"))


# -- writing -----------------------------------------------------------------------------------------------------


def _write_bytes(data: bytes) -> None:
    # Straight to the bytes below the text, after what is waiting above.
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:
        sys.stdout.write(data.decode())
    else:
        buffer.write(data)


def _write_json(value: Any, *, flush: bool = False) -> None:
    import orjson

    _write_bytes(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))
    if flush:
        sys.stdout.flush()


def _save(data: bytes | Iterator[bytes], run: str, output: str | None, suffix: str) -> None:
    """Write a file whole or not at all, and say where it is."""
    chunks = iter([data]) if isinstance(data, bytes) else data
    if output is None and run != "-":
        path = Path(run)
        output = str(path.with_name(path.name.removesuffix(".jsonl") + suffix))
    if output is None or output == "-":
        for chunk in chunks:
            _write_bytes(chunk)
        return
    part = Path(f"{output}.part")
    try:
        with part.open("wb") as file:
            file.writelines(chunks)
        part.replace(output)
    except OSError as error:
        part.unlink(missing_ok=True)
        _fail(
            f"writing {output!r}", f"{error.strerror or error}", "-o with a path in a directory that you may write to"
        )
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    typer.echo(f"{_clean(output)}  {Path(output).stat().st_size:,} bytes", err=True)
