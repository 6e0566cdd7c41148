"""One module as the codemod sees it: what each piece of its control flow does to tenants, in order of evaluation.

Turns sites, helpers and calls into events on the nodes of control-flow graphs, and knows who calls whom inside the module.
Decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto

import attrs
import libcst as cst

from rl_session_migrate.codemod.known import is_harmless, is_harmless_method
from rl_session_migrate.flow import Graph, build, evaluated
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import Identity, Receiver
from rl_session_migrate.rules import Api, Kind, Rule, Tenant, methods
from rl_session_migrate.sites import HelperSite, Module, Shape, Site, tenants_handed_to
from rl_session_migrate.tree import children, dotted

__all__ = ["Caller", "Doing", "Event", "Program", "Spot", "parameter_of"]


class Doing(Enum):
    """What an event is."""

    LIFECYCLE = auto()
    """A legacy or scoped call that moves a tenant."""
    USE = auto()
    """A call that needs a tenant somewhere."""
    REFIT = auto()
    """A whole push of weights by a helper or a synchroniser."""
    ENTER = auto()
    """A scope, or a refit block, is entered."""
    CALL = auto()
    """A function of this module is called that matters to tenants."""
    HANDED = auto()
    """A tenant is handed to a function that is not in sight."""
    DEVICE = auto()
    """The device is used by somebody who is no tenant."""
    YIELD = auto()


@attrs.frozen(eq=False)
class Event:
    """Something a piece of code does to tenants.

    Attributes:
        doing: What.
        node: The expression.
        site: The site, for LIFECYCLE, USE, ENTER and REFIT by a synchroniser.
        helper: The helper's call, for REFIT.
        callee: The function called, for CALL.
        handed: Parameter name to receiver for CALL; a number as text where the parameter is not known.
    """

    doing: Doing
    node: cst.CSTNode
    site: Site | None = None
    helper: HelperSite | None = None
    callee: Function | None = None
    handed: Mapping[str, Receiver] = attrs.field(factory=dict)

    def receivers(self) -> Iterator[Receiver]:
        """The tenants it is about."""
        if self.site is not None and self.site.receiver is not None:
            yield self.site.receiver
        if self.helper is not None:
            yield from (tenant for tenant in self.helper.tenants if tenant is not None)
        yield from self.handed.values()


@attrs.frozen
class Spot:
    """A place on a path: a node of a function's graph, and how many of its events have happened."""

    function: Function = attrs.field(eq=id)
    index: int
    done: int = 0


@attrs.frozen(eq=False)
class Caller:
    """A call of a function of this module.

    Attributes:
        function: Where it stands.
        event: The call.
        spots: The places right behind it; several inside ``finally``.
    """

    function: Function
    event: Event
    spots: tuple[Spot, ...]


