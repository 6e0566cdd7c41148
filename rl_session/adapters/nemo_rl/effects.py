"""What each legacy lifecycle method does to a trainer, and the shortest way from one placement to another.

Pure: a state of knowledge (a tier for each component, None where nobody can know), the effect of each method on it, the goal
that a mode asks for, and a search for the fewest calls. That nothing redundant is called is a property of the search, not
of a list of special cases. The effects are those of the tables A.2, A.4 and A.5 of the legacy contract.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import attrs

from rl_session.adapters.nemo_rl.traits import TrainerTraits
from rl_session.lifecycle import Mode, Placement, Tier

__all__ = ["COMPONENTS", "Call", "Goal", "State", "effect", "exactly", "found", "goal", "plan", "touched"]

COMPONENTS = ("params", "buffers", "grads", "optimizer")


class Call(NamedTuple):
    """One legacy call; ``keep`` is ``keep_train_buffers=True``."""

    method: str
    keep: bool = False

    @property
    def kwargs(self) -> dict[str, bool]:
        """Its keyword arguments, without those that are the default: a value's methods take none."""
        return {"keep_train_buffers": True} if self.keep else {}

    def __str__(self) -> str:
        return f"{self.method}({'keep_train_buffers=True' if self.keep else ''})"


@attrs.frozen(kw_only=True)
class State:
    """What is known of a trainer: a tier for each component, None for not known.

    ``training`` is the sticky train or eval flag. It is known only until the user's next compute call, which sets it too.
    """

    params: Tier | None = None
    buffers: Tier | None = None
    grads: Tier | None = None
    optimizer: Tier | None = None
    training: bool | None = None

    def tier(self, component: str) -> Tier | None:
        """Where a component is, None for not known."""
        tier: Tier | None = getattr(self, component)
        return tier


class Goal(NamedTuple):
    """What has to hold: component to tier (what is not named may be anywhere), and whether train mode is needed."""

    tiers: Mapping[str, Tier]
    training: bool = False

    def holds(self, state: State) -> bool:
        """Whether ``state`` is known to fulfil it."""
        there = all(state.tier(name) is tier for name, tier in self.tiers.items())
        return there and (not self.training or state.training is True)

    def without(self, component: str) -> Goal:
        """The same goal with one component left to itself."""
        return Goal({name: tier for name, tier in self.tiers.items() if name != component}, self.training)


def found(traits: TrainerTraits, where: Tier | None) -> State:
    """The state of an object of which is known that it is on the device, on the host, or nothing (None).

    What no method moves is where it always is: nothing of DTensor's gradients between calls, the host for what a native
    CPU offload owns. Megatron's methods do not move module buffers: they are no component of it.
    """
    grads = None if where is None else Tier.DEVICE if where is Tier.DEVICE else Tier.NONE
    return State(
        params=where if traits.weights_move else Tier.HOST,
        buffers=Tier.NONE if traits.is_megatron else where,
        grads=grads if traits.has_grad_buffer else Tier.NONE,
        optimizer=where if traits.optimizer_moves else Tier.HOST if traits.optimizer else Tier.NONE,
    )


# -- effects ---------------------------------------------------------------------------------------------------------


def _weights(state: State, traits: TrainerTraits, tier: Tier) -> State:
    return attrs.evolve(
        state,
        params=tier if traits.weights_move else state.params,
        buffers=state.buffers if traits.is_megatron else tier,
    )


def _optimizer(state: State, traits: TrainerTraits, tier: Tier, *, when: bool = True) -> State:
    return attrs.evolve(state, optimizer=tier) if when and traits.optimizer_moves else state


def _grads(state: State, traits: TrainerTraits, tier: Tier) -> State:
    return attrs.evolve(state, grads=tier) if traits.has_grad_buffer else state


def _prepare_for_training(state: State, traits: TrainerTraits, _keep: bool) -> State:
    state = _grads(_weights(state, traits, Tier.DEVICE), traits, Tier.DEVICE)
    return attrs.evolve(_optimizer(state, traits, Tier.DEVICE), training=True)


def _prepare_for_lp_inference(state: State, traits: TrainerTraits, keep: bool) -> State:
    state = _weights(state, traits, Tier.DEVICE)
    if not keep:
        state = _grads(state, traits, Tier.NONE)
        state = _optimizer(state, traits, Tier.HOST, when=traits.offload_optimizer_for_logprob)
    return attrs.evolve(state, training=False)


def _offload_before_refit(state: State, traits: TrainerTraits, _keep: bool) -> State:
    return _optimizer(_grads(state, traits, Tier.NONE), traits, Tier.HOST, when=traits.offloads_for_refit)


def _offload_after_refit(state: State, traits: TrainerTraits, keep: bool) -> State:
    state = _weights(_offload_before_refit(state, traits, keep), traits, Tier.HOST)
    return attrs.evolve(state, training=False)


def _prepare_for_inference(state: State, traits: TrainerTraits, _keep: bool) -> State:
    state = _grads(_weights(state, traits, Tier.DEVICE), traits, Tier.NONE)
    return attrs.evolve(state, training=False)


def _finish_inference(state: State, traits: TrainerTraits, _keep: bool) -> State:
    return _weights(state, traits, Tier.HOST)  # the optimizer and the gradients stay, and so does the mode of a value


