"""Where control goes after a transition, across calls and returns inside the module, until the next one.

Answers whether everything that a manual transition served is placed by scopes instead. Decides nothing: what is scoped is
asked of a judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

import attrs
import libcst as cst

from rl_session_migrate.codemod.program import Doing, Event, Program, Spot, parameter_of
from rl_session_migrate.flow import How, Part
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import Identity, Receiver
from rl_session_migrate.rules import Api, Kind, Tenant
from rl_session_migrate.sites import Shape, Site
from rl_session_migrate.tree import callee

__all__ = ["Failure", "Reach", "Walker", "place", "reasons"]


@attrs.frozen(eq=False)
class Failure:
    """A use that relies on what the transition did.

    Attributes:
        event: The use.
        why: In words, for the report.
    """

    event: Event
    why: str


@attrs.define(eq=False)
class Reach:
    """What the paths from a place meet.

    Attributes:
        uses: Uses that are placed by scopes.
        failures: Uses that are not.
        leaves: Functions that a path leaves and that nobody in sight calls.
        is_idle: Whether some path meets the next lifecycle call, or its end, and no use before it.
    """

    uses: dict[int, Event] = attrs.field(factory=dict)
    failures: list[Failure] = attrs.field(factory=list)
    leaves: list[Function] = attrs.field(factory=list)
    is_idle: bool = False


@attrs.frozen
class _State:
    spot: Spot
    who: Identity
    used: bool = False


class Walker:
    """Follows one tenant from a place to its next lifecycle call.

    Args:
        program: The module.
        same: Whether two identities may be one object.
        judge: Why a use is not placed by a scope; "" if it is.
        hands: Why it matters that a tenant is handed to a function that is not in sight; "" if it does not.
    """

    def __init__(
        self,
        program: Program,
        same: Callable[[Identity, Identity], bool],
        judge: Callable[[Event], str],
        hands: Callable[[Event], str],
    ) -> None:
        self._program = program
        self._same = same
        self._judge = judge
        self._hands = hands
        self._inside: AbstractSet[int] = frozenset()

    def after(self, function: Function, site: Site, inside: AbstractSet[int] = frozenset()) -> Reach:
        """What follows a lifecycle call of its receiver, up to the next one.

        Args:
            function: Where the call stands.
            site: The call.
            inside: Nodes in statements that are placed as a whole: a call there is not followed.
        """
        assert site.receiver is not None
        self._inside = inside
        return self.behind(function, site.node, site.receiver)

    def behind(self, function: Function, node: cst.CSTNode, receiver: Receiver) -> Reach:
        """What follows a call, up to the next lifecycle call of a tenant."""
        reach = Reach()
        todo = [_State(spot, receiver.identity) for spot in self._program.spots_behind(function, node)]
        self._follow(todo, receiver.tenant, reach)
        return reach

    def _follow(self, todo: list[_State], tenant: Tenant, reach: Reach) -> None:
        seen: set[_State] = set()
        visited: set[tuple[int, Identity]] = set()
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            spot = state.spot
            if (id(spot.function), state.who) not in visited:
                visited.add((id(spot.function), state.who))
                self._callbacks(spot.function, state.who, reach)
            behind = self._passes(state, tenant, reach, todo)
            if behind is not None:
                graph = self._program.graph(spot.function)
                if graph.nodes[spot.index].part is Part.EXIT:
                    self._leave(spot.function, behind, reach, todo)
                # A transition that failed, and a line of our own, lead to no use by their exceptions.
                quiet = bool(spot.done) or is_our_line(graph.nodes[spot.index].ast)
                edges = [edge for edge in graph.edges[spot.index] if not (quiet and edge.how is How.EXCEPTION)]
                todo += [
                    _State(Spot(spot.function, edge.target), behind.who, behind.used)
                    for edge in edges
                    if edge.target != graph.raising
                ]

    def _passes(self, state: _State, tenant: Tenant, reach: Reach, todo: list[_State]) -> _State | None:
        """Let the events of a node happen; the state behind it, None where the path ends."""
        spot = state.spot
        for event in self._program.events(spot.function, spot.index)[spot.done :]:
            if id(event.node) in self._inside:
                reach.uses[id(event.node)] = event
                state = attrs.evolve(state, used=True)
            elif event.doing is Doing.YIELD:
                self._leave(spot.function, state, reach, todo)
            elif event.doing is Doing.CALL:
                if self._descend(event, state, todo):
                    return None
            elif any(self._concerns(receiver, state.who, tenant) for receiver in event.receivers()):
                if self._happens(event, reach):
                    reach.is_idle |= not state.used and event.doing is Doing.LIFECYCLE
                    return None
                state = attrs.evolve(state, used=True)
        return state

    def _concerns(self, receiver: Receiver, who: Identity, tenant: Tenant) -> bool:
        return receiver.tenant is tenant and self._same(receiver.identity, who)

    def _happens(self, event: Event, reach: Reach) -> bool:
        """Note an event of the tenant; whether it is its next lifecycle call."""
        site = event.site
        match event.doing:
            case Doing.LIFECYCLE:
                assert site is not None
                if not site.shape.runs_here:
                    reach.failures.append(
                        Failure(event, f"{site.method} comes next in {place(site.function)}: {_WRITTEN[site.shape]}")
                    )
                    return False
                return not site.is_conditional and site.rule.kind is not Kind.NOOP
            case Doing.USE if site is not None and self._is_mid_step(site):
                return True
            case Doing.USE | Doing.REFIT:
                why = self._judge(event)
                if why:
                    reach.failures.append(Failure(event, why))
                else:
                    reach.uses[id(event.node)] = event
                return event.doing is Doing.REFIT and not why
            case Doing.ENTER:
                assert site is not None
                reach.uses[id(event.node)] = event
                return site.rule.kind is Kind.REFIT
            case Doing.HANDED:
                why = self._hands(event)
                if why:
                    reach.failures.append(Failure(event, why))
                else:
                    reach.uses[id(event.node)] = event
        return False

    def _is_mid_step(self, site: Site) -> bool:
        """Whether a call works on a step that the same function must have begun before: no path gets here otherwise."""
        if site.rule.kind is not Kind.STEP or site.rule.gate == "begin_step" or site.rule.api is not Api.LEGACY:
            return False
        return any(other.rule.gate == "begin_step" for other in self._program.module.sites_in(site.function))

    # -- calls and returns ---------------------------------------------------------------------------------------

    def _descend(self, event: Event, state: _State, todo: list[_State]) -> bool:
        """Follow a call into a function of this module; what comes behind it is reached when that returns."""
        target, who, spot = event.callee, state.who, state.spot
        assert target is not None
        inner: list[Identity] = [
            Identity(target.name, name) for name, receiver in event.handed.items() if self._same(receiver.identity, who)
        ]
        if not inner and who.home != spot.function.name and self._sees(target, who):
            inner = [who]
        if (
            not inner
            and who.home == spot.function.name
            and spot.function in target.chain()
            and target is not spot.function
        ):
            inner = [who]  # a function nested in the one whose name it is
        entry = Spot(target, self._program.graph(target).entry)
        todo += [_State(entry, identity, state.used) for identity in inner]
        return bool(inner)

    @staticmethod
    def _sees(target: Function, who: Identity) -> bool:
        """Whether a function can name an object of an outer function, its class or the module."""
        if target.owner is not None and who.home == target.owner.name:
            return True
        return any(function.name == who.home for function in target.chain())

    def _leave(self, function: Function, state: _State, reach: Reach, todo: list[_State]) -> None:
        """Go on behind every call of a function that a path leaves."""
        who = state.who
        parameter = parameter_of(function, who)
        callers = self._program.callers(function)
        if not callers:
            reach.leaves.append(function)
        for caller in callers:
            if parameter is not None:
                receiver = caller.event.handed.get(parameter)
                if receiver is not None:
                    todo += [_State(spot, receiver.identity, state.used) for spot in caller.spots]
            elif who.home != function.name:
                todo += [_State(spot, who, state.used) for spot in caller.spots]
        if who.path.startswith("self."):
            self._other_methods(function, who, reach)

    def _other_methods(self, function: Function, who: Identity, reach: Reach) -> None:
        """An attribute outlives the method: whatever a method of the class does may come next."""
        for other in self._program.functions:
            if other is not function and other.owner is not None and other.owner.name == who.home:
                self._anytime(other, who, reach)

    def _callbacks(self, function: Function, who: Identity, reach: Reach) -> None:
        """What a function hands on, defined inside it, may run whenever."""
        for other in self._program.functions:
            if other is not function and function in other.chain() and self._program.is_callback(other):
                self._anytime(other, who, reach)

    def _anytime(self, function: Function, who: Identity, reach: Reach) -> None:
        for event in self._program.all_events(function):
            if event.doing is Doing.USE and any(self._same(r.identity, who) for r in event.receivers()):
                why = self._judge(event)
                if why:
                    reach.failures.append(Failure(event, why))
                else:
                    reach.uses[id(event.node)] = event


_WRITTEN = {
    Shape.SUBMITTED: "it is passed as a value and runs in another thread or task",
    Shape.VALUE: "it is passed as a value, and when it runs is not in sight",
    Shape.STRING: "it is named in a string",
}
"""How a transition is written that may not have happened when its statement is over."""


def place(function: Function) -> str:
    """A function, in words."""
    return (
        f"{function.name}()"
        if function.name and "<lambda>" not in function.name
        else "a lambda"
        if function.name
        else "the module"
    )


def is_our_line(node: cst.CSTNode | None) -> bool:
    """Whether a statement is ``scopes(x).forget()`` or ``share(...)``: neither does anything to a device."""
    return (
        isinstance(node, cst.Expr)
        and isinstance(node.value, cst.Call)
        and callee(node.value) in ("forget", "share", "rl_share")
    )


def reasons(failures: Iterable[Failure]) -> str:
    """The first reason of several failures, and how many more there are."""
    found = list(dict.fromkeys(failure.why for failure in failures))
    return found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")