class Program:
    """A module with the graphs and events of its functions.

    Args:
        module: The module.
        hands_only: Whether functions matter that only hand tenants on, in a module that does nothing else with them.
    """

    def __init__(self, module: Module, *, hands_only: bool = False) -> None:
        self.module = module
        self._graphs: dict[int, Graph] = {}
        self._events: dict[tuple[int, int], tuple[Event, ...]] = {}
        self._calls = _Calls(module, hands_only=hands_only)
        self._callers: dict[int, list[Caller]] | None = None
        self._all: dict[int, tuple[Event, ...]] = {}

    # -- graphs and events ---------------------------------------------------------------------------------------

    def graph(self, function: Function) -> Graph:
        """The control-flow graph of a function."""
        found = self._graphs.get(id(function))
        if found is None:
            found = self._graphs[id(function)] = build(function)
        return found

    def events(self, function: Function, index: int) -> tuple[Event, ...]:
        """What a node does to tenants, in order."""
        key = (id(function), index)
        found = self._events.get(key)
        if found is None:
            node = self.graph(function).nodes[index]
            found = self._events[key] = tuple(
                event for ast in evaluated(node) for event in self._calls.events_of(ast, function)
            )
        return found

    def events_of(self, node: cst.CSTNode, function: Function) -> Sequence[Event]:
        """What one expression does by itself."""
        return self._calls.events_of(node, function)

    def all_events(self, function: Function) -> tuple[Event, ...]:
        """Everything that stands directly in a function, whatever the order."""
        found = self._all.get(id(function))
        if found is None:
            graph = self.graph(function)
            seen: dict[int, Event] = {}
            for index in range(len(graph.nodes)):
                for event in self.events(function, index):
                    seen.setdefault(id(event.node), event)
            found = self._all[id(function)] = tuple(seen.values())
        return found

    def spots_behind(self, function: Function, node: cst.CSTNode) -> tuple[Spot, ...]:
        """The places right behind an event."""
        graph = self.graph(function)
        return tuple(
            Spot(function, index, done + 1)
            for index in range(len(graph.nodes))
            for done, event in enumerate(self.events(function, index))
            if event.node is node
        )

    # -- functions -----------------------------------------------------------------------------------------------

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions in which a tenant is spoken of."""
        return self._calls.relevant

    def callers(self, function: Function) -> list[Caller]:
        """Every call of a function inside this module."""
        if self._callers is None:
            self._callers = defaultdict(list)
            for caller in self.functions:
                for event in self.all_events(caller):
                    if event.callee is not None:
                        spots = self.spots_behind(caller, event.node)
                        self._callers[id(event.callee)].append(Caller(caller, event, spots))
        return self._callers.get(id(function), [])

    def is_callback(self, function: Function) -> bool:
        """Whether a function is handed on or stored, so that who runs it, and when, is not in sight."""
        if isinstance(function.node, cst.Lambda):
            return True
        is_nested = function.parent is not None and not function.parent.is_module and function.owner is None
        return is_nested and self._calls.is_mentioned(function)


class _Calls:
    """Calls and mentions of functions, found in one walk over the module."""

    def __init__(self, module: Module, *, hands_only: bool) -> None:
        self.module = module
        self._mentions: set[int] = set()
        self._called: dict[int, list[Function]] = defaultdict(list)
        self._events: dict[cst.CSTNode, list[Event]] = {}
        self._spoken: set[int] = {id(site.function) for site in module.sites}
        self._spoken |= {id(helper.function) for helper in module.helpers}
        if module.sites or module.helpers or hands_only:
            self._visit(module.source.module, module.outline.body, None)
        self.relevant = self._relevant()
        self._relevant_ids = {id(function) for function in self.relevant}

    def is_mentioned(self, function: Function) -> bool:
        """Whether the function's name is used otherwise than to call it."""
        return id(function) in self._mentions

    def events_of(self, node: cst.CSTNode, function: Function) -> list[Event]:
        """The events of one expression."""
        found = self._events.get(node)
        if found is None:
            found = self._events[node] = list(self._make(node, function))
        return found

    def _relevant(self) -> tuple[Function, ...]:
        """Functions with sites, functions that hand tenants on, and those that call them."""
        functions = list(self.module.outline.functions.values())
        by_callee = self._called
        todo = [function for function in functions if id(function) in self._spoken]
        seen = {id(function) for function in todo}
        while todo:
            for caller in by_callee.get(id(todo.pop()), ()):
                if id(caller) not in seen:
                    seen.add(id(caller))
                    todo.append(caller)
        return tuple(function for function in functions if id(function) in seen)

    def _visit(self, node: cst.CSTNode, function: Function, above: cst.CSTNode | None) -> None:
        functions = self.module.outline.functions
        stack: list[tuple[cst.CSTNode, Function, cst.CSTNode | None]] = [(node, function, above)]
        while stack:
            here, home, parent = stack.pop()
            kind = type(here)  # node classes are abstract ones, of which isinstance() is slow
            if kind is cst.Name or kind is cst.Attribute:
                self._mention(here, home, parent)  # type: ignore[arg-type]
            elif kind is cst.Call:
                self._call(here, home)  # type: ignore[arg-type]
            inner = functions.get(here, home)
            if kind is cst.Attribute:
                stack.append((here.value, home, here))  # type: ignore[attr-defined]
                continue
            for child in children(here):
                is_inside = inner is home or child is getattr(here, "body", None)
                stack.append((child, inner if is_inside else home, here))

    def _mention(self, node: cst.Name | cst.Attribute, function: Function, above: cst.CSTNode | None) -> None:
        if isinstance(above, cst.FunctionDef) or (isinstance(above, cst.Call) and above.func is node):
            return
        if isinstance(above, (cst.Param, cst.ClassDef, cst.AssignTarget, cst.Attribute)):
            return
        found = self.module.outline.callable_named(dotted(node) or "", caller=function)
        if found is not None:
            self._mentions.add(id(found))

    def _call(self, node: cst.Call, function: Function) -> None:
        found = self.module.outline.callable_named(dotted(node.func) or "", caller=function)
        if found is not None:
            self._called[id(found)].append(function)
        if any(True for _ in tenants_handed_to(node, self.module, function)):
            self._spoken.add(id(function))

    def _make(self, node: cst.CSTNode, function: Function) -> Iterator[Event]:
        if isinstance(node, cst.Yield):
            yield Event(Doing.YIELD, node)
            return
        found = self.module.at(node)
        if isinstance(found, HelperSite):
            yield Event(Doing.REFIT, node, helper=found)
            return
        if isinstance(found, Site):
            if node is found.node:
                doing = _doing(found.rule, found.shape)
                if doing is not None:
                    yield Event(doing, node, site=found)
            return
        if isinstance(node, cst.Call):
            yield from self._make_call(node, function)
        elif isinstance(node, cst.Attribute) and node.attr.value == "worker_group":
            yield from self._reached(node, node.value, function)

    def _reached(self, node: cst.CSTNode, owner: cst.BaseExpression, function: Function) -> Iterator[Event]:
        """A tenant of whom something is asked that the tables do not know: it may compute, or move."""
        found = self.module.receivers.of(owner, function)
        if found is not None and found.tenant in (Tenant.POLICY, Tenant.VALUE) and not found.is_scopes:
            yield Event(Doing.HANDED, node, handed={"self": found})

    def _make_call(self, node: cst.Call, function: Function) -> Iterator[Event]:
        if is_harmless(node) or self.module.receivers.library_name(node.func, function) in ("scopes", "share"):
            return
        if _is_device_use(node):
            yield Event(Doing.DEVICE, node)
        method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        if isinstance(node.func, cst.Attribute) and method not in _KNOWN and not is_harmless_method(method):
            yield from self._reached(node, node.func.value, function)
        target = self.module.outline.callable_named(dotted(node.func) or "", caller=function)
        handed = dict(tenants_handed_to(node, self.module, function))
        if target is not None and not handed and id(target) not in self._relevant_ids:
            return
        if target is not None:
            yield Event(Doing.CALL, node, callee=target, handed=_by_parameter(handed, target))
        elif handed:
            yield Event(Doing.HANDED, node, handed={str(key): found for key, found in handed.items()})


