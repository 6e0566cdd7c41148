"""Every place in a module where a tenant is prepared, used, offloaded, woken, put to sleep or refitted.

A site is a call, or a mention of a method as a value or by its name in a string, with who it is for and how it is
written. Knows nothing of the order in which sites are reached; that is :mod:`rl_session_migrate.flow`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise

import attrs
import libcst as cst

from rl_session_migrate.outline import Function, Outline, outline
from rl_session_migrate.receivers import Names, Receiver, Receivers
from rl_session_migrate.rules import HELPERS, Api, Helper, Rule, Tenant, methods, rule_of, rules_of
from rl_session_migrate.tree import Position, Source, arguments, callee, children, code, dotted, is_string

__all__ = ["HelperSite", "Module", "Shape", "Site", "UnknownSite", "analyse"]


class Shape(StrEnum):
    """How a site is written."""

    CALL = "call"
    AWAITED = "awaited"
    """``await x.m(...)``."""
    TO_THREAD = "to_thread"
    """``await asyncio.to_thread(x.m, ...)``: runs elsewhere, and the caller waits for it."""
    SUBMITTED = "submitted"
    """The same, or an executor's ``submit``, without waiting at once."""
    VALUE = "value"
    """The bound method is handed on or stored: it runs later, or never."""
    STRING = "string"
    """The method's name in a string that is dispatched on: ``run_all_workers_single_data("m")``."""
    REMOTE = "remote"
    """``x.m.remote(...)``: an actor's method of that name, never a facade's."""

    @property
    def runs_here(self) -> bool:
        """Whether the effect has happened when the statement is over."""
        return self in (Shape.CALL, Shape.AWAITED, Shape.TO_THREAD)


@attrs.frozen(eq=False)
class Site:
    """One place where a method of a tenant is called or named.

    Attributes:
        method: The method's name.
        rule: What it means.
        receiver: Whose it is; None for REMOTE and STRING sites, where nothing can be told.
        shape: How it is written.
        node: The call, or for VALUE the attribute, or for STRING the call that dispatches.
        attribute: The ``x.m`` expression; for STRING the string.
        function: The function it runs in.
        position: Where it begins.
        parents: The nodes around it, outermost first, from the function's definition down.
        is_conditional: Whether its statement may run without it (``and``, ``or``, ``x if y else z``, a comprehension).
    """

    method: str
    rule: Rule
    receiver: Receiver | None
    shape: Shape
    node: cst.BaseExpression
    attribute: cst.BaseExpression
    function: Function
    position: Position
    parents: tuple[cst.CSTNode, ...]
    is_conditional: bool

    @property
    def statement(self) -> cst.CSTNode:
        """The statement it stands in: a simple one, or the compound one whose header holds it."""
        for parent in reversed(self.parents):
            if isinstance(parent, (cst.BaseStatement, cst.BaseSmallStatement)):
                return parent
        return self.function.node

    @property
    def is_statement(self) -> bool:
        """Whether the whole statement is this call (or its ``await``), its result thrown away."""
        around = list(self.parents)
        if self.shape is Shape.TO_THREAD:
            around = around[:-2]  # the argument, and the call of to_thread
        if around and isinstance(around[-1], cst.Await):
            around.pop()
        return bool(around) and isinstance(around[-1], cst.Expr)

    @property
    def must_fail(self) -> bool:
        """Whether it stands in ``with pytest.raises(...)``: a mistake there is made on purpose."""
        chain = (*self.parents, self.node)
        for above, below in pairwise(chain):
            if isinstance(above, cst.With):
                index = next((i for i, item in enumerate(above.items) if item is below), len(above.items))
                if any(isinstance(i.item, cst.Call) and callee(i.item) == "raises" for i in above.items[:index]):
                    return True
        return False

    @property
    def loops(self) -> tuple[cst.CSTNode, ...]:
        """The loops around it, outermost first."""
        return tuple(p for p in self.parents if isinstance(p, (cst.For, cst.While)))

    @property
    def conditions(self) -> tuple[cst.CSTNode, ...]:
        """The ``if`` and ``match`` statements around it, outermost first."""
        return tuple(p for p in self.parents if isinstance(p, (cst.If, cst.Match)))

    @property
    def withs(self) -> tuple[cst.With, ...]:
        """The ``with`` statements whose blocks hold it, outermost first."""
        return tuple(
            p
            for p, below in zip(self.parents, self.parents[1:], strict=False)
            if isinstance(p, cst.With) and below is p.body
        )

    @property
    def tries(self) -> tuple[cst.CSTNode, ...]:
        """The ``try`` statements around it (body, handlers or ``finally``), outermost first."""
        return tuple(p for p in self.parents if isinstance(p, (cst.Try, cst.TryStar)))


