"""The state of one policy on the driver: its mode, the stack of open scopes, and the way from one to the next.

Every change of mode is one transition, asked of the worker group, recorded as `started` and then exactly one ending. A
frame is what the library remembers of an open scope; what the user holds is another object (``rl_session.scope``), so that
a scope the user lost is noticed and closed. Knows nothing of tensors.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import attrs

from rl_session.audit import events
from rl_session.driver.beside import quiet_engines, refuse_beside_engine
from rl_session.driver.callsite import Speaker, speaker
from rl_session.driver.interrupts import DeferredInterrupt
from rl_session.driver.journal import Journal
from rl_session.driver.lease import READS, LeaseClient
from rl_session.driver.ownership import Ownership, Token
from rl_session.driver.ranks import Ranks
from rl_session.driver.room import PolicySeat
from rl_session.driver.run import Run, error_text
from rl_session.errors import (
    ClosedError,
    FaultedError,
    ModeError,
    NestingError,
    OwnershipError,
    RLSessionError,
    ScopeError,
    ScopeOrderError,
    StaleHandleError,
)
from rl_session.lifecycle import (
    CALL_NEEDS,
    Cell,
    Cells,
    Component,
    Flags,
    Mode,
    Placement,
    Tier,
    may_call,
    may_nest,
    modes_allowing,
    scope_to_write,
)
from rl_session.offload.device import Device
from rl_session.workers.digest import digest_of
from rl_session.workers.group import WorkerGroup
from rl_session.workers.lease import PolicyState
from rl_session.workers.replies import (
    CallResult,
    Description,
    TransitionReply,
    TransitionRequest,
)

__all__ = ["Companion", "Control", "Frame"]


class Companion(Protocol):
    """An external engine beside a scope: awake while it is open."""

    def enter(self, holder: Any, call_site: str, scope_id: int) -> None:
        """Wake, after the policy has made its move."""
        ...

    def leave(self) -> None:
        """Let go, before the policy moves back."""
        ...


@attrs.define(eq=False)
class Frame:
    """What is remembered of an open scope.

    Attributes:
        scope_id: Its number in the log.
        mode: Its mode.
        row: The row of the mode table that decides what is where and what may be called: that of its mode, unless an
            external engine generates.
        spelling: How the user wrote it, such as ``training_mode()``.
        placement: The placement reached at entry, with conditional cells decided: what inner scopes come back to.
        outer_mode: The mode it was entered from.
        call_site: Where it was entered.
        holder: The user's scope object, weakly: when it is gone, the scope is an orphan.
        moved: Whether entry was a transition (it is not when the mode was in effect already).
        engine: The name of the in-process engine that the scope opened, if it opened one.
        companion: The external engine that is awake while the scope is open, if one is.
        undo: Restores what entry set for the user's own forwards, if anything.
        entered_at: ``time.perf_counter()`` at entry.
    """

    scope_id: int
    mode: Mode
    row: Mode
    spelling: str
    placement: Placement
    outer_mode: Mode
    call_site: str
    holder: weakref.ref[Any]
    moved: bool
    engine: str = ""
    companion: Companion | None = None
    undo: Callable[[], None] | None = None
    entered_at: float = attrs.field(factory=time.perf_counter)

    def describe(self) -> str:
        """For messages."""
        return f"{self.spelling} at {self.call_site}"


class Control:
    """The driver's side of one policy.

    Args:
        name: The policy's name.
        kind: "policy" or "value", for messages.
        group: Its ranks.
        run: What the run shares.
        flags: Its configuration, as far as placements go.
        first: What was found at attach.
        base: The mode outermost exits go to.
        device: Where its bytes are when they are needed.
        is_built: Whether the session built the model, which then ends with the policy.
        lease: Where handles in other processes may have the policy too.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        group: WorkerGroup,
        run: Run,
        flags: Flags,
        first: Description,
        base: Mode,
        device: Device,
        *,
        is_built: bool = False,
        lease: LeaseClient | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.label = f"{kind} {name!r}"
        self.group = group
        self.run = run
        self.flags = flags
        self.mode = first.mode
        self.row = first.mode
        """The row of the mode table in effect; another than the mode's own while an external engine generates."""
        self.resting_mode = base
        self.resting = first.placement
        self.frames: list[Frame] = []
        self.fault: RLSessionError | None = None
        self.closed = ""
        self.ownership = Ownership(self.label)
        self.lock = threading.RLock()
        self.device = device
        self.last_used = run.arbiter.tick()
        self.last_move = "nothing has moved since attach"
        self.step: Any = None
        """The user's open train step, if one is open."""
        self.digests = run.verify == "checksum"
        """Whether records of calls carry a digest of the result."""
        self.resting_cells: Cells | None = None
        """What the resting placement asks of each component, where that is no mode's row (a legacy call's).

        A scope of the resting mode is entered by a transition then: its own row may want something else.
        """
        self._pending_release = False
        self._calls = 0
        self._moving = ""
        """The reason of the transition that is running, if one is."""
        self.seat = PolicySeat(self)
        self.journal = Journal(name, run, ranks_write=group.logs_moves)
        self._record = self.journal.write
        self.ranks = Ranks(group, self.label, self.explain, self._record)
        self._is_built = is_built
        self.lease = lease
        if lease is None or lease.is_held:  # another process wrote it before it handed the policy on
            self.journal.created(first, group.num_ranks)

    # -- saying what is ------------------------------------------------------------------------------------------

    def explain(self) -> tuple[str, tuple[str, ...]]:
        """The label of the policy, and the facts that every message gives."""
        scopes = " > ".join(frame.describe() for frame in self.frames) or "none"
        facts = [f"mode: {self.mode}, open scopes: {scopes}", f"last moved by: {self.last_move}"]
        if self._moving:
            facts.append(f"attempted: {self._moving}")
        if self.step is not None:
            facts.append(f"open step: {self.step!r}")
        return self.label, tuple(facts)

    @property
    def health(self) -> str:
        """One of "ok", "faulted" or "closed"."""
        return "closed" if self.closed else "faulted" if self.fault is not None else "ok"

    def ready(self, attempted: str) -> None:
        """Refuse work on a closed or faulted policy, and close scopes that the user lost.

        Raises:
            ClosedError: It was closed or detached.
            FaultedError: A failure could not be undone; the message names the cause and the cure.
            ScopeError: A transition is running, and something it calls (a cache hook) asks for more.
        """
        if self.closed:
            facts = (f"mode: {self.mode}, open scopes: none", f"last moved by: {self.last_move}")
            raise ClosedError(
                f"{self.label}: {attempted} after {self.closed}", facts, "policy = rs.attach(model, optimizer)"
            )
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

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A block that changes modes: alone, and not broken off by Ctrl-C. Waiting for the others may be."""
        with self.lock, DeferredInterrupt():
            yield

    # -- scopes --------------------------------------------------------------------------------------------------

    def acquire(self, spelling: str, call_site: str, timeout: float | None = None) -> Token:
        """Become the owner, which :meth:`enter` and :meth:`switch` ask for; undone by :meth:`let_go`.

        Raises:
            OwnershipError: Another thread, task or process is.
        """
        self.ownership.check_process(spelling)
        self.close_orphans()  # their owner may be gone with them
        token = self.ownership.acquire(spelling, call_site, timeout)
        if self.lease is not None and not self.lease.is_held:
            try:
                self._take_lease(f"{spelling} at {call_site}", timeout)
            except BaseException:
                self.let_go(token)
                raise
        return token

    def let_go(self, token: Token) -> None:
        """Stop being the owner, unless a scope is open: then the end of that scope does it."""
        if not self.frames:
            self._release(token)

    def _release(self, token: Token | None = None) -> None:
        """Nobody owns it from now on, in this process and, where others have handles, in any."""
        lease = self.lease
        if lease is not None and lease.is_held and lease.is_shared and self.step is None:
            lease.give_up(self.state())
        self.ownership.release(token)

    # -- other processes -----------------------------------------------------------------------------------------

    def state(self) -> PolicyState:
        """What the next holder of the lease has to know."""
        return PolicyState(
            mode=self.mode,
            row=self.row,
            resting_mode=self.resting_mode,
            resting=self.resting,
            resting_cells=self.resting_cells,
            pending_release=self._pending_release,
            fault=self.fault,
            flags=self.flags,
            last_move=self.last_move,
            last_checkpoint=self.ranks.last_checkpoint,
            closed=self.closed,
        )

    def adopt(self, state: PolicyState | None) -> None:
        """Know what the last holder of the lease knew."""
        if state is None:
            return
        self.mode, self.row = state.mode, state.row
        self.resting_mode, self.resting = state.resting_mode, state.resting
        self.resting_cells, self._pending_release = state.resting_cells, state.pending_release
        self.fault, self.flags, self.closed = state.fault, state.flags, state.closed
        self.last_move, self.ranks.last_checkpoint = state.last_move, state.last_checkpoint

    def _take_lease(self, what: str, timeout: float | None = None) -> None:
        assert self.lease is not None
        if self.lease.is_revoked and self.frames:
            raise self._revoked(what)
        with self._noting_loss():
            grant = self.lease.take(what, timeout)
        self.adopt(grant.state)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """A block that asks the rank which grants the lease; where that is lost, the policy is faulted."""
        try:
            yield
        except FaultedError as error:
            self.ranks.note_lost(0, error.cause)
            self._note_fault(error)
            raise

    def _take_lease_by_force(self, what: str) -> None:
        """Get the lease from whoever has it, where the rank that grants it lives; else all will be built anew."""
        if self.lease is not None and not self.lease.is_held and 0 not in self.ranks.lost:
            with suppress(OwnershipError):
                self.adopt(self.lease.take(what, force=True).state)

    def share(self) -> None:
        """From now on handles elsewhere get the lease whenever nobody is at work here."""
        if self.lease is None:
            return
        with self.lock:
            self.lease.is_shared = True
            if not (self.frames or self._calls or self._moving or self.closed):
                self._release()

    def _revoked(self, what: str) -> StaleHandleError:
        return StaleHandleError(
            f"{self.label}: {what}, after another process took the policy over",
            self.explain()[1],
            "leave the open scopes, and enter new ones",
        )

    def look(self) -> None:
        """Bring what is known up to date, where another process may have changed it."""
        lease = self.lease
        if lease is None or lease.is_held or self.closed or self.frames:
            return
        with self.lock:
            try:
                with self._noting_loss():
                    seen = lease.view()
            except FaultedError:
                return
            if seen["is_free"]:
                self.adopt(seen["state"])
            elif seen["mode"] is not None:
                self.mode = self.row = seen["mode"]

    def take_over(self) -> None:
        """Take the lease from a process that is gone with a scope open, and go to the resting mode.

        Raises:
            RLSessionError: The transition failed and was rolled back.
        """
        lease = self.lease
        if lease is None or lease.is_held:
            return
        with self.changing():
            seen = lease.view()
            if seen["is_free"]:
                return
            self.adopt(lease.take("recover()", force=True).state)
            self.mode = self.row = seen["mode"] or self.mode
            placement, nbytes = self.ask("placement"), self.ask("sizes")
            origin = f"what {seen['held_by']} left"
            self._record(events.PolicyRecovered(origin=origin, placement=placement.as_text(), nbytes=nbytes))
            try:
                self._go_outside(self.resting_mode, "recover()", None)
            finally:
                self._release()

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
        if self.frames and not _may_nest(self.frames[-1], mode):
            outer = self.frames[-1]
            raise NestingError(
                f"{self.label}: {spelling} at {call_site} inside {outer.describe()}",
                self.explain()[1],
                f"with policy.{spelling}: ...  # after the block of {outer.spelling} has ended",
            )

    def _open_frame(self, holder: Any, mode: Mode, row: Mode, spelling: str, call_site: str) -> Frame:
        outer_mode = self.mode
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
            if frame not in self.frames:
                message = f"{frame.describe()} was closed before: with a scope around it, or with the policy"
                self._record(
                    events.WarningIssued(code="scope_already_closed", message=message), scope_id=frame.scope_id
                )
                return
            if frame is self.frames[-1]:  # as `with` blocks end; the rest is for those who call __exit__ by hand
                try:
                    self._close_frame(frame, error_text(error))
                finally:
                    if not self.frames:
                        self._release()
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
                with _after(frame.companion):
                    self._leave_row(frame)
        except BaseException as raised:
            failure = raised
            raise
        finally:
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

    # -- transitions ---------------------------------------------------------------------------------------------

    def switch(
        self, mode: Mode, spelling: str, call_site: str, *, evict: bool = False, cells: Cells | None = None
    ) -> TransitionReply | None:
        """Change the resting mode.

        Args:
            mode: The mode to rest in.
            spelling: How the user wrote it.
            call_site: Where.
            evict: Whether bytes leave under a lazy release too.
            cells: What to ask of each component instead of the mode's row, now and whenever scopes end.

        Returns:
            What the transition did; None when nothing was to do.

        Raises:
            ScopeError: A scope is open.
            OwnershipError: Another owner is at work.
            RLSessionError: The transition failed and was rolled back; the resting mode stands.
        """
        held = self.ownership.token
        token = self.acquire(spelling, call_site)
        try:
            with self.changing():
                self.ready(spelling)
                self._check_outside(spelling, call_site)
                refuse_beside_engine(self, mode, spelling, call_site)
                same = mode is self.mode is self.resting_mode and cells is None is self.resting_cells
                if same and not self._pending_release and not evict:
                    return None
                lazy = evict and self.flags.release == "lazy"
                flags = attrs.evolve(self.flags, release="eager") if lazy else self.flags
                reason = f"{spelling} at {call_site}"
                said = speaker() or Speaker("switch", call_site)
                reply = self._transition(mode, reason, scope_id=None, cells=cells, flags=flags, rests=True, said=said)
                self.resting, self.resting_mode, self.resting_cells = reply.placement, mode, cells
                return reply
        finally:
            if token is not held:  # else whoever took it before has more to do
                self.let_go(token)

    def _check_outside(self, spelling: str, call_site: str) -> None:
        if self.frames or self._calls:
            inside = self.frames[-1].describe() if self.frames else "a running compute call"
            raise ScopeError(
                f"{self.label}: {spelling} at {call_site} inside {inside}",
                self.explain()[1],
                "with policy.offloaded(): ...  # or call it outside every scope",
            )

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

    def send_away(self, away: Placement, reason: str) -> None:
        """Move components without a change of mode; outside every scope the rest may be written afterwards.

        Raises:
            RLSessionError: It failed and was rolled back.
        """
        self._transition(self.mode, reason, scope_id=None, explicit=away, row=self.row, rests=not self.frames)

    @property
    def is_busy(self) -> bool:
        """Whether a call or a transition is running."""
        return bool(self._calls or self._moving)

    def ask_all(self, method: str, *args: Any) -> list[Any]:
        """Ask every rank something that moves nothing and is no compute call (not recorded)."""
        return self.ranks.ask_each(method, *args)

    def _note_fault(self, error: BaseException) -> None:
        """Remember a failure that could not be undone; after a recovery that failed the cause is the one before."""
        if not isinstance(error, FaultedError) or self.fault is not None:
            return
        self.fault = error
        self.end_step("the policy is faulted")
        self._record(events.PolicyFaulted(cause=f"{error.attempted}: {error.cause}", remedy=error.remedy))

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        *args: Any,
        gate: str | None = None,
        needs_owner: bool = False,
        then: Callable[[CallResult], events.Event] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make a compute or state call: judged by mode, serialised, recorded.

        Args:
            method: The worker's method, and the name in the record.
            *args: Handed on.
            gate: The name in the mode table, when it is not ``method``; "" for a call legal everywhere.
            needs_owner: Whether only the owner may make it.
            then: Makes one more event of the result, written after the call's own record.
            **kwargs: Handed on.

        Raises:
            ModeError: It is not legal in the mode in effect.
            RLSessionError: What the call itself raised.
        """
        gate = method if gate is None else gate
        self.ownership.check_process(f"{method}()")
        if self.lease is not None and not self.lease.is_held:
            return self._call_elsewhere(method, args, gate, needs_owner=needs_owner, then=then, **kwargs)
        if needs_owner:
            self.close_orphans()  # their owner may be gone with them
            self.ownership.check(f"{method}()")
        with self._serialised():
            self.ready(f"{method}()")
            if gate in CALL_NEEDS:
                self._retry_release(f"{method}()")
            self.check_mode(gate)
            self.last_used = self.run.arbiter.tick()
            mode, start = self.mode, time.perf_counter()
            try:
                result = self.ranks.call(method, *args, **kwargs)
            except BaseException as error:
                changed = getattr(error, "rl_changed", ())
                self.journal.notes(getattr(error, "rl_notes", ()))
                self.journal.called(method, mode, start, error_text(error), changed)
                self._note_fault(error)
                raise
            self.device.hold(self.name, result.device_bytes)
            self.journal.notes(result.notes)
            digest = digest_of(result.value) if self.digests else None
            self.journal.called(method, mode, start, None, result.changed, digest=digest)
            if then is not None:
                self._record(then(result))
            return result.value

    def _call_elsewhere(self, method: str, args: tuple[Any, ...], gate: str, **kwargs: Any) -> Any:
        """A call by a handle that does not hold the lease: one that only reads is made as things are, others take it."""
        if method not in READS:
            with self.lock:
                self._take_lease(f"{method}()")
                try:
                    return self.call(method, *args, gate=gate, **kwargs)
                finally:
                    self._release()
        for named in ("needs_owner", "then"):
            kwargs.pop(named, None)
        return self._read(method, gate, *args, **kwargs).value

    def _read(self, method: str, gate: str, *args: Any, **kwargs: Any) -> Any:
        """Read from a rank, judged by what this handle knows; what turns out to be stale is looked at anew, once."""
        assert self.lease is not None
        with self._serialised():
            for is_last in (False, True):
                if is_last or not self.lease.has_looked:
                    self.look()
                self.ready(f"{method}()")
                if gate and not may_call(self.mode, gate) and not is_last:
                    continue
                self.check_mode(gate)
                try:
                    with self._noting_loss():
                        return self._read_once(method, *args, **kwargs)
                except StaleHandleError:
                    if is_last:
                        raise
        raise AssertionError

    def _read_once(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert self.lease is not None
        mode, start = self.mode, time.perf_counter()
        try:
            value = self.lease.read(method, mode, *args, **kwargs)
        except StaleHandleError:
            raise
        except BaseException as error:
            self.journal.called(method, mode, start, error_text(error), ())
            raise
        self.journal.called(method, mode, start, None, ())
        return value

    def call_plain(self, method: str, *args: Any) -> Any:
        """As :meth:`call`, for a method that is legal everywhere and returns its value as it is."""
        self.ownership.check_process(f"{method}()")
        if self.lease is not None and not self.lease.is_held:
            return self._read(method, "", *args)
        with self._serialised():
            self.ready(f"{method}()")
            mode, start = self.mode, time.perf_counter()
            value = self.ranks.ask(method, *args)
            self.journal.called(method, mode, start, None, ())
            return value

    @contextmanager
    def _serialised(self) -> Iterator[None]:
        with self.lock:
            self._calls += 1
            try:
                yield
            finally:
                self._calls -= 1

    def check_mode(self, gate: str) -> None:
        """Refuse a call that is not legal in the mode in effect.

        Raises:
            ModeError: The message names the modes in which it is, and the scope to write.
        """
        if not gate or (may_call(self.mode, gate) and (self.row is self.mode or may_call(self.row, gate))):
            return
        needs = CALL_NEEDS.get(gate, (Component.PARAMS,))
        self._record(events.GuardRejected(method=gate, mode=self.mode.value, needs=[n.value for n in needs]))
        shown = gate if gate.endswith(")") else f"{gate}()"
        listed = ", ".join(str(mode) for mode in modes_allowing(gate) if mode is not self.mode)
        raise ModeError(
            f"{self.label}: {shown} {self._why_not(needs)}",
            (*self.explain()[1], f"legal in: {listed}"),
            self._where_to_call(gate, shown.replace("()", "(...)")),
        )

    def _where_to_call(self, gate: str, shown: str) -> str:
        """What to write for a call: the scope it belongs in, and where that scope may stand."""
        scope = f"{self.kind}.{scope_to_write(gate, self.kind)}()"
        code = f"with {scope} as p: p.{shown}" if gate == "generate" else f"with {scope}: {self.kind}.{shown}"
        outer = self.frames[-1] if self.frames else None
        may_stand = outer is None or (
            outer.row is outer.mode and any(may_nest(outer.mode, mode) for mode in modes_allowing(gate))
        )
        if outer is None or may_stand:
            return code
        return f"{code}  # after the block of {outer.spelling} has ended"

    def _why_not(self, needs: tuple[Component, ...]) -> str:
        """In words: what is missing, where it is; or only that the mode does not allow it."""
        placement = self.ask("placement")
        away = [need for need in needs if placement[need] is Tier.HOST]
        if not away:
            return f"is not legal in {self.mode} mode"
        return f"needs {', '.join(need.name for need in away)} on the device, but they are on the host"

    def record(self, event: events.Event, *, scope_id: int | None = None) -> None:
        """Write an event of this policy."""
        self._record(event, scope_id=scope_id)

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Ask rank 0 something that is no compute call (not recorded).

        Raises:
            ClosedError: The policy was closed.
        """
        if self.closed:
            self.ready(f"{method}")
        with self.lock:
            return self.ranks.ask(method, *args, **kwargs)

    def end_step(self, why: str = "") -> None:
        """Forget the open step; with ``why``, it was aborted."""
        if self.step is not None and why:
            self._record(events.StepAborted(reason=why))
        self.step = None

    # -- the end -------------------------------------------------------------------------------------------------

    def recover(self, path: str | None = None) -> str:
        """Close open scopes, leave the faulted state and go to the resting mode; returns what it was restored from.

        Raises:
            FaultedError: There is nothing to restore from.
            CheckpointError: The checkpoint cannot be loaded.
        """
        with self.changing():
            self._take_lease_by_force("recover()")
            self.end_step("recover()")
            origin = self.ranks.recover(path, self.run.log_path)
            if self.lease is not None and self.ranks.is_new:
                self.lease.begin_anew()
            self.fault = None
            self._drop_frames("recovered")
            placement, nbytes = self.ask("placement"), self.ask("sizes")
            # All of it is on the host now: what came into being since the resting placement was noted was on the device.
            self.resting = Placement({n: t if t is not Tier.NONE else Tier.DEVICE for n, t in self.resting.items()})
            self._record(events.PolicyRecovered(origin=origin, placement=placement.as_text(), nbytes=nbytes))
            try:
                self._transition(
                    self.resting_mode,
                    "recover()",
                    scope_id=None,
                    stored=self.resting,
                    cells=self.resting_cells,
                    rests=True,
                )
            except BaseException:
                self._pending_release = True  # no scope ended: the mode stands until what comes next makes up for it
                raise
            finally:
                self._release()
            return origin

    def _close_handle(self, how: str) -> None:
        """End what this process has open; the policy is another's, and goes on."""
        while self.frames:
            self._try_close(self.frames[-1], how)
        self._release()
        self.group.close()
        self.closed = how

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

    def close(self, how: str) -> None:
        """Close open scopes, give the model back whole, and refuse everything from now on. Idempotent."""
        with self.changing():
            if self.closed:
                return
            if self.lease is not None and self.lease.handle != 0:
                self._close_handle(how)
                return
            self._drop_frames(how)
            self.end_step(how)
            if self.fault is None and not self._is_built:
                with suppress(RLSessionError):  # without room on the device, detach re-homes on the host
                    up = Placement(dict.fromkeys(map(str, Component), Tier.DEVICE))
                    self._transition(Mode.RESIDENT, how, scope_id=None, explicit=up, rests=True)
            if not self._is_built:
                self.ranks.ask("detach")
            self.ranks.fetch_records(self.run.log_path)
            self.group.close()
            self.closed = how
            self._record(events.PolicyClosed(reason=how))


def _may_nest(outer: Frame, mode: Mode) -> bool:
    """The nesting table; inside an external engine's scope, that of the row it has the policy in holds too."""
    if not may_nest(outer.mode, mode):
        return False
    return outer.row is outer.mode or mode is outer.mode or may_nest(outer.row, mode)


@contextmanager
def _after(companion: Companion) -> Iterator[None]:
    """Let an engine go, then run the block whatever came of it; the engine's error is on top of the block's."""
    failure: BaseException | None = None
    try:
        companion.leave()
    except BaseException as error:
        failure = error
    try:
        yield
    except BaseException as error:
        if failure is None:
            raise
        failure.add_note(f"and then: {error}")
    if failure is not None:
        raise failure
