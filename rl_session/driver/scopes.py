"""The stack of open scopes of one policy: entering, leaving, and scopes that the user lost.

What the user holds is another object (``rl_session.scope``), which a frame refers to weakly, so that a scope the user lost
is noticed and closed.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

from rl_session.audit import events
from rl_session.driver.beside import refuse_beside_engine
from rl_session.driver.callsite import Speaker
from rl_session.driver.frames import Companion, Frame, after, may_nest_in
from rl_session.driver.ownership import Token
from rl_session.driver.run import error_text
from rl_session.driver.transitions import Transitions
from rl_session.errors import FaultedError, NestingError, ScopeError, ScopeOrderError
from rl_session.lifecycle import Mode

__all__ = ["Scopes"]


class Scopes(Transitions):
    """Opens and closes scopes."""

    def ready(self, attempted: str) -> None:
        """Refuse work on a closed or faulted policy, and close scopes that the user lost.

        Raises:
            ClosedError: It was closed or detached.
            FaultedError: A failure could not be undone; the message names the cause and the cure.
            ScopeError: A transition is running, and something it calls (a cache hook) asks for more.
        """
        if self.closed:
            self._refuse_closed(attempted)
        if self.fault is not None:
            raise FaultedError(
                f"{self.label}: {attempted} on a faulted policy",
                (f"since: {self.fault.attempted}", *self.fault.facts),
                self.fault.remedy,
                self.fault.cause,
            )
        if self._moving:
            raise ScopeError(
                f"{self.label}: {attempted} while a transition is running",
                self.explain()[1],
                "policy.add_cache_hook(hook)  # of a hook that leaves the policy alone",
            )
        self.close_orphans()

    @property
    def has_orphans(self) -> bool:
        """Whether the innermost scope was lost. O(1), and no lock is taken."""
        frames = self.frames
        return bool(frames) and frames[-1].holder() is None

    def close_orphans(self) -> None:
        """Close scopes whose object is gone: an interrupt struck between entry and the block, or nobody kept them."""
        if not self.has_orphans:
            return
        with self.changing():
            try:
                while self.has_orphans:
                    frame = self.frames[-1]
                    message = f"{frame.describe()} was entered and never left (interrupted?); it is closed now"
                    self._record(events.WarningIssued(code="orphaned_scope", message=message), scope_id=frame.scope_id)
                    self._close_frame(frame, "orphaned")
            finally:
                if not self.frames:
                    self._release()

    def acquire(self, spelling: str, call_site: str, timeout: float | None = None, *, is_scope: bool = False) -> Token:
        """Become the owner, which :meth:`enter` and :meth:`switch` ask for; undone by :meth:`let_go`.

        Args:
            spelling: How the user wrote it.
            call_site: Where.
            timeout: Seconds to wait for another owner; None to give up at once.
            is_scope: Whether a scope is entered next.

        Raises:
            OwnershipError: Another thread, task or process is.
        """
        if self.has_orphans:
            self.ownership.check_process(spelling)
            self.close_orphans()  # their owner may be gone with them
        token = self.ownership.acquire(spelling, call_site, timeout)
        if self.lease is not None and not self.lease.is_held:
            try:
                what = f"{spelling} at {call_site}"
                self._take_lease(what, timeout, scope=what if is_scope else "")
            except BaseException:
                self.let_go(token)
                raise
        return token

    def let_go(self, token: Token) -> None:
        """Stop being the owner, unless a scope is open: then the end of that scope does it."""
        if not self.frames:
            self._release(token)

    def enter(
        self,
        holder: Any,
        mode: Mode,
        spelling: str,
        call_site: str,
        *,
        via: str = "scope",
        engine: str = "",
        companion: Companion | None = None,
    ) -> Frame:
        """Open a scope; the caller is the owner.

        Args:
            holder: The user's object, which is held weakly.
            mode: Which mode.
            spelling: How the user wrote it.
            call_site: Where.
            via: Who asks.
            engine: The name of the in-process engine that it opens.
            companion: An external engine on the policy's device: the policy goes where OFFLOADED has it, then that wakes.

        Raises:
            NestingError, ScopeError: It may not be opened here; nothing changed.
            RLSessionError: The transition failed and was rolled back; the outer mode stands.
        """
        with self.lock:
            self.ready(spelling)
            row = mode if companion is None else Mode.OFFLOADED
            self._check_nesting(mode, row, spelling, call_site)
            self.last_used = self.run.arbiter.tick()
            frame = self._open_frame(holder, mode, row, spelling, call_site)
            self.frames.append(frame)
            if self.lease is not None and len(self.frames) == 1:
                self.lease.note_scope(frame.describe())
            if not self.run.log.is_silent:
                self._record(
                    events.ScopeEntered(
                        mode=mode._value_,  # `.value` is a property, at ten times the cost
                        outer_mode=frame.outer_mode._value_,
                        depth=len(self.frames) - 1,
                        via=via,
                        call_site=call_site,
                    ),
                    scope_id=frame.scope_id,
                )
            if engine and frame.moved:  # in the mode in effect the engine is awake already
                frame.engine = engine
                self._record(events.EngineWoken(engine=engine, tags=["weights"]), scope_id=frame.scope_id)
            if companion is not None:
                self._wake(companion, frame, holder)
            return frame

    def _wake(self, companion: Companion, frame: Frame, holder: Any) -> None:
        """Wake the engine of a scope that was opened; if it does not wake, the scope is closed again."""
        try:
            companion.enter(holder, frame.call_site, frame.scope_id)
        except BaseException as error:
            failure = self._try_close(frame, error_text(error))
            if failure is not None:
                error.add_note(f"and while leaving {frame.spelling}: {failure}")
            raise
        frame.companion = companion

    def _check_nesting(self, mode: Mode, row: Mode, spelling: str, call_site: str) -> None:
        if self._calls:
            raise ScopeError(
                f"{self.label}: {spelling} at {call_site} inside a running compute call",
                self.explain()[1],
                f"with policy.{spelling}: ...  # around the call, not inside its loss or forward",
            )
        if self.run.engines:
            refuse_beside_engine(self, row, spelling, call_site)
        if self.frames and not may_nest_in(self.frames[-1], mode):
            outer = self.frames[-1]
            raise NestingError(
                f"{self.label}: {spelling} at {call_site} inside {outer.describe()}",
                self.explain()[1],
                f"with policy.{spelling}: ...  # after the block of {outer.spelling} has ended",
            )

    def _open_frame(self, holder: Any, mode: Mode, row: Mode, spelling: str, call_site: str) -> Frame:
        outer_mode = self.mode
        if self._pending_release:
            self._retry_release(spelling)
        scope_id = self.run.next_scope_id()
        placement = self.frames[-1].placement if self.frames else self.resting
        moves = mode is not self.mode or row is not self.row or (self.resting_cells is not None and not self.frames)
        if moves:
            reason, said = f"entering {spelling} at {call_site}", Speaker("scope", call_site)
            reply = self._transition(mode, reason, scope_id=scope_id, row=row, said=said)
            placement = reply.placement
            if not self.frames:
                self.resting = reply.before
        return Frame(scope_id, mode, row, spelling, placement, outer_mode, call_site, weakref.ref(holder), moves)

    def leave(self, frame: Frame, error: BaseException | None) -> None:
        """Close a scope, and those still open inside it.

        Raises:
            ScopeOrderError: Scopes inside it were still open; all of them are closed now.
            RLSessionError: The way out failed and was rolled back; the scope is closed, the release stays pending.
        """
        with self.lock:
            frames = self.frames
            if frames and frame is frames[-1]:  # as `with` blocks end; the rest is for those who call __exit__ by hand
                try:
                    self._close_frame(frame, None if error is None else error_text(error))
                finally:
                    if not frames:
                        self._release()
                return
            if frame not in frames:
                message = f"{frame.describe()} was closed before: with a scope around it, or with the policy"
                self._record(
                    events.WarningIssued(code="scope_already_closed", message=message), scope_id=frame.scope_id
                )
                return
            inner = self.frames[self.frames.index(frame) + 1 :]
            failures = [self._try_close(left_open, "left open") for left_open in reversed(inner)]
            failures.append(self._try_close(frame, error_text(error)))
            if not self.frames:
                self._release()
        if inner:
            failures.append(self._order_error(frame, inner))
        raised = [failure for failure in failures if failure is not None]
        for other in raised[1:]:
            raised[0].add_note(f"and then: {other}")
        if raised:
            raise raised[0]

    def _order_error(self, frame: Frame, inner: list[Frame]) -> ScopeOrderError:
        return ScopeOrderError(
            f"{self.label}: {frame.describe()} was left while scopes inside it were open",
            (f"closed first: {', '.join(f.describe() for f in reversed(inner))}", *self.explain()[1]),
            f"with policy.{frame.spelling}: ...  # `with` blocks end in the reverse order of entry",
        )

    def _try_close(self, frame: Frame, error: str | None) -> BaseException | None:
        try:
            self._close_frame(frame, error)
        except BaseException as failure:
            return failure
        return None

    def _close_frame(self, frame: Frame, error: str | None) -> None:
        """Take a frame off the stack and go to the mode outside it; the frame is gone whatever happens."""
        if frame is self.frames[-1]:
            self.frames.pop()
        else:
            self.frames.remove(frame)
        if frame.engine:
            self._record(events.EngineSlept(engine=frame.engine), scope_id=frame.scope_id)
        if frame.undo is not None:
            frame.undo()
            frame.undo = None
        lease = self.lease
        if lease is not None and (lease.is_revoked or (not self.frames and lease.was_taken())):
            message = f"{frame.describe()} ended after another process had taken the policy over"
            self._record(events.WarningIssued(code="lease_revoked", message=message))
            raise self._revoked(f"leaving {frame.describe()}")
        failure: BaseException | None = None
        try:
            if frame.companion is None:
                self._leave_row(frame)
            else:
                with after(frame.companion):
                    self._leave_row(frame)
        except BaseException as raised:
            failure = raised
            raise
        finally:
            if not self.run.log.is_silent:
                self._record(
                    events.ScopeExited(
                        mode=frame.mode._value_,
                        restored_mode=self.mode._value_,
                        seconds=time.perf_counter() - frame.entered_at,
                        error=error or error_text(failure),
                    ),
                    scope_id=frame.scope_id,
                )

    def _leave_row(self, frame: Frame) -> None:
        outer_mode, outer_row = self._outside()
        parked = self.resting_cells is not None and not self.frames and frame.moved
        if (self.mode is not outer_mode or self.row is not outer_row or parked) and self.fault is None:
            self._go_outside(outer_mode, f"leaving {frame.describe()}", frame.scope_id)

    def _drop_frames(self, why: str) -> None:
        """Close every scope without a transition."""
        if not self.frames:
            return
        fault, self.fault = self.fault, self.fault or FaultedError(why)
        try:
            while self.frames:
                self._close_frame(self.frames[-1], why)
        finally:
            self.fault = fault
            self._release()
