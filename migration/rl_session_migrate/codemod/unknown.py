"""Calls of methods of a policy or value that no table knows: taken for compute in the mode that the loop ran them in.

A fork adds methods of its own. Such a call ran in the mode of the prepare before it. Where every path to it comes from prepares
of one mode, with no other transition in between, it wants that mode's scope like any compute call. Everywhere else it stays
what it is: a place where anything may happen. Knows nothing of what becomes of the prepares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import attrs
import libcst as cst

from rl_session_migrate.codemod.blocks import bound_paths
from rl_session_migrate.codemod.program import Doing, Event, Program
from rl_session_migrate.codemod.scoping import covers
from rl_session_migrate.flow import Node, Part, solve
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import Identity, Receiver
from rl_session_migrate.rules import Kind, Rule, Tenant, rule_of
from rl_session_migrate.sites import Shape, Site, may_be_skipped
from rl_session_migrate.tree import callee, code, parents_of

__all__ = ["take_for_compute"]

Same = Callable[[Identity, Identity], bool]
_Before = frozenset[Site | None]
"""The transitions that may have come last; None for one that is not known."""

_UNKNOWN: _Before = frozenset({None})
_ASYNCHRONOUS = re.compile(r"async|begin|submit|launch|stream|broadcast")
"""Methods of such a name return before they are done: where that ends is not in sight."""
_MOVES = re.compile(
    r"^_*(offload|onload|unload|reload|load|prepare|finish|restore|release|free|move|to_|cpu|cuda|sleep|wake|reset)"
)
"""Methods of such a name may be transitions of a fork's own: no scope may hold one."""
_WAITS = frozenset({"get", "wait", "result", "get_all_worker_results"})


def take_for_compute(program: Program, same: Same) -> None:
    """Make a use of every call of a method that no table knows, and that one mode's prepares lead to.

    Args:
        program: The module; such a call is no longer an event of a tenant handed to somebody afterwards.
        same: Whether two identities may be one object.
    """
    found = [(f, event) for f in program.functions for event in program.all_events(f) if _is_unknown(event)]
    if not found:
        return
    taker = _Taker(program, same)
    taken = [(event, site) for function, event in found if (site := taker.site_of(function, event)) is not None]
    for event, site in taken:
        program.take(event, site)


def _is_unknown(event: Event) -> bool:
    return event.doing is Doing.HANDED and "self" in event.handed


class _Taker:
    def __init__(self, program: Program, same: Same) -> None:
        self._program = program
        self._same = same
        self._parents = parents_of(program.module.source.module)
        self._values: dict[tuple[int, Identity], Mapping[int, _Before]] = {}

    def site_of(self, function: Function, event: Event) -> Site | None:
        """The compute call that something unknown is taken for, or None where it cannot be told in which mode it runs."""
        receiver = event.handed["self"]
        around = self._around(function, event.node)
        bare = _site(function, event, receiver, around, _COMPUTES[receiver.tenant, False], self._program)
        if covers(self._program, bare.withs, receiver.identity, lambda other: other.tenant is receiver.tenant):
            return bare
        if not self._ends_here(event.node, around):
            return None
        before = self._before(function, event.node, receiver)
        prepares = [site for site in before if site is not None and _is_plain_prepare(site)]
        methods = {site.method for site in prepares}
        if len(prepares) != len(before) or len(methods) != 1:
            return None
        trains = methods == {"prepare_for_training"}
        return attrs.evolve(bare, rule=attrs.evolve(_COMPUTES[receiver.tenant, trains], method=bare.method))

    def _around(self, function: Function, node: cst.CSTNode) -> tuple[cst.CSTNode, ...]:
        above: list[cst.CSTNode] = []
        here = self._parents.get(node)
        while here is not None:
            above.append(here)
            if here is function.node:
                break
            here = self._parents.get(here)
        return tuple(reversed(above))

    def _ends_here(self, node: cst.CSTNode, around: tuple[cst.CSTNode, ...]) -> bool:
        """Whether what is asked for moves nothing, and is done when its statement is over, as far as its name says."""
        if isinstance(node, cst.Call):
            return _ASYNCHRONOUS.search(callee(node)) is None and _MOVES.match(callee(node)) is None
        return any(isinstance(parent, cst.Call) and callee(parent) in _WAITS for parent in around)

    # -- which transition came last ------------------------------------------------------------------------------

    def _before(self, function: Function, node: cst.CSTNode, receiver: Receiver) -> _Before:
        reached: set[Site | None] = set()
        for index, before in self._flow(function, receiver).items():
            for event in self._program.events(function, index):
                if event.node is node:
                    reached |= before
                before = self._behind(event, receiver, before)  # noqa: PLW2901 (what one event leaves, the next one finds)
        return frozenset(reached) or _UNKNOWN

    def _flow(self, function: Function, receiver: Receiver) -> Mapping[int, _Before]:
        key = (id(function), receiver.identity)
        if key not in self._values:

            def transfer(node: Node, before: _Before) -> _Before:
                for event in self._program.events(function, node.index):
                    before = self._behind(event, receiver, before)
                return _UNKNOWN if _binds(node, receiver.identity) else before

            graph = self._program.graph(function)
            self._values[key] = solve(graph, initial=_UNKNOWN, transfer=transfer, join=frozenset.union)
        return self._values[key]

    def _behind(self, event: Event, receiver: Receiver, before: _Before) -> _Before:
        if event.doing in (Doing.CALL, Doing.YIELD):
            return _UNKNOWN
        mine = any(r.tenant is receiver.tenant and self._same(r.identity, receiver.identity) for r in event.receivers())
        if not mine or event.doing in (Doing.USE, Doing.DEVICE) or _is_unknown(event):
            return before
        site = event.site
        if event.doing is not Doing.LIFECYCLE or site is None or not site.shape.runs_here:
            return _UNKNOWN
        if site.rule.kind is Kind.NOOP:
            return before
        is_same = site.receiver is not None and site.receiver.identity == receiver.identity
        now: _Before = frozenset({site}) if is_same else _UNKNOWN
        return before | now if site.is_conditional else now


