"""The line that says who shares the device: which tenants it names, where it stands, and where it is said again.

Knows nothing of what the scopes below it do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from rl_session_migrate.codemod.program import Doing, Program
from rl_session_migrate.codemod.strokes import Spelling, Strokes, insert_behind, statement_of
from rl_session_migrate.outline import By, Function
from rl_session_migrate.receivers import Receiver
from rl_session_migrate.rules import Kind, Tenant
from rl_session_migrate.sites import Site
from rl_session_migrate.tree import callee, code, dotted, walk

__all__ = ["share", "tenants_of_scopes"]

_ORDER = (Tenant.POLICY, Tenant.VALUE, Tenant.ENGINE)


def share(
    strokes: Strokes,
    program: Program,
    function: Function,
    spelling: Spelling,
    parents: Mapping[cst.CSTNode, cst.CSTNode],
) -> None:
    """One line before the first scope of a function."""
    node = function.node
    if isinstance(node, cst.Lambda):
        return
    body = node.body if isinstance(node, cst.Module) else node.body.body
    tenants = tenants_of_scopes(program, function)
    first = _first_scope(program, function, body)
    if not tenants or first is None or _is_shared_by_callers(program, function, tenants):
        return
    known = [tenant for tenant in tenants if _is_bound_before(function, tenant, body[:first])]
    rebound = list(_bound_again(program, function, known, body[first:]))
    known += [other for _, other in rebound if other is not None and _is_bound_before(function, other, body[:first])]
    names = _ordered(known)
    if all(tenant.tenant is Tenant.ENGINE for tenant in known) and len(names) < 2:
        names = []  # of an engine alone it would say that somebody else sends it away
    for place, said_there in _again(function, tenants, known, rebound, body, first, parents):
        insert_behind(strokes, statement_of(place, parents), parents, _share_line(spelling, said_there))
    there = _existing(body, spelling)
    if there is not None:
        line, call = there
        said = [code(arg.value) for arg in call.args if arg.keyword is None]
        missing = [name for name in names if name not in said]
        if missing:
            strokes.instead[line] = _share_line(spelling, [*said, *missing])
    elif names:
        strokes.before[body[first]].append(_share_line(spelling, names))


def _again(
    function: Function,
    tenants: list[Receiver],
    known: list[Receiver],
    rebound: list[tuple[cst.CSTNode, Receiver | None]],
    body: object,
    first: int,
    parents: Mapping[cst.CSTNode, cst.CSTNode],
) -> Iterator[tuple[cst.CSTNode, list[str]]]:
    """Where the line is said again, because a name has come, or stands for another object, and whom it names there."""
    assert isinstance(body, (list, tuple))
    for place in _bound_later(function, [tenant for tenant in tenants if tenant not in known], body[first:]):
        bound = _ordered([t for t in tenants if t in known or _is_bound_by(function, t, place, body, parents)])
        if len(bound) > 1:
            yield place, bound
    for place, other in rebound:
        names = _ordered(known)
        if names and (other is None or str(other) not in names):
            yield place, names


def _ordered(tenants: list[Receiver]) -> list[str]:
    return list(dict.fromkeys(str(tenant) for kind in _ORDER for tenant in tenants if tenant.tenant is kind))


def _bound_later(function: Function, tenants: list[Receiver], behind: object) -> Iterator[cst.CSTNode]:
    """Where the tenants get their names that have none yet where the first scope stands."""
    assert isinstance(behind, (list, tuple))
    for statement in behind:
        below = set(walk(statement, into_functions=False))
        for root in {str(tenant).partition(".")[0] for tenant in tenants}:
            bindings = [b for b in function.bindings.get(root, []) if b.by is By.ASSIGN and b.node in below]
            yield from (binding.node for binding in bindings)


def _is_bound_by(
    function: Function,
    tenant: Receiver,
    node: cst.CSTNode,
    body: object,
    parents: Mapping[cst.CSTNode, cst.CSTNode],
) -> bool:
    """Whether a tenant has its name once a statement of a function has run, and not only on some path to it."""
    root = str(tenant).partition(".")[0]
    bindings = {binding.node for binding in function.bindings.get(root, [])}
    if not bindings or bindings & {parameter.node for parameter in function.parameters}:
        return True
    assert isinstance(body, (list, tuple))
    around = set(_upwards(node, parents))
    for here in (here for statement in body for here in walk(statement, into_functions=False)):
        if here in bindings and not any(_is_left_out(up, parents, around) for up in _upwards(here, parents)):
            return True
        if here is node:
            return False
    return False


def _is_left_out(up: cst.CSTNode, parents: Mapping[cst.CSTNode, cst.CSTNode], around: set[cst.CSTNode]) -> bool:
    """Whether what stands around a binding, and not around the place that asks, may not have run."""
    if up in around:
        return False
    is_loop = isinstance(up, (cst.For, cst.While))
    return is_loop or (isinstance(parents.get(up), (cst.If, cst.Try)) and parents[up] in around)


def _upwards(node: cst.CSTNode, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> Iterator[cst.CSTNode]:
    here: cst.CSTNode | None = node
    while here is not None:
        yield here
        here = parents.get(here)


def _makes_room(site: Site) -> bool:
    """Whether a call enters a scope or moves a tenant through one: then it matters who shares the device."""
    return site.receiver is not None and site.receiver.is_scopes and site.method != "forget"


def _share_line(spelling: Spelling, names: list[str]) -> str:
    return f"{spelling.share}({', '.join(names)}, only_colocated=True)"


def tenants_of_scopes(program: Program, function: Function) -> list[Receiver]:
    """The tenants that a function has scopes of, or moves, and can name for as long as it runs."""
    found: dict[str, Receiver] = {}
    for site in program.module.sites_in(function):
        receiver = site.receiver
        if not _makes_room(site) or receiver is None or not receiver.is_single or dotted(receiver.node) is None:
            continue
        found.setdefault(str(receiver), receiver)
        if site.rule.kind is Kind.REFIT and isinstance(site.node, cst.Call) and site.node.args:
            engine = program.module.receivers.of(site.node.args[0].value, function)
            if engine is not None and dotted(engine.node) is not None:
                found.setdefault(str(engine), engine)
    return list(found.values())


def _first_scope(program: Program, function: Function, body: object) -> int | None:
    """The first statement that has a scope, or calls a function of this module that is handed a tenant."""
    nodes = {site.node for site in program.module.sites_in(function) if _makes_room(site)}
    if not nodes:
        return None
    calls = [event for event in program.all_events(function) if event.doing is Doing.CALL and event.handed]
    nodes |= {event.node for event in calls if isinstance(event.node, cst.Call)}
    assert isinstance(body, (list, tuple))
    for index, statement in enumerate(body):
        if any(here in nodes for here in walk(statement, into_functions=False)):
            return index
    return None


def _is_bound_before(function: Function, tenant: Receiver, before: object) -> bool:
    """Whether a name stands for its tenant from here on: a parameter, an outer name, or bound by a line above."""
    root = str(tenant).partition(".")[0]
    bindings = function.bindings.get(root, [])
    if not bindings or any(binding.node in {p.node for p in function.parameters} for binding in bindings):
        return True
    assert isinstance(before, (list, tuple))
    above = {here for statement in before for here in walk(statement, into_functions=False)}
    return any(binding.node in above for binding in bindings)


def _bound_again(
    program: Program, function: Function, tenants: list[Receiver], behind: object
) -> Iterator[tuple[cst.CSTNode, Receiver | None]]:
    """Where the name of a tenant becomes another object's once scopes are in use, and whose, where that has a name."""
    assert isinstance(behind, (list, tuple))
    below = {here for statement in behind for here in walk(statement, into_functions=False)}
    for name in {str(tenant) for tenant in tenants}:
        for binding in function.bindings.get(name, []):
            if binding.by is By.ASSIGN and binding.value is not None and binding.node in below:
                other = program.module.receivers.of(binding.value, function)
                is_named = other is not None and dotted(other.node) is not None
                yield binding.node, other if is_named else None


