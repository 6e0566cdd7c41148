"""Where a train step may be open between calls: in the function that works on it, and in all that it calls meanwhile.

What stands there stays on the manual API: scopes do not see a step that was begun on the object itself. Knows nothing of
what is done about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import libcst as cst

from rl_session_migrate.codemod.elsewhere import Elsewhere, imported_name
from rl_session_migrate.codemod.paths import place
from rl_session_migrate.codemod.program import Doing, Event, Program, parameter_of
from rl_session_migrate.codemod.words import OPEN_STEP as HERE
from rl_session_migrate.flow import Node, solve
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import Identity
from rl_session_migrate.rules import Api, Kind
from rl_session_migrate.sites import Site
from rl_session_migrate.tree import arguments

__all__ = ["OpenSteps", "keeps_gradients"]

Same = Callable[[Identity, Identity], bool]


def keeps_gradients(site: Site) -> bool:
    """Whether a prepare says, or may say, that gradients of an open step stay."""
    if site.method != "prepare_for_lp_inference":
        return False
    call = site.node
    if not isinstance(call, cst.Call):  # handed to a thread: its arguments are those of the call it is handed to
        around = next((p for p in reversed(site.parents) if isinstance(p, cst.Call)), None)
        given = arguments(around)[1].get("keep_train_buffers") if around is not None else None
        return given is not None and not _is_false(given)
    return any(not _is_false(argument.value) for argument in call.args)


def _is_false(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) and node.value == "False"


class OpenSteps:
    """Answers for one module where steps of which tenant may be open.

    Args:
        program: The module.
        same: Whether two identities may be one object.
        elsewhere: What is known of functions of other modules: which of this module's they call in an open step.
    """

    def __init__(self, program: Program, same: Same, elsewhere: Elsewhere) -> None:
        self._program = program
        self._same = same
        self._elsewhere = elsewhere
        self._entries: dict[tuple[int, Identity], str] = {}
        self._values: dict[tuple[int, Identity], Mapping[int, str]] = {}
        sites = [s for s in program.module.sites if s.receiver is not None and s.rule.api is Api.LEGACY]
        self._has_any = any(s.rule.kind is Kind.STEP or keeps_gradients(s) for s in sites) or elsewhere.has_steps

    def why_open(self, site: Site) -> str:
        """Why a step of its tenant may be open where a site stands, in words; "" if none can be."""
        if not self._has_any or site.receiver is None:
            return ""
        return self._at(site.function, site.node, site.receiver.identity)

    def handed_in_open_step(self) -> Iterator[tuple[str, str]]:
        """The imported functions that are handed a tenant in an open step of it, and by whom, in words."""
        for function in self._program.functions if self._has_any else ():
            for event in self._program.all_events(function):
                if event.doing is Doing.HANDED and any(
                    self._at(function, event.node, receiver.identity) for receiver in event.receivers()
                ):
                    yield imported_name(self._program, event), place(function)

    # -- inside a function ---------------------------------------------------------------------------------------

    def _at(self, function: Function, node: cst.CSTNode, who: Identity) -> str:
        values = self._flow(function, who)
        for index, before in values.items():
            why = before
            for event in self._program.events(function, index):
                if event.node is node:
                    if why:
                        return why
                    break
                why = self._after(event, who, why, function)
        return ""

    def _flow(self, function: Function, who: Identity) -> Mapping[int, str]:
        """By node of the function's graph, why a step may be open before it."""
        key = (id(function), who)
        if key not in self._values:

            def transfer(node: Node, before: str) -> str:
                for event in self._program.events(function, node.index):
                    before = self._after(event, who, before, function)
                return before

            graph = self._program.graph(function)
            entry = self._entry(function, who)
            self._values[key] = solve(graph, initial=entry, transfer=transfer, join=max)
        return self._values[key]

    def _after(self, event: Event, who: Identity, before: str, function: Function) -> str:
        """Why a step may be open behind an event."""
        site = event.site
        if event.doing is Doing.CALL and event.callee is not None:
            return self._behind_call(event, who, before, function)
        if site is None or site.receiver is None or not self._same(site.receiver.identity, who):
            return before
        if site.rule.kind is Kind.STEP and site.rule.api is Api.LEGACY:
            if site.rule.gate in ("begin_step", "forward_backward"):
                return HERE
            return "" if site.shape.runs_here else before
        return before

    def _behind_call(self, event: Event, who: Identity, before: str, function: Function) -> str:
        """A function of this module that begins, feeds or ends a step leaves it so."""
        assert event.callee is not None
        if event.callee is function:
            return before
        names = [name for name, receiver in event.handed.items() if self._same(receiver.identity, who)]
        known = {Identity(event.callee.name, name) for name in names} or {who}
        gates = [
            site.rule.gate
            for site in self._program.module.sites_in(event.callee)
            if site.rule.kind is Kind.STEP
            and site.rule.api is Api.LEGACY
            and site.receiver is not None
            and any(self._same(site.receiver.identity, each) for each in known)
        ]
        if not gates:
            return before
        ends = any(gate not in ("begin_step", "forward_backward") for gate in gates)
        return "" if ends else HERE

    # -- on the way in -------------------------------------------------------------------------------------------

    def _entry(self, function: Function, who: Identity) -> str:
        """Why a step may be open when a function is entered."""
        key = (id(function), who)
        if key not in self._entries:
            self._entries[key] = ""  # a function that calls itself adds nothing
            self._entries[key] = self._entry_of(function, who)
        return self._entries[key]

    def _entry_of(self, function: Function, who: Identity) -> str:
        mine = [
            site
            for site in self._program.module.sites_in(function)
            if site.receiver is not None and site.rule.api is Api.LEGACY and self._same(site.receiver.identity, who)
        ]
        gates = {site.rule.gate for site in mine if site.rule.kind is Kind.STEP}
        if "begin_step" not in gates:
            if gates:
                return HERE
            if any(keeps_gradients(site) for site in mine):
                return KEPT
        return self._from_callers(function, who)

    def _from_callers(self, function: Function, who: Identity) -> str:
        parameter = parameter_of(function, who)
        for caller in self._program.callers(function):
            there = caller.event.handed.get(parameter) if parameter is not None else None
            outer = there.identity if there is not None else who if parameter is None else None
            is_other = outer is not None and caller.function is not function
            if outer is not None and is_other and self._at(caller.function, caller.event.node, outer):
                return f"a train step may be open when {place(caller.function)} calls it"
        by = self._elsewhere.opens_step_around(function.name) if function.name else ""
        return f"a train step may be open when {by} calls it" if by else ""


KEPT = "keep_train_buffers keeps gradients here: a train step may be open"
