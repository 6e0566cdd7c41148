"""What users hold: the scopes, guards and log of one NeMo-RL object, which stays as it is.

Each method says what it wants to :class:`rl_session.driver.control.Control`; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, overload

from rl_session.adapters.nemo_rl.calls import LegacyHandle, check, gate_of
from rl_session.adapters.nemo_rl.engine import ENGINE_COMPONENTS, EngineGroup
from rl_session.adapters.nemo_rl.groups import LegacyGroup, Wish
from rl_session.adapters.nemo_rl.refitting import legacy_refitting, refitting
from rl_session.adapters.nemo_rl.trainer import TrainerGroup
from rl_session.audit import events
from rl_session.driver.callsite import call_site
from rl_session.driver.control import Control, Frame
from rl_session.errors import ConfigError, ScopeError, UnsupportedError, UsageError
from rl_session.generation.protocol import chosen_tags
from rl_session.lifecycle import Mode, Placement
from rl_session.offload.device import Device
from rl_session.scope import Scope

__all__ = ["EngineScopes", "LegacyScopes", "PolicyScopes", "ValueScopes"]

T = TypeVar("T")


class LegacyScope(Scope[Any]):
    """A scope over a NeMo-RL object; yields a :class:`LegacyHandle`."""

    def __init__(
        self,
        scopes: LegacyScopes,
        mode: Mode,
        spelling: str,
        wish: Wish | None = None,
        *,
        acquire_timeout: float | None = None,
        hold: bool = False,
    ) -> None:
        super().__init__(scopes._control, scopes.group.legacy, mode, spelling, acquire_timeout=acquire_timeout)  # noqa: SLF001
        self._group = scopes.group
        self._handle_of = scopes._handle  # noqa: SLF001 (scopes and their scope are two halves of one thing)
        self._wish = wish or Wish()
        self._hold = hold

    def _enter(self, site: str) -> Frame:
        group = self._group
        group.wish = self._wish
        try:
            if isinstance(group, EngineGroup) and self._control.frames and not self._is_asked_for(group):
                self._refuse_more(site)
            return super()._enter(site)
        finally:
            group.wish = Wish()

    def _is_asked_for(self, group: EngineGroup) -> bool:
        """Whether the open scopes ask for what this one does; what is awake beyond that depends on the release."""
        asked: set[str] = set()
        for frame in self._control.frames:
            outer = frame.holder()
            if isinstance(outer, LegacyScope):
                asked.update(outer._wish.tags or ENGINE_COMPONENTS)  # noqa: SLF001 (one of its own kind)
        return asked >= set(self._wish.tags or ENGINE_COMPONENTS) and group.covers(self._wish.tags)

    def _refuse_more(self, site: str) -> None:
        outer = self._control.frames[-1]
        raise ScopeError(
            f"{self._control.label}: {self._spelling} at {site} wakes more than {outer.describe()} did",
            self._control.explain()[1],
            f"with scopes(policy_generation).{self._spelling}: ...  # after that block has ended",
        )

    def _leave_after(self, error: BaseException | None) -> None:
        self._group.hold = self._hold and error is None
        try:
            super()._leave_after(error)
        finally:
            self._group.hold = False

    def _handle(self) -> Any:
        return self._handle_of()


class _NoSuchScopeError(UnsupportedError, AttributeError):
    """A scope of another kind of object; an AttributeError too, so that ``hasattr`` answers."""


_SPOKEN_SCOPES: Mapping[str, str] = {
    **dict.fromkeys(("training_mode", "offloaded", "logprob_mode", "refit_mode", "refit", "legacy_refit"), "policy"),
    "inference_mode": "value_model",
    **dict.fromkeys(("awake", "wake", "sleep"), "policy_generation"),
}
"""Every scope and call of some kind of object, and how an object that has it is called in examples."""


class LegacyScopes:
    """The scopes of one NeMo-RL object. Made by :func:`scopes`, once an object."""

    def __init__(
        self, control: Control, group: LegacyGroup, device: Device, on_close: Callable[[LegacyScopes], None]
    ) -> None:
        self._control = control
        self.group = group
        self.device = device
        self._on_close = on_close

    def __repr__(self) -> str:
        return f"<scopes of {self._control.label}: {self.mode} mode, {self.health}>"

    @property
    def _is_megatron(self) -> bool:
        return isinstance(self.group, TrainerGroup) and self.group.traits.is_megatron

    def __getattr__(self, name: str) -> Any:
        spoken = _SPOKEN_SCOPES.get(name)
        if spoken is None or "_control" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        own = [scope for scope in _SPOKEN_SCOPES if hasattr(type(self), scope)]
        raise _NoSuchScopeError(
            f"{self._control.label}: {name}() is no scope of a {self._control.kind}",
            (f"its own: {', '.join(own)}",),
            f"scopes({spoken}).{name}(...), or one of its own",
        )

    def _handle(self) -> LegacyHandle:
        return LegacyHandle(self._control, self.group.legacy, is_megatron=self._is_megatron)

    # -- what is -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name in messages and in the log."""
        return self._control.name

    @property
    def mode(self) -> Mode:
        """The mode in effect."""
        return self._control.mode

    @property
    def resting_mode(self) -> Mode:
        """The mode outside every scope."""
        return self._control.resting_mode

    @property
    def health(self) -> str:
        """One of "ok", "faulted" (see :meth:`recover`) or "closed"."""
        return self._control.health

    @property
    def placement(self) -> Placement:
        """Where each component is, as far as calls made through scopes prove it."""
        placement: Placement = self._control.ask("placement")
        return placement

    def memory(self) -> dict[str, Any]:
        """Bytes of each component by tier, as far as sizes were given, and the components of which nothing is known."""
        memory: dict[str, Any] = self._control.ask("memory")
        return memory

    # -- what can be done in every mode --------------------------------------------------------------------------

    def check(self, call: str, *args: Any, **kwargs: Any) -> None:
        """Whether a compute call is legal now.

        Args:
            call: Its name, such as ``"get_logprobs"``.
            *args: Its arguments, where they decide: ``train("...", eval_mode=True)``, ``save_checkpoint(optimizer_path=...)``.
            **kwargs: Likewise.

        Raises:
            ModeError: It is not; the message names the legacy call that is missing, and the scope to write.
            ConfigError: There is no such call.
        """
        self._control.ready(f"{call}()")
        check(self._control, call, gate_of(self._control, call, args, kwargs, is_megatron=self._is_megatron))

    def offload(self) -> None:
        """Leave the device now, whatever the release policy, and rest there.

        Raises:
            ScopeError: A scope is open.
            OpenStepError: A train step is open whose gradients have no other place.
            RLSessionError: A legacy call failed and was undone.
        """
        self._control.switch(Mode.OFFLOADED, "offload()", call_site(), evict=True)

    def forget(self) -> None:
        """Believe nothing of where the object's bytes are: it was moved by hand, or by code that knows no scopes.

        Raises:
            ScopeError: A scope is open.
        """
        if self._control.frames:
            raise ScopeError(
                f"{self._control.label}: forget() inside {self._control.frames[-1].describe()}",
                self._control.explain()[1],
                "scopes(policy).forget()  # outside every scope",
            )
        self.group.forget()

    def recover(self) -> None:
        """Leave the faulted state: every component is placed anew, on the way to the resting mode.

        Raises:
            RLSessionError: That failed too.
        """
        if self.health == "faulted":
            self._control.recover()

    def close(self) -> None:
        """End the scopes of this object; it stays as it is, but for an engine that they woke: it is put to sleep."""
        self._control.close(f"close() at {call_site()}")
        self._on_close(self)

    # -- for those who share the GPUs ----------------------------------------------------------------------------

    def open_scope(self) -> str:
        """Its innermost scope in words, if that needs the device; else nothing."""
        frames = self._control.frames
        return (
            f"{self._control.label}: {frames[-1].describe()}"
            if frames and frames[-1].mode is not Mode.OFFLOADED
            else ""
        )

    def evict(self, reason: str) -> None:
        """Leave the device for another tenant.

        Raises:
            RLSessionError: It could not be.
        """
        if not self._control.frames:  # else it is in offloaded(), which has evicted it
            self._control.switch(Mode.OFFLOADED, reason, call_site(), evict=True)


