"""What becomes of every site of a module: the plan of one pass.

A transition goes only when everything that it served is placed by scopes, on every path, in every caller in sight. What
cannot be shown stays, with a reason. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import libcst as cst

from rl_session_migrate.codemod.blocks import Block, Statement, blocks_of
from rl_session_migrate.codemod.engines import AwakeRun, awake_runs, place_in, why_not_a_call
from rl_session_migrate.codemod.paths import Reach, Walker, place, reasons
from rl_session_migrate.codemod.program import Doing, Event, Program
from rl_session_migrate.codemod.refits import Carrier, Sequence4, find_sequences, helper_run, is_covered, tags_of
from rl_session_migrate.codemod.release import Releases
from rl_session_migrate.codemod.scoping import Run, Want, covers, is_pure, place_of, runs, wanted
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import Identity, Receiver
from rl_session_migrate.rules import Api, Kind, Tenant
from rl_session_migrate.sites import HelperSite, Shape, Site
from rl_session_migrate.tree import code, dotted, walk

__all__ = ["Plan", "decide"]

Found = Site | HelperSite
TRAINERS = (Tenant.POLICY, Tenant.VALUE)


@attrs.define(eq=False)
class Plan:
    """The edits of one pass, and what stays.

    Attributes:
        runs: Statements to wrap.
        remove: Calls that go, and what covers their effect.
        replace: Calls that become another expression.
        empty: ``if`` statements that go with all they hold.
        left: Sites that stay, and why.
        covered: Helper calls that need no edit: the helper pushes through scopes.
        assumed: What was taken for granted, in words.
    """

    runs: list[Run] = attrs.field(factory=list)
    remove: dict[Site, str] = attrs.field(factory=dict)
    replace: dict[Site, str] = attrs.field(factory=dict)
    empty: list[cst.CSTNode] = attrs.field(factory=list)
    left: dict[Found, str] = attrs.field(factory=dict)
    covered: dict[Found, str] = attrs.field(factory=dict)
    assumed: list[tuple[Site, str]] = attrs.field(factory=list)

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.runs or self.remove or self.replace or self.empty)


def decide(program: Program, carries: Carrier) -> Plan:
    """The plan of one pass over a module.

    Args:
        program: The module.
        carries: Whether a helper that is called pushes weights through a refit block by itself.
    """
    return _Decider(program, carries).plan


class _Decider:
    def __init__(self, program: Program, carries: Carrier) -> None:
        self.program = program
        self.carries = carries
        self.plan = Plan()
        self.bodies: dict[int, Block] = {}
        for function in program.functions:
            body = blocks_of(program, function)
            if body is not None:
                self.bodies[id(function)] = body
        self.groups = _Aliases(program)
        self.wants: dict[int, Want] = {}
        self.bare: dict[int, str] = {}
        """Uses that stay outside scopes, by the call's node, and why."""
        self.refits: dict[int, str] = {}
        """Helper calls that are covered ("") or not (why)."""
        self.awake: list[AwakeRun] = []
        if self._has_work():
            self._refits()
            self._uses()
            self._prepares()
            self._keep_buffers()
            self._engines()
            self._releases()
            self._wrap()

    def _has_work(self) -> bool:
        """Whether the module moves anything by hand: otherwise its computing calls are somebody else's business."""
        legacy = any(
            (site.rule.is_lifecycle or site.rule.kind is Kind.REFIT) and site.rule.api is Api.LEGACY
            for site in self._sites()
        )
        return legacy or any(True for _ in self.program.module.helpers)

    def _sites(self) -> Iterator[Site]:
        return (s for s in self.program.module.sites if s.receiver is not None and s.shape is not Shape.REMOTE)

    def _lifecycle(self, *tenants: Tenant) -> Iterator[Site]:
        taken = {*self.plan.remove, *self.plan.replace, *self.plan.left}
        for site in self._sites():
            if site.rule.is_lifecycle and site.rule.api is Api.LEGACY and site.rule.tenant in tenants and site not in taken:
                yield site

    # -- pushes of weights ---------------------------------------------------------------------------------------

    def _refits(self) -> None:
        for function in self.program.functions:
            body = self.bodies.get(id(function))
            if body is None:
                continue
            for found in find_sequences(self.program, function, body):
                if isinstance(found, Sequence4):
                    self._sequence(found)
                else:
                    self._keep_push(function, *found)
        pushes = [(f, e) for f in self.program.functions for e in self.program.all_events(f) if e.doing is Doing.REFIT]
        for function, event in sorted(pushes, key=lambda push: push[1].helper is not None):  # synchronisers first
            self._refit_call(function, event)

    def _sequence(self, found: Sequence4) -> None:
        self.plan.runs.append(found.run)
        for site in found.sites:
            self.plan.remove[site] = "refit() of the push"
        self.plan.empty += [emptied.statement.node for emptied in found.emptied]

    def _keep_push(self, function: Function, start: Site, why: str) -> None:
        """Four calls that belong together stay together."""
        for site in self._lifecycle(Tenant.POLICY, Tenant.ENGINE):
            in_push = site.method in ("offload_before_refit", "offload_after_refit") or (
                site.rule.kind is Kind.WAKE and bool(tags_of(site))
            )
            if site.function is function and in_push and site.position >= start.position:
                self.plan.left[site] = why

    def _refit_call(self, function: Function, event: Event) -> None:
        found: Found | None = event.helper or event.site
        assert found is not None
        why = ""
        if is_covered(self.program, event):
            self.plan.covered[found] = "stands in a refit block"
        elif isinstance(found, HelperSite) and self._carries(found, function):
            self.plan.covered[found] = "the helper pushes through scopes"
        else:
            body = self.bodies.get(id(function))
            run = helper_run(self.program, function, body, event) if body is not None else "it stands in a lambda"
            if self.program.is_callback(function):
                run = "it stands in a callback: who runs it, and when, is not in sight"
            if isinstance(run, Run):
                self.plan.runs.append(run)
                self.plan.covered[found] = "legacy_refit()"
            else:
                why = run
                self.plan.left[found] = why
        self.refits[id(event.node)] = why

    def _carries(self, helper: HelperSite, caller: Function) -> bool:
        """Whether the function that is called pushes through refit blocks only, once this pass is done."""
        target = self.program.module.outline.callable_named(helper.helper.name, caller=caller)
        if target is None:
            return self.carries(helper)
        mine = self.program.module.sites_in(target)
        legacy = [site for site in mine if site.rule.is_lifecycle and site.rule.api is Api.LEGACY]
        blocks = [site for site in mine if site.rule.kind is Kind.REFIT and site.rule.api is Api.SCOPED]
        inside = {id(block) for block in self.bodies[id(target)].blocks()} if id(target) in self.bodies else set()
        planned = [run for run in self.plan.runs if id(run.block) in inside]
        return bool(blocks or planned) and all(site in self.plan.remove for site in legacy)

    # -- uses ----------------------------------------------------------------------------------------------------

    def _uses(self) -> None:
        """Which computing calls can go into a scope, and which cannot."""
        for site in self._sites():
            want = wanted(site)
            if want is None or site.rule.kind is Kind.STEP:
                continue
            if self._is_covered(site):
                continue
            if site.rule.kind is Kind.TRANSFER or site.method == "prepare_refit_info":
                continue  # decided with the transition that serves it
            why = self._why_bare(site)
            if why:
                self.bare[id(site.node)] = why
            else:
                self.wants[id(site.node)] = want

    def _is_async(self, site: Site) -> bool:
        """Whether the lifecycle methods of a tenant are coroutines, which a scope would never await."""
        assert site.receiver is not None
        who = site.receiver.identity
        return any(
            other.shape is Shape.AWAITED
            and other.rule.is_lifecycle
            and other.receiver is not None
            and self.groups.same(other.receiver.identity, who)
            for other in self._sites()
        )

    def _why_bare(self, site: Site) -> str:
        if self._is_async(site):
            return _COROUTINES
        if self._in_open_step(site):
            return "a train step stays open here between calls"
        if self.program.is_callback(site.function):
            return "it stands in a callback: who runs it, and when, is not in sight"
        body = self.bodies.get(id(site.function))
        if body is None:
            return "it stands in a lambda"
        where = place_of(self.program, body, site)
        return where if isinstance(where, str) else ""

    def _in_open_step(self, site: Site) -> bool:
        assert site.receiver is not None
        who = site.receiver.identity
        return any(
            other.rule.kind is Kind.STEP
            and other.rule.api is Api.LEGACY
            and other.function is site.function
            and other.receiver is not None
            and self.groups.same(other.receiver.identity, who)
            for other in self._sites()
        )

    def _is_covered(self, site: Site) -> bool:
        assert site.receiver is not None
        tenant = site.receiver.tenant
        return covers(self.program, site.withs, site.receiver.identity, lambda receiver: receiver.tenant is tenant)

    def _judge(self, event: Event) -> str:
        """Why a use is not placed by a scope; "" if it is."""
        key = id(event.node)
        if event.doing is Doing.REFIT:
            return self.refits.get(key, "") and "the push of weights that follows is in no refit block"
        site = event.site
        assert site is not None
        if key in self.wants or self._is_covered(site):
            return ""
        if site.rule.kind is Kind.STEP:
            return f"{site.method} in {place(site.function)} works on a train step that stays open between calls"
        if site.rule.kind is Kind.TRANSFER or site.method == "prepare_refit_info":
            return self._judge_transfer(site)
        why = self.bare.get(key, "it is not in a scope")
        return f"{site.method} in {place(site.function)} cannot go into a scope: {why}"

    def _judge_transfer(self, site: Site) -> str:
        """Reading the weights is placed by a refit scope, which is written when a transition depends on it."""
        body = self.bodies.get(id(site.function))
        if any(site in found.inside for found in self._sequences_of(site)):
            return ""
        if site.rule.kind is Kind.TRANSFER:
            return f"{site.method} in {place(site.function)} returns futures that may outlive any run of statements"
        where = place_of(self.program, body, site) if body is not None else "it stands in a lambda"
        want = wanted(site)
        if isinstance(where, str) or want is None:
            return f"{site.method} in {place(site.function)} cannot go into a scope: {where}"
        self.wants[id(site.node)] = want
        return ""

    def _sequences_of(self, site: Site) -> Iterator[_Inside]:
        del site
        for run in self.plan.runs:
            inside = [e.site for s in run.block.statements[run.first : run.last + 1] for e in s.events()]
            yield _Inside(tuple(found for found in inside if found is not None))

    # -- prepares ------------------------------------------------------------------------------------------------

    def _prepares(self) -> None:
        """Which ``prepare_*`` calls go: a fixpoint, since what one keeps bare another may rely on."""
        sites = [site for site in self._lifecycle(*TRAINERS) if site.rule.kind is Kind.PREPARE]
        walker = Walker(self.program, self.groups.same, self._judge, self._hands)
        kept: dict[Site, str] = {}
        while True:
            reached = {site: walker.after(site.function, site) for site in sites if site not in kept}
            new = {site: why for site, reach in reached.items() if (why := self._why_kept(site, reach))}
            if not new:
                break
            kept.update(new)
            self._taint(walker, list(new))
        for site in sites:
            if site in kept:
                self.plan.left[site] = kept[site]
            else:
                self._remove_prepare(site, reached[site])

    def _why_kept(self, site: Site, reach: Reach) -> str:
        if self._is_async(site):
            return _COROUTINES
        if self._in_open_step(site):
            return "a train step stays open here between calls"
        if site.shape is not Shape.CALL:
            return _SHAPES.get(site.shape, "it is not simply called")
        if self.program.is_callback(site.function):
            return "it stands in a callback: who runs it, and when, is not in sight"
        if not site.is_statement or site.is_conditional:
            return "its statement does more than call it"
        if self._is_guarded(site, reach):
            return "a handler around it deals with its failure"
        if reach.failures:
            return reasons(reach.failures)
        if not reach.uses and reach.leaves:
            return "nothing in sight uses what it prepares"
        return ""

    @staticmethod
    def _is_guarded(site: Site, reach: Reach) -> bool:
        """Whether a ``try`` catches the failure of a transition, and what would fail in its place stands outside."""
        for parent, below in zip(site.parents, site.parents[1:], strict=False):
            if isinstance(parent, (cst.Try, cst.TryStar)) and below is parent.body and parent.handlers:
                inside = {id(node) for node in walk(parent.body)}
                if not any(node in inside for node in reach.uses):
                    return True
        return False

    def _remove_prepare(self, site: Site, reach: Reach) -> None:
        self.plan.remove[site] = _covering(reach) or "nothing uses what it prepares before the next transition"
        for function in {id(f): f for f in reach.leaves}.values():
            name = function.name or "the module"
            self.plan.assumed.append((site, f"what calls {name} uses {site.receiver} in scopes only"))

    def _taint(self, walker: Walker, kept: list[Site]) -> None:
        """What runs between a transition that stays and a bare use that relies on it stays bare too."""
        for site in kept:
            if site.shape not in (Shape.CALL, Shape.TO_THREAD, Shape.AWAITED):
                continue
            for event in walker.after(site.function, site).uses.values():
                if event.doing is not Doing.USE or id(event.node) not in self.wants or event.site is None:
                    continue
                later = walker.after(event.site.function, event.site)
                if any(failure.event.doing is Doing.USE for failure in later.failures):
                    self.wants.pop(id(event.node))
                    self.bare[id(event.node)] = (
                        f"it runs between {site.method}, which stays, and a call that relies on that"
                    )

    def _keep_buffers(self) -> None:
        """Inference that only ever ran on what ``prepare_for_training`` placed keeps gradients and optimizer where they are.

        The legacy call did not move them, and with ``offload_optimizer_for_logprob`` a plain ``logprob_mode()`` would.
        """
        walker = Walker(self.program, self.groups.same, self._judge, self._hands)
        reached: dict[int, set[str]] = {}
        for site in self._sites():
            if site.rule.kind in (Kind.PREPARE, Kind.OFFLOAD) and site.rule.tenant is Tenant.POLICY and site.shape.runs_here:
                for node in walker.after(site.function, site).uses:
                    reached.setdefault(node, set()).add(site.method)
        for function in self.program.functions:
            for event in self.program.all_events(function):
                for receiver in event.receivers() if event.doing is Doing.REFIT else ():
                    if receiver.tenant is Tenant.POLICY:
                        for node in walker.behind(function, event.node, receiver).uses:
                            reached.setdefault(node, set()).add("a push")
        for node, want in self.wants.items():
            if want.scope == "logprob_mode" and reached.get(node) == {"prepare_for_training"}:
                self.wants[node] = attrs.evolve(want, arguments="keep_train_buffers=True")

    def _hands(self, event: Event) -> str:
        name = code(event.node.func) if isinstance(event.node, cst.Call) else "a function"
        return f"what it prepares is handed to {name}(), which is not in sight"

    # -- engines -------------------------------------------------------------------------------------------------

    def _engines(self) -> None:
        for body in self.bodies.values():
            found_runs = [found for found in awake_runs(body) if found.sleep not in self.plan.left]
            self.awake += [found for found in found_runs if not self._is_async(found.sleep)]
        outside = "it is used outside a scope"
        walker = Walker(
            self.program,
            self.groups.same,
            self._judge_engine,
            lambda event: outside,
        )
        for found in self.awake:
            self.plan.runs.append(found.run)
            self.plan.remove[found.sleep] = "the end of awake()"
        for site in list(self._lifecycle(Tenant.ENGINE)):
            why = _COROUTINES if self._is_async(site) else why_not_a_call(site)
            if not why and self.program.is_callback(site.function):
                why = "it stands in a callback: who runs it, and when, is not in sight"
            if why:
                self.plan.left[site] = _SHAPES.get(site.shape, why)
            elif site.rule.kind is Kind.SLEEP:
                self.plan.replace[site] = f"scopes({site.receiver}).sleep()"
            elif tags_of(site) is None and self._wake_is_made(walker, site):
                self.plan.remove[site] = "awake()"
            else:
                self.plan.replace[site] = f"scopes({site.receiver}).wake({_arguments(site)})"

    def _judge_engine(self, event: Event) -> str:
        site = event.site
        return "" if site is not None and self._is_covered(site) else "it is used outside a scope"

    def _wake_is_made(self, walker: Walker, site: Site) -> bool:
        """Whether every use up to the next wake, sleep or push stands in a scope that wakes the engine by itself."""
        inside = {node for found in self.awake for node in found.uses}
        reach = walker.after(site.function, site, inside=inside)
        if self._is_guarded(site, reach):
            return False
        return bool(reach.uses) and not (reach.failures or reach.leaves or reach.is_idle)

    # -- releases ------------------------------------------------------------------------------------------------

    def _releases(self) -> None:
        releases = Releases(self.program, self.plan.remove, self._is_placed)
        for site in list(self._lifecycle(*TRAINERS)):
            assert site.receiver is not None
            if site.rule.kind is Kind.NOOP:
                self._noop(site)
                continue
            why = self._why_not_offload(site)
            if why:
                self.plan.left[site] = why
            elif self._is_registered(site) and releases.is_made_by_scopes(site):
                self.plan.remove[site] = _ROOM
            else:
                self.plan.replace[site] = f"scopes({site.receiver}).offload()"
        self._keep_blocks_filled()

    def _keep_blocks_filled(self) -> None:
        """A release that is all there is in a block stays as a call, which is free where nothing is in."""
        gone = {id(site.node) for site in self.plan.remove}
        for site, why in list(self.plan.remove.items()):
            if site.rule.kind is Kind.OFFLOAD and why == _ROOM:
                block = self._block_of(site)
                if block is not None and all(_is_only(statement, gone) for statement in block.statements):
                    del self.plan.remove[site]
                    self.plan.replace[site] = f"scopes({site.receiver}).offload()"

    def _block_of(self, site: Site) -> Block | None:
        body = self.bodies.get(id(site.function))
        where = place_in(body, site.node) if body is not None else None
        return where.block if where is not None else None

    def _noop(self, site: Site) -> None:
        if site.shape is Shape.CALL and site.is_statement:
            self.plan.remove[site] = "it does nothing"
        else:
            self.plan.left[site] = _SHAPES.get(site.shape, "its statement does more than call it")

    def _why_not_offload(self, site: Site) -> str:
        assert site.receiver is not None
        if self._is_async(site):
            return _COROUTINES
        if self._in_open_step(site):
            return "a train step stays open here between calls"
        if site.shape is not Shape.CALL:
            return _SHAPES.get(site.shape, "it is not simply called")
        if self.program.is_callback(site.function):
            return "it stands in a callback: who runs it, and when, is not in sight"
        if not site.is_statement:
            return "its statement does more than call it"
        if not is_pure(site.receiver):
            return f"{site.receiver} is no name that can be written a second time"
        return ""

    def _is_registered(self, site: Site) -> bool:
        """Whether the line that says who shares the device will name a tenant: the function has a scope of it."""
        assert site.receiver is not None
        if not is_registrable(site.function, site.receiver):
            return False
        path = site.receiver.identity.path
        scoped = {str(s.receiver) for s in self.program.module.sites_in(site.function) if s.receiver and s.receiver.is_scopes}
        wanted_here = {
            str(s.receiver) for s in self.program.module.sites_in(site.function) if s.receiver and id(s.node) in self.wants
        }
        return path in scoped | wanted_here

    def _is_placed(self, event: Event) -> bool:
        """Whether a use of the device is a scope of ours, of a tenant that shares it."""
        if not all(is_registrable(event_function(event), receiver) for receiver in event.receivers() if event.site is not None):
            return False
        if event.doing is Doing.REFIT:
            return not self.refits.get(id(event.node), "")
        if event.doing is Doing.ENTER:
            return True
        if any(id(event.node) in found.uses for found in self.awake):
            return True
        if event.doing is not Doing.USE or event.site is None:
            return False
        return id(event.node) in self.wants or self._is_covered(event.site)

    # -- scopes --------------------------------------------------------------------------------------------------

    def _wrap(self) -> None:
        for function in self.program.functions:
            body = self.bodies.get(id(function))
            if body is None:
                continue
            mine = {
                id(site.node): self.wants[id(site.node)]
                for site in self.program.module.sites_in(function)
                if id(site.node) in self.wants
            }
            self.plan.runs += list(runs(self.program, body, mine))


