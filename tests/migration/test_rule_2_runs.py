"""A scope holds the smallest run of neighbouring calls, and never crosses what it must not hold."""

from __future__ import annotations

import pytest
from rewriting import check, kept, migrated


def test_nothing_happens_to_code_that_has_its_scopes() -> None:
    code = """
        from rl_session.adapters.nemo_rl import scopes, share

        def f(policy, batch):
            share(policy, only_colocated=True)
            with scopes(policy).logprob_mode():
                policy.get_logprobs(batch)
            scopes(policy).offload()
            # prepare_for_training() is gone
        """
    assert not migrated(code).changed


def lines(*body: str) -> str:
    text = "def f(policy, value_model, policy_generation, batch, timer, other):\n"
    return text + "".join(f"    {line}\n" for line in body)


LP = "policy.prepare_for_lp_inference()"
A, B = "a = policy.get_logprobs(batch)", "b = policy.get_reference_policy_logprobs(batch)"
SHARE = "share(policy, only_colocated=True)"
SCOPE = "with scopes(policy).logprob_mode():"


def test_neighbours_share_a_scope_with_what_lies_between() -> None:
    check(
        lines(LP, A, "a = a + 1", "print(a)", B, "return a, b"),
        lines(SHARE, SCOPE, f"    {A}", "    a = a + 1", "    print(a)", f"    {B}", "return a, b"),
    )


@pytest.mark.parametrize(
    "between",
    [
        "def g(): return 1",
        "class G: pass",
        "policy = other",
        "del policy",
        "yield a",
        "v = value_model.get_values(batch)",
        "x = policy_generation.generate(batch)",
        "other(policy_generation)",
        "other(value_model)",
        "scopes_of(policy)",
    ],
)
def test_a_run_ends_before_what_it_must_not_hold(between: str) -> None:
    text = migrated(lines(LP, A, between, B)).after.decode()
    inside, depth = [], 0
    for line in text.splitlines():
        if line.startswith("    with scopes(policy)"):
            depth = 8
        elif depth and line.startswith(" " * depth):
            inside.append(line.strip())
        else:
            depth = 0
    assert between not in inside


def test_an_await_of_something_else_ends_a_run() -> None:
    code = """
        async def f(policy, batch, other):
            policy.prepare_for_lp_inference()
            a = policy.get_logprobs(batch)
            await other
            b = policy.get_logprobs(batch)
        """
    assert migrated(code).after.decode().count("with scopes(policy).logprob_mode():") == 2


def test_a_call_that_is_awaited_is_in_an_async_scope_with_its_await() -> None:
    check(
        """
        async def f(policy, batch):
            policy.prepare_for_lp_inference()
            a = await policy.get_logprobs(batch)
            return a
        """,
        """
        async def f(policy, batch):
            share(policy, only_colocated=True)
            async with scopes(policy).logprob_mode():
                a = await policy.get_logprobs(batch)
            return a
        """,
    )


def test_lifecycle_calls_end_a_run() -> None:
    text = migrated(lines(LP, A, "policy.offload_to_cpu()", LP, B)).after.decode()
    assert text.count("with scopes(policy)") == 2
    text = migrated(lines(LP, A, "value_model.finish_training()", B)).after.decode()
    assert text.count("with scopes(policy)") == 2


def test_a_try_whose_handlers_move_something_ends_a_run() -> None:
    code = lines(LP, A, "try:", "    print(a)", "except ValueError:", "    policy.offload_to_cpu()", B)
    assert migrated(code).after.decode().count("with scopes(policy)") == 2
    code = lines(LP, A, "try:", "    print(a)", "except ValueError:", "    pass", B)
    assert migrated(code).after.decode().count("with scopes(policy)") == 1


def test_calls_of_different_modes_have_different_scopes() -> None:
    check(
        lines(LP, A, "policy.prepare_for_training()", "policy.train(batch, None)"),
        lines(SHARE, SCOPE, f"    {A}", "with scopes(policy).training_mode():", "    policy.train(batch, None)"),
    )


def test_a_scope_goes_inside_a_condition() -> None:
    check(
        lines(LP, "if batch:", f"    {A}", "else:", "    a = 0", "if a:", f"    {B}"),
        lines(
            SHARE,
            "if batch:",
            f"    {SCOPE}",
            f"        {A}",
            "else:",
            "    a = 0",
            "if a:",
            f"    {SCOPE}",
            f"        {B}",
        ),
    )


def test_a_scope_goes_inside_a_loop() -> None:
    check(
        lines(LP, "for x in batch:", "    a = policy.get_logprobs(x)"),
        lines(SHARE, "for x in batch:", f"    {SCOPE}", "        a = policy.get_logprobs(x)"),
    )


def test_a_scope_goes_inside_one_timer_and_around_two() -> None:
    check(
        lines(LP, "with timer.time('a'):", f"    {A}", "print(a)"),
        lines(SHARE, "with timer.time('a'):", f"    {SCOPE}", f"        {A}", "print(a)"),
    )
    check(
        lines(LP, "with timer.time('a'):", f"    {A}", "with timer.time('b'):", f"    {B}"),
        lines(SHARE, SCOPE, "    with timer.time('a'):", f"        {A}", "    with timer.time('b'):", f"        {B}"),
    )


def test_distant_calls_have_scopes_of_their_own() -> None:
    far = [f"x{number} = {number}" for number in range(20)]
    assert migrated(lines(LP, A, *far, B)).after.decode().count("with scopes(policy)") == 2


def test_a_call_in_the_head_of_a_compound_statement_takes_the_whole_of_it() -> None:
    check(
        lines(LP, "if policy.score(batch) > 0:", "    print(1)", "elif policy.score(other) > 0:", "    print(2)"),
        lines(
            SHARE,
            SCOPE,
            "    if policy.score(batch) > 0:",
            "        print(1)",
            "    elif policy.score(other) > 0:",
            "        print(2)",
        ),
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (("while policy.score(batch) > 0:", "    value_model.get_values(batch)"), "head of a `while`"),
        (("yield policy.get_logprobs(batch)",), "the statement yields"),
        (("return (policy.get_logprobs(x) for x in batch)",), "a generator expression runs later"),
        (("return value_model.get_values(batch), policy.get_logprobs(batch)",), "wants another scope"),
        (("other(policy, policy.get_logprobs(batch))",), "handed to other()"),
        (("g = lambda: policy.get_logprobs(batch)",), "callback"),
    ],
)
def test_what_cannot_go_into_a_scope_keeps_its_prepare(body: tuple[str, ...], why: str) -> None:
    kept(lines(LP, *body), why)


def test_what_is_in_a_one_line_block_gets_a_block_of_its_own() -> None:
    check(
        "def f(policy, batch):\n    policy.prepare_for_training()\n    for x in batch: policy.train(x, None)\n",
        "def f(policy, batch):\n    share(policy, only_colocated=True)\n    for x in batch:\n"
        "        with scopes(policy).training_mode():\n            policy.train(x, None)\n",
    )
