"""What a legacy policy and a legacy value have in common: lifecycle calls, train calls, and what they leave behind.

A lifecycle call is one change of the resting mode (``Control.switch``) with the cells of its row; the library's engine does
the rest. A compute call is the library's own, after its needs were checked by where bytes *are*: legacy code may compute in
any state in which the bytes happen to be there. No state is kept here beyond configuration, so that any number of handles
may be made over one policy. Knows nothing of engines.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import attrs

from rl_session.audit import events
from rl_session.driver.callsite import call_site, speaking
from rl_session.driver.control import Control
from rl_session.driver.ownership import Token
from rl_session.errors import (
    ArgumentError,
    ConfigError,
    ModeError,
    OwnershipError,
    ShimInScopeError,
    StaleHandleError,
    StepClosedError,
    UnsupportedError,
    UsageError,
)
from rl_session.lifecycle import CALL_NEEDS, Component, Mode, Placement, Tier, may_call, scope_to_write
from rl_session.policy import TrainableModel
from rl_session.scope import Scope, Step
from rl_session.workers.group import LocalGroup
from rl_session_migrate.shim.batch import BatchedDataDict
from rl_session_migrate.shim.effects import AS_IT_IS, Effect, LegacyConfig, destroys_gradients
from rl_session_migrate.shim.loss import LegacyLoss
from rl_session_migrate.shim.notice import warn_once

__all__ = ["LegacyTrainer"]

Batch = Mapping[str, Any]

_PATIENCE_SECONDS = 600.0
"""How long a call waits for other threads; legacy calls waited for ever."""
_NEEDS = {"forward_backward": (Component.PARAMS, Component.BUFFERS, Component.GRADS)}
"""Where legacy needed less than the library's own table says."""
_MODE_OF_CALL = {"training_mode": Mode.TRAINING, "logprob_mode": Mode.LOGPROB, "inference_mode": Mode.LOGPROB}


@attrs.define
class _Plan:
    """What an open legacy train step goes by."""

    loss: LegacyLoss
    mbs: int | None
    num_chunks: int = 0


_plans: weakref.WeakKeyDictionary[Step, _Plan] = weakref.WeakKeyDictionary()