@attrs.frozen(eq=False)
class HelperSite:
    """A call of a known function that is handed tenants, such as ``refit_policy_generation``.

    Attributes:
        helper: What it does.
        tenants: The tenant in each role, None where the argument is not known to be one.
        node: The call.
        shape: How it is written.
        function: The function it runs in.
        position: Where it begins.
        parents: As for a site.
        is_conditional: As for a site.
    """

    helper: Helper
    tenants: tuple[Receiver | None, ...]
    node: cst.Call
    shape: Shape
    function: Function
    position: Position
    parents: tuple[cst.CSTNode, ...]
    is_conditional: bool

    def tenant(self, kind: Tenant) -> Receiver | None:
        """The tenant of a kind that it is handed."""
        for (_, role), receiver in zip(self.helper.roles, self.tenants, strict=True):
            if role is kind:
                return receiver
        return None


@attrs.frozen(eq=False)
class UnknownSite:
    """A lifecycle method on something that may be a tenant or anything else. Nobody touches it.

    Attributes:
        method: The method's name.
        receiver: What it is called on, as text.
        shape: How it is written.
        function: The function it stands in.
        position: Where it begins.
        why: Why nobody is known.
    """

    method: str
    receiver: str
    shape: Shape
    function: Function
    position: Position
    why: str


@attrs.frozen(eq=False)
class Module:
    """What is known of one module.

    Attributes:
        source: Its tree and positions.
        outline: Its functions, classes and bindings.
        receivers: Who is which tenant.
        sites: Every site, in the order of the source.
        helpers: Every call of a known helper, in the order of the source.
        unknown: Lifecycle methods of somebody who is not known.
    """

    source: Source
    outline: Outline
    receivers: Receivers
    sites: tuple[Site, ...]
    helpers: tuple[HelperSite, ...]
    unknown: tuple[UnknownSite, ...] = ()
    _at: dict[cst.CSTNode, Site | HelperSite] = attrs.field(factory=dict, repr=False)

    def at(self, node: cst.CSTNode) -> Site | HelperSite | None:
        """The site whose call, attribute or string a node is."""
        return self._at.get(node)

    def sites_in(self, function: Function) -> tuple[Site, ...]:
        """The sites that stand directly in a function."""
        return tuple(site for site in self.sites if site.function is function)


def analyse(source: Source, names: Names | None = None) -> Module:
    """Find everything that matters in a module.

    Args:
        source: The module.
        names: Extra names of tenants, from the project's configuration.
    """
    table = outline(source)
    receivers = Receivers(table, names)
    finder = _Finder(source, table, receivers)
    finder.visit(source.module, table.body, (), is_conditional=False)
    at: dict[cst.CSTNode, Site | HelperSite] = {}
    for site in finder.sites:
        at[site.node] = site
        at[site.attribute] = site
    at.update({helper.node: helper for helper in finder.helpers})
    unknown = tuple(sorted(finder.unknown, key=lambda site: site.position))
    return Module(source, table, receivers, tuple(finder.sites), tuple(finder.helpers), unknown, at)


_METHODS = methods()
_DISPATCHERS = frozenset(
    {
        "run_all_workers_single_data",
        "run_all_workers_multiple_data",
        "run_all_workers_sharded_data",
        "run_rank_0_worker_only_single_data",
        "run_single_worker_single_data",
        "getattr",
    }
)
_THREADS = frozenset({"to_thread", "run_sync"})
_EXECUTORS = frozenset({"submit", "run_in_executor", "apply_async", "Thread", "create_task"})


