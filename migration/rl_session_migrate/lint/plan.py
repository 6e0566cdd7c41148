"""What happens at each node of a function's graph, worked out once: events, tests worth remembering, bindings.

Knows nothing of what the events mean.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise

import attrs
import libcst as cst

from rl_session_migrate.flow import Direction, Edge, Graph, How, Node, Part, build, evaluated, solve
from rl_session_migrate.lint.facts import Conditions
from rl_session_migrate.lint.state import Path, State, Step
from rl_session_migrate.outline import By, Function
from rl_session_migrate.receivers import Identity, Receiver
from rl_session_migrate.rules import Api, Kind, Tenant
from rl_session_migrate.sites import HelperSite, Module, Shape, Site
from rl_session_migrate.tree import callee, children, code, dotted, is_string, walk

__all__ = ["Call", "Event", "Handed", "Named", "Plan", "Used", "Yielded", "assigned_name", "guards", "waits_for"]

_HARMLESS = re.compile(
    r"isinstance|issubclass|hasattr|getattr|id|type|repr|str|print|len|bool|callable"
    r"|.*(?:_log|log_|logger|profile|print|snapshot|metric|describe).*"
)
"""Calls that only look at what they are handed."""


_WAITS = frozenset({"get", "wait", "result", "gather", "run"})
"""Calls that wait for the futures they are given, or called on."""


@attrs.frozen(eq=False)
class Call:
    """A call of a function of the same module.

    Attributes:
        node: The call.
        function: What is called.
        passed: Parameter name to the tenant it is handed.
    """

    node: cst.Call
    function: Function
    passed: tuple[tuple[str, Receiver], ...]


@attrs.frozen(eq=False)
class Handed:
    """A call of something unknown that is handed tenants.

    Attributes:
        node: The call.
        name: Its last name.
        receivers: The tenants.
    """

    node: cst.Call
    name: str
    receivers: tuple[Receiver, ...]


@attrs.frozen(eq=False)
class Yielded:
    """Control leaves the function for a while."""

    node: cst.CSTNode


@attrs.frozen(eq=False)
class Named:
    """A name is read.

    Attributes:
        name: The name.
        node: Where.
        waits: What waits for it there, such as ``get``; "" where nothing does.
    """

    name: str
    node: cst.Name
    waits: str = ""


@attrs.frozen(eq=False)
class Used:
    """A method that no rule knows is called on a tenant.

    Attributes:
        receiver: The tenant.
    """

    receiver: Receiver


Event = Site | HelperSite | Call | Handed | Yielded | Named | Used


def waits_for(around: Iterable[tuple[cst.CSTNode, cst.CSTNode]]) -> str:
    """What waits for the futures that stand in these nodes (from the inside); "" where they are only handed around."""
    for above, below in around:
        match above:
            case cst.Call() if callee(above) in _WAITS:
                return callee(above)
            case cst.ListComp() | cst.SetComp() | cst.GeneratorExp() if below is above.for_in:
                found = _wait_in(above.elt)
            case cst.For() if below is above.iter:
                found = _wait_in(above.body)
            case _:
                found = ""
        if found or isinstance(above, cst.BaseStatement):
            return found
    return ""


def _wait_in(node: cst.CSTNode) -> str:
    calls = (callee(below) for below in walk(node) if isinstance(below, cst.Call))
    return next((name for name in calls if name in _WAITS), "")


def guards(site: Site) -> Iterator[tuple[cst.BaseExpression, bool]]:
    """The tests inside the statement that decide whether it gets to a site."""
    if not site.is_conditional:
        return
    chain = (*site.parents, site.node)
    for above, below in pairwise(chain):
        match above:
            case cst.IfExp() if below is not above.test:
                yield above.test, below is above.body
            case cst.BooleanOperation() if below is above.right:
                yield above.left, isinstance(above.operator, cst.And)


class Plan:
    """What happens at each node of a function, worked out once."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module = module
        self.function = function
        self.graph: Graph = build(function)
        self.tests = Conditions(function, module.source)
        self.scopes: dict[int, Site] = {}
        self.deciding: set[cst.CSTNode] = set()
        self.rounds = dict(_rounds(self.graph))
        self._tenant_names = {
            site.receiver.identity.path.partition(".")[0] for site in module.sites if site.receiver is not None
        }
        self.pending = _future_names(module, function)
        self._awaited = frozenset(
            node.expression for node in walk(function.node, into_functions=False) if isinstance(node, cst.Await)
        )
        self.bound = [dict(_bound(node)) for node in self.graph.nodes]
        self.events: list[list[Event]] = [self._events(node) for node in self.graph.nodes]
        self.has_events = any(self.events) or bool(self.scopes)
        self.relevant = self._relevant() if self.has_events else frozenset()
        self._live = self._liveness() if self.relevant else {}
        self._inert = frozenset(node.index for node in self.graph.nodes if self._is_inert(node))
        self._ways: dict[tuple[int, bool], list[tuple[Edge, tuple[int, ...]]]] = {}

    # -- events --------------------------------------------------------------------------------------------------

    def _events(self, node: Node) -> list[Event]:
        if node.part in (Part.ENTER, Part.LEAVE) and isinstance(node.ast, cst.WithItem):
            scope = self._scope_of(node.ast.item)
            if scope is not None:
                self.scopes[node.index] = scope
        found: list[Event] = []
        stored = [target.target for target in node.ast.targets] if isinstance(node.ast, cst.Assign) else []
        for piece in evaluated(node):
            if isinstance(piece, (cst.Call, cst.Attribute)):
                site = self.module.at(piece)
                if isinstance(site, HelperSite) and self._is_migrated(site):
                    found += self._call(site.node)
                elif site is not None and site.node is piece:
                    found.append(site)
                elif site is None and isinstance(piece, cst.Call):
                    found += self._call(piece)
            elif isinstance(piece, cst.Yield):
                found.append(Yielded(piece))
            elif isinstance(piece, cst.Name) and piece.value in self.pending and piece not in stored:
                found.append(Named(piece.value, piece, waits_for(self._around(piece))))
        return found

    def _scope_of(self, item: cst.BaseExpression) -> Site | None:
        """The scope-making call that a ``with`` item enters, directly or by the one name it was given."""
        if isinstance(item, cst.Name):
            home = self.function.home_of(item.value)
            bindings = home.bindings[item.value] if home is not None else []
            if len(bindings) != 1 or bindings[0].by is not By.ASSIGN or bindings[0].value is None:
                return None
            item = bindings[0].value
        site = self.module.at(item)
        is_scope = isinstance(site, Site) and (site.rule.kind is Kind.SCOPE or site.method == "begin_step")
        return site if is_scope and isinstance(site, Site) else None

    def _is_migrated(self, helper: HelperSite) -> bool:
        """Whether a known helper is defined in this module, and speaks to scopes by now."""
        path = dotted(helper.node.func)
        called = self.module.outline.callable_named(path, caller=self.function) if path else None
        return called is not None and any(s.function is called and s.rule.api is Api.SCOPED for s in self.module.sites)

    def _call(self, node: cst.Call) -> list[Event]:
        path = dotted(node.func)
        called = self.module.outline.callable_named(path, caller=self.function) if path else None
        receivers = list(self._handed(node, called))
        if callee(node) == "remote":  # an actor that has the engine may put it to sleep
            receivers += [("", engine) for engine in self._engines_elsewhere]
        if called is not None:
            if called.is_generator or (called.is_async and node not in self._awaited):
                return []  # runs later, piece by piece
            return [Call(node, called, tuple((name, receiver) for name, receiver in receivers if name))]
        chooses = callee(node) == "getattr" and len(node.args) > 1 and is_string(node.args[1].value) is None
        if not receivers or (_HARMLESS.fullmatch(callee(node)) and not chooses):
            on = node.func.value if isinstance(node.func, cst.Attribute) and not receivers else None
            used = self.module.receivers.of(on, self.function) if on is not None else None
            return [Used(used)] if used is not None and self.module.receivers.speaks else []
        return [Handed(node, callee(node), tuple(receiver for _, receiver in receivers))]

    def _handed(self, node: cst.Call, called: Function | None) -> Iterator[tuple[str, Receiver]]:
        """The tenants among the arguments, with the parameter's name where it is known."""
        names = [parameter.name for parameter in called.parameters if not parameter.is_keyword_only] if called else []
        position = 0
        for arg in node.args:
            name = arg.keyword.value if arg.keyword is not None else ""
            if arg.keyword is None and not arg.star:
                name = names[position] if position < len(names) else ""
                position += 1
            receiver = self.module.receivers.of(arg.value, self.function)
            if receiver is not None and self.module.receivers.speaks:
                yield name, receiver

    @cached_property
    def _parents(self) -> Mapping[cst.CSTNode, cst.CSTNode]:
        return {child: node for node in walk(self.function.node, into_functions=False) for child in children(node)}

    def _around(self, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
        """What is around a node, from the inside, each with what it holds it in."""
        while (above := self._parents.get(node)) is not None:
            yield above, node
            node = above

    @cached_property
    def _engines_elsewhere(self) -> tuple[Receiver, ...]:
        """The engines of this function whose handles it, or a function around it, sends to an actor."""
        found: dict[Identity, Receiver] = {}
        for function in self.function.chain():
            for node in walk(function.node, into_functions=False):
                if not isinstance(node, cst.Call) or callee(node) != "remote":
                    continue
                for arg in node.args:
                    receiver = self.module.receivers.of(arg.value, function)
                    if receiver is not None and receiver.tenant is Tenant.ENGINE:
                        found[receiver.identity] = receiver
        return tuple(found.values())

    # -- tests ---------------------------------------------------------------------------------------------------

    @cached_property
    def tested(self) -> frozenset[str]:
        """The conditions that statements of the function test."""
        tests = [
            node.ast.test if isinstance(node.ast, cst.Assert) else node.ast
            for node in self.graph.nodes
            if node.part is Part.TEST or isinstance(node.ast, cst.Assert)
        ]
        return frozenset(a for test in tests if isinstance(test, cst.BaseExpression) for a in self.tests.atoms(test))

    # -- ways ----------------------------------------------------------------------------------------------------

    def ways(self, index: int, *, loops: bool) -> list[tuple[Edge, tuple[int, ...]]]:
        """The edges out of a node, each with the next nodes where anything happens: most of a program is none of our business."""
        key = (index, loops)
        if key not in self._ways:
            edges = [
                e for e in self.graph.edges[index] if e.how is not How.EXCEPTION and (loops or e.how is not How.BACK)
            ]
            self._ways[key] = [(edge, tuple(self._next(edge.target, loops))) for edge in edges]
        return self._ways[key]

    def _next(self, start: int, loops: bool) -> Iterator[int]:
        seen, todo = {start}, [start]
        while todo:
            index = todo.pop()
            if index not in self._inert:
                yield index
                continue
            for edge in self.graph.edges[index]:
                passes = edge.how is not How.EXCEPTION and (loops or edge.how is not How.BACK)
                if passes and edge.target not in seen:
                    seen.add(edge.target)
                    todo.append(edge.target)

    def _is_inert(self, node: Node) -> bool:
        """Whether a node changes nothing that any path knows."""
        if (
            node.part in (Part.ENTRY, Part.EXIT)
            or node.index in self.rounds
            or self.events[node.index]
            or node.index in self.scopes
        ):
            return False
        if node.ast in self.deciding or (
            isinstance(node.ast, cst.Assert) and self.tests.atoms(node.ast.test) & self.relevant
        ):
            return False
        if (
            node.part is Part.TEST
            and isinstance(node.ast, cst.BaseExpression)
            and self.tests.atoms(node.ast) & self.relevant
        ):
            return False
        bound = set(self.bound[node.index])
        return not bound & self._tenant_names and self.tests.surviving(self.relevant, bound) == self.relevant

    def _relevant(self) -> frozenset[str]:
        """The conditions worth remembering: those that decide whether an event happens, and where the engine lives."""
        parents = self._parents
        busy = _above(
            (n.ast for n in self.graph.nodes if n.ast is not None and (self.events[n.index] or n.index in self.scopes)),
            parents,
        )
        moving = _above(self._moves, parents)
        asked: Counter[str] = Counter()
        again: set[str] = set()
        for test, within in self._tests():
            mine = self.tests.atoms(test)
            if within in busy:
                self.deciding.add(test)
                # In a loop a test meets its own outcome of the round before; that matters where it decides on moves.
                if within in moving and any(type(p) in _LOOPS for p in _above((within,), parents)):
                    again |= mine
            counts = within is None or within in busy
            asked.update(mine if counts else {atom for atom in mine if "colocated" in atom})
        # A condition that is asked once, and that no assignment settles, can agree with nothing.
        settled = (
            {atom for node in self.graph.nodes for atom in self._settled(node)} | again | set(self._rounds_atoms())
        )
        return frozenset(atom for atom, times in asked.items() if times > 1 or atom in settled or "colocated" in atom)

    @property
    def _moves(self) -> frozenset[cst.CSTNode]:
        """The calls of this function that move a tenant."""
        moving = (Kind.PREPARE, Kind.OFFLOAD, Kind.WAKE, Kind.SLEEP, Kind.SWITCH, Kind.SCOPE)
        sites = (s.node for s in self.module.sites if s.function is self.function and s.rule.kind in moving)
        return frozenset((*sites, *(h.node for h in self.module.helpers if h.function is self.function)))

    def _rounds_atoms(self) -> Iterator[str]:
        for rounds in self.rounds.values():
            yield from rounds

    def _tests(self) -> Iterator[tuple[cst.BaseExpression, cst.CSTNode | None]]:
        """Everything that is tested, with the statement that it decides on where there is one."""
        for node in self.graph.nodes:
            if node.part is Part.TEST and isinstance(node.ast, cst.BaseExpression):
                yield node.ast, node.within
            if isinstance(node.ast, cst.Assert):
                yield node.ast.test, node.ast
        for site in self.module.sites:
            if site.function is self.function:
                yield from ((test, None) for test, _ in guards(site))
        for helper in self.module.helpers:  # refit_policy_generation(..., colocated_inference)
            if helper.function is self.function:
                yield from ((arg.value, None) for arg in helper.node.args if "colocated" in code(arg.value))

    def _settled(self, node: Node) -> Iterator[str]:
        for name, value in self.bound[node.index].items():
            if isinstance(value, cst.Name) and value.value in ("True", "False"):
                yield name
            elif isinstance(value, cst.Name) and value.value == "None":
                yield f"{name} is None"

    def _liveness(self) -> dict[int, frozenset[str]]:
        """The conditions that some way on from a node still asks for: only these need to be remembered there."""
        asked = {node.index: self._asked(node) for node in self.graph.nodes}

        def before(node: Node, after: frozenset[str]) -> frozenset[str]:
            bound = self.bound[node.index]
            kept = self.tests.surviving(after, bound) if bound else after
            return kept | asked[node.index]

        after = solve(
            self.graph,
            initial=frozenset[str](),
            transfer=before,
            join=frozenset.union,
            direction=Direction.BACKWARD,
        )
        return {index: before(self.graph.nodes[index], value) for index, value in after.items()}

    def _asked(self, node: Node) -> frozenset[str]:
        asked: frozenset[str] = frozenset()
        if node.part is Part.TEST and isinstance(node.ast, cst.BaseExpression):
            asked |= self.tests.atoms(node.ast)
        if node.part is Part.ITERATE:
            asked |= frozenset(self.rounds.get(node.index, {}))
        for event in self.events[node.index]:
            if isinstance(event, Site):
                for test, _ in guards(event):
                    asked |= self.tests.atoms(test)
            if isinstance(event, (Site, HelperSite)):  # who shares GPUs with whom is asked at every move
                asked |= frozenset(atom for atom in self.relevant if "colocated" in atom)
        return asked & self.relevant

    def forget_dead(self, index: int, path: Path) -> Path:
        """A path without what nothing ahead asks for: paths that differ in nothing else become one."""
        live = self._live.get(index, frozenset())
        if all(fact[0] in live for fact in path.facts):
            return path
        return attrs.evolve(path, facts=frozenset(fact for fact in path.facts if fact[0] in live))

    def along(self, node: Node, edge: Edge, path: Path) -> Path | None:
        """A path that goes along an edge, or None if it cannot."""
        if node.part is Part.TEST and edge.how in (How.TRUE, How.FALSE) and isinstance(node.ast, cst.BaseExpression):
            outcome = edge.how is How.TRUE
            if node.ast in self.deciding:
                path = path.step(Step(node.ast, node.within, outcome))
            return self._assumed(path, node.ast, outcome)
        if isinstance(node.ast, cst.Assert):
            return self._assumed(path, node.ast.test, True)
        if node.part is Part.ITERATE and edge.how in (How.TRUE, How.FALSE):
            more = (_MORE, edge.how is How.TRUE)
            if (_MORE, not more[1]) in path.facts:
                return None
            return attrs.evolve(path, facts=path.facts - {more}) if more in path.facts else path
        return path

    def _assumed(self, path: Path, test: cst.BaseExpression, outcome: bool) -> Path | None:
        facts = self.tests.assume(path.facts, test, outcome)
        if facts is None:
            return None
        return attrs.evolve(path, facts=frozenset(fact for fact in facts if fact[0] in self.relevant))

    # -- bindings ------------------------------------------------------------------------------------------------

    def bind(self, node: Node, path: Path) -> Path:
        """What a node's assignments change: facts about the names, and which object a name is."""
        names = self.bound[node.index]
        if not names:
            return path
        facts = path.facts
        known = {
            (_MORE, holds is more)
            for atom, more in self.rounds.get(node.index, {}).items()
            for holds in (True, False)
            if (atom, holds) in facts
        }
        for name, value in names.items():
            facts = self.tests.learn(facts, name, value) if value is not None else self.tests.forget(facts, (name,))
        facts = frozenset(fact for fact in facts if fact[0] in self.relevant)
        path = attrs.evolve(path, facts=facts | known if len(known) == 1 else facts)
        for name, value in names.items():
            path = self._alias(path, name, value)
        for identity, state in path.tenants:
            if state.is_alias and identity.path in names and self._is_alias(names[identity.path], identity):
                continue
            if (
                identity.path.partition(".")[0] in names and identity.home == self.function.name and not state.scopes
            ) or identity.path in names:
                path = path.put(identity, State())
        return path

    def _is_alias(self, value: cst.BaseExpression | None, identity: Identity) -> bool:
        """Whether a name with an identity of its own is given another tenant."""
        receiver = self.module.receivers.of(value, self.function) if value is not None else None
        return receiver is not None and receiver.origin is None and receiver.identity != identity

    def _alias(self, path: Path, name: str, value: cst.BaseExpression | None) -> Path:
        identity = Identity(self.function.name, name)
        if "." in name or not self._is_alias(value, identity):
            return path
        own = self.module.receivers.of(cst.Name(name), self.function)
        return path.put(identity, State(is_alias=True)) if own is not None and own.identity == identity else path


def _bound(  # noqa: C901 - one arm a kind of statement
    node: Node,
) -> Iterator[tuple[str, cst.BaseExpression | None]]:
    """The names and ``a.b`` paths that a node gives a value, with the value where it is a plain assignment."""
    ast = node.ast
    if node.part is Part.LEAVE:
        return
    match ast:
        case cst.For() if node.part is Part.ITERATE:
            yield from ((name, None) for name in _targets(ast.target))
        case cst.WithItem() if ast.asname is not None:
            yield from ((name, None) for name in _targets(ast.asname.name))
        case cst.Assign():
            single = len(ast.targets) == 1 and isinstance(ast.targets[0].target, (cst.Name, cst.Attribute))
            for target in ast.targets:
                yield from ((name, ast.value if single else None) for name in _targets(target.target))
        case cst.AnnAssign() if ast.value is not None:
            yield from ((name, ast.value) for name in _targets(ast.target))
        case cst.AugAssign() | cst.Del():
            yield from ((name, None) for name in _targets(ast.target))
        case cst.Import() | cst.ImportFrom() | cst.FunctionDef() | cst.ClassDef():
            return
        case _ if ast is not None and node.part in (Part.STATEMENT, Part.TEST):
            for piece in walk(ast, into_functions=False):
                if isinstance(piece, cst.NamedExpr):
                    yield from ((name, None) for name in _targets(piece.target))


_LOOPS = frozenset({cst.For, cst.While})


def _above(nodes: Iterable[cst.CSTNode], parents: Mapping[cst.CSTNode, cst.CSTNode]) -> set[cst.CSTNode]:
    """Everything that holds one of these nodes."""
    found: set[cst.CSTNode] = set()
    for node in nodes:
        above = parents.get(node)
        while above is not None and above not in found:
            found.add(above)
            above = parents.get(above)
    return found


_MORE = "<another round>"
"""The fact, at the head of a loop, that there is or is not another round."""


def _rounds(graph: Graph) -> Iterator[tuple[int, dict[str, bool]]]:
    """For ``for i in range(n)``: the conditions that say whether a round is the last, and what holding says of another one."""
    for node in graph.nodes:
        if (
            node.part is not Part.ITERATE
            or not isinstance(node.ast, cst.For)
            or not isinstance(node.ast.target, cst.Name)
        ):
            continue
        iterable = node.ast.iter
        if not isinstance(iterable, cst.Call) or callee(iterable) != "range" or len(iterable.args) != 1:
            continue
        name, count = node.ast.target.value, code(iterable.args[0].value)
        yield (
            node.index,
            {
                f"{name} + 1 < {count}": True,
                f"{name} < {count} - 1": True,
                f"{name} + 1 == {count}": False,
                f"{name} == {count} - 1": False,
                f"{name} + 1 >= {count}": False,
                f"{name} >= {count} - 1": False,
            },
        )


def _targets(target: cst.BaseExpression) -> Iterator[str]:
    match target:
        case cst.Tuple() | cst.List():
            for element in target.elements:
                yield from _targets(element.value)
        case cst.Name() | cst.Attribute():
            path = dotted(target)
            if path is not None:
                yield path
        case cst.Subscript():
            yield code(target)


def _future_names(module: Module, function: Function) -> frozenset[str]:
    """Names that are given the futures of a weight transfer."""
    names: set[str] = set()
    for site in module.sites:
        if site.function is function and site.rule.kind is Kind.TRANSFER and site.shape is Shape.CALL:
            name = assigned_name(site)
            if name is not None:
                names.add(name)
    return frozenset(names)


def assigned_name(site: Site) -> str | None:
    """The name that the result of a site is assigned to, whole."""
    above = site.parents[-1] if site.parents else None
    if isinstance(above, cst.Assign) and above.value is site.node and len(above.targets) == 1:
        target = above.targets[0].target
        return target.value if isinstance(target, cst.Name) else None
    return None
