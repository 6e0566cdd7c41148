"""What each event means on each path: the checks that depend on order, and how the state of a tenant changes.

The tables say what methods do (:mod:`rl_session_migrate.rules`) and what modes allow (:mod:`rl_session.lifecycle`); here they
meet the paths of one program. Verdicts are kept with their paths, so that a finding can say on which path it holds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import attrs
import libcst as cst

from rl_session.lifecycle import may_call, may_nest, scope_to_write
from rl_session_migrate.lint.codes import CODES
from rl_session_migrate.lint.findings import Finding
from rl_session_migrate.lint.interpret import Handed, Interpreter, assigned_name
from rl_session_migrate.lint.state import At, OpenScope, Path, State, Step, at_mode
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import Identity, Receiver
from rl_session_migrate.rules import Api, Kind, Rule, Tenant
from rl_session_migrate.sites import HelperSite, Module, Shape, Site
from rl_session_migrate.tree import arguments, callee, code, walk

__all__ = ["PathJudge"]

_ROLLS_OUT = re.compile(r".*(?:rollout|generate).*")
_WAITS = frozenset({"get", "wait", "result", "gather", "run"})


@attrs.frozen
class _Verdict:
    """One mistake on one path."""

    code: str
    node: cst.CSTNode
    path: Path
    what: str
    write: str
    caller: int
    why: str = ""
    since: Site | HelperSite | None = None


class PathJudge:
    """Judges the events of one module and collects what is wrong.

    Args:
        module: The module.
        interpreter: Who asks.
    """

    def __init__(self, module: Module, interpreter: Interpreter) -> None:
        self.module = module
        self.interpreter = interpreter
        self.verdicts: list[_Verdict] = []
        self.seen: dict[cst.CSTNode, set[Path]] = defaultdict(set)
        self._shared = frozenset(_shared(module))

    # -- what is asked -------------------------------------------------------------------------------------------

    def site(self, path: Path, site: Site) -> list[Path]:
        """A method of a tenant is called, or handed on."""
        receiver = site.receiver
        if receiver is None:
            return [path]
        self._saw(path, site.node)
        path = path.step(Step(site.node))
        if not receiver.is_single:
            return [self._stir(path, receiver.identity)]
        if not site.shape.runs_here:
            moves = site.rule.is_lifecycle and site.rule.kind is not Kind.NOOP
            return [self._lose(path, receiver.identity) if moves else path]
        state = path.of(receiver.identity)
        if state.is_alias:  # on this path the name is another tenant's, and says nothing of its own
            return [path]
        match site.rule.kind:
            case Kind.PREPARE | Kind.OFFLOAD:
                return [self._move(path, site, receiver, state)]
            case Kind.WAKE | Kind.SLEEP:
                return [self._engine(path, site, receiver, state)]
            case Kind.COMPUTE | Kind.STEP:
                return [self._compute(path, site, receiver, state)]
            case Kind.TRANSFER:
                return [self._transfer(path, site, receiver, state)]
            case Kind.STATE:
                return [self._state(path, site, receiver, state)]
            case Kind.SWITCH:
                return [self._switch(path, site, receiver, state)]
            case Kind.REFIT:
                return [self._synchronise(path, site, receiver)]
        return [self._entered_by_stack(path, site, receiver)]

    def helper(self, path: Path, site: HelperSite) -> list[Path]:
        """``refit_policy_generation(policy, policy_generation, colocated)``."""
        self._saw(path, site.node)
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
        self._saw(path, event.node)
        for receiver in event.receivers:
            state = path.of(receiver.identity)
            if state.is_alias:
                continue
            if receiver.tenant is Tenant.ENGINE and _ROLLS_OUT.fullmatch(event.name):
                self._check_awake(path, event.node, receiver, state, f"{event.name}() is handed {receiver}")
                path = path.put(receiver.identity, attrs.evolve(state, is_used=True))
            elif not state.scopes:
                path = self._lose(path, receiver.identity)
            path = self._stir(path, receiver.identity)
        return [path]

    def yielded(self, path: Path) -> Path:
        """Whoever resumes may have done anything; open scopes stay open."""
        for identity, state in path.tenants:
            if not state.scopes:
                path = path.put(identity, State())
        return path

    def named(self, path: Path, name: str) -> Path:
        """A name that holds futures is read: they are waited for, or somebody else's to wait for."""
        for identity, state in path.tenants:
            if any(pending == name for pending, _ in state.pending):
                kept = tuple(item for item in state.pending if item[0] != name)
                path = path.put(identity, attrs.evolve(state, pending=kept))
        return path

    def entered(self, path: Path, site: Site) -> Path:
        """A scope is entered."""
        receiver, mode = site.receiver, site.rule.mode
        if receiver is None:
            return path
        state = path.of(receiver.identity)
        if mode is None:  # with policy.begin_step()
            return path
        self._saw(path, site.node)
        self._check_nesting(path, site, receiver, state)
        self._check_sharing(path, site, receiver)
        scope = OpenScope(mode, site.position.line, site.method, state.at)
        inside = attrs.evolve(
            state, at=at_mode(mode), by=site, is_used=True, is_idle=False, scopes=(*state.scopes, scope)
        )
        return self._stir(path.put(receiver.identity, inside), receiver.identity)

    def left(self, path: Path, site: Site, node: cst.CSTNode) -> Path:
        """A scope is left: the outer mode is back; outside all of them a policy that rests on the host is away."""
        receiver = site.receiver
        if receiver is None:
            return path
        state = path.of(receiver.identity)
        if site.rule.mode is None:
            return path.put(receiver.identity, attrs.evolve(state, step=None))
        if not state.scopes:
            return path
        for name, line in state.pending:
            what = f"{name} (started on line {line}) is not waited for when {site.method}() of line {site.position.line} ends"
            self._say("RLM013", site.node, path, what, f"wait for {name} inside the scope")
        outer = state.scopes[-1].outer
        if len(state.scopes) == 1:
            outer = At.RESTING if _rests_on_host(receiver) else At.UNKNOWN
        after = attrs.evolve(state, at=outer, by=site, scopes=state.scopes[:-1], pending=())
        return path.put(receiver.identity, after)

    # -- lifecycle -----------------------------------------------------------------------------------------------

    def _move(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """A prepare or an offload."""
        if self._check_manual(path, site, receiver, state):
            return path
        self._check_gradients(path, site, receiver, state)
        kept_step = state.step if not self._loses_gradients(site, state) else None
        if site.rule.kind is Kind.OFFLOAD:
            self._check_pending(path, site, receiver, state)
            if site.method == "finish_inference" and state.saving is not None and receiver.tenant is Tenant.POLICY:
                what = (
                    f"{receiver}.finish_inference() releases the parameters, "
                    f"and the checkpoint of line {state.saving.position.line} was not waited for"
                )
                self._say("RLM018", site.node, path, what, f"{receiver}.finalize_async_save() first")
        else:
            self._check_room(path, site, receiver)
        at = self._at_after(site, state)
        left = at.is_away and not state.at.is_away
        after = State(
            at=at,
            by=state.by if at is state.at and at.is_away else site,
            is_used=state.is_used and not left and site.rule.kind is Kind.OFFLOAD and at is not At.OFF,
            is_idle=left or (state.is_idle and at.is_away),
            step=kept_step,
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
        if self._check_manual(path, site, receiver, state):
            return path
        is_wake = site.rule.kind is Kind.WAKE
        if is_wake:
            self._check_room(path, site, receiver)
        _, keywords, _ = arguments(site.node) if isinstance(site.node, cst.Call) else ((), {}, False)
        stays = not is_wake and "release_gpu" in keywords and code(keywords["release_gpu"]) != "True"
        at = At.UNKNOWN if stays else At.AWAKE if is_wake else At.ASLEEP
        return self._stir(path.put(receiver.identity, State(at=at, by=site)), receiver.identity)

    def _switch(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """``switch(mode)`` and ``offload()`` of this library."""
        if receiver.api is not Api.SCOPED or self._check_manual(path, site, receiver, state):
            return path
        self._check_pending(path, site, receiver, state)
        at = At.OFF if site.method == "offload" else At.UNKNOWN
        after = State(at=at, by=site, step=state.step)
        return self._stir(path.put(receiver.identity, after), receiver.identity)

    def _entered_by_stack(self, path: Path, site: Site, receiver: Receiver) -> Path:
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
            self._check_awake(path, site.node, receiver, state, f"{receiver}.{site.method}()")
            return self._stir(path.put(receiver.identity, attrs.evolve(state, is_used=True)), receiver.identity)
        bad = self._check_compute(path, site, receiver, state)
        self._check_parts(path, site, receiver)
        after = state
        if bad:  # the path ends there in truth: what follows would only repeat it
            after = attrs.evolve(state, at=At.UNKNOWN, by=None)
        if site.rule.kind is Kind.STEP:
            after = self._step(path, site, receiver, after)
        is_eval = site.rule.evaluates is True or _is_eval(site)
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
                if state.step is not None and not site.conditions:
                    line = state.step.position.line
                    what = f"{name}: the step of line {line} is still open"
                    self._say("RLM009", site.node, path, what, "finish or abort the open step first")
                return attrs.evolve(state, step=site)
            case "forward_backward":
                if state.step is not None and state.is_eval:
                    what = f"{name} after an inference call in the same step, with no prepare_for_training() in between"
                    self._say("RLM008", site.node, path, what, f"{receiver}.prepare_for_training() before {name}")
            case "commit" | "":
                return attrs.evolve(state, step=None)
        return state

    def _state(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """Checkpoints and metadata."""
        after = attrs.evolve(state, is_used=True)
        if site.method == "save_checkpoint" and site.rule.api is Api.LEGACY and receiver.api is not Api.SCOPED:
            if state.at.is_away and not state.scopes:
                self._say(
                    "RLM014",
                    site.node,
                    path,
                    f"{receiver}.save_checkpoint() after {_by(state)} sent the parameters away",
                    f"{receiver}.prepare_for_training() before it, or: with scopes({receiver}).training_mode():",
                )
            after = attrs.evolve(after, saving=site)
        if site.method == "finalize_async_save":
            after = attrs.evolve(after, saving=None)
        if site.rule.gate and state.scopes:
            self._check_mode(path, site, receiver, state)
        return self._stir(path.put(receiver.identity, after), receiver.identity)

    # -- transfers -----------------------------------------------------------------------------------------------

    def _transfer(self, path: Path, site: Site, receiver: Receiver, state: State) -> Path:
        """One side of a weight transfer."""
        if receiver.tenant is Tenant.POLICY:
            if state.scopes:
                self._check_mode(path, site, receiver, state)
            elif state.at.is_away:
                self._say_refit_away(path, site, receiver, state, f"{receiver}.{site.method}()")
                state = attrs.evolve(state, at=At.UNKNOWN, by=None)
            self._check_sides(path, site, receiver)
        name = assigned_name(site)
        pending = (*state.pending, (name, site.position.line)) if name is not None else state.pending
        after = attrs.evolve(state, is_used=True, pending=pending)
        return self._stir(path.put(receiver.identity, after), receiver.identity)

    def _check_sides(self, path: Path, site: Site, receiver: Receiver) -> None:
        """Waiting for the trainer's side right away, with the engine's side started only afterwards."""
        around = [p for p in site.parents[-3:] if isinstance(p, cst.Call) and callee(p) in _WAITS]
        later = [
            other
            for other in self.module.sites
            if other.function is site.function
            and other.rule.kind is Kind.TRANSFER
            and other.receiver is not None
            and other.receiver.tenant is Tenant.ENGINE
        ]
        started = any(other.node in self.seen and self._reached(path, other) for other in later)
        if around and later and not started:
            what = (
                f"{callee(around[-1])}({receiver}.{site.method}()) waits for the sending side "
                f"before {later[0].receiver}.{later[0].method}() on line {later[0].position.line} starts the receiving one"
            )
            self._say("RLM012", site.node, path, what, "start both sides, then wait for both together")

    @staticmethod
    def _reached(path: Path, other: Site) -> bool:
        assert other.receiver is not None
        state = path.of(other.receiver.identity)
        return any(line == other.position.line for _, line in state.pending)

    def _synchronise(self, path: Path, site: Site, receiver: Receiver) -> Path:
        """A synchroniser moves whatever it holds; ``policy.refit(engine)`` of this library puts everything back."""
        if receiver.tenant is Tenant.POLICY:
            return path
        for identity, state in path.tenants:
            if not state.scopes:
                path = self._lose(path, identity)
        return path

    def _refit_check(self, path: Path, site: HelperSite, policy: Receiver) -> Path:
        state = path.of(policy.identity)
        name = f"{site.helper.name}({policy}, ...)"
        if state.scopes:
            scope = state.scopes[-1]
            what = f"{name} moves {policy} inside {scope.method}() of line {scope.line}"
            self._say("RLM104", site.node, path, what, f"scopes({policy}).refit(engine, transfer) outside the scope")
        elif state.at.is_away:
            self._say_refit_away(path, site, policy, state, name)
            return path.put(policy.identity, State())
        elif state.step is not None:
            what = f"{name} offloads {policy} while the step of line {state.step.position.line} is open"
            self._say("RLM004", site.node, path, what, "finish or abort the step first")
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
        is_open = asked is not None and code(asked) not in ("True", "False") and not self._asks(site.function)
        if asked is None or is_open or self._serves_itself(site.function):
            yield path.put(policy.identity, State(is_used=True))
            return
        tests = self.interpreter.tests[site.function]
        for outcome, after in ((True, gone), (False, used)):
            facts = tests.assume(path.facts, asked, outcome)
            if facts is not None:
                yield attrs.evolve(path.put(policy.identity, after), facts=facts)

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_compute(self, path: Path, site: Site, receiver: Receiver, state: State) -> bool:
        """Whether the parameters, and for training everything else, are where the call needs them."""
        rule = site.rule
        if state.scopes:
            return self._check_mode(path, site, receiver, state)
        if not rule.needs:
            return False
        name = f"{receiver}.{site.method}()"
        prepare, scope = _remedy(rule, receiver)
        if state.at is At.RESTING:
            what = f"{name} outside every scope: {receiver} rests on the host since {_by(state)} ended"
            self._say("RLM107", site.node, path, what, f"with {receiver}.{scope}(): {name}")
            return True
        if state.at.is_away:
            write = (
                f"with {receiver}.{scope}():"
                if receiver.api is Api.SCOPED
                else f"{prepare} before it, or: with scopes({receiver}).{scope}():"
            )
            self._say(
                "RLM001", site.node, path, f"{name} after {_by(state)} sent the parameters away", write, since=state.by
            )
            return True
        trains = rule.gate in ("train", "begin_step", "forward_backward", "commit") and rule.api is Api.LEGACY
        opens_nothing = state.step is not None and rule.kind is Kind.STEP
        if trains and state.at in (At.LOGPROB, At.REFIT) and not opens_nothing:
            why = "Megatron needs the gradient buffer in evaluation too" if _is_eval(site) else ""
            self._say(
                "RLM007",
                site.node,
                path,
                f"{name} after {_by(state)}",
                f"{prepare} before it, or: with scopes({receiver}).{scope}():",
                why,
            )
            return True
        return False

    def _check_mode(self, path: Path, site: Site, receiver: Receiver, state: State) -> bool:
        """A call inside a scope, judged by the mode table."""
        scope = state.scopes[-1]
        gate = "train(eval_mode=True)" if site.rule.gate == "train" and _is_eval(site) else site.rule.gate
        if not gate or may_call(scope.mode, gate):
            return False
        write = scope_to_write(gate, receiver.tenant.value)
        said = f"scopes({receiver})" if receiver.is_scopes or receiver.api is not Api.SCOPED else str(receiver)
        what = (
            f"{receiver}.{site.method}() inside {scope.method}() of line {scope.line}: not legal in {scope.mode} mode"
        )
        self._say("RLM102", site.node, path, what, f"with {said}.{write}():")
        return True

    def _check_nesting(self, path: Path, site: Site, receiver: Receiver, state: State) -> None:
        if not state.scopes or site.rule.mode is None:
            return
        outer = state.scopes[-1]
        if not may_nest(outer.mode, site.rule.mode):
            what = f"{site.method}() inside {outer.method}() of line {outer.line}: {site.rule.mode} does not nest in {outer.mode}"
            self._say("RLM103", site.node, path, what, f"leave {outer.method}() first")

    def _check_sharing(self, path: Path, site: Site, receiver: Receiver) -> None:
        """One tenant of shared GPUs is in at a time."""
        if receiver.identity not in self._shared:
            return
        for identity, state in path.tenants:
            if identity != receiver.identity and identity in self._shared and state.scopes:
                outer = state.scopes[-1]
                what = f"{receiver}.{site.method}() while {outer.method}() of {identity} (line {outer.line}) is open: they share their GPUs"
                self._say("RLM103", site.node, path, what, f"leave {outer.method}() of {identity} first")

    def _check_manual(self, path: Path, site: Site, receiver: Receiver, state: State) -> bool:
        if not state.scopes:
            return False
        scope = state.scopes[-1]
        what = f"{receiver}.{site.method}() inside {scope.method}() of line {scope.line}"
        self._say("RLM104", site.node, path, what, f"leave it out, or leave {scope.method}() first")
        return True

    @staticmethod
    def _loses_gradients(site: Site, state: State) -> bool:
        if state.step is None or not site.rule.destroys_gradients:
            return False
        if site.shape is Shape.TO_THREAD:
            call = next((p for p in reversed(site.parents) if isinstance(p, cst.Call)), None)
        else:
            call = site.node if isinstance(site.node, cst.Call) else None
        if call is None:
            return True
        positional, keywords, is_open = arguments(call)
        keep = keywords.get(
            "keep_train_buffers", positional[0] if positional and site.shape is not Shape.TO_THREAD else None
        )
        return not is_open and (keep is None or code(keep) == "False")

    def _check_gradients(self, path: Path, site: Site, receiver: Receiver, state: State) -> None:
        if not self._loses_gradients(site, state):
            return
        assert state.step is not None
        what = f"{receiver}.{site.method}() while the train step of line {state.step.position.line} is open"
        write = "finish or abort the step first"
        if site.method == "prepare_for_lp_inference":
            write = f"{receiver}.prepare_for_lp_inference(keep_train_buffers=True)"
        self._say("RLM004", site.node, path, what, write)

    def _check_pending(self, path: Path, site: Site, receiver: Receiver, state: State) -> None:
        for name, line in state.pending:
            what = f"{receiver}.{site.method}() while the transfer of line {line} ({name}) is not waited for"
            self._say("RLM013", site.node, path, what, f"wait for {name} first")

    def _check_awake(self, path: Path, node: cst.CSTNode, receiver: Receiver, state: State, name: str) -> None:
        if state.at is At.ASLEEP and not state.scopes:
            what = f"{name} after {_by(state)} put it to sleep"
            write = f"{receiver}.prepare_for_generation() before it, or: with scopes({receiver}).awake():"
            self._say("RLM006", node, path, what, write, since=state.by)

    def _check_parts(self, path: Path, site: Site, receiver: Receiver) -> None:
        """What the call that made the policy left out."""
        origin = receiver.origin
        if origin is None:
            return
        _, keywords, is_open = arguments(origin)
        if is_open:
            return
        name = f"{receiver}.{site.method}()"
        line = self.module.source.line(origin)
        lacks = {key: code(value) for key, value in keywords.items()}
        if site.rule.gate == "get_reference_policy_logprobs":
            if lacks.get("init_reference_model") == "False":
                what = f"{name}: line {line} makes {receiver} with init_reference_model=False"
                self._say("RLM017", site.node, path, what, "init_reference_model=True")
            elif receiver.api is Api.SCOPED and callee(origin) == "attach" and lacks.get("reference", "None") == "None":
                what = f"{name}: line {line} makes {receiver} without a reference"
                self._say("RLM017", site.node, path, what, 'reference="copy"')
        if site.rule.gate == "train" and lacks.get("init_optimizer") == "False":
            what = f"{name}: line {line} makes {receiver} with init_optimizer=False"
            self._say("RLM017", site.node, path, what, "init_optimizer=True")

    # -- room ----------------------------------------------------------------------------------------------------

    def _check_room(self, path: Path, site: Site, receiver: Receiver) -> None:
        """Who else takes up the GPUs while this tenant comes in."""
        if any(state.is_alias for _, state in path.tenants):  # the trainer's own weights serve: nobody takes turns
            return
        for identity, state in path.tenants:
            # In the REFIT state a policy has made room for the engine's weights already.
            is_in = state.at in (At.TRAINING, At.LOGPROB, At.AWAKE)
            if identity == receiver.identity or state.by is None or not is_in or state.scopes:
                continue
            other = _receiver_of(state.by, identity)
            if other is None:
                continue
            if Tenant.ENGINE in (other.tenant, receiver.tenant) and other.tenant is not receiver.tenant:
                if not self._is_colocated(path, site.function):
                    continue
            elif {other.tenant, receiver.tenant} != {Tenant.POLICY, Tenant.VALUE} or not self._takes_turns(
                other, site.function
            ):
                continue
            verb = "wakes" if receiver.tenant is Tenant.ENGINE else "brings in"
            what = f"{receiver}.{site.method}() {verb} {receiver} while {other} is still there since {_by(state)}"
            self._say("RLM010", site.node, path, what, f"{_release(other)} first", since=state.by)

    def _is_colocated(self, path: Path, function: Function) -> bool:
        """Whether engine and trainer share their GPUs on this path, as far as the function asks at all."""
        if self._serves_itself(function):
            return False
        known = [holds for text, holds in path.facts if "colocated" in text and "non_colocated" not in text]
        return all(known) if known else not self._mentions(function, "colocated")

    def _asks(self, function: Function) -> bool:
        """Whether a function decides anything by whether the engine is colocated."""
        return any("colocated" in atom for atom in self.interpreter.tested(function))

    def _mentions(self, function: Function, *words: str) -> bool:
        return any(word in text for outer in function.chain() for text in self._words(outer) for word in words)

    def _serves_itself(self, function: Function) -> bool:
        """Whether the loop knows colocated Megatron engines, which serve the training weights: nobody leaves for them."""
        return self._mentions(function, "MegatronGeneration", "blocks_training", "wake_carries_weight_updates")

    def _words(self, function: Function) -> frozenset[str]:
        cache = self.__dict__.setdefault("_word_cache", {})
        if function not in cache:
            cache[function] = frozenset(code(function.node).split()) if not function.is_module else frozenset()
        return cache[function]  # type: ignore[no-any-return]

    def _takes_turns(self, other: Receiver, function: Function) -> bool:
        return any(
            site.function is function
            and site.receiver is not None
            and site.receiver.identity == other.identity
            and site.rule.kind is Kind.OFFLOAD
            for site in self.module.sites
        )

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _saw(self, path: Path, node: cst.CSTNode) -> None:
        self.seen[node].add(path)

    def _say(
        self,
        rule: str,
        node: cst.CSTNode,
        path: Path,
        what: str,
        write: str,
        why: str = "",
        since: Site | HelperSite | None = None,
    ) -> None:
        caller = self.module.source.line(self.interpreter.calls[-1]) if self.interpreter.calls else 0
        self.verdicts.append(_Verdict(rule, node, path, what, write, caller, why, since))

    def _say_refit_away(self, path: Path, site: Site | HelperSite, receiver: Receiver, state: State, name: str) -> None:
        what = f"{name} after {_by(state)} sent the parameters away"
        write = f"{receiver}.prepare_for_lp_inference() before it, or scopes({receiver}).refit(engine, transfer)"
        self._say("RLM011", site.node, path, what, write, since=state.by)

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

    # -- the end -------------------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """What is wrong, each once, with the path it is wrong on."""
        by_place: dict[tuple[str, cst.CSTNode], list[_Verdict]] = defaultdict(list)
        for verdict in self.verdicts:
            if not verdict.path.is_vague:
                by_place[verdict.code, verdict.node].append(verdict)
        for (rule, node), verdicts in by_place.items():
            shortest = min(verdicts, key=lambda v: (len(v.path.facts), v.what))
            when = self._when(shortest, {verdict.path for verdict in verdicts}, shortest.since)
            called = f" (called from line {shortest.caller})" if shortest.caller else ""
            yield self._finding(rule, node, shortest.what + when + called, shortest.write, shortest.why)
        yield from self._unused()

    def _finding(self, rule: str, node: cst.CSTNode, what: str, write: str, why: str = "") -> Finding:
        position = self.module.source.position(node)
        return Finding(
            self.module.source.path, position.line, position.column, rule, what, why or CODES[rule].why, write
        )

    def _when(self, verdict: _Verdict, bad: set[Path], since: Site | HelperSite | None = None) -> str:
        """How the tests came out on the path that is wrong, where other paths to the same place are right."""
        if not {path for path in self.seen[verdict.node] if not path.is_vague} - bad:
            return ""
        said: dict[tuple[int, bool], str] = {}
        for step in reversed(verdict.path.trail):
            if step.within is None:
                if since is not None and step.node is since.node:
                    break
                continue
            if verdict.node not in set(walk(step.within)):
                line = self.module.source.line(step.node)
                said.setdefault(
                    (line, step.outcome), f"`{code(step.node)}` on line {line} is {str(step.outcome).lower()}"
                )
        told = list(said.values())[:3]
        return f", when {' and '.join(reversed(told))}" if told else ""

    def _unused(self) -> Iterator[Finding]:
        """Moves that every path undoes at once."""
        for site in self.module.sites:
            receiver, paths = site.receiver, self.seen.get(site.node)
            if receiver is None or not paths or not receiver.is_single or receiver.may_be or not site.shape.runs_here:
                continue
            states = [path.of(receiver.identity) for path in paths]
            if any(path.is_vague for path in paths) or any(state.scopes for state in states):
                continue
            name = f"{receiver}.{site.method}()"
            if site.rule.kind is Kind.OFFLOAD and all(_is_fresh(state) for state in states):
                what = f"{name} undoes {_by(states[0])}, and nothing used {receiver} in between"
                yield self._finding("RLM002", site.node, what, "neither of the two")
            if site.rule.kind is Kind.PREPARE and all(self._left_for_nothing(site, state) for state in states):
                what = f"{name} brings back what {_by(states[0])} sent away, and nobody else came in between"
                yield self._finding("RLM003", site.node, what, "the prepare alone")

    @staticmethod
    def _left_for_nothing(site: Site, state: State) -> bool:
        """Whether a tenant left in the same block of statements, and no tenant did anything since."""
        by = state.by
        if not state.is_idle or not isinstance(by, Site) or by.function is not site.function:
            return False
        return by.parents[:-2] == site.parents[:-2]

    def half_prepared(self) -> Iterator[Finding]:
        """Compute that one path prepares for and another does not. Asked of a walk that goes round no loop."""
        for site in self.module.sites:
            receiver, paths = site.receiver, self.seen.get(site.node, set())
            if receiver is None or not receiver.is_single or receiver.may_be or any(path.is_vague for path in paths):
                continue
            if not site.rule.computes or receiver.tenant is Tenant.ENGINE or site.is_conditional:
                continue
            states = {path: path.of(receiver.identity) for path in paths}
            prepared = [path for path, state in states.items() if _is_fresh(state) and _is_here(state, site)]
            bare = [path for path, state in states.items() if state == State()]
            if not prepared or not bare or any(state.scopes for state in states.values()):
                continue
            when = self._when(
                _Verdict("RLM001", site.node, min(bare, key=lambda p: len(p.facts)), "", "", 0), set(bare)
            )
            prepare, scope = _remedy(site.rule, receiver)
            by = _by(states[prepared[0]])
            what = f"{receiver}.{site.method}(): {by} prepares for it, but not on every path{when}"
            write = f"{prepare} on that path too, or: with scopes({receiver}).{scope}():"
            yield self._finding("RLM001", site.node, what, write)


def _is_here(state: State, site: Site) -> bool:
    return isinstance(state.by, Site) and state.by.function is site.function


def _is_fresh(state: State) -> bool:
    return state.by is not None and state.at in (At.TRAINING, At.LOGPROB) and not state.is_used and state.step is None


def _by(state: State) -> str:
    """The call that put a tenant where it is, to read."""
    by = state.by
    if by is None:
        return "a call"
    name = by.helper.name if isinstance(by, HelperSite) else by.method
    return f"{name}() on line {by.position.line}"


def _remedy(rule: Rule, receiver: Receiver) -> tuple[str, str]:
    """The legacy call and the scope that a call needs before it."""
    scope = scope_to_write(rule.gate, receiver.tenant.value) if rule.gate else "training_mode"
    if scope == "training_mode":
        return f"{receiver}.prepare_for_training()", scope
    if receiver.tenant is Tenant.VALUE:
        return f"{receiver}.prepare_for_inference()", scope
    return f"{receiver}.prepare_for_lp_inference()", scope


def _release(other: Receiver) -> str:
    match other.tenant:
        case Tenant.ENGINE:
            return f"{other}.finish_generation()"
        case Tenant.VALUE:
            return f"{other}.finish_training()"
    return f"{other}.offload_to_cpu()"


def _receiver_of(by: Site | HelperSite, identity: Identity) -> Receiver | None:
    if isinstance(by, Site):
        return by.receiver
    return next((t for t in by.tenants if t is not None and t.identity == identity), None)


def _is_eval(site: Site) -> bool:
    if not isinstance(site.node, cst.Call) or site.method not in ("train", "train_from_meta"):
        return False
    positional, keywords, _ = arguments(site.node)
    flag = keywords.get("eval_mode", positional[2] if len(positional) > 2 else None)
    return flag is not None and code(flag) == "True"


def _rests_on_host(receiver: Receiver) -> bool:
    """Whether the call that made a policy of this library is in sight and leaves it to rest on the host."""
    origin = receiver.origin
    if receiver.api is not Api.SCOPED or receiver.is_scopes or origin is None:
        return False
    _, keywords, is_open = arguments(origin)
    base = keywords.get("base")
    return not is_open and (base is None or code(base).strip("'\"") == "offloaded")


def _shared(module: Module) -> Iterator[Identity]:
    """The tenants that ``share(...)`` of the NeMo-RL adapter puts on the same GPUs."""
    if not module.outline.imports.get("share", "").startswith("rl_session."):
        return
    for function in module.outline.functions.values():
        for node in walk(function.node, into_functions=False):
            if isinstance(node, cst.Call) and callee(node) == "share":
                for arg in node.args:
                    receiver = module.receivers.of(arg.value, function) if arg.keyword is None else None
                    if receiver is not None:
                        yield receiver.identity
