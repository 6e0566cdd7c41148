"""The handle of an external generation engine, and the scopes in which it is awake.

Made by :meth:`Session.engine`. Each method says what it wants to :class:`rl_session.driver.engine_control.EngineControl`;
nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from torch import Tensor

from rl_session.driver.callsite import call_site
from rl_session.driver.control import Control, Frame
from rl_session.driver.engine_control import EngineControl, EngineFrame
from rl_session.driver.handles import EngineCalls, EngineGenerationCalls
from rl_session.driver.ownership import Token
from rl_session.errors import EngineError
from rl_session.lifecycle import Mode
from rl_session.offload.device import Device
from rl_session.scope import Scope

if TYPE_CHECKING:
    from rl_session.policy import Policy

__all__ = ["EngineHandle", "EngineScope", "generation_scope"]

Batch = Mapping[str, Any]
H_co = TypeVar("H_co", covariant=True)


class EngineHandle:
    """A generation engine of a session.

    Made by :meth:`Session.engine`; not by hand.
    """

    def __init__(self, control: EngineControl, on_close: Callable[[EngineHandle], None]) -> None:
        self._control = control
        self._on_close = on_close

    def __repr__(self) -> str:
        return f"<EngineHandle {self.name!r}: {self.state}, version {self.version}, {self.health}>"

    # -- what is -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name in messages and in the log."""
        return self._control.name

    @property
    def engine(self) -> Any:
        """The engine itself."""
        return self._control.engine

    @property
    def device(self) -> Device | None:
        """The device it shares with participants; None when it has devices of its own."""
        return self._control.device

    @property
    def state(self) -> Literal["asleep", "weights", "awake"]:
        """What of it is awake: nothing, a part of it (as a rule the weights, before the KV cache), or all."""
        return self._control.state

    @property
    def version(self) -> int:
        """How many pushes succeeded; 0 for the weights it came with."""
        return self._control.version

    @property
    def in_flight(self) -> int:
        """Requests that are running or waiting.

        Raises:
            EngineError: The engine cannot say.
        """
        return self._control.num_in_flight()

    @property
    def health(self) -> str:
        """One of "ok", "faulted" (see :meth:`recover`) or "closed"."""
        return self._control.health

    def memory(self) -> dict[str, Any]:
        """What it holds.

        Returns:
            ``state``, ``version``, ``weights`` ("first", "unset", "pushed", "discarded" or "torn"), ``health``, ``in_flight``
            (None where it cannot say), ``awake`` (tag to bytes), ``asleep`` (tag to the bytes it would take, None where it
            cannot say), ``device`` (None: its own), ``releasable`` (bytes that may be taken from it now).
        """
        control = self._control
        awake = control.sizes
        releasable = sum(h.nbytes for h in control.holdings() if h.releasable)
        return {
            "state": control.state,
            "version": control.version,
            "weights": control.weights,
            "health": control.health,
            "in_flight": control.drain.known_in_flight(),
            "awake": awake,
            "asleep": {tag: _needed(control, tag) for tag in control.tags if tag not in awake},
            "device": None if control.device is None else repr(control.device),
            "releasable": releasable,
        }

    # -- scopes and calls ----------------------------------------------------------------------------------------

    def awake(self, tags: Sequence[str] | None = None, *, acquire_timeout: float | None = None) -> Scope[EngineCalls]:
        """A scope in which the engine is awake, also after the end of the block under lazy release.

        Args:
            tags: What must be awake, such as ``["weights"]``; all of it by default, which is what ``generate`` needs. A string
                is one tag. The scope raises ConfigError on entry for what is no tag of the engine.
            acquire_timeout: Seconds to wait while another thread or task owns the engine; None gives up at once.
        """
        tags = tags if tags is None or isinstance(tags, str) or not isinstance(tags, Iterable) else tuple(tags)
        spelling = "awake()" if tags is None else f"awake(tags={list(tags) if isinstance(tags, tuple) else tags!r})"
        return EngineScope(self._control, self, spelling, tags, acquire_timeout=acquire_timeout)

    def generate(self, batch: Batch, **kwargs: Any) -> dict[str, Any]:
        """Sample, inside a scope of the engine; from any thread.

        Args:
            batch: What the engine takes: as a rule ``input_ids [B, S]`` right-padded prompts and ``input_lengths [B]``.
            **kwargs: Handed to the engine, such as sampling parameters.

        Returns:
            What the engine gives: as a rule ``output_ids``, ``generation_lengths``, ``unpadded_sequence_lengths``,
            ``logprobs``.

        Raises:
            ModeError: No scope of the engine is open, or the open ones do not ask for all of it.
            StaleWeightsError: Its weights were discarded, or a push failed half-way.
            EngineError: The engine failed; it stays awake.
        """
        return self._control.generate(batch, kwargs)

    def sleep(self) -> None:
        """Put it to sleep now, whatever the release says; the counterpart of :meth:`Policy.offload`. Idempotent.

        Raises:
            ScopeError: A scope of it is open.
            OwnershipError: Another thread or task has it.
            EngineError: It would not sleep; the sleep stays pending.
        """
        self._control.sleep_now(call_site())

    # -- the end -------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Leave the faulted state: put it to sleep once more. It serves again after the next push.

        Raises:
            EngineError: It would not sleep; it stays faulted.
        """
        self._control.recover()

    def close(self) -> None:
        """End its scopes, put it to sleep if it shares a device, and take it out of the session. Idempotent.

        The engine itself is yours: it is not shut down.

        Raises:
            EngineError: It would not sleep; it is out of the session all the same.
        """
        try:
            self._control.close(f"close() at {call_site()}")
        finally:
            self._on_close(self)


def _needed(control: EngineControl, tag: str) -> int | None:
    """Bytes that a tag would take; an engine that cannot say is shown too."""
    try:
        return control.needed_for((tag,))
    except EngineError:
        return None


class EngineScope(Scope[H_co]):
    """One ``with`` block in which an engine is awake; yields what it was given as a target.

    Raises (on entry):
        NestingError: A policy on the same device is at work there.
        OwnershipError: Another thread, task or process owns the engine.
        ScopeReuseError: The scope was entered before.
        EngineError: It would not wake; it was put back to sleep.
        DeviceMemoryError: There is no room for it.
    """

    _owner = "engine"

    def __init__(
        self,
        engine: EngineControl,
        target: Any,
        spelling: str,
        tags: Sequence[str] | None,
        *,
        acquire_timeout: float | None = None,
    ) -> None:
        # What a scope asks of its control, an engine's answers too; the frame is an engine's.
        super().__init__(cast("Control", engine), target, Mode.GENERATION, spelling, acquire_timeout=acquire_timeout)
        self._engine_control = engine
        self._tags = tags

    def _enter(self, site: str) -> Frame:
        frame = self._engine_control.enter(self, self._spelling, site, tags=self._tags)
        self._frame = cast("Frame", frame)
        self._state = "active"
        return self._frame

    def _set_forwards(self, frame: Frame) -> None:
        del frame  # no module of ours runs in it

    def _handle(self) -> H_co:
        return cast("H_co", self._target)


class _GenerationScope(Scope[H_co]):
    """A policy's ``generation_mode()`` with an engine on its device: two owners, one block."""

    def __init__(self, control: Control, target: Any, engine: EngineControl, acquire_timeout: float | None) -> None:
        super().__init__(control, target, Mode.GENERATION, "generation_mode()", acquire_timeout=acquire_timeout)
        self._engine_control = engine
        self._engine_token: Token | None = None

    def _take(self, site: str, timeout: float | None) -> Token:
        token = super()._take(site, timeout)
        try:
            self._engine_token = self._engine_control.acquire(self._spelling, site, timeout)
        except BaseException:
            self._control.let_go(token)
            raise
        return token

    def _enter(self, site: str) -> Frame:
        companion = _Companion(self._engine_control)
        self._frame = self._control.enter(self, self._mode, self._spelling, site, companion=companion)
        self._state = "active"
        return self._frame

    def _abandon(self, error: BaseException) -> None:
        super()._abandon(error)
        if self._engine_token is not None:
            self._engine_control.let_go(self._engine_token)


