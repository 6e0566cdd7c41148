"""What ``rl-session audit summary``, ``check`` and ``diff`` print. Knows how totals look, not where they come from."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from rl_session.cli.text import (
    Printer,
    bytes_text,
    count_text,
    printable,
    rate_text,
    seconds_text,
    share_text,
)

if TYPE_CHECKING:
    from rl_session.audit.check import CheckResult, Finding
    from rl_session.audit.diff import Difference, Parting
    from rl_session.audit.summary import Summary, Total

_NUM_STEPS = 8
_NUM_ROWS = 40
_ARROW = "\N{RIGHTWARDS ARROW}"
_MAX_LINE = 400


def print_summary(summary: Summary) -> None:
    """Print the totals of a run, or of one step."""
    out = Printer()
    _print_head(out, summary)
    _print_where(out, summary)
    _print_scopes(out, summary)
    _print_transitions(out, summary)
    _print_calls(out, summary)
    _print_top(out, "Slowest transitions", summary.slowest)
    if [row["transition_id"] for row in summary.largest] != [row["transition_id"] for row in summary.slowest]:
        _print_top(out, "Most bytes moved", summary.largest)
    _print_steps(out, summary)
    _print_trouble(out, summary)
    _print_memory(out, summary)
    out.flush()


def _print_head(out: Printer, summary: Summary) -> None:
    started = datetime.fromtimestamp(summary.start_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    out.line(
        f"{out.style('run', 'dim')} {out.style(printable(summary.run_id), 'bold')}  {started}  "
        f"{seconds_text(summary.seconds)}  {count_text(summary.num_records, 'record')}"
    )
    if len(summary.sources) > 1:
        said = ", ".join(f"{printable(source)} {count:,}" for source, count in sorted(summary.sources.items()))
        out.line(out.style(f"from {said}", "dim"))
    if summary.step is not None:
        return
    if summary.error:
        out.line(out.style(f"ended by {printable(summary.error)}", "bad"))
    elif summary.is_closed:
        out.line(out.style("ended normally", "good"))
    else:
        out.line(out.style("no end recorded: still running, or it crashed", "warn"))


def _print_where(out: Printer, summary: Summary) -> None:
    total = summary.moving
    if summary.step is not None and (step := summary.steps.get(summary.step)) is not None:
        rest = max(0.0, step.seconds - step.moving - step.calling)
        out.head(f"Step {summary.step} took {seconds_text(step.seconds)}")
        parts = (("calls", step.calling), ("moving", step.moving), ("everything else", rest))
        rows = [[name, seconds_text(t), share_text(t / step.seconds) if step.seconds else ""] for name, t in parts]
        out.table(["", ">time", ">share"], rows)
    share = f", {share_text(total.seconds / summary.seconds)} of the time" if summary.seconds > 0 else ""
    out.line(
        f"{bytes_text(total.bytes_moved)} moved and {bytes_text(total.bytes_elided)} elided in "
        f"{count_text(total.count, 'transition')}: {seconds_text(total.seconds)} moving{share}"
    )


def _print_scopes(out: Printer, summary: Summary) -> None:
    if not summary.scopes:
        return
    out.head("Time in scopes")
    rows = [
        [
            *map(printable, key),
            f"{total.count:,}",
            seconds_text(total.seconds),
            seconds_text(total.seconds / total.count),
            share_text(total.seconds / summary.seconds) if summary.seconds else "",
            _failed(total),
        ]
        for key, total in _by_time(summary.scopes)
    ]
    out.table(["policy", "mode", ">number", ">time", ">each", ">of the time", ">failed"], rows)


def _print_transitions(out: Printer, summary: Summary) -> None:
    if not summary.transitions:
        return
    out.head("Transitions")
    rows = [
        [
            printable(policy),
            f"{printable(old)} {_ARROW} {printable(new)}",
            f"{total.count:,}",
            seconds_text(total.seconds),
            seconds_text(total.seconds / total.count),
            _size(total.bytes_moved),
            _size(total.bytes_elided),
            rate_text(total.gb_per_second) or "-",
            _failed(total),
        ]
        for (policy, old, new), total in _by_time(summary.transitions)
    ]
    out.table(
        ["policy", "from and to", ">number", ">time", ">each", ">moved", ">elided", ">throughput", ">failed"], rows
    )


def _print_calls(out: Printer, summary: Summary) -> None:
    if not summary.calls:
        return
    out.head("Calls")
    rows = [
        [
            *map(printable, key),
            f"{total.count:,}",
            seconds_text(total.seconds),
            seconds_text(total.seconds / total.count),
            _failed(total),
        ]
        for key, total in _by_time(summary.calls)
    ]
    out.table(["policy", "method", "mode", ">number", ">time", ">each", ">failed"], rows)


def _print_top(out: Printer, title: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    out.head(title)
    cells = [
        [
            seconds_text(row["seconds"]),
            _size(row["bytes_moved"]),
            _size(row["bytes_elided"]),
            f"{row['at']:.3f} s",
            "" if row["step"] is None else str(row["step"]),
            printable(row["policy"] or "-"),
            f"{printable(row['from_mode'])} {_ARROW} {printable(row['to_mode'])}",
            printable(row["reason"]) + ("" if row["outcome"] == "committed" else f" ({row['outcome']})"),
        ]
        for row in rows
    ]
    out.table([">time", ">moved", ">elided", ">at", ">step", "policy", "from and to", "why"], cells)


def _print_steps(out: Printer, summary: Summary) -> None:
    if len(summary.steps) < 2:
        return
    slowest = sorted(summary.steps.items(), key=lambda item: -item[1].seconds)[:_NUM_STEPS]
    title = "Steps" if len(slowest) == len(summary.steps) else f"Slowest of {len(summary.steps):,} steps"
    out.head(title)
    rows = [
        [
            str(number),
            seconds_text(step.seconds),
            seconds_text(step.moving),
            share_text(step.share_moving),
            seconds_text(step.calling),
            _size(step.bytes_moved),
            _size(step.bytes_elided),
        ]
        for number, step in slowest
    ]
    out.table([">step", ">time", ">moving", ">share", ">calls", ">moved", ">elided"], rows)


def _print_trouble(out: Printer, summary: Summary) -> None:
    if summary.rejected:
        out.head("Refused calls")
        rejected = sorted(summary.rejected.items(), key=lambda item: -item[1])
        rows = [[*map(printable, key), f"{count:,}"] for key, count in rejected]
        out.table(["policy", "method", "in mode", "needs", ">times"], rows, styles=["warn"] * len(rows))
    if summary.warnings:
        out.head("Warnings")
        for (code, message, policy), count in summary.warnings.items():
            times = f" ({count:,} times)" if count > 1 else ""
            out.line("  " + out.style(printable(code), "warn") + f"  {printable(policy)}: {_short(message)}{times}")
    for title, lines in (("Trouble", summary.trouble), ("Unfinished", summary.unfinished)):
        if lines:
            out.head(title)
            for line in lines:
                out.line("  " + out.style(_short(line), "bad"))


def _print_memory(out: Printer, summary: Summary) -> None:
    held = {policy: components for policy, components in summary.memory.items() if any(components.values())}
    if not held:
        return
    ended = "at the end" if summary.is_closed else "at the last record"
    out.head(f"Memory {ended if summary.step is None else f'at the end of step {summary.step}'}")
    rows, styles = [], []
    for policy, components in held.items():
        sums = {tier: sum(tiers.get(tier, 0) for tiers in components.values()) for tier in ("device", "host")}
        for component, tiers in components.items():
            if any(tiers.values()):
                rows.append([printable(policy), printable(component), _tier(tiers, "device"), _tier(tiers, "host")])
                styles.append("")
        rows.append([printable(policy), "together", _size(sums["device"]), _size(sums["host"])])
        styles.append("bold")
    out.table(["policy", "component", ">device", ">host"], rows, styles=styles)
    for policy, health in summary.health.items():
        out.line("  " + out.style(f"{printable(policy)} is {health}: where its bytes are is not certain", "bad"))


def print_check(result: CheckResult) -> None:
    """Print what a check found."""
    out = Printer()
    if result.findings:
        out.line(out.style(f"{count_text(result.num_findings, 'finding')} in {result.num_records:,} records", "bad"))
        for finding in result.findings[:_NUM_ROWS]:
            _print_finding(out, finding)
        more = result.num_findings - min(len(result.findings), _NUM_ROWS)
        if more > 0:
            out.line(out.style(f"and {more:,} more", "dim"))
        _print_line(out, result.findings[0])
    else:
        out.line(f"{out.style('ok', 'good')}  {count_text(result.num_records, 'record')}, nothing wrong")
    if result.unfinished:
        out.head("Unfinished, as after a crash")
        for item in result.unfinished[:_NUM_ROWS]:
            whose = f" of {printable(item.policy)}" if item.policy else ""
            number = "" if item.id is None else f" {item.id}"
            where = (
                "" if item.seq is None else out.style(f"  begun by {printable(item.source or '')} {item.seq}", "dim")
            )
            out.line(f"  {item.kind}{number} {out.style(printable(item.name), 'warn')}{whose}{where}")
    if result.notes:
        out.head("Notes")
        for note in result.notes[:_NUM_ROWS]:
            _print_finding(out, note)
    out.flush()


def _print_finding(out: Printer, finding: Finding) -> None:
    where = f"{printable(finding.path)}:{finding.line}  " if finding.path is not None else ""
    who = f"  {printable(finding.source)} {finding.seq}" if finding.source is not None else ""
    out.line(
        f"  {out.style(where, 'where')}{out.style(printable(finding.code), 'warn')}  "
        f"{_short(finding.message)}{out.style(who, 'dim')}"
    )


def _print_line(out: Printer, finding: Finding) -> None:
    """Show the first offending line itself."""
    if finding.path is None or finding.line is None or finding.path == "-":
        return
    try:
        with open(finding.path, "rb") as file:  # noqa: PTH123  # a Path would add nothing
            for number, line in enumerate(file, 1):
                if number == finding.line:
                    text = line[: _MAX_LINE * 4].decode("utf-8", "backslashreplace").rstrip("\n")
                    out.head(f"Line {finding.line} of {printable(finding.path)}")
                    out.line(f"  {_short(text)}")
                    return
    except OSError:
        return


def print_diff(result: Difference, name_a: str, name_b: str) -> None:
    """Print what tells two runs apart."""
    out = Printer()
    verdict = ("the same shape", "good") if result.is_same_shape else ("different", "bad")
    out.line(f"{out.style(verdict[0], verdict[1])}  A {printable(name_a)}  B {printable(name_b)}")
    if result.is_same_shape and result.bytes_differ:
        out.line(out.style("but other numbers of bytes moved", "warn"))
    if result.parting is not None:
        _print_parting(out, result.parting)
    counts = [(name, a, b) for name, (a, b) in result.events.items() if a != b]
    out.head("Records")
    rows = [[printable(name), f"{a:,}", f"{b:,}", f"{b - a:+,}"] for name, a, b in counts]
    totals = result.a.num_records, result.b.num_records
    rows.append(["all", f"{totals[0]:,}", f"{totals[1]:,}", f"{totals[1] - totals[0]:+,}"])
    out.table(["event", ">A", ">B", ">change"], rows, styles=["warn"] * len(counts) + [""])
    _print_pairs(out, "Transitions", result.transitions(), has_bytes=True)
    _print_pairs(out, "Time in scopes", result.scopes(), has_bytes=False)
    out.flush()


def _print_parting(out: Printer, parting: Parting) -> None:
    out.head(f"They part after {count_text(parting.index, 'record')} of {printable(parting.source)}")
    for text in parting.before:
        out.line("    " + out.style(_short(text), "dim"))
    for mark, lines, seq in (("A", parting.a, parting.seq_a), ("B", parting.b, parting.seq_b)):
        if not lines:
            out.line(f"  {out.style(mark, 'bold')} (ends here)")
        for index, text in enumerate(lines):
            where = f"  seq {seq}" if index == 0 else ""
            out.line(f"  {out.style(mark, 'bold')} {_short(text)}{out.style(where, 'dim')}")


def _print_pairs(out: Printer, title: str, pairs: dict[Any, tuple[Total, Total]], *, has_bytes: bool) -> None:
    if not pairs:
        return
    out.head(title)
    rows, styles = [], []
    for (policy, *modes), (a, b) in sorted(pairs.items(), key=lambda item: -max(t.seconds for t in item[1]))[
        :_NUM_ROWS
    ]:
        cells = [printable(policy), f" {_ARROW} ".join(map(printable, modes)), f"{a.count:,}", f"{b.count:,}"]
        if has_bytes:
            cells += [_size(a.bytes_moved), _size(b.bytes_moved)]
        rows.append([*cells, seconds_text(a.seconds), seconds_text(b.seconds), _change(a.seconds, b.seconds)])
        differs = a.count != b.count or (a.bytes_moved, a.bytes_elided) != (b.bytes_moved, b.bytes_elided)
        styles.append("warn" if differs else "")
    middle = [">moved A", ">moved B"] if has_bytes else []
    what = "from and to" if has_bytes else "mode"
    out.table(["policy", what, ">A", ">B", *middle, ">time A", ">time B", ">change"], rows, styles=styles)


def _change(a: float, b: float) -> str:
    return f"{(b / a - 1) * 100:+.0f}%" if a > 0 and b > 0 else ""


def _by_time(table: dict[Any, Total]) -> list[tuple[Any, Total]]:
    return sorted(table.items(), key=lambda item: -item[1].seconds)


def _failed(total: Total) -> str:
    return f"{total.num_failed:,}" if total.num_failed else "-"


def _size(nbytes: int) -> str:
    return bytes_text(nbytes) if nbytes else "-"


def _tier(tiers: dict[str, int], tier: str) -> str:
    return _size(tiers.get(tier, 0))


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}..."
