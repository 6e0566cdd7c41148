"""The driver's side of one external generation engine: what of it is awake, which weights it has, who is in its scope.

An engine is *asleep*, awake in part ("weights") or awake. Waking makes room on a shared device first; a wake that fails is
followed by a sleep. An engine that is awake outside every scope is *idle*: it may be put to sleep whenever room is needed. What
it may serve is decided by the state of its weights, in O(1). Knows engines only by their protocol, and no tensors.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import attrs

from rl_session.audit import events
from rl_session.driver.arbiter import Wish
from rl_session.driver.beside import refuse_beside_policies
from rl_session.driver.callsite import call_site, speaker
from rl_session.driver.drain import Drain
from rl_session.driver.interrupts import DeferredInterrupt
from rl_session.driver.ownership import Ownership, Token
from rl_session.driver.run import Run, error_text
from rl_session.errors import (
    ClosedError,
    ConfigError,
    DeviceMemoryError,
    EngineError,
    FaultedError,
    ModeError,
    RLSessionError,
    ScopeError,
    ScopeOrderError,
    StaleWeightsError,
)
from rl_session.generation.protocol import GenerationEngine, awake_tags_of, check_engine, tags_of
from rl_session.lifecycle import Mode, Release
from rl_session.offload.device import Device
from rl_session.planning import Holding
from rl_session.workers.digest import digest_of

if TYPE_CHECKING:
    from rl_session.driver.control import Control

__all__ = ["EngineControl", "EngineFrame", "Weights"]

Weights = Literal["first", "unset", "pushed", "discarded", "torn"]
"""What an engine's weights are: its own first ones, placeholders, those of the last push, gone, or part old and part new."""

_WHY_STALE: Mapping[Weights, str] = {
    "unset": "its first weights are placeholders (requires_refit), and nothing was pushed yet",
    "discarded": "its weights were discarded by sleep(level=2), and nothing was pushed since",
    "torn": "the last push failed half-way: its weights are part old, part new",
}


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