class _Finder:
    """One walk over the tree, with the nodes above at hand."""

    def __init__(self, source: Source, table: Outline, receivers: Receivers) -> None:
        self.source = source
        self.outline = table
        self.receivers = receivers
        self.sites: list[Site] = []
        self.helpers: list[HelperSite] = []
        self.unknown: list[UnknownSite] = []

    def visit(
        self, node: cst.CSTNode, function: Function, parents: tuple[cst.CSTNode, ...], *, is_conditional: bool
    ) -> None:
        """Look at a node and everything below."""
        inner = self.outline.functions.get(node, function)
        above = (node,) if inner is not function else (*parents, node)
        for child in children(node):
            conditional = is_conditional or (inner is function and _may_be_skipped(node, child))
            home = inner if inner is function or child in _inside(node) else function
            around = above if home is inner else (*parents, node)
            self.visit(child, home, around, is_conditional=conditional and home is function)
        if isinstance(node, cst.Attribute):
            self._attribute(node, function, parents, is_conditional=is_conditional)
        elif isinstance(node, cst.Call):
            self._dispatch(node, function, parents, is_conditional=is_conditional)
            self._helper(node, function, parents, is_conditional=is_conditional)

    def _attribute(
        self, node: cst.Attribute, function: Function, parents: tuple[cst.CSTNode, ...], *, is_conditional: bool
    ) -> None:
        method = node.attr.value
        if method not in _METHODS or method in HELPERS or not parents:
            return
        above = parents[-1]
        if isinstance(above, (cst.AssignTarget, cst.AugAssign, cst.Del)):
            return  # being set, not called
        if isinstance(above, cst.Attribute):
            if above.attr.value == "remote":
                self._remote(node, function, parents, is_conditional=is_conditional)
            return  # an attribute of something that only has the name of a method
        receiver = self.receivers.of_call(node.value, method, function)
        is_called = isinstance(above, cst.Call) and above.func is node
        rule = rule_of(receiver.tenant, method) if receiver is not None else None
        if receiver is None or rule is None:
            self._nobodys(node, function, parents, is_called=is_called)
            return
        if is_called and not self._is_called_like(above, rule):  # type: ignore[arg-type]
            return
        if not is_called and not _is_handed_on(rule, parents):
            return
        call = above if isinstance(above, cst.Call) and is_called else node
        shape = _shape_of_call(parents[:-1], call) if is_called else _shape_of_value(parents)
        around = parents[:-1] if is_called else parents
        self._add(
            Site(
                method, rule, receiver, shape, call, node, function, self.source.position(call), around, is_conditional
            )
        )

    def _nobodys(
        self, node: cst.Attribute, function: Function, parents: tuple[cst.CSTNode, ...], *, is_called: bool
    ) -> None:
        """A lifecycle method whose owner is not known is noted, unless it is used as nobody of ours would."""
        method = node.attr.value
        rules = [rule for rule in rules_of(method) if rule.is_lifecycle and rule.api is Api.LEGACY]
        call = parents[-1] if is_called else None
        if isinstance(call, cst.Call):
            positional, keywords, _ = arguments(call)
            rules = [
                r for r in rules if r.takes is None or (set(keywords) <= r.takes and len(positional) <= len(r.takes))
            ]
        else:
            rules = [rule for rule in rules if _is_handed_on(rule, parents)]
        why = self.receivers.why_unknown(node.value, method, function) if rules else ""
        if why:
            shape = _shape_of_call(parents[:-1], call) if call is not None else _shape_of_value(parents)
            position = self.source.position(call or node)
            self.unknown.append(UnknownSite(method, code(node.value), shape, function, position, why))

    def _add(self, site: Site) -> None:
        self.sites.append(site)

    @staticmethod
    def _is_called_like(call: cst.Call, rule: Rule) -> bool:
        """Whether the arguments fit: ``model.train()`` and ``model.train(False)`` are a torch module's."""
        positional, keywords, is_open = arguments(call)
        if rule.method == "train":
            flags = [*positional[:1], *([keywords["mode"]] if "mode" in keywords else [])]
            if (
                any(isinstance(flag, cst.Name) and flag.value in ("True", "False") for flag in flags)
                or "mode" in keywords
            ):
                return False
        return is_open or len(positional) + len(keywords) >= rule.num_args

    def _remote(
        self, node: cst.Attribute, function: Function, parents: tuple[cst.CSTNode, ...], *, is_conditional: bool
    ) -> None:
        call = parents[-2] if len(parents) > 1 and isinstance(parents[-2], cst.Call) else None
        rules = [rule for tenant in Tenant if (rule := rule_of(tenant, node.attr.value)) is not None]
        if call is None or not rules or not self.receivers.speaks:
            return
        position = self.source.position(call)
        self._add(
            Site(
                node.attr.value,
                rules[0],
                None,
                Shape.REMOTE,
                call,
                node,
                function,
                position,
                parents[:-2],
                is_conditional,
            )
        )

    def _dispatch(
        self, node: cst.Call, function: Function, parents: tuple[cst.CSTNode, ...], *, is_conditional: bool
    ) -> None:
        """``run_all_workers_single_data("m")`` and ``getattr(x, "m")``."""
        name = callee(node)
        if name not in _DISPATCHERS or not node.args:
            return
        positional, _, _ = arguments(node)
        index = 1 if name == "getattr" else 0
        if len(positional) <= index:
            return
        method = is_string(positional[index])
        if method is None or method not in _METHODS or method in HELPERS:
            return
        target = (
            positional[0] if name == "getattr" else node.func.value if isinstance(node.func, cst.Attribute) else None
        )
        receiver = self.receivers.of_call(target, method, function) if target is not None else None
        rule = rule_of(receiver.tenant, method) if receiver is not None else None
        if rule is None:
            if name == "getattr" or not self.receivers.speaks:
                return
            rule = next(r for tenant in Tenant if (r := rule_of(tenant, method)) is not None)
        position = self.source.position(node)
        self._add(
            Site(
                method,
                rule,
                receiver,
                Shape.STRING,
                node,
                positional[index],
                function,
                position,
                parents,
                is_conditional,
            )
        )

    def _helper(
        self, node: cst.Call, function: Function, parents: tuple[cst.CSTNode, ...], *, is_conditional: bool
    ) -> None:
        helper = HELPERS.get(callee(node))
        if helper is None or (isinstance(node.func, cst.Attribute) and dotted(node.func) is None):
            return
        positional, keywords, _ = arguments(node)
        tenants: list[Receiver | None] = []
        for index, (name, role) in enumerate(helper.roles):
            value = positional[index] if index < len(positional) else keywords.get(name)
            found = self.receivers.of(value, function) if value is not None else None
            if found is None and value is not None:
                found = self.receivers.by_method(value, role, function)
            tenants.append(found if found is not None and found.tenant is role else None)
        shape = _shape_of_call(parents, node)
        position = self.source.position(node)
        self.helpers.append(
            HelperSite(helper, tuple(tenants), node, shape, function, position, parents, is_conditional)
        )


