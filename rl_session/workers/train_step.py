"""Gradients, and one optimizer step over them.

:class:`TrainStep` accumulates the gradients of any number of chunks and then steps once: :func:`train` uses it, and so
does a step that is held open across scopes. Works on a module whose bytes are on its device. Knows nothing of
placements or policies. With several ranks each call is made on all of them, with what each has of the batch (a
:class:`~rl_session.workers.shares.Share`); they take every decision together, and report the same.

Shape suffixes: b sequences of a micro-batch, S positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from rl_session.errors import ArgumentError, BatchError, NonFiniteError, RLSessionError, StepClosedError, WorldError
from rl_session.metrics import MetricSum
from rl_session.offload.tensors import plain_tensors
from rl_session.workers.batch import (
    Batch,
    counts,
    global_batches,
    micro_batches,
    positive,
    size,
    to_device,
)
from rl_session.workers.compute import Forward, grad_mode, module_mode
from rl_session.workers.gradients import GradientSync
from rl_session.workers.ranks import Ranks
from rl_session.workers.shares import Share, own_share

__all__ = ["LossFn", "Masters", "OptimizerStepFailed", "TrainResult", "TrainStep", "evaluate", "train"]

LossFn = Callable[[Tensor, Batch, Tensor, Tensor], tuple[Tensor, Mapping[str, Any]]]
TrainResult = dict[str, Any]
Masters = Sequence[tuple[Tensor, Tensor]]

_CLIP_EPSILON = 1e-6
"""That of ``torch.nn.utils.clip_grads_with_norm_``."""

_LOSS_REMEDY = "return loss, {'name': number}   (loss: a 0-dim tensor computed from the logits)"
_NON_FINITE_REMEDY = (
    "look for log(0), 0 / 0 or overflow in the loss; this step was aborted, the weights are as they were before it"
)


class OptimizerStepFailed(Exception):  # noqa: N818 (internal; named for what happened)
    """``optimizer.step()`` itself raised: parameters and optimizer state may be half new, half old.

    Attributes:
        cause: What was raised; it may be a KeyboardInterrupt.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


