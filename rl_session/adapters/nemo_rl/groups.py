"""A NeMo-RL object behind the worker group protocol: transitions become legacy calls, and only those that are needed.

To the driver it is a group of one rank, so that scopes, nesting, ownership and the log are the library's own. What the object
holds cannot be looked at: a group keeps what is *known* of it, and believes nothing after a failure. Knows nothing of
scopes; who else uses the same GPUs is :mod:`rl_session.adapters.nemo_rl.sharing`'s business.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from rl_session.adapters.nemo_rl.calls import LEGACY_CALLS
from rl_session.adapters.nemo_rl.effects import (
    COMPONENTS,
    Call,
    Goal,
    State,
    effect,
    exactly,
    found,
    goal,
    plan,
    touched,
)
from rl_session.adapters.nemo_rl.sharing import Sharing
from rl_session.adapters.nemo_rl.traits import EngineTraits, Kind, TrainerTraits
from rl_session.audit import events
from rl_session.driver.run import error_text
from rl_session.errors import ClosedError, EngineError, FaultedError, OpenStepError, RLSessionError, TransitionError
from rl_session.lifecycle import Mode, Placement, Tier
from rl_session.offload.reports import Notice
from rl_session.planning import Moved
from rl_session.workers.replies import (
    CallResult,
    Changed,
    Description,
    Failed,
    Ok,
    Reply,
    Room,
    TransitionReply,
    TransitionRequest,
)

__all__ = ["ENGINE_COMPONENTS", "EngineGroup", "LegacyGroup", "TrainerGroup", "Wish"]

ENGINE_COMPONENTS = ("weights", "kv_cache")
Tell = Callable[[events.Event], None]


@attrs.frozen(kw_only=True)
class Wish:
    """What a scope asks for beyond its mode.

    Attributes:
        keep: ``keep_train_buffers``; None to find out.
        tags: What of an engine to wake; None for all of it.
    """

    keep: bool | None = None
    tags: tuple[str, ...] | None = None


class LegacyGroup(ABC):
    """One NeMo-RL object as a group of one rank.

    Args:
        legacy: The object; held weakly.
        name: Its name in the log.
        kind: "policy", "value" or "engine".
        nbytes: Component to bytes, where the user knows them.
    """

    num_ranks = 1

    def __init__(self, legacy: object, name: str, kind: Kind, nbytes: Mapping[str, int]) -> None:
        self._legacy = weakref.ref(legacy)
        self.name = name
        self.kind = kind
        self.label = label = f"{kind} {name!r}"
        self.nbytes = dict(nbytes)
        self.mode = Mode.OFFLOADED
        self.wish = Wish()
        self.hold = False
        """Whether the way out of the scope that is being left may leave everything where it is."""
        self.sharing: Sharing | None = None
        self.explain: Callable[[], tuple[str, tuple[str, ...]]] = lambda: (label, ())
        self.tell: Tell = lambda event: None
        self._logged: dict[str, Tier] = {}
        self._own: dict[str, Callable[..., Any]] = {
            "transition": self._transition,
            "placement": self.placement,
            "memory": self.memory,
            "sizes": self._sizes,
            "component_names": lambda: list(self.known()),
            "room": lambda request: Room(onload=0, freed=0, reserve=0),
            "holdings": lambda modes, flags: [],
            "has_open_step": lambda: False,
            "recover": self._recover,
            "detach": self._detach,
        }

    # -- the protocol --------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """Serve a call of the driver's, or make it on the object. Interrupts are not replies: they propagate."""
        try:
            if method in LEGACY_CALLS:
                return [Ok(self._compute(method, *args, **kwargs))]
            return [Ok(self._own[method](*args, **kwargs))]
        except Exception as error:
            return [Failed(error)]

    def close(self) -> None:
        """Let the object go; it is the caller's."""
        self._own = {}

    @property
    def legacy(self) -> Any:
        """The object.

        Raises:
            ClosedError: It is gone.
        """
        legacy = self._legacy()
        if legacy is None:
            raise ClosedError(f"{self.label}: the object is gone", (), "scopes(policy)  # of an object that is alive")
        return legacy

    @property
    def is_alive(self) -> bool:
        """Whether the object still exists."""
        return self._legacy() is not None

    def _compute(self, method: str, *args: Any, **kwargs: Any) -> CallResult:
        return CallResult(getattr(self.legacy, method)(*args, **kwargs))

    # -- what is known -------------------------------------------------------------------------------------------

    @abstractmethod
    def known(self) -> Mapping[str, Tier | None]:
        """Component to tier; None where nobody can know."""

    @abstractmethod
    def forget(self) -> None:
        """Believe nothing of where anything is."""

    @property
    @abstractmethod
    def is_released(self) -> bool:
        """Whether nothing more could be taken off the device."""

    @abstractmethod
    def _go(self, request: TransitionRequest) -> tuple[Notice, ...]:
        """Make the calls that ``request`` needs, all or none."""

    def describe(self, mode: Mode) -> Description:
        """The object as it was found."""
        self._logged = {name: tier for name, tier in self.known().items() if tier is not None}
        self.mode = mode
        return Description(mode=mode, placement=self.placement(), nbytes=self._sizes(), notices=())

    def placement(self) -> Placement:
        """Where each component is, as far as the log knows; what was never known is left out."""
        return Placement(self._logged)

    def _sizes(self) -> dict[str, int]:
        return {name: self.nbytes.get(name, 0) for name, tier in self._logged.items() if tier is not Tier.NONE}

    def memory(self) -> dict[str, Any]:
        """Bytes of each component by tier, as far as sizes were given."""
        sizes = self._sizes()
        return {
            "components": {name: {self._logged[name].value: nbytes} for name, nbytes in sizes.items()},
            "device_bytes": self._bytes_at(Tier.DEVICE),
            "unknown": [name for name, tier in self.known().items() if tier is None],
        }

    def _bytes_at(self, tier: Tier) -> int:
        return sum(self.nbytes.get(name, 0) for name, found in self._logged.items() if found is tier)

    # -- transitions ---------------------------------------------------------------------------------------------

    def _transition(self, request: TransitionRequest) -> TransitionReply:
        before = self.placement()
        start = time.perf_counter()
        notices: tuple[Notice, ...] = ()
        if request.explicit is None:  # else close(): the object stays as it is
            if self.sharing is not None:
                with self.sharing.admitted(self, request):
                    notices = self._go(request)
            else:
                notices = self._go(request)
            self.mode = request.mode
        return self._reply(before, time.perf_counter() - start, notices)

    def _reply(self, before: Placement, seconds: float, notices: tuple[Notice, ...]) -> TransitionReply:
        moved = self._log_moves()
        dropped = sum(m.nbytes for m in moved if m.component == "grads" and m.to_tier is Tier.NONE)
        return TransitionReply(
            before=before,
            placement=self.placement(),
            moved=moved,
            seconds=tuple(seconds / len(moved) for _ in moved),
            dropped_bytes=dropped,
            live_dropped=False,
            device_bytes=self._bytes_at(Tier.DEVICE),
            host_bytes=self._bytes_at(Tier.HOST),
            notices=notices,
        )

    def _log_moves(self) -> tuple[Moved, ...]:
        """What differs from what the log was told last; what is not known is told when it is."""
        moved = []
        for name, tier in self.known().items():
            if tier is None:
                continue
            source = self._logged.get(name, Tier.NONE)
            if source is not tier:
                copied = source is not Tier.NONE and tier is not Tier.NONE
                moved.append(Moved(name, source, tier, self.nbytes.get(name, 0), 1, elided=not copied))
            self._logged[name] = tier
        return tuple(moved)

    def _recover(self, path: str | None) -> str:
        """After a failure nothing is believed: the way to rest is made from anywhere."""
        del path
        self.forget()
        return "unknown: every component is placed anew"

    def _detach(self) -> None:  # noqa: B027 (a trainer stays as it is)
        """End the use of the object."""


