"""An engine that wakes and sleeps: what of it is awake, with how many bytes, and what is known after a failure.

Waking makes room on a shared device first. A wake that fails is followed by a sleep; if that fails too, the engine is faulted and
all it may hold counts as held. A sleep that fails is pending. Knows nothing of scopes, and no tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NoReturn

from rl_session.audit import events
from rl_session.driver.arbiter import Wish
from rl_session.driver.drain import Drain
from rl_session.driver.engine_weights import Weights, after_loss
from rl_session.driver.interrupts import DeferredInterrupt
from rl_session.driver.run import Run, error_text
from rl_session.errors import DeviceMemoryError, EngineError, FaultedError, RLSessionError
from rl_session.generation.protocol import (
    GenerationEngine,
    awake_tags_of,
    check_engine,
    check_sizes,
    refusal_of,
    tags_of,
)
from rl_session.lifecycle import Mode, Release
from rl_session.offload.device import Device
from rl_session.planning import Holding

if TYPE_CHECKING:
    from rl_session.driver.control import Control

__all__ = ["EnginePower"]

_AGAIN = "the same again, once the cause is gone; engine.health says whether recover() is needed"
_BUSY = "let the requests end inside the scope, or session.engine(..., drain_timeout_seconds=...)"


class EnginePower:
    """One engine, as far as waking and sleeping go; a seat at the arbiter.

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
        ConfigError: ``engine`` is no engine, or ``sizes`` are not those of its tags.
        EngineError: It is awake and cannot say how many bytes it takes.
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
        if sizes is not None:
            check_sizes(sizes, self.tags, name)
        self.drain = Drain(engine, drain_timeout_seconds, refuses=on_busy == "refuse")
        self.version = 0
        self.weights: Weights = "unset" if getattr(engine, "requires_refit", False) else "first"
        self.pushed: tuple[weakref.ref[Control], tuple[int, ...]] | None = None
        """Which policy was pushed, and at which epoch of its weights on each rank."""
        self.fault: FaultedError | None = None
        self.pending = ""
        """Why a sleep was wanted that failed; the next entry on the device tries it again."""
        self._lock = threading.RLock()
        self._sizes = dict(sizes) if sizes is not None else None
        self._half_asleep = False
        self._moving = ""
        self._record: Callable[..., int] = run.recorder(None)
        self._awake: dict[str, int] = {}
        self._prepare()
        self._take_stock()

    def _prepare(self) -> None:
        """For what is built on it: make what it needs beside, before the first record."""

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

    def explain(self) -> tuple[str, tuple[str, ...]]:
        """The label of the engine, and the facts that every message gives."""
        awake = ", ".join(self._awake) or "nothing"
        state = f"state: {self.state} (awake: {awake}), weights: {self.weights}, version {self.version}"
        num = self.drain.known_in_flight()
        facts = [state, f"open scopes: {self._open_scopes()}, in flight: {'not known' if num is None else num}"]
        if self.pending:
            facts.append(f"pending sleep: {self.pending}")
        return self.label, tuple(facts)

    def _open_scopes(self) -> str:
        return "none"

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
        """What of it may be taken; nothing, as far as is known here."""
        del entering
        return []

    def evict(self, components: Sequence[str], reason: str) -> None:
        """Sleep, all of it.

        Raises:
            EngineError: It would not; the sleep stays pending.
        """
        del components
        self.put_to_sleep(reason)

    def where(self) -> str:
        """In words: what it is."""
        return "idle" if self._awake else "asleep"

    def occupant(self) -> str:
        """Its innermost open scope, in words; "" where there is none."""
        return ""

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
                size: object = self.engine.bytes_needed((tag,)) if self._sizes is None else self._sizes[tag]
            except Exception as error:
                raise self._failed(f"bytes_needed(({tag!r},)) failed", "", _text(error)) from error
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise self._failed(f"bytes_needed(({tag!r},)) gave {size!r}, no number of bytes", "")
            sizes[tag] = size
        return sizes

    def needed_for(self, tags: Sequence[str] | None = None) -> int:
        """Bytes that waking ``tags`` (all by default) takes beyond what is awake."""
        return sum(self._needs([t for t in (self.tags if tags is None else tags) if t not in self._awake]).values())

    def total_bytes(self, tags: Sequence[str] | None = None) -> int:
        """Bytes of ``tags`` (all by default): as counted where they are awake, as the engine says where they are not.

        Raises:
            EngineError: It cannot say.
        """
        wanted = self.tags if tags is None else tuple(tags)
        return sum(self._awake.get(tag, 0) for tag in wanted) + self.needed_for(wanted)

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
            said: _SaidNo | None = None
            try:
                if refusal := refusal_of(self.engine.wake(missing)):
                    said = _SaidNo(f"wake({missing}) {refusal}")
                    raise said
            except BaseException as error:
                self._put_back(error, was_awake=bool(before))
                if error is said:  # its facts are those of now: it was put back
                    raise _with_notes(self._failed(str(said), reason), said) from None
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
            self._ask_to_sleep("after a wake that failed")
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
            lost = self.sleep_level >= 2
            if lost:
                self.weights = after_loss(self.weights)  # whatever becomes of it
            self._half_asleep = True  # False may come before, half-way or after, as an exception may
            try:
                self._ask_to_sleep(reason)
            except BaseException as error:
                self._warn("engine_sleep_failed", f"sleeping failed: {error_text(error)}")
                self._reraise(error, f"sleep({self.sleep_level})", reason)
            self._fell_asleep(reason=reason, lost=lost, say=True, scope_id=scope_id)

    def _ask_to_sleep(self, reason: str) -> None:
        """Call ``sleep``.

        Raises:
            EngineError: It said no.
        """
        if refusal := refusal_of(self.engine.sleep(self.sleep_level)):
            raise self._failed(f"sleep({self.sleep_level}) {refusal}", reason)

    def _fell_asleep(self, *, reason: str, lost: bool, say: bool, scope_id: int | None = None) -> None:
        self._awake, self.pending, self._half_asleep = {}, "", False
        if lost:
            self.weights = after_loss(self.weights)
        if say:
            slept = events.EngineSlept(engine=self.name, level=self.sleep_level, reason=reason)
            self._record(slept, scope_id=scope_id)

    def _drain(self, what: str, reason: str) -> None:
        try:
            problem = self.drain.wait()
        except Exception as error:
            self._warn("engine_busy", f"{what}: waiting for it failed: {error_text(error)}")
            self._reraise(error, f"{what}: waiting for it", reason)
        if problem:
            self._warn("engine_busy", f"{what}: {problem}")
            raise self._failed(f"{what}: {problem}", reason, remedy=_BUSY)

    def num_in_flight(self) -> int:
        """Requests that are running or waiting.

        Raises:
            EngineError: The engine cannot say.
        """
        try:
            return self.drain.num_in_flight()
        except Exception as error:
            raise self._failed("in_flight cannot be read", "", _text(error)) from error

    def _settle_pending(self) -> None:
        """On the way into a scope: a pending sleep is forgotten.

        One that was tried may have got half-way. Where the engine does not say that all of it is awake still, it is made up
        for first, or what is served next would be read from memory that is gone.

        Raises:
            EngineError: It had to be made up for, and failed again.
        """
        if self.pending and self._half_asleep and not self._is_awake_still():
            self.put_to_sleep(self.pending)
        self.pending, self._half_asleep = "", False

    def _is_awake_still(self) -> bool:
        try:
            return set(self._awake) <= awake_tags_of(self.engine)
        except Exception:
            return False

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
        raise _with_notes(ours, error) from error


class _SaidNo(Exception):  # noqa: N818 (an answer, not an error: it leaves this module as an EngineError)
    """An engine answered that it did not work."""


def _with_notes(ours: RLSessionError, error: BaseException) -> RLSessionError:
    for note in getattr(error, "__notes__", ()):
        ours.add_note(note)
    return ours


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
