"""Wakes and sleeps become the engine's scope where one run of statements uses it; a push of weights becomes the refit block."""

from __future__ import annotations

import pytest
from rewriting import check, kept, migrated, rewritten, said


def test_nothing_happens_to_an_engine_that_is_only_used() -> None:
    assert not migrated("def f(policy_generation, b):\n    return policy_generation.generate(b)\n").changed


def test_one_run_of_statements_becomes_a_scope() -> None:
    outcomes = check(
        """
        def f(policy_generation, batch, timer):
            policy_generation.prepare_for_generation()
            with timer.time("generation"):
                a = policy_generation.generate(batch)
                print(a)
                b = rollout(policy_generation, a)
                policy_generation.finish_generation()
                print(b)
        """,
        """
        def f(policy_generation, batch, timer):
            with timer.time("generation"):
                with scopes(policy_generation).awake():
                    a = policy_generation.generate(batch)
                    print(a)
                    b = rollout(policy_generation, a)
                print(b)
        """,
    )
    assert [outcome.why for outcome in outcomes] == ["awake()", "the end of awake()"]


def test_a_wake_in_one_arm_and_a_push_in_the_other_lead_to_the_same_scope() -> None:
    check(
        """
        def f(policy, policy_generation, batch, stale, colocated):
            if stale:
                refit_policy_generation(policy, policy_generation, colocated)
                stale = False
            else:
                policy_generation.prepare_for_generation()
            batch = rollout(policy_generation, batch)
            policy_generation.finish_generation()
            return batch
        """,
        """
        def f(policy, policy_generation, batch, stale, colocated):
            share(policy, policy_generation, only_colocated=True)
            if stale:
                with scopes(policy).legacy_refit(policy_generation):
                    refit_policy_generation(policy, policy_generation, colocated)
                stale = False
            with scopes(policy_generation).awake():
                batch = rollout(policy_generation, batch)
            return batch
        """,
    )


def test_a_wake_whose_use_is_not_in_sight_keeps_its_place_and_raises() -> None:
    check(
        """
        def f(policy_generation, actor, batch):
            policy_generation.prepare_for_generation()
            wait(actor.rollout.remote(batch))
        """,
        """
        def f(policy_generation, actor, batch):
            scopes(policy_generation).wake()
            wait(actor.rollout.remote(batch))
        """,
    )


def test_a_wake_with_a_use_on_some_paths_only_keeps_its_place() -> None:
    text = migrated(
        """
        def f(policy_generation, actor, batch):
            policy_generation.prepare_for_generation()
            if batch:
                rollout(policy_generation, batch)
                policy_generation.finish_generation()
                return
            wait(actor.rollout.remote(batch))
            policy_generation.finish_generation()
        """
    ).after.decode()
    assert (
        "    scopes(policy_generation).wake()\n    if batch:\n        with scopes(policy_generation).awake():" in text
    )
    assert "    scopes(policy_generation).sleep()\n" in text


def test_tags_are_kept() -> None:
    check(
        "def f(policy_generation):\n    policy_generation.prepare_for_generation(tags=['weights'])\n",
        "def f(policy_generation):\n    scopes(policy_generation).wake(tags=['weights'])\n",
    )


def test_a_sleep_in_finally_keeps_its_place() -> None:
    check(
        """
        def f(policy_generation, batch):
            policy_generation.prepare_for_generation()
            try:
                return policy_generation.generate(batch)
            finally:
                policy_generation.finish_generation()
        """,
        """
        def f(policy_generation, batch):
            scopes(policy_generation).wake()
            try:
                return policy_generation.generate(batch)
            finally:
                scopes(policy_generation).sleep()
        """,
    )


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("policy_generation.finish_generation(release_gpu=last)", "decided at run time"),
        ("ok = policy_generation.prepare_for_generation()", "its result is used"),
        ("policy_generation.prepare_for_generation(*arguments)", "cannot be read"),
        ("policy_generation.prepare_for_generation(level=2)", "scopes know no level="),
    ],
)
def test_what_scopes_have_no_words_for_stays(call: str, why: str) -> None:
    kept(f"def f(policy_generation, last, arguments):\n    {call}\n", why, changed=False)


