"""Which paths a finding is about: correlated tests, loops, calls, aliases; and what is left unsaid."""

from __future__ import annotations

from textwrap import dedent

import pytest

from rl_session_migrate.lint import Finding, lint_text

HEAD = "from nemo_rl.algorithms.grpo import refit_policy_generation\n"


def found(text: str, *, head: str = HEAD) -> list[Finding]:
    return [f for f in lint_text(head + dedent(text)) if f.code not in ("RLM003", "RLM005")]


def codes(text: str, *, head: str = HEAD) -> list[str]:
    return [finding.code for finding in found(text, head=head)]


def test_a_module_of_no_interest_says_nothing() -> None:
    assert codes("def f(x):\n    return x\n", head="") == []


@pytest.mark.parametrize(
    ("prepare_if", "compute_if"),
    [
        ("not (a and b)", "not a"),
        ("not (a and b)", "not b"),
        ("a or b", "a"),
        ("a", "a and b"),
        ("not a", "not a"),
        ("x is None", "x is None"),
        ("not x is None", "x is not None"),
        ("a != 1", "not a == 1"),
        ("need", "not a"),
        ("need", "not b"),
        ("cfg.flag", "cfg.flag and other"),
        ("cfg['k']", "cfg['k']"),
        ("len(xs) > 1", "len(xs) > 1"),
    ],
)
def test_tests_that_agree_are_kept_in_agreement(prepare_if: str, compute_if: str) -> None:
    text = f"""
        def f(policy, a, b, x, xs, cfg, d):
            need = not a or not b
            policy.offload_to_cpu()
            other_things()
            if {prepare_if}:
                policy.prepare_for_lp_inference()
            if {compute_if}:
                policy.get_logprobs(d)
    """
    assert codes(text) == []


@pytest.mark.parametrize(
    ("prepare_if", "compute_if"),
    [
        ("a", "b"),
        ("a and b", "a"),
        ("ready()", "ready()"),  # may answer otherwise the second time
        ("x > 1", "x > 2"),
    ],
)
def test_tests_that_do_not_agree_leave_a_path_open(prepare_if: str, compute_if: str) -> None:
    text = f"""
        def f(policy, a, b, x, d):
            policy.offload_to_cpu()
            if {prepare_if}:
                policy.prepare_for_lp_inference()
            if {compute_if}:
                policy.get_logprobs(d)
    """
    (finding,) = found(text)
    assert finding.code == "RLM001"
    assert f"`{prepare_if}` on line 5 is false" in finding.what


def test_where_every_path_is_wrong_no_test_is_blamed() -> None:
    text = """
        def f(policy, a, d):
            policy.offload_to_cpu()
            if a:
                policy.prepare_for_lp_inference()
            if not a:
                policy.get_logprobs(d)
    """
    (finding,) = found(text)
    assert finding.what.endswith("sent the parameters away")


def test_a_flag_that_changes_in_between_agrees_with_nothing() -> None:
    text = """
        def f(policy, a, d):
            policy.offload_to_cpu()
            if a:
                policy.prepare_for_lp_inference()
            a = other()
            if a:
                policy.get_logprobs(d)
    """
    assert codes(text) == ["RLM001"]


def test_a_flag_that_is_set_is_known() -> None:
    text = """
        def f(policy, gen, xs):
            stale = True
            for x in xs:
                if stale:
                    gen.prepare_for_generation()
                    stale = False
                else:
                    gen.prepare_for_generation()
                gen.generate(x)
                gen.finish_generation()
                stale = True
                if not stale:
                    gen.generate(x)
    """
    assert codes(text) == []


def test_one_path_that_prepares_accuses_the_one_that_does_not() -> None:
    text = """
        def f(policy, a, d):
            if a:
                policy.prepare_for_lp_inference()
            return policy.get_logprobs(d)
    """
    (finding,) = found(text)
    assert finding.code == "RLM001"
    assert "not on every path, when `a` on line 4 is false" in finding.what


def test_what_the_end_of_a_round_prepares_is_no_accusation_of_the_first_round() -> None:
    text = """
        def f(policy, xs, loss):
            for x in xs:
                policy.train(x, loss)
                policy.prepare_for_training()
    """
    assert codes(text) == []


def test_a_round_that_sends_away_what_the_next_one_uses() -> None:
    text = """
        def f(policy, xs, loss):
            policy.prepare_for_training()
            for x in xs:
                policy.train(x, loss)
                policy.offload_to_cpu()
    """
    (finding,) = found(text)
    assert (finding.code, finding.line) == ("RLM001", 6)
    assert "offload_to_cpu() on line 7" in finding.what


