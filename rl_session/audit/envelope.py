"""What every line of the log has, whatever its event: the version of the format, the keys of the envelope, and their check.

Knows lines, not files, and no event: tools that go through plain dictionaries need no more than this to read a log.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import orjson

__all__ = ["ENVELOPE", "SCHEMA", "is_record", "loads_or_none"]

#: Version of the line format. A reader carries later versions through instead of refusing them.
SCHEMA = 1

#: Keys of every line, in the order in which they are written. The event's own fields lie flat beside them, so
#: no event may have a field with one of these names.
ENVELOPE = (
    "schema",
    "run_id",
    "source",
    "seq",
    "time_ns",
    "mono_ns",
    "event",
    "policy",
    "scope_id",
    "transition_id",
    "step",
)

_REQUIRED = {
    "schema": int,
    "run_id": str,
    "source": str,
    "seq": int,
    "time_ns": int,
    "mono_ns": int,
    "event": str,
}
_OPTIONAL = {"policy": str, "scope_id": int, "transition_id": int, "step": int}
_envelope_of = itemgetter(*ENVELOPE)
# Types of envelopes that were found whole. There are 16: each of the last four may be null.
_WHOLE: set[tuple[type, ...]] = set()


def loads_or_none(line: bytes) -> dict[str, Any] | None:
    """Return what lies on a line, or None where that is no record."""
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return fields if is_record(fields) else None


def is_record(fields: Any) -> bool:
    """Whether a line holds a whole envelope; adds the keys that may be missing."""
    try:
        if tuple(map(type, _envelope_of(fields))) in _WHOLE:
            return True
    except (KeyError, TypeError):  # a key is missing, or it is no dictionary
        if type(fields) is not dict:
            return False
    for key in _OPTIONAL:
        fields.setdefault(key, None)
    # Types are compared exactly: a bool is an int to isinstance.
    is_whole = all(type(fields.get(key)) is kind for key, kind in _REQUIRED.items()) and all(
        fields[key] is None or type(fields[key]) is kind for key, kind in _OPTIONAL.items()
    )
    if is_whole:
        _WHOLE.add(tuple(map(type, _envelope_of(fields))))
    return is_whole