class TrainStep:
    """One optimizer step: gradients of any number of chunks, then :meth:`commit` or :meth:`abort`.

    With global counts each loss is normalised by them. Without, the loss gets counts of 1, and the commit divides
    gradients, the summed loss and the summed metrics (not means, minima and maxima) by what was counted meanwhile:
    tokens, or sequences when the loss has a ``loss_type`` that says "sequence".

    Args:
        forward: The model.
        optimizer: What steps.
        scheduler: Steps once with the commit.
        max_grad_norm: The norm gradients are clipped to; None for no clipping.
        masters: Pairs of a module's parameter and the float32 copy that the optimizer steps in its place.
        global_valid_seqs: Valid sequences of the whole step.
        global_valid_tokens: Valid tokens of the whole step. When only one count is given the other is NaN, so that a
            loss that uses it fails loudly.
        sync: How gradients of ranks become one; by default what the model and the forward's ranks ask for.
    """

    def __init__(
        self,
        forward: Forward,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        masters: Masters = (),
        global_valid_seqs: float | None = None,
        global_valid_tokens: float | None = None,
        sync: GradientSync | None = None,
    ) -> None:
        self.forward = forward
        self.sync = sync if sync is not None else GradientSync(forward.bare, ranks=forward.ranks)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm
        self.masters = masters
        self.metrics = MetricSum()
        self._given = global_valid_seqs is not None or global_valid_tokens is not None
        self._normalisers = _normalisers(global_valid_seqs, global_valid_tokens)
        self._loss_sum = 0.0
        self._counted = 0.0
        self._level: str | None = None
        self._num_chunks = 0
        self._state = "open"

    def __repr__(self) -> str:
        return f"TrainStep({self._state}, {self._num_chunks} chunks)"

    def forward_backward(self, chunk: Any, loss_fn: LossFn, mbs: int | None = None) -> None:
        """Add the gradients of a chunk.

        After an error of the loss, forward or backward the gradients are incomplete: the only thing left to do is
        :meth:`abort`. A wrong argument leaves the step open.

        Args:
            chunk: A batch.
            loss_fn: ``loss_fn(logits [b, S, V], batch, global_valid_seqs, global_valid_tokens) -> (loss, metrics)``;
                the counts are 0-dim float32 tensors.
            mbs: Sequences in one forward; None for all. The last micro-batch may be smaller.

        Raises:
            ArgumentError: The loss returned something else, or its level changed within the step.
            BatchError: The batch, or ``mbs``, is wrong.
            NonFiniteError: The loss is NaN or infinite; no backward was run on it.
            StepClosedError: The step was committed, aborted, or has failed before.
        """
        self._check_open("forward_backward()")
        call = self.forward.named("forward_backward()")
        with self.forward.ranks.together(call) as told:
            share = own_share(chunk, self.forward.ranks.count, call)
            self.forward.checked(share.batch, call)
            _check_callable(self.forward, loss_fn)
            parts = _parts_of(share, mbs)
            level = self._check_level(loss_fn)
            told.mine = [len(parts), *(counts(share.batch) if parts else (0.0, 0.0))]
        self._level = level
        self._counted += told.total(1 if level == "sequences" else 2)
        self._state = "failed"  # until all of it is in
        self._accumulate(share, parts, int(told.greatest()), loss_fn, call)
        self._num_chunks += 1
        self._state = "open"

    def _accumulate(self, share: Share, parts: list[Batch], num: int, loss_fn: LossFn, call: str) -> None:
        """Forward and backward of ``num`` micro-batches; after those of its own a rank runs fillers, which weigh nothing."""
        with grad_mode(enabled=True), module_mode(self.forward.module, "train"), self.sync.summing():
            for index in range(num):
                with self.forward.ranks.together(call):  # a backward that not all ranks make would never end
                    if index < len(parts):
                        root, value = self._loss(parts[index], loss_fn)
                        into = torch.full_like(root, self.sync.scale)
                    else:
                        root = self.forward.logits(to_device(share.filler, self.forward.home()))
                        value, into = 0.0, torch.zeros_like(root)
                torch.autograd.backward(root, into)
                self._loss_sum += value

    def _loss(self, micro: Batch, loss_fn: LossFn) -> tuple[Tensor, float]:
        return _loss_of(self.forward, micro, loss_fn, self._normalisers, self.metrics, differentiable=True)

    def commit(self, step_scheduler: bool = True) -> TrainResult:
        """Normalise, clip, step the optimizer and the scheduler, and drop the gradients.

        Args:
            step_scheduler: Whether the scheduler steps too.

        Returns:
            ``{"loss": [1], "grad_norm": [1], "metrics": {...}}``: float32 on the CPU; the norm is that before clipping.

        Raises:
            ArgumentError: No chunk was given.
            NonFiniteError: The gradient norm is NaN or infinite; nothing was stepped, the step is to be aborted.
            OptimizerStepFailed: The optimizer's own step raised.
            StepClosedError: The step was committed, aborted, or has failed before.
        """
        self._check_open("commit()")
        if not self._num_chunks:
            facts = ("no chunk was given to it",)
            raise ArgumentError(
                self.forward.named("commit() of an empty train step"), facts, "step.forward_backward(chunk, loss_fn)"
            )
        self._state = "failed"
        factor = 1.0 if self._given or not self._counted else 1.0 / self._counted
        loss = self._merge_reports() * factor
        with grad_mode(enabled=False):
            self._prepare_gradients(factor)
            grad_norm = self._clip()
        self._step_optimizer()
        self._drop_gradients()
        self._state = "committed"
        self.metrics = self.metrics.scaled(factor)
        if step_scheduler and self.scheduler is not None:
            with self.forward.ranks.together(self.forward.named("scheduler.step()")):
                self.scheduler.step()
        return _result([loss], [grad_norm], self.metrics)

    def _merge_reports(self) -> float:
        """Take in what the other ranks report: metrics, and their shares of the loss, which is returned."""
        ranks = self.forward.ranks
        if ranks.count == 1:
            return self._loss_sum
        self.metrics, loss = merged_reports(ranks, self.metrics, self._loss_sum)
        return loss

    def abort(self) -> None:
        """Discard every gradient; parameters and optimizer state stay as they are. Does nothing after a commit."""
        if self._state not in ("committed", "aborted"):
            self._drop_gradients()
            self._state = "aborted"

    @property
    def is_open(self) -> bool:
        """Whether it can go on: neither committed, aborted nor failed half-way."""
        return self._state == "open"

    def _check_open(self, call: str) -> None:
        if self._state == "open":
            return
        if self._state == "failed":
            facts = ("an earlier call on it failed: its gradients are incomplete",)
            raise StepClosedError(
                self.forward.named(f"{call} on a failed train step"), facts, "step.abort(), then begin a new step"
            )
        facts = (f"it was {self._state} before",)
        raise StepClosedError(self.forward.named(f"{call} on a closed train step"), facts, "step = policy.begin_step()")

    def _check_level(self, loss_fn: LossFn) -> str | None:
        """What the chunks of this step are normalised by; None where the counts were given."""
        if self._given:
            return None
        level = _loss_level(loss_fn)
        if self._level not in (None, level):
            facts = (f"a chunk before was normalised by {self._level}, this one is by {level}",)
            remedy = "one loss_type in a step, or begin_step(global_valid_seqs=..., global_valid_tokens=...)"
            raise ArgumentError(
                self.forward.named("forward_backward(): the losses of a step differ in level"), facts, remedy
            )
        return level

    def _prepare_gradients(self, factor: float) -> None:
        self.sync.reduce()
        for parameter, master in self.masters:
            grad, parameter.grad = parameter.grad, None  # at once, so that not all are there twice
            master.grad = None if grad is None else grad.detach().to(master.dtype)
        if factor != 1.0:
            self.sync.scale_by((p.grad for p in self._stepped() if p.grad is not None), factor)

    def _clip(self) -> float:
        stepped = list(self._stepped())
        norm = self.sync.total_norm([p.grad for p in stepped if p.grad is not None])
        with self.forward.ranks.together(self.forward.named("commit()")) as told:
            told.mine = [float(norm)]
            if not math.isfinite(told.mine[0]):
                facts = (f"the gradient norm is {told.mine[0]}", *self._bad_gradients())
                raise NonFiniteError(
                    self.forward.named("the gradients of a train step are not finite"), facts, _NON_FINITE_REMEDY
                )
        value = told.rows[0][0]
        if self.max_grad_norm is not None and self.forward.ranks.count == 1:
            torch.nn.utils.clip_grads_with_norm_(stepped, self.max_grad_norm, norm)
        elif (
            self.max_grad_norm is not None
        ):  # by the number of the first rank, as the same operations give it everywhere
            total = torch.full_like(norm, value)
            factor = torch.clamp(self.max_grad_norm / (total + _CLIP_EPSILON), max=1.0)
            self.sync.scale_by((p.grad for p in stepped if p.grad is not None), factor)
        return value

    def _bad_gradients(self) -> tuple[str, ...]:
        masters = {id(master): parameter for parameter, master in self.masters}
        names = {id(parameter): name for name, parameter in self.forward.module.named_parameters()}
        bad = [p for p in self._stepped() if p.grad is not None and not _is_finite(p.grad)]
        if not bad:
            where = " on this rank" if self.forward.ranks.count > 1 else ""
            return (f"each gradient is finite{where}; their norm overflows",)
        first = names.get(id(masters.get(id(bad[0]), bad[0])), f"a parameter of shape {list(bad[0].shape)}")
        return (f"{len(bad)} gradients hold NaN or infinity, the first is that of {first}",)

    def _step_optimizer(self) -> None:
        failure: BaseException | None = None
        try:
            # State that a first step makes under the caller's inference_mode could not be updated by the next one.
            with torch.inference_mode(mode=False):
                self.sync.shards.reshard()  # what is gathered would be stale afterwards
                self.optimizer.step()
                with torch.no_grad():
                    for parameter, master in self.masters:
                        parameter.copy_(master)
        except BaseException as error:
            failure = error
        if any(failed for (failed,) in self.forward.ranks.gather([float(failure is not None)])):
            raise OptimizerStepFailed(failure or self._failed_elsewhere()) from failure

    def _failed_elsewhere(self) -> WorldError:
        return WorldError(
            self.forward.named("optimizer.step() failed on another rank"), (), "the error of that rank has the cause"
        )

    def _drop_gradients(self) -> None:
        to_none = not self.sync.keeps_buckets
        self.optimizer.zero_grad(set_to_none=to_none)
        self.forward.module.zero_grad(set_to_none=to_none)
        for parameter, master in self.masters:
            parameter.grad = master.grad = None

    def _stepped(self) -> Iterator[Tensor]:
        """The parameters that the optimizer steps, masters included."""
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])


