"""Walks every path of a function and keeps what each knows; asks a judge at every event.

Paths are kept apart by the tests that matter (those that decide whether a tenant is touched), so that correlated
conditions stay correlated. Functions of the same module are followed into, with what the caller knows. Left out on purpose:
paths through an exception, and everything that another thread, task or process does in between. A place with too many
paths is walked, but nothing is said about it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Protocol

import attrs
import libcst as cst

from rl_session_migrate.flow import Node, Part
from rl_session_migrate.lint.facts import Conditions
from rl_session_migrate.lint.plan import Call, Event, Handed, Named, Plan, Used, Yielded, guards
from rl_session_migrate.lint.state import Path
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import Identity
from rl_session_migrate.sites import HelperSite, Module, Site

__all__ = ["Interpreter", "Judge"]

_MAX_PATHS = 200
_MAX_DEPTH = 4


class Judge(Protocol):
    """What is asked at every event. Each method returns the paths on which the event has happened."""

    def site(self, path: Path, site: Site) -> list[Path]:
        """A method of a tenant is called, or handed on."""
        ...

    def helper(self, path: Path, site: HelperSite) -> list[Path]:
        """A known helper is called."""
        ...

    def handed(self, path: Path, event: Handed) -> list[Path]:
        """Something unknown is handed tenants."""
        ...

    def yielded(self, path: Path) -> Path:
        """The function is left for a while."""
        ...

    def used(self, path: Path, event: Used) -> Path:
        """A method that no rule knows is called on a tenant."""
        ...

    def named(self, path: Path, event: Named) -> Path:
        """A name is read."""
        ...

    def entered(self, path: Path, site: Site) -> Path:
        """A scope is entered."""
        ...

    def left(self, path: Path, site: Site, node: cst.CSTNode) -> Path:
        """A scope is left."""
        ...


class Interpreter:
    """Runs the functions of one module.

    Args:
        module: The module.
        judge: Whom to ask.
        loops: Whether loops go round; without, each runs its body once.
        plans: The plans of another walk over the same module, to be used again.
    """

    def __init__(
        self,
        module: Module,
        judge: Callable[[Interpreter], Judge],
        *,
        loops: bool = True,
        plans: dict[Function, Plan] | None = None,
    ) -> None:
        self.module = module
        self.loops = loops
        self.depth = 0
        self.calls: list[cst.Call] = []
        self._plans = plans if plans is not None else {}
        self._memo: dict[tuple[Function, Path], frozenset[Path]] = {}
        self._busy: set[Function] = set()
        self.judge = judge(self)

    def run(self, function: Function, entry: Path | None = None) -> frozenset[Path]:
        """Walk a function; returns the paths that reach its end."""
        entry = entry or Path()
        key = (function, entry)
        if key in self._memo:
            return self._memo[key]
        plan = self._plan(function)
        self._busy.add(function)
        states: dict[int, set[Path]] = defaultdict(set)
        todo: list[tuple[int, Path]] = [(plan.graph.entry, entry)]
        states[plan.graph.entry].add(entry)
        while todo:
            index, path = todo.pop()
            for target, after in self._step(plan, index, path):
                kept = _keep(states[target], after)
                if kept is not None:
                    todo.append((target, kept))
        self._busy.discard(function)
        result = self._memo[key] = frozenset(states[plan.graph.exit])
        return result

    def is_relevant(self, function: Function) -> bool:
        """Whether anything in a function concerns a tenant."""
        return bool(self._plan(function).has_events)

    def tests(self, function: Function) -> Conditions:
        """The conditions of a function."""
        return self._plan(function).tests

    def tested(self, function: Function) -> frozenset[str]:
        """The conditions that statements of a function test."""
        return self._plan(function).tested

    # -- one node ------------------------------------------------------------------------------------------------

    def _plan(self, function: Function) -> Plan:
        plan = self._plans.get(function)
        if plan is None:
            plan = self._plans[function] = Plan(self.module, function)
        return plan

    def _step(self, plan: Plan, index: int, path: Path) -> Iterator[tuple[int, Path]]:
        node = plan.graph.nodes[index]
        for after in self._through(plan, node, path):
            for edge, targets in plan.ways(index, loops=self.loops):
                went = plan.along(node, edge, after)
                if went is not None:
                    for target in targets:
                        yield target, plan.forget_dead(target, went)

    def _through(self, plan: Plan, node: Node, path: Path) -> list[Path]:
        """The paths behind a node: its events in order, then what it binds."""
        paths = [path]
        for event in plan.events[node.index]:
            paths = [after for before in paths for after in self._happen(plan, before, event)]
        scope = plan.scopes.get(node.index)
        if scope is not None:
            turn = self.judge.entered if node.part is Part.ENTER else None
            paths = [turn(p, scope) if turn else self.judge.left(p, scope, node.ast or scope.node) for p in paths]
        return [plan.bind(node, after) for after in paths]

    def _happen(self, plan: Plan, path: Path, event: Event) -> list[Path]:
        match event:
            case Site():
                return self._guarded(plan, path, event)
            case HelperSite():
                return self.judge.helper(path, event)
            case Call():
                return self._call(path, event)
            case Handed():
                return self.judge.handed(path, event)
            case Yielded():
                return [self.judge.yielded(path)]
            case Used():
                return [self.judge.used(path, event)]
            case Named():
                return [self.judge.named(path, event)]

    def _guarded(self, plan: Plan, path: Path, site: Site) -> list[Path]:
        """A site inside an expression that may be left out runs only where the expression gets to it."""
        facts = path.facts
        for test, outcome in guards(site):
            assumed = plan.tests.assume(facts, test, outcome)
            if assumed is None:
                return [path]
            facts = assumed
        after = self.judge.site(path, site)
        return [*after, path] if site.is_conditional and path not in after else after

    def _call(self, path: Path, event: Call) -> list[Path]:
        """Follow a call: the callee starts with what is known of what it is handed, and of what both can see."""
        function = event.function
        if function in self._busy or self.depth >= _MAX_DEPTH or not self.is_relevant(function):
            return [path]
        states = dict(path.tenants)
        seen = {outer.name for outer in function.chain()}
        for name, receiver in event.passed:
            states[Identity(function.name, name)] = path.of(receiver.identity)
            if receiver.identity.home not in seen and not receiver.identity.path.startswith("self."):
                states.pop(receiver.identity, None)  # one tenant, which goes by the parameter's name in there
        before = attrs.evolve(Path().put_all(states), trail=path.trail)
        self.depth += 1
        self.calls.append(event.node)
        ends = self.run(function, before)
        self.calls.pop()
        self.depth -= 1
        return [self._returned(path, end, event) for end in ends]

    @staticmethod
    def _returned(path: Path, end: Path, event: Call) -> Path:
        handed = {Identity(event.function.name, name): receiver.identity for name, receiver in event.passed}
        states = {identity: state for identity, state in end.tenants if identity.home != event.function.name}
        for inside, outside in handed.items():
            states[outside] = end.of(inside)
        return attrs.evolve(path.put_all(states), is_vague=path.is_vague or end.is_vague)


def _keep(known: set[Path], path: Path) -> Path | None:
    """Add a path to those that reach a place; None if it brings nothing new."""
    if path in known:
        return None
    if len(known) >= _MAX_PATHS:
        path = attrs.evolve(path, facts=frozenset(), is_vague=True)
        if len(known) >= 2 * _MAX_PATHS:
            path = Path(is_vague=True)
        if path in known:
            return None
    known.add(path)
    return path
