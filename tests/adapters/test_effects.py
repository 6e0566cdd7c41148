"""The pure model of the legacy methods, and the search for the fewest of them, against the model of the objects themselves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from legacy_model import CPU, FREED, GPU, NONE, LegacyPolicy, LegacyValue

from rl_session.adapters.nemo_rl.effects import (
    _VOCABULARY,
    COMPONENTS,
    Call,
    State,
    effect,
    exactly,
    found,
    goal,
    plan,
    touched,
)
from rl_session.adapters.nemo_rl.traits import TrainerTraits
from rl_session.lifecycle import Facts, Flags, Mode, Placement, Tier, resolve

TIERS = {GPU: Tier.DEVICE, CPU: Tier.HOST, FREED: Tier.NONE, NONE: Tier.NONE}
FLAGS = ("offload_optimizer_for_logprob", "offload_optimizer_for_refit", "cpu_offload", "optimizer_cpu_offload")


def all_flags() -> list[dict[str, bool]]:
    combinations = itertools.product((False, True), repeat=5)
    return [dict(zip((*FLAGS, "optimizer"), values, strict=True)) for values in combinations]


def seen(legacy: Any) -> State:
    """What of a legacy object can be seen from outside."""
    return State(training=legacy.training, **{name: TIERS[legacy.state[name]] for name in COMPONENTS})


def make(kind: str, backend: str, flags: dict[str, bool]) -> tuple[Any, TrainerTraits]:
    if kind == "policy":
        legacy: Any = LegacyPolicy("megatron" if backend == "megatron" else "dtensor_v2", **flags)
    else:
        legacy = LegacyValue("megatron" if backend == "megatron" else "dtensor_v2", **flags)
    return legacy, TrainerTraits(kind=kind, backend=backend, **flags)  # type: ignore[arg-type]


def run(legacy: Any, calls: Any) -> None:
    for call in calls:
        getattr(legacy, call.method)(**call.kwargs)


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
@pytest.mark.parametrize("kind", ["policy", "value"])
class TestEveryState:
    def test_each_method_does_what_the_legacy_object_does(self, kind: str, backend: str) -> None:
        for flags in all_flags():
            for first, second, third in itertools.product(_VOCABULARY[kind], repeat=3):
                legacy, traits = make(kind, backend, flags)
                state = seen(legacy)
                for call in (first, second, third):
                    run(legacy, [call])
                    state = effect(state, call, traits)
                    assert state == seen(legacy), (flags, first, second, third)

    def test_what_is_known_from_nothing_is_true_from_everywhere(self, kind: str, backend: str) -> None:
        for flags in all_flags():
            for call, before in itertools.product(_VOCABULARY[kind], repeat=2):
                legacy, traits = make(kind, backend, flags)
                run(legacy, [before, call])
                known = effect(found(traits, None), call, traits)
                for name in COMPONENTS:
                    assert known.tier(name) in (None, seen(legacy).tier(name))
                assert touched(call, traits) <= set(COMPONENTS)

    def test_the_plan_reaches_the_goal_of_every_mode_with_the_fewest_calls(self, kind: str, backend: str) -> None:
        modes = [Mode.TRAINING, Mode.LOGPROB, Mode.OFFLOADED, *([Mode.REFIT] if kind == "policy" else [])]
        for flags in all_flags():
            for first, second, mode in itertools.product(_VOCABULARY[kind], _VOCABULARY[kind], modes):
                legacy, traits = make(kind, backend, flags)
                run(legacy, [first, second])
                wanted = goal(mode, seen(legacy), traits)
                calls = plan(seen(legacy), wanted, traits)
                if calls is None:  # optimizer state that no legacy method can take off the device
                    assert not (traits.offload_optimizer_for_refit and traits.offload_optimizer_for_logprob)
                    wanted = wanted.without("optimizer")
                    calls = plan(seen(legacy), wanted, traits)
                assert calls is not None
                assert bool(calls) != wanted.holds(seen(legacy))
                run(legacy, calls)
                assert wanted.holds(seen(legacy)), (flags, first, second, mode, calls)

    def test_the_goal_of_a_mode_is_what_the_mode_table_declares(self, kind: str, backend: str) -> None:
        for flags in all_flags():
            for first, mode in itertools.product(_VOCABULARY[kind], [Mode.TRAINING, Mode.LOGPROB, Mode.OFFLOADED]):
                legacy, traits = make(kind, backend, flags)
                run(legacy, [first])
                now = seen(legacy)
                facts = Facts(
                    placement=Placement({name: TIERS[where] for name, where in legacy.state.items()}),
                    freed_in_place=frozenset({"grads"} if traits.has_grad_buffer else ()),
                )
                declared = resolve(
                    mode,
                    facts,
                    Flags(
                        offload_optimizer_for_logprob=traits.offloads_for_logprob and traits.optimizer_moves,
                        offload_optimizer_for_refit=traits.offloads_for_refit,
                        weights_move=traits.weights_move,
                    ),
                )
                wanted = goal(mode, now, traits)
                for name, tier in wanted.tiers.items():
                    if now.tier(name) is not Tier.NONE or name == "grads":
                        assert declared[name] is tier, (flags, first, mode, name)

    def test_from_nothing_known_every_mode_is_reached(self, kind: str, backend: str) -> None:
        for flags in all_flags():
            for first, mode in itertools.product(_VOCABULARY[kind], [Mode.TRAINING, Mode.LOGPROB, Mode.OFFLOADED]):
                legacy, traits = make(kind, backend, flags)
                run(legacy, [first])
                wanted = goal(mode, found(traits, None), traits)
                calls = plan(found(traits, None), wanted, traits)
                if calls is None:
                    wanted = wanted.without("optimizer")
                    calls = plan(found(traits, None), wanted, traits)
                assert calls is not None
                run(legacy, calls)
                assert wanted.holds(seen(legacy))


def test_releases_come_before_onloads() -> None:
    traits = TrainerTraits(kind="policy", backend="megatron")
    state = State(params=Tier.HOST, buffers=Tier.NONE, grads=Tier.DEVICE, optimizer=Tier.DEVICE)
    calls = plan(state, goal(Mode.REFIT, state, traits), traits)
    assert calls == (Call("offload_before_refit"), Call("prepare_for_lp_inference"))


def test_protected_gradients_are_never_destroyed() -> None:
    traits = TrainerTraits(kind="policy", backend="megatron", split_steps=True)
    state = State(params=Tier.HOST, buffers=Tier.NONE, grads=Tier.DEVICE, optimizer=Tier.HOST)
    wanted = goal(Mode.LOGPROB, state, traits, keep=True)
    calls = plan(state, wanted, traits, protect_grads=True)
    assert calls == (Call("prepare_for_lp_inference", keep=True),)
    assert plan(state, exactly(found(traits, Tier.HOST)), traits, protect_grads=True) is None


def test_a_call_shows_as_it_is_written() -> None:
    assert str(Call("prepare_for_lp_inference", keep=True)) == "prepare_for_lp_inference(keep_train_buffers=True)"
    assert str(Call("finish_training")) == "finish_training()"
