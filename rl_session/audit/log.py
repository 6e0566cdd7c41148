"""The audit log: each event is one JSON line, written by one ``os.write`` to an append-only file.

There is no buffer, hence none to lose: when ``write`` returns, the line survives the process. The log is told
about state and reads none; it does not know what an event means. Once open it never raises into training:
what cannot be written is counted, reported once, and shows in the file as a gap in ``seq``.

A record costs microseconds, most of them the system call. So what is the same on every line is rendered once, and
nothing is copied that need not be.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
import sys
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from rl_session.audit.envelope import SCHEMA
from rl_session.audit.naming import next_part, rotate
from rl_session.audit.render import LineRenderer, render_line
from rl_session.errors import AuditError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType
    from typing import Self

    from structlog.typing import EventDict, Processor, WrappedLogger

    from rl_session.audit.events import Event

_OPEN_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)

_logger = logging.getLogger("rl_session.audit")

_logs: weakref.WeakSet[AuditLog] = weakref.WeakSet()
_listeners: list[Processor] = []


@contextlib.contextmanager
def listening(processor: Processor) -> Iterator[None]:
    """A block in which every log that is opened, by whatever thread, tells ``processor`` too, for as long as it lives."""
    _listeners.append(processor)
    try:
        yield
    finally:
        _listeners.remove(processor)


def _disown() -> None:
    """In a forked child: the file and its numbers are the parent's. Cheaper than to ask for the process at each record."""
    for log in _logs:
        log._is_inherited = True  # noqa: SLF001 (of this module)


os.register_at_fork(after_in_child=_disown)


class AuditLog:
    """Writes events to one file, from any thread, for one source.

    Args:
        path: The file; parents are made, and a non-empty file of that name is moved to ``<name>.bak-<n>``.
            None logs nowhere, but still calls ``processors``.
        run_id: Names the run on every line; one is made up by default. Other processes of the same run must
            be given the driver's, or a reader will not find their files.
        source: Who writes: ``"driver"``, ``"driver:<actor>"``, ``"rank:0"``.
        processors: structlog processors that see, and may change, each record (envelope and fields, flat) before it
            is rendered. They run under the log's lock. One that raises is passed over; ``structlog.DropEvent``
            leaves the record out. ``rl_session.audit.forward`` makes some that hand records on: to a structlog
            logger, to standard logging, to any callable.
        rotate_nbytes: The most bytes a file may have before it becomes ``<name>.part-<n>`` and a new one is begun;
            None for one file however long. A line longer than that is still written whole. ``seq`` goes on, and
            readers find the parts.

    Raises:
        AuditError: The file cannot be made.
        ConfigError: ``rotate_nbytes`` is not positive.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        run_id: str | None = None,
        source: str = "driver",
        processors: Iterable[Processor] = (),
        rotate_nbytes: int | None = None,
    ) -> None:
        if rotate_nbytes is not None and rotate_nbytes < 1:
            raise ConfigError(f"AuditLog(rotate_nbytes={rotate_nbytes})", (), "AuditLog(path, rotate_nbytes=2**30)")
        self.path = None if path is None else Path(path).absolute()
        self.run_id = uuid.uuid4().hex if run_id is None else run_id
        self.source = source
        #: Records that are not in the file and should be.
        self.dropped = 0
        self._complained = False
        self._closed = False
        # Re-entrant, because a signal handler, a finalizer or a processor may log from inside a write.
        self._lock = threading.RLock()
        # next() on a count is atomic, so that not even a signal handler can take the same number twice.
        self._seq = itertools.count()
        self._is_inherited = False
        _logs.add(self)
        self._file = None if self.path is None else self._make_file(self.path, rotate_nbytes)
        self._channel = self._make_channel(list(processors))
        self.is_silent = self._channel is None
        """Whether nobody is told anything, so that an event need not be made."""

    def _make_file(self, path: Path, rotate_nbytes: int | None) -> _LineFile:
        fd = _open(path)
        # A device or a pipe cannot be moved aside.
        if rotate_nbytes is None or not stat.S_ISREG(os.fstat(fd).st_mode):
            return _LineFile(fd)
        return _RotatingFile(fd, path, rotate_nbytes, self._complain)

    def _make_channel(self, processors: list[Processor]) -> _Channel | None:
        """The private chain; None where nobody is told anything."""
        constant = {"schema": SCHEMA, "run_id": self.run_id, "source": self.source}
        chain: list[Any] = [self._tolerant(processor) for processor in (*processors, *_listeners)]
        if not chain:
            return None if self._file is None else _Channel(self._file, [LineRenderer(constant)], {})
        if self._file is not None:
            chain.append(_render)
        return _Channel(self._file, chain, constant)

    def write(
        self,
        event: Event,
        *,
        policy: str | None = None,
        scope_id: int | None = None,
        transition_id: int | None = None,
        step: int | None = None,
    ) -> int:
        """Write one event. Never raises.

        Args:
            event: What happened.
            policy: Name of the policy concerned.
            scope_id: The innermost scope concerned.
            transition_id: The transition that it belongs to.
            step: The session's step number.

        Returns:
            The record's ``seq``, consumed even when the record was lost; -1 in a forked child and after
            ``close``, where there is no file to number.
        """
        channel = self._channel
        if channel is None:
            return next(self._seq)
        # Before the lock: in a forked child another thread's lock stays taken for ever.
        if self._is_inherited:
            self.dropped += 1
            return -1
        with self._lock:
            if self._closed:
                self.dropped += 1
                return -1
            # Number and clocks are read under the lock, so that all three grow along the file.
            seq = next(self._seq)
            try:
                fields = event.to_fields()
                channel.emit(
                    {
                        "seq": seq,
                        "time_ns": time.time_ns(),
                        "mono_ns": time.monotonic_ns(),
                        "event": event.event,
                        "policy": policy,
                        "scope_id": scope_id,
                        "transition_id": transition_id,
                        "step": step,
                        **fields,
                    }
                )
            except structlog.DropEvent:
                pass  # left out on purpose: the gap in seq is the trace
            except Exception as error:  # a log must not end a training run
                self.dropped += 1
                self._complain("a record could not be written", error)
        return seq

    def close(self) -> None:
        """Close the file. Idempotent, and never raises; nothing is flushed, since nothing is buffered."""
        if self._is_inherited:
            self._release()  # the lock may be held for ever, see write()
            return
        with self._lock:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        where = "nowhere" if self.path is None else str(self.path)
        return f"<AuditLog {where} source={self.source!r} {state} dropped={self.dropped}>"

    def _release(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                if self._file is not None:
                    self._file.close()
            except OSError as error:  # a network file system may own up to a lost write only now
                self._complain("the file could not be closed", error)

    def _tolerant(self, processor: Processor) -> Processor:
        """Wrap a user's processor so that its failure costs its own change and not the record."""

        def call(logger: WrappedLogger, method: str, record: EventDict) -> EventDict:
            try:
                changed = processor(logger, method, record)
            except structlog.DropEvent:
                raise
            except Exception as error:  # not ours, and a log must not end a training run
                self._complain("a processor failed", error)
                return record
            return changed if isinstance(changed, dict) else record

        return call

    def _complain(self, what: str, error: Exception) -> None:
        """Report the first failure only: a full disk fails at every record."""
        if self._complained:
            return
        self._complained = True
        # The application's handlers run in here, and may fail as well.
        with contextlib.suppress(Exception):
            _logger.error(
                "%s (%s: %s). Log: %s, source %s. Training goes on; lost records are counted in "
                "AuditLog.dropped and show as gaps in seq. Further failures are not reported.",
                what,
                type(error).__name__,
                error,
                self.path,
                self.source,
            )


