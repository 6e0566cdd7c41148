"""One rank: a module, its optimizer, and the engine that moves their bytes.

The worker decides placements from what it finds (an open step is known here, not at the caller), carries them out, runs
compute calls, and returns facts. It keeps no mode of its own beyond what the last transition said, and logs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from rl_session.errors import (
    FaultedError,
    OffloadedAccessError,
    OpenStepError,
    OptimizerStepError,
    StepClosedError,
    UnsupportedError,
)
from rl_session.lifecycle import MODE_TABLE, Cell, Component, Facts, Flags, Mode, Placement, Tier, resolve, restore
from rl_session.offload.device import Device
from rl_session.offload.engine import Engine, Notice, Snapshot
from rl_session.offload.guard import Guard
from rl_session.offload.host_pool import HostPool
from rl_session.offload.inventory import Sources
from rl_session.workers import checkpoint as files
from rl_session.workers import compute
from rl_session.workers.batch import check_batch, to_device
from rl_session.workers.reference import Reference, Swap, make_reference
from rl_session.workers.replies import CallResult, Changed, Description, TransitionReply, TransitionRequest
from rl_session.workers.sampling import SamplingParams, sample
from rl_session.workers.state import OptimizerStructure
from rl_session.workers.train_step import OptimizerStepFailed, TrainStep, evaluate, train

__all__ = ["Worker", "WorkerSpec"]

_WRITTEN_BY_A_STEP = (Component.PARAMS, Component.OPTIMIZER)


@attrs.define(eq=False, kw_only=True)
class WorkerSpec:
    """Everything a worker is made of.

    Attributes:
        model: The module, or a compiled wrapper of it.
        optimizer: Its optimizer, or None.
        scheduler: A learning rate scheduler, stepped once a ``train`` call.
        max_grad_norm: Gradients are clipped to this norm; None for no clipping.
        masters: Pairs of module parameter and the optimizer's fp32 master of it.
        reference: None, "copy", "adapter-off" or a module.
        forward_fn: ``forward_fn(model, batch) -> logits``; None for the usual signature.
        temperature: Logits are divided by it.
        extras: Registered extras by name.
        verify: Whether contents are compared at every move.
        pin: Whether host buffers are page-locked on CUDA.
        label: How messages name the policy.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any | None = None
    max_grad_norm: float | None = None
    masters: Sequence[tuple[nn.Parameter, Tensor]] = ()
    reference: str | nn.Module | None = None
    forward_fn: Callable[..., Any] | None = None
    temperature: float = 1.0
    extras: Mapping[str, Any] = attrs.field(factory=dict)
    verify: bool = False
    pin: bool = True
    label: str = "policy"


