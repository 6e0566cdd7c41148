"""Scopes are written for handles as they are: no wrapper objects, one import, one line that says who shares the device."""

from __future__ import annotations

import pytest
from rewriting import IMPORT, check, migrated, rewritten

from rl_session_migrate.receivers import Names


def test_nothing_happens_without_a_lifecycle_call() -> None:
    code = "def evaluate(policy, batch):\n    return policy.get_logprobs(batch)\n"
    result = migrated(code)
    assert not result.changed
    assert result.outcomes == ()


def test_every_compute_call_gets_the_scope_of_its_mode() -> None:
    outcomes = check(
        """
        def step(policy, value_model, batch, loss_fn):
            policy.prepare_for_lp_inference()
            prev = policy.get_logprobs(batch)
            policy.prepare_for_training()
            policy.train(batch, loss_fn)
            policy.offload_after_refit()
            value_model.prepare_for_inference()
            values = value_model.get_values(batch)
            value_model.finish_inference()
            value_model.prepare_for_training()
            value_model.train(batch, loss_fn)
            value_model.finish_training()
        """,
        """
        def step(policy, value_model, batch, loss_fn):
            share(policy, value_model, only_colocated=True)
            with scopes(policy).logprob_mode():
                prev = policy.get_logprobs(batch)
            with scopes(policy).training_mode():
                policy.train(batch, loss_fn)
            with scopes(value_model).inference_mode():
                values = value_model.get_values(batch)
            with scopes(value_model).training_mode():
                value_model.train(batch, loss_fn)
            scopes(value_model).offload()
        """,
    )
    assert rewritten(outcomes)
    assert [outcome.why for outcome in outcomes[:2]] == ["logprob_mode()", "training_mode()"]


@pytest.mark.parametrize(
    ("call", "scope"),
    [
        ("policy.get_reference_policy_logprobs(b)", "logprob_mode()"),
        ("policy.get_topk_logits(b, k=4)", "logprob_mode()"),
        ("policy.score(b)", "logprob_mode()"),
        ("policy.get_logprobs_from_meta(b)", "logprob_mode()"),
        ("policy.calibrate_qkv_fp8_scales(b)", "logprob_mode()"),
    ],
)
def test_the_mode_of_inference(call: str, scope: str) -> None:
    check(
        f"def f(policy, b):\n    policy.prepare_for_lp_inference()\n    {call}\n",
        f"def f(policy, b):\n    share(policy, only_colocated=True)\n    with scopes(policy).{scope}:\n        {call}\n",
    )


@pytest.mark.parametrize(
    "call",
    [
        "policy.train(b, f)",
        "policy.train(b, f, eval_mode=True)",
        "policy.train_from_meta(b)",
        "policy.save_checkpoint(b)",
    ],
)
def test_what_needs_the_whole_policy(call: str) -> None:
    check(
        f"def f(policy, b):\n    policy.prepare_for_training()\n    {call}\n",
        f"def f(policy, b):\n    share(policy, only_colocated=True)\n    with scopes(policy).training_mode():\n        {call}\n",
    )


def test_inference_that_ran_on_what_training_placed_leaves_gradients_and_optimizer_there() -> None:
    check(
        """
        def f(policy, batches, loss_fn):
            policy.prepare_for_training()
            for batch in batches:
                ref = policy.get_reference_policy_logprobs(batch)
                policy.train(batch, loss_fn)
        """,
        """
        def f(policy, batches, loss_fn):
            share(policy, only_colocated=True)
            for batch in batches:
                with scopes(policy).logprob_mode(keep_train_buffers=True):
                    ref = policy.get_reference_policy_logprobs(batch)
                with scopes(policy).training_mode():
                    policy.train(batch, loss_fn)
        """,
    )


def test_handles_that_are_attributes() -> None:
    check(
        """
        class Trainer:
            def __init__(self, policy):
                self._policy = policy

            def step(self, batch):
                self._policy.prepare_for_training()
                return self._policy.train(batch, self.loss_fn)
        """,
        """
        class Trainer:
            def __init__(self, policy):
                self._policy = policy

            def step(self, batch):
                share(self._policy, only_colocated=True)
                with scopes(self._policy).training_mode():
                    return self._policy.train(batch, self.loss_fn)
        """,
    )


def test_handles_that_are_elements_of_a_list_are_not_registered() -> None:
    result = migrated(
        "def f(teacher_policies, batch):\n"
        "    for teacher_policy in teacher_policies:\n"
        "        teacher_policy.prepare_for_lp_inference()\n"
        "        teacher_policy.get_topk_logits(batch, 4)\n"
        "        teacher_policy.offload_after_refit()\n"
    )
    assert result.after.decode() == (
        "from rl_session.adapters.nemo_rl import scopes\n\n\n"
        "def f(teacher_policies, batch):\n"
        "    for teacher_policy in teacher_policies:\n"
        "        with scopes(teacher_policy).logprob_mode():\n"
        "            teacher_policy.get_topk_logits(batch, 4)\n"
        "        scopes(teacher_policy).offload()\n"
    )


def test_a_tenant_made_in_the_function_is_registered_once_it_is_there() -> None:
    check(
        """
        from nemo_rl.models.policy.lm_policy import Policy

        def main(config, batch):
            policy = Policy(config)
            policy.prepare_for_training()
            policy.train(batch, None)
        """,
        """
        from nemo_rl.models.policy.lm_policy import Policy

        def main(config, batch):
            policy = Policy(config)
            share(policy, only_colocated=True)
            with scopes(policy).training_mode():
                policy.train(batch, None)
        """,
    )