@pytest.mark.parametrize("last", ["i + 1 < n", "i < n - 1", "i != n - 1", "not i == n - 1", "not i + 1 >= n"])
def test_a_release_that_the_last_round_leaves_out(last: str) -> None:
    text = f"""
        def f(policy, value_model, n, d, loss):
            for i in range(n):
                value_model.prepare_for_training()
                value_model.train(d, loss)
                value_model.finish_training()
                policy.prepare_for_training()
                policy.train(d, loss)
                if {last}:
                    policy.offload_to_cpu()
            policy.get_logprobs(d)
    """
    assert codes(text) == []


@pytest.mark.parametrize("leave", ["continue", "return", "break", "raise Stop"])
def test_early_exits_are_paths_too(leave: str) -> None:
    text = f"""
        def f(policy, xs, d):
            for x in xs:
                policy.offload_to_cpu()
                if x:
                    {leave}
                policy.prepare_for_lp_inference()
                policy.get_logprobs(d)
    """
    assert codes(text) == []


def test_finally_runs_on_the_way_out() -> None:
    text = """
        def f(policy, d):
            try:
                policy.get_logprobs(d)
            finally:
                policy.offload_to_cpu()
            policy.get_logprobs(d)
    """
    assert codes(text) == ["RLM001"]


def test_exceptions_are_not_followed() -> None:
    text = """
        def f(policy, d):
            policy.prepare_for_lp_inference()
            try:
                g()
            except ValueError:
                policy.offload_to_cpu()
            policy.get_logprobs(d)
    """
    assert codes(text) == []


def test_a_conditional_expression_is_a_path() -> None:
    text = """
        def f(policy, need, d):
            policy.offload_to_cpu()
            if need:
                policy.prepare_for_lp_inference()
            return policy.get_logprobs(d) if need else None
    """
    assert codes(text) == []
    assert codes(text.replace("if need else None", "if not need else None")) == ["RLM001"]


def test_a_function_that_is_handed_a_policy_is_judged_by_its_callers() -> None:
    callee = """
        def validate(policy, d):
            return policy.get_logprobs(d)
    """
    assert codes(callee) == []
    caller = """
        def f(policy, d):
            policy.offload_to_cpu()
            validate(policy, d)
    """
    (finding,) = found(dedent(callee) + dedent(caller))
    assert (finding.code, finding.line) == ("RLM001", 4)
    assert "(called from line 8)" in finding.what


def test_what_a_callee_does_is_known_to_the_caller() -> None:
    text = """
        def bring(model):
            model.prepare_for_lp_inference()
        def send(model):
            model.offload_to_cpu()
        def good(policy, d):
            policy.offload_to_cpu()
            bring(policy)
            policy.get_logprobs(d)
        def bad(policy, d):
            send(model=policy)
            policy.get_logprobs(d)
    """
    (finding,) = found(text)
    assert (finding.code, finding.line) == ("RLM001", 13)


def test_methods_share_what_is_on_self() -> None:
    text = """
        class Loop:
            def __init__(self, policy):
                self.policy = policy
            def away(self):
                self.policy.offload_to_cpu()
            def step(self, d):
                self.away()
                self.policy.get_logprobs(d)
    """
    assert codes(text) == ["RLM001"]


def test_recursion_ends() -> None:
    text = """
        def f(policy, d, n):
            policy.offload_to_cpu()
            if n:
                f(policy, d, n - 1)
            policy.get_logprobs(d)
    """
    assert codes(text) == ["RLM001"]


def test_a_tenant_that_is_handed_out_of_sight_is_unknown() -> None:
    text = """
        def f(policy, d):
            policy.offload_to_cpu()
            something(policy)
            policy.get_logprobs(d)
    """
    assert codes(text) == []
    assert codes(text.replace("something(policy)", "maybe_profile_step(policy, 1)")) == ["RLM001"]


def test_rebinding_makes_another_object() -> None:
    text = """
        def f(policy, d):
            policy.offload_to_cpu()
            policy = make()
            policy.get_logprobs(d)
    """
    assert codes(text) == []


def test_an_alias_is_the_same_object() -> None:
    text = """
        def f(policy, d):
            student = policy
            student.offload_to_cpu()
            policy.get_logprobs(d)
    """
    assert codes(text) == ["RLM001"]


def test_elements_of_a_collection_are_not_one_object() -> None:
    text = """
        def f(teachers, d):
            for teacher in teachers:
                teacher.prepare_for_lp_inference()
                teacher.get_topk_logits(d, k=1)
                teacher.offload_after_refit()
            teachers[0].get_logprobs(d)
    """
    assert codes(text) == []