class LegacyTrainer:
    """The part of the legacy API that policies and values share. Made as one of the two, not by itself."""

    _kind = "policy"
    _infers = "prepare_for_lp_inference"
    """The legacy call that brings the weights in for inference."""

    def __init__(
        self,
        policy: TrainableModel,
        *,
        backend: Literal["dtensor", "megatron"] = "dtensor",
        config: LegacyConfig | Mapping[str, Any] | None = None,
    ) -> None:
        if getattr(policy, "_kind", None) != self._kind:
            made = "rs.attach" if self._kind == "policy" else "session.attach_value"
            raise ConfigError(
                f"{type(self).__name__}({policy!r}): that is no {self._kind} of rl_session",
                (),
                f"{type(self).__name__}({made}(model, optimizer))",
            )
        self._policy: Any = policy
        self._control: Control = policy._control  # noqa: SLF001 (two faces of one policy)
        self._config: LegacyConfig = LegacyConfig.of(backend, config, self._defaults())

    def _defaults(self) -> dict[str, bool]:
        names = ("offload_optimizer_for_logprob", "offload_optimizer_for_refit")
        return {name: getattr(self._control.flags, name) for name in names}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._policy!r}, {self._config.backend}>"

    def __reduce__(self) -> Any:
        """A handle for another process, where the policy itself can go there.

        Raises:
            UnsupportedError: The policy is in this process.
        """
        if isinstance(self._control.group, LocalGroup):
            raise UnsupportedError(
                f"{self._control.label}: pickling {type(self).__name__} of a policy in this process",
                ("its model and optimizer are here, and another process would get a copy of them",),
                "session.policy(..., workers=RayWorkers(...))  # then handles may be sent to other actors",
            )
        return _rebuild, (type(self), self._policy, self._config)

    # -- the policy itself, for loops that are half migrated -----------------------------------------------------------

    @property
    def scoped(self) -> Any:
        """The policy of rl_session behind this handle."""
        return self._policy

    @property
    def cfg(self) -> dict[str, Any]:
        """The configuration as legacy code reads it, and as ``scopes(policy)`` of the adapter does."""
        config = self._config
        is_megatron = config.backend == "megatron"
        return {
            "dtensor_cfg": {"enabled": not is_megatron, "cpu_offload": not self._control.flags.weights_move},
            "megatron_cfg": {
                "enabled": is_megatron,
                "optimizer": {"optimizer_cpu_offload": config.optimizer_cpu_offload},
            },
            "offload_optimizer_for_logprob": config.offload_optimizer_for_logprob,
            "offload_optimizer_for_refit": config.offload_optimizer_for_refit,
        }

    @property
    def mode(self) -> Mode:
        """The mode in effect."""
        mode: Mode = self._policy.mode
        return mode

    @property
    def placement(self) -> Placement:
        """Where each component is.

        Raises:
            ClosedError: The policy was closed.
        """
        placement: Placement = self._policy.placement
        return placement

    def training_mode(self, **options: Any) -> Scope[Any]:
        """The scope of the policy behind this handle; inside it this handle's compute calls may be made."""
        scope: Scope[Any] = self._policy.training_mode(**options)
        return scope

    def offloaded(self, **options: Any) -> Scope[Any]:
        """The scope of the policy behind this handle."""
        scope: Scope[Any] = self._policy.offloaded(**options)
        return scope

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def _lifecycle(self, call: str, effect: Effect) -> None:
        """Do what a lifecycle call does, and say what to write instead.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: The transition failed and was rolled back; everything is as it was.
        """
        warn_once(f"{self._kind}.{call}", self._instead(effect))
        with self._turn(call, effect.scope) as site:
            self._apply(call, effect, site)

    def _apply(self, call: str, effect: Effect, site: str) -> None:
        """What a lifecycle call does; the caller has the turn."""
        mode = effect.mode
        if mode is Mode.REFIT and self._is_away(Component.PARAMS):
            mode = Mode.OFFLOADED  # legacy moved no weights here, and there is nothing to read on the device
        reply = self._control.switch(mode, call, site, cells=effect.cells)
        self._control.ask("hold_mode", effect.forwards)
        if reply is not None and destroys_gradients(effect):
            self._tell_kept(call, site, reply.placement[Component.GRADS])

    def _instead(self, effect: Effect) -> str:
        if effect.scope == "offloaded()":
            return f"nothing: the end of a scope is the way back; or with {self._kind}.offloaded(): ..."
        return f"with {self._kind}.{effect.scope}: ... around the calls that it serves"

    def _tell_kept(self, call: str, site: str, tier: Tier) -> None:
        if tier is Tier.NONE:
            return
        nbytes = self._control.ask("sizes")[Component.GRADS.value]
        message = (
            f"{call} at {site}: legacy destroyed the gradients of the open step here; they are kept on the "
            f"{tier.value}. Say keep_train_buffers=True, or finish or abort the step before"
        )
        self._control.record(events.WarningIssued(code="open_step_kept", message=message, nbytes=nbytes))

    @contextmanager
    def _turn(self, call: str, scope: str) -> Iterator[str]:
        """A block in which this thread alone changes the policy, outside every scope; yields the call site."""
        site = call_site()
        token = self._own(call, site)
        try:
            if token is None:
                self._refuse_in_scope(call, site, scope)
            with self._control.changing(), speaking("shim", site):
                if self._control.frames:
                    self._refuse_in_scope(call, site, scope)
                yield site
        finally:
            if token is not None:
                self._control.let_go(token)

    def _own(self, call: str, site: str) -> Token | None:
        """Become the owner, waiting for other threads as long as they have no scope open; None when one is open."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            self._control.close_orphans()
            if self._control.frames:
                return None
            try:
                return self._control.acquire(call, site, timeout=0.2)
            except OwnershipError as error:
                if isinstance(error, StaleHandleError) or time.monotonic() > deadline:
                    raise

    def _refuse_in_scope(self, call: str, site: str, scope: str) -> None:
        """Refuse a call that moves bytes while a scope is open.

        Raises:
            ShimInScopeError: Always.
        """
        frames = self._control.frames
        inside = frames[-1] if frames else None
        described = inside.describe() if inside is not None else "a scope"
        block = inside.spelling if inside is not None else "that scope"
        raise ShimInScopeError(
            f"{self._control.label}: {call} at {site} inside {described}",
            self._control.explain()[1],
            f"with {self._kind}.{scope}: ...  # after the block of {block}; the scope does what the call did",
        )

    # -- computing -----------------------------------------------------------------------------------------------------

    def _is_away(self, *components: str) -> list[str]:
        away: list[str] = self._control.ask("away", components)
        return away

    @contextmanager
    def _computing(self, call: str, gate: str, forwards: Literal["train", "eval"] | None) -> Iterator[None]:
        """A block in which a compute call is legal, and after which the train flag is as the legacy call leaves it.

        Inside an open scope the scope's own rules hold, and no flag stays.

        Raises:
            ModeError: Bytes that the call needs are away; the message names the legacy call that was not made.
        """
        site = call_site()
        token = self._own(f"{call}()", site)
        try:
            with self._control.lock, speaking("shim", site):
                if token is None or self._control.frames:
                    yield
                    return
                self._control.ready(f"{call}()")
                self._check_needs(call, gate, site)
                self._allow(call, gate, site)
                with self._leaving(forwards):
                    yield
        finally:
            if token is not None:
                self._control.let_go(token)

    @contextmanager
    def _leaving(self, forwards: Literal["train", "eval"] | None) -> Iterator[None]:
        """Set the train flag that the call leaves; a call that was refused leaves it as it was."""
        was = self._control.ask("hold_mode", forwards)
        try:
            yield
        except (UsageError, ArgumentError):
            self._control.ask("hold_mode", was)
            raise

    def _check_needs(self, call: str, gate: str, site: str) -> None:
        needs = _NEEDS.get(gate, CALL_NEEDS.get(gate, ()))
        away = self._is_away(*needs)
        if not away:
            return
        control = self._control
        control.record(events.GuardRejected(method=call, mode=control.mode.value, needs=[n.value for n in needs]))
        is_training = scope_to_write(gate) == "training_mode"
        missing = "prepare_for_training()" if is_training else f"{self._infers}()"
        scope = scope_to_write(gate, self._kind)
        they_are = "they are" if len(away) > 1 or away[0].endswith("s") else "it is"
        raise ModeError(
            f"{control.label}: {call}() at {site} needs {', '.join(away).upper()} on the device, but {they_are} away",
            (*control.explain()[1], f"the legacy call that brings them in was not made: {missing}"),
            f"{self._kind}.{missing}  # before; or, in scopes: with {self._kind}.{scope}(): {self._kind}.{call}(...)",
        )

    def _allow(self, call: str, gate: str, site: str) -> None:
        """Go to a mode that has the call, moving nothing: legacy computed wherever the bytes were."""
        if not gate or may_call(self._control.mode, gate):
            return
        mode = _MODE_OF_CALL[scope_to_write(gate, self._kind)]
        self._control.switch(mode, f"{call}()", site, cells=AS_IT_IS)

    def train(
        self,
        data: Batch,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Any = None,
        check_dim_skip_keys: Any = None,
    ) -> dict[str, Any]:
        """Make ``B / gbs`` optimizer steps and one scheduler step; or only compute the loss, with ``eval_mode``.

        Contract: needs weights (and, to train, gradients and optimizer state) on the device, as ``prepare_for_training()``
        brings them; leaves the module in train, or in eval with ``eval_mode``; gradients are gone afterwards (a flat buffer
        is zero). Scope: ``with policy.training_mode(): policy.train(batch, loss_fn)``. Guide: docs/legacy-api.md.

        Args:
            data: A legacy batch or any mapping.
            loss_fn: A legacy loss object, called with keywords by its ``input_type``, or a loss function of rl_session.
            eval_mode: No gradients and no step.
            gbs: Sequences an optimizer step sees; the configured ``train_global_batch_size``, else all.
            mbs: Sequences a forward sees; the configured ``train_micro_batch_size``, else ``gbs``.
            timer: Taken and not used.
            check_dim_skip_keys: Taken and not used.

        Returns:
            ``loss`` and ``grad_norm``, one entry a global batch, and ``all_mb_metrics``: name to a list over micro-batches,
            with ``lr``, ``global_valid_seqs`` and ``global_valid_toks`` added.

        Raises:
            ModeError: What it needs is away; the message names the missing legacy call and the scope.
            OpenStepError: A train step is open, whose gradients legacy zeroed without a word.
            RLSessionError: As ``rl_session.Policy.train``.
        """
        del timer, check_dim_skip_keys
        gbs = gbs or self._config.train_global_batch_size
        mbs = mbs or self._config.train_micro_batch_size
        gate = "train(eval_mode=True)" if eval_mode else "train"
        with self._computing("train", gate, "eval" if eval_mode else "train"):
            num = max(1, len(data["input_ids"]) // gbs) if gbs and "input_ids" in data else 1
            rate = self._control.ask("learning_rate")
            loss = LegacyLoss(loss_fn, num)
            result = self._policy.train(data, loss, gbs=gbs, mbs=mbs, eval_mode=eval_mode)
        return _as_legacy(result, rate)

    def _infer(self, method: str, call: Callable[[], Mapping[str, Any]]) -> BatchedDataDict:
        """Make an inference call, which leaves the module in eval."""
        with self._computing(method, method, "eval"):
            return BatchedDataDict(call())

    # -- the split train step --------------------------------------------------------------------------------------------

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """Open a train step that accumulates gradients over chunks until it is finished or aborted.

        Contract: needs weights and gradients on the device, and no open step; leaves the module in train. Offered on both
        backends (legacy had it on Megatron alone). Scope: ``with policy.training_mode(): step = policy.begin_step()``.
        Guide: docs/legacy-api.md.

        Args:
            loss_fn: The loss of every chunk.
            gbs: Taken and not used: gradients are divided by what the chunks count.
            mbs: Sequences a forward sees; the configured ``train_micro_batch_size``, else the whole chunk.

        Raises:
            OpenStepError: A step is open already.
            ModeError: What it needs is away; the message names the missing legacy call and the scope.
        """
        del gbs
        with self._computing("begin_train_step", "begin_step", "train"):
            step: Step = self._policy.begin_step()
            _plans[step] = _Plan(LegacyLoss(loss_fn, 1, is_counting=True), mbs or self._config.train_micro_batch_size)

    def train_microbatches(self, data: Batch) -> None:
        """Add the gradients of a chunk to the open step.

        Contract: needs an open step, and weights and gradients on the device; the train flag stays as it is. The chunk is
        computed in train mode even where ``get_logprobs`` has left the module in eval, which legacy did not. Scope:
        ``step.forward_backward(chunk, loss_fn)``. Guide: docs/legacy-api.md.

        Args:
            data: The chunk.

        Raises:
            StepClosedError: No step is open.
            ModeError: What it needs is away; the message names the missing legacy call and the scope.
            RLSessionError: As ``Step.forward_backward``.
        """
        step, plan = self._open("train_microbatches")
        with self._computing("train_microbatches", "forward_backward", None):
            was = self._hold("train")
            try:
                step.forward_backward(data, plan.loss, mbs=plan.mbs)
                plan.num_chunks += 1
            finally:
                self._hold(was)

    def _hold(self, mode: str) -> str:
        if self._control.frames:
            return mode
        was: str = self._control.ask("hold_mode", mode)
        return was

    def finish_train_step(self) -> dict[str, Any]:
        """Divide the gradients by what the chunks counted, and make the optimizer step.

        Contract: needs an open step, and weights, gradients and optimizer state on the device; the train flag stays.
        Scope: ``step.commit()``. Guide: docs/legacy-api.md.

        Returns:
            As :meth:`train`.

        Raises:
            StepClosedError: No step is open.
            ArgumentError: No chunk was given to it; it stays open.
            ModeError: What it needs is away; the message names the missing legacy call and the scope.
            RLSessionError: As ``Step.commit``.
        """
        step, plan = self._open("finish_train_step")
        if not plan.num_chunks:
            facts = (*self._control.explain()[1], "no chunk was given to it: there is nothing to divide by")
            remedy = f"{self._kind}.train_microbatches(data)  # before; or {self._kind}.abort_train_step()"
            raise ArgumentError(f"{self._control.label}: finish_train_step() of an empty train step", facts, remedy)
        with self._computing("finish_train_step", "commit", None):
            rate = self._control.ask("learning_rate")
            return _as_legacy(_with_whole_counts(step.commit()), rate)

    def abort_train_step(self) -> None:
        """Discard the open step; nothing happens where none is open.

        Contract: gradients go, everything else stays. Scope: ``step.abort()``. Guide: docs/legacy-api.md.

        Raises:
            OwnershipError: Another thread has a scope open.
        """
        step = self._policy.open_step
        if step is not None:
            with self._computing("abort_train_step", "", None):
                step.abort()

    def _open(self, call: str) -> tuple[Step, _Plan]:
        step = self._policy.open_step
        plan = _plans.get(step) if step is not None else None
        if step is None or plan is None:
            raise StepClosedError(
                f"{self._control.label}: {call}() and no train step is open",
                self._control.explain()[1],
                f"{self._kind}.begin_train_step(loss_fn)  # before; or step = {self._kind}.begin_step()",
            )
        return step, plan

    # -- the rest --------------------------------------------------------------------------------------------------------

    def _save(self, weights_path: Any, optimizer_path: Any) -> None:
        self._policy.save_checkpoint(weights_path)
        if optimizer_path is not None and str(optimizer_path) != str(weights_path):
            _point(optimizer_path, weights_path)

    def shutdown(self) -> bool:
        """Give the model back and refuse everything from now on; True.

        Raises:
            RLSessionError: It could not be given back.
        """
        self._policy.close()
        return True


def _rebuild(kind: type[LegacyTrainer], policy: TrainableModel, config: LegacyConfig) -> LegacyTrainer:
    return kind(policy, backend=config.backend, config=config)


def _with_whole_counts(result: dict[str, Any]) -> dict[str, Any]:
    """Of a step that counted itself, every micro-batch reports the counts of the whole step, as those of ``train`` do."""
    metrics = dict(result["metrics"])
    for name in ("global_valid_seqs", "global_valid_toks"):
        if name in metrics:
            metrics[name] = [math.fsum(metrics[name])] * len(metrics[name])
    return {**result, "metrics": metrics}


def _as_legacy(result: Mapping[str, Any], rate: float | None) -> dict[str, Any]:
    """A result of the library in the shape that legacy loops read."""
    metrics = {name: value if isinstance(value, list) else [value] for name, value in result["metrics"].items()}
    if rate is not None and "global_valid_seqs" in metrics:
        metrics["lr"] = [rate] * len(metrics["global_valid_seqs"])
    return {"loss": result["loss"], "grad_norm": result["grad_norm"], "all_mb_metrics": metrics}


def _point(optimizer_path: Any, weights_path: Any) -> None:
    """Say where the optimizer state is: one checkpoint holds weights and optimizer."""
    folder = Path(optimizer_path)
    folder.mkdir(parents=True, exist_ok=True)
    text = f"The optimizer state is part of the checkpoint at:\n{Path(weights_path).resolve()}\n"
    (folder / "READ_ME.txt").write_text(text, encoding="utf-8")
