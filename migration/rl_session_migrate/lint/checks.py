"""The checks at one event on one path: may this call be made here, and is there room for it.

The tables say what methods need (:mod:`rl_session_migrate.rules`) and what modes allow (:mod:`rl_session.lifecycle`).
"""

from __future__ import annotations

from itertools import pairwise

import attrs
import libcst as cst

from rl_session.lifecycle import Mode, may_call, may_nest, scope_to_write
from rl_session_migrate.lint.interpret import Interpreter
from rl_session_migrate.lint.phrases import (
    cause,
    is_evaluation,
    keeps_buffers,
    receiver_of,
    release,
    remedy,
    shared,
)
from rl_session_migrate.lint.plan import waits_for
from rl_session_migrate.lint.state import At, Path, Side, State
from rl_session_migrate.lint.verdicts import Verdicts
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import Receiver
from rl_session_migrate.rules import Api, Kind, Tenant
from rl_session_migrate.sites import HelperSite, Module, Site
from rl_session_migrate.tree import arguments, callee, code, walk

__all__ = ["Checks"]

_OPEN_STEP = "the call raises OpenStepError (RLS106)"


class Checks:
    """The checks of one module; what is wrong goes to ``verdicts``."""

    def __init__(self, module: Module, interpreter: Interpreter, verdicts: Verdicts) -> None:
        self._module = module
        self._interpreter = interpreter
        self._verdicts = verdicts
        self._shared = frozenset(shared(module))
        self._samples_itself = "InProcessEngine" in module.source.module.code
        self._word_cache: dict[Function, frozenset[str]] = {}

    def started(self, path: Path, site: Site, receiver: Receiver) -> tuple[Path, Side | None]:
        """One side of a transfer is started: whoever waited for the other side alone waits for ever.

        Returns:
            The path on which the other side has met this one, and what this side is until it is met.
        """
        is_met = False
        for identity, state in path.tenants:
            side = state.side
            if side is None or side.tenant is receiver.tenant:
                continue
            is_met = True
            path = path.put(identity, attrs.evolve(state, side=None))
            if side.is_awaited and side.node is not None and side.path is not None:
                one, other = ("sending", "receiving") if side.tenant is Tenant.POLICY else ("receiving", "sending")
                what = (
                    f"{side.wait} waits for the {one} side before {receiver}.{site.method}() on line "
                    f"{site.position.line} starts the {other} one"
                )
                self._verdicts.say(
                    "RLM012", side.node, side.path, what, "start both sides, then wait for both together"
                )
        if is_met or site.method == "stream_weights_via_http":  # whose other side is a server
            return path, None
        return path, self._waiting(path, site, receiver)

    def _waiting(self, path: Path, site: Site, receiver: Receiver) -> Side:
        chain = (*site.parents, site.node)[::-1]
        around = [(above, below) for below, above in pairwise(chain)]
        waiter = waits_for(around)
        statement = set(walk(site.statement)) if waiter else set()
        for other in self._module.sites if waiter else ():
            is_other = other.receiver is not None and other.receiver.tenant is not receiver.tenant
            if is_other and other.rule.kind is Kind.TRANSFER and other.node in statement:
                waiter = ""  # ray.get([*sender.send(), *engine.receive()])
        wait = f"{waiter}({receiver}.{site.method}())"
        return Side(receiver.tenant, bool(waiter), site.node, wait, path)

    def compute(self, path: Path, site: Site, receiver: Receiver, state: State) -> bool:
        """Whether the parameters, and for training everything else, are where the call needs them."""
        rule = site.rule
        if state.scopes:
            return self.mode(path, site, receiver, state)
        if not rule.needs:
            return False
        name = f"{receiver}.{site.method}()"
        prepare, scope = remedy(rule, receiver)
        if state.at is At.RESTING:
            what = f"{name} outside every scope: {receiver} rests on the host since {cause(state)} ended"
            self._verdicts.say("RLM107", site.node, path, what, f"with {receiver}.{scope}(): {name}")
            return True
        if state.at.is_away:
            write = (
                f"with {receiver}.{scope}():"
                if receiver.api is Api.SCOPED
                else f"{prepare} before it, or: with scopes({receiver}).{scope}():"
            )
            self._verdicts.say(
                "RLM001",
                site.node,
                path,
                f"{name} after {cause(state)} sent the parameters away",
                write,
                since=state.by,
            )
            return True
        trains = rule.gate in ("train", "begin_step", "forward_backward", "commit") and rule.api is Api.LEGACY
        opens_nothing = state.step is not None and rule.kind is Kind.STEP
        if trains and state.at in (At.LOGPROB, At.REFIT) and not opens_nothing:
            why = "Megatron needs the gradient buffer in evaluation too" if is_evaluation(site) else ""
            self._verdicts.say(
                "RLM007",
                site.node,
                path,
                f"{name} after {cause(state)}",
                f"{prepare} before it, or: with scopes({receiver}).{scope}():",
                why,
            )
            return True
        return False

    def mode(self, path: Path, site: Site, receiver: Receiver, state: State) -> bool:
        """A call inside a scope, judged by the mode table."""
        scope = state.scopes[-1]
        gate = "train(eval_mode=True)" if site.rule.gate == "train" and is_evaluation(site) else site.rule.gate
        if not gate or may_call(scope.mode, gate):
            return False
        write = scope_to_write(gate, receiver.tenant.value)
        said = str(receiver.identity)
        if receiver.is_scopes or receiver.api is not Api.SCOPED:
            said = f"scopes({said})"
        what = (
            f"{receiver}.{site.method}() inside {scope.method}() of line {scope.line}: not legal in {scope.mode} mode"
        )
        self._verdicts.say("RLM102", site.node, path, what, f"with {said}.{write}():")
        return True

    def nesting(self, path: Path, site: Site, receiver: Receiver, state: State) -> None:
        """A scope inside a scope of the same tenant, judged by the nesting table."""
        if not state.scopes or site.rule.mode is None:
            return
        outer = state.scopes[-1]
        if Mode.GENERATION in (outer.mode, site.rule.mode) and not self._samples_itself:
            return  # an engine may have devices of its own: then everything stays legal beside it
        if not may_nest(outer.mode, site.rule.mode):
            what = f"{site.method}() inside {outer.method}() of line {outer.line}: {site.rule.mode} does not nest in {outer.mode}"
            self._verdicts.say("RLM103", site.node, path, what, f"leave {outer.method}() first")

    def sharing(self, path: Path, site: Site, receiver: Receiver) -> None:
        """One tenant of shared GPUs is in at a time."""
        if receiver.identity not in self._shared:
            return
        for identity, state in path.tenants:
            if identity != receiver.identity and identity in self._shared and state.scopes:
                outer = state.scopes[-1]
                other = f"{outer.method}() of {identity} (line {outer.line})"
                what = f"{receiver}.{site.method}() while {other} is open: they share their GPUs"
                self._verdicts.say("RLM103", site.node, path, what, f"leave {outer.method}() of {identity} first")

    def manual(self, path: Path, site: Site, receiver: Receiver, state: State) -> bool:
        """A manual move inside a scope."""
        if not state.scopes:
            return False
        scope = state.scopes[-1]
        what = f"{receiver}.{site.method}() inside {scope.method}() of line {scope.line}"
        self._verdicts.say("RLM104", site.node, path, what, f"leave it out, or leave {scope.method}() first")
        return True

    @staticmethod
    def loses_gradients(site: Site, state: State) -> bool:
        """Whether a move destroys the gradients of a step that is open."""
        if state.step is None or not site.rule.destroys_gradients:
            return False
        return not keeps_buffers(site)

    def train_in_step(self, path: Path, site: Site, receiver: Receiver, state: State) -> None:
        """A whole train call while a step is open."""
        if state.step is None or site.rule.gate != "train":
            return
        what = f"{receiver}.{site.method}() while the train step of line {state.step.position.line} is open"
        if state.step.rule.api is Api.LEGACY:
            why = "it zeroes the gradients before each global batch, in evaluation too: the chunks so far are lost"
            self._verdicts.say("RLM004", site.node, path, what, "finish or abort the step first", why)
        elif not is_evaluation(site):
            self._verdicts.say("RLM009", site.node, path, what, "commit or abort the step first", _OPEN_STEP)

    def gradients(self, path: Path, site: Site, receiver: Receiver, state: State) -> None:
        """A move in an open step that destroys its gradients."""
        if not self.loses_gradients(site, state):
            return
        assert state.step is not None
        what = f"{receiver}.{site.method}() while the train step of line {state.step.position.line} is open"
        write = "finish or abort the step first"
        if site.method == "prepare_for_lp_inference":
            write = f"{receiver}.prepare_for_lp_inference(keep_train_buffers=True)"
        self._verdicts.say("RLM004", site.node, path, what, write)

    def step_is_over(self, path: Path, site: Site, receiver: Receiver, state: State) -> None:
        """A call that needs an open step, when the last one was ended."""
        if state.ended is None or state.step is not None:
            return
        begun = [s for s in self._module.sites if s.rule.gate == "begin_step" and s.receiver is not None]
        if any(s.conditions for s in begun if s.receiver is not None and s.receiver.identity == receiver.identity):
            return  # the condition may be that no step is open
        ended = f"{state.ended.method}() on line {state.ended.position.line}"
        what = f"{receiver}.{site.method}(): {ended} ended the step, and none was begun since"
        self._verdicts.say("RLM009", site.node, path, what, "begin a step first", since=state.ended)

    def pending(self, path: Path, site: Site, receiver: Receiver, state: State) -> None:
        """A move under a transfer that nobody waited for."""
        for name, line in state.pending:
            what = f"{receiver}.{site.method}() while the transfer of line {line} ({name}) is not waited for"
            self._verdicts.say("RLM013", site.node, path, what, f"wait for {name} first")

    def awake(self, path: Path, node: cst.CSTNode, receiver: Receiver, state: State, name: str) -> None:
        """Something samples from an engine."""
        write = f"{receiver}.prepare_for_generation() before it, or: with scopes({receiver}).awake():"
        if state.at is At.ASLEEP and not state.scopes:
            what = f"{name} after {cause(state)} put it to sleep"
            self._verdicts.say("RLM006", node, path, what, write, since=state.by)
        elif state.at in (At.WEIGHTS, At.KV_CACHE):
            rest = "kv_cache" if state.at is At.WEIGHTS else "weights"
            what = f"{name} with only the {state.at.replace('_', ' ')} awake since {cause(state)}"
            write = f'{receiver}.prepare_for_generation(tags=["{rest}"]) before it'
            self._verdicts.say("RLM006", node, path, what, write, since=state.by)

    def saving(self, path: Path, site: Site, receiver: Receiver, state: State) -> None:
        """A move under a checkpoint that may still be written: these two calls do not wait for it."""
        if state.saving is None or receiver.tenant is not Tenant.POLICY:
            return
        line = state.saving.position.line
        if site.method == "finish_inference":
            does, why = "releases the parameters", ""
        elif site.method == "prepare_for_lp_inference" and not keeps_buffers(site):
            does = "may send optimizer state away"
            why = "with offload_optimizer_for_logprob an asynchronous Megatron checkpoint loses what it still reads"
        else:
            return
        what = f"{receiver}.{site.method}() {does}, and the checkpoint of line {line} was not waited for"
        self._verdicts.say("RLM018", site.node, path, what, f"{receiver}.finalize_async_save() first", why)

    def parts(self, path: Path, site: Site, receiver: Receiver) -> None:
        """What the call that made the policy left out."""
        origin = receiver.origin
        if origin is None:
            return
        _, keywords, is_open = arguments(origin)
        if is_open:
            return
        name = f"{receiver}.{site.method}()"
        line = self._module.source.line(origin)
        lacks = {key: code(value) for key, value in keywords.items()}
        if site.rule.gate == "get_reference_policy_logprobs":
            if lacks.get("init_reference_model") == "False":
                what = f"{name}: line {line} makes {receiver} with init_reference_model=False"
                self._verdicts.say("RLM017", site.node, path, what, "init_reference_model=True")
            elif receiver.api is Api.SCOPED and callee(origin) == "attach" and lacks.get("reference", "None") == "None":
                what = f"{name}: line {line} makes {receiver} without a reference"
                self._verdicts.say("RLM017", site.node, path, what, 'reference="copy"')
        if site.rule.gate == "train" and lacks.get("init_optimizer") == "False":
            what = f"{name}: line {line} makes {receiver} with init_optimizer=False"
            self._verdicts.say("RLM017", site.node, path, what, "init_optimizer=True")

    # -- room ----------------------------------------------------------------------------------------------------

    def room(self, path: Path, site: Site, receiver: Receiver) -> None:
        """Who else takes up the GPUs while this tenant comes in."""
        if any(state.is_alias for _, state in path.tenants):  # the trainer's own weights serve: nobody takes turns
            return
        for identity, state in path.tenants:
            # In the REFIT state a policy has made room for the engine's weights already.
            is_in = state.at in (At.TRAINING, At.LOGPROB, At.AWAKE, At.WEIGHTS, At.KV_CACHE)
            if identity == receiver.identity or state.by is None or not is_in or state.scopes:
                continue
            other = receiver_of(state.by, identity)
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
            what = f"{receiver}.{site.method}() {verb} {receiver} while {other} is still there since {cause(state)}"
            self._verdicts.say("RLM010", site.node, path, what, f"{release(other)} first", since=state.by)

    def _is_colocated(self, path: Path, function: Function) -> bool:
        """Whether engine and trainer share their GPUs on this path, as far as the function asks at all."""
        if self.serves_itself(function):
            return False
        known = [holds for text, holds in path.facts if "colocated" in text and "non_colocated" not in text]
        return all(known) if known else not self._mentions(function, "colocated")

    def asks(self, function: Function) -> bool:
        """Whether a function decides anything by whether the engine is colocated."""
        return any("colocated" in atom for atom in self._interpreter.tested(function))

    def _mentions(self, function: Function, *words: str) -> bool:
        return any(word in text for outer in function.chain() for text in self._words(outer) for word in words)

    def serves_itself(self, function: Function) -> bool:
        """Whether the loop knows colocated Megatron engines, which serve the training weights: nobody leaves for them."""
        return self._mentions(function, "MegatronGeneration", "blocks_training", "wake_carries_weight_updates")

    def _words(self, function: Function) -> frozenset[str]:
        if function not in self._word_cache:
            text = "" if function.is_module else self._module.source.text(function.node)
            self._word_cache[function] = frozenset(text.split())
        return self._word_cache[function]

    def _takes_turns(self, other: Receiver, function: Function) -> bool:
        return any(
            site.function is function
            and site.receiver is not None
            and site.receiver.identity == other.identity
            and site.rule.kind is Kind.OFFLOAD
            for site in self._module.sites
        )

    def refit_away(self, path: Path, site: Site | HelperSite, receiver: Receiver, state: State, name: str) -> None:
        """A push of weights that are not on the device."""
        what = f"{name} after {cause(state)} sent the parameters away"
        write = f"{receiver}.prepare_for_lp_inference() before it, or scopes({receiver}).refit(engine, transfer)"
        self._verdicts.say("RLM011", site.node, path, what, write, since=state.by)
