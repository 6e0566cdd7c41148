"""How the tests of the codemod ask: code before, code after, what was said of each site. Every answer must be a fixed point."""

from __future__ import annotations

import ast
from textwrap import dedent

from rl_session_migrate.codemod.rewrite import Outcome, Rewritten, rewrite
from rl_session_migrate.receivers import Names

__all__ = ["IMPORT", "check", "kept", "migrated", "rewritten", "said"]

IMPORT = "from rl_session.adapters.nemo_rl import scopes, share\n"


def migrated(before: str, names: Names | None = None) -> Rewritten:
    """The codemod's answer; its text compiles, and asking again changes nothing."""
    result = rewrite(dedent(before).encode(), "loop.py", names=names)
    ast.parse(result.after)
    again = rewrite(result.after, "loop.py", names=names)
    assert again.after.decode() == result.after.decode()
    assert [outcome.why for outcome in again.outcomes if outcome.status == "left"] == [
        outcome.why for outcome in result.outcomes if outcome.status == "left"
    ]
    return result


def check(before: str, after: str, names: Names | None = None) -> tuple[Outcome, ...]:
    """Assert what becomes of code; returns what was said of its sites. ``after`` leaves out the import that is added."""
    result = migrated(before, names)
    found = result.after.decode().replace(IMPORT, "", 1).replace(IMPORT.replace(", share", ""), "", 1)
    assert found.strip("\n") == dedent(after).strip("\n")
    return result.outcomes


def said(outcomes: tuple[Outcome, ...]) -> list[tuple[str, str]]:
    """Method and status of each site."""
    return [(outcome.method, str(outcome.status)) for outcome in outcomes]


def rewritten(outcomes: tuple[Outcome, ...]) -> bool:
    """Whether no site stays."""
    return bool(outcomes) and all(outcome.status == "rewritten" for outcome in outcomes)


def kept(before: str, *reasons: str, changed: bool | None = None) -> str:
    """Assert that sites stay, each for a reason that contains the words given; returns the text."""
    result = migrated(before)
    left = [outcome for outcome in result.outcomes if outcome.status == "left"]
    assert [outcome.why for outcome in left if not any(reason in outcome.why for reason in reasons)] == []
    assert len(left) >= len(reasons) >= 1
    assert all(any(reason in outcome.why for outcome in left) for reason in reasons)
    assert all(outcome.advice for outcome in left)
    text = result.after.decode()
    assert text.count("# rl-session: kept: ") >= 1
    if changed is False:
        without = "".join(line for line in text.splitlines(keepends=True) if "# rl-session: kept" not in line)
        assert without.strip("\n") == dedent(before).strip("\n")
    return text