class TrainerGroup(LegacyGroup):
    """A ``Policy`` or ``Value``.

    Args:
        legacy: The object.
        name: Its name in the log.
        nbytes: Component to bytes.
        traits: What decides the effect of its methods.
        where: Where it is known to be: on the device, on the host, or None.
    """

    def __init__(
        self, legacy: object, name: str, nbytes: Mapping[str, int], traits: TrainerTraits, where: Tier | None
    ) -> None:
        super().__init__(legacy, name, traits.kind, nbytes)
        self.traits = traits
        self.state = found(traits, where)
        self.step_open = False
        """Whether a train step is open that was begun through a handle."""
        self.kept = False
        """Whether a scope asked for ``keep_train_buffers`` since: its caller knows of an open step."""
        self.engine: EngineGroup | None = None
        """The engine that serves the training weights themselves, if there is one."""
        self._told = False
        """Whether it was said that the optimizer cannot leave."""
        self._own["has_open_step"] = lambda: self.step_open

    def known(self) -> dict[str, Tier | None]:
        """Component to tier; None where nobody can know."""
        return {name: self.state.tier(name) for name in COMPONENTS if self._exists(name)}

    def _exists(self, name: str) -> bool:
        absent = {"buffers": self.traits.is_megatron, "optimizer": not self.traits.optimizer}
        absent["grads"] = not self.traits.has_grad_buffer
        return not absent.get(name, False)

    def forget(self) -> None:
        """Believe nothing of where anything is."""
        self.state = found(self.traits, None)
        self.step_open = False

    @property
    def is_released(self) -> bool:
        """Whether no call could take more off the device."""
        _, calls = self._way(goal(Mode.OFFLOADED, self.state, self.traits))
        return not calls

    def weights_taken(self) -> None:
        """An engine that shares the weights woke or fell asleep: where they are now is its business."""
        self.state = attrs.evolve(self.state, params=None)

    # -- deciding ------------------------------------------------------------------------------------------------

    def _go(self, request: TransitionRequest) -> tuple[Notice, ...]:
        self.state = attrs.evolve(self.state, training=None)  # the user's calls since then have set it as they liked
        keep = self._keeps(request)
        wanted, notices = self._goal(request, keep=keep)
        wanted, calls = self._way(wanted, protect_grads=self.step_open)
        if "optimizer" not in wanted.tiers and request.mode is Mode.OFFLOADED and not notices:
            notices = self._optimizer_stays()
        self._run(calls)
        self.kept = keep or (self.kept and request.mode is not Mode.TRAINING)
        return notices

    def _keeps(self, request: TransitionRequest) -> bool:
        """Whether LOGPROB is to leave gradients and optimizer where they are.

        An open step is known when a handle began it. A step begun on the object itself cannot be seen: where there may be
        one (inside ``training_mode()`` of an object that can split its steps), buffers are kept, which costs memory and
        never gradients.
        """
        if request.mode is not Mode.LOGPROB or self.traits.kind != "policy":
            return False
        asked = self.wish.keep if request.stored is None else None
        if asked is False and self.step_open:
            raise OpenStepError(
                f"{self.label}: logprob_mode(keep_train_buffers=False) would destroy the gradients of an open step",
                self.explain()[1],
                "with scopes(policy).logprob_mode(): ...  # keeps them",
            )
        if asked is not None:
            return asked
        return self.step_open or (self.mode is Mode.TRAINING and self.traits.split_steps)

    def _goal(self, request: TransitionRequest, *, keep: bool) -> tuple[Goal, tuple[Notice, ...]]:
        mode, leaving = request.mode, request.stored is not None
        lazy = request.flags.release == "lazy"
        if leaving and mode is Mode.OFFLOADED and lazy:
            return Goal({}), ()  # nothing is called on a lazy way out
        if self.step_open and mode in (Mode.REFIT, Mode.OFFLOADED) and self.traits.has_grad_buffer:
            return self._with_open_step(mode, leaving=leaving)
        # train mode matters to a step only: whatever begins one sets it, what continues one relies on it.
        continues = self.step_open or self.kept or leaving
        training = mode is Mode.TRAINING and self.traits.split_steps and continues
        wanted = goal(mode, self.state, self.traits, lazy=lazy, keep=keep, stored=request.stored, training=training)
        if self.engine is not None and self.engine.is_awake and mode is Mode.OFFLOADED:
            wanted = wanted.without("params")  # pulled from under the engine that serves them
        return wanted, ()

    def _with_open_step(self, mode: Mode, *, leaving: bool) -> tuple[Goal, tuple[Notice, ...]]:
        """Megatron has nowhere to keep gradients but the device: a way out leaves everything, a way in is refused."""
        if leaving:
            message = f"{self.label}: an open step keeps everything on the device; finish or abort it first"
            return Goal({}), (Notice("open_step_stays", message),)
        raise OpenStepError(
            f"{self.label}: going to {mode} mode would destroy the gradients of an open step",
            self.explain()[1],
            "handle.finish_train_step() or handle.abort_train_step(), of the handle of training_mode()",
        )

    def _way(self, wanted: Goal, *, protect_grads: bool = False) -> tuple[Goal, tuple[Call, ...]]:
        """The calls to make, and the goal they reach: without what no call can move."""
        for relaxed in (wanted, wanted.without("optimizer"), wanted.without("optimizer").without("grads")):
            calls = plan(self.state, relaxed, self.traits, protect_grads=protect_grads)
            if calls is not None:
                return relaxed, calls
        raise AssertionError(f"{self.label}: no legacy calls lead from {self.state} to {wanted}")

    def _optimizer_stays(self) -> tuple[Notice, ...]:
        if not self.traits.optimizer_moves or self.state.optimizer is Tier.HOST or self._told:
            return ()
        self._told = True
        message = f"{self.label}: offload_optimizer_for_refit=False keeps the optimizer state on the device"
        return (Notice("optimizer_stays", message, self.nbytes.get("optimizer")),)

    # -- doing ---------------------------------------------------------------------------------------------------

    def _run(self, calls: tuple[Call, ...]) -> None:
        before = self.state
        for call in calls:
            try:
                self._make(call)
            except BaseException as error:
                self._roll_back(call, before, error)
                if not isinstance(error, Exception) or isinstance(error, RLSessionError):
                    raise
                raise TransitionError(
                    f"{self.label}: {call} failed, and what it had done was undone",
                    self.explain()[1],
                    "the same again, when the cause is gone: what was in effect before still is",
                    error_text(error) or "",
                ) from error

    def _make(self, call: Call) -> None:
        getattr(self.legacy, call.method)(**call.kwargs)
        self.state = effect(self.state, call, self.traits)

    def _roll_back(self, failed: Call, before: State, error: BaseException) -> None:
        """Make the calls that lead back to what was, from a state in which what the failed call moves may be anywhere."""
        self.state = attrs.evolve(self.state, training=None, **dict.fromkeys(touched(failed, self.traits)))
        _, calls = self._way(exactly(before), protect_grads=self.step_open)
        try:
            for call in calls:
                self._make(call)
        except BaseException as second:
            self.forget()
            raise FaultedError(
                f"{self.label}: {failed} failed, and so did the way back",
                (*self.explain()[1], f"on the way back: {error_text(second)}"),
                f"scopes({self.traits.kind}).recover()  # places everything anew",
                error_text(error) or "",
            ) from error

    # -- computing -----------------------------------------------------------------------------------------------

    def _compute(self, method: str, *args: Any, **kwargs: Any) -> CallResult:
        result = super()._compute(method, *args, **kwargs)
        if method == "begin_train_step":
            self.step_open = True
        elif method in ("finish_train_step", "abort_train_step"):
            self.step_open = False
        elif method == "save_checkpoint":
            result.changed = self._after_save(optimizer=bool(_argument(args, kwargs, 1, "optimizer_path")))
        return result

    def _after_save(self, *, optimizer: bool) -> tuple[Changed, ...]:
        """A Megatron policy brings in what it saves by itself, and leaves it there."""
        if self.traits.kind != "policy" or not self.traits.is_megatron:
            return ()
        self.state = attrs.evolve(self.state, params=Tier.DEVICE)
        if optimizer and self.traits.optimizer_moves:
            self.state = attrs.evolve(self.state, optimizer=Tier.DEVICE)
        return tuple(Changed(m.component, m.to_tier, m.nbytes) for m in self._log_moves())


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return kwargs[name] if name in kwargs else args[position] if len(args) > position else None


