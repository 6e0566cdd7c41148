"""The driver's side of one external generation engine: who is in its scope, which weights it has, what it may serve.

An engine that is awake outside every scope is *idle*: it may be put to sleep whenever room is needed. What it may serve is
decided by the state of its weights, in O(1). Knows engines only by their protocol, and no tensors.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rl_session.audit import events
from rl_session.driver.beside import refuse_beside_policies
from rl_session.driver.callsite import call_site, speaker
from rl_session.driver.engine_power import EnginePower
from rl_session.driver.engine_weights import WHY_STALE, CountedBuckets
from rl_session.driver.interrupts import DeferredInterrupt
from rl_session.driver.ownership import Ownership, Token
from rl_session.driver.run import error_text
from rl_session.errors import (
    ClosedError,
    FaultedError,
    ModeError,
    ScopeError,
    ScopeOrderError,
    StaleWeightsError,
)
from rl_session.generation.protocol import chosen_tags, refusal_of
from rl_session.lifecycle import Mode
from rl_session.planning import Holding
from rl_session.workers.digest import digest_of

if TYPE_CHECKING:
    from rl_session.driver.control import Control

__all__ = ["EngineControl", "EngineFrame"]


@attrs.define(eq=False)
class EngineFrame:
    """What is remembered of an open scope of an engine.

    Attributes:
        scope_id: Its number in the log; that of the policy's scope in ``generation_mode()``.
        spelling: How the user wrote it.
        call_site: Where it was entered.
        tags: What it needs awake.
        holder: The user's scope object, weakly: when it is gone, the scope is an orphan.
        undo: What a scope of a policy has for the user's forwards; here there is nothing to undo.
    """

    scope_id: int
    spelling: str
    call_site: str
    tags: tuple[str, ...]
    holder: weakref.ref[Any]
    undo: None = None

    def describe(self) -> str:
        """For messages."""
        return f"{self.spelling} at {self.call_site}"


class EngineControl(EnginePower):
    """The state machine of one engine: who is in its scope, what it has been sent, what it may serve.

    Made as :class:`EnginePower`.
    """

    def _prepare(self) -> None:
        """What it has beside :class:`EnginePower`."""
        self.refitting: Control | None = None
        """The policy whose weights are being pushed, during :func:`rl_session.driver.refit.refit`."""
        self.handle: object = None
        """What the user holds of it."""
        self.frames: list[EngineFrame] = []
        self.closed = ""
        self.rests: tuple[str, ...] = ()
        """What a legacy call woke: it stays awake after a scope, until it is told to sleep or the room is needed."""
        self.last_used = self.run.arbiter.tick()
        self.ownership = Ownership(self.label)

    # -- saying what is ------------------------------------------------------------------------------------------

    @property
    def health(self) -> str:
        """One of "ok", "faulted" or "closed"."""
        return "closed" if self.closed else "faulted" if self.fault is not None else "ok"

    @property
    def is_idle(self) -> bool:
        """Whether it is awake and nobody is in a scope of it."""
        self.close_orphans()
        return bool(self._awake) and not self.frames and not self._moving and self.fault is None

    def _open_scopes(self) -> str:
        return " > ".join(frame.describe() for frame in self.frames) or "none"

    def ready(self, attempted: str) -> None:
        """Refuse work on a closed or faulted engine, and forget scopes that the user lost.

        Raises:
            ClosedError: It was closed.
            FaultedError: It would neither wake nor sleep.
            ScopeError: It is being woken or put to sleep, and something that does asks for more.
        """
        if self.closed:
            raise ClosedError(
                f"{self.label}: {attempted} after {self.closed}", (), 'engine = session.engine("engine2", vllm)'
            )
        if self.fault is not None:
            raise FaultedError(
                f"{self.label}: {attempted} on a faulted engine",
                (f"since: {self.fault.attempted}", *self.fault.facts),
                self.fault.remedy,
                self.fault.cause,
            )
        if self._moving:
            raise ScopeError(
                f"{self.label}: {attempted} while {self._moving} is running",
                self.explain()[1],
                "call nothing of the session inside wake(), sleep() or update_weights()",
            )
        self.close_orphans()

    # -- a seat at the arbiter -----------------------------------------------------------------------------------

    def holdings(self, entering: Mode | None = None) -> list[Holding]:
        """What is awake, as one: ``sleep`` takes no tags."""
        del entering
        if not self._awake:
            return []
        kept = self._awake.get(self.tags[0], 0) if self.sleep_level == 1 else 0
        idle = self.is_idle and self.release != "never"
        nbytes = self.outside_bytes
        return [Holding(self.label, "+".join(self._awake), nbytes, kept, self.last_used, idle, disposable=False)]

    def where(self) -> str:
        """In words: the scope it is in, or what it is."""
        return f"in {self.frames[-1].describe()}" if self.frames else "idle" if self._awake else "asleep"

    def occupant(self) -> str:
        """Its innermost open scope, in words; "" where there is none."""
        self.close_orphans()
        return self.frames[-1].describe() if self.frames else ""

    # -- scopes --------------------------------------------------------------------------------------------------

    def acquire(self, spelling: str, call_site: str, timeout: float | None = None, *, is_scope: bool = False) -> Token:
        """Become the owner; undone by :meth:`let_go`.

        Raises:
            OwnershipError: Another thread, task or process is.
        """
        self.ownership.check_process(spelling)
        self.close_orphans()
        del is_scope  # other processes have no handle of an engine that would have to know
        return self.ownership.acquire(spelling, call_site, timeout)

    def let_go(self, token: Token) -> None:
        """Stop being the owner, unless a scope is open: then the end of that scope does it."""
        if not self.frames:
            self.ownership.release(token)

    @property
    def has_orphans(self) -> bool:
        """Whether the innermost scope was lost."""
        return bool(self.frames) and self.frames[-1].holder() is None

    def close_orphans(self) -> None:
        """Forget scopes whose object is gone; the engine is idle then. Left to whoever is at work on it, if somebody is."""
        if not self.has_orphans or not self.lock.acquire(blocking=False):
            return
        try:
            while self.has_orphans:
                frame = self.frames.pop()
                message = (
                    f"{self.label}: {frame.describe()} was entered and never left (interrupted?); it is closed now"
                )
                self._record(events.WarningIssued(code="orphaned_scope", message=message), scope_id=frame.scope_id)
                if not self.frames:
                    self.ownership.release()
        finally:
            self.lock.release()

    def enter(
        self,
        holder: Any,
        spelling: str,
        call_site: str,
        *,
        tags: Sequence[str] | None = None,
        scope_id: int | None = None,
    ) -> EngineFrame:
        """Open a scope, with what it needs awake; the caller is the owner.

        Raises:
            ConfigError: A tag that the engine does not have.
            NestingError: A policy on the same device is at work there.
            EngineError: It would not wake; it was put back to sleep.
            DeviceMemoryError: There is no room for it; it was not woken.
        """
        with self.lock:
            self.ready(spelling)
            wanted = self.tags if tags is None else self._known(tags, spelling)
            refuse_beside_policies(self, spelling, call_site)
            number = self.run.next_scope_id() if scope_id is None else scope_id
            self.last_used = self.run.arbiter.tick()
            self._settle_pending()
            self.wake(wanted, f"entering {spelling} at {call_site}", scope_id=number)
            frame = EngineFrame(number, spelling, call_site, wanted, weakref.ref(holder))
            self.frames.append(frame)
            return frame

    def _known(self, tags: Sequence[str], spelling: str) -> tuple[str, ...]:
        return chosen_tags(tags, self.tags, f"{self.label}: {spelling}", f"engine.awake(tags={list(self.tags)})")

    def leave(self, frame: EngineFrame, error: BaseException | None = None) -> None:
        """Close a scope and those inside it; under eager release the outermost one's end puts the engine to sleep.

        Args:
            frame: Which one.
            error: What its block raised; it changes nothing.

        Raises:
            EngineError: It would not sleep; the scope is closed, the sleep stays pending.
            ScopeOrderError: Scopes inside it were still open; all of them are closed now.
        """
        del error
        with self.lock:
            if frame not in self.frames:
                return
            at = self.frames.index(frame)
            inner = self.frames[at + 1 :]
            del self.frames[at:]
            try:
                if not self.frames and self.release == "eager" and not self.rests and self.fault is None:
                    self.put_to_sleep(f"leaving {frame.describe()}", scope_id=frame.scope_id)
            finally:
                if not self.frames:
                    self.ownership.release()
        if inner:
            raise ScopeOrderError(
                f"{self.label}: {frame.describe()} was left while scopes inside it were open",
                (f"closed first: {', '.join(f.describe() for f in reversed(inner))}",),
                f"with engine.{frame.spelling}: ...  # `with` blocks end in the reverse order of entry",
            )

    def wake_now(self, tags: Sequence[str] | None, spelling: str, call_site: str) -> None:
        """Wake on request, outside every scope, and stay awake; what a legacy call does. :meth:`sleep_now` undoes it.

        Args:
            tags: What must be awake besides what is; all of it by default.
            spelling: How the user wrote it.
            call_site: Where.

        Raises:
            ScopeError: A scope is open.
            OwnershipError: Another owner is at work.
            ConfigError: A tag that the engine does not have.
            EngineError: It would not wake; it was put back to sleep.
            DeviceMemoryError: There is no room for it.
        """
        token = self.acquire(spelling, call_site)
        try:
            with self.lock:
                self.ready(spelling)
                self._check_outside(spelling, call_site)
                wanted = self.tags if tags is None else self._known(tags, spelling)
                self._settle_pending()
                self.last_used = self.run.arbiter.tick()
                self.wake(wanted, f"{spelling} at {call_site}")
                self.rests = tuple(tag for tag in self.tags if tag in (*self.rests, *wanted))
        finally:
            self.let_go(token)

    def _check_outside(self, spelling: str, call_site: str) -> None:
        """Refuse what is for outside every scope.

        Raises:
            ScopeError: A scope is open.
        """
        if self.frames:
            raise ScopeError(
                f"{self.label}: {spelling} at {call_site} inside {self.frames[-1].describe()}",
                self.explain()[1],
                f"engine.{spelling}  # after the block has ended",
            )

    def retry_pending(self, reason: str) -> bool:
        """Try a sleep that is pending again, if the engine is idle and nobody is at work on it; for who needs the room.

        Args:
            reason: For records and messages.

        Returns:
            Whether it sleeps now that was pending before.

        Raises:
            EngineError: It would not sleep; it stays pending.
        """
        if not self.pending or not self.lock.acquire(blocking=False):
            return False
        try:
            if not self.pending or not self.is_idle:
                return False
            self.put_to_sleep(reason)
            return True
        finally:
            self.lock.release()

    def sleep_now(self, call_site: str) -> None:
        """Sleep on request, outside every scope.

        Raises:
            ScopeError: A scope is open.
            OwnershipError: Another owner is at work.
            EngineError: It would not; the sleep stays pending.
        """
        token = self.acquire("sleep()", call_site)
        try:
            with self.lock:
                self.ready("sleep()")
                self._check_outside("sleep()", call_site)
                self.rests = ()
                self.put_to_sleep(f"sleep() at {call_site}")
        finally:
            self.let_go(token)

    # -- weights -------------------------------------------------------------------------------------------------

    def push(self, buckets: Iterator[dict[str, Any]], reason: str) -> None:
        """Replace the weights with those of ``buckets``; they are torn from the first bucket on until all went well.

        Raises:
            EngineError: The push failed, or bucket were left over; nothing is served until one succeeds.
        """
        self._drain("update_weights()", reason)
        with self._at_work("update_weights()"):
            counted = CountedBuckets(buckets, self._tear)
            try:
                if refusal := refusal_of(self.engine.update_weights(counted)):
                    raise self._failed(f"update_weights() {refusal}", reason)
                if not counted.is_done:
                    raise self._failed(f"update_weights() took {counted.num} buckets and left some", reason)
                self._forget_cached(reason)
            except BaseException as error:
                at = f"at bucket {counted.num} of version {self.version + 1}"
                self._warn("engine_push_failed", f"a push failed {at}: {error_text(error)}")
                self._reraise(error, f"update_weights() {at}", reason)
            self.version += 1
            self.weights = "pushed"

    def _tear(self) -> None:
        self.weights, self.pushed = "torn", None

    def _forget_cached(self, reason: str) -> None:
        """What is cached of the old weights must not be attended to."""
        reset = getattr(self.engine, "reset_cache", None)
        if reset is None or not set(self._awake) - {self.tags[0]}:
            return
        if refusal := refusal_of(reset()):
            raise self._failed(f"reset_cache() {refusal}", reason)

    # -- calls ---------------------------------------------------------------------------------------------------

    def generate(self, batch: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Sample; legal in a scope of the engine, from any thread.

        Raises:
            ModeError: No scope of the engine is open, or the open ones ask for less than all of it.
            StaleWeightsError: Its weights are discarded or torn.
            EngineError: The engine failed; it stays awake.
        """
        self.ownership.check_process("generate()")
        with self.lock:
            self.ready("generate()")
            self._check_serves()
            self.last_used = self.run.arbiter.tick()
            self.drain.begin()
        start, said = time.perf_counter(), speaker()
        failure: BaseException | None = None
        digest: str | None = None
        try:
            result = dict(self.engine.generate(batch, **kwargs))
            digest = digest_of(result) if self.run.verify == "checksum" else None
            return result
        except BaseException as error:
            failure = error
            self._reraise(error, "generate()", "")
        finally:
            self.drain.end()
            seconds = time.perf_counter() - start
            self._record(
                events.CallFinished(
                    method="generate",
                    mode=Mode.GENERATION.value,
                    seconds=seconds,
                    error=error_text(failure),
                    via=said.via if said is not None else None,
                    call_site=said.call_site if said is not None else call_site(),
                    digest=digest,
                ),
                scope_id=self.frames[-1].scope_id if self.frames else None,
            )

    def _check_serves(self) -> None:
        """Judged by what the open scopes ask for: what happens to be awake beyond that depends on the release, and on luck."""
        asked = {*self.rests, *(tag for frame in self.frames for tag in frame.tags)}
        asleep = [tag for tag in self.tags if tag not in self._awake]
        missing = [tag for tag in self.tags if tag in asleep or tag not in asked]
        if missing:
            needs = missing if asleep or asked else ["awake()"]
            self._record(events.GuardRejected(method="generate", mode=Mode.OFFLOADED.value, needs=needs))
            lacks = f"{', '.join(asleep)} asleep" if asleep else f"no open scope asks for {', '.join(missing)}"
            lacks = lacks if asleep or asked else "it is idle: no scope of it is open"
            raise ModeError(
                f"{self.label}: generate(), but {lacks}",
                self.explain()[1],
                "with engine.awake() as e: e.generate(batch)",
            )
        why = WHY_STALE.get(self.weights)
        if why:
            raise StaleWeightsError(
                f"{self.label}: generate(), but {why}", self.explain()[1], "policy.refit(engine)  # then generate"
            )

    # -- the end -------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Leave the faulted state: put it to sleep once more. What its weights are is not known then.

        Raises:
            EngineError: It would not sleep; it stays faulted.
        """
        with self.lock:
            if self.fault is None:
                return
            with self._at_work("sleep()"):
                try:
                    self._ask_to_sleep("recover()")
                except BaseException as error:
                    self._reraise(error, f"sleep({self.sleep_level})", "recover()")
                self.fault = None
                self._drop_frames()
                self._fell_asleep(reason="recover()", lost=False, say=True)
                self.weights, self.pushed = "torn", None
            self._warn("engine_recovered", "it sleeps again; a push is needed before it serves")

    def _drop_frames(self) -> None:
        if self.frames:
            self.frames.clear()
            self.ownership.release()

    def close(self, how: str) -> None:
        """End its scopes, put it to sleep if it shares a device, and refuse everything from now on. Idempotent.

        Raises:
            EngineError: It would not sleep; it is closed all the same.
        """
        with self.lock, DeferredInterrupt():
            if self.closed:
                return
            self._drop_frames()
            try:
                if self.fault is None and self._device is not None and self.release != "never":
                    self.put_to_sleep(how)
            finally:
                self.closed = how
