"""Where a shim is made in sight, its handle is ours: scopes are written on it, with no adapter and no line of sharing."""

from __future__ import annotations

from rewriting import check, migrated, said


def test_scopes_are_written_on_the_handle_that_the_shim_wraps() -> None:
    outcomes = check(
        """
        import rl_session as rs
        from rl_session_migrate import LegacyGeneration, LegacyPolicy, LegacyValue

        def main(session, model, critic, engine, b, loss_fn):
            policy = session.attach(model)
            value = session.attach_value(critic)
            shim, critic_shim = LegacyPolicy(policy, backend="megatron"), LegacyValue(value)
            generation = LegacyGeneration(engine)
            generation.prepare_for_generation()
            out = generation.generate(b)
            generation.finish_generation()
            critic_shim.prepare_for_inference()
            values = critic_shim.get_values(b)
            critic_shim.finish_inference()
            shim.prepare_for_lp_inference()
            prev = shim.get_logprobs(b)
            shim.prepare_for_training()
            shim.train(b, loss_fn)
            shim.offload_to_cpu()
        """,
        """
        import rl_session as rs
        from rl_session_migrate import LegacyGeneration, LegacyPolicy, LegacyValue

        def main(session, model, critic, engine, b, loss_fn):
            policy = session.attach(model)
            value = session.attach_value(critic)
            shim, critic_shim = LegacyPolicy(policy, backend="megatron"), LegacyValue(value)
            generation = LegacyGeneration(engine)
            with engine.awake():
                out = generation.generate(b)
            with value.inference_mode():
                values = critic_shim.get_values(b)
            value.offload()
            with policy.logprob_mode():
                prev = shim.get_logprobs(b)
            with policy.training_mode():
                shim.train(b, loss_fn)
            policy.offload()
        """,
    )
    assert {status for _, status in said(outcomes)} == {"rewritten"}


def test_a_handle_that_is_bound_again_is_not_written() -> None:
    text = migrated(
        """
        from rl_session_migrate import LegacyPolicy

        def main(policy, other, b):
            shim = LegacyPolicy(policy)
            policy = other
            shim.prepare_for_training()
            shim.train(b, None)
        """
    ).after.decode()
    assert "with scopes(shim).training_mode():" in text


def test_a_push_through_shims_stays_and_the_report_names_the_call_to_write() -> None:
    result = migrated(
        """
        from rl_session_migrate import LegacyGeneration, LegacyPolicy, refit_policy_generation

        def main(policy, engine):
            shim, generation = LegacyPolicy(policy), LegacyGeneration(engine)
            refit_policy_generation(shim, generation, True)
        """
    )
    assert [outcome.advice for outcome in result.outcomes] == ["policy.refit(engine)  # in its place"]
    assert "scopes(" not in result.after.decode()