def train(
    forward: Forward,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss_fn: LossFn,
    *,
    gbs: int | None = None,
    mbs: int | None = None,
    scheduler: Any = None,
    max_grad_norm: float | None = None,
    masters: Masters = (),
    metrics: MetricSum | None = None,
    make_step: Callable[..., TrainStep] = TrainStep,
    sync: GradientSync | None = None,
) -> TrainResult:
    """Make ``B / gbs`` optimizer steps and one scheduler step.

    A step that fails is aborted; the steps before it stand, and a note on the error says how many there were.

    Args:
        forward: The model.
        optimizer: What steps.
        batch: The batch.
        loss_fn: See :meth:`TrainStep.forward_backward`; it gets the counts of its global batch.
        gbs: Sequences in one optimizer step; None for all. B has to be a multiple of it.
        mbs: Sequences in one forward; None for all of a step. ``gbs`` has to be a multiple of it.
        scheduler: Steps once, after the last optimizer step.
        max_grad_norm: The norm gradients are clipped to; None for no clipping.
        masters: Pairs of a module's parameter and the float32 copy that the optimizer steps in its place.
        metrics: Where to sum metrics up, for a caller that merges ranks.
        make_step: What makes a step, called as :class:`TrainStep` is.
        sync: As for :class:`TrainStep`.

    Returns:
        ``{"loss": [num_steps], "grad_norm": [num_steps], "metrics": {...}}``, float32 on the CPU.

    Raises:
        ArgumentError: The loss returned something else than a scalar with a gradient and metrics.
        BatchError: The batch is wrong, or cannot be cut evenly.
        NonFiniteError: A loss or a gradient norm is NaN or infinite.
        OptimizerStepFailed: The optimizer's own step raised.
    """
    metrics = MetricSum() if metrics is None else metrics
    losses: list[float] = []
    norms: list[float] = []
    steps = _steps_of(forward, batch, gbs, mbs, forward.named("train()"))
    for index, part in enumerate(steps):
        step = make_step(
            forward,
            optimizer,
            scheduler=scheduler,
            max_grad_norm=max_grad_norm,
            masters=masters,
            global_valid_seqs=part.valid_seqs,
            global_valid_tokens=part.valid_tokens,
            sync=sync,
        )
        with _aborting(step, index, len(steps)):
            step.forward_backward(part.share, loss_fn, mbs)
            result = step.commit(step_scheduler=index == len(steps) - 1)
        losses += result["loss"].tolist()
        norms += result["grad_norm"].tolist()
        metrics.merge(step.metrics)
    return _result(losses, norms, metrics)