def test_an_engine_that_is_the_policy_itself_is_not_asked_for_room() -> None:
    text = """
        def f(policy, policy_generation, d, loss):
            if policy_generation is None:
                policy_generation = policy
            policy.prepare_for_training()
            policy.train(d, loss)
            ok = policy_generation.prepare_for_generation()
    """
    assert codes(text) == ["RLM010"]  # on the path where it is an engine
    alone = text.replace("if policy_generation is None:\n                ", "")
    assert codes(alone) == []


def test_an_engine_that_is_the_policy_itself_never_sleeps() -> None:
    text = """
        def f(policy, policy_generation, d):
            policy_generation = policy
            policy_generation.finish_generation()
            run_multi_turn_rollout(policy_generation, d)
    """
    assert codes(text) == []
    assert codes(text.replace("policy_generation = policy", "pass")) == ["RLM006"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("pass", ["RLM010"]),
        ("assert not colocated_inference", []),
        ("assert colocated_inference", ["RLM010"]),
        ("print(colocated_inference)", []),  # it matters, and is not known
        ("assert isinstance(gen, MegatronGeneration)", []),  # it serves the training weights
    ],
)
def test_room_is_only_asked_for_where_gpus_are_shared(asked: str, expected: list[str]) -> None:
    text = f"""
        def f(policy, gen, d, loss, {"colocated_inference" if "colocated" in asked else "x"}):
            {asked}
            ok = gen.prepare_for_generation()
            gen.generate(d)
            policy.prepare_for_training()
    """
    assert codes(text) == expected


def test_a_refit_leaves_a_colocated_policy_away_and_another_one_where_it_was() -> None:
    text = """
        def f(policy, gen, colocated, d):
            policy.prepare_for_lp_inference()
            refit_policy_generation(policy, gen, colocated)
            if {test}:
                policy.get_logprobs(d)
    """
    assert codes(text.format(test="colocated")) == ["RLM001"]
    assert codes(text.format(test="not colocated")) == []


def test_a_callback_may_run_at_any_time() -> None:
    text = """
        def f(policy, pool, d):
            policy.offload_to_cpu()
            pool.submit(policy.prepare_for_lp_inference)
            policy.get_logprobs(d)
    """
    assert codes(text) == []


def test_a_generator_is_left_and_resumed() -> None:
    text = """
        def f(policy, d):
            policy.offload_to_cpu()
            yield d
            policy.get_logprobs(d)
    """
    assert codes(text) == []


def test_too_many_paths_make_it_silent_and_not_wrong() -> None:
    flags = [f"a{i}" for i in range(14)]
    lines = [f"    if {flag}:\n        p{i}.offload_to_cpu()\n" for i, flag in enumerate(flags)]
    again = [f"    if not {flag}:\n        p{i}.get_logprobs(d)\n" for i, flag in enumerate(flags)]
    arguments = ", ".join([f"p{i}: ColocatablePolicyInterface" for i in range(14)] + flags)
    assert codes(f"def f({arguments}, d):\n{''.join(lines)}{''.join(again)}") == []


OURS = "import rl_session as rs\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("with policy.training_mode():\n    policy.train(b, f)\n", []),
        ("with policy.training_mode() as h:\n    h.get_logprobs(b)\n", []),
        ("with policy.logprob_mode() as h:\n    h.train(b, f)\n", ["RLM102"]),
        ("with policy.logprob_mode():\n    policy.train(b, f, eval_mode=True)\n", []),
        ("with policy.refit_mode():\n    policy.get_logprobs(b)\n", ["RLM102"]),
        ("with policy.offloaded():\n    policy.get_logprobs(b)\n", ["RLM102"]),
        ("with policy.offloaded():\n    policy.save_checkpoint(p)\n", []),
        ("with policy.logprob_mode():\n    step = policy.begin_step()\n", ["RLM102"]),
        ("with policy.training_mode():\n    with policy.refit_mode():\n        pass\n", []),
        ("with policy.refit_mode():\n    with policy.logprob_mode():\n        pass\n", ["RLM103"]),
        ("with policy.logprob_mode(), policy.training_mode():\n    pass\n", ["RLM103"]),
        ("with policy.training_mode():\n    policy.switch('resident')\n", ["RLM104"]),
        ("with policy.training_mode():\n    pass\npolicy.switch('resident')\npolicy.train(b, f)\n", []),
        ("async def g():\n    async with policy.training_mode():\n        policy.train(b, f)\n", []),
        ("scope = policy.training_mode()\nwith scope:\n    policy.train(b, f)\n", []),
        ("def g():\n    scope = policy.training_mode()\n", ["RLM101"]),
        ("def g():\n    return policy.training_mode()\n", []),
        ("stack.enter_context(policy.training_mode())\npolicy.train(b, f)\n", []),
        ("def g():\n    s = policy.logprob_mode()\n    for x in y:\n        with s:\n            pass\n", ["RLM106"]),
        (
            "def g(x):\n s = policy.logprob_mode()\n if x:\n  with s:\n   pass\n else:\n  with s:\n   pass\n",
            [],
        ),
        ("policy.offload()\npolicy.get_logprobs(b)\n", ["RLM001"]),
        ("policy.get_logprobs(b)\n", []),
        ("with policy.logprob_mode():\n    pass\npolicy.get_logprobs(b)\n", ["RLM107"]),
        ("with pytest.raises(rs.ModeError), policy.logprob_mode():\n    policy.train(b, f)\n", []),
        (
            "with policy.training_mode():\n    with policy.logprob_mode():\n        pass\n    policy.train(b, f)\n",
            [],
        ),
    ],
)
def test_scopes_of_this_library(body: str, expected: list[str]) -> None:
    assert codes(f"policy = rs.attach(model, optimizer)\n{body}", head=OURS) == expected


