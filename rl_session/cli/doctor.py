"""``rl-session doctor``: whether this machine can do what the library asks of it, and how to mend what it cannot.

Prints findings; what is found and judged is ``rl_session.doctor``, which loads torch and is imported when the command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rl_session.cli.parsing import Command, json_option
from rl_session.cli.text import Printer, count_text, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_session.doctor import Finding

__all__ = ["doctor"]

_STYLES = {"ok": "good", "note": "dim", "warning": "warn", "failure": "bad"}


@click.command(cls=Command)
@json_option
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Time copies to and from the device: a few seconds.",
)
def doctor(*, as_json: bool, measure: bool) -> None:
    """Check Python, torch, CUDA, memory, limits, bandwidth, NUMA and Ray.

    The exit status is 1 if something cannot work, else 0; warnings name what falls back to something slower.
    """
    from rl_session.doctor import examine

    findings = examine(measure=measure)
    failed = any(finding.level == "failure" for finding in findings)
    if as_json:
        import json

        rows = [{"topic": f.topic, "level": f.level.value, "found": f.found, "advice": f.advice} for f in findings]
        click.echo(json.dumps({"ok": not failed, "findings": rows}, indent=2))
    else:
        _draw(findings)
    raise click.exceptions.Exit(1 if failed else 0)


def _draw(findings: Sequence[Finding]) -> None:
    out = Printer()
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        level = out.style(f"{finding.level.value:7}", _STYLES[finding.level])
        out.line(f"{level}  {finding.topic:{width}}  {printable(finding.found)}")
        if finding.advice:
            out.line(f"{'':7}  {'':{width}}  {out.style('do: ' + printable(finding.advice), 'where')}")
    counted = {level: sum(f.level == level for f in findings) for level in ("failure", "warning")}
    out.line()
    out.line(", ".join(count_text(number, level) for level, number in counted.items()))
    out.flush()
