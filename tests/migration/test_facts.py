"""Facts: what tests say of each other."""

from __future__ import annotations

import libcst as cst
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_session_migrate.lint.facts import Conditions, Facts
from rl_session_migrate.outline import outline
from rl_session_migrate.tree import parse


def conditions(body: str) -> Conditions:
    source = parse(f"def f(a, b, c):\n    {body}\n")
    table = outline(source)
    return Conditions(next(f for f in table.functions.values() if f.name == "f"), source)


def expression(text: str) -> cst.BaseExpression:
    return cst.parse_expression(text)


NOTHING: Facts = frozenset()


@pytest.mark.parametrize(
    ("given_", "asked", "answer"),
    [
        ("a", "a", True),
        ("a", "not a", False),
        ("not a", "a", False),
        ("a and b", "b", True),
        ("a and b", "a or c", True),
        ("not (a or b)", "a", False),
        ("not (a or b)", "a and b", False),
        ("a or b", "a", None),
        ("a", "b", None),
        ("x is None", "x is not None", False),
        ("x == 1", "x != 1", False),
        ("x in y", "x not in y", False),
        ("a", "True", True),
        ("a", "False", False),
        ("f()", "f()", None),
        ("x.get('k')", "x.get('k')", True),
    ],
)
def test_what_follows_from_a_test(given_: str, asked: str, answer: bool | None) -> None:
    tests = conditions("pass")
    facts = tests.assume(NOTHING, expression(given_), True)
    assert facts is not None
    assert tests.value(facts, expression(asked)) is answer


def test_a_contradiction_is_no_path() -> None:
    tests = conditions("pass")
    facts = tests.assume(NOTHING, expression("a and not b"), True)
    assert facts is not None
    assert tests.assume(facts, expression("b"), True) is None


def test_what_is_left_of_a_disjunction_when_one_side_is_known() -> None:
    tests = conditions("pass")
    facts = tests.assume(NOTHING, expression("not a"), True)
    assert facts is not None
    facts = tests.assume(facts, expression("a or b"), True)
    assert facts is not None
    assert ("b", True) in facts


def test_a_name_stands_for_its_test_unless_its_parts_change_later() -> None:
    tests = conditions("need = a and b")
    facts = tests.assume(NOTHING, expression("need"), True)
    assert facts is not None
    assert ("a", True) in facts
    tests = conditions("need = a and b\n    a = other()")
    facts = tests.assume(NOTHING, expression("need"), True)
    assert facts == {("need", True)}


def test_a_new_value_is_forgotten_and_a_constant_is_learnt() -> None:
    tests = conditions("pass")
    facts = tests.assume(NOTHING, expression("a and x.y and b"), True)
    assert facts is not None
    assert tests.forget(facts, ["x"]) == {("a", True), ("b", True)}
    assert tests.learn(facts, "a", expression("False")) >= {("a", False)}
    assert ("a", True) not in tests.learn(facts, "a", expression("g()"))
    assert tests.learn(NOTHING, "x", expression("None")) == {("x is None", True)}


TESTS = st.recursive(
    st.sampled_from(["a", "b", "c"]),
    lambda inner: st.one_of(
        inner.map(lambda t: f"(not {t})"),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    ),
    max_leaves=6,
)


@given(st.lists(st.tuples(TESTS, st.booleans()), min_size=1, max_size=4), TESTS)
def test_facts_never_rule_out_what_can_happen(assumed: list[tuple[str, bool]], asked: str) -> None:
    """Against all eight worlds: no world that agrees with the tests is excluded, and every answer holds in all of them."""
    tests = conditions("pass")
    facts: Facts | None = NOTHING
    worlds = [{"a": x, "b": y, "c": z} for x in (False, True) for y in (False, True) for z in (False, True)]
    for text, outcome in assumed:
        worlds = [world for world in worlds if bool(eval(text, {}, world)) is outcome]  # noqa: S307
        if facts is not None:
            facts = tests.assume(facts, expression(text), outcome)
    if facts is None:
        assert worlds == []
        return
    answer = tests.value(facts, expression(asked))
    for world in worlds:
        assert all(world[name] is holds for name, holds in facts if name in world)
        if answer is not None:
            assert bool(eval(asked, {}, world)) is answer  # noqa: S307
