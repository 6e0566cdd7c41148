"""Reading an audit log back, from all the files of a run: as plain dictionaries or as typed records.

A log is most wanted after a crash, so the reader takes what it finds: a torn last line, a damaged line, an
event of a later version, a file that is still being written. It refuses only what is no audit log at all. It
streams in bounded memory, and interprets nothing.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import attrs
import orjson

from rl_session.audit.envelope import is_record, loads_or_none
from rl_session.audit.naming import find_parts, find_siblings
from rl_session.errors import AuditError

if TYPE_CHECKING:
    from rl_session.audit.records import Record

# Bounds memory on a file that has no newlines. No record comes near it.
_MAX_LINE_NBYTES = 16 * 2**20
_CHUNK_NBYTES = 64 * 2**10
# How many lines to look at before concluding that a file is something else.
_PROBE_LINES = 64
# How many places of lines that are no record are remembered, for messages.
_MAX_PLACES = 1000
_EMPTY = "it is empty"


@attrs.frozen
class Place:
    """A line of a file, counted from 1; the path is ``"-"`` for a stream."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def read_audit(
    path: str | os.PathLike[str] | IO[bytes], *, follow: bool = False, poll_seconds: float = 0.2
) -> AuditReader:
    """Open an audit log for reading, with the files of other sources that lie beside it.

    Args:
        path: The driver's file (or any one file of a run, which is then read alone); ``"-"`` for standard input,
            or a binary file object, both of which can be iterated once.
        follow: Whether an iteration waits for more at the end, until ``AuditReader.stop`` is called.
        poll_seconds: How long it waits before it looks again.

    Returns:
        The records, in the order of their time.

    Raises:
        AuditError: There is no such file, or it is not an audit log.
    """
    return AuditReader(path, follow=follow, poll_seconds=poll_seconds)


