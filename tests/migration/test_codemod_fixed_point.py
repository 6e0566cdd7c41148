"""Asking twice changes nothing, whatever the file holds: loops put together at random, each rewritten and rewritten again."""

from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rl_session_migrate.codemod.rewrite import MAX_PASSES, rewrite

HANDLES = (
    "policy",
    "ref_handle",
    'handles["policy"]',
    "self.pol",
    "self.actor_handle",
    "value_model",
    "learner",
    "get()",
)
CALLS = (
    "{0}.prepare_for_lp_inference()",
    "{0}.prepare_for_lp_inference(keep_train_buffers=True)",
    "{0}.prepare_for_training()",
    "{0}.prepare_for_inference()",
    "{0}.offload_to_cpu()",
    "{0}.offload_before_refit()",
    "{0}.offload_after_refit()",
    "{0}.finish_inference()",
    "{0}.finish_training()",
    "x = {0}.get_logprobs(b)",
    "x = {0}.get_values(b)",
    "{0}.train(b, f)",
    "{0}.save_checkpoint(b)",
    "pool.submit({0}.get_logprobs, b)",
    "pool.submit({0}.offload_to_cpu)",
    "getattr({0}, 'prepare_for_training')()",
    "{0}.begin_train_step(f)",
    "{0}.train_microbatches_from_meta(b)",
    "{0}.finish_train_step()",
    "helper({0}, b)",
    "elsewhere({0})",
    "{0}.prepare_for_training(); x = {0}.train(b, f); {0}.offload_to_cpu()",
    "{0} = other",
    "shim = LegacyPolicy({0})",
    "refit_policy_generation({0}, gen, True)",
    "gen.prepare_for_generation()",
    "x = gen.generate(b)",
    "gen.finish_generation()",
)
AROUND = ("{}", "if b:\n{}", "for b in bs:\n{}", "try:\n{}\nexcept E:\n    pass", "with timer.time('t'):\n{}")


@st.composite
def statements(draw: st.DrawFn) -> str:
    """One statement, perhaps inside another."""
    handle = draw(st.sampled_from(HANDLES))
    call = draw(st.sampled_from(CALLS))
    if call.startswith("{0} =") and "(" in handle:
        call = "pass"
    lines = call.format(handle)
    around = draw(st.sampled_from(AROUND))
    return lines if around == "{}" else around.format(_indented(lines))


def _indented(text: str, by: str = "    ") -> str:
    return "\n".join(by + line for line in text.splitlines())


@st.composite
def modules(draw: st.DrawFn) -> str:
    """A helper and a method that calls it."""
    helper, body = (draw(st.lists(statements(), min_size=1, max_size=7)) for _ in range(2))
    arguments = "self, policy, value_model, learner, ref_handle, handles, gen, other, pool, timer, get, b, bs, f"
    return (
        "import nemo_rl\nfrom rl_session_migrate import LegacyPolicy\n\n\n"
        f"class Loop:\n    def step({arguments}):\n{_indented(chr(10).join(body), ' ' * 8)}\n\n\n"
        f"def helper(policy, b, self=None):\n{_indented(chr(10).join(helper))}\n"
    )


@settings(
    max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)  # shrinking takes minutes
@given(modules())
def test_a_second_run_changes_nothing_and_everything_that_stays_has_a_reason(code: str) -> None:
    first = rewrite(code.encode(), "loop.py")
    second = rewrite(first.after, "loop.py")
    assert second.after.decode() == first.after.decode()
    assert first.num_passes < MAX_PASSES
    for outcome in (*first.outcomes, *second.outcomes):
        assert outcome.why
        assert bool(outcome.advice) == (outcome.status == "left")
