"""What becomes of every site of a module: the plan of one pass.

A transition goes only when everything that it served is placed by scopes, on every path, in every caller in sight. What
cannot be shown stays, with a reason. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from rl_session_migrate.codemod.blocks import Statement
from rl_session_migrate.codemod.elsewhere import NOWHERE, Elsewhere
from rl_session_migrate.codemod.engines import AwakeRun, awake_runs, why_not_a_call
from rl_session_migrate.codemod.facts import Facts, is_bound_again, is_registrable
from rl_session_migrate.codemod.ours import BY_HAND, handle_of, spoken
from rl_session_migrate.codemod.paths import Walker, reasons
from rl_session_migrate.codemod.plan import Found, Plan
from rl_session_migrate.codemod.prepares import decide_prepares, is_guarded
from rl_session_migrate.codemod.program import Doing, Event, Program
from rl_session_migrate.codemod.refits import Push, find_pushes, helper_run, is_covered, tags_of
from rl_session_migrate.codemod.release import Releases
from rl_session_migrate.codemod.scoping import Run, is_pure
from rl_session_migrate.codemod.uses import Uses
from rl_session_migrate.codemod.words import CALLBACK, COROUTINES, SHAPES
from rl_session_migrate.outline import Function
from rl_session_migrate.rules import HELPERS, Api, Kind, Tenant
from rl_session_migrate.sites import HelperSite, Shape, Site
from rl_session_migrate.tree import code

__all__ = ["decide"]

_ROOM = "the scope that comes next makes room"


def decide(program: Program, elsewhere: Elsewhere = NOWHERE) -> Plan:
    """The plan of one pass over a module.

    Args:
        program: The module.
        elsewhere: What is known of functions of other modules.
    """
    facts, plan = Facts(program, elsewhere), Plan()
    if facts.has_work:
        _Pushes(facts, plan, elsewhere).decide()
        uses = Uses(facts, plan)
        decide_prepares(facts, plan, uses)
        awake = _decide_engines(facts, plan)
        _Room(facts, plan, uses, awake).decide()
        uses.wrap()
    return plan


# -- pushes of weights ---------------------------------------------------------------------------------------------


class _Pushes:
    """Pushes written out, and calls of helpers that push."""

    def __init__(self, facts: Facts, plan: Plan, elsewhere: Elsewhere) -> None:
        self._facts = facts
        self._program = facts.program
        self._plan = plan
        self._elsewhere = elsewhere

    def decide(self) -> None:
        """Settle them."""
        for function in self._program.functions:
            body = self._facts.body(function)
            for found in find_pushes(body) if body is not None else ():
                if isinstance(found, Push) and _is_ours(found.sites[0]):
                    self._keep(function, found.sites[0], BY_HAND)
                elif isinstance(found, Push):
                    self._take(found)
                else:
                    self._keep(function, *found)
        calls = [(f, e) for f in self._program.functions for e in self._program.all_events(f) if e.doing is Doing.REFIT]
        for function, event in sorted(calls, key=lambda call: call[1].helper is not None):  # synchronisers first
            self._call(function, event)

    def _take(self, push: Push) -> None:
        self._plan.runs.append(push.run)
        for site in push.sites:
            self._plan.remove[site] = "refit() of the push"
        self._plan.empty += [emptied.statement.node for emptied in push.emptied]

    def _keep(self, function: Function, start: Site, why: str) -> None:
        """Calls that belong together stay together, but for the last release: an ``offload()`` frees what that does."""
        for site in self._facts.lifecycle(Tenant.POLICY, Tenant.ENGINE):
            in_push = site.method == "offload_before_refit" or (site.rule.kind is Kind.WAKE and bool(tags_of(site)))
            if site.function is function and in_push and site.position >= start.position:
                self._plan.left[site] = why

    def _call(self, function: Function, event: Event) -> None:
        found: Found | None = event.helper or event.site
        assert found is not None
        if is_covered(self._program, event):
            self._plan.covered[found] = "stands in a refit block"
            return
        if isinstance(found, HelperSite) and self._carries(found, function):
            self._plan.covered[found] = "the helper pushes through scopes"
            return
        if isinstance(found, Site) and function.simple_name in HELPERS and self._stays_by_hand(function):
            self._plan.covered[found] = "the refit block around the call of the helper"
            return
        if any(handle_of(receiver, function) for receiver in event.receivers()):
            self._plan.left[found] = BY_HAND
            return
        body = self._facts.body(function)
        run = helper_run(self._program, function, body, event) if body is not None else CALLBACK
        if self._program.is_callback(function):
            run = CALLBACK
        if isinstance(run, Run):
            self._plan.runs.append(run)
            self._plan.covered[found] = "legacy_refit()"
        else:
            self._plan.left[found] = run

    def _stays_by_hand(self, helper: Function) -> bool:
        """Whether a helper goes on to make legacy calls, so that its callers put it into refit blocks."""
        mine = self._program.module.sites_in(helper)
        return any(s.rule.is_lifecycle and s.rule.api is Api.LEGACY and s not in self._plan.remove for s in mine)

    def _carries(self, helper: HelperSite, caller: Function) -> bool:
        """Whether the function that is called pushes through refit blocks only, once this pass is done."""
        target = self._program.module.outline.callable_named(helper.helper.name, caller=caller)
        if target is None:
            return self._elsewhere.carries(self._program.module.outline.imports.get(helper.helper.name, ""))
        mine = self._program.module.sites_in(target)
        legacy = [site for site in mine if site.rule.is_lifecycle and site.rule.api is Api.LEGACY]
        has_block = any(site.rule.kind is Kind.REFIT and site.rule.api is Api.SCOPED for site in mine)
        body = self._facts.body(target)
        inside = {id(block) for block in body.blocks()} if body is not None else set()
        will_have = any(id(run.block) in inside for run in self._plan.runs)
        return (has_block or will_have) and all(site in self._plan.remove for site in legacy)


def _is_ours(site: Site) -> bool:
    return site.receiver is not None and bool(handle_of(site.receiver, site.function))


# -- engines -------------------------------------------------------------------------------------------------------


def _decide_engines(facts: Facts, plan: Plan) -> frozenset[int]:
    """Settle wakes and sleeps; returns the nodes of everything that will stand in an engine's scope."""
    runs: list[AwakeRun] = []
    for body in facts.bodies.values():
        runs += [run for run in awake_runs(body) if run.sleep not in plan.left and not facts.why_manual(run.sleep)]
    inside = frozenset(node for run in runs for node in run.uses)
    for run in runs:
        plan.runs.append(run.run)
        plan.remove[run.sleep] = "the end of awake()"
    outside = "it is used outside a scope"

    def judge(event: Event) -> str:
        return "" if event.site is not None and facts.is_covered(event.site) else outside

    walker = Walker(facts.program, facts.same, judge, lambda event: outside)
    for site in list(facts.lifecycle(Tenant.ENGINE)):
        if plan.is_decided(site):
            continue
        why = _why_engine_stays(facts, site)
        if why:
            plan.left[site] = why
        elif site.rule.kind is Kind.SLEEP:
            assert site.receiver is not None
            plan.replace[site] = f"{spoken(site.receiver, site.function)}.sleep()"
        elif tags_of(site) is None and _is_made_by_scopes(walker, site, inside):
            plan.remove[site] = "awake()"
        elif site.receiver is not None and handle_of(site.receiver, site.function):
            plan.left[site] = "its engine is woken by a scope only, and no run of statements here is one"
        else:
            assert isinstance(site.node, cst.Call)
            arguments = ", ".join(code(argument) for argument in site.node.args)
            plan.replace[site] = f"scopes({site.receiver}).wake({arguments})"
    return inside