def test_a_release_of_the_gpu_that_is_spelt_out_is_the_default() -> None:
    text = migrated(
        "def f(policy_generation, b):\n    policy_generation.generate(b)\n"
        "    policy_generation.finish_generation(release_gpu=True)\n"
    ).after.decode()
    assert "    with scopes(policy_generation).awake():\n        policy_generation.generate(b)\n" in text


def test_a_training_call_never_gets_into_the_scope_of_an_engine() -> None:
    text = migrated(
        """
        def f(policy, policy_generation, batch):
            policy_generation.prepare_for_generation()
            a = policy_generation.generate(batch)
            policy.prepare_for_lp_inference()
            policy.get_logprobs(a)
            b = policy_generation.generate(batch)
            policy_generation.finish_generation()
        """
    ).after.decode()
    assert "    scopes(policy_generation).wake()\n    a = policy_generation.generate(batch)\n" in text
    assert "    with scopes(policy_generation).awake():\n        b = policy_generation.generate(batch)\n" in text


PUSH = """
    def refit(policy, policy_generation, colocated, timer):
        {open}policy.offload_before_refit()
        {open}policy_generation.prepare_for_generation(tags=["weights"])
        # What follows moves the weights.
        with timer.time("transfer"):
            futures = policy.stream_weights_via_ipc_zmq(buffer_size_bytes=1)
            received = policy_generation.update_weights_via_ipc_zmq()
            wait(futures)
            if not all(wait(received)):
                raise RuntimeError("torn")
        {open}policy.offload_after_refit()
        {open}policy_generation.prepare_for_generation(tags=["kv_cache"])
        return {{}}
    """
PUSHED = """
    def refit(policy, policy_generation, colocated, timer):
        share(policy, policy_generation, only_colocated=True)
        # What follows moves the weights.
        with scopes(policy).refit(policy_generation):
            with timer.time("transfer"):
                futures = policy.stream_weights_via_ipc_zmq(buffer_size_bytes=1)
                received = policy_generation.update_weights_via_ipc_zmq()
                wait(futures)
                if not all(wait(received)):
                    raise RuntimeError("torn")
        return {}
    """


@pytest.mark.parametrize("opening", ["", "if colocated: "])
def test_a_push_written_out_becomes_the_refit_block(opening: str) -> None:
    outcomes = check(PUSH.format(open=opening), PUSHED)
    assert rewritten(outcomes)


def test_a_push_under_several_conditions_stays_whole() -> None:
    code = PUSH.format(open="").replace("policy.offload_after_refit()", "if colocated: policy.offload_after_refit()")
    text = kept(code, "do not stand under one condition")
    assert text.count("scopes(policy)") == 2
    # What the first call moved is not believed, and the release is an offload() in its place.
    assert "policy.offload_before_refit()\n    scopes(policy).forget()\n" in text
    assert "    if colocated: scopes(policy).offload()\n" in text


@pytest.mark.parametrize(
    ("use", "why"),
    [
        ("sync(policy)", "handed on with its weights on the device"),
        ("wait(policy.broadcast_weights_for_collective())", "pushes weights outside a refit block"),
    ],
)
def test_a_release_behind_which_the_weights_are_needed_stays(use: str, why: str) -> None:
    """It leaves the parameters on the device, and an ``offload()`` in its place would not."""
    code = "def f(policy, policy_generation, sync):\n    policy.offload_before_refit()\n    {}\n"
    kept(code.format(use), why, changed=False)
    assert rewritten(migrated(code.format("return 1")).outcomes)