def evaluate(
    forward: Forward,
    batch: Any,
    loss_fn: LossFn,
    gbs: int | None = None,
    mbs: int | None = None,
    *,
    metrics: MetricSum | None = None,
) -> TrainResult:
    """The loss and metrics that :func:`train` would report, in eval and without gradients.

    Args:
        forward: The model.
        batch: The batch.
        loss_fn: As for :func:`train`; its loss needs no gradient.
        gbs: As for :func:`train`.
        mbs: As for :func:`train`.
        metrics: Where to sum metrics up, for a caller that merges ranks.

    Returns:
        As :func:`train`, with a ``grad_norm`` of zeros.

    Raises:
        ArgumentError: The loss returned something else than a scalar and metrics.
        BatchError: The batch is wrong, or cannot be cut evenly.
        NonFiniteError: A loss is NaN or infinite.
    """
    call = forward.named("train(eval_mode=True)")
    metrics = MetricSum() if metrics is None else metrics
    _check_callable(forward, loss_fn)
    losses: list[float] = []
    for part in _steps_of(forward, batch, gbs, mbs, call):
        own, loss = merged_reports(forward.ranks, *_evaluated(forward, part, loss_fn, mbs, call))
        metrics.merge(own)
        losses.append(loss)
    return _result(losses, [0.0] * len(losses), metrics)