def is_registrable(function: Function, receiver: Receiver) -> bool:
    """Whether a function can name a tenant from its first line on: a parameter, an attribute of self, an outer name."""
    if not receiver.is_single or dotted(receiver.node) is None:
        return False
    root = (dotted(receiver.node) or "").partition(".")[0]
    parameters = {parameter.name for parameter in function.parameters}
    return root in parameters or root == function.this or not function.bindings.get(root)


def event_function(event: Event) -> Function:
    """The function that an event of a site stands in."""
    assert event.site is not None
    return event.site.function


@attrs.frozen(eq=False)
class _Inside:
    inside: tuple[Site, ...]


class _Aliases:
    """Which identities may be one object: what a name was bound to, at some point."""

    def __init__(self, program: Program) -> None:
        self._parent: dict[Identity, Identity] = {}
        for function in program.functions:
            for event in program.all_events(function):
                for receiver in event.receivers():
                    for other in receiver.may_be:
                        self._parent[self._root(other)] = self._root(receiver.identity)

    def _root(self, identity: Identity) -> Identity:
        while identity in self._parent and self._parent[identity] != identity:
            identity = self._parent[identity]
        return identity

    def same(self, one: Identity, other: Identity) -> bool:
        """Whether two identities may be one object."""
        return one == other or self._root(one) == self._root(other)


_COROUTINES = "its lifecycle methods are awaited, and a scope calls them without awaiting"
_ROOM = "the scope that comes next makes room"


def _is_only(statement: Statement, gone: set[int]) -> bool:
    """Whether nothing is left of a statement."""
    return statement.is_simple and len(statement.head) == 1 and id(statement.head[0].node) in gone


_SHAPES = {
    Shape.AWAITED: "it is awaited",
    Shape.TO_THREAD: "the method is passed as a value and runs in a thread",
    Shape.SUBMITTED: "the method is passed as a value and runs in another thread or task",
    Shape.VALUE: "the method is passed as a value: who calls it, and when, is not in sight",
    Shape.STRING: "the method is named in a string",
}


def _covering(reach: Reach) -> str:
    names: list[str] = []
    for event in reach.uses.values():
        want = wanted(event.site) if event.site is not None else None
        names.append(f"{want.scope}()" if want is not None else "refit()" if event.doing is Doing.REFIT else "")
    return ", ".join(dict.fromkeys(name for name in names if name))


def _arguments(site: Site) -> str:
    assert isinstance(site.node, cst.Call)
    return ", ".join(code(arg) for arg in site.node.args)

