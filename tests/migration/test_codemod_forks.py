"""What forks of the known loops add: methods that no table knows, classes of their own, handles made late."""

from __future__ import annotations

import pytest
from rewriting import check, kept, migrated, rewritten, said


@pytest.mark.parametrize(
    ("use", "why"),
    [
        ("policy.export_async(b)", "policy.export_async() is no method that is known"),
        ("policy.offload_logits(b)", "policy.offload_logits() is no method that is known"),
        ("futures = policy.worker_group.run_all(b)", "policy.worker_group is used"),
        ("policy = other\n    policy.get_teacher_logits_ipc(b)", "is no method that is known"),
        ("work(policy)\n    policy.get_teacher_logits_ipc(b)", "what it prepares is handed to work()"),
        (
            "policy.get_logits(policy.get_teacher_logits_ipc(b), (yield))",
            "cannot go into a scope: the statement yields",
        ),
    ],
)
def test_a_method_that_is_not_known_may_need_what_was_prepared(use: str, why: str) -> None:
    text = kept(
        f"def f(policy, b, other):\n    policy.prepare_for_lp_inference()\n    {use}\n    policy.offload_after_refit()\n",
        why,
    )
    assert text.index(use.rpartition("\n")[2]) < text.index("scopes(policy).offload()")


def test_a_method_that_is_not_known_runs_in_the_mode_of_the_prepare_before_it() -> None:
    code = """
        def f(teacher, policy: Policy, teacher_policy, full, b, directory):
            teacher_policy.prepare_for_lp_inference()
            if full:
                handles = teacher_policy.get_teacher_logits_ipc(b, mode="full")
            else:
                handles = teacher_policy.get_teacher_logits_ipc(b, mode="topk")
            teacher_policy.offload_after_refit()
            policy.prepare_for_training()
            policy.train(handles, None)
            print("refreshing")
            if full:
                policy.update_reference_model()
            policy.prepare_for_lp_inference()
            exports = ray.get([w.export.remote(directory) for w in policy.worker_group.workers])
            return exports
        """
    outcomes = check(
        code,
        """
        def f(teacher, policy: Policy, teacher_policy, full, b, directory):
            share(teacher_policy, policy, only_colocated=True)
            if full:
                with scopes(teacher_policy).logprob_mode():
                    handles = teacher_policy.get_teacher_logits_ipc(b, mode="full")
            else:
                with scopes(teacher_policy).logprob_mode():
                    handles = teacher_policy.get_teacher_logits_ipc(b, mode="topk")
            with scopes(policy).training_mode():
                policy.train(handles, None)
            print("refreshing")
            if full:
                with scopes(policy).training_mode():
                    policy.update_reference_model()
            with scopes(policy).logprob_mode():
                exports = ray.get([w.export.remote(directory) for w in policy.worker_group.workers])
            return exports
        """,
    )
    assert rewritten(outcomes)
    said_of = [line for line in migrated(code).assumed if "no table knows it" in line]
    assert said_of == [
        "get_teacher_logits_ipc in f: no table knows it: taken for compute in logprob_mode(), where it ran",
        "update_reference_model in f: no table knows it: taken for compute in training_mode(), where it ran",
        "policy.worker_group in f: no table knows it: taken for compute in logprob_mode(), where it ran",
    ]


@pytest.mark.parametrize(
    "before",
    [
        "if flag:\n        policy.prepare_for_training()",  # on one path only
        "if flag:\n        policy.prepare_for_training()\n    else:\n        policy.prepare_for_lp_inference()",
        "policy.prepare_for_training()\n    policy.offload_to_cpu()",
        "policy.prepare_for_training()\n    helper(policy, b)",  # which moves it
        "policy.prepare_for_lp_inference(keep_train_buffers=flag)",
    ],
)
def test_where_the_mode_cannot_be_told_a_method_that_is_not_known_stays_as_it_is(before: str) -> None:
    text = migrated(
        f"""
def f(policy, b, flag):
    {before}
    policy.update_reference_model()


def helper(policy, b):
    policy.prepare_for_lp_inference()
    policy.get_logprobs(b)
"""
    ).after.decode()
    assert "\n    policy.update_reference_model()" in text


def test_a_helper_that_moves_an_attribute_leaves_it_in_no_mode_that_is_known() -> None:
    text = migrated(
        """
        class Loop:
            def __init__(self, policy: Policy):
                self.policy = policy

            def f(self, b):
                self.policy.prepare_for_training()
                self.helper(b)
                self.policy.update_reference_model()

            def helper(self, b):
                self.policy.prepare_for_lp_inference()
                self.policy.get_logprobs(b)
        """
    ).after.decode()
    assert "\n        self.policy.update_reference_model()" in text


def test_moves_that_scopes_do_not_see_are_forgotten_once_before_somebody_asks() -> None:
    text = migrated(
        """
        from rl_session.adapters.nemo_rl import scopes, share

        def f(policy, b, keys):
            with scopes(policy).training_mode():
                policy.train(b, None)
            policy.offload_optimizer()
            policy.offload_extras()
            for key in keys:
                policy.move_rows(key)
            policy.prepare_for_lp_inference()
            wait(later(policy.get_logprobs, b))
            policy.offload_extras()
            helper(policy, b)
            policy.offload_extras()
            for key in keys:
                policy.move_rows(key)
                if key:
                    return
            policy.offload_extras()

        def helper(policy, b):
            with scopes(policy).training_mode():
                policy.train(b, None)
        """
    ).after.decode()
    lines = [line.strip() for line in text[text.index("def f") :].splitlines() if "rl-session: kept" not in line]
    assert lines[lines.index("policy.offload_optimizer()") : lines.index("def helper(policy, b):") + 1] == [
        "policy.offload_optimizer()",
        "policy.offload_extras()",
        "for key in keys:",
        "policy.move_rows(key)",
        "policy.prepare_for_lp_inference()",
        "wait(later(policy.get_logprobs, b))",
        "policy.offload_extras()",
        "scopes(policy).forget()",  # the helper asks
        "helper(policy, b)",
        "policy.offload_extras()",
        "for key in keys:",
        "policy.move_rows(key)",
        "scopes(policy).forget()",  # whoever called may ask once this has returned
        "if key:",
        "return",
        "policy.offload_extras()",
        "scopes(policy).forget()",
        "",
        "def helper(policy, b):",
    ]


def test_ending_the_workers_needs_nothing() -> None:
    code = """
        def f(policy, b):
            policy.prepare_for_training()
            policy.worker_group.shutdown(force=True)
            policy.train(b, None)
        """
    assert rewritten(migrated(code).outcomes)


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