def _evaluated(forward: Forward, part: _Step, loss_fn: LossFn, mbs: int | None, call: str) -> tuple[MetricSum, float]:
    """This rank's metrics and loss of one step."""
    normalisers = _normalisers(part.valid_seqs, part.valid_tokens)
    metrics = MetricSum()
    values: list[float] = []
    parts = _parts_of(part.share, mbs)
    longest = forward.ranks.greatest(len(parts))
    with forward.ranks.together(call), grad_mode(enabled=False), module_mode(forward.module, "eval"):
        values += [_loss_of(forward, micro, loss_fn, normalisers, metrics, differentiable=False)[1] for micro in parts]
        for _ in range(longest - len(parts)):
            forward.logits(to_device(part.share.filler, forward.home()))
    return metrics, math.fsum(values)


def merged_reports(ranks: Ranks, metrics: MetricSum, loss: float) -> tuple[MetricSum, float]:
    """Metrics and loss over all ranks, added in rank order: the same on each.

    Raises:
        ArgumentError: Ranks mark a metric differently.
    """
    if ranks.count == 1:
        return metrics, loss
    metrics.settle()
    reports = ranks.gather_objects((metrics, loss))
    merged = MetricSum()
    for other, _ in reports:
        merged.merge(other)
    return merged, sum(value for _, value in reports)


@attrs.frozen
class _Step:
    """What a rank has of one optimizer step, and the counts of the whole step."""

    share: Share
    valid_seqs: float
    valid_tokens: float


def _steps_of(forward: Forward, batch: Any, gbs: int | None, mbs: int | None, call: str) -> list[_Step]:
    """Cut what this rank has into optimizer steps; counts are summed over ranks, as float64."""
    ranks = forward.ranks
    with ranks.together(call) as told:
        if ranks.count == 1 and not isinstance(batch, Share):
            parts = global_batches(forward.checked(batch, call), gbs, mbs, call)
            shares = [Share(part, (size(part),)) for part in parts]
        else:
            whole = own_share(batch, ranks.count, call, gbs=gbs)
            forward.checked(whole.batch, call)
            shares = [Share(whole.of_step(index) or whole.filler, (num,)) for index, num in enumerate(whole.steps)]
            if mbs is not None:
                positive("mbs", mbs)
        told.mine = [len(shares)]
    if len({row[0] for row in told.rows}) > 1:
        facts = tuple(f"rank {rank}: {int(row[0])} optimizer steps" for rank, row in enumerate(told.rows))
        raise BatchError(f"{call}: ranks have batches of different lengths", facts, "as many rows on each rank")
    own = [counts(share.batch) if share.num_rows else (0.0, 0.0) for share in shares]
    rows = ranks.gather([count for pair in own for count in pair])
    totals = [sum(column) for column in zip(*rows, strict=True)]
    return [_Step(share, *totals[2 * index : 2 * index + 2]) for index, share in enumerate(shares)]


def _parts_of(share: Share, mbs: int | None) -> list[Batch]:
    """The micro-batches of a share of one step."""
    if mbs is not None:
        positive("mbs", mbs)
    return list(micro_batches(share.batch, mbs)) if share.num_rows else []


