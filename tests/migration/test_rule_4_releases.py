"""A release is never just dropped: a scope makes the room next, on every path, or it becomes an explicit offload()."""

from __future__ import annotations

import pytest
from rewriting import check, kept, migrated


def test_nothing_happens_to_a_release_whose_call_is_passed_on() -> None:
    kept("def f(policy, later):\n    later(policy.offload_to_cpu)\n", "the method is passed as a value", changed=False)


@pytest.mark.parametrize(
    "method", ["offload_to_cpu", "offload_after_refit", "offload_before_refit", "finish_inference"]
)
def test_a_release_becomes_an_offload(method: str) -> None:
    check(
        f"def f(policy):\n    policy.{method}()  # make room\n",
        "def f(policy):\n    share(policy, only_colocated=True)\n    scopes(policy).offload()  # make room\n",
    )


def test_a_critic_releases_by_two_names_and_a_policy_by_one_that_does_nothing() -> None:
    check(
        "def f(value_model):\n    value_model.finish_inference()\n    value_model.finish_training()\n",
        "def f(value_model):\n    share(value_model, only_colocated=True)\n"
        "    scopes(value_model).offload()\n    scopes(value_model).offload()\n",
    )
    check(
        "def f(policy):\n    x = 1\n    policy.finish_training()\n    return x\n",
        "def f(policy):\n    x = 1\n    return x\n",
    )


def test_a_release_before_a_scope_of_a_tenant_that_shares_goes() -> None:
    check(
        """
        def f(policy, value_model, batch):
            value_model.prepare_for_inference()
            values = value_model.get_values(batch)
            value_model.finish_inference()
            policy.prepare_for_training()
            policy.train(batch, None)
            policy.offload_to_cpu()
        """,
        """
        def f(policy, value_model, batch):
            share(policy, value_model, only_colocated=True)
            with scopes(value_model).inference_mode():
                values = value_model.get_values(batch)
            with scopes(policy).training_mode():
                policy.train(batch, None)
            scopes(policy).offload()
        """,
    )


@pytest.mark.parametrize(
    "between",
    [
        "if batch: policy_generation.prepare_for_generation()",
        "rollout(policy_generation, batch)",
        "batch['input_ids'].cuda()",
        "return None",
        "if batch: return None",
        "if batch: pool.submit(policy.get_logprobs, batch)",
    ],
)
def test_a_release_stays_where_something_else_may_want_the_room_first(between: str) -> None:
    text = migrated(
        f"""
        def f(policy, value_model, policy_generation, batch, pool):
            value_model.prepare_for_inference()
            value_model.get_values(batch)
            value_model.finish_inference()
            {between}
            policy.prepare_for_lp_inference()
            policy.get_logprobs(batch)
            policy.offload_to_cpu()
        """
    ).after.decode()
    assert "    scopes(value_model).offload()\n" in text


def test_a_release_before_a_wake_that_stays_a_call_stays() -> None:
    check(
        """
        def f(policy, policy_generation, actor, batch):
            policy.offload_to_cpu()
            policy_generation.prepare_for_generation()
            wait(actor.rollout.remote(batch))
            policy.prepare_for_lp_inference()
            return policy.get_logprobs(batch)
        """,
        """
        def f(policy, policy_generation, actor, batch):
            share(policy, policy_generation, only_colocated=True)
            scopes(policy).offload()
            scopes(policy_generation).wake()
            wait(actor.rollout.remote(batch))
            with scopes(policy).logprob_mode():
                return policy.get_logprobs(batch)
        """,
    )


def test_a_release_of_a_tenant_that_is_not_registered_here_stays() -> None:
    """Who shares is said of those that have scopes in the function: nobody would send this one away."""
    check(
        """
        def f(policy, value_model, batch):
            value_model.finish_training()
            policy.prepare_for_training()
            policy.train(batch, None)
        """,
        """
        def f(policy, value_model, batch):
            share(policy, value_model, only_colocated=True)
            scopes(value_model).offload()
            with scopes(policy).training_mode():
                policy.train(batch, None)
        """,
    )


def test_a_release_that_is_all_of_a_block_stays_as_a_call() -> None:
    text = migrated(
        """
        def f(policy, policy_generation, batch, colocated):
            for x in batch:
                if colocated:
                    policy.offload_after_refit()  # room for the engine
                policy_generation.prepare_for_generation()
                rollout(policy_generation, x)
                policy_generation.finish_generation()
                policy.prepare_for_training()
                policy.train(x, None)
        """
    ).after.decode()
    room = "        if colocated:\n            scopes(policy).offload()  # room for the engine\n"
    assert f"{room}        with scopes(policy_generation)" in text


def test_a_release_on_only_some_paths_keeps_its_condition() -> None:
    text = migrated(
        """
        def f(policy, value_model, epochs, batch):
            for epoch in range(epochs):
                value_model.prepare_for_training()
                value_model.train(batch, None)
                value_model.finish_training()
                policy.prepare_for_training()
                policy.train(batch, None)
                if epoch + 1 < epochs:
                    policy.offload_to_cpu()
        """
    ).after.decode()
    assert "        if epoch + 1 < epochs:\n            scopes(policy).offload()\n" in text