def test_the_line_that_says_who_shares_stands_before_helpers_that_open_scopes() -> None:
    check(
        """
        def validate(policy, batch):
            policy.prepare_for_training()
            return policy.train(batch, None, eval_mode=True)


        def train(policy, batches):
            validate(policy, batches[0])
            policy.prepare_for_training()
            for batch in batches:
                policy.train(batch, None)
        """,
        """
        def validate(policy, batch):
            with scopes(policy).training_mode():
                return policy.train(batch, None, eval_mode=True)


        def train(policy, batches):
            share(policy, only_colocated=True)
            validate(policy, batches[0])
            for batch in batches:
                with scopes(policy).training_mode():
                    policy.train(batch, None)
        """,
    )


def test_names_that_are_taken_are_imported_under_others() -> None:
    result = migrated(
        """
        from app import scopes

        def f(policy, batch, share=0.5):
            policy.prepare_for_training()
            policy.train(batch, share)
        """
    )
    text = result.after.decode()
    assert "from rl_session.adapters.nemo_rl import scopes as rl_scopes, share as rl_share\n" in text
    assert "    rl_share(policy, only_colocated=True)\n    with rl_scopes(policy).training_mode():\n" in text


def test_an_import_that_is_there_is_extended() -> None:
    result = migrated(
        """
        '''A loop.'''
        from __future__ import annotations
        from rl_session.adapters.nemo_rl import (
            LegacyHandle,
        )

        def f(policy, batch):
            policy.prepare_for_training()
            policy.train(batch, None)
        """
    )
    assert "import (\n    LegacyHandle, scopes, share,\n)" in result.after.decode()


def test_the_import_stands_behind_the_others() -> None:
    text = migrated(
        """
        #!/usr/bin/env python
        '''A loop.'''

        from __future__ import annotations

        import os
        from .helpers import x

        LEVEL = os.environ

        def f(policy, batch):
            policy.prepare_for_training()
            policy.train(batch, None)
        """
    ).after.decode()
    assert "import os\n" + IMPORT + "from .helpers import x\n" in text


def test_names_from_the_configuration() -> None:
    before = "def f(learner, b):\n    learner.prepare_for_training()\n    learner.train(b, None)\n"
    unknown = migrated(before)
    assert [outcome.tenant for outcome in unknown.outcomes] == ["unknown"]
    assert not unknown.changed
    after = (
        "def f(learner, b):\n    share(learner, only_colocated=True)\n"
        "    with scopes(learner).training_mode():\n        learner.train(b, None)\n"
    )
    check(before, after, Names(policies={"learner"}))


def test_homonyms_are_not_touched() -> None:
    code = """
        class Net(nn.Module):
            def step(self, model, optimizer, buffer, finish_generation=True):
                model.train()
                self.train()
                optimizer.train()
                buffer.offload_to_cpu(move_params=True)
                ray.get(collector.prepare_for_refit.remote())
                ray.get(actor.prepare_for_training.remote())
                with timer.time("prepare_for_generation/total"):
                    log("offload_before_refit")
                self._prepare_for_training_step()
        """
    assert not migrated(code).changed


def test_a_name_that_becomes_another_policy_registers_both() -> None:
    check(
        """
        def f(policy, other_policy, batch):
            policy.prepare_for_training()
            policy.train(batch, None)
            policy = other_policy
            policy.prepare_for_training()
            policy.train(batch, None)
        """,
        """
        def f(policy, other_policy, batch):
            share(policy, other_policy, only_colocated=True)
            with scopes(policy).training_mode():
                policy.train(batch, None)
            policy = other_policy
            with scopes(policy).training_mode():
                policy.train(batch, None)
        """,
    )


def test_a_policy_made_between_scopes_is_registered_where_it_is_made_and_the_one_before_is_released() -> None:
    check(
        """
        from nemo_rl.models.policy.lm_policy import Policy

        def f(policy: Policy, cfg, batch):
            policy.prepare_for_training()
            policy.train(batch, None)
            policy.offload_to_cpu()
            policy = Policy(cfg)
            policy.prepare_for_training()
            policy.train(batch, None)
        """,
        """
        from nemo_rl.models.policy.lm_policy import Policy

        def f(policy: Policy, cfg, batch):
            share(policy, only_colocated=True)
            with scopes(policy).training_mode():
                policy.train(batch, None)
            scopes(policy).offload()
            policy = Policy(cfg)
            share(policy, only_colocated=True)
            with scopes(policy).training_mode():
                policy.train(batch, None)
        """,
    )


def test_a_save_that_nothing_prepares_stands_outside_scopes_and_what_it_moved_is_not_believed() -> None:
    """An engine may be serving meanwhile: a scope would put it to sleep."""
    check(
        """
        def f(policy, policy_generation, batch, path):
            policy.prepare_for_training()
            policy.train(batch, None)
            refit_policy_generation(policy, policy_generation, True)
            policy.save_checkpoint(path)
        """,
        """
        def f(policy, policy_generation, batch, path):
            share(policy, policy_generation, only_colocated=True)
            with scopes(policy).training_mode():
                policy.train(batch, None)
            with scopes(policy).legacy_refit(policy_generation):
                refit_policy_generation(policy, policy_generation, True)
            policy.save_checkpoint(path)
            scopes(policy).forget()
        """,
    )