@contextmanager
def _aborting(step: TrainStep, index: int, num_steps: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        step.abort()
        if num_steps > 1 and isinstance(error, RLSessionError | OptimizerStepFailed):
            error.add_note(f"in optimizer step {index + 1} of {num_steps}; the {index} before it stand")
        raise


def _normalisers(valid_seqs: float | None, valid_tokens: float | None) -> tuple[float, float]:
    if valid_seqs is None and valid_tokens is None:
        return 1.0, 1.0
    return tuple(math.nan if count is None else float(count) for count in (valid_seqs, valid_tokens))  # type: ignore[return-value]


def _loss_level(loss_fn: LossFn) -> str:
    level = getattr(loss_fn, "loss_type", "")
    text = f"{level} {getattr(level, 'value', '')} {getattr(level, 'name', '')}"
    return "sequences" if "sequence" in text.lower() else "tokens"


def _loss_of(
    forward: Forward,
    micro: Batch,
    loss_fn: LossFn,
    normalisers: tuple[float, float],
    metrics: MetricSum,
    *,
    differentiable: bool,
) -> tuple[Tensor, float]:
    """Loss of a micro-batch, and its value; its metrics are added."""
    there = to_device(micro, forward.home())
    logits_bSV = forward.logits(there)
    # 0-dim float32: they do not promote the loss.
    seqs, tokens = (torch.tensor(count, dtype=torch.float32, device=logits_bSV.device) for count in normalisers)
    try:
        returned = loss_fn(logits_bSV, there, seqs, tokens)
    except KeyError as error:
        _refuse_missing_key(forward, there, error)
        raise
    loss, reported = _checked_loss(forward, returned, differentiable=differentiable)
    value = float(loss.detach())
    if not math.isfinite(value):
        facts = (f"it is {value} for a micro-batch of {size(micro)} sequences", *_doubtful_counts(normalisers))
        raise NonFiniteError(forward.named("the loss is not finite"), facts, _NON_FINITE_REMEDY)
    metrics.add(reported)
    return loss, value


def _check_callable(forward: Forward, loss_fn: object) -> None:
    if not callable(loss_fn):
        facts = (f"it is a {type(loss_fn).__name__}",)
        remedy = "loss_fn(logits, batch, global_valid_seqs, global_valid_tokens) -> (loss, metrics)"
        raise ArgumentError(forward.named("the loss function cannot be called"), facts, remedy)


def _refuse_missing_key(forward: Forward, batch: Batch, error: KeyError) -> None:
    """Say of a loss that looked up what the batch does not have that the batch lacks it.

    Raises:
        BatchError: It did; the loss's own error is its cause.
    """
    key = error.args[0] if error.args else None
    if not isinstance(key, str) or key in batch:
        return
    facts = (f"it has {', '.join(sorted(batch))}", "the loss function raised KeyError for it")
    raise BatchError(
        forward.named(f"the loss needs {key!r}, which the batch does not have"), facts, f'batch["{key}"] = ...'
    ) from error


def _doubtful_counts(normalisers: tuple[float, float]) -> Iterable[str]:
    for name, count in zip(("global_valid_seqs", "global_valid_tokens"), normalisers, strict=True):
        if math.isnan(count):
            yield f"{name} was not given to begin_step()"
        elif count == 0:
            yield f"{name} is 0: nothing in this global batch counts (token_mask, sample_mask)"


def _checked_loss(forward: Forward, returned: Any, *, differentiable: bool) -> tuple[Tensor, Mapping[str, Any]]:
    def refuse(facts: str, remedy: str = _LOSS_REMEDY) -> ArgumentError:
        return ArgumentError(forward.named("the loss function returned something it must not"), (facts,), remedy)

    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise refuse(f"a {type(returned).__name__}, not a pair (loss, metrics)")
    loss, metrics = returned
    if not isinstance(loss, Tensor):
        raise refuse(f"a loss of type {type(loss).__name__}, not a tensor")
    if loss.ndim or not loss.is_floating_point():
        remedy = "return (loss * mask).sum() / global_valid_tokens, metrics"
        raise refuse(f"a loss of shape {list(loss.shape)} and {loss.dtype}, not one floating-point number", remedy)
    if differentiable and not loss.requires_grad:
        remedy = (
            "compute the loss from the logits, without .detach() or .item(); for nothing to learn: logits.sum() * 0"
        )
        raise refuse("a loss that no gradient can flow back from", remedy)
    if not isinstance(metrics, Mapping):
        raise refuse(f"metrics of type {type(metrics).__name__}, not a dict")
    return loss, metrics


def _is_finite(gradient: Tensor) -> bool:
    return all(bool(torch.isfinite(inner).all()) for inner in plain_tensors(gradient))


def _result(losses: list[float], norms: list[float], metrics: MetricSum) -> TrainResult:
    return {
        "loss": torch.tensor(losses, dtype=torch.float32),
        "grad_norm": torch.tensor(norms, dtype=torch.float32),
        "metrics": metrics.result(),
    }
