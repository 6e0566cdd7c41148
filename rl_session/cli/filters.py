"""What ``rl-session audit show`` was asked for: words of the command line to filters, or a refusal that says what would do."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rl_session.audit.show import Filters, parse_steps, parse_time
from rl_session.cli.refusing import fail

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime

__all__ = ["read_filters"]

_ATTEMPTED = "reading the filters"
_MOST_NEAR = 5


def read_filters(
    run: str,
    *,
    policies: tuple[str, ...],
    rank: int | None,
    step: str | None,
    events: tuple[str, ...],
    since: str | None,
    until: str | None,
) -> Filters:
    """Return the filters.

    Args:
        run: The log, which may have events that this version does not know.
        policies: Names of policies, with ``*``.
        rank: A rank.
        step: ``7`` or ``3-9``.
        events: Names of events, with ``*``.
        since: Seconds since the start, or a date and time.
        until: Likewise.

    Raises:
        click.exceptions.Exit: One of them is not what it should be, and this was said.
    """
    return Filters(
        policies=policies,
        rank=rank,
        steps=None if step is None else _steps(step),
        events=_events(events, run),
        since=None if since is None else _time("--since", since),
        until=None if until is None else _time("--until", until),
    )


def _steps(text: str) -> tuple[int, int]:
    try:
        return parse_steps(text)
    except ValueError:
        fail(_ATTEMPTED, f"--step {text!r} is neither a number nor a range", "--step 7 or --step 3-9")


def _time(option: str, text: str) -> float | datetime:
    try:
        return parse_time(text)
    except (ValueError, OverflowError):
        fact = f"{option} {text!r} is neither a number of seconds nor a date and time"
        fail(_ATTEMPTED, fact, f"{option} 12.5 or {option} '2026-11-30 18:54:20'")


# -- events ------------------------------------------------------------------------------------------------------


def _events(wanted: tuple[str, ...], run: str) -> tuple[str, ...]:
    """Refuse a name that no event has: nothing would be shown, as if nothing had happened."""
    if not wanted:
        return ()
    from rl_session.audit.events import EVENTS

    known = list(EVENTS)
    if any(_is_unknown(name, known) for name in wanted):
        # A later version may have written the log.
        known += sorted(_names_in(run) - set(known))
    for name in wanted:
        if _is_unknown(name, known):
            near = _near(name, known)
            remedy = f"--event {near[0]}" if len(near) == 1 else f"--event with one of {', '.join(near)}"
            fail(_ATTEMPTED, f"no event is called {name!r}", remedy)
    return wanted


def _is_unknown(name: str, known: Collection[str]) -> bool:
    return not any(fnmatchcase(each, name) for each in known)


def _names_in(run: str) -> set[str]:
    """The names of the events of a log; none where it can be read only once, or is no log, which is told later."""
    from rl_session.audit.reader import AuditReader
    from rl_session.errors import AuditError

    if run == "-":
        return set()
    try:
        return {record["event"] for record in AuditReader(run).dicts()}
    except AuditError:
        return set()


def _near(name: str, known: list[str]) -> list[str]:
    """What may have been meant, as a shell takes it; every name where nothing is near."""
    from difflib import get_close_matches
    from shlex import quote

    groups = list(dict.fromkeys(f"{each.partition('.')[0]}.*" for each in known if "." in each))
    part = name.strip("*?.").lower()
    holding = [each for each in known if part and part in each]
    near = holding or get_close_matches(name.lower(), groups if "*" in name else known, n=_MOST_NEAR)
    return [quote(each) for each in near[:_MOST_NEAR] or known]
