"""From one mode to the next: one transition on every rank, recorded as `started` and then exactly one ending.

Knows the frames only as what decides where a scope comes back to; opens and closes none.
"""

from __future__ import annotations

import time

from rl_session.audit import events
from rl_session.driver.beside import quiet_engines
from rl_session.driver.callsite import Speaker
from rl_session.driver.sharing import Sharing
from rl_session.lifecycle import Cell, Cells, Flags, Mode, Placement
from rl_session.workers.replies import TransitionReply, TransitionRequest

__all__ = ["Transitions"]


class Transitions(Sharing):
    """Moves the policy, and makes up for releases that failed."""

    def send_away(self, away: Placement, reason: str) -> None:
        """Move components without a change of mode; outside every scope the rest may be written afterwards.

        Raises:
            RLSessionError: It failed and was rolled back.
        """
        self._transition(self.mode, reason, scope_id=None, explicit=away, row=self.row, rests=not self.frames)

    def retry_pending(self, attempted: str) -> None:
        """Make up for a release that failed, if nobody is at work on the policy.

        Raises:
            RLSessionError: It failed again; it stays pending.
        """
        if self.closed or self.fault is not None or not self.lock.acquire(blocking=False):
            return
        try:
            if not self.is_busy:
                with self.changing():
                    self._retry_release(attempted)
        finally:
            self.lock.release()

    def _retry_release(self, attempted: str) -> None:
        """The way out of an earlier scope failed: make up for it before anything else."""
        if self._pending_release:
            mode, _ = self._outside()
            self._go_outside(mode, f"pending release, before {attempted}", None)

    def _outside(self) -> tuple[Mode, Mode]:
        """Mode and row of the innermost scope, or of rest."""
        return (self.frames[-1].mode, self.frames[-1].row) if self.frames else (self.resting_mode, self.resting_mode)

    def _go_outside(self, outer_mode: Mode, reason: str, scope_id: int | None) -> None:
        """Go to the mode of what is the innermost scope now, or of rest; whatever fails, that mode is in effect.

        A release that failed is pending: what moves next tries it again.
        """
        stored = self.frames[-1].placement if self.frames else self.resting
        cells = None if self.frames else self.resting_cells
        _, row = self._outside()
        rests = not self.frames
        try:
            self._transition(outer_mode, reason, scope_id=scope_id, stored=stored, cells=cells, row=row, rests=rests)
        except BaseException:
            if self.fault is None:
                self._pending_release = True
                self.mode, self.row = outer_mode, row
            raise

    def _transition(
        self,
        mode: Mode,
        reason: str,
        *,
        scope_id: int | None,
        stored: Placement | None = None,
        explicit: Placement | None = None,
        cells: Cells | None = None,
        flags: Flags | None = None,
        row: Mode | None = None,
        rests: bool = False,
        said: Speaker | None = None,
    ) -> TransitionReply:
        """Ask every rank to go to ``mode``, or to where another ``row`` of the table puts things; all do, or none."""
        row = row or mode
        number = self.run.next_transition_id()
        from_mode = self.mode
        start = time.perf_counter()
        self._record(
            events.TransitionStarted(
                from_mode=from_mode.value,
                to_mode=mode.value,
                reason=reason,
                via=said.via if said is not None else "session" if scope_id is None else "scope",
                call_site=said.call_site if said is not None else None,
            ),
            scope_id=scope_id,
            transition_id=number,
        )
        request = TransitionRequest(
            mode=row,
            flags=flags or self.flags,
            stored=stored,
            explicit=explicit,
            cells=cells,
            leaves_library=rests,
            transition_id=number,
            scope_id=scope_id,
            step=self.run.step,
        )
        self._moving = reason
        try:
            comes = cells is None or cells.weights is Cell.DEVICE  # a legacy call that moves no weights crowds nobody
            if self.run.engines and explicit is None and comes:
                quiet_engines(self, row, reason)
            reply = self._move_within(request, reason) or self._move(request, row, reason)
        except BaseException as error:
            self.journal.failed(error, from_mode, mode, number, scope_id)
            if self.lease is not None:
                self.lease.revoke(error)
            if getattr(error, "rl_step_ended", False):
                self.end_step("its gradients were discarded on some ranks by a transition that was taken back")
            self._note_fault(error)
            raise
        finally:
            self._moving = ""
        self.mode, self.row = mode, row
        self.device.hold(self.name, reply.device_bytes)
        self._pending_release = False
        if reply.moved:
            self.last_move = f"{reason} (transition {number})"
        self.journal.committed(reply, from_mode, mode, number, scope_id, time.perf_counter() - start)
        if reply.live_dropped and self.step is not None:
            self.end_step("its gradients were discarded by a transition")
        return reply

    def _move_within(self, request: TransitionRequest, reason: str) -> TransitionReply | None:
        """Ask ranks elsewhere to move if the room that there is suffices; None where it has to be made first."""
        if not self.group.logs_moves:
            return None
        with self.run.arbiter.steady(self.device) as headroom:
            return self.ranks.transition_within(request, headroom, reason)

    def _move(self, request: TransitionRequest, row: Mode, reason: str) -> TransitionReply:
        with self.run.arbiter.admit(self.seat, row, lambda: self.seat.wish(request), reason) as own:
            request.evict = own
            return self.ranks.transition(request, reason)