class Worker:
    """One rank of a policy. See the module's text; every public method can be called through a group."""

    def __init__(
        self, spec: WorkerSpec, device: Device, pool: HostPool, explain: Callable[[], tuple[str, tuple[str, ...]]]
    ) -> None:
        self.spec = spec
        self.module: nn.Module = getattr(spec.model, "_orig_mod", spec.model)
        self.optimizer = spec.optimizer
        reference = spec.reference if isinstance(spec.reference, nn.Module) else None
        masters = [master for _, master in spec.masters]
        self.sources = Sources(self.module, spec.optimizer, masters, reference, dict(spec.extras))
        self.engine = Engine(self.sources, device, pool, verify=spec.verify, pin=spec.pin, explain=explain)
        self.forward = compute.Forward(
            spec.model, spec.forward_fn, spec.temperature, device.torch_device, label=spec.label
        )
        self.step: TrainStep | None = None
        self._mode = Mode.RESIDENT
        self._is_torn = False
        self._last_checkpoint: str | None = None
        self._reference: Reference | None = None
        self._buffers_written = False
        self._guard = Guard(self.engine.away, explain, self._loaded, self._stepped, self._forwarded_in_train)
        self._first = self.engine.refresh(deep=True)

    def start(self) -> Description:
        """Install the hooks and make the reference; nothing is moved.

        Raises:
            UnsupportedError: A reference that cannot be served.
        """
        spec = self.spec
        self._reference = make_reference(spec.reference, self.engine, spec.model, spec.label)
        self._guard.install(dict.fromkeys((self.module, spec.model)), self.optimizer)
        first, self._first = self._first, None  # type: ignore[assignment]
        self._mode = Mode.RESIDENT if first.placement[Component.PARAMS] is Tier.DEVICE else Mode.OFFLOADED
        notices = self._uncovered(first)
        return Description(
            mode=self._mode,
            placement=first.placement,
            nbytes={name: sum(tiers.values()) for name, tiers in first.nbytes.items()},
            notices=tuple(notices),
            moved=self._captured(),
        )

    def _captured(self) -> tuple[dict[str, Any], ...]:
        """What making the reference copied, as the fields of a record."""
        if self._reference is None or not self._reference.nbytes():
            return ()
        move = {"component": Component.REFERENCE.value, "from_tier": Tier.NONE.value, "to_tier": Tier.HOST.value}
        return ({**move, "nbytes": self._reference.nbytes(), "seconds": self._reference.seconds},)

    def _uncovered(self, snapshot: Snapshot) -> list[Notice]:
        uncovered = snapshot.inventory.uncovered
        if not uncovered:
            return []
        names = [name for name, _ in uncovered.values()]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        message = f"tensors that no component covers stay where they are: {', '.join(names[:3])}{more}"
        return [Notice("uncovered", message, sum(nbytes for _, nbytes in uncovered.values()), len(uncovered))]

    # -- transitions ---------------------------------------------------------------------------------------------

    def transition(self, request: TransitionRequest) -> TransitionReply:
        """Bring every component to where ``request.mode`` wants it, all or nothing.

        Raises:
            OpenStepError: It would drop or move live gradients, and ``live_gradients`` is "refuse".
            DeviceMemoryError, HostMemoryError, IntegrityError, TransitionError: It failed and was rolled back.
            FaultedError: It failed and could not be rolled back.
        """
        snapshot = self.engine.refresh()
        self._distrust_buffers(snapshot)
        before = snapshot.placement
        target = self._target(request, snapshot)
        live_dropped = bool(snapshot.live_gradients) and self._drops(snapshot, target)
        try:
            report = self.engine.move(snapshot, target)
        except BaseException:
            if request.stored is not None or request.leaves_library:
                self.engine.mark_dirty()  # the outer mode stands all the same, and may be one in which anything writes
            raise
        self._after_move(request)
        if live_dropped and self.step is not None:
            self.step = None
        return TransitionReply(
            before=self._with_reference(before),
            placement=self._with_reference(report.placement),
            moved=report.moved,
            seconds=report.seconds,
            dropped_bytes=report.dropped_bytes,
            live_dropped=live_dropped,
            device_bytes=self.engine.device.resident_bytes,
            host_bytes=self.engine.pool.in_use_bytes,
            notices=report.notices,
        )

    def _target(self, request: TransitionRequest, snapshot: Snapshot) -> Placement:
        facts = Facts(
            placement=snapshot.placement,
            live_gradients=bool(snapshot.live_gradients),
            freed_in_place=snapshot.freed_in_place,
        )
        if request.explicit is not None:
            return Placement({**facts.placement, **request.explicit})
        if facts.live_gradients and request.flags.live_gradients == "refuse":
            self._refuse_open_step(request.mode)
        if request.stored is not None:
            return restore(request.mode, request.stored, facts, request.flags)
        return resolve(request.mode, facts, request.flags)

    def _refuse_open_step(self, mode: Mode) -> None:
        if MODE_TABLE[mode].grads in (Cell.OPEN_STAYS, Cell.OPEN_TO_HOST):
            label, facts = self.engine.explain()
            raise OpenStepError(
                f"{label}: going to {mode} while gradients are live that no optimizer step has consumed",
                (*facts, 'live_gradients="refuse"'),
                f'{self._way_to_end_gradients()}, or OffloadConfig(live_gradients="preserve")',
            )

    def _way_to_end_gradients(self) -> str:
        if self.step is not None:
            return "policy.open_step.commit()  # or .abort()"
        return "optimizer.step()  # or optimizer.zero_grad()"

    def _drops(self, snapshot: Snapshot, target: Placement) -> bool:
        was = snapshot.placement[Component.GRADS]
        return was is not Tier.NONE and target[Component.GRADS] is Tier.NONE

    def _after_move(self, request: TransitionRequest) -> None:
        """Decide what the host copies are worth from now on."""
        was, self._mode = self._mode, request.mode
        if not MODE_TABLE[request.mode].read_only:
            if MODE_TABLE[was].read_only:
                self.engine.begin_snapshots()
            self.engine.mark_dirty()
        elif request.leaves_library:
            self.engine.mark_dirty()  # what stays on the device may be written by anything

    def placement(self) -> Placement:
        """Where each component is, by scanning."""
        return self._with_reference(self.engine.refresh().placement)

    def _with_reference(self, placement: Placement) -> Placement:
        if self._reference is not None and self._reference.nbytes():
            return placement.evolve(**{Component.REFERENCE: Tier.HOST})
        return placement

    def memory(self) -> dict[str, Any]:
        """Bytes of each component by tier, what is clean, what is not covered, and the host pool."""
        snapshot = self.engine.refresh(deep=True)
        nbytes = {name: {tier.value: n for tier, n in tiers.items()} for name, tiers in snapshot.nbytes.items()}
        if self._reference is not None and self._reference.nbytes():
            nbytes[Component.REFERENCE] = {Tier.HOST.value: self._reference.nbytes()}
        return {
            "components": nbytes,
            "clean": self.engine.clean_bytes(snapshot),
            "uncovered": dict(snapshot.inventory.uncovered.values()),
            "device_bytes": self.engine.device.resident_bytes,
            "device_free": self.engine.device.free_bytes(),
            "host_in_use": self.engine.pool.in_use_bytes,
            "host_held": self.engine.pool.held_bytes,
        }

    def has_open_step(self) -> bool:
        """Whether a train step is open."""
        return self.step is not None

    # -- what hooks tell -----------------------------------------------------------------------------------------

    def _loaded(self) -> None:
        self.engine.forget_snapshots()

    def _forwarded_in_train(self) -> None:
        self._buffers_written = True

    def _distrust_buffers(self, snapshot: Snapshot) -> None:
        """After a forward in train mode, in whatever mode of ours, no host copy of a buffer stands for it."""
        if self._buffers_written:
            for key, found in snapshot.inventory.storages.items():
                if Component.BUFFERS in found.components and snapshot.units[key].tier is Tier.DEVICE:
                    snapshot.units[key].host_valid = False
        self._buffers_written = False

    def _stepped(self) -> None:
        self.engine.stamps.consume(self._consumed_gradients())
        self.engine.forget_snapshots()

    def _consumed_gradients(self) -> Iterator[Tensor]:
        """The gradients that the optimizer could see: of its parameters, and of the parameters they are masters of."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        parameters = [p for group in groups for p in group["params"]]
        for parameter in (*parameters, *(p for p, _ in self.spec.masters)):
            if parameter.grad is not None:
                yield parameter.grad
            for name, value in parameter.__dict__.items():
                if isinstance(value, Tensor) and "grad" in name:
                    yield value

    # -- compute -------------------------------------------------------------------------------------------------

    def get_logprobs(self, batch: Any, temperature: float | None = None, mbs: int | None = None) -> CallResult:
        """Log-probabilities of the tokens under the live weights."""
        checked = check_batch(batch, self.forward.named("get_logprobs()"))
        return CallResult(compute.get_logprobs(self.forward, checked, temperature=temperature, mbs=mbs))

    def get_reference_policy_logprobs(
        self, batch: Any, temperature: float | None = None, mbs: int | None = None
    ) -> CallResult:
        """Log-probabilities of the tokens under the reference weights; the live ones come back by an exception too.

        Raises:
            UnsupportedError: The policy has no reference.
        """
        checked = check_batch(batch, self.forward.named("get_reference_policy_logprobs()"))
        if self._reference is None:
            label, facts = self.engine.explain()
            raise UnsupportedError(
                f"{label}: get_reference_policy_logprobs() needs a reference, and there is none",
                facts,
                'attach(model, optimizer, reference="copy")',
            )
        swaps: list[Swap] = []
        if self._buffers_written:
            self._distrust_buffers(self.engine.refresh())
        stays_valid = MODE_TABLE[self._mode].read_only
        with _telling(swaps), self._reference.active(stays_valid=stays_valid, swaps=swaps) as module:
            forward = attrs.evolve(self.forward, module=module)
            value = compute.get_logprobs(forward, checked, temperature=temperature, mbs=mbs, key="reference_logprobs")
        return CallResult(value, notes=_notes(swaps))

    def get_topk_logits(self, batch: Any, k: int, mbs: int | None = None) -> CallResult:
        """The k largest next-token logits."""
        checked = check_batch(batch, self.forward.named("get_topk_logits()"))
        return CallResult(compute.get_topk_logits(self.forward, checked, k, mbs=mbs))

    def score(self, batch: Any) -> CallResult:
        """One score a sequence."""
        return CallResult(compute.score(self.forward, check_batch(batch, self.forward.named("score()"))))

    def get_values(self, batch: Any) -> CallResult:
        """One value a token."""
        return CallResult(compute.get_values(self.forward, check_batch(batch, self.forward.named("get_values()"))))

    def generate(self, batch: Any, params: SamplingParams, stream: int) -> CallResult:
        """Continue prompts with the live weights; ``stream`` numbers the calls of one seeded engine."""
        there = to_device(check_batch(batch, self.forward.named("generate()")), self.engine.device.torch_device)
        return CallResult(sample(self.spec.model, there, params, forward_fn=self.spec.forward_fn, stream=stream))

    # -- training ------------------------------------------------------------------------------------------------

    def train(self, batch: Any, loss_fn: Any, gbs: int | None, mbs: int | None, eval_mode: bool) -> CallResult:
        """Optimizer steps over a batch, or its loss alone with ``eval_mode``.

        Raises:
            OpenStepError: Gradients are live that no step has consumed.
            OptimizerStepError: ``optimizer.step()`` failed and was undone.
            FaultedError: It failed and could not be undone.
        """
        checked = check_batch(batch, self.forward.named("train()"))
        if eval_mode:
            return CallResult(evaluate(self.forward, checked, loss_fn, gbs=gbs, mbs=mbs))
        optimizer = self._need_optimizer("train()")
        self._refuse_live_gradients("train()")
        self._need_on_device("train()")
        with self._accounted() as changed, self._undoing_failed_steps():
            try:
                value = train(
                    self.forward,
                    optimizer,
                    checked,
                    loss_fn,
                    gbs=gbs,
                    mbs=mbs,
                    scheduler=self.spec.scheduler,
                    max_grad_norm=self.spec.max_grad_norm,
                    masters=self.spec.masters,
                )
            finally:
                self._discard_gradients()
        return CallResult(value, tuple(changed))

    def _need_optimizer(self, call: str) -> torch.optim.Optimizer:
        if self.optimizer is None:
            label, facts = self.engine.explain()
            raise UnsupportedError(
                f"{label}: {call} needs an optimizer, and there is none", facts, "attach(model, optimizer)"
            )
        return self.optimizer

    def _refuse_live_gradients(self, call: str) -> None:
        label, facts = self.engine.explain()
        if self.step is not None:
            raise OpenStepError(
                f"{label}: {call} while a train step is open",
                facts,
                self._way_to_end_gradients(),
            )
        live = self.engine.refresh().live_gradients
        # Zeros left by zero_grad(set_to_none=False) are nobody's work; what is away cannot be looked at and counts.
        away = bool(live) and bool(self.engine.away((Component.GRADS,)))
        if (away or any(bool(torch.any(gradient)) for gradient in live)) and not self._discards:
            raise OpenStepError(
                f"{label}: {call} would zero gradients that no optimizer step has consumed",
                (*facts, f"live gradients: {len(live)}, made by a loss.backward() outside this library"),
                f'{self._way_to_end_gradients()}, or OffloadConfig(live_gradients="discard")',
            )
        self._discard_gradients()

    _discards = False

    def set_flags(self, flags: Flags) -> None:
        """What the configuration says of live gradients."""
        self._discards = flags.live_gradients == "discard"

    def _discard_gradients(self) -> None:
        """Drop every gradient, wherever its bytes are; a flat buffer behind live views is zeroed, or freed in place."""
        if self.engine.away((Component.GRADS,)):
            snapshot = self.engine.refresh()
            self.engine.move(snapshot, snapshot.placement.evolve(**{Component.GRADS: Tier.NONE}))
            return
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self.module.zero_grad(set_to_none=True)
        for _, master in self.spec.masters:
            master.grad = None
        left = list(self._consumed_gradients())
        with torch.inference_mode(mode=False), torch.no_grad():
            for gradient in left:
                gradient.zero_()
        self.engine.stamps.consume(left)

    def _need_on_device(self, call: str) -> None:
        """Refuse to train while something it writes is away: RESIDENT leaves gradients and optimizer where they were."""
        away = self.engine.away((Component.PARAMS, Component.BUFFERS, Component.GRADS, Component.OPTIMIZER))
        if away:
            label, facts = self.engine.explain()
            names = ", ".join(name.upper() for name in away)
            raise OffloadedAccessError(
                f"{label}: {call} needs {names} on the device, but they are away",
                facts,
                f"with policy.training_mode(): policy.{call.replace('()', '(...)')}",
            )

    @contextmanager
    def _accounted(self) -> Iterator[list[Changed]]:
        """Collect which components' bytes appeared or vanished in the block; an error carries them as ``rl_changed``."""
        before = {name: _present(tiers) for name, tiers in self.engine.nbytes.items()}
        changed: list[Changed] = []
        try:
            yield changed
        except Exception as error:
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
        structure = OptimizerStructure.of(self.optimizer) if self.engine.snapshots_intact else None
        try:
            yield
        except OptimizerStepFailed as failure:
            self._undo_step(structure, failure.cause)

    def _undo_step(self, structure: OptimizerStructure | None, cause: BaseException) -> None:
        label, facts = self.engine.explain()
        text = f"{type(cause).__name__}: {cause}"
        if structure is not None and self.engine.snapshots_intact:
            structure.put_back()
            if self.engine.restore_snapshot(_WRITTEN_BY_A_STEP):
                if not isinstance(cause, Exception):  # Ctrl-C stays what it is
                    cause.add_note(f"{label}: optimizer.step() was undone: all is as it was before the step")
                    raise cause
                raise OptimizerStepError(
                    f"{label}: optimizer.step() failed half-way",
                    (*facts, "parameters and optimizer state were restored from the host copies made before the step"),
                    "the same call again, once the cause is gone",
                    text,
                ) from cause
        self._is_torn = True
        raise FaultedError(
            f"{label}: optimizer.step() failed half-way, and there is no host copy to restore from",
            (*facts, "parameters and optimizer state may be part old, part new"),
            "policy.load_checkpoint(path)  # or policy.recover(), where a checkpoint was saved or loaded before",
            text,
        ) from cause

    def begin_step(self, global_valid_seqs: float | None, global_valid_tokens: float | None) -> CallResult:
        """Open a train step.

        Raises:
            OpenStepError: One is open, or gradients of somebody else's backward are live.
        """
        optimizer = self._need_optimizer("begin_step()")
        self._refuse_live_gradients("begin_step()")
        self._need_on_device("begin_step()")
        with self._accounted() as changed:
            self.step = TrainStep(
                self.forward,
                optimizer,
                scheduler=self.spec.scheduler,
                max_grad_norm=self.spec.max_grad_norm,
                masters=self.spec.masters,
                global_valid_seqs=global_valid_seqs,
                global_valid_tokens=global_valid_tokens,
            )
        return CallResult(None, tuple(changed))

    def _open_step(self, call: str) -> TrainStep:
        if self.step is None:
            label, facts = self.engine.explain()
            raise StepClosedError(f"{label}: {call} on a step that is not open", facts, "policy.begin_step()")
        return self.step

    def forward_backward(self, chunk: Any, loss_fn: Any, mbs: int | None) -> CallResult:
        """Add the gradients of a chunk to the open step."""
        step = self._open_step("forward_backward()")
        checked = check_batch(chunk, self.forward.named("forward_backward()"))
        with self._accounted() as changed:
            try:
                step.forward_backward(checked, loss_fn, mbs)
            except BaseException:  # part of the chunk may be in the gradients: the step cannot go on
                self._end_step()
                raise
        return CallResult(None, tuple(changed))

    def commit(self) -> CallResult:
        """Finish the open step with one optimizer step."""
        step = self._open_step("commit()")
        with self._accounted() as changed, self._undoing_failed_steps():
            try:
                value = step.commit()
            finally:
                self._end_step()
        return CallResult(value, tuple(changed))

    def _end_step(self) -> None:
        self.step = None
        self._discard_gradients()

    def abort(self) -> CallResult:
        """Discard the open step: gradients go, parameters and optimizer stay as they are."""
        self._open_step("abort()")
        with self._accounted() as changed:
            self._end_step()
        return CallResult(None, tuple(changed))

    # -- reading and writing state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """A copy on the CPU of what ``module.state_dict()`` holds, from whichever tier has the bytes."""
        with self._guard.pause():
            live = self.module.state_dict(keep_vars=True)
        return {name: self._cpu_copy(value) if isinstance(value, Tensor) else value for name, value in live.items()}

    def _cpu_copy(self, tensor: Tensor) -> Tensor:
        return self.engine.readable(tensor).detach().to("cpu", copy=True)

    def weight_names(self) -> list[str]:
        """Names of the weights that :meth:`weights` gives, in order."""
        return list(self._weights())

    def _weights(self) -> dict[str, Tensor]:
        with self._guard.pause():
            live = self.module.state_dict(keep_vars=True)
        return {name: value for name, value in live.items() if isinstance(value, Tensor)}

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The named weights, without a copy: device tensors, or views of the host copies while offloaded."""
        live = self._weights()
        return {name: self.engine.readable(live[name]) for name in names}

    def weight_sizes(self) -> dict[str, int]:
        """Bytes of each weight."""
        return {name: value.numel() * value.element_size() for name, value in self._weights().items()}

    def _named_tensors(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        named.update(self.module.named_buffers(remove_duplicate=False))
        return named

    def _param_names(self) -> dict[int, str]:
        names = {id(p): name for name, p in self.module.named_parameters()}
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        for index, group in enumerate(groups):
            for position, parameter in enumerate(group["params"]):
                names.setdefault(id(parameter), f"param_groups[{index}][{position}]")
        return names

    def save_checkpoint(self, path: str) -> CallResult:
        """Write parameters, buffers, optimizer and scheduler state; nothing is moved."""
        start = time.perf_counter()
        tensors = self._named_tensors()
        for position, (_, master) in enumerate(self.spec.masters):
            tensors[f"masters[{position}]"] = master
        nbytes = files.save(
            Path(path),
            module_tensors=tensors,
            optimizer=self.optimizer,
            param_names=self._param_names(),
            scheduler=self.spec.scheduler,
            read=self.engine.readable,
        )
        self._last_checkpoint = str(path)
        fields: dict[str, object] = {"path": str(path), "nbytes": nbytes, "seconds": time.perf_counter() - start}
        return CallResult(None, notes=(("checkpoint.saved", fields),))

    def load_checkpoint(self, path: str) -> CallResult:
        """Read a checkpoint back, into whichever tier holds the bytes; nothing is changed unless all of it fits.

        Raises:
            CheckpointError: It is missing, damaged, or of another architecture.
            OpenStepError: A step is open.
        """
        start = time.perf_counter()
        self._refuse_live_gradients("load_checkpoint()")
        checkpoint = files.open_checkpoint(Path(path))
        tensors = self._named_tensors()
        for position, (_, master) in enumerate(self.spec.masters):
            tensors[f"masters[{position}]"] = master
        names = self._param_names()
        checkpoint.check(tensors, self.optimizer, names)
        before = self.engine.refresh().placement
        with self._accounted() as changed, self._guard.pause():
            nbytes = checkpoint.apply(tensors, self.optimizer, names, self.spec.scheduler, self.engine.writable)
            self.engine.forget_snapshots()
            self._settle(before)
        self._last_checkpoint = str(path)
        fields: dict[str, object] = {"path": str(path), "nbytes": nbytes, "seconds": time.perf_counter() - start}
        return CallResult(None, tuple(changed), notes=(("checkpoint.loaded", fields),))

    def _settle(self, before: Placement) -> None:
        """Optimizer state made by loading starts on the device; send it where the optimizer belongs."""
        after = self.engine.refresh()
        home = before[Component.OPTIMIZER]
        if home is Tier.NONE:
            home = Tier.HOST if before[Component.PARAMS] is Tier.HOST else Tier.DEVICE
        self.engine.move(after, after.placement.evolve(**{Component.OPTIMIZER: home}))

    # -- forwards of the user's own ------------------------------------------------------------------------------------

    def forward_mode(self, mode: Mode, *, trusting_root: bool) -> Any | None:
        """A context manager that sets train or eval as ``mode`` means it; None when there is nothing to set.

        Args:
            mode: Which mode.
            trusting_root: Whether a root that is set right speaks for every submodule, which saves the walk.
        """
        forwards = MODE_TABLE[mode].forwards
        if forwards not in ("train", "eval"):
            return None
        if trusting_root and self.module.training == (forwards == "train"):
            return None
        return compute.module_mode(self.module, forwards)

    # -- leaving ---------------------------------------------------------------------------------------------------------

    def recover(self, path: str | None = None) -> str:
        """Make the rank usable again after a failure that could not be undone.

        Args:
            path: A checkpoint to load; None for what there is: host copies, else the last checkpoint.

        Returns:
            What it was restored from.

        Raises:
            FaultedError: Weights may be part old, part new, and there is no checkpoint.
            CheckpointError: The checkpoint cannot be loaded.
        """
        self.step = None
        self._discard_gradients()
        self.engine.settle()
        path = path or (self._last_checkpoint if self._is_torn else None)
        if path is not None:
            self.load_checkpoint(path)
            self._is_torn = False
            return f"checkpoint {path}"
        if self._is_torn:
            label, facts = self.engine.explain()
            raise FaultedError(
                f"{label}: recover() without a checkpoint",
                (*facts, "a failed optimizer step left parameters part old, part new, and none was saved or loaded"),
                "policy.load_checkpoint(path)",
            )
        return "host copies"

    def register_extra(self, name: str, value: Any) -> None:
        """Add something tensors can be found in as a component of its own."""
        self.sources.extras[name] = value
        self.engine.refresh()

    def add_cache_hook(self, hook: Callable[[nn.Module], None]) -> None:
        """Run ``hook(module)`` whenever bytes leave the device."""
        self.engine.cache_hooks.append(hook)

    def detach(self) -> None:
        """Give model and optimizer back whole and take every hook off."""
        self.engine.settle()  # what a failure left half-way, the weights behind a reference first of all
        self.engine.let_go()
        self._guard.remove()
        if self._reference is not None:
            self._reference.close()
        self.engine.pool.trim()


def _present(tiers: Mapping[Tier, int]) -> int:
    """Bytes that exist: what was freed in place has none until it comes back."""
    return sum(nbytes for tier, nbytes in tiers.items() if tier is not Tier.NONE)


def _notes(swaps: Sequence[Swap]) -> tuple[tuple[str, dict[str, object]], ...]:
    return tuple(("reference.swapped", attrs.asdict(swap)) for swap in swaps)


@contextmanager
def _telling(swaps: Sequence[Swap]) -> Iterator[None]:
    """An error carries the swaps made before it as ``rl_notes``, so that no copied byte is missing from the log."""
    try:
        yield
    except Exception as error:
        error.rl_notes = _notes(swaps)  # type: ignore[attr-defined]
        raise
