"""One line of the log as a record: the envelope checked, the event typed.

Knows lines, not files. Values are checked and never coerced; what does not fit a class is carried as it is.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import attrs
import cattrs
import orjson

from rl_session.audit.events import ENVELOPE, EVENTS, Event, UnknownEvent

__all__ = ["Record", "is_record", "loads_or_none", "to_record"]

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


@attrs.frozen(kw_only=True)
class Record:
    """One line of the log.

    Attributes:
        schema: Version of the line format.
        run_id: Which run wrote it.
        source: Which process of the run.
        seq: Position among the lines of that source, from 0 and without gaps.
        time_ns: Wall clock, nanoseconds since 1970.
        mono_ns: The source's monotonic clock, nanoseconds since an arbitrary point.
        name: The event's name, such as ``"scope.entered"``.
        policy: The policy concerned, if any.
        scope_id: The innermost scope concerned, if any.
        transition_id: The transition that it belongs to, if any.
        step: The session's step number, if any.
        event: The event, typed; an ``UnknownEvent`` where this version has no class that fits.
        extra: Fields that the event's class does not know.
    """

    schema: int
    run_id: str
    source: str
    seq: int
    time_ns: int
    mono_ns: int
    name: str
    policy: str | None = None
    scope_id: int | None = None
    transition_id: int | None = None
    step: int | None = None
    event: Event
    extra: dict[str, Any] = attrs.field(factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as it lies on the line: the envelope, the event's fields and the rest, flat."""
        envelope = {key: getattr(self, "name" if key == "event" else key) for key in ENVELOPE}
        return {**envelope, **self.event.to_fields(), **self.extra}


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


def to_record(fields: dict[str, Any]) -> Record:
    """Return the typed record of what lies on a line, which is used up."""
    envelope = {key: fields.pop(key) for key in ENVELOPE}
    name = envelope.pop("event")
    event, extra = _typed(name, fields)
    return Record(name=name, event=event, extra=extra, **envelope)


def _typed(name: str, fields: dict[str, Any]) -> tuple[Event, dict[str, Any]]:
    """Return the typed event and the fields that its class does not know."""
    cls = EVENTS.get(name)
    if cls is None:
        return UnknownEvent(name=name, fields=fields), {}
    try:
        event = _CONVERTER.structure(fields, cls)
    except (TypeError, ValueError, KeyError, AttributeError):
        # A later version may have changed the fields: show them as they are, and lose nothing.
        return UnknownEvent(name=name, fields=fields), {}
    known = {field.name for field in attrs.fields(cls)}
    return event, {key: value for key, value in fields.items() if key not in known}


def _make_converter() -> cattrs.Converter:
    """A converter that checks instead of coercing: cattrs would read null into a str as ``"None"``."""
    converter = cattrs.Converter(detailed_validation=False)
    for kind in (str, int, bool):
        converter.register_structure_hook(kind, _exactly)
    converter.register_structure_hook(float, _to_float)
    return converter


def _exactly(value: object, kind: type) -> Any:
    if type(value) is not kind:
        msg = f"expected {kind.__name__}, not {type(value).__name__}"
        raise TypeError(msg)
    return value


def _to_float(value: object, _kind: type) -> float:
    # JSON has no NaN: it was written as null.
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"expected float, not {type(value).__name__}"
        raise TypeError(msg)
    return float(value)


_CONVERTER = _make_converter()