def _is_plain_prepare(site: Site) -> bool:
    return site.rule.kind is Kind.PREPARE and site.shape is Shape.CALL


def _binds(node: Node, who: Identity) -> bool:
    """Whether a piece of code makes another object of the name, or of what its attribute belongs to."""
    parts = who.path.split(".")
    paths = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return any(bound_paths(piece) & paths for piece in _binding_pieces(node))


def _binding_pieces(node: Node) -> Iterator[cst.CSTNode]:
    match node.part, node.ast:
        case (Part.LEAVE | Part.JOIN, _) | (_, None):
            return
        case Part.ITERATE, cst.For() as loop:
            yield loop.with_changes(body=cst.SimpleStatementSuite([cst.Pass()]), orelse=None)
        case Part.HANDLER, cst.ExceptHandler() | cst.ExceptStarHandler() as handler:
            if handler.name is not None:
                yield handler.name
        case _, ast:
            yield ast


def _site(
    function: Function,
    event: Event,
    receiver: Receiver,
    around: tuple[cst.CSTNode, ...],
    rule: Rule,
    program: Program,
) -> Site:
    node = event.node
    assert isinstance(node, (cst.Call, cst.Attribute))
    method = callee(node) if isinstance(node, cst.Call) else code(node)
    above = around[-1] if around else None
    chain = (*around, node)
    return Site(
        method=method,
        rule=attrs.evolve(rule, method=method),
        receiver=receiver,
        shape=Shape.AWAITED if isinstance(above, cst.Await) else Shape.CALL,
        node=node,
        attribute=node.func if isinstance(node, cst.Call) else node,
        function=function,
        position=program.module.source.position(node),
        parents=around,
        is_conditional=any(may_be_skipped(up, down) for up, down in pairwise(chain)),
    )


def _rule(tenant: Tenant, method: str) -> Rule:
    rule = rule_of(tenant, method)
    assert rule is not None
    return rule


_COMPUTES: Mapping[tuple[Tenant, bool], Rule] = {
    (Tenant.POLICY, False): _rule(Tenant.POLICY, "get_logprobs"),
    (Tenant.POLICY, True): _rule(Tenant.POLICY, "train"),
    (Tenant.VALUE, False): _rule(Tenant.VALUE, "get_values"),
    (Tenant.VALUE, True): _rule(Tenant.VALUE, "train"),
}
"""What a call is like that runs in inference mode, and in training mode."""
