"""The last strokes on a module whose sites are decided: who shares the device, what is forgotten, why something stays.

Every stroke looks first whether it is there already, so that a second time changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import attrs
import libcst as cst

from rl_session_migrate.codemod.edits import comment_line, line_of
from rl_session_migrate.codemod.facts import Facts
from rl_session_migrate.codemod.plan import Plan
from rl_session_migrate.codemod.program import Doing, Program
from rl_session_migrate.codemod.scoping import is_pure
from rl_session_migrate.outline import By, Function
from rl_session_migrate.receivers import Receiver
from rl_session_migrate.rules import HELPERS, Kind, Tenant
from rl_session_migrate.sites import Site
from rl_session_migrate.tree import callee, code, dotted, walk

__all__ = ["MARK", "Spelling", "finish"]

MARK = "rl-session: kept: "
_ORDER = (Tenant.POLICY, Tenant.VALUE, Tenant.ENGINE)


@attrs.frozen
class Spelling:
    """How the module spells our names."""

    scopes: str = "scopes"
    share: str = "share"


@attrs.define
class _Strokes:
    """What to write, by the statement it is written at.

    Attributes:
        above: Comments above statements.
        behind: Lines behind statements.
        before: Lines before statements.
        instead: Lines instead of statements.
    """

    above: dict[cst.CSTNode, list[str]] = attrs.field(factory=lambda: defaultdict(list))
    behind: dict[cst.CSTNode, list[str]] = attrs.field(factory=lambda: defaultdict(list))
    before: dict[cst.CSTNode, list[str]] = attrs.field(factory=lambda: defaultdict(list))
    instead: dict[cst.CSTNode, str] = attrs.field(factory=dict)


def finish(facts: Facts, plan: Plan, parents: Mapping[cst.CSTNode, cst.CSTNode], spelling: Spelling) -> cst.Module:
    """The module with its last strokes.

    Args:
        facts: The module; nothing is left to rewrite in it.
        plan: What stays in it, and why.
        parents: The parent of each node.
        spelling: How it spells our names.
    """
    program, strokes = facts.program, _Strokes()
    for site, why in plan.left.items():
        statement = _statement_of(site.node, parents)
        if statement is not None:
            _explain(strokes, statement, why)
    for receiver, node in (*_moved_by_hand(program, plan), *_saved(facts), *_handed_on(facts)):
        _forget(strokes, receiver, _statement_of(node, parents), parents, spelling)
    for function in program.functions:
        _share(strokes, program, function, spelling, parents)
    module = program.module.source.module
    if not (strokes.above or strokes.behind or strokes.before or strokes.instead):
        return module
    changed = module.visit(_Writer(strokes, parents))
    assert isinstance(changed, cst.Module)
    return changed


# -- why something stays -------------------------------------------------------------------------------------------


def _statement_of(node: cst.CSTNode, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> cst.CSTNode | None:
    """The line or compound statement that something stands in."""
    here: cst.CSTNode | None = node
    while here is not None:
        above = parents.get(here)
        if isinstance(above, (cst.IndentedBlock, cst.Module)) and here in above.body:
            return here
        here = above
    return None


def _explain(strokes: _Strokes, statement: cst.CSTNode, why: str) -> None:
    leading = getattr(statement, "leading_lines", ())
    if any(line.comment is not None and MARK.strip() in line.comment.value for line in leading):
        return
    if why not in strokes.above[statement]:
        strokes.above[statement].append(why)


# -- what is moved behind the scopes' back -------------------------------------------------------------------------


def _moved_by_hand(program: Program, plan: Plan) -> Iterator[tuple[Receiver, cst.CSTNode]]:
    """Transitions that stay, of tenants that scopes know."""
    known = _known(program)
    for site in plan.left:
        if not isinstance(site, Site) or site.receiver is None or not site.shape.runs_here:
            continue
        if not site.rule.is_lifecycle or site.rule.kind is Kind.NOOP or _is_left_to_callers(program, site):
            continue
        if (site.receiver.tenant, site.receiver.identity.path) in known and is_pure(site.receiver):
            yield site.receiver, site.node


def _is_left_to_callers(program: Program, site: Site) -> bool:
    """Whether a helper makes no call through scopes: its callers' refit blocks know what it leaves behind."""
    if site.function.simple_name not in HELPERS:
        return False
    mine = program.module.sites_in(site.function)
    return not any(other.receiver is not None and other.receiver.is_scopes for other in mine)


def _saved(facts: Facts) -> Iterator[tuple[Receiver, cst.CSTNode]]:
    """Policies that scopes know and that are saved outside a scope of theirs: a Megatron policy comes in for that, and stays."""
    known = _known(facts.program)
    for site in facts.sites:
        if site.method == "save_checkpoint" and site.rule.tenant is Tenant.POLICY and site.shape.runs_here:
            receiver = site.receiver
            is_known = receiver is not None and (receiver.tenant, receiver.identity.path) in known
            if receiver is not None and is_known and is_pure(receiver) and not facts.is_covered(site):
                yield receiver, site.node


def _known(program: Program) -> set[tuple[Tenant, str]]:
    """The tenants that scopes know."""
    return {
        (site.receiver.tenant, site.receiver.identity.path)
        for site in program.module.sites
        if site.receiver is not None and site.receiver.is_scopes
    }


