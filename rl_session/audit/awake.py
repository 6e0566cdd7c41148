"""When external engines were awake, and with how many bytes: periods from the first part that woke to the sleep.

Fed one record at a time. In-process engines are none of it: they share a policy's bytes, and their records carry its name.
"""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["AwakePeriods", "Period"]


@attrs.define
class Period:
    """An engine that is, or was, awake.

    Attributes:
        engine: Its name in the session.
        start: The record of the first part that woke.
        end: The record of its sleep; None while it is awake.
        nbytes: Bytes by what woke together, such as ``"weights"`` or ``"weights+kv_cache"``.
    """

    engine: str
    start: dict[str, Any]
    end: dict[str, Any] | None = None
    nbytes: dict[str, int] = attrs.field(factory=dict)


class AwakePeriods:
    """Follows the engines of a log."""

    def __init__(self) -> None:
        self._open: dict[str, Period] = {}

    def feed(self, record: dict[str, Any]) -> Period | None:
        """Take one record; return the period that it began, went on with or ended."""
        if record["policy"] is not None or record["event"] not in ("engine.woken", "engine.slept"):
            return None
        name = str(record.get("engine"))
        if record["event"] == "engine.slept":
            period = self._open.pop(name, None) or Period(name, record)
            period.end = record
            return period
        period = self._open.setdefault(name, Period(name, record))
        woken = "+".join(map(str, record.get("tags") or ("all",)))
        nbytes = record.get("nbytes")
        period.nbytes[woken] = nbytes if isinstance(nbytes, int) else 0
        return period

    def finish(self) -> list[Period]:
        """Return those that are awake still."""
        left, self._open = list(self._open.values()), {}
        return left