class AuditReader:
    """The records of a run in the order of their time; iterable several times, in constant memory.

    Within one source the order of the file is always kept, even where its wall clock was set back. ``dicts`` gives
    what lies on the lines, at a tenth of the cost of typed records, for tools that go through millions.

    Args:
        path: As for ``read_audit``.
        follow: As for ``read_audit``. What a file of another source gets later than its siblings is then given
            late too: order by time holds within what was found at one look.
        poll_seconds: As for ``read_audit``.

    Raises:
        AuditError: As for ``read_audit``; from iterating, when a file has vanished since.
    """

    def __init__(
        self, path: str | os.PathLike[str] | IO[bytes], *, follow: bool = False, poll_seconds: float = 0.2
    ) -> None:
        self.follow = follow
        self.poll_seconds = poll_seconds
        self._stopped = threading.Event()
        self._tally = _Tally()
        self._stream: _Stream | None = None
        #: The run's id, of the first record; empty while a followed file has none.
        self.run_id = ""
        if not isinstance(path, (str, os.PathLike)) or path == "-":
            file = sys.stdin.buffer if isinstance(path, (str, os.PathLike)) else path
            self.path = Path("-")
            #: The files read: the one asked for, then its siblings; each stands for its parts too.
            self.paths: tuple[Path, ...] = (self.path,)
            self._stream = _Stream(file)
            self.run_id = self._stream.run_id
            return
        self.path = Path(path)
        try:
            self.run_id = _run_id_of(self.path)
        except AuditError as error:
            if not follow or error.facts != (_EMPTY,):
                raise
        self.paths = (self.path, *self._siblings())

    @property
    def torn(self) -> int:
        """How many files ended in half a line, as far as the latest iteration got."""
        return len(self._tally.torn_at)

    @property
    def skipped(self) -> int:
        """How many whole lines were no record, as far as the latest iteration got."""
        return self._tally.skipped

    @property
    def torn_at(self) -> tuple[Place, ...]:
        """Where files ended in half a line, as far as the latest iteration got."""
        return tuple(self._tally.torn_at)

    @property
    def skipped_at(self) -> tuple[Place, ...]:
        """Where lines were no record: the first thousand."""
        return tuple(self._tally.skipped_at)

    def __iter__(self) -> Iterator[Record]:
        # Late: the classes of the events are nothing to those who take plain dictionaries.
        from rl_session.audit.records import to_record

        return map(to_record, self.dicts())

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Give each line as it lies in the file: every key of the envelope, and the event's fields beside them.

        A missing key of the envelope that may be null is added as None. The dictionaries are the caller's.
        """
        return (record for record, _ in self.walk())

    def walk(self) -> Iterator[tuple[dict[str, Any], Cursor]]:
        """As :meth:`dicts`, with the cursor that the record came from: it says where, until the next record is asked for."""
        self._tally = _Tally()
        if self._stream is not None:
            cursor = Cursor(self.path, self._tally)
            return zip(self._stream.records(cursor), _repeat(cursor), strict=False)
        cursors = [Cursor(path, self._tally) for path in self.paths]
        return self._follow(cursors) if self.follow else _merge([(c, c.records()) for c in cursors])

    def stop(self) -> None:
        """End followed iterations once they have given what is there. Safe from any thread and signal handler."""
        self._stopped.set()

    def __repr__(self) -> str:
        return f"<AuditReader {self.path} run_id={self.run_id!r} files={len(self.paths)}>"

    def _siblings(self) -> list[Path]:
        return [found for found in find_siblings(self.path) if self.run_id and _is_of(found, self.run_id)]

    def _follow(self, cursors: list[Cursor]) -> Iterator[tuple[dict[str, Any], Cursor]]:
        """Give what there is, wait, and look again, also for new files."""
        scans = [(cursor, cursor.tail()) for cursor in cursors]
        while True:
            is_last = self._stopped.is_set()
            for cursor, _ in scans:
                cursor.is_last_look = is_last
            for record, cursor in _merge([(c, iter(s.__next__, None)) for c, s in scans if not c.ended]):
                self.run_id = self.run_id or record["run_id"]
                yield record, cursor
            if is_last or scans[0][0].ended:
                return
            self._stopped.wait(self.poll_seconds)
            known = set(self.paths)
            for found in self._siblings():
                if found not in known:
                    self.paths = (*self.paths, found)
                    cursor = Cursor(found, self._tally)
                    scans.append((cursor, cursor.tail()))


def _repeat(cursor: Cursor) -> Iterator[Cursor]:
    while True:
        yield cursor


@attrs.define
class _Tally:
    """What one iteration could not read. Each has its own, so that two at a time do not count double."""

    skipped: int = 0
    skipped_at: list[Place] = attrs.field(factory=list)
    torn_at: list[Place] = attrs.field(factory=list)


class Cursor:
    """Where one source's file is being read: the file, or the part of it, and the line.

    Attributes:
        path: The file that is being read.
        line: The line of the record given last, from 1.
    """

    def __init__(self, path: Path, tally: _Tally) -> None:
        self.path = path
        self.line = 0
        self.is_last_look = True
        self.ended = False
        self._main = path
        self._tally = tally

    @property
    def place(self) -> Place:
        """The line of the record given last."""
        return Place(str(self.path), self.line)

    def records(self) -> Iterator[dict[str, Any]]:
        """The records of the parts, then of the file."""
        number = 0
        while (found := _open_next(self._main, number)) is not None:
            file, self.path, number = found
            self.line = 0
            with file:
                yield from self.parse(_chunks(file))  # type: ignore[misc]  # chunks never pause here
            if self.path == self._main:
                break

    def tail(self) -> Iterator[dict[str, Any] | None]:
        """As :meth:`records`, and None whenever there is no more for now; None for ever once it has ended."""
        number: int | None = 0
        while number is not None:
            found = _open_next(self._main, number)
            if found is None:
                if self.is_last_look:
                    break
                yield None  # a rotation has moved the file aside, and not yet made the new one
                continue
            file, self.path, number = found
            self.line = 0
            with file:
                yield from self.parse(self._tail_chunks(file))
                if self.path == self._main:
                    number = _number_after(file, self._main)
        self.ended = True
        while True:
            yield None

    def _tail_chunks(self, file: IO[bytes]) -> Iterator[bytes | None]:
        inode = os.fstat(file.fileno()).st_ino
        while True:
            # Looked at before reading: what was written before the file was moved away is then read after.
            is_complete = self.path != self._main or self._was_moved(inode)
            is_last = self.is_last_look
            yield from _chunks(file)
            if is_complete or is_last:
                return
            yield None

    def _was_moved(self, inode: int) -> bool:
        """Whether another file has the name now, or none has because a rotation is under way."""
        try:
            return self._main.stat().st_ino != inode
        except FileNotFoundError:
            return bool(find_parts(self._main))

    def parse(self, chunks: Iterator[bytes | None]) -> Iterator[dict[str, Any] | None]:
        """Cut chunks into lines, and give those that are records; a pause is handed on."""
        loads, is_whole = orjson.loads, is_record
        pieces: list[bytes] = []
        held = 0
        too_long = False
        for chunk in chunks:
            if chunk is None:
                yield None
                continue
            lines = chunk.split(b"\n")
            if len(lines) > 1:
                if pieces or too_long:
                    pieces.append(lines[0])
                    lines[0] = b"?" if too_long else b"".join(pieces)
                    pieces, held, too_long = [], 0, False
                rest = lines.pop()
                for line in lines:
                    self.line += 1
                    try:
                        fields = loads(line)
                    except orjson.JSONDecodeError:
                        self._skip(line)
                        continue
                    if is_whole(fields):
                        yield fields
                    else:
                        self._skip(line)
            else:
                rest = chunk
            if rest and not too_long:
                pieces.append(rest)
                held += len(rest)
                if held > _MAX_LINE_NBYTES:
                    pieces, held, too_long = [], 0, True
        yield from self._last(b"".join(pieces), too_long=too_long)

    def _last(self, line: bytes, *, too_long: bool) -> Iterator[dict[str, Any]]:
        """What comes after the last newline: a record that lacks only that, or a torn one."""
        if not line and not too_long:
            return
        self.line += 1
        fields = loads_or_none(line)
        if fields is not None and not too_long:
            yield fields
        else:
            self._tally.torn_at.append(self.place)

    def _skip(self, line: bytes) -> None:
        # The writer puts a newline after a line that it had to give up: blank lines are no loss.
        if line.strip():
            self._tally.skipped += 1
            if len(self._tally.skipped_at) < _MAX_PLACES:
                self._tally.skipped_at.append(self.place)


class _Stream:
    """Standard input, or a file object: its beginning is looked at and kept, and it can be read once."""

    def __init__(self, file: IO[bytes]) -> None:
        # Takes what there is instead of waiting for a full chunk.
        self._read: Callable[[int], bytes] = getattr(file, "read1", file.read)
        self._head: list[bytes] = []
        self._is_read = False
        self.run_id = self._probe()

    def _probe(self) -> str:
        """Read until the first record; keep what was read."""
        lines_seen = 0
        while chunk := self._read(_CHUNK_NBYTES):
            self._head.append(chunk)
            head = b"".join(self._head)
            if b"\0" in head.partition(b"\n")[0]:
                raise _refusal(Path("-"), "it is binary")
            *whole, rest = head.split(b"\n")
            for line in whole[:_PROBE_LINES]:
                if fields := loads_or_none(line):
                    return str(fields["run_id"])
            lines_seen = len(whole)
            if lines_seen >= _PROBE_LINES or len(rest) > _MAX_LINE_NBYTES:
                break
        if not self._head:
            raise _refusal(Path("-"), _EMPTY)
        fields = loads_or_none(b"".join(self._head))  # one record without a newline
        if fields is not None:
            return str(fields["run_id"])
        raise _refusal(Path("-"), f"none of its first {_PROBE_LINES} lines is an audit record")

    def records(self, cursor: Cursor) -> Iterator[dict[str, Any]]:
        if self._is_read:
            raise _refusal(Path("-"), "it is a stream and was read before")
        self._is_read = True
        return cursor.parse(self._chunks())  # type: ignore[return-value]  # chunks never pause here

    def _chunks(self) -> Iterator[bytes]:
        while self._head:
            yield self._head.pop(0)
        while chunk := self._read(_CHUNK_NBYTES):
            yield chunk


def _merge(scans: list[tuple[Cursor, Iterator[dict[str, Any]]]]) -> Iterator[tuple[dict[str, Any], Cursor]]:
    """Give the records of all scans by time; of each scan in its own order."""
    if len(scans) == 1:
        cursor, records = scans[0]
        for record in records:
            yield record, cursor
        return
    heap: list[Any] = []
    for index, (cursor, records) in enumerate(scans):
        for record in records:
            heap.append((record["time_ns"], index, record, cursor, records))
            break
    heapify(heap)
    while heap:
        time_ns, index, record, cursor, records = heap[0]
        yield record, cursor
        following = next(records, None)
        if following is None:
            heappop(heap)
        else:
            # A clock that was set back does not reorder a source: its records count as of the latest before them.
            heapreplace(heap, (max(time_ns, following["time_ns"]), index, following, cursor, records))


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_NBYTES):
        yield chunk


def _open_next(path: Path, number: int) -> tuple[IO[bytes], Path, int] | None:
    """Open the oldest part from this number on, or else the file itself, while a writer may be rotating it.

    Returns:
        The file, its path, and the number to go on with; None where parts were all there is.

    Raises:
        AuditError: There is nothing, or it cannot be read.
    """
    while True:
        part = _part_from(path, number)
        if part is not None:
            return _open(part[1]), part[1], part[0] + 1
        try:
            file = _open(path)
        except AuditError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if _part_from(path, number) is not None:  # it was moved aside in this very moment
                continue
            if number == 0:
                raise
            return None
        # It may have been moved aside since: then it is that part, or a later file that is not due yet.
        part = _part_from(path, number)
        if part is None:
            return file, path, number
        file.close()


def _part_from(path: Path, number: int) -> tuple[int, Path] | None:
    return next((found for found in find_parts(path) if found[0] >= number), None)


def _number_after(file: IO[bytes], path: Path) -> int | None:
    """The number to go on with after a file that was moved aside; None where it was not, or is gone."""
    inode = os.fstat(file.fileno()).st_ino
    for number, part in find_parts(path):
        try:
            if part.stat().st_ino == inode:
                return number + 1
        except FileNotFoundError:
            continue
    return None


def _open(path: Path) -> IO[bytes]:
    try:
        # First, since opening a pipe would wait for a writer.
        if path.exists() and not path.is_file():
            raise _refusal(path, "it is a directory" if path.is_dir() else "it is not a regular file")
        return path.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise _refusal(path, "there is no such file") from error
    except OSError as error:
        raise _refusal(path, f"it cannot be read: {error.strerror or error}") from error


def _run_id_of(path: Path) -> str:
    """Return the run id of the first record of a file, or of its parts; raise where there is none."""
    number, refusal = 0, None
    while (found := _open_next(path, number)) is not None:
        file, where, number = found
        with file:
            try:
                return _first_run_id(file, where)
            except AuditError as error:
                refusal = error  # a damaged part does not make the rest unreadable
        if where == path:
            break
    assert refusal is not None
    raise refusal


def _first_run_id(file: IO[bytes], path: Path) -> str:
    head = file.read(_CHUNK_NBYTES)
    if not head:
        raise _refusal(path, _EMPTY)
    # Asked first so that a huge binary file is not searched for newlines. Of the first line only: after a
    # power failure a log may well end in zeros.
    if b"\0" in head.partition(b"\n")[0]:
        raise _refusal(path, "it is a binary file")
    file.seek(0)
    lines = io.BufferedReader(file)  # type: ignore[type-var]  # a raw file
    try:
        for _ in range(_PROBE_LINES):
            fields = loads_or_none(lines.readline(_MAX_LINE_NBYTES))
            if fields is not None:
                return str(fields["run_id"])
    finally:
        lines.detach()  # the file is the caller's to close
    raise _refusal(path, f"none of its first {_PROBE_LINES} lines is an audit record")


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
