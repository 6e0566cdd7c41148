"""Handles of which no name, annotation or constructor speaks: known by what is called on them, or listed in the report."""

from __future__ import annotations

import pytest
from rewriting import check, migrated, rewritten, said


def test_nothing_is_listed_where_nothing_moves() -> None:
    assert migrated("import nemo_rl\ndef f(learner, b):\n    learner.run(b)\n").outcomes == ()


@pytest.mark.parametrize("handle", ["ref_handle", 'handles["policy"]', "self.pol", "self.actor_handle", "POLICY"])
def test_a_handle_known_by_what_is_called_on_it_gets_one_scope_however_often_it_is_asked(handle: str) -> None:
    """Beside a site that stays, so that there is work left for every later pass."""
    result = migrated(
        f"""
        import nemo_rl

        class Loop:
            def f(self, batch, handles, ref_handle):
                {handle}.prepare_for_lp_inference()
                return {handle}.get_logprobs(batch)

            def g(self, policy, batch, pool):
                policy.prepare_for_lp_inference()
                return pool.submit(policy.get_logprobs, batch)
        """
    )
    assert said(result.outcomes) == [("prepare_for_lp_inference", "rewritten"), ("prepare_for_lp_inference", "left")]
    assert result.after.decode().count(f"with scopes({handle}).logprob_mode():") == 1
    assert result.num_passes == 1


def test_methods_that_only_one_tenant_has_together_tell_who_it_is() -> None:
    outcomes = check(
        """
        import nemo_rl
        from app import build

        def f(cfg, batch, loss_fn):
            learner = build(cfg)
            learner.prepare_for_training()
            r = learner.train(batch, loss_fn)
            learner.offload_to_cpu()
            return r
        """,
        """
        import nemo_rl
        from app import build

        def f(cfg, batch, loss_fn):
            learner = build(cfg)
            share(learner, only_colocated=True)
            with scopes(learner).training_mode():
                r = learner.train(batch, loss_fn)
            scopes(learner).offload()
            return r
        """,
    )
    assert rewritten(outcomes)


def test_an_alias_of_a_handle_known_by_use_is_the_same_handle() -> None:
    text = migrated(
        """
        import nemo_rl
        def f(handle, batch, pool):
            handle.prepare_for_lp_inference()
            other = handle
            pool.submit(other.get_logprobs, batch)
        """
    ).after.decode()
    assert "    handle.prepare_for_lp_inference()\n" in text  # somebody relies on it under another name


def test_a_handle_known_by_use_that_is_handed_on_may_be_used_there() -> None:
    outcomes = migrated(
        "import nemo_rl\ndef f(handle, b):\n    handle.prepare_for_lp_inference()\n    handle.get_logprobs(b)\n    work(handle)\n"
    ).outcomes
    assert [outcome.status for outcome in outcomes] == ["left"]
    assert "handed to work()" in outcomes[0].why


@pytest.mark.parametrize(
    ("code", "tenant"),
    [
        ("def f(learner, b):\n    learner.prepare_for_training()\n    learner.train(b, None)\n", "unknown"),
        ("def f(critic_like):\n    critic_like.prepare_for_training()\n    critic_like.finish_training()\n", "unknown"),
        ("def f(pool, thing):\n    pool.submit(thing.offload_to_cpu)\n", "unknown"),
        ("def f(get):\n    get().prepare_for_training()\n", "unknown"),
        ("def f(cfg):\n    learner = Wrapper(cfg)\n    learner.prepare_for_lp_inference()\n", "unknown"),
    ],
)
def test_a_lifecycle_call_of_nobody_who_is_known_is_listed_and_left(code: str, tenant: str) -> None:
    result = migrated("import nemo_rl\n" + code)
    assert not result.changed
    assert result.outcomes
    assert all((o.tenant, str(o.status)) == (tenant, "left") for o in result.outcomes)
    assert all(
        ("cannot be told" in o.why or "what makes or annotates it" in o.why) and o.advice for o in result.outcomes
    )


@pytest.mark.parametrize(
    "code",
    [
        "def f(buffer):\n    buffer.offload_to_cpu(move_params=True)\n",
        "def f(model: nn.Module):\n    model.prepare_for_training()\n",
        "class Worker:\n    def f(self):\n        self.prepare_for_training()\n        super().offload_to_cpu()\n",
        "def f(actor):\n    ray.get(actor.prepare_for_training.remote())\n",
        "import app\ndef f():\n    app.prepare_for_training()\n",
    ],
)
def test_what_is_certainly_somebody_elses_is_not_listed(code: str) -> None:
    assert migrated("import nemo_rl\n" + code).outcomes == ()


def test_elements_of_a_list_without_a_type_of_elements_go_by_the_name() -> None:
    result = migrated(
        "import nemo_rl\ndef f(teacher_policies: list, b):\n    for tp in teacher_policies:\n"
        "        tp.prepare_for_lp_inference()\n        tp.get_topk_logits(b, 4)\n        tp.offload_after_refit()\n"
    )
    assert rewritten(result.outcomes)
    assert len(result.outcomes) == 2


def test_a_global_handle_is_registered_once_it_is_made() -> None:
    check(
        """
        import nemo_rl

        def f(cfg, batch):
            global POLICY
            POLICY = build(cfg)
            POLICY.prepare_for_training()
            POLICY.train(batch, None)
        """,
        """
        import nemo_rl

        def f(cfg, batch):
            global POLICY
            POLICY = build(cfg)
            share(POLICY, only_colocated=True)
            with scopes(POLICY).training_mode():
                POLICY.train(batch, None)
        """,
    )


def test_a_handle_of_which_the_methods_contradict_each_other_gets_one_scope() -> None:
    text = migrated(
        """
        import nemo_rl
        def f(self, b, pool, policy):
            pool.submit(self.pol.get_logprobs, b)
            x = self.pol.get_values(b)
            policy.prepare_for_lp_inference()
            pool.submit(policy.get_logprobs, b)
        """
    ).after.decode()
    assert text.count("inference_mode()") == 1
