"""Comments, formatting, flags, timer keys and branch structure survive; what comes out parses, compiles, and is a fixed point."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rewriting import check, kept, migrated

from rl_session_migrate.codemod.rewrite import rewrite


def test_a_file_without_sites_comes_back_as_the_same_bytes() -> None:
    data = b"x  =  [1,2 ,3]\t# odd\r\n\x0c\nprepare_for_nothing = 1"
    assert rewrite(data).after == data


def test_comments_survive() -> None:
    check(
        """
        def f(policy, batch):
            # before the prepare
            policy.prepare_for_training()  # beside the prepare
            # before the use
            policy.train(batch, None)  # beside the use

            # before the release
            policy.offload_to_cpu()  # beside the release
            # at the end
        """,
        """
        def f(policy, batch):
            share(policy, only_colocated=True)
            # before the prepare
            # beside the prepare
            # before the use
            with scopes(policy).training_mode():
                policy.train(batch, None)  # beside the use

            # before the release
            scopes(policy).offload()  # beside the release
            # at the end
        """,
    )


def test_an_emptied_block_keeps_its_head_and_its_comments() -> None:
    check(
        """
        def f(policy, batch, timer):
            with timer.time("prep"):
                # place it
                policy.prepare_for_training()  # now
            with timer.time("train"):
                policy.train(batch, None)
        """,
        """
        def f(policy, batch, timer):
            with timer.time("prep"):
                # place it
                # now
                pass
            share(policy, only_colocated=True)
            with timer.time("train"):
                with scopes(policy).training_mode():
                    policy.train(batch, None)
        """,
    )


def test_flags_beside_a_prepare_survive() -> None:
    text = migrated(
        """
        def f(policy, batch):
            policy.prepare_for_training(); STALE = True
            policy.train(batch, None)
            return STALE
        """
    ).after.decode()
    assert "    STALE = True\n" in text
    assert "prepare_for_training" not in text


def test_formatting_of_what_is_wrapped_survives() -> None:
    before = dedent(
        '''
        def f( policy,batch ):
            policy.prepare_for_training( )
            x = policy.train(batch,
                             lambda a : """
          text
        """ ,   eval_mode = False)
            y = {1 :2}
        '''
    )
    text = rewrite(before.encode()).after.decode()
    assert "def f( policy,batch ):" in text
    assert '"""\n  text\n"""' in text  # what is inside a string is not re-indented
    assert "y = {1 :2}" in text
    assert (
        text.count("\n") == before.count("\n") + 3 + 1
    )  # an import and two lines below it; a scope and its line, less the prepare


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_newlines_are_kept(newline: str) -> None:
    before = newline.join(["def f(policy, b):", "    policy.prepare_for_training()", "    policy.train(b, None)", ""])
    after = rewrite(before.encode()).after.decode()
    others = {"\n", "\r\n", "\r"} - {newline}
    stripped = after.replace(newline, "")
    assert not any(other in stripped for other in others)
    assert after.count(newline) == 7


def test_tabs_are_kept() -> None:
    before = "def f(policy, b):\n\tpolicy.prepare_for_training()\n\tif b:\n\t\tpolicy.train(b, None)\n"
    after = rewrite(before.encode()).after.decode()
    assert "\t\twith scopes(policy).training_mode():\n\t\t\tpolicy.train(b, None)\n" in after


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-8-sig"])
def test_encodings_are_kept(encoding: str) -> None:
    cookie = "# -*- coding: latin-1 -*-\n" if encoding == "latin-1" else ""
    before = (cookie + "def f(policy, b):\n    policy.prepare_for_training()\n    policy.train(b, 'é')  # ü\n").encode(
        encoding
    )
    after = rewrite(before).after
    assert "    policy.train(b, 'é')  # ü\n" in after.decode(encoding)
    assert after.startswith(b"\xef\xbb\xbf") == (encoding == "utf-8-sig")


def test_a_file_without_a_last_newline() -> None:
    assert rewrite(b"def f(policy):\n    policy.offload_to_cpu()").after.endswith(b"\n    scopes(policy).offload()")


@pytest.mark.parametrize(
    "bad", [b"def f(:\n    policy.prepare_for_training()\n", b"\xff\xfe prepare_for_training", b"x = '\\x00'\0"]
)
def test_what_is_no_python_is_an_error(bad: bytes) -> None:
    with pytest.raises((SyntaxError, ValueError)):
        rewrite(bad)


# -- programs made of pieces ---------------------------------------------------------------------------------------

LEAVES = [
    "policy.prepare_for_training()",
    "policy.prepare_for_lp_inference()",
    "policy.offload_to_cpu()",
    "policy.finish_inference()  # a comment",
    "x = policy.get_logprobs(b)",
    "x = policy.train(b, None)",
    "policy.save_checkpoint(\n    b,\n)",
    "value_model.prepare_for_inference()",
    "value_model.get_values(b)",
    "value_model.finish_training()",
    "policy_generation.prepare_for_generation()",
    "policy_generation.prepare_for_generation(tags=['weights'])",
    "policy_generation.finish_generation()",
    "out = policy_generation.generate(b)",
    "rollout(policy_generation, b)",
    "refit_policy_generation(policy, policy_generation, True)",
    "helper(policy, b)",
    "elsewhere(policy)",
    "pool.submit(policy.train, b)",
    "# only a comment\nx = 1",
    "x = 1; policy.prepare_for_training()",
    "policy = other",
    "return x",
    "yield x",
    "g = lambda: policy.score(b)",
    "with scopes_of(x): pass",
    "assert policy.score(b)",
    "for y in policy.get_logprobs(b): print(y)",
    "if b: policy.train(b, None)",
    "'''text\n  in lines\n'''",
]
IN_LOOPS = ["continue", "break"]


def indented(text: str) -> str:
    """Text one level further in; what is inside a string of several lines stays."""
    lines, inside = [], False
    for line in text.split("\n"):
        lines.append(line if inside or not line else f"    {line}")
        inside ^= line.count("'''") % 2 == 1
    return "\n".join(lines)


def blocks(statement: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(statement, min_size=1, max_size=4).map("\n".join)
    two = st.tuples(body, body)
    loop_body = st.tuples(body, st.sampled_from(["", *IN_LOOPS])).map(
        lambda parts: "\n".join(part for part in parts if part)
    )
    return st.one_of(
        body.map(lambda b: f"if x:\n{indented(b)}"),
        two.map(lambda b: f"if x:\n{indented(b[0])}\nelse:\n{indented(b[1])}"),
        two.map(lambda b: f"if x:\n{indented(b[0])}\nelif policy.score(b):\n{indented(b[1])}"),
        body.map(lambda b: f"with timer.time('t'):\n{indented(b)}"),
        loop_body.map(lambda b: f"for b in batches:\n{indented(b)}"),
        loop_body.map(lambda b: f"while x:\n{indented(b)}"),
        two.map(lambda b: f"try:\n{indented(b[0])}\nexcept ValueError:\n{indented(b[1])}"),
        two.map(lambda b: f"try:\n{indented(b[0])}\nfinally:\n{indented(b[1])}"),
        body.map(lambda b: f"def inner():\n{indented(b)}\ninner()"),
        two.map(
            lambda b: f"match x:\n    case 1:\n{indented(indented(b[0]))}\n    case _:\n{indented(indented(b[1]))}"
        ),
    )


programs = st.lists(st.recursive(st.sampled_from(LEAVES), blocks, max_leaves=12), min_size=1, max_size=6).map("\n".join)
HEAD = "import nemo_rl\n\ndef helper(policy, b):\n    policy.prepare_for_lp_inference()\n    return policy.get_logprobs(b)\n\n"


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(programs, st.sampled_from(["def", "async def"]))
def test_whatever_comes_in_what_comes_out_compiles_and_is_a_fixed_point(body: str, how: str) -> None:
    if how == "async def" and "return x" in body and "yield x" in body:
        return  # no Python
    code = f"{HEAD}{how} loop(policy, value_model, policy_generation, batches, b, x, pool, timer, other):\n{indented(body)}\n"
    try:
        compile(code, "before", "exec", dont_inherit=True)
    except SyntaxError:
        return
    result = rewrite(code.encode())
    compile(result.after, "after", "exec", dont_inherit=True)
    again = rewrite(result.after)
    assert again.after.decode() == result.after.decode()
    _assert_nothing_is_lost(code, result.after.decode())
    rewritten = sum(outcome.status == "rewritten" for outcome in result.outcomes)
    left = [outcome for outcome in result.outcomes if outcome.status == "left"]
    assert rewritten + len(left) == len(result.outcomes)
    assert all(outcome.why and outcome.advice for outcome in left)


LIFECYCLE = ("prepare_for_", "offload_", "finish_", "forget", "offload", "wake", "sleep")


def _assert_nothing_is_lost(before: str, after: str) -> None:
    """Every call but the lifecycle's is there as often as before, in the same order, and so is every comment."""
    assert _calls(after) == _calls(before)
    comments = [line.strip() for line in before.splitlines() if line.strip().startswith("# only")]
    assert [line.strip() for line in after.splitlines() if line.strip().startswith("# only")] == comments


