"""The records of one policy: how transitions, calls and warnings become events.

Facts go sideways: everything here is told, nothing is asked. Knows nothing of scopes or of who decides.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rl_session.audit import events
from rl_session.driver.callsite import call_site, speaker
from rl_session.driver.run import Run, error_text
from rl_session.errors import FaultedError
from rl_session.lifecycle import Mode
from rl_session.offload.reports import Notice
from rl_session.workers.replies import Changed, Description, TransitionReply

__all__ = ["Journal", "changes"]


def changes(changed: Iterable[Changed]) -> list[events.Change]:
    """Changed components as the log writes them."""
    return [events.Change(str(c.component), c.tier.value, c.nbytes) for c in changed]


class Journal:
    """Writes the records of one policy.

    Args:
        name: The policy's name.
        run: What the run shares.
        ranks_write: Whether the ranks write ``component.moved`` themselves.
    """

    def __init__(self, name: str, run: Run, *, ranks_write: bool = False) -> None:
        self._ranks_write = ranks_write
        self.write = run.recorder(name)
        """Writes one event, with the ids of the scope and transition it belongs to."""

    def created(self, first: Description, num_ranks: int) -> None:
        """The policy was attached, and what attaching copied."""
        placement, nbytes = first.placement.as_text(), dict(first.nbytes)
        self.write(events.PolicyCreated(mode=first.mode.value, placement=placement, nbytes=nbytes, num_ranks=num_ranks))
        for fields in first.moved:
            self.write(events.ComponentMoved(**fields))
        self.warn(first.notices)

    def warn(self, notices: Iterable[Notice], transition_id: int | None = None) -> None:
        """Write a warning record for each notice."""
        for notice in notices:
            self.write(
                events.WarningIssued(
                    code=notice.code, message=notice.message, nbytes=notice.nbytes, count=notice.count
                ),
                transition_id=transition_id,
            )

    def committed(
        self, reply: TransitionReply, from_mode: Mode, mode: Mode, number: int, scope_id: int | None, seconds: float
    ) -> None:
        """A transition succeeded: what moved, what was dropped, what to warn about, and the end."""
        for moved, spent in zip(reply.moved, reply.seconds, strict=True) if not self._ranks_write else ():
            self.write(
                events.ComponentMoved(
                    component=str(moved.component),
                    from_tier=moved.from_tier.value,
                    to_tier=moved.to_tier.value,
                    nbytes=moved.nbytes,
                    seconds=spent,
                    elided=moved.elided,
                ),
                scope_id=scope_id,
                transition_id=number,
            )
        if reply.dropped_bytes:
            why = "live, discarded" if reply.live_dropped else "consumed by an optimizer step"
            self.write(
                events.GradientsDropped(nbytes=reply.dropped_bytes, reason=why), scope_id=scope_id, transition_id=number
            )
        self.warn(reply.notices, number)
        self.write(
            events.TransitionCommitted(
                from_mode=from_mode.value,
                to_mode=mode.value,
                seconds=seconds,
                bytes_moved=sum(m.nbytes for m in reply.moved if not m.elided),
                bytes_elided=sum(m.nbytes for m in reply.moved if m.elided),
                num_moves=len(reply.moved),
                device_bytes=reply.device_bytes,
                host_bytes=reply.host_bytes,
            ),
            scope_id=scope_id,
            transition_id=number,
        )

    def failed(self, error: BaseException, from_mode: Mode, mode: Mode, number: int, scope_id: int | None) -> None:
        """A transition did not succeed: rolled back, or failed for good."""
        kind = events.TransitionFailed if isinstance(error, FaultedError) else events.TransitionRolledBack
        self.write(
            kind(from_mode=from_mode.value, to_mode=mode.value, error=error_text(error)),
            scope_id=scope_id,
            transition_id=number,
        )

    def notes(self, notes: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Records that a call brought along: event name and fields."""
        for name, fields in notes:
            self.write(events.EVENTS[name](**fields))

    def called(
        self,
        method: str,
        mode: Mode,
        start: float,
        error: str | None,
        changed: Iterable[Changed],
        *,
        digest: str | None = None,
    ) -> None:
        """A call ended, well or not; ``start`` is its ``time.perf_counter()``."""
        said = speaker()
        self.write(
            events.CallFinished(
                method=method,
                mode=mode.value,
                seconds=time.perf_counter() - start,
                error=error,
                changed=changes(changed),
                via=said.via if said is not None else None,
                call_site=said.call_site if said is not None else call_site(),
                digest=digest,
            )
        )