def _finish_training(state: State, traits: TrainerTraits, _keep: bool) -> State:
    state = _grads(_weights(state, traits, Tier.HOST), traits, Tier.NONE)
    return attrs.evolve(_optimizer(state, traits, Tier.HOST), training=False)


_EFFECTS: Mapping[str, Callable[[State, TrainerTraits, bool], State]] = {
    "prepare_for_training": _prepare_for_training,
    "prepare_for_lp_inference": _prepare_for_lp_inference,
    "offload_before_refit": _offload_before_refit,
    "offload_after_refit": _offload_after_refit,
    "prepare_for_inference": _prepare_for_inference,
    "finish_inference": _finish_inference,
    "finish_training": _finish_training,
}

# Releases come first: of two ways of the same length, the one with the lower peak is found first. A policy's
# finish_inference is left out: DTensor v1 has none, it leaves the optimizer, and it does not wait for an asynchronous save
# as offload_after_refit does. Policy.finish_training does nothing.
_VOCABULARY: Mapping[str, tuple[Call, ...]] = {
    "policy": (
        Call("offload_before_refit"),
        Call("offload_after_refit"),
        Call("prepare_for_lp_inference"),
        Call("prepare_for_lp_inference", keep=True),
        Call("prepare_for_training"),
    ),
    "value": (
        Call("finish_inference"),
        Call("finish_training"),
        Call("prepare_for_inference"),
        Call("prepare_for_training"),
    ),
}
_LONGEST = 2
"""No mode is further than two calls from any state (a test goes through all of them)."""


def effect(state: State, call: Call, traits: TrainerTraits) -> State:
    """The state after a call that succeeded."""
    return _EFFECTS[call.method](state, traits, call.keep)


def touched(call: Call, traits: TrainerTraits) -> frozenset[str]:
    """The components that a call may have moved, part of the way, when it failed."""
    after = effect(State(), call, traits)
    return frozenset(name for name in COMPONENTS if after.tier(name) is not None)


# -- goals -----------------------------------------------------------------------------------------------------------


def goal(
    mode: Mode,
    now: State,
    traits: TrainerTraits,
    *,
    lazy: bool = False,
    keep: bool = False,
    stored: Placement | None = None,
    training: bool = False,
) -> Goal:
    """What a mode asks for.

    Args:
        mode: The mode to reach.
        now: What is known.
        traits: Of the object.
        lazy: Gradients on the device may stay in LOGPROB. The optimizer flags are obeyed all the same: no budget is known
            here, and whoever set them said that the memory is needed.
        keep: Gradients and optimizer stay as they are (``keep_train_buffers``).
        stored: On the way back to an outer scope, its placement: what its entry left alone comes back to it.
        training: Whether train mode is needed: an open step relies on it.
    """
    wanted: Mapping[str, Tier | None]
    if mode in (Mode.TRAINING, Mode.RESIDENT):
        wanted = dict.fromkeys(COMPONENTS, Tier.DEVICE)
    elif mode is Mode.OFFLOADED:
        wanted = dict.fromkeys(COMPONENTS, Tier.HOST) | {"grads": Tier.NONE}
    else:
        offloads = traits.offloads_for_logprob if mode is Mode.LOGPROB else traits.offloads_for_refit
        was = stored["optimizer"] if stored is not None else Tier.NONE
        as_it_was = now.optimizer if was is Tier.NONE else was  # NONE: not known in the outer scope, or not there
        wanted = {
            "params": Tier.DEVICE,
            "buffers": Tier.DEVICE,
            "grads": now.grads if keep else None if lazy and mode is Mode.LOGPROB else Tier.NONE,
            "optimizer": Tier.HOST if offloads and not keep else as_it_was,
        }
    movable = {
        "params": traits.weights_move,
        "buffers": not traits.is_megatron,
        "grads": traits.has_grad_buffer,
        "optimizer": traits.optimizer_moves,
    }
    return Goal({name: tier for name, tier in wanted.items() if tier is not None and movable[name]}, training)


def exactly(state: State) -> Goal:
    """To be as in ``state`` again, as far as it was known."""
    return Goal({name: tier for name in COMPONENTS if (tier := state.tier(name)) is not None})


# -- the search ------------------------------------------------------------------------------------------------------


def plan(now: State, wanted: Goal, traits: TrainerTraits, *, protect_grads: bool = False) -> tuple[Call, ...] | None:
    """The fewest legacy calls from what is known to a goal; None when no two calls reach it.

    Args:
        now: What is known.
        wanted: The goal.
        traits: Of the object.
        protect_grads: Whether a call that destroys gradients is no option.
    """
    for calls in _sequences(traits):
        state = now
        destroys = False
        for call in calls:
            before, state = state, effect(state, call, traits)
            destroys |= before.grads is not Tier.NONE and state.grads is Tier.NONE
        if wanted.holds(state) and not (destroys and protect_grads):
            return calls
    return None


def _sequences(traits: TrainerTraits) -> Iterator[tuple[Call, ...]]:
    for length in range(_LONGEST + 1):
        yield from itertools.product(_VOCABULARY[traits.kind], repeat=length)
