"""What a path knows: how the tests on it came out, and what follows from that.

A fact is a condition, as text, that is known to hold or not. Tests are taken apart along ``not``, ``and`` and ``or``, and
through names that stand for a test (``need = not a or not b``), so that ``if not (a and b): prepare()`` is known to cover
``if not a: compute()``. Calls whose answer may change between two looks are no facts. Knows nothing of tenants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import libcst as cst

from rl_session_migrate.outline import By, Function
from rl_session_migrate.tree import Source, callee, code, walk

__all__ = ["Conditions", "Facts"]

Facts = frozenset[tuple[str, bool]]
"""Conditions and how they came out. Contradictions never get in: assuming one yields None."""

_STABLE_CALLS = frozenset({"get", "len", "isinstance", "hasattr", "getattr", "bool", "issubclass", "callable"})
_NEGATED = {"!=": "==", "is not": "is", "not in": "in"}


class Conditions:
    """The conditions of one function.

    Args:
        function: The function.
        source: Its module, for the order of assignments.
    """

    def __init__(self, function: Function, source: Source) -> None:
        self._definitions = dict(_definitions(function, source))
        self._roots: dict[str, frozenset[str]] = {}
        self._known: dict[cst.BaseExpression, tuple[str, bool] | None] = {}

    def assume(self, facts: Facts, test: cst.BaseExpression, outcome: bool) -> Facts | None:
        """The facts after a test came out as ``outcome``, or None if that contradicts what is known."""
        return self._assume(facts, test, outcome, 0)

    def value(self, facts: Facts, test: cst.BaseExpression) -> bool | None:
        """How a test must come out, if that is known."""
        if self.assume(facts, test, True) is None:
            return False
        return True if self.assume(facts, test, False) is None else None

    def forget(self, facts: Facts, names: Iterable[str]) -> Facts:
        """Drop what is no longer known when names (or ``a.b`` paths) get new values."""
        gone = frozenset(names)
        if not gone or not facts:
            return facts
        return frozenset(fact for fact in facts if not self._mentions(fact[0], gone))

    def surviving(self, atoms: Iterable[str], names: Iterable[str]) -> frozenset[str]:
        """The conditions that say the same before and after names get new values."""
        gone = frozenset(names)
        return frozenset(atom for atom in atoms if not self._mentions(atom, gone))

    def learn(self, facts: Facts, name: str, value: cst.BaseExpression) -> Facts:
        """What an assignment tells: ``stale = False``."""
        facts = self.forget(facts, (name,))
        if isinstance(value, cst.Name) and value.value in ("True", "False"):
            return facts | {(name, value.value == "True")}
        if isinstance(value, cst.Name) and value.value == "None":
            return facts | {(f"{name} is None", True)}
        return facts

    def atoms(self, test: cst.BaseExpression) -> frozenset[str]:
        """Every condition that a test depends on."""
        return frozenset(self._atoms(test, 0))

    def _atoms(self, test: cst.BaseExpression, depth: int) -> Iterator[str]:
        match test:
            case cst.UnaryOperation(operator=cst.Not()):
                yield from self._atoms(test.expression, depth)
            case cst.BooleanOperation():
                whole = self._atom(test)  # which side decided is not known, but the whole comes out the same again
                if whole is not None:
                    yield whole[0]
                yield from self._atoms(test.left, depth)
                yield from self._atoms(test.right, depth)
            case _:
                atom = self._atom(test)
                if atom is None:
                    return
                yield atom[0]
                definition = self._definitions.get(atom[0])
                if definition is not None and depth < 4:
                    yield from self._atoms(definition, depth + 1)

    def _assume(self, facts: Facts, test: cst.BaseExpression, outcome: bool, depth: int) -> Facts | None:
        match test:
            case cst.UnaryOperation(operator=cst.Not()):
                return self._assume(facts, test.expression, not outcome, depth)
            case cst.BooleanOperation():
                return self._assume_both(facts, test, outcome, depth)
            case cst.Name(value="True" | "False"):
                return facts if (test.value == "True") == outcome else None
            case cst.NamedExpr():
                return self._assume(facts, test.value, outcome, depth)
        atom = self._atom(test)
        if atom is None:
            return facts
        text, holds = atom[0], atom[1] == outcome
        if (text, not holds) in facts:
            return None
        learnt: Facts | None = facts | {(text, holds)}
        definition = self._definitions.get(text)
        if definition is not None and depth < 4:
            assert learnt is not None
            learnt = self._assume(learnt, definition, holds, depth + 1)
        return learnt

    def _assume_both(self, facts: Facts, test: cst.BooleanOperation, outcome: bool, depth: int) -> Facts | None:
        """``a and b`` is true if both are; false if either is, and then nothing is known of which, unless one is known."""
        whole = self._atom(test)
        if whole is not None:
            if (whole[0], not outcome) in facts:
                return None
            facts = facts | {(whole[0], outcome)}
        conjunction = isinstance(test.operator, cst.And)
        if conjunction is outcome:  # (a and b) true, (a or b) false: both sides are known
            left = self._assume(facts, test.left, outcome, depth)
            return None if left is None else self._assume(left, test.right, outcome, depth)
        left = self._assume(facts, test.left, outcome, depth)
        right = self._assume(facts, test.right, outcome, depth)
        if left is None:
            return right
        if right is None:
            return left
        # One side holds; which one is open. What both ways know is known.
        return left & right | facts

    def _atom(self, test: cst.BaseExpression) -> tuple[str, bool] | None:
        """A condition as text and whether the text is what was tested or its negation; None if it may change by itself."""
        if test not in self._known:
            self._known[test] = self._read(test)
        return self._known[test]

    def _read(self, test: cst.BaseExpression) -> tuple[str, bool] | None:
        if any(
            isinstance(node, (cst.Await, cst.Yield, cst.NamedExpr, cst.Lambda))
            or (isinstance(node, cst.Call) and callee(node) not in _STABLE_CALLS)
            for node in walk(test)
        ):
            return None
        holds = True
        if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
            target = test.comparisons[0]
            sign = " ".join(code(target.operator).split())
            if sign in _NEGATED:
                sign, holds = _NEGATED[sign], False
            text = f"{code(test.left)} {sign} {code(target.comparator)}"
        else:
            text = code(test)
        self._roots.setdefault(text, frozenset(_paths(test)))
        return text, holds

    def _mentions(self, text: str, gone: frozenset[str]) -> bool:
        paths = self._roots.get(text)
        if paths is None:  # learnt from an assignment: the text begins with the name
            paths = frozenset({text.split(" ", maxsplit=1)[0]})
        return any(path == name or path.startswith((f"{name}.", f"{name}[")) for path in paths for name in gone)


def _paths(test: cst.CSTNode) -> Iterator[str]:
    for node in walk(test):
        if isinstance(node, (cst.Name, cst.Attribute)):
            yield code(node)


def _definitions(function: Function, source: Source) -> Iterator[tuple[str, cst.BaseExpression]]:
    """Names with one value, a test of names that have their values before: the name may stand for the test."""
    for name, bindings in function.bindings.items():
        if len(bindings) != 1 or bindings[0].by is not By.ASSIGN or bindings[0].value is None:
            continue
        value = bindings[0].value
        if not isinstance(value, (cst.BooleanOperation, cst.UnaryOperation, cst.Comparison)):
            continue
        line = source.line(value)
        names = [node.value for node in walk(value) if isinstance(node, cst.Name)]
        settled = all(
            source.line(other.node) <= line and other.by in (By.ASSIGN, By.PARAMETER, By.UNPACK)
            for used in names
            for other in function.bindings.get(used, ())
        )
        if settled and name not in names:
            yield name, value
