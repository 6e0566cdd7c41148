"""Training on one rank: gradients that nobody may lose, and optimizer steps that can be undone.

Owns the open train step. Knows what is live, what a step consumed, and how to put back what a failed step wrote; knows
nothing of modes and placements beyond "on the device or away".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_session.errors import (
    FaultedError,
    OffloadedAccessError,
    OpenStepError,
    OptimizerStepError,
    StepClosedError,
    UnsupportedError,
)
from rl_session.lifecycle import Component, Tier
from rl_session.offload.engine import Engine
from rl_session.offload.tensors import local_nbytes, plain_tensors
from rl_session.workers.compute import Forward
from rl_session.workers.gradients import GradientSync
from rl_session.workers.replies import CallResult, Changed
from rl_session.workers.shares import own_share
from rl_session.workers.spec import WorkerSpec
from rl_session.workers.state import OptimizerStructure
from rl_session.workers.train_step import OptimizerStepFailed, TrainStep, evaluate, train

__all__ = ["Trainer"]

_WRITTEN_BY_A_STEP = (Component.PARAMS, Component.OPTIMIZER)
_WRITTEN_BY_A_BACKWARD = (Component.PARAMS, Component.BUFFERS, Component.GRADS)
_WRITTEN_BY_TRAINING = (*_WRITTEN_BY_A_BACKWARD, Component.OPTIMIZER)


class Trainer:
    """Trains the model of one rank.

    Args:
        spec: What the rank is made of.
        engine: Its engine.
        forward: How its model is called.
    """

    def __init__(self, spec: WorkerSpec, engine: Engine, forward: Forward) -> None:
        self.spec = spec
        self.engine = engine
        self.forward = forward
        self.step: TrainStep | None = None
        """The open train step, if one is open."""
        self.is_torn = False
        """Whether a failed optimizer step left parameters part old, part new."""
        self._steps_running = 0
        self._was_intact = False
        """Whether the host copies were those of entry when the last optimizer step began."""
        self.discards = False
        """Whether live gradients may be zeroed without asking."""
        self.ranks = forward.ranks
        self._sync = GradientSync(spec.module, engine.shards, forward.ranks)
        self._sync.check(spec.label)

    def train(self, batch: Any, loss_fn: Any, gbs: int | None, mbs: int | None, eval_mode: bool) -> CallResult:
        """Optimizer steps over a batch, or its loss alone with ``eval_mode``.

        Raises:
            OpenStepError: Gradients are live that no step has consumed.
            OptimizerStepError: ``optimizer.step()`` failed and was undone.
            FaultedError: It failed and could not be undone.
        """
        call = self.forward.named("train()")
        if eval_mode:
            with self._together(call), self._computing():
                return CallResult(evaluate(self.forward, batch, loss_fn, gbs=gbs, mbs=mbs))
        with self._together(call):
            own_share(batch, self.ranks.count, call, gbs=gbs if self.ranks.count > 1 else None)
            optimizer = self._ready_to_train("train()")
        with self.accounted() as changed, self._undoing_failed_steps():
            try:
                with self._computing():
                    value = train(
                        self.forward,
                        optimizer,
                        batch,
                        loss_fn,
                        gbs=gbs,
                        mbs=mbs,
                        scheduler=self.spec.scheduler,
                        max_grad_norm=self.spec.max_grad_norm,
                        masters=self.spec.masters,
                        sync=self._sync,
                    )
            finally:
                self.discard_gradients()
        return CallResult(value, tuple(changed))

    def _together(self, call: str) -> AbstractContextManager[Any]:
        """What fails in the block on one rank fails on all; no rank goes on to compute alone."""
        return self.ranks.together(call)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """After a forward or backward FSDP2 is left as it was found: sharded, and ready for the next one after an error."""
        try:
            yield
        except BaseException:
            self.engine.shards.reset()
            raise
        self.engine.shards.reshard()

    def _ready_to_train(self, call: str) -> torch.optim.Optimizer:
        """The optimizer, once nothing is in the way of gradients of our own."""
        optimizer = self._need_optimizer(call)
        self.refuse_live_gradients(call)
        self._need_on_device(call)
        self._refuse_hidden_gradients(call)
        return optimizer

    def _refuse_hidden_gradients(self, call: str) -> None:
        """Refuse to make gradients where no scan, no norm and no optimizer sees them.

        Raises:
            UnsupportedError: ``set_requires_gradient_sync(False)`` is in effect.
        """
        if self.engine.shards.hides_gradients:
            label, facts = self.engine.explain()
            raise UnsupportedError(
                f"{label}: {call} while FSDP keeps gradients unreduced",
                (*facts, "set_requires_gradient_sync(False) or set_requires_all_reduce(False) is in effect"),
                "model.set_requires_gradient_sync(True)  # micro-batches are accumulated reduced",
            )

    def _need_optimizer(self, call: str) -> torch.optim.Optimizer:
        if self.spec.optimizer is None:
            label, facts = self.engine.explain()
            raise UnsupportedError(
                f"{label}: {call} needs an optimizer, and there is none", facts, "attach(model, optimizer)"
            )
        return self.spec.optimizer

    def refuse_live_gradients(self, call: str) -> None:
        """Refuse a call that would zero gradients of an open step or of a backward outside the library.

        Raises:
            OpenStepError: There are some, and they may not be discarded.
        """
        label, facts = self.engine.explain()
        if self.step is not None:
            raise OpenStepError(
                f"{label}: {call} while a train step is open",
                facts,
                self.way_to_end_gradients(),
            )
        hidden = self.engine.shards.hidden_gradients()
        if hidden and not self.discards:
            raise OpenStepError(
                f"{label}: {call} would lose gradients that FSDP has not reduced yet",
                (*facts, f"{len(hidden)} under set_requires_gradient_sync(False), the first: {hidden[0][0]}"),
                "model.set_requires_gradient_sync(True); loss.backward(); optimizer.step()",
            )
        live = self.engine.refresh().live_gradients
        # Zeros left by zero_grad(set_to_none=False) are nobody's work; what is away cannot be looked at and counts.
        away = bool(live) and bool(self.engine.away((Component.GRADS,)))
        if (away or any(bool(torch.any(gradient)) for gradient in live)) and not self.discards:
            raise OpenStepError(
                f"{label}: {call} would zero gradients that no optimizer step has consumed",
                (*facts, f"live gradients: {len(live)}, made by a loss.backward() outside this library"),
                f'{self.way_to_end_gradients()}, or OffloadConfig(live_gradients="discard")',
            )
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Drop every gradient, wherever its bytes are; a flat buffer behind live views is zeroed, or freed in place."""
        if self.engine.away((Component.GRADS,)):
            snapshot = self.engine.refresh()
            self.engine.move(snapshot, snapshot.placement.evolve(**{Component.GRADS: Tier.NONE}))
            return
        if self.engine.shards.hidden_gradients():
            self.engine.shards.reset()
        to_none = not self._sync.keeps_buckets
        if self.spec.optimizer is not None:
            self.spec.optimizer.zero_grad(set_to_none=to_none)
        self.spec.module.zero_grad(set_to_none=to_none)
        for _, master in self.spec.masters:
            master.grad = None
        left = [inner for gradient in self.consumed_gradients() for inner in plain_tensors(gradient)]
        with torch.inference_mode(mode=False), torch.no_grad():
            for gradient in left:
                gradient.zero_()
        self.engine.stamps.consume(left)

    def _need_on_device(self, call: str, components: Sequence[Component] = _WRITTEN_BY_TRAINING) -> None:
        """Refuse to train while something it writes is away: RESIDENT leaves gradients and optimizer where they were."""
        away = self.engine.away(components)
        if away:
            label, facts = self.engine.explain()
            names = ", ".join(name.upper() for name in away)
            owner = "policy" if self.step is None else "step"
            raise OffloadedAccessError(
                f"{label}: {call} needs {names} on the device, but they are away",
                facts,
                f"with policy.training_mode(): {owner}.{call.replace('()', '(...)')}",
            )

    @contextmanager
    def accounted(self) -> Iterator[list[Changed]]:
        """Collect which components' bytes appeared or vanished in the block; an error carries them as ``rl_changed``."""
        before = {name: _present(tiers) for name, tiers in self.engine.nbytes.items()}
        changed: list[Changed] = []
        try:
            yield changed
        except BaseException as error:
            error.rl_changed = self._changed_since(before)  # type: ignore[attr-defined]
            raise
        changed += self._changed_since(before)

    def _changed_since(self, before: Mapping[str, int]) -> list[Changed]:
        after = self.engine.refresh()
        return [
            Changed(name, after.placement[name], nbytes)
            for name, tiers in after.nbytes.items()
            for nbytes in (_present(tiers),)
            if nbytes != before.get(name, 0)
        ]

    @contextmanager
    def _undoing_failed_steps(self) -> Iterator[None]:
        """If ``optimizer.step()`` fails half-way, restore what it wrote from the host copies of entry."""
        structure = OptimizerStructure.of(self.spec.optimizer) if self.engine.snapshots_intact else None
        self._steps_running = 0
        try:
            yield
        except OptimizerStepFailed as failure:
            self._undo_step(structure, failure.cause)

    def _undo_step(self, structure: OptimizerStructure | None, cause: BaseException) -> None:
        label, facts = self.engine.explain()
        text = f"{type(cause).__name__}: {cause}"
        if self._can_undo(structure) and self._restores(cause):
            if not isinstance(cause, Exception):  # Ctrl-C stays what it is
                cause.add_note(f"{label}: optimizer.step() was undone: all is as it was before the step")
                raise cause
            raise OptimizerStepError(
                f"{label}: optimizer.step() failed half-way",
                (*facts, "parameters and optimizer state were restored from the host copies made before the step"),
                "the same call again, once the cause is gone",
                text,
            ) from cause
        self.is_torn = True
        raise FaultedError(
            f"{label}: optimizer.step() failed half-way, and there is no host copy to restore from",
            (*facts, "parameters and optimizer state may be part old, part new"),
            "policy.load_checkpoint(path)  # or policy.recover(), where a checkpoint was saved or loaded before",
            text,
        ) from cause

    def _restores(self, cause: BaseException) -> bool:
        """Write the host copies of entry back; whether that went well."""
        try:
            return self.engine.restore_snapshot(_WRITTEN_BY_A_STEP)
        except Exception as failure:
            cause.add_note(f"and while writing the host copies back: {type(failure).__name__}: {failure}")
            return False

    def _can_undo(self, structure: OptimizerStructure | None) -> bool:
        """Whether every rank has the host copies of entry; a step that only some can undo is undone on none."""
        can = False
        if structure is not None and self._was_intact:
            self.engine.snapshots_intact = True  # a step that calls super().step() and then fails was no step
            structure.put_back()
            can = self.ranks.count == 1 or self.engine.has_snapshot(_WRITTEN_BY_A_STEP)
        return all(bool(each) for (each,) in self.ranks.gather([float(can)]))

    def begin_step(self, global_valid_seqs: float | None, global_valid_tokens: float | None) -> CallResult:
        """Open a train step.

        Raises:
            OpenStepError: One is open, or gradients of somebody else's backward are live.
        """
        with self._together(self.forward.named("begin_step()")):
            optimizer = self._ready_to_train("begin_step()")
        with self.accounted() as changed:
            self.step = TrainStep(
                self.forward,
                optimizer,
                scheduler=self.spec.scheduler,
                max_grad_norm=self.spec.max_grad_norm,
                masters=self.spec.masters,
                global_valid_seqs=global_valid_seqs,
                global_valid_tokens=global_valid_tokens,
                sync=self._sync,
            )
        return CallResult(None, tuple(changed))

    def _open_step(self, call: str) -> TrainStep:
        if self.step is None:
            label, facts = self.engine.explain()
            raise StepClosedError(f"{label}: {call} on a step that is not open", facts, "policy.begin_step()")
        return self.step

    def forward_backward(self, chunk: Any, loss_fn: Any, mbs: int | None) -> CallResult:
        """Add the gradients of a chunk to the open step."""
        call = self.forward.named("forward_backward()")
        with self._together(call):
            step = self._open_step("forward_backward()")
            own_share(chunk, self.ranks.count, call)
            self._need_on_device("forward_backward()", _WRITTEN_BY_A_BACKWARD)
            self._refuse_hidden_gradients("forward_backward()")
        with self.accounted() as changed:
            try:
                with self._computing():
                    step.forward_backward(chunk, loss_fn, mbs)
            except BaseException:
                if not step.is_open:  # part of the chunk may be in the gradients: the step cannot go on
                    self.end_step()
                raise
        return CallResult(None, tuple(changed))

    def commit(self) -> CallResult:
        """Finish the open step with one optimizer step."""
        with self._together(self.forward.named("commit()")):
            step = self._open_step("commit()")
            self._need_on_device("commit()")
        with self.accounted() as changed, self._undoing_failed_steps():
            try:
                value = step.commit()
            finally:
                self.end_step()
        return CallResult(value, tuple(changed))

    def end_step(self) -> None:
        """Close the open step, if one is open, and drop every gradient."""
        self.step = None
        self.discard_gradients()

    def abort(self) -> CallResult:
        """Discard the open step: gradients go, parameters and optimizer stay as they are."""
        self._open_step("abort()")
        with self.accounted() as changed:
            self.end_step()
        return CallResult(None, tuple(changed))

    def expected_bytes(self) -> tuple[int, int]:
        """Device memory that the next training step will make: gradients that are not there yet, and a first state.

        The first number is exact. The second is an estimate: before the first step the state is taken to be twice the
        trainable parameters, as Adam's is; afterwards it exists.
        """
        if (
            self.spec.optimizer is None or self.engine.shards.is_placed_by_fsdp
        ):  # FSDP's own offload makes them on the host
            return 0, 0
        trainable = [p for group in self.spec.optimizer.param_groups for p in group["params"] if p.requires_grad]
        nbytes: int = sum(local_nbytes(p) for p in trainable)
        missing: int = sum(local_nbytes(p) for p in trainable if p.grad is None)
        return missing, 0 if self.spec.optimizer.state else 2 * nbytes

    def step_begins(self) -> None:
        """An optimizer step begins; inside another one (``super().step()``) it is part of that."""
        if not self._steps_running:
            self._was_intact = self.engine.snapshots_intact
        self._steps_running += 1

    def step_ended(self) -> None:
        """An optimizer step ended well: the host copies are no longer those of the weights."""
        self._steps_running = max(0, self._steps_running - 1)
        self.engine.stamps.consume(self.consumed_gradients())
        self.engine.forget_snapshots()

    # -- gradients -----------------------------------------------------------------------------------------------

    def has_open_step(self) -> bool:
        """Whether a train step is open."""
        return self.step is not None

    def way_to_end_gradients(self) -> str:
        """What to write to be rid of live gradients."""
        if self.step is not None:
            return "policy.open_step.commit()  # or .abort()"
        return "optimizer.step()  # or optimizer.zero_grad(); model.zero_grad()"

    def consumed_gradients(self) -> Iterator[Tensor]:
        """The gradients that the optimizer could see: of its parameters, and of the parameters they are masters of."""
        groups = self.spec.optimizer.param_groups if self.spec.optimizer is not None else []
        parameters = [p for group in groups for p in group["params"]]
        for parameter in (*parameters, *(p for p, _ in self.spec.masters)):
            if parameter.grad is not None:
                yield parameter.grad
            for name, value in parameter.__dict__.items():
                if isinstance(value, Tensor) and "grad" in name:
                    yield value


def _present(tiers: Mapping[Tier, int]) -> int:
    """Bytes that exist: what was freed in place has none until it comes back."""
    return sum(nbytes for tier, nbytes in tiers.items() if tier is not Tier.NONE)
