"""What took how long: pairs of records (entered and exited, started and ended) as spans, while the log streams.

Knows the grammar of the events, and not how spans are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import attrs

from rl_session.audit.envelope import ENVELOPE
from rl_session.audit.replay import LogSource, as_reader

__all__ = ["Kind", "Span", "spans"]

Kind = Literal["session", "policy", "session_step", "scope", "transition", "call", "step", "engine"]
_Dict = dict[str, Any]
_ENVELOPE = frozenset(ENVELOPE)


@attrs.frozen(kw_only=True)
class Span:
    """Something with a beginning and an end.

    Times are those of the source's monotonic clock, put where its wall clock was at the source's first record: they
    never go back, and can be compared between sources as well as their wall clocks can.

    Attributes:
        kind: ``"scope"``, ``"transition"``, ``"call"``, ``"step"`` (a train step), ``"session_step"`` (of
            ``session.step(n)``), ``"session"``, ``"policy"`` (created to closed) or ``"engine"`` (awake).
        name: For people: the mode, ``"offloaded -> training"``, the method, ``"step 3"``.
        policy: The policy, if it is about one.
        source: Who wrote it.
        start_ns: Nanoseconds since 1970.
        end_ns: Likewise; of an incomplete span, the time of the source's last record.
        step: The session's step number at the end.
        scope_id: The scope that it is, or is part of.
        transition_id: The transition that it is.
        fields: The fields of both records, those of the later one in front.
        error: What ended it, where it failed.
        complete: Whether the log has both ends.
    """

    kind: Kind
    name: str
    policy: str | None
    source: str
    start_ns: int
    end_ns: int
    step: int | None = None
    scope_id: int | None = None
    transition_id: int | None = None
    fields: dict[str, Any] = attrs.field(factory=dict)
    error: str | None = None
    complete: bool = True

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9


def spans(source: LogSource) -> Iterator[Span]:
    """Give every span of a log when it ends, and at the end those that did not.

    Args:
        source: What ``read_audit`` takes, or a reader.

    Raises:
        AuditError: It is not an audit log.
    """
    live = SpanBuilder()
    for record in as_reader(source).dicts():
        yield from live.feed(record)
    yield from live.finish()


@attrs.frozen
class _Open:
    kind: Kind
    name: str
    start_ns: int
    record: _Dict


class SpanBuilder:
    """Spans, fed one record at a time."""

    def __init__(self) -> None:
        # A source's monotonic clock plus its offset is comparable between sources.
        self._offset: dict[str, int] = {}
        self._now: dict[str, int] = {}
        self._open: dict[tuple[Any, ...], _Open] = {}

    def feed(self, record: _Dict) -> list[Span]:
        """Take one record; return the spans that it ends."""
        source = record["source"]
        offset = self._offset.get(source)
        if offset is None:
            offset = self._offset[source] = record["time_ns"] - record["mono_ns"]
        now = self._now[source] = record["mono_ns"] + offset
        found = self._count_step(record, now)
        opening = _OPENINGS.get(record["event"])
        if opening is not None:
            kind, key, name = opening
            left = self._open.pop(_key(kind, key, record), None)
            if left is not None and kind == "engine":  # another part of it woke: it is the same time awake
                tags = [*(left.record.get("tags") or ()), *(record.get("tags") or ())]
                self._open[_key(kind, key, record)] = attrs.evolve(left, record={**left.record, "tags": tags})
                return found
            if left is not None:
                found.append(self._close(left, None, self._now[source]))
            self._open[_key(kind, key, record)] = _Open(kind, _name(name, record), now, record)
            return found
        closing = _CLOSINGS.get(record["event"])
        if closing is not None:
            kind, key = closing
            begun = self._open.pop(_key(kind, key, record), None)
            if begun is not None:
                found.append(self._close(begun, record, now))
        elif record["event"] == "call.finished":
            found.append(_call(record, now))
        return found

    def finish(self) -> list[Span]:
        """Return what never ended."""
        left = sorted(self._open.values(), key=lambda begun: begun.start_ns)
        self._open = {}
        return [self._close(begun, None, self._now[begun.record["source"]]) for begun in left]

    def _count_step(self, record: _Dict, now: int) -> list[Span]:
        """Follow the step number of the envelope: it is the session's, and the driver's alone."""
        source, step = record["source"], record["step"]
        key = ("session_step", source)
        begun = self._open.get(key)
        if (begun.record["step"] if begun else None) == step:
            return []
        found = []
        if begun is not None:
            del self._open[key]
            found.append(self._close(begun, begun.record, now))
        if step is not None:
            self._open[key] = _Open("session_step", f"step {step}", now, {**_bare(record), "step": step})
        return found

    @staticmethod
    def _close(begun: _Open, end: _Dict | None, now: int) -> Span:
        start = begun.record
        last = start if end is None else end
        fields = _fields(start) if end is None or end is start else {**_fields(end), **_missing(end, start)}
        return Span(
            kind=begun.kind,
            name=begun.name,
            policy=start["policy"],
            source=start["source"],
            start_ns=begun.start_ns,
            end_ns=now,
            step=last["step"],
            scope_id=start["scope_id"],
            transition_id=start["transition_id"],
            fields=fields,
            error=_error(last),
            complete=end is not None,
        )


def _call(record: _Dict, now: int) -> Span:
    seconds = record.get("seconds")
    nanoseconds = int(seconds * 1e9) if isinstance(seconds, (int, float)) else 0
    return Span(
        kind="call",
        name=str(record.get("method")),
        policy=record["policy"],
        source=record["source"],
        start_ns=now - nanoseconds,
        end_ns=now,
        step=record["step"],
        scope_id=record["scope_id"],
        transition_id=record["transition_id"],
        fields=_fields(record),
        error=_error(record),
    )


def _fields(record: _Dict) -> _Dict:
    return {key: value for key, value in record.items() if key not in _ENVELOPE}


def _missing(end: _Dict, start: _Dict) -> _Dict:
    return {key: value for key, value in start.items() if key not in _ENVELOPE and key not in end}


def _bare(record: _Dict) -> _Dict:
    return {**dict.fromkeys(ENVELOPE), "source": record["source"]}


def _error(record: _Dict) -> str | None:
    error = record.get("error")
    if error is None and record["event"] == "step.aborted":
        error = record.get("reason")
    return error if isinstance(error, str) else None


def _key(kind: str, fields: tuple[str, ...], record: _Dict) -> tuple[Any, ...]:
    return (kind, record["source"], *(record.get(field) for field in fields))


def _name(template: str, record: _Dict) -> str:
    if template == "transition":
        return f"{record.get('from_mode')} -> {record.get('to_mode')}"
    return str(record.get(template) or template)


# Event to kind, the fields that tell one from another, and the field (or word) that names it.
_OPENINGS: dict[str, tuple[Kind, tuple[str, ...], str]] = {
    "session.opened": ("session", (), "session"),
    "policy.created": ("policy", ("policy",), "policy"),
    "scope.entered": ("scope", ("scope_id",), "mode"),
    "transition.started": ("transition", ("transition_id",), "transition"),
    "step.opened": ("step", ("policy",), "train step"),
    "engine.woken": ("engine", ("engine", "policy"), "engine"),
}
_CLOSINGS: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "session.closed": ("session", ()),
    "policy.closed": ("policy", ("policy",)),
    "scope.exited": ("scope", ("scope_id",)),
    "transition.committed": ("transition", ("transition_id",)),
    "transition.rolled_back": ("transition", ("transition_id",)),
    "transition.failed": ("transition", ("transition_id",)),
    "step.committed": ("step", ("policy",)),
    "step.aborted": ("step", ("policy",)),
    "engine.slept": ("engine", ("engine", "policy")),
}