def test_a_push_by_a_synchroniser_inside_a_helper_stands_in_its_callers_block() -> None:
    code = PUSH.format(open="").replace("policy.offload_after_refit()", "if colocated: policy.offload_after_refit()")
    code = code.replace("def refit(", "def refit_policy_generation(").replace(
        "    policy.offload_before_refit()",
        "    if policy_generation.weight_synchronizer is not None:\n"
        "            return policy_generation.weight_synchronizer.sync_weights()\n        policy.offload_before_refit()",
    )
    result = migrated(
        code
        + """
    def train(policy, policy_generation):
        refit_policy_generation(policy, policy_generation, True, None)
    """
    )
    assert result.after.decode().count("legacy_refit(") == 1
    assert result.after.decode().count("share(") == 1  # its callers say who shares
    assert ("sync_weights", "rewritten") in said(result.outcomes)


def test_a_push_that_does_more_in_between_stays_whole() -> None:
    code = PUSH.format(open="").replace("wait(futures)", "value_model.finish_training()")
    kept(code, "something else is moved between the four calls of the push")


def test_helpers_that_push_through_scopes_are_called_as_they_are() -> None:
    code = PUSH.format(open="").replace("def refit(", "def refit_policy_generation(")
    text = migrated(
        code
        + """
    def train(policy, policy_generation, batch):
        policy.prepare_for_lp_inference()
        refit_policy_generation(policy, policy_generation, True, None)
    """
    ).after.decode()
    assert "legacy_refit" not in text
    assert "prepare_for_lp_inference" not in text  # the block brings the weights in
    assert "\n    refit_policy_generation(policy, policy_generation, True, None)\n" in text


def test_synchronisers_go_into_a_block_that_knows_what_they_do() -> None:
    check(
        """
        import nemo_rl

        def refit_policy_generation(policy, policy_generation, timer):
            synchronizer = getattr(policy_generation, "weight_synchronizer", None)
            if synchronizer is not None:
                return synchronizer.sync_weights(timer=timer) or {}
            policy_generation.weight_synchronizer.sync_weights()
        """,
        """
        import nemo_rl

        def refit_policy_generation(policy, policy_generation, timer):
            synchronizer = getattr(policy_generation, "weight_synchronizer", None)
            share(policy, policy_generation, only_colocated=True)
            if synchronizer is not None:
                with scopes(policy).legacy_refit(policy_generation):
                    return synchronizer.sync_weights(timer=timer) or {}
            with scopes(policy).legacy_refit(policy_generation):
                policy_generation.weight_synchronizer.sync_weights()
        """,
    )


def test_a_push_in_a_condition_or_a_callback_is_left() -> None:
    kept(
        "def f(policy, policy_generation):\n    if refit_policy_generation(policy, policy_generation, True): pass\n",
        "head of a compound statement",
    )
    kept(
        "def f(policy, policy_generation):\n    return lambda: refit_policy_generation(policy, policy_generation, True)\n",
        "callback",
    )


def test_a_validation_that_may_fail_still_sleeps() -> None:
    check(
        """
        def f(policy_generation, batch):
            try:
                metrics = validate_all(policy_generation, batch)
                policy_generation.finish_generation()
                print(metrics)
            except ValueError:
                print("failed")
        """,
        """
        def f(policy_generation, batch):
            try:
                with scopes(policy_generation).awake():
                    metrics = validate_all(policy_generation, batch)
                print(metrics)
            except ValueError:
                print("failed")
        """,
    )


def test_awaited_uses_of_an_engine_are_in_an_async_scope() -> None:
    check(
        """
        async def f(policy_generation, batch):
            policy_generation.prepare_for_generation()
            out = await policy_generation.generate(batch)
            policy_generation.finish_generation()
            return out
        """,
        """
        async def f(policy_generation, batch):
            async with scopes(policy_generation).awake():
                out = await policy_generation.generate(batch)
            return out
        """,
    )