def _handed_on(facts: Facts) -> Iterator[tuple[Receiver, cst.CSTNode]]:
    """Policies and values that scopes know and a function gets that is not in sight: it may move them.

    An engine is handed to every rollout, which uses it as it finds it.
    """
    program = facts.program
    for function in program.functions:
        known = {str(tenant) for tenant in _tenants(program, function)}
        for event in program.all_events(function):
            for receiver in (
                event.handed.values() if event.doing is Doing.HANDED and not facts.is_in_sight(event) else ()
            ):
                if receiver.tenant is not Tenant.ENGINE and str(receiver) in known:
                    yield receiver, event.node


def _forget(
    strokes: _Strokes,
    receiver: Receiver,
    statement: cst.CSTNode | None,
    parents: Mapping[cst.CSTNode, cst.CSTNode],
    spelling: Spelling,
) -> None:
    if not isinstance(statement, cst.SimpleStatementLine):
        return
    if any(isinstance(small, (cst.Return, cst.Raise)) for small in statement.body):
        return
    _insert_behind(strokes, statement, parents, f"{spelling.scopes}({receiver}).forget()")


def _insert_behind(
    strokes: _Strokes, statement: cst.CSTNode | None, parents: Mapping[cst.CSTNode, cst.CSTNode], text: str
) -> None:
    """A line behind a simple statement, unless it is there."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return
    block = parents[statement]
    assert isinstance(block, (cst.IndentedBlock, cst.Module))
    index = list(block.body).index(statement)
    following = block.body[index + 1] if index + 1 < len(block.body) else None
    there = isinstance(following, cst.SimpleStatementLine) and code(following.body[0]) == text
    if not there and text not in strokes.behind[statement]:
        strokes.behind[statement].append(text)


# -- who shares the device -----------------------------------------------------------------------------------------


def _share(
    strokes: _Strokes,
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
    tenants = _tenants(program, function)
    first = _first_scope(program, function, body)
    if not tenants or first is None or _is_shared_by_callers(program, function, tenants):
        return
    known = [tenant for tenant in tenants if _is_bound_before(function, tenant, body[:first])]
    rebound = list(_bound_again(program, function, known, body[first:]))
    known += [other for _, other in rebound if other is not None and _is_bound_before(function, other, body[:first])]
    names = list(dict.fromkeys(str(tenant) for kind in _ORDER for tenant in known if tenant.tenant is kind))
    for node, other in rebound:
        if other is None or str(other) not in names:
            _insert_behind(strokes, _statement_of(node, parents), parents, _share_line(spelling, names))
    there = _existing(body, spelling)
    if there is not None:
        line, call = there
        said = [code(arg.value) for arg in call.args if arg.keyword is None]
        missing = [name for name in names if name not in said]
        if missing:
            strokes.instead[line] = _share_line(spelling, [*said, *missing])
    elif names:
        strokes.before[body[first]].append(_share_line(spelling, names))


def _makes_room(site: Site) -> bool:
    """Whether a call enters a scope or moves a tenant through one: then it matters who shares the device."""
    return site.receiver is not None and site.receiver.is_scopes and site.method != "forget"


def _share_line(spelling: Spelling, names: list[str]) -> str:
    return f"{spelling.share}({', '.join(names)}, only_colocated=True)"


def _tenants(program: Program, function: Function) -> list[Receiver]:
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
        shared = {str(tenant) for tenant in _tenants(program, caller)}
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


# -- writing -------------------------------------------------------------------------------------------------------


class _Writer(cst.CSTTransformer):
    def __init__(self, strokes: _Strokes, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
        super().__init__()
        self._strokes = strokes
        self._touched: set[cst.CSTNode] = set()
        for node in (*strokes.above, *strokes.behind, *strokes.before, *strokes.instead):
            here: cst.CSTNode | None = node
            while here is not None and here not in self._touched:
                self._touched.add(here)
                here = parents.get(here)

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node in self._touched

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        if original_node not in self._touched or not isinstance(original_node, (cst.IndentedBlock, cst.Module)):
            return updated_node
        assert isinstance(updated_node, (cst.IndentedBlock, cst.Module))
        body: list[cst.CSTNode] = []
        for old, new in zip(original_node.body, updated_node.body, strict=True):
            body += self._line(old, new)
        return updated_node.with_changes(body=body)

    def _line(self, old: cst.CSTNode, new: cst.CSTNode) -> Iterator[cst.CSTNode]:
        strokes = self._strokes
        leading = list(getattr(new, "leading_lines", ()))
        if old in strokes.instead:
            yield line_of(strokes.instead[old]).with_changes(leading_lines=leading)
            return
        before = strokes.before.get(old, [])
        for number, text in enumerate(before):
            yield line_of(text).with_changes(leading_lines=_blanks(leading) if number == 0 else [])
        if before and not any(line.comment is not None for line in leading):
            leading = []
        comments = [comment_line(f"{MARK}{why}") for why in strokes.above.get(old, [])]
        yield new.with_changes(leading_lines=[*leading, *comments]) if comments or before else new
        for text in strokes.behind.get(old, []):
            yield line_of(text)


def _blanks(lines: list[cst.EmptyLine]) -> list[cst.EmptyLine]:
    found = []
    for line in lines:
        if line.comment is not None:
            break
        found.append(line)
    return found