def _is_shared_by_callers(program: Program, function: Function, tenants: list[Receiver]) -> bool:
    """Whether every caller is in sight and says it of all that it hands over: then a helper need not."""
    callers = list(_calls_of(program, function))
    names = {parameter.name for parameter in function.parameters}
    if not callers or not all(str(tenant) in names for tenant in tenants):
        return False
    for caller, handed in callers:
        shared = {str(tenant) for tenant in tenants_of_scopes(program, caller)}
        is_said = all(str(handed.get(str(tenant))) in shared for tenant in tenants)
        if caller is function or not (is_said if len(tenants) > 1 else shared):
            return False
    return True


def _calls_of(program: Program, function: Function) -> Iterator[tuple[Function, Mapping[str, Receiver]]]:
    """Who calls a function in this module, and what tenants each hands to which parameter."""
    for caller in program.callers(function):
        yield caller.function, caller.event.handed
    for site in program.module.helpers:
        if program.module.outline.callable_named(site.helper.name, caller=site.function) is function:
            roles = zip(function.parameters, site.tenants, strict=False)
            yield site.function, {parameter.name: tenant for parameter, tenant in roles if tenant is not None}


def _existing(body: object, spelling: Spelling) -> tuple[cst.SimpleStatementLine, cst.Call] | None:
    assert isinstance(body, (list, tuple))
    for line in body:
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 and isinstance(line.body[0], cst.Expr):
            value = line.body[0].value
            if isinstance(value, cst.Call) and callee(value) == spelling.share and isinstance(value.func, cst.Name):
                return line, value
    return None
