"""Reading an audit log back, as typed records, from all the files of a run.

A log is most wanted after a crash, so the reader takes what it finds: a torn last line, a damaged line, an
event of a later version. It refuses only what is no audit log at all. It streams, and interprets nothing.
"""

from __future__ import annotations

import heapq
import itertools
import os
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeGuard

import attrs
import cattrs
import orjson

from rl_session.audit.events import ENVELOPE, EVENTS, Event, UnknownEvent
from rl_session.audit.naming import find_siblings
from rl_session.errors import AuditError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Bounds memory on a file that has no newlines. No record comes near it.
_MAX_LINE_NBYTES = 16 * 2**20
# How many lines to look at before concluding that a file is something else.
_PROBE_LINES = 64
_PROBE_NBYTES = 4096

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


def read_audit(path: str | os.PathLike[str]) -> AuditReader:
    """Open an audit log for reading, with the files of other sources that lie beside it.

    Args:
        path: The driver's file (or any one file of a run, which is then read alone).

    Raises:
        AuditError: There is no such file, or it is not an audit log.
    """
    return AuditReader(path)


class AuditReader:
    """The records of a run in the order of their time; iterable several times, in constant memory.

    Within one source the order of the file is always kept, even where its wall clock was set back.

    Args:
        path: As for ``read_audit``.

    Raises:
        AuditError: As for ``read_audit``; from iterating, when a file has vanished since.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.run_id = _run_id_of(self.path)
        #: The files read: the one asked for, then its siblings.
        self.paths = (self.path, *(found for found in find_siblings(self.path) if _is_of(found, self.run_id)))
        self._tally = _Tally()

    @property
    def torn(self) -> int:
        """How many files ended in half a line, as far as the latest iteration got."""
        return self._tally.torn

    @property
    def skipped(self) -> int:
        """How many whole lines were no record, as far as the latest iteration got."""
        return self._tally.skipped

    def __iter__(self) -> Iterator[Record]:
        self._tally = tally = _Tally()
        return heapq.merge(*(_read(path, tally) for path in self.paths), key=attrgetter("time_ns"))

    def __repr__(self) -> str:
        return f"<AuditReader {self.path} run_id={self.run_id!r} files={len(self.paths)}>"


@attrs.define
class _Tally:
    """What one iteration could not read. Each has its own, so that two at a time do not count double."""

    torn: int = 0
    skipped: int = 0


def _read(path: Path, tally: _Tally) -> Iterator[Record]:
    with _open(path) as file:
        while line := file.readline(_MAX_LINE_NBYTES):
            record = _parse(line)
            if record is not None:
                yield record
            elif line.endswith(b"\n") or len(line) == _MAX_LINE_NBYTES:
                # The writer puts a newline after a line that it had to give up: blank lines are no loss.
                tally.skipped += bool(line.strip())
            else:
                tally.torn += 1


def _open(path: Path) -> IO[bytes]:
    try:
        # First, since opening a pipe would wait for a writer.
        if path.exists() and not path.is_file():
            raise _refusal(path, "it is a directory" if path.is_dir() else "it is not a regular file")
        return path.open("rb")
    except FileNotFoundError as error:
        raise _refusal(path, "there is no such file") from error
    except OSError as error:
        raise _refusal(path, f"it cannot be read: {error.strerror or error}") from error


def _run_id_of(path: Path) -> str:
    """Return the run id of the file's first record; raise where there is none."""
    with _open(path) as file:
        head = file.read(_PROBE_NBYTES)
    if not head:
        raise _refusal(path, "it is empty")
    # Asked first so that a huge binary file is not searched for newlines. Of the first line only: after a
    # power failure a log may well end in zeros.
    if b"\0" in head.partition(b"\n")[0]:
        raise _refusal(path, "it is a binary file")
    with _open(path) as file:
        lines = iter(lambda: file.readline(_MAX_LINE_NBYTES), b"")
        records = (_parse(line) for line in itertools.islice(lines, _PROBE_LINES))
        first = next((record for record in records if record is not None), None)
    if first is None:
        raise _refusal(path, f"none of its first {_PROBE_LINES} lines is an audit record")
    return first.run_id


def _is_of(path: Path, run_id: str) -> bool:
    """Whether a file that is called like a sibling is one: another log, or an older run's, is not."""
    try:
        return _run_id_of(path) == run_id
    except AuditError:
        return False


def _refusal(path: Path, fact: str) -> AuditError:
    return AuditError(
        f"reading {str(path)!r} as an audit log",
        (fact,),
        "read_audit(path) with the file that Session(audit_path=path) wrote",
    )


def _parse(line: bytes) -> Record | None:
    """Return the line's record, or None where it holds none."""
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not _has_envelope(fields):
        return None
    envelope = {key: fields.pop(key, None) for key in ENVELOPE}
    name = envelope.pop("event")
    event, extra = _typed(name, fields)
    return Record(name=name, event=event, extra=extra, **envelope)


def _has_envelope(fields: object) -> TypeGuard[dict[str, Any]]:
    # Types are compared exactly: a bool is an int to isinstance.
    return (
        isinstance(fields, dict)
        and all(type(fields.get(key)) is kind for key, kind in _REQUIRED.items())
        and all(fields.get(key) is None or type(fields[key]) is kind for key, kind in _OPTIONAL.items())
    )


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
