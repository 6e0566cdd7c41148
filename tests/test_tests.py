"""No test passes by sleeping, by catching everything, or by asserting nothing: a rule over the source of all tests."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
BROAD = {"Exception", "BaseException"}
JUDGES = {"raises", "warns", "fail", "deprecated_call"}
"""Calls of pytest that make a test fail."""

SLEEPERS = {
    "audit/test_reader_streams.py:wait_for": "polls what a thread has read, up to a deadline, and fails then",
    "ranks/spawned.py:_end": "waits for a process to be gone, up to a deadline, and kills it then",
    "ray/test_ray.py:wait_until": "polls what another process does, up to a deadline, and fails then",
}
"""Where something sleeps, and why no result depends on how long."""
CATCHERS = {
    "faults/test_asynchronous.py:test_a_process_that_is_terminated_in_a_move_leaves_every_record_it_wrote": (
        "the forked child must not run on into pytest; the parent looks at how it ended"
    ),
}
"""Where everything is caught and let go, and why that hides nothing."""


@cache
def trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(HERE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(HERE.rglob("*.py"))
    }


def functions(tree: ast.AST) -> Iterator[FUNCTION]:
    """Every function, those inside classes and functions too."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTION):
            yield node


def name_of(call: ast.AST) -> str:
    """What is called, without what it is called on."""
    target = call.func if isinstance(call, ast.Call) else call
    return target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""


def judges_itself(function: ast.AST) -> bool:
    """Whether something in it can fail: an assertion, or a judge of pytest's."""
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and (name_of(node) in JUDGES or is_checked(node)))
        for node in ast.walk(function)
    )


def is_checked(call: ast.Call) -> bool:
    """A process that must end well: ``subprocess.run(..., check=True)``."""
    return any(keyword.arg == "check" and ast.unparse(keyword.value) == "True" for keyword in call.keywords)


def names_used(function: ast.AST) -> set[str]:
    """The plain names in it: functions that it calls or hands on, and not methods, whose names mean many things."""
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


@cache
def judging() -> frozenset[str]:
    """Names of helpers of the tests that can fail, by themselves or by helpers of theirs."""
    known: dict[str, list[ast.AST]] = defaultdict(list)
    for tree in trees().values():
        for function in functions(tree):
            if not function.name.startswith("test_"):
                known[function.name].append(function)
    found = {name for name, bodies in known.items() if any(judges_itself(body) for body in bodies)}
    found |= {"assert_log_is_consistent"}
    while True:
        more = {
            name
            for name, bodies in known.items()
            if name not in found and any(names_used(body) & found for body in bodies)
        }
        if not more:
            return frozenset(found)
        found |= more


def asserts_nothing(tree: ast.Module) -> list[str]:
    tests = (node for node in functions(tree) if node.name.startswith("test_"))
    return [test.name for test in tests if not (judges_itself(test) or names_used(test) & judging())]


def is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(name_of(each) in BROAD for each in kinds)


def lets_go(handler: ast.ExceptHandler) -> bool:
    """Whether it does nothing at all with what it caught."""
    return all(
        isinstance(line, ast.Pass | ast.Continue | ast.Break)
        or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in handler.body
    )


def catches_everything(function: ast.AST) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and lets_go(node):
            return True
        if isinstance(node, ast.Call) and name_of(node) == "suppress" and any(map(is_broad, node.args)):
            return True
    return False


def sleeps(function: ast.AST) -> bool:
    """Whether it sleeps; giving way to others (`asyncio.sleep(0)`) is none, and engines sleep too."""
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep")
        and not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
        for node in ast.walk(function)
    )


def innermost(tree: ast.Module, has: object) -> list[str]:
    """Functions of which ``has`` holds, and of no function inside them."""
    return [
        function.name
        for function in functions(tree)
        if has(function) and not any(has(node) for node in functions(function) if node is not function)  # type: ignore[operator]
    ]


def findings(has: object) -> set[str]:
    return {f"{path}:{name}" for path, tree in trees().items() for name in innermost(tree, has)}


def test_every_test_can_fail() -> None:
    silent = {f"{path}:{name}" for path, tree in trees().items() for name in asserts_nothing(tree)}
    assert silent == set()


def test_nothing_catches_everything_and_lets_it_go() -> None:
    assert findings(catches_everything) == set(CATCHERS)


def test_nothing_sleeps_but_what_waits_for_another_process() -> None:
    assert findings(sleeps) == set(SLEEPERS)


PLANTED = """
import time

def helper(): assert True

def test_of_nothing():
    print("all is well")

def test_by_a_helper():
    helper()

def test_that_catches():
    try:
        assert False
    except (ValueError, Exception):
        pass

def test_that_suppresses():
    with contextlib.suppress(BaseException):
        assert False

def test_that_lets_one_kind_go():
    try:
        assert True
    except ValueError:
        pass

def test_that_sleeps():
    time.sleep(0.1)
    assert True
"""


def test_what_is_planted_is_found() -> None:
    tree = ast.parse(PLANTED)
    assert [t.name for t in functions(tree) if not judges_itself(t) and "helper" not in names_used(t)] == [
        "test_of_nothing"
    ]
    assert asserts_nothing(tree)[0] == "test_of_nothing"
    assert innermost(tree, catches_everything) == ["test_that_catches", "test_that_suppresses"]
    assert innermost(tree, sleeps) == ["test_that_sleeps"]
