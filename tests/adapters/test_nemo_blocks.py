"""What migrated loops lean on: a refit as a block, around our calls or a legacy helper's; engines that rest awake."""

from __future__ import annotations

import asyncio

import pytest
from legacy_model import CPU, FREED, GPU, NONE, Gpus, LegacyGeneration, LegacyPolicy, LegacyValue

import rl_session as rs
from rl_session.adapters.nemo_rl import scopes, share

ASLEEP = {"weights": CPU, "kv_cache": NONE}
AWAKE = {"weights": GPU, "kv_cache": GPU}


def helper(policy: LegacyPolicy, generation: LegacyGeneration, error: Exception | None = None) -> str:
    """A legacy refit helper: it makes the lifecycle calls of both sides by itself."""
    if generation.colocated:
        policy.offload_before_refit()
        generation.prepare_for_generation(tags=["weights"])
    if policy.state["params"] != GPU:
        raise AssertionError("the transfer reads parameters that are away")
    if error is not None:
        raise error
    if generation.colocated:
        policy.offload_after_refit()
        generation.prepare_for_generation(tags=["kv_cache"])
    return "pushed"


def colocated(backend: str = "megatron") -> tuple[LegacyPolicy, LegacyValue, LegacyGeneration]:
    gpus = Gpus()
    policy = LegacyPolicy(backend, gpus=gpus)
    policy.offload_to_cpu()
    value = LegacyValue(backend, gpus=gpus)
    value.finish_training()
    generation = LegacyGeneration("vllm", gpus=gpus)
    share(policy, value, generation)
    for each in (policy, value, generation):
        each.calls()
    return policy, value, generation


def test_a_refit_as_a_block_makes_the_calls_of_a_refit_with_a_function() -> None:
    policy, _, generation = colocated()
    with scopes(policy).refit(generation) as nothing:
        assert nothing is None
        assert policy.state == {"params": GPU, "buffers": NONE, "grads": FREED, "optimizer": CPU}
        assert generation.state == {"weights": GPU, "kv_cache": NONE}
    first = policy.calls(), generation.calls()
    assert generation.state == AWAKE
    assert policy.state["params"] == CPU
    with scopes(policy).training_mode():
        pass
    policy.calls(), generation.calls()
    assert scopes(policy).refit(generation, lambda: 7) == 7
    assert (policy.calls()[-1], generation.calls()) == (first[0][-1], first[1][-2:])


def test_a_block_that_fails_puts_both_sides_back() -> None:
    policy, _, generation = colocated()
    with pytest.raises(ValueError, match="torn"), scopes(policy).refit(generation):
        raise ValueError("torn")
    assert generation.state == ASLEEP
    with scopes(policy).refit(generation):
        pass
    assert generation.state == AWAKE


def test_a_legacy_helper_finds_the_parameters_in_and_the_others_out() -> None:
    policy, value, generation = colocated()
    with scopes(value).training_mode():
        value.train()
    assert value.state["params"] == GPU  # lazily
    with scopes(policy).legacy_refit(generation):
        assert value.state["params"] == CPU
        assert policy.state["params"] == GPU
        assert helper(policy, generation) == "pushed"
    policy.calls(), generation.calls()
    with scopes(generation).awake():
        generation.generate()
    assert policy.calls() == []
    assert generation.calls() == ["generate()"]
    with scopes(policy).logprob_mode():
        policy.get_logprobs()
    assert generation.state == ASLEEP


def test_a_helper_that_was_migrated_runs_in_the_same_block() -> None:
    policy, _, generation = colocated()
    with scopes(policy).legacy_refit(generation), scopes(policy).refit(generation):
        pass
    assert generation.state == AWAKE
    assert policy.state["params"] == CPU
    generation.calls()
    with scopes(generation).awake():
        pass
    assert generation.calls() == []


def test_after_a_helper_that_failed_nothing_is_believed() -> None:
    policy, _, generation = colocated()
    with pytest.raises(RuntimeError, match="transfer"), scopes(policy).legacy_refit(generation):
        helper(policy, generation, RuntimeError("transfer"))
    assert generation.state["weights"] == GPU  # the helper left it half awake
    with scopes(policy).training_mode():
        policy.train()
    assert generation.state == ASLEEP


def test_a_legacy_helper_of_an_engine_with_its_own_gpus_moves_nothing_else() -> None:
    policy, generation = LegacyPolicy("dtensor_v2"), LegacyGeneration("vllm", colocated=False)
    share(policy, generation, only_colocated=True)
    with scopes(policy).training_mode():
        policy.train()
    policy.calls()
    with scopes(policy).legacy_refit(generation):
        helper(policy, generation)
    assert policy.state["params"] == GPU
    assert generation.calls() == []
    with scopes(policy).training_mode():
        policy.train()