class _TrainerScopes(LegacyScopes):
    group: TrainerGroup

    def training_mode(self, *, acquire_timeout: float | None = None) -> Scope[Any]:
        """A scope as after ``prepare_for_training()``.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the object; None gives up at once.
        """
        return LegacyScope(self, Mode.TRAINING, "training_mode()", acquire_timeout=acquire_timeout)

    def offloaded(self, *, acquire_timeout: float | None = None) -> Scope[Any]:
        """A scope with everything that can leave the device off it, under lazy release too.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the object; None gives up at once.
        """
        return LegacyScope(self, Mode.OFFLOADED, "offloaded()", acquire_timeout=acquire_timeout)


class PolicyScopes(_TrainerScopes):
    """The scopes of a NeMo-RL ``Policy`` (or ``TQPolicy``)."""

    _version = 0

    def logprob_mode(
        self, *, keep_train_buffers: bool | None = None, acquire_timeout: float | None = None
    ) -> Scope[Any]:
        """A scope as after ``prepare_for_lp_inference(keep_train_buffers=...)``.

        Args:
            keep_train_buffers: Whether gradients and optimizer stay as they are. None: they stay while a train step is open
                that was begun through a handle, and inside ``training_mode()`` of an object that can split its steps.
            acquire_timeout: Seconds to wait while another thread or task owns the object; None gives up at once.
        """
        wish = Wish(keep=keep_train_buffers)
        return LegacyScope(self, Mode.LOGPROB, "logprob_mode()", wish, acquire_timeout=acquire_timeout)

    def refit_mode(self, *, acquire_timeout: float | None = None) -> Scope[Any]:
        """A scope as after ``offload_before_refit()``, with the parameters on the device.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the object; None gives up at once.
        """
        return LegacyScope(self, Mode.REFIT, "refit_mode()", acquire_timeout=acquire_timeout)

    def _weights_in(self, *, hold: bool = False) -> LegacyScope:
        """A scope with the parameters on the device, and everything else where it is."""
        return LegacyScope(self, Mode.LOGPROB, "refit()", Wish(keep=True), hold=hold)

    @overload
    def refit(self, policy_generation: object) -> AbstractContextManager[None]: ...
    @overload
    def refit(self, policy_generation: object, transfer: Callable[[], T]) -> T: ...
    def refit(
        self, policy_generation: object, transfer: Callable[[], T] | None = None
    ) -> T | AbstractContextManager[None]:
        """Push the weights to an engine, in the two phases that bound the peak.

        Of an engine on the same GPUs (see :func:`share`): the optimizer and the gradients leave, the engine's weights wake,
        ``transfer()`` runs, the policy leaves, the KV cache wakes. The engine stays awake: the next ``awake()`` finds it so,
        and another tenant's scope puts it to sleep. Of any other engine, ``transfer()`` runs with the parameters on the
        device, and nothing else moves.

        Args:
            policy_generation: The engine's object.
            transfer: Moves the weights, and waits for both sides together. Without it a context manager comes back, and its
                block is the transfer: ``with scopes(policy).refit(policy_generation): ...``.

        Returns:
            What ``transfer`` returned, or the context manager.

        Raises:
            EngineError: A wake failed, or said False; both sides were put back.
            ScopeError: A scope of the policy is open, and the engine is on the same GPUs.
            UsageError: ``policy_generation`` is no engine.
            ConfigError: ``transfer`` is nothing that can be called.
            RLSessionError: A legacy call failed and was undone.
        """
        if transfer is not None and not callable(transfer):
            raise ConfigError(
                f"{self._control.label}: refit(policy_generation, {transfer!r}): the transfer cannot be called",
                (f"given: {type(transfer).__name__}",),
                "scopes(policy).refit(policy_generation, lambda: ...), or with scopes(policy).refit(policy_generation): ...",
            )
        block = refitting(self, self._engine_of(policy_generation, "refit"))
        if transfer is None:
            return block
        with block:
            return transfer()

    def legacy_refit(self, policy_generation: object) -> AbstractContextManager[None]:
        """A block around a helper that makes the legacy calls of a refit itself.

        For ``refit_policy_generation(...)`` of code that knows no scopes, and for ``sync_weights(...)`` of a weight
        synchroniser. On the way in the other tenants leave and the parameters come in, which those helpers rely on; no scope is
        open while they run. On the way out both sides are known to be where the helper's contract leaves them; after an
        exception nothing is believed of either.

        Args:
            policy_generation: The engine's object.

        Raises (on entry):
            ScopeError: A scope of the policy or of the engine is open.
            UsageError: ``policy_generation`` is no engine.
            RLSessionError: A legacy call failed and was undone.
        """
        return legacy_refitting(self, self._engine_of(policy_generation, "legacy_refit"))

    def awake(self, *, tags: Sequence[str] | None = None, acquire_timeout: float | None = None) -> Any:
        """A block in which nothing changes: a policy that is its own generation object never slept."""
        del acquire_timeout
        _tags(tags, self._control.label, "awake()")
        return nullcontext()

    def wake(self, *, tags: Sequence[str] | None = None) -> None:
        """Nothing, as :meth:`awake`."""
        _tags(tags, self._control.label, "wake()")

    def sleep(self) -> None:
        """Nothing, as :meth:`awake`; to free the memory of the policy write ``offload()``."""

    def _engine_of(self, policy_generation: object, method: str) -> EngineScopes:
        from rl_session.adapters.nemo_rl.registry import scopes  # at call time: the registry makes these objects

        engine = scopes(policy_generation)
        if not isinstance(engine, EngineScopes):
            raise UsageError(
                f"{self._control.label}: {method}() of {engine!r}", (), f"scopes(policy).{method}(policy_generation)"
            )
        return engine

    def published(self) -> None:
        """Record that an engine has the weights of now."""
        self._version += 1
        nbytes = self.group.nbytes.get("params", 0)
        self._control.record(events.WeightsPublished(version=self._version, nbytes=nbytes))