def _calls(code: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            ours = name in ("scopes", "share", "legacy_refit", "refit", "awake") or name.endswith("_mode")
            if not ours and not name.startswith(LIFECYCLE):
                found.append((node.lineno, node.col_offset, ast.unparse(node)))
    in_order = sorted(found)
    return [text for _, _, text in in_order]


def test_statements_on_one_line_get_a_line_each_where_one_of_them_moves_a_tenant() -> None:
    outcomes = check(
        """
        def f(policy, b):
            # train
            policy.prepare_for_training(); r = policy.train(b, None); policy.offload_to_cpu()  # and leave
            x = 1; y = 2
            return r, x, y
        """,
        """
        def f(policy, b):
            share(policy, only_colocated=True)
            # train
            with scopes(policy).training_mode():
                r = policy.train(b, None)
            scopes(policy).offload()  # and leave
            x = 1; y = 2
            return r, x, y
        """,
    )
    assert [outcome.line for outcome in outcomes] == [4, 4]


def test_statements_on_one_line_stay_there_where_nothing_is_rewritten() -> None:
    code = "def f(policy, pool):\n    policy.prepare_for_training(); pool.submit(policy.train, 1)\n"
    text = kept(code, "runs in another thread or task", changed=False)
    assert "policy.prepare_for_training(); pool.submit" in text