class _Channel(structlog.BoundLoggerBase):
    """A structlog logger of our own, given all its parts.

    ``structlog.get_logger`` and ``wrap_logger`` take what they lack from the global configuration; a class
    built directly reads none of it, so the application's configuration cannot change the log.
    """

    def __init__(
        self,
        file: _LineFile | None,
        processors: Iterable[Callable[..., Any]],
        context: dict[str, Any],
    ) -> None:
        super().__init__(file, processors, context)

    def emit(self, fields: dict[str, Any]) -> None:
        """Run the chain and hand the line to the file; without a file the chain is all there is.

        As ``_process_event`` does, less the two copies of a record that nobody else holds.
        """
        record: Any = {**self._context, **fields} if self._context else fields
        for processor in self._processors:
            # The method name is "info" for the sake of processors such as structlog's add_log_level.
            record = processor(self._logger, "info", record)
        if self._logger is not None:
            self._logger.write(record)


class _LineFile:
    """An append-only descriptor that takes whole lines."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._torn = False

    def write(self, line: bytes) -> None:
        """Write a line by one ``os.write``; a short write is completed.

        Raises:
            OSError: The line is not in the file, or only its beginning is.
        """
        # After a line that was cut short, a newline first: the fragment then costs a reader itself alone, and
        # not this line too. Set before, not after, so that an interrupt between two writes counts as well.
        if self._torn:
            line = b"\n" + line
        self._torn = True
        while (written := os.write(self._fd, line)) < len(line):
            if written == 0:  # or this would never end
                raise OSError(errno.EIO, "the file takes no bytes")
            line = line[written:]
        self._torn = False

    def close(self) -> None:
        # The number is forgotten first: the system gives it to the next file that anybody opens.
        fd, self._fd = self._fd, -1
        os.close(fd)


class _RotatingFile(_LineFile):
    """A file that is moved aside, and begun anew, before it would grow beyond a size."""

    def __init__(self, fd: int, path: Path, limit: int, complain: Callable[[str, Exception], None]) -> None:
        super().__init__(fd)
        self._path = path
        self._limit = limit
        self._size = 0
        self._complain = complain

    def write(self, line: bytes) -> None:
        if self._size and self._size + len(line) > self._limit:
            self._size = 0  # first, so that a record written by a signal handler in between does not rotate too
            self._rotate()
        self._size += len(line)
        super().write(line)

    def _rotate(self) -> None:
        try:
            self._path.rename(next_part(self._path))
            new = os.open(self._path, _OPEN_FLAGS, 0o600)
        except OSError as error:
            # What cannot be rotated can still be written to: the open descriptor goes where the file went.
            self._limit = sys.maxsize
            self._complain("the file could not be rotated, and grows from now on", error)
            return
        old, self._fd, self._torn = self._fd, new, False
        os.close(old)


def _render(_logger: WrappedLogger, _method: str, record: EventDict) -> bytes:
    return render_line(dict(record))


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rotate(path)
        # Only the owner may read it: paths and error texts are nobody else's business.
        return os.open(path, _OPEN_FLAGS, 0o600)
    except OSError as error:
        raise AuditError(
            f"opening the audit log {str(path)!r} for writing",
            (),
            "an audit_path in a directory that you may write to, or None to log nowhere",
            f"{type(error).__name__}: {error}",
        ) from error
