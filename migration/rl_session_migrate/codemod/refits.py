"""Pushes of weights: the four calls of one written out, and calls of helpers that make them.

Written out, they become ``with scopes(policy).refit(policy_generation):`` around the transfer. A helper that is not migrated
goes into ``legacy_refit``, which knows what it relies on and what it leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import libcst as cst

from rl_session_migrate.codemod.blocks import Block, Place, Statement, bound_paths, has_stray_await
from rl_session_migrate.codemod.paths import is_our_line
from rl_session_migrate.codemod.program import Doing, Event, Program
from rl_session_migrate.codemod.scoping import Run, is_pure
from rl_session_migrate.codemod.words import SHAPES
from rl_session_migrate.outline import By, Function
from rl_session_migrate.receivers import Receiver
from rl_session_migrate.rules import Api, Kind, Tenant
from rl_session_migrate.sites import HelperSite, Shape, Site
from rl_session_migrate.tree import arguments, code, dotted, is_string

__all__ = ["Push", "find_pushes", "helper_run", "is_covered", "tags_of"]


@attrs.frozen(eq=False)
class Push:
    """A push of weights written out.

    Attributes:
        run: The transfer, which goes into the refit block.
        sites: The four calls.
        emptied: ``if`` statements that held nothing else: the block decides by itself what they decided.
    """

    run: Run
    sites: tuple[Site, ...]
    emptied: tuple[Place, ...]


def tags_of(site: Site) -> tuple[str, ...] | None:
    """The tags of a wake, None without any, () where they cannot be read."""
    if not isinstance(site.node, cst.Call):
        return ()
    positional, keywords, is_open = arguments(site.node)
    if not positional and not keywords and not is_open:
        return None
    value = keywords.get("tags")
    if value is None or len(keywords) != 1 or positional or is_open or not isinstance(value, (cst.List, cst.Tuple)):
        return ()
    tags = [is_string(element.value) for element in value.elements]
    found = tuple(tag for tag in tags if tag)
    return found if len(found) == len(tags) else ()


def find_pushes(body: Block) -> Iterator[Push | tuple[Site, str]]:
    """The pushes that a function writes out; for the first call of one that stays, why it stays."""
    for block in body.blocks():
        sites = [event.site for event in block.events() if event.doing is Doing.LIFECYCLE and event.site is not None]
        starts = [site for site in sites if site.method == "offload_before_refit" and site.is_statement]
        for start in starts:
            if _index_of(block, start) is None:
                continue
            found = _from(block, sites, start)
            if found:
                yield found if isinstance(found, Push) else (start, found)


def _from(block: Block, sites: list[Site], start: Site) -> Push | str:
    """The push that begins with a call; "" if none does, else why it cannot be rewritten here."""
    later = sites[sites.index(start) :]
    # An `offload()` of ours in its place does the same: an earlier pass or run may have put it there.
    end = next((s for s in later if s.method in ("offload_after_refit", "offload") and _same(s, start)), None)
    first = next((s for s in later if _wakes(s, "weights")), None)
    if end is None or first is None or first.receiver is None:
        return ""
    second = next((s for s in later if _wakes(s, "kv_cache") and _same(s, first)), None)
    if second is None:
        return ""
    four = (start, first, end, second)
    order = [later.index(site) for site in four]
    if order != sorted(order):
        return "the four calls of the push are in another order"
    return _assemble(block, four)


def _same(one: Site, other: Site) -> bool:
    return one.receiver is not None and other.receiver is not None and one.receiver.identity == other.receiver.identity


def _wakes(site: Site, tag: str) -> bool:
    tags = tags_of(site)
    return site.rule.kind is Kind.WAKE and tags is not None and tag in tags and site.is_statement


def _assemble(block: Block, four: tuple[Site, ...]) -> Push | str:
    places = [_index_of(block, site) for site in four]
    if None in places:
        return ""
    indexes = [place for place in places if place is not None]
    start, woken, end, served = indexes
    if not start <= woken < end <= served:
        return ""  # all inside one statement: looked at again one block further in
    opening, closing = block.statements[start : woken + 1], block.statements[end : served + 1]
    middle = block.statements[woken + 1 : end]
    if not middle:
        inside = any(e.site is not None and e.site.rule.kind is Kind.TRANSFER for s in opening for e in s.events())
        if inside:
            return "the transfer stands in the branch of the first two calls of the push"
        return "nothing is transferred between the four calls of the push"
    conditions = {_condition(s, four) for s in (*opening, *closing) if not _is_our_line(s)}
    if None in conditions or len(conditions) != 1:
        return "the four calls of the push do not stand under one condition"
    (condition,) = conditions
    why = _transfer(middle, condition or "", four)
    if why:
        return why
    policy, engine = four[0].receiver, four[1].receiver
    assert policy is not None
    assert engine is not None
    # No condition: the block itself tells an engine on the same GPUs from one on its own.
    item = f"scopes({policy}).refit({engine})"
    emptied = tuple(Place(block, index) for index in (*range(start, woken + 1), *range(end, served + 1)) if condition)
    return Push(Run(block, woken + 1, end - 1, item), four, emptied)


def _index_of(block: Block, site: Site) -> int | None:
    for index, statement in enumerate(block.statements):
        if any(event.node is site.node for event in statement.events()):
            return index
    return None


def _condition(statement: Statement, four: tuple[Site, ...]) -> str | None:
    """The condition under which a statement makes calls of the push: "" for always, None if it does more than that."""
    if statement.is_simple:
        return "" if all(_is_one_of(event, four) for event in statement.head) and len(statement.head) == 1 else None
    node = statement.node
    if not isinstance(node, cst.If) or node.orelse is not None or statement.head:
        return None
    if dotted(node.test) is None:
        return None
    inner = statement.blocks[0].statements
    alone = all(_is_our_line(s) or (s.is_simple and len(s.head) == 1 and _is_one_of(s.head[0], four)) for s in inner)
    return code(node.test) if alone else None


def _is_our_line(statement: Statement) -> bool:
    """Whether a statement is a line of ours that does nothing to a device: an earlier run put it there."""
    node = statement.node
    return isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1 and is_our_line(node.body[0])


def _is_one_of(event: Event, four: tuple[Site, ...]) -> bool:
    return any(event.node is site.node for site in four)


def _transfer(middle: Iterable[Statement], condition: str, four: tuple[Site, ...]) -> str:
    names = {condition.partition(".")[0]} | {str(site.receiver).partition(".")[0] for site in four}
    for statement in middle:
        if any(event.doing in (Doing.LIFECYCLE, Doing.YIELD, Doing.REFIT) for event in statement.events()):
            return "something else is moved between the four calls of the push"
        if has_stray_await(statement.node, ()):
            return "something is awaited between the four calls of the push"
        if bound_paths(statement.node) & names:
            return "a name that the push depends on is bound again inside it"
    return ""


# -- helpers -------------------------------------------------------------------------------------------------------


def is_covered(program: Program, event: Event) -> bool:
    """Whether a call of a helper or synchroniser stands inside a refit block."""
    found: Site | HelperSite | None = event.site or event.helper
    if found is None:
        return False
    for parent, below in zip(found.parents, found.parents[1:], strict=False):
        if isinstance(parent, cst.With) and below is parent.body:
            for item in parent.items:
                at = program.module.at(item.item)
                if isinstance(at, Site) and at.rule.kind is Kind.REFIT and at.rule.api is Api.SCOPED:
                    return True
    return False


def helper_run(program: Program, function: Function, body: Block, event: Event) -> Run | str:
    """The refit block around a call of a helper or synchroniser, or why there can be none."""
    shape = event.site.shape if event.site is not None else event.helper.shape if event.helper is not None else None
    if shape is not Shape.CALL:
        return SHAPES.get(shape, "it is not simply called") if shape is not None else "it is not simply called"
    policy, engine = _sides(program, function, event)
    if policy is None or engine is None:
        return "which policy and engine it serves cannot be told"
    if not is_pure(policy) or not is_pure(engine):
        return "the policy or the engine is no name that can be written a second time"
    for block in body.blocks():
        for index, statement in enumerate(block.statements):
            if any(here is event for here in statement.head):
                if not statement.is_simple:
                    return "it stands in the head of a compound statement"
                if len(statement.head) > 1 or has_stray_await(statement.node, ()):
                    return "the same statement does more to a tenant"
                return Run(block, index, index, f"scopes({policy}).legacy_refit({engine})")
    return "it stands in a default value or a decorator"


def _sides(program: Program, function: Function, event: Event) -> tuple[Receiver | None, Receiver | None]:
    if event.helper is not None:
        return event.helper.tenant(Tenant.POLICY), event.helper.tenant(Tenant.ENGINE)
    assert event.site is not None
    assert event.site.receiver is not None
    return _only(program, function, Tenant.POLICY), _engine_of(program, function, event.site.receiver)


def _only(program: Program, function: Function, tenant: Tenant) -> Receiver | None:
    """The one tenant of a kind that a function's parameters or body name."""
    found: dict[str, Receiver] = {}
    for parameter in function.parameters:
        receiver = program.module.receivers.of(cst.Name(parameter.name), function)
        if receiver is not None and receiver.tenant is tenant:
            found[str(receiver)] = receiver
    for event in program.all_events(function):
        for receiver in event.receivers():
            if receiver.tenant is tenant:
                found[str(receiver)] = receiver
    return next(iter(found.values())) if len(found) == 1 else None


def _engine_of(program: Program, function: Function, synchronizer: Receiver) -> Receiver | None:
    """The engine that a synchroniser belongs to: ``engine.weight_synchronizer``, or a name bound to that."""
    node = synchronizer.node
    if isinstance(node, cst.Name):
        bindings = function.bindings.get(node.value, [])
        value = bindings[0].value if len(bindings) == 1 and bindings[0].by is By.ASSIGN else None
        if isinstance(value, cst.Call) and code(value.func) == "getattr" and value.args:
            return program.module.receivers.of(value.args[0].value, function)
        node = value if value is not None else node
    if isinstance(node, cst.Attribute):
        found = program.module.receivers.of(node.value, function)
        return found if found is not None and found.tenant is Tenant.ENGINE else None
    return _only(program, function, Tenant.ENGINE)
