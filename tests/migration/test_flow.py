"""Control flow graphs: which statements a path can meet, in which order."""

from __future__ import annotations

import libcst as cst
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_session_migrate.flow import (
    Direction,
    Graph,
    How,
    Node,
    Part,
    Summaries,
    build,
    evaluated,
    on_every_path,
    on_some_path,
    solve,
)
from rl_session_migrate.outline import Function, Outline, outline
from rl_session_migrate.tree import callee, code, parse


def graph_of(text: str) -> Graph:
    table = outline(parse("def f():\n" + "".join(f"    {line}\n" for line in text.splitlines())))
    return build(next(f for f in table.functions.values() if f.name == "f"))


def calls(node: Node) -> list[str]:
    return [callee(n) for n in evaluated(node) if isinstance(n, cst.Call)]


def paths(text: str, *, exceptions: bool = False, rounds: int = 2) -> set[str]:
    """Every path as the names it calls, ending in ``return`` or ``raise``; loops at most ``rounds`` times."""
    graph = graph_of(text)
    found: set[str] = set()

    def go(index: int, so_far: tuple[str, ...], taken: dict[int, int]) -> None:
        node = graph.nodes[index]
        if node.part in (Part.EXIT, Part.RAISE):
            found.add(" ".join((*so_far, "return" if node.part is Part.EXIT else "raise")))
            return
        if taken.get(index, 0) >= rounds:
            return
        names = calls(node)
        leave = (
            [f"leave-{callee(node.ast.item)}"]
            if node.part is Part.LEAVE and isinstance(node.ast, cst.WithItem) and isinstance(node.ast.item, cst.Call)
            else []
        )
        for edge in graph.edges[index]:
            if edge.how is How.EXCEPTION and not exceptions and not isinstance(node.ast, cst.Raise):
                continue
            went = () if edge.how is How.EXCEPTION else (*names, *leave)
            go(edge.target, (*so_far, *went), {**taken, index: taken.get(index, 0) + 1})

    go(graph.entry, (), {})
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pass", {"return"}),
        ("a()\nb()", {"a b return"}),
        ("if x:\n    a()\nelse:\n    b()\nc()", {"a c return", "b c return"}),
        ("if x:\n    a()\nelif y:\n    b()\nc()", {"a c return", "b c return", "c return"}),
        ("if x:\n    return\na()", {"return", "a return"}),
        ("while True:\n    a()\n    if x:\n        break\nb()", {"a b return", "a a b return"}),
        ("while x:\n    a()\nelse:\n    b()", {"b return", "a b return"}),
        ("for i in x:\n    if y:\n        continue\n    a()\nb()", {"b return", "a b return"}),
        ("for i in x:\n    if y:\n        break\nelse:\n    a()\nb()", {"b return", "a b return"}),
        ("with m():\n    a()\nb()", {"m a leave-m b return"}),
        ("with m(), n():\n    return a()", {"m n a leave-n leave-m return"}),
        ("for i in x:\n    with m():\n        break\na()", {"m leave-m a return", "a return"}),
        ("try:\n    return a()\nfinally:\n    b()\nc()", {"a b return"}),
        ("try:\n    a()\nfinally:\n    b()\nc()", {"a b c return"}),
        ("for i in x:\n    try:\n        continue\n    finally:\n        b()\nc()", {"c return", "b c return"}),
        ("try:\n    a()\nexcept E:\n    b()\nelse:\n    c()\nd()", {"a c d return"}),
        (
            "match x:\n    case 1:\n        a()\n    case 2 if g():\n        b()\n    case _:\n        c()",
            {"a return", "g b return", "g c return", "c return"},
        ),
        ("raise E()", {"raise"}),
        ("yield a()\nawait b()", {"a b return"}),
        ("x = a(b(), c())", {"b c a return"}),
        ("x = lambda: a()\ndef g():\n    b()\nc()", {"c return"}),
    ],
)
def test_paths(text: str, expected: set[str]) -> None:
    assert paths(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("try:\n    a()\nexcept E:\n    b()\nc()", {"a c return", "b c return", "raise", "a raise", "b raise"}),
        ("try:\n    a()\nexcept:\n    b()", {"a return", "b return", "raise"}),
        ("try:\n    a()\nfinally:\n    b()", {"a b return", "b raise", "raise", "a raise"}),
        ("with m():\n    a()", {"m a leave-m return", "m leave-m raise", "raise"}),
        (
            "try:\n    a()\nexcept:\n    b()\n    raise\nfinally:\n    c()",
            {"a c return", "b c raise", "c raise", "raise", "a raise", "b raise"},
        ),
    ],
)
def test_exceptions_run_handlers_finally_and_exits(text: str, expected: set[str]) -> None:
    assert paths(text, exceptions=True) == expected


