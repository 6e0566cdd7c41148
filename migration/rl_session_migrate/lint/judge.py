"""What each event means on each path: which checks it asks for, and how the state of a tenant changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import attrs
import libcst as cst

from rl_session.lifecycle import Mode
from rl_session_migrate.lint.checks import Checks
from rl_session_migrate.lint.interpret import Interpreter
from rl_session_migrate.lint.phrases import cause, is_evaluation, rests_on_host, woken_tags
from rl_session_migrate.lint.plan import Handed, Named, Used, assigned_name
from rl_session_migrate.lint.state import At, OpenScope, Path, State, Step, at_mode, at_woken
from rl_session_migrate.lint.verdicts import Verdicts
from rl_session_migrate.receivers import Identity, Receiver
from rl_session_migrate.rules import Api, Kind, Tenant
from rl_session_migrate.sites import HelperSite, Module, Site
from rl_session_migrate.tree import arguments, callee, code, is_string

__all__ = ["PathJudge"]

_ROLLS_OUT = re.compile(r".*(?:rollout|generate).*")


class PathJudge:
    """Judges the events of one module and collects what is wrong.

    Args:
        module: The module.
        interpreter: Who asks.
    """

    def __init__(self, module: Module, interpreter: Interpreter) -> None:
        self.interpreter = interpreter
        self.verdicts = Verdicts(module, interpreter)
        self.checks = Checks(module, interpreter, self.verdicts)
        # Only who is parked somewhere can be parked under a checkpoint.
        self._parked = frozenset(
            site.receiver.identity
            for site in module.sites
            if site.method in ("finish_inference", "prepare_for_lp_inference") and site.receiver is not None
        )

    # -- what is asked -------------------------------------------------------------------------------------------

    def site(self, path: Path, site: Site) -> list[Path]:
        """A method of a tenant is called, or handed on."""
        receiver = site.receiver
        if receiver is None or site.must_fail:
            return [path]
        self.verdicts.saw(path, site.node)
        path = path.step(Step(site.node))
        if not receiver.is_single:
            return [self._stir(path, receiver.identity)]
        if not site.shape.runs_here:
            if site.method == "finalize_async_save":  # handed to who waits for the checkpoint
                return [path.put(receiver.identity, attrs.evolve(path.of(receiver.identity), saving=None))]
            moves = site.rule.is_lifecycle and site.rule.kind is not Kind.NOOP
            return [self._lose(path, receiver.identity) if moves else path]
        state = path.of(receiver.identity)
        if state.is_alias:  # on this path the name is another tenant's, and says nothing of its own
            return [path]
        turn = self._turns.get(site.rule.kind)
        return [turn(self, path, site, receiver, state) if turn is not None else path]

    def helper(self, path: Path, site: HelperSite) -> list[Path]:
        """``refit_policy_generation(policy, policy_generation, colocated)``."""
        self.verdicts.saw(path, site.node)
        path = path.step(Step(site.node))
        policy, engine = site.tenant(Tenant.POLICY), site.tenant(Tenant.ENGINE)
        if policy is not None and policy.is_single:
            path = self._refit_check(path, site, policy)
        if engine is not None and not path.of(engine.identity).is_alias:
            awake = State(at=At.AWAKE, by=site, scopes=path.of(engine.identity).scopes)
            path = self._stir(path.put(engine.identity, awake), engine.identity)
        if policy is None or not policy.is_single:
            return [path]
        return list(self._after_refit(path, site, policy))

    def handed(self, path: Path, event: Handed) -> list[Path]:
        """Something unknown is handed tenants: it may do anything, unless its name says that it only looks or samples."""
        self.verdicts.saw(path, event.node)
        for receiver in event.receivers:
            state = path.of(receiver.identity)
            if state.is_alias:
                continue
            if receiver.tenant is Tenant.ENGINE and _ROLLS_OUT.fullmatch(event.name):
                self.checks.awake(path, event.node, receiver, state, f"{event.name}() is handed {receiver}")
                path = path.put(receiver.identity, attrs.evolve(state, is_used=True))
            else:
                path = self._lose(path, receiver.identity)
            path = self._stir(path, receiver.identity)
        return [path]

    def yielded(self, path: Path) -> Path:
        """Whoever resumes may have done anything; open scopes stay open."""
        for identity, state in path.tenants:
            if not state.scopes:
                path = path.put(identity, State())
        return path

    def used(self, path: Path, event: Used) -> Path:
        """A method that no rule knows is called on a tenant: whoever brought it in did not do so for nothing."""
        identity = event.receiver.identity
        return self._stir(path.put(identity, attrs.evolve(path.of(identity), is_used=True)), identity)

    def named(self, path: Path, event: Named) -> Path:
        """A name that holds futures is read: they are waited for, or somebody else's to wait for."""
        for identity, state in path.tenants:
            if any(pending == event.name for pending, _ in state.pending):
                kept = tuple(item for item in state.pending if item[0] != event.name)
                side = state.side
                if side is not None and event.waits:
                    self.verdicts.saw(path, event.node)
                    wait = f"{event.waits}({event.name})"
                    side = attrs.evolve(side, is_awaited=True, node=event.node, wait=wait, path=path)
                path = path.put(identity, attrs.evolve(state, pending=kept, side=side))
        return path

    def entered(self, path: Path, site: Site) -> Path:
        """A scope is entered."""
        receiver, mode = site.receiver, site.rule.mode
        if receiver is None or site.must_fail:
            return path
        state = path.of(receiver.identity)
        if mode is None:  # with policy.begin_step()
            return path
        self.verdicts.saw(path, site.node)
        self.checks.nesting(path, site, receiver, state)
        self.checks.sharing(path, site, receiver)
        scope = OpenScope(mode, site.position.line, site.method, state.at, state.by)
        at = at_woken(state.at, woken_tags(site)) if receiver.tenant is Tenant.ENGINE else at_mode(mode)
        inside = attrs.evolve(state, at=at, by=site, is_used=True, is_idle=False, scopes=(*state.scopes, scope))
        return self._stir(path.put(receiver.identity, inside), receiver.identity)

    def left(self, path: Path, site: Site, node: cst.CSTNode) -> Path:
        """A scope is left: the outer mode is back; outside all of them a policy that rests on the host is away."""
        receiver = site.receiver
        if receiver is None:
            return path
        state = path.of(receiver.identity)
        if site.rule.mode is None:
            return path.put(receiver.identity, attrs.evolve(state, step=None))
        if not state.scopes or site.must_fail:
            return path
        for name, line in state.pending:
            what = f"{name} (started on line {line}) is not waited for when {site.method}() of line {site.position.line} ends"
            self.verdicts.say("RLM013", site.node, path, what, f"wait for {name} inside the scope")
        scope = state.scopes[-1]
        outer, by = scope.outer, scope.outer_by
        # A legacy or a foreign object is where nobody says after the last scope; ours is where it rested before.
        if len(state.scopes) == 1 and (receiver.api is not Api.SCOPED or receiver.is_scopes or outer is At.UNKNOWN):
            outer, by = At.RESTING if rests_on_host(receiver) else At.UNKNOWN, site
        elif len(state.scopes) > 1 or outer is At.RESTING:
            by = site
        after = attrs.evolve(state, at=outer, by=by, scopes=state.scopes[:-1], pending=())
        return path.put(receiver.identity, after)

    # -- lifecycle -----------------------------------------------------------------------------------------------

    def _move(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """A prepare or an offload."""
        if self.checks.manual(path, site, receiver, state):
            return path
        self.checks.gradients(path, site, receiver, state)
        self.checks.saving(path, site, receiver, state)
        kept_step = state.step if not self.checks.loses_gradients(site, state) else None
        if site.rule.kind is Kind.OFFLOAD:
            self.checks.pending(path, site, receiver, state)
        else:
            self.checks.room(path, site, receiver)
        at = self._at_after(site, state)
        left = at.is_away and not state.at.is_away
        after = State(
            at=at,
            by=state.by if at is state.at and at.is_away else site,
            is_used=state.is_used and not left and site.rule.kind is Kind.OFFLOAD and at is not At.OFF,
            is_idle=left or (state.is_idle and at.is_away),
            step=kept_step,
            ended=state.ended,
            is_eval=state.is_eval and site.method != "prepare_for_training",
            saving=state.saving if site.method in ("finish_inference", "prepare_for_lp_inference") else None,
        )
        return self._stir(path.put(receiver.identity, after), receiver.identity)

    @staticmethod
    def _at_after(site: Site, state: State) -> At:
        if site.method == "finish_inference":
            return state.at if state.at.is_away else At.PARKED
        if site.method == "offload_before_refit":  # the parameters stay where they are
            return state.at if state.at.is_away else At.REFIT
        return at_mode(site.rule.mode) if site.rule.mode is not None else state.at

    def _engine(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """A wake or a sleep."""
        if self.checks.manual(path, site, receiver, state):
            return path
        is_wake = site.rule.kind is Kind.WAKE
        if is_wake:
            self.checks.room(path, site, receiver)
        _, keywords, _ = arguments(site.node) if isinstance(site.node, cst.Call) else ((), {}, False)
        stays = not is_wake and "release_gpu" in keywords and code(keywords["release_gpu"]) != "True"
        at = At.UNKNOWN if stays else at_woken(state.at, woken_tags(site)) if is_wake else At.ASLEEP
        return self._stir(path.put(receiver.identity, State(at=at, by=site)), receiver.identity)

    def _switch(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """``switch(mode)`` and ``offload()`` of this library."""
        if receiver.api is not Api.SCOPED or self.checks.manual(path, site, receiver, state):
            return path
        self.checks.pending(path, site, receiver, state)
        at = at_mode(site.rule.mode) if site.rule.mode is not None else _switched_to(site)
        if receiver.tenant is Tenant.ENGINE:
            at = At.ASLEEP if at is At.OFF else at_woken(state.at, woken_tags(site))
        after = State(at=at, by=site, step=state.step)
        return self._stir(path.put(receiver.identity, after), receiver.identity)

    def _entered_by_stack(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """``stack.enter_context(policy.training_mode())`` opens a scope that ends out of sight."""
        above = next((p for p in reversed(site.parents) if isinstance(p, cst.Call)), None)
        if (
            site.rule.kind is Kind.SCOPE
            and above is not None
            and callee(above)
            in (
                "enter_context",
                "enter_async_context",
            )
        ):
            return self._lose(path, receiver.identity)
        return path

    # -- use -----------------------------------------------------------------------------------------------------

    def _compute(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """A call that runs the model, or works on an open step."""
        if receiver.tenant is Tenant.ENGINE:
            self.checks.awake(path, site.node, receiver, state, f"{receiver}.{site.method}()")
            return self._stir(path.put(receiver.identity, attrs.evolve(state, is_used=True)), receiver.identity)
        bad = self.checks.compute(path, site, receiver, state)
        self.checks.train_in_step(path, site, receiver, state)
        self.checks.parts(path, site, receiver)
        after = state
        if bad:  # the path ends there in truth: what follows would only repeat it
            after = attrs.evolve(state, at=At.UNKNOWN, by=None)
        if site.rule.kind is Kind.STEP and not (bad and site.rule.gate == "begin_step"):
            after = self._step(path, site, receiver, after)
        is_eval = site.rule.evaluates is True or is_evaluation(site)
        after = attrs.evolve(after, is_used=True, is_eval=is_eval if after.step is not None else False)
        if site.rule.kind is Kind.STEP and not is_eval:
            after = attrs.evolve(after, is_eval=state.is_eval and site.rule.gate == "forward_backward")
        return self._stir(path.put(receiver.identity, after), receiver.identity)

    def _step(self, path: Path, site: Site, receiver: Receiver, state: State) -> State:
        """Opens, feeds or ends a step."""
        name = f"{receiver}.{site.method}()"
        match site.rule.gate:
            case "begin_step":
                # Asked for under a condition, it may be the condition that keeps it from happening twice.
                if state.step is not None and not site.conditions and not site.is_conditional:
                    what = f"{name}: the step of line {state.step.position.line} is still open"
                    self.verdicts.say("RLM009", site.node, path, what, "finish or abort the open step first")
                return attrs.evolve(state, step=site, ended=None)
            case "forward_backward":
                self.checks.step_is_over(path, site, receiver, state)
                if state.step is not None and state.is_eval and site.rule.api is Api.LEGACY:
                    what = f"{name} after an inference call in the same step, with no prepare_for_training() in between"
                    self.verdicts.say(
                        "RLM008", site.node, path, what, f"{receiver}.prepare_for_training() before {name}"
                    )
            case "commit":
                self.checks.step_is_over(path, site, receiver, state)
                return attrs.evolve(state, step=None, ended=site)
            case "":
                return attrs.evolve(state, step=None, ended=site)
        return state

    def _state(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """Checkpoints and metadata."""
        after = attrs.evolve(state, is_used=True)
        if site.method == "save_checkpoint" and site.rule.api is Api.LEGACY and receiver.api is not Api.SCOPED:
            if state.at.is_away and not state.scopes:
                self.verdicts.say(
                    "RLM014",
                    site.node,
                    path,
                    f"{receiver}.save_checkpoint() after {cause(state)} sent the parameters away",
                    f"{receiver}.prepare_for_training() before it, or: with scopes({receiver}).training_mode():",
                )
            after = attrs.evolve(after, saving=site if receiver.identity in self._parked else None)
        if site.method == "finalize_async_save":
            after = attrs.evolve(after, saving=None)
        if site.rule.gate and state.scopes:
            self.checks.mode(path, site, receiver, state)
        return self._stir(path.put(receiver.identity, after), receiver.identity)

    # -- transfers -----------------------------------------------------------------------------------------------

    def _transfer(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """One side of a weight transfer."""
        if receiver.tenant is Tenant.POLICY:
            if state.scopes:
                self.checks.mode(path, site, receiver, state)
            elif state.at.is_away:
                self.checks.refit_away(path, site, receiver, state, f"{receiver}.{site.method}()")
                state = attrs.evolve(state, at=At.UNKNOWN, by=None)
        path, side = self.checks.started(path, site, receiver)
        name = assigned_name(site)
        pending = (*state.pending, (name, site.position.line)) if name is not None else state.pending
        after = attrs.evolve(state, is_used=True, pending=pending, side=side)
        return self._stir(path.put(receiver.identity, after), receiver.identity)

    def _synchronise(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """A synchroniser moves whatever it holds; ``policy.refit(engine)`` of this library puts everything back."""
        if receiver.tenant is Tenant.POLICY:
            return path
        for identity, other in path.tenants:
            if not other.scopes:
                path = self._lose(path, identity)
        return path

    def _refit_check(self, path: Path, site: HelperSite, policy: Receiver) -> Path:
        state = path.of(policy.identity)
        name = f"{site.helper.name}({policy}, ...)"
        if state.scopes:
            scope = state.scopes[-1]
            what = f"{name} moves {policy} inside {scope.method}() of line {scope.line}"
            self.verdicts.say(
                "RLM104", site.node, path, what, f"scopes({policy}).refit(engine, transfer) outside the scope"
            )
        elif state.at.is_away and not (isinstance(state.by, Site) and state.by.rule.api is Api.SCOPED):
            self.checks.refit_away(path, site, policy, state, name)
            return path.put(policy.identity, State())
        elif state.step is not None:
            what = f"{name} offloads {policy} while the step of line {state.step.position.line} is open"
            self.verdicts.say("RLM004", site.node, path, what, "finish or abort the step first")
        return path

    def _after_refit(self, path: Path, site: HelperSite, policy: Receiver) -> Iterator[Path]:
        """A colocated refit leaves the policy on the host, another one where it was: two paths if that is open."""
        state = path.of(policy.identity)
        if state.scopes:
            yield path
            return
        positional, keywords, _ = arguments(site.node)
        asked = positional[2] if len(positional) > 2 else keywords.get("colocated_inference")
        gone = State(at=At.OFF, by=site)
        used = attrs.evolve(state, is_used=True)
        is_open = asked is not None and code(asked) not in ("True", "False") and not self.checks.asks(site.function)
        if asked is None or is_open or self.checks.serves_itself(site.function):
            yield path.put(policy.identity, State(is_used=True))
            return
        tests = self.interpreter.tests(site.function)
        for outcome, after in ((True, gone), (False, used)):
            facts = tests.assume(path.facts, asked, outcome)
            if facts is not None:
                yield attrs.evolve(path.put(policy.identity, after), facts=facts)

    @staticmethod
    def _lose(path: Path, identity: Identity) -> Path:
        """Nothing is known of a tenant any more, except its open scopes."""
        state = path.of(identity)
        return path.put(identity, State(scopes=state.scopes, at=state.at if state.scopes else At.UNKNOWN, is_used=True))

    @staticmethod
    def _stir(path: Path, mover: Identity) -> Path:
        """A tenant did something: whoever left before did not leave for nothing."""
        for identity, state in path.tenants:
            if identity != mover and state.is_idle:
                path = path.put(identity, attrs.evolve(state, is_idle=False))
        return path

    _turns: ClassVar[Mapping[Kind, Callable[[PathJudge, Path, Site, Receiver, State], Path]]] = {
        Kind.PREPARE: _move,
        Kind.OFFLOAD: _move,
        Kind.WAKE: _engine,
        Kind.SLEEP: _engine,
        Kind.COMPUTE: _compute,
        Kind.STEP: _compute,
        Kind.TRANSFER: _transfer,
        Kind.STATE: _state,
        Kind.SWITCH: _switch,
        Kind.REFIT: _synchronise,
        Kind.SCOPE: _entered_by_stack,
    }


def _switched_to(site: Site) -> At:
    """Where ``switch(Mode.LOGPROB)`` or ``switch("logprob")`` puts a policy."""
    positional, keywords, _ = arguments(site.node) if isinstance(site.node, cst.Call) else ((), {}, False)
    mode = positional[0] if positional else keywords.get("mode")
    said = "" if mode is None else (is_string(mode) or code(mode).rpartition(".")[2]).lower()
    modes = {mode.value: mode for mode in Mode if mode is not Mode.RESIDENT}
    return at_mode(modes[said]) if said in modes else At.SWITCHED