def _inside(node: cst.CSTNode) -> tuple[cst.CSTNode, ...]:
    """The children of a definition that belong to the inside: its body. Defaults and decorators run outside."""
    if isinstance(node, (cst.FunctionDef, cst.Lambda)):
        return (node.body,)
    return tuple(children(node)) if isinstance(node, cst.Module) else ()


def _may_be_skipped(node: cst.CSTNode, child: cst.CSTNode) -> bool:
    """Whether evaluating ``node`` may leave ``child`` out."""
    match node:
        case cst.BooleanOperation():
            return child is node.right
        case cst.IfExp():
            return child is not node.test
        case cst.ListComp() | cst.SetComp() | cst.GeneratorExp():
            return child is node.elt
        case cst.DictComp():
            return child is not node.for_in
    return False


def _shape_of_call(parents: tuple[cst.CSTNode, ...], call: cst.CSTNode) -> Shape:
    above = parents[-1] if parents else None
    return Shape.AWAITED if isinstance(above, cst.Await) and above.expression is call else Shape.CALL


def _is_handed_on(rule: Rule, parents: tuple[cst.CSTNode, ...]) -> bool:
    """Whether a method that is not called here is used as a value that may be called: handed on, stored, returned."""
    above = parents[-1]
    match above:
        case cst.Arg() | cst.Assign() | cst.Return() | cst.Element() | cst.DictElement() | cst.NamedExpr():
            return True
        case cst.IfExp() | cst.BooleanOperation() | cst.AnnAssign():
            return rule.distinctive or rule.is_lifecycle
    return False


def _shape_of_value(parents: tuple[cst.CSTNode, ...]) -> Shape:
    call = next((p for p in reversed(parents[-2:]) if isinstance(p, cst.Call)), None)
    if call is None or not isinstance(parents[-1], cst.Arg):
        return Shape.VALUE
    name = callee(call)
    first = call.args[0] is parents[-1]
    index = parents.index(call)
    is_awaited = index > 0 and isinstance(parents[index - 1], cst.Await)
    if name in _THREADS and first:
        return Shape.TO_THREAD if is_awaited else Shape.SUBMITTED
    if name == "run_in_executor" and not first:
        return Shape.TO_THREAD if is_awaited else Shape.SUBMITTED
    return Shape.SUBMITTED if name in _EXECUTORS else Shape.VALUE


def tenants_handed_to(call: cst.Call, module: Module, function: Function) -> Iterator[tuple[int | str, Receiver]]:
    """The tenants among the arguments of a call, by position or keyword."""
    position = 0
    for arg in call.args:
        key: int | str = arg.keyword.value if arg.keyword is not None else position
        if arg.keyword is None:
            position += 1
        found = module.receivers.of(arg.value, function)
        if found is not None and not arg.star:
            yield key, found
