"""Where scopes forget what they believe of a tenant: behind whatever moves it, or may, without their doing.

One line is enough for several moves, where nobody asks in between. Knows nothing of why they stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import libcst as cst

from rl_session_migrate.codemod.facts import Facts
from rl_session_migrate.codemod.plan import Plan
from rl_session_migrate.codemod.program import Doing, Event, Program
from rl_session_migrate.codemod.scoping import is_pure
from rl_session_migrate.codemod.shares import tenants_of_scopes
from rl_session_migrate.codemod.strokes import Spelling, Strokes, insert_behind, statement_of
from rl_session_migrate.flow import Node, on_every_path
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import Receiver
from rl_session_migrate.rules import HELPERS, Kind, Tenant
from rl_session_migrate.sites import Site

__all__ = ["forget"]


@attrs.frozen(eq=False)
class _Moved:
    """A tenant that something may move, where scopes do not see it."""

    receiver: Receiver
    node: cst.CSTNode
    function: Function


def forget(
    strokes: Strokes, facts: Facts, plan: Plan, spelling: Spelling, parents: Mapping[cst.CSTNode, cst.CSTNode]
) -> None:
    """A line behind each statement that moves a tenant by hand, or may, and that somebody asks scopes about afterwards.

    Args:
        strokes: Where the lines go.
        facts: The module; nothing is left to rewrite in it.
        plan: What stays in it.
        spelling: How it spells our names.
        parents: The parent of each node.
    """
    found = (*_moved_by_hand(facts.program, plan), *_saved(facts), *_handed_on(facts))
    moved = [each for each in found if _has_room_behind(statement_of(each.node, parents))]
    for each in list(moved):
        others = [other for other in moved if other is not each]
        if _is_said_later(facts, each, others):
            moved = others
    for each in moved:
        text = f"{spelling.scopes}({each.receiver}).forget()"
        insert_behind(strokes, statement_of(each.node, parents), parents, text)


def _has_room_behind(statement: cst.CSTNode | None) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and not any(
        isinstance(small, (cst.Return, cst.Raise)) for small in statement.body
    )


def _is_said_later(facts: Facts, moved: _Moved, others: Sequence[_Moved]) -> bool:
    """Whether every path behind a move meets another one's line before anybody asks scopes."""
    program, function = facts.program, moved.function
    lines = {
        spot.index
        for other in others
        if other.function is function and str(other.receiver) == str(moved.receiver)
        for spot in program.spots_behind(function, other.node)
    }
    if not lines:
        return False

    def asks(node: Node) -> bool:
        return any(_asks(event) for event in program.events(function, node.index))

    def says(node: Node) -> bool:
        return node.index in lines and not asks(node)

    here = [spot.index for spot in program.spots_behind(function, moved.node)]
    graph = program.graph(function)
    return bool(here) and all(
        not asks(graph.nodes[index]) and on_every_path(graph, index, says, asks) for index in here
    )


def _asks(event: Event) -> bool:
    """Whether scopes are asked something by an event, as far as can be seen."""
    if event.doing in (Doing.CALL, Doing.YIELD, Doing.ENTER, Doing.REFIT):
        return True
    if event.doing is Doing.HANDED:
        return "self" not in event.handed
    return event.site is not None and event.site.receiver is not None and event.site.receiver.is_scopes


def _moved_by_hand(program: Program, plan: Plan) -> Iterator[_Moved]:
    """Transitions that stay, of tenants that scopes know."""
    known = _known(program)
    for site in plan.left:
        if not isinstance(site, Site) or site.receiver is None or not site.shape.runs_here:
            continue
        if not site.rule.is_lifecycle or site.rule.kind is Kind.NOOP or _is_left_to_callers(program, site):
            continue
        if (site.receiver.tenant, site.receiver.identity.path) in known and is_pure(site.receiver):
            yield _Moved(site.receiver, site.node, site.function)


def _is_left_to_callers(program: Program, site: Site) -> bool:
    """Whether a helper makes no call through scopes: its callers' refit blocks know what it leaves behind."""
    if site.function.simple_name not in HELPERS:
        return False
    mine = program.module.sites_in(site.function)
    return not any(other.receiver is not None and other.receiver.is_scopes for other in mine)


def _saved(facts: Facts) -> Iterator[_Moved]:
    """Policies that scopes know and that are saved outside a scope of theirs: a Megatron policy comes in for that, and stays."""
    known = _known(facts.program)
    for site in facts.sites:
        if site.method == "save_checkpoint" and site.rule.tenant is Tenant.POLICY and site.shape.runs_here:
            receiver = site.receiver
            is_known = receiver is not None and (receiver.tenant, receiver.identity.path) in known
            if receiver is not None and is_known and is_pure(receiver) and not facts.is_covered(site):
                yield _Moved(receiver, site.node, site.function)


def _known(program: Program) -> set[tuple[Tenant, str]]:
    """The tenants that scopes know."""
    return {
        (site.receiver.tenant, site.receiver.identity.path)
        for site in program.module.sites
        if site.receiver is not None and site.receiver.is_scopes
    }


def _handed_on(facts: Facts) -> Iterator[_Moved]:
    """Policies and values that scopes know and a function gets that is not in sight: it may move them.

    An engine is handed to every rollout, which uses it as it finds it.
    """
    program = facts.program
    for function in program.functions:
        known = {str(tenant) for tenant in tenants_of_scopes(program, function)}
        for event in program.all_events(function):
            for receiver in (
                event.handed.values() if event.doing is Doing.HANDED and not facts.is_in_sight(event) else ()
            ):
                if receiver.tenant is not Tenant.ENGINE and str(receiver) in known:
                    yield _Moved(receiver, event.node, function)
        for site in program.taken:
            if site.function is function and str(site.receiver) in known and not facts.is_covered(site):
                assert site.receiver is not None
                yield _Moved(site.receiver, site.node, function)