def test_a_legacy_helper_under_eager_release_finds_the_parameters_in() -> None:
    gpus = Gpus()
    policy, generation = LegacyPolicy("megatron", gpus=gpus), LegacyGeneration("vllm", gpus=gpus)
    share(policy, generation, release="eager")
    with scopes(policy).training_mode():
        policy.train()
    assert policy.state["params"] == CPU
    with scopes(policy).legacy_refit(generation):
        assert policy.state["params"] == GPU
        helper(policy, generation)
    with scopes(generation).awake():
        generation.generate()
    assert generation.state == ASLEEP


def test_the_weights_of_a_colocated_megatron_engine_stay_in() -> None:
    policy = LegacyPolicy("megatron")
    generation = LegacyGeneration("megatron", policy=policy)
    share(policy, generation)
    with scopes(policy).legacy_refit(generation):
        policy.offload_before_refit()
        generation.prepare_for_generation(tags=["colocated_refit"])
    generation.calls()
    with scopes(generation).awake():
        generation.generate()
    assert generation.calls() == ["generate()"]
    assert policy.state["params"] == GPU


def test_a_legacy_refit_inside_a_scope_of_either_side_is_refused() -> None:
    policy, _, generation = colocated()
    with scopes(policy).logprob_mode():
        with pytest.raises(rs.ScopeError, match="after that block"), scopes(policy).legacy_refit(generation):
            pass
    with scopes(generation).awake():
        with pytest.raises(rs.ScopeError, match="after that block"), scopes(policy).legacy_refit(generation):
            pass
    with pytest.raises(rs.UsageError, match="legacy_refit"), scopes(policy).legacy_refit(policy):
        pass


def test_an_engine_rests_awake_until_it_is_put_to_sleep() -> None:
    policy, _, generation = colocated()
    scopes(generation).wake()
    assert generation.state == AWAKE
    generation.generate()
    with scopes(generation).awake():
        generation.generate()
    assert generation.state == AWAKE
    scopes(generation).sleep()
    assert generation.state == ASLEEP
    assert generation.calls() == ["prepare_for_generation()", "generate()", "generate()", "finish_generation()"]
    scopes(generation).wake(tags=["weights"])
    assert generation.state == {"weights": GPU, "kv_cache": NONE}
    scopes(generation).wake()
    assert generation.calls() == ["prepare_for_generation(tags=['weights'])", "prepare_for_generation()"]
    with scopes(policy).training_mode():
        policy.train()
    assert generation.state == ASLEEP


def test_an_engine_that_somebody_else_put_to_sleep_is_woken_again() -> None:
    """As where a rollout actor, in another process, ends the generation that the loop began."""
    policy, _, generation = colocated()
    scopes(generation).wake()
    generation.finish_generation()  # behind our back
    scopes(generation).wake()
    assert generation.state == AWAKE
    scopes(generation).sleep()
    generation.prepare_for_generation()
    scopes(generation).sleep()
    assert generation.state == ASLEEP
    with scopes(policy).training_mode():
        policy.train()


def test_a_wake_that_says_false_is_an_error_and_leaves_it_asleep() -> None:
    _, _, generation = colocated()
    generation.fail("prepare_for_generation")
    with pytest.raises(rs.EngineError, match="returned False"):
        scopes(generation).wake()
    assert generation.state == ASLEEP
    scopes(generation).wake()
    assert generation.state == AWAKE


def test_a_wake_sends_the_others_away_first() -> None:
    policy, _, generation = colocated()
    with scopes(policy).training_mode():
        policy.train()
        with pytest.raises(rs.NestingError):
            scopes(generation).wake()
    assert policy.state["params"] == GPU
    scopes(generation).wake()
    assert policy.state["params"] == CPU


def test_a_policy_that_generates_by_itself_is_no_engine_and_nothing_moves() -> None:
    policy = LegacyPolicy("megatron")
    share(policy, policy, None, only_colocated=True)
    before = dict(policy.state)
    with scopes(policy).awake(tags=["weights"]):
        pass
    scopes(policy).wake()
    scopes(policy).sleep()

    async def also_so() -> None:
        async with scopes(policy).awake():
            pass

    asyncio.run(also_so())
    assert policy.calls() == []
    assert policy.state == before


def test_sharing_only_what_is_colocated_serves_every_topology() -> None:
    policy, value = LegacyPolicy("megatron"), LegacyValue("megatron")
    own = LegacyGeneration("vllm", colocated=False)
    assert share(policy, own, None, policy, only_colocated=True) == (scopes(policy),)
    assert share(policy, value, only_colocated=True) == (scopes(policy), scopes(value))  # the value joins
    assert scopes(value).group.sharing is scopes(policy).group.sharing
    assert scopes(own).group.sharing is None
    with scopes(policy).training_mode():
        policy.train()
    with scopes(value).inference_mode():
        assert policy.state["params"] == CPU


def test_who_joins_later_must_not_be_in_a_scope() -> None:
    policy, value = LegacyPolicy("megatron"), LegacyValue("megatron")
    share(policy)
    with scopes(policy).training_mode(), scopes(value).training_mode():
        with pytest.raises(rs.ScopeError, match="before the loop"):
            share(policy, value)
        assert share(policy) == (scopes(policy),)