def test_a_policy_that_rests_on_the_device_may_be_used_outside_scopes() -> None:
    text = 'policy = rs.attach(m, o, base="resident")\nwith policy.training_mode():\n    pass\npolicy.get_logprobs(b)\n'
    assert codes(text, head=OURS) == []


def test_tenants_that_share_gpus_take_turns() -> None:
    head = "from rl_session.adapters.nemo_rl import scopes, share\n"
    body = "with scopes(gen).awake():\n    with scopes(policy).training_mode():\n        policy.train(b, f)\n"
    assert codes(f"share(policy, gen)\n{body}", head=head) == ["RLM103"]
    assert codes(body, head=head) == []


@pytest.mark.parametrize("decorator", ["", "@contextmanager\n", "@asynccontextmanager\n", "@pytest.fixture()\n"])
def test_a_context_manager_may_yield_inside_its_scope(decorator: str) -> None:
    text = f"policy = rs.attach(m)\n{decorator}def f():\n    with policy.training_mode():\n        yield\n"
    assert codes(text, head=OURS) == ([] if decorator else ["RLM105"])


def test_the_attention_of_a_reader_is_drawn_to_what_decides() -> None:
    text = """
        def f(policy, gen, warm, steps, d, loss):
            for step in range(steps):
                policy.prepare_for_lp_inference()
                policy.get_logprobs(d)
                policy.finish_inference()
                if step >= warm:
                    policy.prepare_for_training()
                    policy.train(d, loss)
                if steps > 3:
                    policy.calibrate_qkv_fp8_scales(d)
    """
    (finding,) = found(text)
    assert finding.what == (
        "policy.calibrate_qkv_fp8_scales() after finish_inference() on line 7 sent the parameters away, "
        "when `step >= warm` on line 8 is false"
    )


@pytest.mark.parametrize("reset", ["", "stale = maybe()"])
def test_a_test_of_two_names_comes_out_the_same_again_until_one_of_them_is_assigned(reset: str) -> None:
    text = f"""
        def f(policy, gen, batches, need, stale, loss):
            for batch in batches:
                if need and stale:
                    refit_policy_generation(policy, gen, True)
                    stale = False
                else:
                    policy.offload_after_refit()
                    gen.prepare_for_generation()
                if batch is None:
                    {reset or "pass"}
                    continue
                gen.finish_generation()
                policy.prepare_for_training()
                stale = True
                policy.train(batch, loss)
    """
    assert codes(text) == (["RLM011"] if reset else [])


def test_a_helper_that_puts_the_engine_to_sleep_under_the_name_of_its_parameter() -> None:
    text = """
        def validate(policy_generation, policy):
            {sleep}
            policy.prepare_for_training()

        def f(student_generation, policy, batch):
            assert student_generation.prepare_for_generation()
            student_generation.generate(batch)
            validate(student_generation, policy)
    """
    assert codes(text.format(sleep="policy_generation.finish_generation()")) == []
    assert codes(text.format(sleep="pass")) == ["RLM010"]


def test_a_method_that_no_rule_knows_is_a_use() -> None:
    text = """
        def f(teacher_policy, batch):
            teacher_policy.prepare_for_lp_inference()
            {use}
            teacher_policy.offload_after_refit()
    """
    assert codes(text.format(use="x = teacher_policy.get_teacher_logits_ipc(batch)")) == []
    assert codes(text.format(use="x = other.get_teacher_logits_ipc(batch)")) == ["RLM002"]


def test_an_engine_that_an_actor_has_may_be_put_to_sleep_there() -> None:
    text = """
        def f(policy, policy_generation, batch):
            actor = Rollouts.remote({handed})
            assert policy_generation.prepare_for_generation()
            ray.get(actor.rollout.remote(batch))
            policy.prepare_for_training()
    """
    assert codes(text.format(handed="policy_generation")) == []
    assert codes(text.format(handed="batch")) == ["RLM010"]
