"""What a legacy policy and a legacy value have in common beside their lifecycle: train calls, and what calls leave behind.

A compute call is the library's own, after its needs were checked by where bytes *are*: legacy code may compute in any state
in which the bytes happen to be there. Knows nothing of engines.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import attrs

from rl_session.audit import events
from rl_session.driver.callsite import call_site, speaking
from rl_session.errors import (
    ArgumentError,
    ModeError,
    OpenStepError,
    StepClosedError,
    UsageError,
)
from rl_session.lifecycle import CALL_NEEDS, Component, Mode, may_call, scope_to_write
from rl_session.scope import Step
from rl_session_migrate.shim.batch import BatchedDataDict
from rl_session_migrate.shim.effects import AS_IT_IS, frees_gradients, still_freed
from rl_session_migrate.shim.handle import LegacyHandle
from rl_session_migrate.shim.loss import LegacyLoss
from rl_session_migrate.shim.notice import warn_once

__all__ = ["LegacyTrainer"]

Batch = Mapping[str, Any]

_STEPS = "with {0}.training_mode(): ... and in it with {0}.begin_step() as step: step.forward_backward(chunk, loss_fn)"
_EVALUATES = "train(eval_mode=True)"
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


class LegacyTrainer(LegacyHandle):
    """The part of the legacy API that policies and values share. Made as one of the two, not by itself."""

    # -- computing -----------------------------------------------------------------------------------------------------

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
        """Refuse a call whose bytes are away, or whose gradient buffer legacy had freed."""
        away = self._missing(gate)
        if not away:
            return
        control = self._control
        needs = self._needs(gate)
        control.record(events.GuardRejected(method=call, mode=control.mode.value, needs=[n.value for n in needs]))
        is_training = Component.GRADS in needs
        missing = "prepare_for_training()" if is_training else f"{self._infers}()"
        scope = "training_mode" if is_training else scope_to_write(gate, self._kind)
        they_are = "they are" if len(away) > 1 or away[0].endswith("s") else "it is"
        facts = [*control.explain()[1], f"the legacy call that brings them in was not made: {missing}"]
        if self._is_freed() and is_training:
            facts.append("Megatron's gradient buffer was freed: without that call train() writes into 0 bytes")
        raise ModeError(
            f"{control.label}: {call}() at {site} needs {', '.join(away).upper()} on the device, but {they_are} away",
            tuple(facts),
            f"{self._kind}.{missing}  # before; or, in scopes: with {self._kind}.{scope}(): {self._kind}.{call}(...)",
        )

    def _needs(self, gate: str) -> tuple[Component, ...]:
        needs = _NEEDS.get(gate, CALL_NEEDS.get(gate, ()))
        # Megatron zeroes the gradient buffer for an evaluation too.
        is_megatron_evaluation = gate == _EVALUATES and self._config.backend == "megatron"
        return (*needs, Component.GRADS) if is_megatron_evaluation else needs

    def _missing(self, gate: str) -> list[str]:
        needs = self._needs(gate)
        away = self._is_away(*needs)
        if Component.GRADS in needs and Component.GRADS not in away and self._is_freed():
            away.append(Component.GRADS.value)
        return away

    def _is_freed(self) -> bool:
        """Whether legacy would have no gradient buffer now; an open step's gradients are kept, and with them the buffer."""
        return self._policy.open_step is None and frees_gradients(self._control.resting_cells)

    def _allow(self, call: str, gate: str, site: str) -> None:
        """Go to a mode that has the call, moving nothing: legacy computed wherever the bytes were."""
        if not gate or may_call(self._control.mode, gate):
            return
        mode = _MODE_OF_CALL[scope_to_write(gate, self._kind)]
        trains = mode is Mode.TRAINING  # only with a live buffer
        cells = AS_IT_IS if trains else still_freed(AS_IT_IS, self._control.resting_cells)
        self._control.switch(mode, f"{call}()", site, cells=cells)

    def _refuse_open_step(self, call: str) -> None:
        """Refuse to begin or train while a legacy step is open, in the words of the calls that end it.

        Raises:
            OpenStepError: One is.
        """
        if self._policy.open_step is None:
            return
        control, kind = self._control, self._kind
        control.record(events.GuardRejected(method=call, mode=control.mode.value, needs=[]))
        raise OpenStepError(
            f"{control.label}: {call}() at {call_site()} while a train step is open",
            (*control.explain()[1], "legacy zeroed its gradients here, or raised RuntimeError"),
            f"{kind}.finish_train_step()  # or {kind}.abort_train_step(); in scopes: step.commit() or step.abort()",
        )

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
        brings them; on Megatron, with ``eval_mode`` too, not after a call that freed the gradient buffer
        (``prepare_for_lp_inference()``, every offload). Leaves the module in train, or in eval with ``eval_mode``; gradients are
        gone afterwards (a flat buffer is zero). Scope: ``with policy.training_mode(): policy.train(batch, loss_fn)``. Guide:
        docs/legacy-api.md.

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
        gate = _EVALUATES if eval_mode else "train"
        with self._computing("train", gate, "eval" if eval_mode else "train"):
            if not eval_mode:
                self._refuse_open_step("train")
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
        warn_once(f"{self._kind}.begin_train_step(loss_fn)", _STEPS.format(self._kind))
        with self._computing("begin_train_step", "begin_step", "train"):
            self._refuse_open_step("begin_train_step")
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
        warn_once(f"{self._kind}.train_microbatches(chunk)", "step.forward_backward(chunk, loss_fn)")
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
        warn_once(
            f"{self._kind}.finish_train_step()", "step.commit(), or the end of with policy.begin_step() as step: ..."
        )
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
        warn_once(
            f"{self._kind}.abort_train_step()", "step.abort(), which with policy.begin_step() does after an exception"
        )
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

        Contract: the last call of a loop. Scope: ``policy.close()``, or the end of ``with rs.Session(...)``. Guide:
        docs/legacy-api.md.

        Raises:
            RLSessionError: It could not be given back.
        """
        self._policy.close()
        return True


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
