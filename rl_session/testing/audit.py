"""The records of a block of code as values, without a file: for tests that say what must have happened, and in which order.

Knows the audit only by its public records. What ranks in other processes write is in their files, and not here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from rl_session.audit.check import assert_log_is_consistent
from rl_session.audit.envelope import loads_or_none
from rl_session.audit.log import listening
from rl_session.audit.records import Record, to_record
from rl_session.audit.render import render_line

__all__ = ["CapturedAudit", "captured_audit"]


@attrs.define(eq=False)
class CapturedAudit:
    """What sessions wrote while they were listened to; made by :func:`captured_audit`."""

    _lines: list[bytes] = attrs.field(factory=list, init=False)

    def __repr__(self) -> str:
        return f"<CapturedAudit of {len(self._lines)} records>"

    def __len__(self) -> int:
        return len(self._lines)

    def _hear(self, _logger: object, _method: str, record: Any) -> Any:
        self._lines.append(render_line(dict(record)))
        return record

    @property
    def records(self) -> list[Record]:
        """Every record so far, in the order in which they were written."""
        return [to_record(fields) for line in self._lines if (fields := loads_or_none(line)) is not None]

    def named(self, *names: str, policy: str | None = None) -> list[Record]:
        """The records of some events, such as "scope.entered"; of one policy, if it is named."""
        return [r for r in self.records if r.name in names and policy in (None, r.policy)]

    def clear(self) -> None:
        """Forget what was heard; from then on :meth:`assert_consistent` has only part of the log, and says so."""
        self._lines.clear()

    def assert_consistent(self, *, finished: bool = False) -> None:
        """Replay the log of each session, as ``rl-session audit check`` does.

        Args:
            finished: Whether what was begun must have ended, the session included.

        Raises:
            AssertionError: A log contradicts itself; the message says where.
        """
        runs: dict[str, list[bytes]] = {}
        for record, line in zip(self.records, self._lines, strict=True):
            runs.setdefault(record.run_id, []).append(line)
        with tempfile.TemporaryDirectory() as folder:
            for number, lines in enumerate(runs.values()):
                path = Path(folder) / f"captured-{number}.jsonl"
                path.write_bytes(b"".join(lines))
                assert_log_is_consistent(path, finished=finished)


@contextmanager
def captured_audit() -> Iterator[CapturedAudit]:
    """Hear every record of the sessions opened in the block, with or without a file of their own, in this process.

    ``rs.attach(model)`` without a session opens one too. A session goes on being heard after the block.

    Yields:
        What was heard so far.
    """
    captured = CapturedAudit()
    with listening(captured._hear):  # noqa: SLF001 (made for this)
        yield captured
