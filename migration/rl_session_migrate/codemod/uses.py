"""Computing calls: which go into scopes, which stay bare, and why; and whether a use that a path meets is placed.

What is bare may change while prepares are decided: what runs between a transition that stays and a bare call stays bare too.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs

from rl_session_migrate.codemod.facts import Facts
from rl_session_migrate.codemod.paths import Walker, place
from rl_session_migrate.codemod.plan import Plan
from rl_session_migrate.codemod.program import Doing, Event
from rl_session_migrate.codemod.scoping import Want, place_of, runs, wanted
from rl_session_migrate.codemod.words import CALLBACK
from rl_session_migrate.rules import Kind, Tenant
from rl_session_migrate.sites import Site

__all__ = ["Uses"]


class Uses:
    """The uses of a module's policies and values.

    Args:
        facts: The module.
        plan: The plan so far: its runs are refit blocks.
    """

    def __init__(self, facts: Facts, plan: Plan) -> None:
        self._facts = facts
        self._plan = plan
        self._wants: dict[int, Want] = {}
        self._bare: dict[int, str] = {}
        self._pushed = {
            id(event.node)
            for run in plan.runs
            for statement in run.block.statements[run.first : run.last + 1]
            for event in statement.events()
        }
        self._prepared = _prepared_saves(facts)
        for site in facts.sites:
            want = wanted(site)
            if want is None or _reads_weights(site) or facts.is_covered(site):
                continue
            if site.method != "save_checkpoint" or id(site.node) in self._prepared:
                self._consider(site, want)

    def _consider(self, site: Site, want: Want) -> None:
        why = self._why_bare(site)
        if why:
            self._bare[id(site.node)] = why
        else:
            self._wants[id(site.node)] = want

    def _why_bare(self, site: Site) -> str:
        why = self._facts.why_manual(site)
        if why:
            return why
        if self._facts.program.is_callback(site.function):
            return CALLBACK
        return self._why_no_place(site)

    def _why_no_place(self, site: Site) -> str:
        body = self._facts.body(site.function)
        where = place_of(body, site) if body is not None else "it stands in a lambda"
        return where if isinstance(where, str) else ""

    # -- what paths ask ------------------------------------------------------------------------------------------

    def is_scoped(self, event: Event) -> bool:
        """Whether a use stands in a scope, or will."""
        return id(event.node) in self._wants or (event.site is not None and self._facts.is_covered(event.site))

    def names_in(self, sites: Collection[Site]) -> set[str]:
        """The receivers of sites that will have a scope."""
        return {str(site.receiver) for site in sites if id(site.node) in self._wants}

    def judge(self, event: Event) -> str:
        """Why a use is not placed by a scope; "" if it is."""
        site = event.site
        if event.doing is Doing.REFIT:
            found = event.helper or site
            is_left = found is not None and found in self._plan.left
            return "the push of weights that follows is in no refit block" if is_left else ""
        assert site is not None
        if self.is_scoped(event) or (site.method == "save_checkpoint" and id(site.node) not in self._prepared):
            return ""
        where = place(site.function)
        if site.rule.kind is Kind.STEP:
            return f"{site.method} in {where} works on a train step that stays open between calls"
        if _reads_weights(site):
            return self._judge_reading(site)
        why = self._bare.get(id(event.node), "it is not in a scope")
        return f"{site.method} in {where} cannot go into a scope: {why}"

    def _judge_reading(self, site: Site) -> str:
        """Reading the weights is placed by a scope that is written where a transition depends on it."""
        if id(site.node) in self._pushed:
            return ""
        if site.rule.kind is Kind.TRANSFER:
            return (
                f"{site.method} in {place(site.function)} pushes weights outside a refit block, which alone places that"
            )
        why = self._why_bare(site)
        want = wanted(site)
        if why or want is None:
            return f"{site.method} in {place(site.function)} cannot go into a scope: {why}"
        self._wants[id(site.node)] = want
        return ""

    # -- what decisions change -----------------------------------------------------------------------------------

    def leave_bare(self, event: Event, why: str) -> bool:
        """Leave a use outside scopes after all; whether that is news."""
        if self._wants.pop(id(event.node), None) is None:
            return False
        self._bare[id(event.node)] = why
        return True

    def keep_buffers(self, reached: dict[int, set[str]]) -> None:
        """Inference that only ever ran on what ``prepare_for_training`` placed leaves gradients and optimizer there.

        The legacy call did not move them, and with ``offload_optimizer_for_logprob`` a plain ``logprob_mode()`` would.

        Args:
            reached: By the call's node, the transitions that it runs on.
        """
        for node, want in self._wants.items():
            is_foreign = want.receiver.startswith("scopes(")  # our own scopes keep what an open step needs
            if is_foreign and want.scope == "logprob_mode" and reached.get(node) == {"prepare_for_training"}:
                self._wants[node] = attrs.evolve(want, arguments="keep_train_buffers=True")

    def wrap(self) -> None:
        """Put the scopes into the plan."""
        for function in self._facts.program.functions:
            body = self._facts.body(function)
            if body is not None:
                nodes = [id(site.node) for site in self._facts.program.module.sites_in(function)]
                mine = {node: self._wants[node] for node in nodes if node in self._wants}
                self._plan.runs += list(runs(self._facts.program, body, mine))


def _prepared_saves(facts: Facts) -> frozenset[int]:
    """The saves that rely on a ``prepare_*`` by hand.

    Any other is legal where it stands: it saves what it finds, or what its backend brings in for it. A scope around it would
    send the engine to sleep that serves meanwhile.
    """
    if not any(site.method == "save_checkpoint" for site in facts.sites):
        return frozenset()
    walker = Walker(facts.program, facts.same, lambda event: "", lambda event: "")
    prepares = [s for s in facts.lifecycle(Tenant.POLICY, Tenant.VALUE) if s.rule.kind is Kind.PREPARE]
    reached = [event for site in prepares for event in walker.after(site.function, site).uses.values()]
    return frozenset(id(e.node) for e in reached if e.site is not None and e.site.method == "save_checkpoint")


def _reads_weights(site: Site) -> bool:
    return site.rule.kind is Kind.TRANSFER or site.method == "prepare_refit_info"