def calls_to(name: str, graph: Graph) -> int:
    return next(node.index for node in graph.nodes if name in calls(node))


def test_every_path_and_some_path_differ_where_a_branch_leaves_out() -> None:
    graph = graph_of("a()\nif x:\n    b()\nc()")
    start = calls_to("a", graph)
    assert not on_every_path(graph, start, lambda n: "b" in calls(n), lambda n: False)
    assert on_every_path(graph, start, lambda n: "c" in calls(n), lambda n: False)
    assert not on_every_path(graph, start, lambda n: "c" in calls(n), lambda n: "b" in calls(n))
    met = on_some_path(graph, start, lambda n: "b" in calls(n), lambda n: False)
    assert met is not None
    assert met.index == calls_to("b", graph)
    assert on_some_path(graph, start, lambda n: "z" in calls(n), lambda n: False) is None


def names_before(text: str, direction: Direction) -> dict[str, frozenset[str]]:
    graph = graph_of(text)
    values = solve(
        graph,
        initial=frozenset[str](),
        transfer=lambda node, value: value | frozenset(calls(node)),
        join=lambda a, b: a | b,
        direction=direction,
    )
    return {name: values[node.index] for node in graph.nodes if node.index in values for name in calls(node)}


def test_the_solver_goes_round_loops_and_both_ways() -> None:
    text = "a()\nfor i in x:\n    b()\n    c()\nd()"
    forward = names_before(text, Direction.FORWARD)
    assert forward == {"a": frozenset(), "b": frozenset("abc"), "c": frozenset("abc"), "d": frozenset("abc")}
    backward = names_before(text, Direction.BACKWARD)
    assert backward == {"a": frozenset("bcd"), "b": frozenset("bcd"), "c": frozenset("bcd"), "d": frozenset()}


def test_an_edge_can_be_closed() -> None:
    graph = graph_of("if x:\n    a()\nb()")
    values = solve(
        graph,
        initial=0,
        transfer=lambda node, value: value,
        join=max,
        along=lambda edge, value: None if edge.how is How.TRUE else value,
    )
    assert calls_to("a", graph) not in values
    assert calls_to("b", graph) in values


def called(function: Function, table: Outline, summaries: Summaries[frozenset[str]]) -> frozenset[str]:
    names: set[str] = set()
    for node in build(function).nodes:
        for name in calls(node):
            callee_ = table.callable_named(name, caller=function)
            names |= summaries.of(callee_) if callee_ is not None else {name}
    return frozenset(names)


def test_summaries_reach_a_fixpoint_through_recursion() -> None:
    table = outline(parse("def f():\n    g()\n    a()\ndef g():\n    b()\n    f()\n"))
    summaries = Summaries(table.functions.values(), frozenset[str](), lambda f, s: called(f, table, s))
    by_name = {function.name: summaries.of(function) for function in table.functions.values()}
    assert by_name["f"] == by_name["g"] == frozenset("ab")


_LEAVES = st.sampled_from(["a()", "b()", "return", "raise E", "pass", "x = yield"])
_IN_LOOP = st.sampled_from(["a()", "break", "continue", "return"])


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    block = st.lists(inner, min_size=1, max_size=3).map("\n".join).map(_indent)
    return st.one_of(
        st.tuples(block, block).map(lambda b: f"if x:\n{b[0]}\nelse:\n{b[1]}"),
        st.tuples(block, _IN_LOOP).map(lambda b: f"for i in y:\n{b[0]}\n    {b[1]}"),
        block.map(lambda b: f"while z:\n{b}"),
        block.map(lambda b: f"with m() as n:\n{b}"),
        st.tuples(block, block, block).map(lambda b: f"try:\n{b[0]}\nexcept E:\n{b[1]}\nfinally:\n{b[2]}"),
        block.map(lambda b: f"match x:\n    case 1:\n{_indent(b)}\n    case _:\n        pass"),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.recursive(_LEAVES, _compound, max_leaves=12), min_size=1, max_size=4).map("\n".join))
def test_any_program_has_a_sound_graph(text: str) -> None:
    graph = graph_of(text)
    reached = graph.reachable()
    for index in reached:
        node = graph.nodes[index]
        ends = node.part in (Part.EXIT, Part.RAISE)
        assert ends == (not graph.edges[index]), (code(node.ast) if node.ast else node.part, text)
        for edge in graph.edges[index]:
            assert edge in graph.back[edge.target]
    assert graph.exit in reached or graph.raising in reached or "while" in text
