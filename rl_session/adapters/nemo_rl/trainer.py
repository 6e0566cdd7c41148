"""A ``Policy`` or ``Value``: which legacy calls a transition needs, making them, and taking them back when one fails.

Knows what the methods do from :mod:`rl_session.adapters.nemo_rl.effects`, and of engines only whether one serves its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

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
from rl_session.adapters.nemo_rl.groups import LegacyGroup
from rl_session.adapters.nemo_rl.traits import TrainerTraits
from rl_session.driver.run import error_text
from rl_session.errors import FaultedError, OpenStepError, RLSessionError, TransitionError
from rl_session.lifecycle import Mode, Tier
from rl_session.offload.reports import Notice
from rl_session.workers.replies import CallResult, Changed, TransitionRequest

if TYPE_CHECKING:
    from rl_session.adapters.nemo_rl.engine import EngineGroup

__all__ = ["TrainerGroup"]

_WAITS_ITSELF = frozenset({"offload_before_refit", "offload_after_refit"})
"""Calls that wait for an asynchronous checkpoint before they take anything away."""


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
        wanted, calls = self._way(wanted, protect_grads=self.step_open or keep)
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
        if self.hold or (leaving and mode is Mode.OFFLOADED and lazy):
            return Goal({}), ()  # nothing is called on a lazy way out, nor on one that hands everything on
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
        after = effect(self.state, call, self.traits)
        if call.method not in _WAITS_ITSELF:
            self._fence(after)
        getattr(self.legacy, call.method)(**call.kwargs)
        self.state = after

    def _fence(self, after: State) -> None:
        """Wait for a checkpoint that Megatron may still be writing, before what it reads leaves the device."""
        finalize = getattr(self.legacy, "finalize_async_save", None)
        tiers = [(self.state.tier(name), after.tier(name)) for name in ("params", "optimizer")]
        leaves = any(now is not Tier.HOST and then is Tier.HOST for now, then in tiers)
        if self.traits.is_megatron and leaves and finalize is not None:
            finalize()

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