def _by_parameter(handed: Mapping[int | str, Receiver], target: Function) -> dict[str, Receiver]:
    names = [parameter.name for parameter in target.parameters]
    found: dict[str, Receiver] = {}
    for key, receiver in handed.items():
        if isinstance(key, str):
            found[key] = receiver
        else:
            found[names[key] if key < len(names) else str(key)] = receiver
    return found


_KNOWN = methods()


def _is_device_use(node: cst.Call) -> bool:
    """Whether a call visibly brings something onto the device by itself."""
    return isinstance(node.func, cst.Attribute) and node.func.attr.value == "cuda"


_NEEDS = frozenset({Kind.COMPUTE, Kind.STEP, Kind.TRANSFER})


def _doing(rule: Rule, shape: Shape) -> Doing | None:
    """What a site is on a path, if anything."""
    if shape is Shape.REMOTE:
        return None
    if rule.kind in (Kind.PREPARE, Kind.OFFLOAD, Kind.WAKE, Kind.SLEEP, Kind.SWITCH):
        return Doing.LIFECYCLE
    if rule.kind in _NEEDS or rule.method in ("save_checkpoint", "prepare_refit_info"):
        return Doing.USE if rule.tenant is not Tenant.ENGINE or rule.kind is not Kind.STATE else None
    if rule.kind is Kind.REFIT and rule.api is Api.LEGACY:
        return Doing.REFIT
    if rule.kind in (Kind.SCOPE, Kind.REFIT):
        return Doing.ENTER
    return None


def parameter_of(function: Function, identity: Identity) -> str | None:
    """The name of the parameter that an identity is in its own function, if it is one."""
    if identity.home != function.name:
        return None
    return identity.path if any(parameter.name == identity.path for parameter in function.parameters) else None
