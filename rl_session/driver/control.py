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
from typing import Any

import attrs

from rl_session.audit import events
from rl_session.driver.ownership import Ownership
from rl_session.driver.run import Run
from rl_session.errors import (
    ClosedError,
    FaultedError,
    ModeError,
    NestingError,
    RLSessionError,
    ScopeError,
    ScopeOrderError,
)
from rl_session.lifecycle import (
    CALL_NEEDS,
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
from rl_session.workers.group import WorkerGroup
from rl_session.workers.replies import (
    CallResult,
    Description,
    Failed,
    Lost,
    Ok,
    Reply,
    TransitionReply,
    TransitionRequest,
    error_of,
)

__all__ = ["Control", "Frame"]

Explain = Callable[[], tuple[str, tuple[str, ...]]]


@attrs.define(eq=False)
class Frame:
    """What is remembered of an open scope.

    Attributes:
        scope_id: Its number in the log.
        mode: Its mode.
        spelling: How the user wrote it, such as ``training_mode()``.
        placement: The placement reached at entry, with conditional cells decided: what inner scopes come back to.
        outer_mode: The mode it was entered from.
        call_site: Where it was entered.
        holder: The user's scope object, weakly: when it is gone, the scope is an orphan.
        moved: Whether entry was a transition (it is not when the mode was in effect already).
        undo: Restores what entry set for the user's own forwards, if anything.
        entered_at: ``time.perf_counter()`` at entry.
    """

    scope_id: int
    mode: Mode
    spelling: str
    placement: Placement
    outer_mode: Mode
    call_site: str
    holder: weakref.ref[Any]
    moved: bool
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
    """

    def __init__(
        self, name: str, kind: str, group: WorkerGroup, run: Run, flags: Flags, first: Description, base: Mode
    ) -> None:
        self.name = name
        self.label = f"{kind} {name!r}"
        self.group = group
        self.run = run
        self.flags = flags
        self.mode = first.mode
        self.resting_mode = base
        self.resting = first.placement
        self.frames: list[Frame] = []
        self.fault: RLSessionError | None = None
        self.closed = ""
        self.ownership = Ownership(self.label)
        self.lock = threading.RLock()
        self.last_move = "nothing has moved since attach"
        self.step: Any = None
        """The user's open train step, if one is open."""
        self._pending_release = False
        self._calls = 0
        self._record = run.recorder(name)
        self._record(
            events.PolicyCreated(
                mode=first.mode.value,
                placement=first.placement.as_text(),
                nbytes=dict(first.nbytes),
                num_ranks=group.num_ranks,
            )
        )
        self._warn(first.notices)

    # -- saying what is ------------------------------------------------------------------------------------------

    def explain(self) -> tuple[str, tuple[str, ...]]:
        """The label of the policy, and the facts that every message gives."""
        scopes = " > ".join(frame.describe() for frame in self.frames) or "none"
        facts = [f"mode: {self.mode}, open scopes: {scopes}", f"last moved by: {self.last_move}"]
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
        """
        if self.closed:
            raise ClosedError(f"{self.label}: {attempted} after {self.closed}", (), "attach the model again")
        if self.fault is not None:
            raise FaultedError(
                f"{self.label}: {attempted} on a faulted policy",
                (f"since: {self.fault.attempted}", *self.fault.facts),
                "policy.recover(), or policy.load_checkpoint(path)",
                self.fault.cause,
            )
        if self.frames:
            self._close_orphans()

    def _close_orphans(self) -> None:
        """Close scopes whose object is gone: an interrupt struck between entry and the block, or nobody kept them."""
        while self.frames and self.frames[-1].holder() is None:
            frame = self.frames[-1]
            message = f"{frame.describe()} was entered and never left (interrupted?); it is closed now"
            self._record(events.WarningIssued(code="orphaned_scope", message=message), scope_id=frame.scope_id)
            self._close_frame(frame, "orphaned")
        if not self.frames:
            self.ownership.release()

    def _warn(self, notices: Any, transition_id: int | None = None) -> None:
        for notice in notices:
            self._record(
                events.WarningIssued(
                    code=notice.code, message=notice.message, nbytes=notice.nbytes, count=notice.count
                ),
                transition_id=transition_id,
            )

    # -- scopes --------------------------------------------------------------------------------------------------

    def enter(
        self,
        holder: Any,
        mode: Mode,
        spelling: str,
        call_site: str,
        *,
        via: str = "scope",
        timeout: float | None = None,
    ) -> Frame:
        """Open a scope.

        Raises:
            OwnershipError, NestingError, ScopeError: It may not be opened here; nothing changed.
            RLSessionError: The transition failed and was rolled back; the outer mode stands.
        """
        self.ownership.acquire(spelling, call_site, timeout)
        try:
            with self.lock:
                self.ready(spelling)
                self.ownership.acquire(spelling, call_site, timeout)  # an orphan's ownership went with it
                self._check_nesting(mode, spelling, call_site)
                frame = self._open_frame(holder, mode, spelling, call_site)
                depth = len(self.frames)
                self.frames.append(frame)
        except BaseException:
            if not self.frames:
                self.ownership.release()
            raise
        self._record(
            events.ScopeEntered(
                mode=mode.value, outer_mode=frame.outer_mode.value, depth=depth, via=via, call_site=call_site
            ),
            scope_id=frame.scope_id,
        )
        return frame

    def _check_nesting(self, mode: Mode, spelling: str, call_site: str) -> None:
        if self._calls:
            raise ScopeError(
                f"{self.label}: {spelling} at {call_site} inside a running compute call",
                self.explain()[1],
                "leave loss functions and forwards free of scopes",
            )
        if self.frames and not may_nest(self.frames[-1].mode, mode):
            outer = self.frames[-1]
            raise NestingError(
                f"{self.label}: {spelling} at {call_site} inside {outer.describe()}",
                self.explain()[1],
                f"leave {outer.spelling} first: its block ends before {spelling} begins",
            )

    def _open_frame(self, holder: Any, mode: Mode, spelling: str, call_site: str) -> Frame:
        outer_mode = self.mode
        if self._pending_release:
            self._retry_release(spelling)
        scope_id = self.run.next_scope_id()
        placement = self.frames[-1].placement if self.frames else self.resting
        moves = mode is not self.mode
        if moves:
            reply = self._transition(mode, f"entering {spelling} at {call_site}", scope_id=scope_id)
            placement = reply.placement
            if not self.frames:
                self.resting = reply.before
        return Frame(scope_id, mode, spelling, placement, outer_mode, call_site, weakref.ref(holder), moves)

    def leave(self, frame: Frame, error: BaseException | None) -> None:
        """Close a scope, and those still open inside it.

        Raises:
            ScopeOrderError: Scopes inside it were still open; all of them are closed now.
            RLSessionError: The way out failed and was rolled back; the scope is closed, the release stays pending.
        """
        with self.lock:
            if frame not in self.frames:
                message = f"{frame.describe()} was closed before, with a scope around it"
                self._record(
                    events.WarningIssued(code="scope_already_closed", message=message), scope_id=frame.scope_id
                )
                return
            inner = self.frames[self.frames.index(frame) + 1 :]
            failures = [self._try_close(left_open, "left open") for left_open in reversed(inner)]
            failures.append(self._try_close(frame, _text(error)))
            if not self.frames:
                self.ownership.release()
        for failure in failures:
            if failure is not None:
                raise failure
        if inner:
            raise ScopeOrderError(
                f"{self.label}: {frame.describe()} was left while scopes inside it were open",
                (f"closed first: {', '.join(f.describe() for f in reversed(inner))}",),
                "leave scopes in the reverse order of entry; `with` blocks do",
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
        if frame.undo is not None:
            frame.undo()
            frame.undo = None
        outer_mode = self.frames[-1].mode if self.frames else self.resting_mode
        failure: BaseException | None = None
        try:
            if self.mode is not outer_mode and self.fault is None:
                self._go_outside(outer_mode, f"leaving {frame.describe()}", frame.scope_id)
        except BaseException as raised:
            failure = raised
            raise
        finally:
            self._record(
                events.ScopeExited(
                    mode=frame.mode.value,
                    restored_mode=outer_mode.value,
                    seconds=time.perf_counter() - frame.entered_at,
                    error=error or _text(failure),
                ),
                scope_id=frame.scope_id,
            )

    def _go_outside(self, outer_mode: Mode, reason: str, scope_id: int) -> None:
        stored = self.frames[-1].placement if self.frames else self.resting
        try:
            self._transition(outer_mode, reason, scope_id=scope_id, stored=stored, rests=not self.frames)
        except RLSessionError:
            if self.fault is None:
                self._pending_release = True
                self.mode = outer_mode
            raise

    def _retry_release(self, spelling: str) -> None:
        """The way out of an earlier scope failed: make up for it before anything else."""
        stored = self.frames[-1].placement if self.frames else self.resting
        self._transition(
            self.mode, f"pending release, before {spelling}", scope_id=None, stored=stored, rests=not self.frames
        )

    # -- transitions ---------------------------------------------------------------------------------------------

    def switch(
        self, mode: Mode, spelling: str, call_site: str, *, evict: bool = False, explicit: Placement | None = None
    ) -> None:
        """Change the resting mode.

        Raises:
            ScopeError: A scope is open.
            OwnershipError: Another owner is at work.
            RLSessionError: The transition failed and was rolled back; the resting mode stands.
        """
        self.ownership.check(spelling)
        with self.lock:
            self.ready(spelling)
            if self.frames or self._calls:
                raise ScopeError(
                    f"{self.label}: {spelling} at {call_site} inside {self.frames[-1].describe() if self.frames else 'a call'}",
                    self.explain()[1],
                    "call it outside every scope, or open a scope: with policy.offloaded(): ...",
                )
            same = mode is self.mode is self.resting_mode and explicit is None
            if same and not self._pending_release and not evict:
                return
            flags = attrs.evolve(self.flags, release="eager") if evict and self.flags.release == "lazy" else self.flags
            reason = f"{spelling} at {call_site}"
            reply = self._transition(mode, reason, scope_id=None, explicit=explicit, flags=flags, rests=True)
            self.resting, self.resting_mode = reply.placement, mode

    def _transition(
        self,
        mode: Mode,
        reason: str,
        *,
        scope_id: int | None,
        stored: Placement | None = None,
        explicit: Placement | None = None,
        flags: Flags | None = None,
        rests: bool = False,
    ) -> TransitionReply:
        """Ask every rank to go to ``mode``; all do, or none."""
        number = self.run.next_transition_id()
        from_mode = self.mode
        start = time.perf_counter()
        self._record(
            events.TransitionStarted(from_mode=from_mode.value, to_mode=mode.value, reason=reason),
            scope_id=scope_id,
            transition_id=number,
        )
        request = TransitionRequest(
            mode=mode, flags=flags or self.flags, stored=stored, explicit=explicit, leaves_library=rests
        )
        try:
            answers = self._values(self.group.call("transition", request), reason)
        except BaseException as error:
            self._record_failure(error, from_mode, mode, number, scope_id)
            raise
        reply = answers[0]
        assert isinstance(reply, TransitionReply)
        self.mode = mode
        self._pending_release = False
        if reply.moved:
            self.last_move = f"{reason} (transition {number})"
        self._record_success(reply, from_mode, mode, number, scope_id, time.perf_counter() - start)
        return reply

    def _record_success(
        self, reply: TransitionReply, from_mode: Mode, mode: Mode, number: int, scope_id: int | None, seconds: float
    ) -> None:
        for moved, spent in zip(reply.moved, reply.seconds, strict=True):
            self._record(
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
            self._record(
                events.GradientsDropped(nbytes=reply.dropped_bytes, reason=why), scope_id=scope_id, transition_id=number
            )
            if reply.live_dropped and self.step is not None:
                self.end_step()
                self._record(events.StepAborted(reason="its gradients were discarded by a transition"))
        self._warn(reply.notices, number)
        self._record(
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

    def _record_failure(
        self, error: BaseException, from_mode: Mode, mode: Mode, number: int, scope_id: int | None
    ) -> None:
        kind = events.TransitionFailed if isinstance(error, FaultedError) else events.TransitionRolledBack
        self._record(
            kind(from_mode=from_mode.value, to_mode=mode.value, error=_text(error)),
            scope_id=scope_id,
            transition_id=number,
        )

    def _values(self, replies: list[Reply], attempted: str) -> list[Any]:
        """The answers of all ranks, or the first error; a fault is remembered."""
        for reply in replies:
            if isinstance(reply, Failed):
                error = error_of(reply)
                if isinstance(error, FaultedError):
                    self._become_faulted(error)
                raise error
            if isinstance(reply, Lost):
                lost = FaultedError(f"{self.label}: {attempted}", (), "policy.recover()", reply.cause)
                self._become_faulted(lost)
                raise lost
        return [reply.value for reply in replies if isinstance(reply, Ok)]

    def _become_faulted(self, error: RLSessionError) -> None:
        self.fault = error
        self.end_step()
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
        if needs_owner:
            self.ownership.check(f"{gate}()")
        self.ownership.check_process(f"{method}()")
        with self._serialised():
            self.ready(f"{method}()")
            self.check_mode(gate)
            mode, start = self.mode, time.perf_counter()
            try:
                results = self._values(self.group.call(method, *args, **kwargs), f"{method}()")
            except BaseException as error:
                changed = getattr(error, "rl_changed", ())
                self._record_call(method, mode, start, _text(error), changed)
                raise
            result = results[0]
            assert isinstance(result, CallResult)
            for name, fields in result.notes:
                self._record(events.EVENTS[name](**fields))
            self._record_call(method, mode, start, None, result.changed)
            if then is not None:
                self._record(then(result))
            return result.value

    def call_plain(self, method: str, *args: Any) -> Any:
        """As :meth:`call`, for a method that is legal everywhere and returns its value as it is."""
        with self._serialised():
            self.ready(f"{method}()")
            mode, start = self.mode, time.perf_counter()
            value = self._values(self.group.call(method, *args), f"{method}()")[0]
            self._record_call(method, mode, start, None, ())
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
        if not gate or may_call(self.mode, gate):
            return
        needs = CALL_NEEDS.get(gate, (Component.PARAMS,))
        self._record(events.GuardRejected(method=gate, mode=self.mode.value, needs=[n.value for n in needs]))
        shown = gate if gate.endswith(")") else f"{gate}()"
        listed = ", ".join(str(mode) for mode in modes_allowing(gate))
        raise ModeError(
            f"{self.label}: {shown} {self._why_not(needs)}",
            (*self.explain()[1], f"legal in: {listed}"),
            f"with policy.{scope_to_write(gate)}(): policy.{shown.replace('()', '(...)')}",
        )

    def _why_not(self, needs: tuple[Component, ...]) -> str:
        """In words: what is missing, where it is; or only that the mode does not allow it."""
        placement = self.ask("placement")
        away = [need for need in needs if placement[need] is Tier.HOST]
        if not away:
            return f"is not legal in {self.mode} mode"
        return f"needs {', '.join(need.name for need in away)} on the device, but they are on the host"

    def _record_call(self, method: str, mode: Mode, start: float, error: str | None, changed: Any) -> None:
        self._record(
            events.CallFinished(
                method=method,
                mode=mode.value,
                seconds=time.perf_counter() - start,
                error=error,
                changed=self.changes(changed),
            )
        )

    @staticmethod
    def changes(changed: Any) -> list[events.Change]:
        """Changed components as the log writes them."""
        return [events.Change(str(c.component), c.tier.value, c.nbytes) for c in changed]

    def record(self, event: events.Event) -> None:
        """Write an event of this policy."""
        self._record(event)

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Ask rank 0 something that changes nothing and is no compute call (not recorded)."""
        with self.lock:
            return self._values(self.group.call(method, *args, **kwargs), f"{method}()")[0]

    def end_step(self) -> None:
        """Forget the open step."""
        self.step = None

    # -- the end -------------------------------------------------------------------------------------------------

    def recover(self, path: str | None = None) -> str:
        """Close open scopes, leave the faulted state and go to the resting mode; returns what it was restored from.

        Raises:
            FaultedError: There is nothing to restore from.
            CheckpointError: The checkpoint cannot be loaded.
        """
        with self.lock:
            self.end_step()
            origin = str(self.ask("recover", path))
            self.fault = None
            self._drop_frames("recovered")
            self._record(events.PolicyRecovered(origin=origin))
            self._transition(self.resting_mode, "recover()", scope_id=None, rests=True)
            return origin

    def _drop_frames(self, why: str) -> None:
        """Close every scope without a transition."""
        fault, self.fault = self.fault, self.fault or FaultedError(why)
        try:
            while self.frames:
                self._close_frame(self.frames[-1], why)
        finally:
            self.fault = fault
            self.ownership.release()

    def close(self, how: str) -> None:
        """Close open scopes, give the model back whole, and refuse everything from now on. Idempotent."""
        with self.lock:
            if self.closed:
                return
            self._drop_frames(how)
            self.end_step()
            if self.fault is None:
                with suppress(RLSessionError):  # without room on the device, detach re-homes on the host
                    up = Placement(dict.fromkeys(map(str, Component), Tier.DEVICE))
                    self._transition(Mode.RESIDENT, how, scope_id=None, explicit=up, rests=True)
            self._values(self.group.call("detach"), how)
            self.group.close()
            self.closed = how
            self._record(events.PolicyClosed(reason=how))


def _text(error: BaseException | None) -> str | None:
    if error is None:
        return None
    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