class ValueScopes(_TrainerScopes):
    """The scopes of a NeMo-RL ``Value``."""

    def inference_mode(self, *, acquire_timeout: float | None = None) -> Scope[Any]:
        """A scope as after ``prepare_for_inference()``.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the object; None gives up at once.
        """
        return LegacyScope(self, Mode.LOGPROB, "inference_mode()", acquire_timeout=acquire_timeout)


class EngineScopes(LegacyScopes):
    """The scopes of a NeMo-RL generation object."""

    group: EngineGroup

    def awake(self, *, tags: Sequence[str] | None = None, acquire_timeout: float | None = None) -> Scope[Any]:
        """A scope as after ``prepare_for_generation(tags=...)``; its exit is ``finish_generation()``.

        Args:
            tags: What to wake, such as ``["weights"]``; None for everything. A string is one tag.
            acquire_timeout: Seconds to wait while another thread or task owns the object; None gives up at once.

        Raises:
            ConfigError: A tag that there is not.

        Raises (on entry):
            EngineError: The wake raised, or said False; the engine was put to sleep.
        """
        return self._awake(_tags(tags, self._control.label, "awake()"), acquire_timeout=acquire_timeout)

    def wake(self, *, tags: Sequence[str] | None = None) -> None:
        """Wake it, and let it rest awake until :meth:`sleep`, or until another tenant's scope needs the room.

        For an engine whose use, or whose end of use, no block can hold: a server, another process. Where one can, write
        ``with scopes(policy_generation).awake(): ...``. The call is always made: who else wakes the engine or puts it to
        sleep, in another process, is not known here.

        Args:
            tags: What to wake, such as ``["weights"]``; None for everything. A string is one tag.

        Raises:
            ConfigError: A tag that there is not.
            EngineError: The wake raised, or said False; the engine was put to sleep.
            ScopeError: A scope of it is open.
            NestingError: A scope of another tenant is open.
        """
        group = self.group
        wish = Wish(tags=_whole(_tags(tags, self._control.label, "wake()")))
        self._believe_nothing()
        group.wish = wish
        try:
            self._control.switch(Mode.GENERATION, "wake()", call_site(), evict=True)
        finally:
            group.wish = Wish()

    def sleep(self) -> None:
        """Put it to sleep now; one with GPUs of its own drops what it cached. The call is always made, as in :meth:`wake`.

        Raises:
            EngineError: It raised, or said False.
            ScopeError: A scope of it is open.
        """
        self._believe_nothing()
        self._control.switch(Mode.OFFLOADED, "sleep()", call_site(), evict=True)

    def _believe_nothing(self) -> None:
        if not self._control.frames:
            self.group.forget()

    def _awake(
        self, tags: tuple[str, ...] | None, *, hold: bool = False, acquire_timeout: float | None = None
    ) -> LegacyScope:
        spelling = "awake()" if tags is None else f"awake(tags={list(tags)})"
        wish = Wish(tags=_whole(tags))
        return LegacyScope(self, Mode.GENERATION, spelling, wish, acquire_timeout=acquire_timeout, hold=hold)


def _tags(tags: object, label: str, spelling: str) -> tuple[str, ...] | None:
    """What a user named.

    Raises:
        ConfigError: A tag that there is not.
    """
    if tags is None:
        return None
    return chosen_tags(
        tags, ENGINE_COMPONENTS, f"{label}: {spelling}", 'scopes(policy_generation).awake(tags=["weights"])'
    )


def _whole(tags: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Tags as a wish: naming everything is naming nothing."""
    return None if tags is None or set(tags) == set(ENGINE_COMPONENTS) else tags
