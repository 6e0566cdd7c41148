"""One line of the log as a typed record.

Knows lines whose envelope was checked, not files. Values are checked and never coerced; what does not fit a class is carried
as it is. Readers of plain dictionaries do without this module: making its classes takes longer than reading a small log.
"""

from __future__ import annotations

from typing import Any

import attrs
import cattrs

from rl_session.audit.envelope import ENVELOPE
from rl_session.audit.events import EVENTS, Event, UnknownEvent

__all__ = ["Record", "to_record"]


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
