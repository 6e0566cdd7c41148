"""What this machine gives the library: facts, and what they mean.

    facts      what is read from the system
    bandwidth  what is measured, with torch
    verdict    facts to findings: fine, slower than it could be, or broken, and what to do (pure)

Knows nothing of sessions or policies.
"""

from __future__ import annotations

from rl_session.doctor.verdict import Finding, Level, judge

__all__ = ["Finding", "Level", "examine", "judge"]


def examine(*, measure: bool = True) -> list[Finding]:
    """Look at this machine and judge what was found.

    Args:
        measure: Whether copies are timed, which takes a few seconds.

    Returns:
        One finding a fact, in a fixed order.
    """
    from rl_session.doctor.facts import gather

    return judge(gather(measure=measure))
