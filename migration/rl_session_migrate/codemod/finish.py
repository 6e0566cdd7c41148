"""The last strokes on a module whose sites are decided: who shares the device, what is forgotten, why something stays.

Every stroke looks first whether it is there already, so that a second time changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from rl_session_migrate.codemod.edits import comment_line, line_of
from rl_session_migrate.codemod.facts import Facts
from rl_session_migrate.codemod.plan import Plan
from rl_session_migrate.codemod.program import Doing, Program
from rl_session_migrate.codemod.scoping import is_pure
from rl_session_migrate.codemod.shares import share, tenants_of_scopes
from rl_session_migrate.codemod.strokes import Spelling, Strokes, insert_behind, statement_of
from rl_session_migrate.receivers import Receiver
from rl_session_migrate.rules import HELPERS, Kind, Tenant
from rl_session_migrate.sites import Site

__all__ = ["MARK", "Spelling", "finish"]

MARK = "rl-session: kept: "


def finish(facts: Facts, plan: Plan, parents: Mapping[cst.CSTNode, cst.CSTNode], spelling: Spelling) -> cst.Module:
    """The module with its last strokes.

    Args:
        facts: The module; nothing is left to rewrite in it.
        plan: What stays in it, and why.
        parents: The parent of each node.
        spelling: How it spells our names.
    """
    program, strokes = facts.program, Strokes()
    for site, why in plan.left.items():
        statement = statement_of(site.node, parents)
        if statement is not None:
            _explain(strokes, statement, why)
    for receiver, node in (*_moved_by_hand(program, plan), *_saved(facts), *_handed_on(facts)):
        _forget(strokes, receiver, statement_of(node, parents), parents, spelling)
    for function in program.functions:
        share(strokes, program, function, spelling, parents)
    module = program.module.source.module
    if not (strokes.above or strokes.behind or strokes.before or strokes.instead):
        return module
    changed = module.visit(_Writer(strokes, parents))
    assert isinstance(changed, cst.Module)
    return changed


# -- why something stays -------------------------------------------------------------------------------------------


def _explain(strokes: Strokes, statement: cst.CSTNode, why: str) -> None:
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
        known = {str(tenant) for tenant in tenants_of_scopes(program, function)}
        for event in program.all_events(function):
            for receiver in (
                event.handed.values() if event.doing is Doing.HANDED and not facts.is_in_sight(event) else ()
            ):
                if receiver.tenant is not Tenant.ENGINE and str(receiver) in known:
                    yield receiver, event.node


def _forget(
    strokes: Strokes,
    receiver: Receiver,
    statement: cst.CSTNode | None,
    parents: Mapping[cst.CSTNode, cst.CSTNode],
    spelling: Spelling,
) -> None:
    if not isinstance(statement, cst.SimpleStatementLine):
        return
    if any(isinstance(small, (cst.Return, cst.Raise)) for small in statement.body):
        return
    insert_behind(strokes, statement, parents, f"{spelling.scopes}({receiver}).forget()")


# -- writing -------------------------------------------------------------------------------------------------------


class _Writer(cst.CSTTransformer):
    def __init__(self, strokes: Strokes, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
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
