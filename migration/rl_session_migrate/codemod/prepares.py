"""Prepares: which of them go, because everything they served is in scopes on every path, in every caller in sight."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from rl_session_migrate.codemod.facts import Facts
from rl_session_migrate.codemod.paths import Reach, Walker, reasons
from rl_session_migrate.codemod.plan import Plan
from rl_session_migrate.codemod.program import Doing, Event
from rl_session_migrate.codemod.scoping import wanted
from rl_session_migrate.codemod.steps import keeps_gradients
from rl_session_migrate.codemod.uses import Uses
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import Receiver
from rl_session_migrate.rules import Kind, Tenant
from rl_session_migrate.sites import Site
from rl_session_migrate.tree import code, walk

__all__ = ["decide_prepares", "is_guarded"]


def decide_prepares(facts: Facts, plan: Plan, uses: Uses) -> None:
    """Settle every ``prepare_*`` of a policy or value: a fixpoint, since what one keeps bare another may rely on."""
    walker = Walker(facts.program, facts.same, uses.judge, lambda event: _why_handing_matters(facts, event))
    sites = [site for site in facts.lifecycle(Tenant.POLICY, Tenant.VALUE) if site.rule.kind is Kind.PREPARE]
    kept: dict[Site, str] = {}
    while True:
        reached = {site: walker.after(site.function, site) for site in sites if site not in kept}
        new = {site: why for site, reach in reached.items() if (why := _why_kept(facts, site, reach))}
        if not new:
            break
        kept.update(new)
        for site in new:
            _taint(walker, uses, site)
    for site in sites:
        if site in kept:
            plan.left[site] = kept[site]
        else:
            _remove(plan, site, reached[site])
    uses.keep_buffers(_transitions_before_uses(facts, walker))


def _why_kept(facts: Facts, site: Site, reach: Reach) -> str:
    why = facts.why_not_replaced(site)
    if why:
        return why
    if keeps_gradients(site):
        return "it keeps gradients (keep_train_buffers), which only a scope that says so does: write it by hand"
    if is_guarded(site, reach):
        return "a handler around it deals with its failure"
    if reach.failures:
        return reasons(reach.failures)
    if not reach.uses and reach.leaves:
        return "nothing in sight uses what it prepares"
    return ""


def is_guarded(site: Site, reach: Reach) -> bool:
    """Whether a ``try`` catches the failure of a transition, and what would fail in its place stands outside."""
    for parent, below in zip(site.parents, site.parents[1:], strict=False):
        if isinstance(parent, (cst.Try, cst.TryStar)) and below is parent.body and parent.handlers:
            inside = {id(node) for node in walk(parent.body)}
            if not any(node in inside for node in reach.uses):
                return True
    return False


def _why_handing_matters(facts: Facts, event: Event) -> str:
    if facts.is_in_sight(event):
        return ""
    if "self" in event.handed and not isinstance(event.node, cst.Call):
        return f"{code(event.node)} is used: what is asked of it may need what this brings in"
    name = code(event.node.func) if isinstance(event.node, cst.Call) else "a function"
    if "self" in event.handed:
        return f"{name}() is no method that is known: it may need what this brings in"
    return f"what it prepares is handed to {name}(), which is not in sight"


def _remove(plan: Plan, site: Site, reach: Reach) -> None:
    plan.remove[site] = _covering(reach) or "nothing uses what it prepares before the next transition"
    for function in {id(left): left for left in reach.leaves}.values():
        caller = f"what calls {function.name}" if function.name else "what follows in the module"
        plan.assumed.append((site, f"{caller} uses {site.receiver} in scopes only"))


def _covering(reach: Reach) -> str:
    """What makes the transition now, in words."""
    names: list[str] = []
    for event in reach.uses.values():
        want = wanted(event.site) if event.site is not None else None
        names.append(f"{want.scope}()" if want is not None else "refit()" if event.doing is Doing.REFIT else "")
    return ", ".join(dict.fromkeys(name for name in names if name))


def _taint(walker: Walker, uses: Uses, site: Site) -> None:
    """What runs between a transition that stays and a bare use that relies on it stays bare too."""
    if not site.shape.runs_here:
        return
    for event in walker.after(site.function, site).uses.values():
        if event.doing is not Doing.USE or event.site is None:
            continue
        later = walker.after(event.site.function, event.site)
        if any(failure.event.doing is Doing.USE for failure in later.failures):
            uses.leave_bare(event, f"it runs between {site.method}, which stays, and a call that relies on that")


def _transitions_before_uses(facts: Facts, walker: Walker) -> dict[int, set[str]]:
    """By the node of each use of a policy, the transitions that it runs on."""
    reached: dict[int, set[str]] = {}
    for method, function, node, receiver in _transitions(facts):
        for use in walker.behind(function, node, receiver).uses:
            reached.setdefault(use, set()).add(method)
    return reached


def _transitions(facts: Facts) -> Iterator[tuple[str, Function, cst.CSTNode, Receiver]]:
    for site in facts.lifecycle(Tenant.POLICY):
        if site.rule.kind in (Kind.PREPARE, Kind.OFFLOAD) and site.shape.runs_here and site.receiver is not None:
            yield site.method, site.function, site.node, site.receiver
    for function in facts.program.functions:
        for event in facts.program.all_events(function):
            for receiver in event.receivers() if event.doing is Doing.REFIT else ():
                if receiver.tenant is Tenant.POLICY:
                    yield "a push", function, event.node, receiver
