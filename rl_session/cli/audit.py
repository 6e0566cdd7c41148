"""``rl-session audit``: what a run did, read from its log.

Parses arguments, opens logs, and turns errors into exit statuses; what is found is drawn by ``tree`` and ``report``.
Modules that a command needs are imported when it runs, so that help costs nothing.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from rl_session.cli.parsing import Group, argument, json_option
from rl_session.cli.refusing import USAGE_STATUS, clean, fail, report

if TYPE_CHECKING:
    from rl_session.audit.reader import AuditReader


@click.group("audit", cls=Group)
def app() -> None:
    """What a run did, read from its audit log: where the time went, what moved, who held the memory."""


def _examples(*commands: str) -> str:
    # \b keeps the lines of a paragraph as they are.
    return "\b\nExamples:\n" + "\n".join(f"  rl-session audit {command}" for command in commands)


_run = argument("run", "The log: the file given as audit_path. - reads standard input.", metavar="RUN")
_output = click.option(
    "-o", "--output", metavar="FILE", help="Where to write; - is standard output. Default: beside the log."
)


@app.command(
    epilog=_examples(
        "show run.jsonl",
        "show run.jsonl --step 7 --moves",
        "show run.jsonl --policy actor --event 'transition.*' --since 10 --until 12.5",
        "show run.jsonl --event guard.rejected        # was anything called in the wrong mode?",
        "show run.jsonl --json --step 7 | jq .bytes_moved",
    )
)
@_run
@click.option(
    "--policy",
    "-p",
    "policies",
    multiple=True,
    metavar="NAME",
    help="Only this policy; * matches. May be given again.",
)
@click.option("--rank", type=click.IntRange(min=0), metavar="K", help="Only what this rank wrote.")
@click.option("--step", "-s", metavar="N|N-M", help="Only these steps.")
@click.option(
    "--event",
    "-e",
    "events",
    multiple=True,
    metavar="NAME",
    help="Only these events, such as 'transition.*'. May be given again.",
)
@click.option("--since", metavar="TIME", help="From here: seconds since the start, or a date and time.")
@click.option("--until", metavar="TIME", help="Up to here, likewise.")
@click.option("--moves", "-m", is_flag=True, help="Show each component that moved.")
@click.option("--follow", "-f", is_flag=True, help="Wait for more, until the session closes or Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print the records, one JSON object a line.")
def show(*, run: str, moves: bool, follow: bool, as_json: bool, **wanted: Any) -> None:
    """Show scopes, transitions and calls as a tree, step by step."""
    from rl_session.cli.filters import read_filters

    filters = read_filters(run, **wanted)
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
            click.echo("nothing matches" if not filters.is_empty else "no records", err=True)


@app.command(
    epilog=_examples(
        "summary run.jsonl",
        "summary run.jsonl --step 7          # where did the time of step 7 go?",
        "summary run.jsonl --json | jq '.memory.actor'",
    )
)
@_run
@click.option("--step", "-s", type=int, metavar="N", help="Only this step: where did its time go?")
@json_option
def summary(*, run: str, step: int | None, as_json: bool) -> None:
    """Sum up a run, or one step of it.

    Time and bytes per policy and mode, the slowest transitions, trouble, and who holds the memory at the end.
    """
    from rl_session.audit.summary import summarize

    with _reading(run) as reader:
        result = summarize(reader.dicts(), step=step)
        if step is not None and not result.num_records:
            _refuse_step(reader, run, step)
        if as_json:
            _write_json({**result.to_json(), "torn": reader.torn, "skipped": reader.skipped})
            return
        from rl_session.cli.report import print_summary

        print_summary(result)


@app.command(epilog=_examples("check run.jsonl", "check run.jsonl --complete --json"))
@_run
@click.option("--complete", is_flag=True, help="Also fail where something began and did not end, as after a crash.")
@json_option
def check(*, run: str, complete: bool, as_json: bool) -> None:
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
        raise click.exceptions.Exit(1)


@app.command(
    epilog=_examples(
        "diff before.jsonl after.jsonl",
        "diff before.jsonl after.jsonl --bytes --json",
        "diff legacy.jsonl scoped.jsonl               # does the loop in scopes do what the legacy loop did?",
        "diff legacy1.jsonl legacy2.jsonl --exact     # two legacy runs, record by record",
    )
)
@argument("a", "The log of one run. - reads standard input.", metavar="A")
@argument("b", "The log of another.", metavar="B")
@click.option("--bytes", "with_bytes", is_flag=True, help="Also fail where other numbers of bytes moved.")
@click.option(
    "--migrated/--exact",
    default=None,
    help="A is a legacy loop, B the same loop in scopes: moves may differ. Assumed where A was run on the legacy API.",
)
@json_option
def diff(*, a: str, b: str, with_bytes: bool, migrated: bool | None, as_json: bool) -> None:
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
        raise click.exceptions.Exit(1)


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
        click.echo(str(report))
    if not report.equal:
        raise click.exceptions.Exit(1)


@app.command(
    epilog=_examples(
        "timeline run.jsonl                  # writes run.html",
        "timeline run.jsonl -o /tmp/run.html",
    )
)
@_run
@_output
@json_option
def timeline(*, run: str, output: str | None, as_json: bool) -> None:
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
@_run
@_output
def trace(*, run: str, output: str | None) -> None:
    """Write a run as a Chrome trace.

    For https://ui.perfetto.dev: processes are policies, arrows lead from transitions to the moves on each rank.
    """
    from rl_session.audit.trace import trace_chunks

    with _reading(run) as reader:
        _save(trace_chunks(reader.dicts()), run, output, ".trace.json")


@app.command(epilog=_examples("schema > audit-schema.json"))
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
            click.echo(clean(f"warning: {run}: {loss}"), err=True)
    except RLSessionError as error:
        report(error)
        raise click.exceptions.Exit(USAGE_STATUS) from error
    except BrokenPipeError:
        # What reads us, such as head, has seen enough. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(0) from None
    except KeyboardInterrupt:
        raise click.exceptions.Exit(0 if follow else 130) from None


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


def _refuse_step(reader: AuditReader, run: str, step: int) -> NoReturn:
    fact, remedy = "the log has no record of that step", f"rl-session audit summary {shlex.quote(run)}"
    # What came through a pipe has gone.
    steps = {record["step"] for record in reader.dicts()} - {None} if run != "-" else set()
    if steps:
        fact += f"; its steps are {min(steps)} to {max(steps)}"
        remedy += f" --step {min(steps, key=lambda each: abs(each - step))}"
    fail(f"summing up step {step} of {run!r}", fact, remedy)


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
        fail(f"writing {output!r}", f"{error.strerror or error}", "-o with a path in a directory that you may write to")
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    click.echo(f"{clean(output)}  {Path(output).stat().st_size:,} bytes", err=True)
