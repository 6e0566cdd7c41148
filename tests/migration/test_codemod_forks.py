"""What forks of the known loops add: methods that no table knows, classes of their own, handles made late."""

from __future__ import annotations

import pytest
from rewriting import check, kept, migrated, rewritten, said


@pytest.mark.parametrize(
    ("use", "why"),
    [
        ("policy.get_teacher_logits_ipc(b)", "policy.get_teacher_logits_ipc() is no method that is known"),
        ("wait([w.export.remote() for w in policy.worker_group.workers])", "policy.worker_group is used"),
    ],
)
def test_a_method_that_is_not_known_may_need_what_was_prepared(use: str, why: str) -> None:
    text = kept(
        f"def f(policy, b):\n    policy.prepare_for_lp_inference()\n    {use}\n    policy.offload_after_refit()\n", why
    )
    assert text.index(use) < text.index("scopes(policy).offload()")


@pytest.mark.parametrize(
    "use", ["policy.print_node_ip_and_gpu_id()", "policies.append(policy)", "policy.read_table(b)"]
)
def test_what_only_looks_or_collects_needs_nothing(use: str) -> None:
    code = f"def f(policy, policies, b):\n    policy.prepare_for_training()\n    {use}\n    policy.train(b, None)\n"
    assert rewritten(migrated(code).outcomes)


def test_all_tenants_of_a_function_are_named_where_the_last_of_them_is_made() -> None:
    check(
        """
        def f(cfg, batches):
            policy_generation = VllmGeneration(cfg)
            policy_generation.finish_generation()
            policy = Policy(cfg)
            for batch in batches:
                policy_generation.prepare_for_generation()
                out = policy_generation.generate(batch)
                policy_generation.finish_generation()
                policy.prepare_for_training()
                policy.train(out, None)
        """,
        """
        def f(cfg, batches):
            policy_generation = VllmGeneration(cfg)
            scopes(policy_generation).sleep()
            policy = Policy(cfg)
            share(policy, policy_generation, only_colocated=True)
            for batch in batches:
                with scopes(policy_generation).awake():
                    out = policy_generation.generate(batch)
                with scopes(policy).training_mode():
                    policy.train(out, None)
        """,
    )


def test_attributes_of_classes_that_a_fork_defines_are_told_by_their_annotation() -> None:
    outcomes = migrated(
        """
        import asyncio
        import nemo_rl
        from typing import Optional

        class Controller:
            def __init__(self, args):
                self._value: Optional[TQValue] = args.value
                self._weight_synchronizer: IPCWeightSynchronizer | None = args.synchronizer

            async def step(self):
                await asyncio.to_thread(self._value.prepare_for_inference)
                await asyncio.to_thread(self._weight_synchronizer.sync_weights, kv_scales=None)
        """
    ).outcomes
    assert [(o.tenant, o.method, o.shape) for o in outcomes] == [
        ("value", "prepare_for_inference", "to_thread"),
        ("engine", "sync_weights", "to_thread"),
    ]


def test_a_directive_goes_with_the_call_it_was_written_for_and_a_branch_with_its_last_line() -> None:
    check(
        """
        def f(policy, b, flag):
            policy.prepare_for_training()  # type: ignore[attr-defined]
            policy.train(b, None)
            if not flag:
                policy.finish_training()  # noqa
            if flag:
                b = 1
            else:
                policy.finish_training()
            if flag:
                policy.finish_training()  # says something
        """,
        """
        def f(policy, b, flag):
            share(policy, only_colocated=True)
            with scopes(policy).training_mode():
                policy.train(b, None)
            if flag:
                b = 1
            if flag:
                # says something
                pass
        """,
    )


def test_the_line_that_shares_names_only_what_is_bound_by_then() -> None:
    check(
        """
        if __name__ == "__main__":
            policy = Policy()
            engine = VllmGeneration()
            policy.offload_to_cpu()
            engine.prepare_for_generation(tags=["weights"])
        """,
        """
        if __name__ == "__main__":
            policy = Policy()
            engine = VllmGeneration()
            share(policy, engine, only_colocated=True)
            scopes(policy).offload()
            scopes(engine).wake(tags=["weights"])
        """,
    )
    check(
        """
        def setup(configs):
            for config in configs:
                teacher = Policy(config)
                teacher.offload_after_refit()
            student = Policy(configs)
            student.offload_after_refit()
            return student
        """,
        """
        def setup(configs):
            for config in configs:
                teacher = Policy(config)
                scopes(teacher).offload()
            student = Policy(configs)
            scopes(student).offload()
            return student
        """,
    )


def test_the_rows_of_a_batch_are_not_the_model() -> None:
    outcomes = migrated(
        """
        def f(policy, meta, keys):
            policy.prepare_for_training()
            policy.discard_samples(keys, meta.partition_id)
            policy.train_from_meta(meta, None)
        """
    ).outcomes
    assert said(outcomes) == [("prepare_for_training", "rewritten")]