class EngineGroup(LegacyGroup):
    """A generation object: what of it is awake.

    Args:
        legacy: The object.
        name: Its name in the log.
        nbytes: Component to bytes.
        traits: What decides the effect of its methods.
        where: Whether it is known to be awake (the device), asleep (the host), or None.
    """

    def __init__(
        self, legacy: object, name: str, nbytes: Mapping[str, int], traits: EngineTraits, where: Tier | None
    ) -> None:
        super().__init__(legacy, name, traits.kind, nbytes)
        self.traits = traits
        self.policy: TrainerGroup | None = None
        """The policy whose training weights it serves, if it does."""
        self._tiers: dict[str, Tier | None] = dict.fromkeys(ENGINE_COMPONENTS, where)
        if where is Tier.HOST:
            self._set_asleep()

    def known(self) -> dict[str, Tier | None]:
        """Component to tier; None where nobody can know."""
        return dict(self._tiers)

    def forget(self) -> None:
        """Believe nothing of what is awake."""
        self._tiers = dict.fromkeys(ENGINE_COMPONENTS)

    @property
    def is_asleep(self) -> bool:
        """Whether it is known to sleep."""
        return self._tiers == {"weights": Tier.HOST, "kv_cache": Tier.NONE}

    @property
    def is_awake(self) -> bool:
        """Whether any of it is known to be awake."""
        return Tier.DEVICE in self._tiers.values()

    @property
    def is_released(self) -> bool:
        """Whether it gives no memory back any more."""
        return self.is_asleep or not self.traits.colocated

    def _set_asleep(self) -> None:
        self._tiers = {"weights": Tier.HOST, "kv_cache": Tier.NONE}

    def covers(self, tags: tuple[str, ...] | None) -> bool:
        """Whether everything that ``tags`` ask for is awake."""
        return all(self._tiers.get(tag) is Tier.DEVICE for tag in tags or ENGINE_COMPONENTS)

    def _go(self, request: TransitionRequest) -> tuple[Notice, ...]:
        if request.mode is Mode.GENERATION:
            self._wake(self._tags_of(request))
        elif self.hold or (request.stored is not None and request.flags.release == "lazy"):
            pass  # it sleeps when somebody needs the room
        elif not self.is_asleep:
            self._sleep()
        return ()

    def _tags_of(self, request: TransitionRequest) -> tuple[str, ...] | None:
        if request.stored is None:
            return self.wish.tags
        there = tuple(tag for tag in ENGINE_COMPONENTS if request.stored[tag] is Tier.DEVICE)
        return there or None

    def _wake(self, tags: tuple[str, ...] | None) -> None:
        if self.covers(tags):
            return
        missing = tuple(tag for tag in tags or ENGINE_COMPONENTS if self._tiers.get(tag) is not Tier.DEVICE)
        whole = tags is None and len(missing) == len(ENGINE_COMPONENTS)
        kwargs = {} if whole else {"tags": list(missing)}
        try:
            self._ask("prepare_for_generation", kwargs)
        except BaseException as error:
            self.forget()
            if self.traits.colocated:
                self._put_back(error)
            raise
        woken = [tag for tag in missing if tag in self._tiers]
        self._tiers.update(dict.fromkeys(woken or ENGINE_COMPONENTS, Tier.DEVICE))
        self._policy_moved()
        self.tell(events.EngineWoken(engine=self.name, tags=() if whole else missing))

    def _put_back(self, error: BaseException) -> None:
        """An engine that did not wake sleeps: half of it may be up, and an engine half up serves nobody.

        Raises:
            FaultedError: It does not sleep either.
        """
        try:
            self._ask("finish_generation", {})
        except BaseException as second:
            raise FaultedError(
                f"{self.label}: prepare_for_generation() failed, and finish_generation() after it",
                (*self.explain()[1], f"on the way back: {error_text(second)}"),
                "scopes(policy_generation).recover()  # puts it to sleep",
                error_text(error) or "",
            ) from error
        self._set_asleep()

    def _sleep(self) -> None:
        try:
            self._ask("finish_generation", {})
        except BaseException:
            self.forget()
            raise
        if self.traits.colocated:
            self._set_asleep()
        self._policy_moved()
        self.tell(events.EngineSlept(engine=self.name))

    def _policy_moved(self) -> None:
        if self.policy is not None:
            self.policy.weights_taken()

    def _ask(self, method: str, kwargs: Mapping[str, Any]) -> None:
        """Call the object; False is what its backends say instead of raising.

        Raises:
            EngineError: It raised, or said False.
        """
        cause, origin = "", None
        shown = f"{method}({', '.join(f'{name}={value!r}' for name, value in kwargs.items())})"
        try:
            said = getattr(self.legacy, method)(**kwargs)
        except Exception as error:
            said, cause, origin = False, error_text(error) or "", error
        if said is False:
            raise EngineError(
                f"{self.label}: {shown} failed",
                (*self.explain()[1], "it raised" if cause else "it returned False: the engine's own log says why"),
                "the same again, when the cause is gone",
                cause,
            ) from origin

    def _detach(self) -> None:
        """What these scopes woke, they put to sleep."""
        if not self.traits.colocated or not self.is_awake:
            return
        if self.is_alive:
            self._sleep()
        else:
            self.tell(events.EngineSlept(engine=self.name))