def _why_engine_stays(facts: Facts, site: Site) -> str:
    if facts.why_manual(site) == COROUTINES:
        return COROUTINES
    if site.shape is not Shape.CALL:
        return SHAPES.get(site.shape, "it is not simply called")
    return why_not_a_call(site) or (CALLBACK if facts.program.is_callback(site.function) else "")


def _is_made_by_scopes(walker: Walker, wake: Site, inside: frozenset[int]) -> bool:
    """Whether every use up to the next wake, sleep or push stands in a scope that wakes the engine by itself."""
    reach = walker.after(wake.function, wake, inside=inside)
    if is_guarded(wake, reach):
        return False
    return bool(reach.uses) and not (reach.failures or reach.leaves or reach.is_idle)


# -- releases ------------------------------------------------------------------------------------------------------


class _Room:
    """Releases of policies and values, and calls that do nothing."""

    def __init__(self, facts: Facts, plan: Plan, uses: Uses, awake: frozenset[int]) -> None:
        self._facts = facts
        self._plan = plan
        self._uses = uses
        self._awake = awake

    def decide(self) -> None:
        """Settle them."""
        releases = Releases(self._facts.program, self._plan.remove, self._is_placed)
        for site in list(self._facts.lifecycle(Tenant.POLICY, Tenant.VALUE)):
            if not self._plan.is_decided(site):
                self._settle(site, releases)
        self._keep_blocks_filled()

    def _settle(self, site: Site, releases: Releases) -> None:
        assert site.receiver is not None
        why = self._facts.why_not_replaced(site)
        if not why and not is_pure(site.receiver):
            why = f"{site.receiver} is no name that can be written a second time"
        if not why and site.method == "offload_before_refit":
            why = self._why_weights_stay(site)
        if why:
            self._plan.left[site] = why
        elif site.rule.kind is Kind.NOOP:
            self._plan.remove[site] = "it does nothing"
        elif handle_of(site.receiver, site.function):
            self._plan.replace[site] = f"{spoken(site.receiver, site.function)}.offload()"
        elif self._is_registered(site) and releases.is_made_by_scopes(site):
            self._plan.remove[site] = _ROOM
        else:
            self._plan.replace[site] = f"scopes({site.receiver}).offload()"

    def _why_weights_stay(self, site: Site) -> str:
        """Why the parameters, which ``offload_before_refit`` leaves on the device, must not leave it; "" if they may."""
        handed = "the policy is handed on with its weights on the device, to a function that is not in sight"
        hands: Callable[[Event], str] = lambda event: "" if self._facts.is_in_sight(event) else handed  # noqa: E731
        reach = Walker(self._facts.program, self._facts.same, self._uses.judge, hands).after(site.function, site)
        return f"what follows needs the weights on the device; {reasons(reach.failures)}" if reach.failures else ""

    def _is_registered(self, site: Site) -> bool:
        """Whether the line that says who shares the device will name a tenant: the function has a scope of it."""
        assert site.receiver is not None
        mine = [other for other in self._facts.program.module.sites_in(site.function) if other.receiver is not None]
        scoped = {str(other.receiver) for other in mine if other.receiver is not None and other.receiver.is_scopes}
        scoped |= self._uses.names_in(mine)
        if not is_registrable(site.function, site.receiver) or is_bound_again(site.function, site.receiver):
            return False
        return site.receiver.identity.path in scoped

    def _is_placed(self, event: Event) -> bool:
        """Whether a use of the device is a scope of ours, of a tenant that shares it."""
        found: Found | None = event.site or event.helper
        if found is not None and not all(is_registrable(found.function, receiver) for receiver in event.receivers()):
            return False
        if event.doing is Doing.REFIT:
            return found in self._plan.covered
        if event.doing is Doing.ENTER or id(event.node) in self._awake:
            return True
        return event.doing is Doing.USE and self._uses.is_scoped(event)

    def _keep_blocks_filled(self) -> None:
        """A release that is all there is in a block stays as a call, which is free where nothing is in."""
        gone = {id(site.node) for site in self._plan.remove}
        for site, why in list(self._plan.remove.items()):
            block = self._facts.block_of(site) if why == _ROOM else None
            if block is not None and all(_is_only(statement, gone) for statement in block.statements):
                del self._plan.remove[site]
                self._plan.replace[site] = f"scopes({site.receiver}).offload()"


def _is_only(statement: Statement, gone: set[int]) -> bool:
    """Whether nothing is left of a statement."""
    return statement.is_simple and len(statement.head) == 1 and id(statement.head[0].node) in gone