class EngineControl:
    """The state machine of one engine; a seat at the arbiter too.

    Args:
        name: Its name in the session.
        engine: The engine.
        run: What the run shares.
        device: The device it shares with participants; None when it has devices of its own.
        release: "eager" sleeps when a scope ends, "lazy" when the room is needed, "never" stays awake.
        sleep_level: What ``sleep`` is called with: 1 keeps the weights on the host, 2 discards them.
        sizes: Bytes of each tag, instead of asking the engine.
        drain_timeout_seconds: How long a sleep waits for requests in flight.
        on_busy: Whether it waits at all ("drain") or fails at once ("refuse").

    Raises:
        ConfigError: ``engine`` is no engine, or a value is not one of its choices.
    """

    def __init__(
        self,
        name: str,
        engine: GenerationEngine,
        run: Run,
        device: Device | None,
        *,
        release: Release,
        sleep_level: int,
        sizes: Mapping[str, int] | None,
        drain_timeout_seconds: float,
        on_busy: Literal["drain", "refuse"],
    ) -> None:
        check_engine(engine, name, has_sizes=sizes is not None)
        self.name = name
        self.label = f"engine {name!r}"
        self.engine = engine
        self.run = run
        self._device = device
        self.release: Release = release
        self.sleep_level = sleep_level
        self.tags = tags_of(engine, name)
        self.drain = Drain(engine, drain_timeout_seconds, refuses=on_busy == "refuse")
        self.version = 0
        self.weights: Weights = "unset" if getattr(engine, "requires_refit", False) else "first"
        self.pushed: tuple[weakref.ref[Control], int] | None = None
        """Which policy was pushed, and at which epoch of its weights."""
        self.refitting: Control | None = None
        """The policy whose weights are being pushed, during :func:`rl_session.driver.refit.refit`."""
        self.handle: object = None
        """What the user holds of it."""
        self.frames: list[EngineFrame] = []
        self.fault: FaultedError | None = None
        self.closed = ""
        self.rests: tuple[str, ...] = ()
        """What a legacy call woke: it stays awake after a scope, until it is told to sleep or the room is needed."""
        self.pending = ""
        """Why a sleep was wanted that failed; the next entry on the device tries it again."""
        self.last_used = run.arbiter.tick()
        self.ownership = Ownership(self.label)
        self._lock = threading.RLock()
        self._sizes = dict(sizes) if sizes is not None else None
        self._half_asleep = False
        self._moving = ""
        self._record: Callable[..., int] = run.recorder(None)
        self._awake: dict[str, int] = {}
        self._take_stock()

    def _take_stock(self) -> None:
        """Charge for what is awake already."""
        found = awake_tags_of(self.engine)
        self._awake = self._needs([tag for tag in self.tags if tag in found])
        if self._awake:
            self._record(events.EngineWoken(engine=self.name, tags=self._awake, nbytes=sum(self._awake.values())))

    # -- saying what is ------------------------------------------------------------------------------------------

    @property
    def state(self) -> Literal["asleep", "weights", "awake"]:
        """What of it is awake: nothing, a part, or all."""
        return "asleep" if not self._awake else "awake" if len(self._awake) == len(self.tags) else "weights"

    @property
    def awake(self) -> tuple[str, ...]:
        """The tags that are awake."""
        return tuple(self._awake)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each tag that is awake."""
        return dict(self._awake)

    @property
    def health(self) -> str:
        """One of "ok", "faulted" or "closed"."""
        return "closed" if self.closed else "faulted" if self.fault is not None else "ok"

    @property
    def is_idle(self) -> bool:
        """Whether it is awake and nobody is in a scope of it."""
        self.close_orphans()
        return bool(self._awake) and not self.frames and not self._moving and self.fault is None

    def explain(self) -> tuple[str, tuple[str, ...]]:
        """The label of the engine, and the facts that every message gives."""
        scopes = " > ".join(frame.describe() for frame in self.frames) or "none"
        awake = ", ".join(self._awake) or "nothing"
        state = f"state: {self.state} (awake: {awake}), weights: {self.weights}, version {self.version}"
        facts = [state, f"open scopes: {scopes}, in flight: {self.drain.num_in_flight}"]
        if self.pending:
            facts.append(f"pending sleep: {self.pending}")
        return self.label, tuple(facts)

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

    @property
    def device(self) -> Device | None:
        """The device it shares; None when it has devices of its own."""
        return self._device

    @property
    def lock(self) -> threading.RLock:
        """Held while it is woken, put to sleep or pushed to."""
        return self._lock

    @property
    def outside_bytes(self) -> int:
        """Bytes of what is awake."""
        return sum(self._awake.values())

    def holdings(self, entering: Mode | None = None) -> list[Holding]:
        """What is awake, as one: ``sleep`` takes no tags."""
        del entering
        if not self._awake:
            return []
        kept = self._awake.get(self.tags[0], 0) if self.sleep_level == 1 else 0
        idle = self.is_idle and self.release != "never"
        nbytes = self.outside_bytes
        return [Holding(self.name, "+".join(self._awake), nbytes, kept, self.last_used, idle, disposable=False)]

    def evict(self, components: Sequence[str], reason: str) -> None:
        """Sleep, all of it.

        Raises:
            EngineError: It would not; the sleep stays pending.
        """
        del components
        self.put_to_sleep(reason)

    def where(self) -> str:
        """In words: the scope it is in, or what it is."""
        return f"in {self.frames[-1].describe()}" if self.frames else "idle" if self._awake else "asleep"

    def occupant(self) -> str:
        """Its innermost open scope, in words; "" where there is none."""
        self.close_orphans()
        return self.frames[-1].describe() if self.frames else ""

    # -- scopes --------------------------------------------------------------------------------------------------

    def acquire(self, spelling: str, call_site: str, timeout: float | None = None) -> Token:
        """Become the owner; undone by :meth:`let_go`.

        Raises:
            OwnershipError: Another thread, task or process is.
        """
        self.ownership.check_process(spelling)
        self.close_orphans()
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
        asked = (tags,) if isinstance(tags, str) else tuple(tags)
        unknown = [tag for tag in asked if tag not in self.tags]
        if unknown or not asked:
            raise ConfigError(
                f"{self.label}: {spelling} with tags={list(asked)}",
                (f"tags of this engine: {', '.join(self.tags)}",),
                f"engine.awake(tags={list(self.tags)})",
            )
        return tuple(tag for tag in self.tags if tag in asked)

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

    # -- waking and sleeping -------------------------------------------------------------------------------------

    @contextmanager
    def _at_work(self, what: str) -> Iterator[None]:
        self._moving = what
        try:
            with DeferredInterrupt():
                yield
        finally:
            self._moving = ""

    def _needs(self, tags: Sequence[str]) -> dict[str, int]:
        """Bytes of each tag.

        Raises:
            EngineError: The engine cannot say, or says what is no number of bytes.
        """
        sizes: dict[str, int] = {}
        for tag in tags:
            try:
                size: object = self.engine.bytes_needed((tag,)) if self._sizes is None else self._sizes.get(tag, 0)
            except Exception as error:
                raise self._failed(f"bytes_needed(({tag!r},)) failed", "", _text(error)) from error
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise self._failed(f"bytes_needed(({tag!r},)) gave {size!r}, no number of bytes", "")
            sizes[tag] = size
        return sizes

    def needed_for(self, tags: Sequence[str] | None = None) -> int:
        """Bytes that waking ``tags`` (all by default) takes beyond what is awake."""
        return sum(self._needs([t for t in (self.tags if tags is None else tags) if t not in self._awake]).values())

    def wake(self, tags: Sequence[str], reason: str, *, scope_id: int | None = None, reserve: int = 0) -> None:
        """Wake what of ``tags`` is asleep, after room was made for it.

        Args:
            tags: What must be awake.
            reason: For records and messages.
            scope_id: The scope it is for.
            reserve: Bytes that will be needed beyond that; they send others away and refuse nothing.

        Raises:
            DeviceMemoryError: There is no room; it was not woken, or it was put back to sleep.
            EngineError: It would not wake; it was put back to sleep.
        """
        missing = [tag for tag in self.tags if tag in tags and tag not in self._awake]
        if not missing:
            return
        needs = self._needs(missing)
        with self._at_work("wake()"), self._room(Wish(sum(needs.values()), reserve), reason):
            before = dict(self._awake)
            self._awake |= needs  # counted while it is at it: half a wake holds bytes too
            self._awake = {tag: self._awake[tag] for tag in self.tags if tag in self._awake}
            try:
                if self.engine.wake(missing) is False:
                    raise self._failed(f"wake({missing}) returned False", reason)
            except BaseException as error:
                self._put_back(error, was_awake=bool(before))
                self._reraise(error, f"wake({missing})", reason)
            nbytes = sum(needs.values())
            self._record(events.EngineWoken(engine=self.name, tags=missing, nbytes=nbytes), scope_id=scope_id)

    @contextmanager
    def _room(self, wish: Wish, reason: str) -> Iterator[None]:
        with self.run.arbiter.admit(self, None, lambda: wish, reason):
            yield

    def _put_back(self, error: BaseException, *, was_awake: bool) -> None:
        """After a wake that failed: asleep it is in a known state, half awake it is not."""
        self._warn("engine_wake_failed", f"waking failed ({error_text(error)}); it is put back to sleep")
        lost = self.sleep_level >= 2
        try:
            if self.engine.sleep(self.sleep_level) is False:
                raise self._failed(f"sleep({self.sleep_level}) returned False", "after a wake that failed")
        except BaseException as failure:
            error.add_note(f"and while putting {self.label} back to sleep: {failure}")
            self._fall(error, failure)
            return
        self._fell_asleep(reason="after a wake that failed", lost=lost, say=was_awake)

    def _fall(self, error: BaseException, failure: BaseException) -> None:
        self.fault = FaultedError(
            f"{self.label}: it would neither wake nor sleep",
            (f"wake: {error_text(error)}", f"sleep: {error_text(failure)}"),
            "engine.recover()  # tries to put it to sleep again; or build a new engine",
            error_text(error) or "",
        )
        self._warn("engine_faulted", f"it would neither wake nor sleep: {error_text(failure)}")

    def put_to_sleep(self, reason: str, *, scope_id: int | None = None) -> None:
        """Sleep, once nothing is in flight. What is asleep stays so.

        Raises:
            EngineError: Requests did not end in time, or it would not sleep; the sleep stays pending.
        """
        if not self._awake:
            self.pending = ""
            return
        self.pending = reason
        with self._at_work("sleep()"):
            self._drain(f"sleep({self.sleep_level})", reason)
            before, lost = self.weights, self.sleep_level >= 2
            if lost:
                self.weights = _after_loss(before)  # whatever becomes of it
            self._half_asleep = True
            try:
                refused = self.engine.sleep(self.sleep_level) is False
            except BaseException as error:
                self._warn("engine_sleep_failed", f"sleep({self.sleep_level}) failed: {error_text(error)}")
                self._reraise(error, f"sleep({self.sleep_level})", reason)
            if refused:
                self.weights, self._half_asleep = before, False
                self._warn("engine_sleep_failed", f"sleep({self.sleep_level}) returned False")
                raise self._failed(f"sleep({self.sleep_level}) returned False", reason)
            self._fell_asleep(reason=reason, lost=lost, say=True, scope_id=scope_id)

    def _fell_asleep(self, *, reason: str, lost: bool, say: bool, scope_id: int | None = None) -> None:
        self._awake, self.pending, self._half_asleep = {}, "", False
        if lost:
            self.weights = _after_loss(self.weights)
        if say:
            slept = events.EngineSlept(engine=self.name, level=self.sleep_level, reason=reason)
            self._record(slept, scope_id=scope_id)

    def _drain(self, what: str, reason: str) -> None:
        try:
            problem = self.drain.wait()
        except Exception as error:
            self._reraise(error, f"{what}: waiting for it", reason)
        if problem:
            self._warn("engine_busy", f"{what}: {problem}")
            raise self._failed(f"{what}: {problem}", reason, remedy=_BUSY)

    def _settle_pending(self) -> None:
        """On the way into a scope: a sleep that failed half-way is made up for; one that was only refused is forgotten."""
        if self.pending and self._half_asleep:
            self.put_to_sleep(self.pending)
        self.pending = ""

    # -- weights -------------------------------------------------------------------------------------------------

    def push(self, buckets: Iterator[dict[str, Any]], reason: str) -> None:
        """Replace the weights with those of ``buckets``; they are torn from the first bucket on until all went well.

        Raises:
            EngineError: The push failed, or bucket were left over; nothing is served until one succeeds.
        """
        self._drain("update_weights()", reason)
        with self._at_work("update_weights()"):
            counted = _Counted(buckets, self._tear)
            try:
                if self.engine.update_weights(counted) is False:
                    raise self._failed("update_weights() returned False", reason)
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
        if reset is not None and set(self._awake) - {self.tags[0]} and reset() is False:
            raise self._failed("reset_cache() returned False", reason)

    # -- calls ---------------------------------------------------------------------------------------------------

    def generate(self, batch: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Sample; legal in a scope of the engine, from any thread.

        Raises:
            ModeError: No scope of the engine is open, or it needs less than all of it.
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
        asleep = [tag for tag in self.tags if tag not in self._awake]
        if not (self.frames or self.rests) or asleep:
            self._record(
                events.GuardRejected(method="generate", mode=Mode.OFFLOADED.value, needs=asleep or ["awake()"])
            )
            missing = f"{', '.join(asleep)} asleep" if asleep else "it is idle: no scope of it is open"
            raise ModeError(
                f"{self.label}: generate() with {missing}" if asleep else f"{self.label}: generate(), but {missing}",
                self.explain()[1],
                "with engine.awake() as e: e.generate(batch)",
            )
        why = _WHY_STALE.get(self.weights)
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
                    if self.engine.sleep(self.sleep_level) is False:
                        raise self._failed(f"sleep({self.sleep_level}) returned False", "recover()")
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

    # -- failing -------------------------------------------------------------------------------------------------

    def _warn(self, code: str, message: str) -> None:
        self._record(events.WarningIssued(code=code, message=f"{self.label}: {message}"))

    def _failed(self, what: str, reason: str, cause: str = "", remedy: str = "") -> EngineError:
        facts = self.explain()[1]
        asked = (f"asked for by: {reason}",) if reason else ()
        return EngineError(f"{self.label}: {what}", (*asked, *facts), remedy or _AGAIN, cause)

    def _reraise(self, error: BaseException, what: str, reason: str) -> NoReturn:
        """Raise an error of the engine's as one of this library's; interrupts and our own errors stay what they are."""
        if isinstance(error, RLSessionError) or not isinstance(error, Exception):
            raise error
        ours: RLSessionError = self._failed(f"{what} failed", reason, _text(error))
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's is no MemoryError
            remedy = "Session(device_budget=...), or bytes_needed= of what the engine really takes"
            ours = DeviceMemoryError(ours.attempted, ours.facts, remedy, ours.cause)
        for note in getattr(error, "__notes__", ()):
            ours.add_note(note)
        raise ours from error


_AGAIN = "the same again, once the cause is gone; engine.health says whether recover() is needed"
_BUSY = "let the requests end inside the scope, or session.engine(..., drain_timeout_seconds=...)"


class _Counted:
    """The buckets of a push, counted; says when the first one is asked for."""

    def __init__(self, buckets: Iterator[dict[str, Any]], begins: Callable[[], None]) -> None:
        self._buckets = buckets
        self._begins = begins
        self.num = 0
        self.is_done = False

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.num == 0:
            self._begins()
        try:
            bucket = next(self._buckets)
        except StopIteration:
            self.is_done = True
            raise
        self.num += 1
        return bucket


def _after_loss(weights: Weights) -> Weights:
    """What weights are after a sleep that discards them."""
    return weights if weights in ("unset", "torn") else "discarded"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