class _Companion:
    """An engine beside a policy's scope."""

    def __init__(self, engine: EngineControl) -> None:
        self._engine = engine
        self._frame: EngineFrame | None = None

    def enter(self, holder: Any, call_site: str, scope_id: int) -> None:
        """Wake it."""
        self._frame = self._engine.enter(holder, "generation_mode()", call_site, scope_id=scope_id)

    def leave(self) -> None:
        """Let it go."""
        if self._frame is not None:
            self._engine.leave(self._frame)


class _Served:
    """What ``generation_mode()`` offers while an engine has the device: the engine's call, and those from host copies."""

    def __init__(self, policy: Policy, engine: EngineControl) -> None:
        self._policy = policy
        self._engine = engine

    def __repr__(self) -> str:
        return repr(self._policy)

    def generate(self, batch: Batch, **kwargs: Any) -> dict[str, Any]:
        """Sample from the engine."""
        return self._engine.generate(batch, kwargs)

    def state_dict(self) -> dict[str, Tensor]:
        """A CPU copy of the weights."""
        return self._policy.state_dict()

    def save_checkpoint(self, path: str | Path) -> None:
        """Write a checkpoint."""
        self._policy.save_checkpoint(path)


class _Beside(_Served):
    """What ``generation_mode()`` offers beside an engine with devices of its own: the policy stays in whatever mode it is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def generation_scope(
    policy: Policy, control: Control, engine: EngineControl, acquire_timeout: float | None
) -> Scope[EngineGenerationCalls]:
    """The scope of ``policy.generation_mode(engine)``.

    On the policy's device, the policy goes where OFFLOADED has it, in GENERATION mode. With devices of its own, the engine is
    awake and the policy is not concerned: what was legal around the block is legal in it.
    """
    if engine.device is control.device:
        return _GenerationScope(control, _Served(policy, engine), engine, acquire_timeout)
    return EngineScope(engine, _Beside(policy, engine), "generation_mode()", None, acquire_timeout=acquire_timeout)
