"""One rank: a module, its optimizer, and the engine that moves their bytes.

The worker decides placements from what it finds (an open step is known here, not at the caller), carries them out, runs
compute calls, and returns facts. It keeps no mode of its own beyond what the last transition said, and logs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from rl_session.errors import ConfigError, FaultedError, OpenStepError, TransitionError, UnsupportedError
from rl_session.lifecycle import (
    MODE_TABLE,
    Cell,
    Cells,
    Component,
    Facts,
    Flags,
    Mode,
    Placement,
    Tier,
    resolve,
    restore,
)
from rl_session.offload.device import Device
from rl_session.offload.engine import Engine, MoveReport, Notice, Snapshot
from rl_session.offload.guard import Explain, Guard
from rl_session.offload.host_pool import HostPool
from rl_session.offload.inventory import Sources, has_tensors
from rl_session.offload.watch import Stance
from rl_session.workers import compute
from rl_session.workers.batch import Batch, check_batch, num_micro_batches, positive, size, to_device
from rl_session.workers.keeper import Keeper
from rl_session.workers.parallel import check_wrappers
from rl_session.workers.ranks import Ranks, ranks_of
from rl_session.workers.reference import CopyReference, Reference, Swap, make_reference
from rl_session.workers.replies import CallResult, Description, Held, Room, TransitionReply, TransitionRequest
from rl_session.workers.sampling import SamplingParams, sample
from rl_session.workers.shares import Share, own_share
from rl_session.workers.spec import WorkerSpec
from rl_session.workers.trainer import Trainer

__all__ = ["Worker", "WorkerSpec"]


class Worker:
    """One rank of a policy. See the module's text; every public method can be called through a group.

    Args:
        spec: What it is made of.
        device: Where bytes are when they are needed.
        pool: Where host buffers come from.
        explain: Gives the label of the policy and facts for messages.
        ranks: Who holds the policy with it; by default those that the module is spread over with FSDP2 or DDP. A copy of a
            plain module on every rank is one policy only if it is told so here.
    """

    def __init__(
        self, spec: WorkerSpec, device: Device, pool: HostPool, explain: Explain, ranks: Ranks | None = None
    ) -> None:
        self.spec = spec
        self.module = spec.module
        check_wrappers(spec.model, spec.label)
        reference = spec.reference if isinstance(spec.reference, nn.Module) else None
        masters = [master for _, master in spec.masters]
        self.sources = Sources(self.module, spec.optimizer, masters, reference, dict(spec.extras))
        self.engine = Engine(self.sources, device, pool, verify=spec.verify, pin=spec.pin, explain=explain)
        self.ranks = ranks if ranks is not None else ranks_of(self.module, self.sources.shards, spec.label)
        self.forward = compute.Forward(
            spec.model,
            spec.forward_fn,
            spec.temperature,
            device.torch_device,
            label=spec.label,
            ranks=self.ranks,
        )
        self._mode = Mode.RESIDENT
        self._undo: tuple[Mode, Placement] | None = None
        self.is_private = False
        """Whether nothing but calls of this object reaches the model, so that between two of them nothing changes."""
        self._still: tuple[Snapshot, Placement] | None = None
        """The last look, and the placement that it was found to agree with; None once something may have changed."""
        self._reference: Reference | None = None
        self._buffers_written = False
        self._frozen: list[nn.Module] = []
        """Submodules that were in eval under a root in train, when a legacy call put all of it in eval."""
        self._trainer = Trainer(spec, self.engine, self.forward)
        self._guard = Guard(
            self.engine.away,
            explain,
            on_load=self._loaded,
            on_step=self._stepped,
            on_train_forward=self._forwarded_in_train,
            on_before_step=self._step_begins,
            on_forward=self._caller_works,
        )
        self._keeper = Keeper(spec, self.engine, self._guard, self._trainer)
        self._first = self.engine.refresh(deep=True)
        # What a group may call beside the methods below.
        self.train, self.begin_step = self._trainer.train, self._trainer.begin_step
        self.forward_backward, self.commit = self._trainer.forward_backward, self._trainer.commit
        self.abort, self.has_open_step = self._trainer.abort, self._trainer.has_open_step
        self.state_dict = self._keeper.state_dict
        self.weights, self.weight_sizes = self._keeper.weights, self._keeper.weight_sizes
        self.weight_info = self._keeper.weight_info
        self.save_checkpoint, self.load_checkpoint = self._keeper.save_checkpoint, self._keeper.load_checkpoint

    def touched(self) -> None:
        """A call begins after which the model may be another: what was seen of it counts no more."""
        self._still = None

    @property
    def mode(self) -> Mode:
        """The mode that the last transition led to."""
        return self._mode

    @property
    def last_checkpoint(self) -> str | None:
        """What was saved or loaded last."""
        return self._keeper.last_checkpoint

    def note_checkpoint(self, path: str | None) -> None:
        """Another rank has written a checkpoint that holds for this one too."""
        self._keeper.last_checkpoint = path

    def export_reference(self) -> dict[str, bytes] | None:
        """The copied reference, by tensor; None where there is none."""
        return self._reference.export() if isinstance(self._reference, CopyReference) else None

    def restore_reference(self, copied: dict[str, bytes] | None) -> None:
        """Make the copied reference what it was on another rank."""
        if copied is not None and isinstance(self._reference, CopyReference):
            self._reference.restore(copied)

    def start(self) -> Description:
        """Install the hooks and make the reference; nothing is moved.

        Raises:
            UnsupportedError: A reference that cannot be served.
        """
        spec = self.spec
        self._reference = make_reference(spec.reference, self.engine, spec.model, spec.label)
        self._guard.install(dict.fromkeys((self.module, spec.model)), spec.optimizer)
        first, self._first = self._first, None  # type: ignore[assignment]
        weights = Component.BUFFERS if self.sources.placed_elsewhere else Component.PARAMS
        self._mode = Mode.RESIDENT if first.placement[weights] is Tier.DEVICE else Mode.OFFLOADED
        notices = [*self._uncovered(first), *self._hidden()]
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

    def _hidden(self) -> list[Notice]:
        hidden = self.sources.shards.hidden_gradients()
        if not hidden:
            return []
        message = f"gradients that FSDP has not reduced stay where they are: {hidden[0][0]} and {len(hidden) - 1} more"
        return [Notice("uncovered", message, sum(gradient.nbytes for _, gradient in hidden), len(hidden))]

    # -- transitions ---------------------------------------------------------------------------------------------

    def transition(self, request: TransitionRequest) -> TransitionReply | Room:
        """Bring every component to where ``request.mode`` wants it, all or nothing; or say what room that would take.

        Raises:
            OpenStepError: It would drop or move live gradients, and ``live_gradients`` is "refuse".
            DeviceMemoryError, HostMemoryError, IntegrityError, TransitionError: It failed and was rolled back.
            FaultedError: It failed and could not be rolled back.
        """
        self._guard.come_first()
        still, self._still = self._still, None
        snapshot = self.engine.refresh() if still is None else still[0]
        # What was handed to the caller and not looked at since, is distrusted already.
        is_exposed = still is not None and self.engine.watch.stance is Stance.EXPOSED
        if not is_exposed:
            self._distrust(snapshot)
        before = snapshot.placement
        target = self._target(request, snapshot)
        if request.headroom is not None and (still is None or still[1] != target):
            room = self._room(snapshot, target, request)
            if room.nbytes > request.headroom:
                return room
        live_dropped = bool(snapshot.live_gradients) and self._drops(snapshot, target)
        try:
            if still is not None and still[1] == target:
                report = MoveReport(before, (), (), 0, ())
            else:
                report = self.engine.move(snapshot, target, then=_stance_of(request))
        except BaseException:
            if request.stored is not None or request.leaves_library:
                self.engine.expose()  # the outer mode stands all the same, and may be one in which anything writes
            raise
        self._undo = self._mode, before
        self._after_move(request, is_exposed=is_exposed and not report.moved)
        if live_dropped:
            self._trainer.step = None
        if self.is_private and not report.moved:
            self._still = snapshot, target
        return self._moved(before, report, live_dropped=live_dropped)

    def _moved(self, before: Placement, report: MoveReport, *, live_dropped: bool) -> TransitionReply:
        return TransitionReply(
            before=self._with_reference(before),
            placement=self._with_reference(report.placement),
            moved=report.moved,
            seconds=report.seconds,
            dropped_bytes=report.dropped_bytes,
            live_dropped=live_dropped,
            device_bytes=self.engine.device.held_bytes,
            host_bytes=self.engine.pool.in_use_bytes,
            notices=(*report.notices, *self._hidden()),
        )

    def undo(self) -> TransitionReply:
        """Take the last transition back, because another rank could not make it.

        Gradients that it dropped stay dropped: an optimizer step had consumed them, or the user said to discard them.

        Raises:
            TransitionError: There is no transition to take back.
            DeviceMemoryError, HostMemoryError, IntegrityError, TransitionError: It failed; the transition stands.
            FaultedError: It failed half-way.
        """
        if self._undo is None:
            label, facts = self.engine.explain()
            raise TransitionError(f"{label}: undo()", (*facts, "no transition was made since"), "policy.recover()")
        mode, before = self._undo
        snapshot = self.engine.refresh()
        was = snapshot.placement
        report = self.engine.move(snapshot, Placement({**was, **before}))
        self._mode, self._undo = mode, None
        # What stands again may be a mode in which anything writes, and its host copies may have been given back.
        self.engine.expose()
        if not MODE_TABLE[mode].read_only:
            self.engine.forget_snapshots()
        return self._moved(was, report, live_dropped=False)

    def _target(self, request: TransitionRequest, snapshot: Snapshot) -> Placement:
        if request.cells is not None:
            self._let_zeros_go(snapshot)
        facts = Facts(
            placement=snapshot.placement,
            live_gradients=bool(snapshot.live_gradients),
            freed_in_place=snapshot.freed_in_place,
        )
        target = self._wanted(request, facts)
        if request.evict:
            away = Placement({**target, **dict.fromkeys(request.evict, Tier.HOST)})
            return self._without_consumed(facts, away)
        return target

    def _wanted(self, request: TransitionRequest, facts: Facts) -> Placement:
        if request.explicit is not None:
            return self._without_consumed(facts, Placement({**facts.placement, **request.explicit}))
        if facts.live_gradients and request.flags.live_gradients == "refuse":
            self._refuse_open_step(request.mode, request.cells or MODE_TABLE[request.mode])
        if request.stored is not None:
            return restore(request.mode, request.stored, facts, request.flags, request.cells)
        return resolve(request.mode, facts, request.flags, request.cells)

    def _without_consumed(self, facts: Facts, target: Placement) -> Placement:
        """Gradients that were consumed are dropped where live ones go to the host."""
        if target[Component.GRADS] is Tier.HOST and not facts.live_gradients:
            target = target.evolve(**{Component.GRADS: Tier.NONE})
        return target

    def _let_zeros_go(self, snapshot: Snapshot) -> None:
        """For a legacy call, gradients of zeros are nobody's work: a buffer that was made and never added to."""
        if not snapshot.live_gradients or self.engine.away((Component.GRADS,)):
            return
        zeros = [gradient for gradient in snapshot.live_gradients if not bool(torch.any(gradient))]
        if len(zeros) == len(snapshot.live_gradients):  # of an open step, all are kept or none
            self.engine.stamps.consume(zeros)
            snapshot.live_gradients.clear()

    def _refuse_open_step(self, mode: Mode, row: Cells) -> None:
        if row.grads in (Cell.OPEN_STAYS, Cell.OPEN_TO_HOST):
            label, facts = self.engine.explain()
            raise OpenStepError(
                f"{label}: going to {mode} while gradients are live that no optimizer step has consumed",
                (*facts, 'live_gradients="refuse"'),
                f'{self._trainer.way_to_end_gradients()}, or OffloadConfig(live_gradients="preserve")',
            )

    def _drops(self, snapshot: Snapshot, target: Placement) -> bool:
        was = snapshot.placement[Component.GRADS]
        return was is not Tier.NONE and target[Component.GRADS] is Tier.NONE

    def _after_move(self, request: TransitionRequest, *, is_exposed: bool) -> None:
        """Decide what the host copies are worth from now on; ``is_exposed`` where the caller had all of it before, too."""
        was, self._mode = self._mode, request.mode
        stance = _stance_of(request)
        if stance is Stance.EXPOSED:
            if MODE_TABLE[was].read_only:
                self.engine.begin_snapshots()
            if is_exposed:
                self.engine.watch.changed()
            else:
                self.engine.expose()
        elif stance is Stance.AT_REST:
            self.engine.rest()
        else:
            self.engine.protect()

    def room(self, request: TransitionRequest) -> Room:
        """What :meth:`transition` would take, without moving anything.

        Raises:
            OpenStepError: As :meth:`transition`.
        """
        snapshot = self.engine.refresh()
        return self._room(snapshot, self._target(request, snapshot), request)

    def _room(self, snapshot: Snapshot, target: Placement, request: TransitionRequest) -> Room:
        todo = self.engine.plan(snapshot, target)
        made, reserve = self._trainer.expected_bytes() if request.mode is Mode.TRAINING else (0, 0)
        if request.stored is not None:  # on the way out nothing may be refused for what is not there yet
            made, reserve = 0, reserve + made
        return Room(onload=todo.nbytes_onload + made, freed=todo.nbytes_freed, reserve=reserve)

    def holdings(self, modes: Sequence[Mode], flags: Flags) -> list[Held]:
        """What is on the device, and what of it an eager release would have sent away on the way through ``modes``."""
        snapshot = self.engine.refresh()
        facts = Facts(placement=snapshot.placement, live_gradients=bool(snapshot.live_gradients))
        wanted = facts.placement
        for mode in modes:
            wanted = resolve(mode, attrs.evolve(facts, placement=wanted), attrs.evolve(flags, release="eager"))
        held = []
        for component, (nbytes, dirty) in self.engine.on_device(snapshot).items():
            leaves = wanted[component] is not Tier.DEVICE and snapshot.placement[component] is Tier.DEVICE
            leaves = leaves and flags.release != "never"
            disposable = component == Component.GRADS and not facts.live_gradients
            held.append(Held(component, nbytes, 0 if disposable else dirty, leaves, disposable))
        return held

    def weights_epoch(self) -> int:
        """See :attr:`rl_session.offload.engine.Engine.weights_epoch`."""
        return self.engine.weights_epoch

    def placement(self) -> Placement:
        """Where each component is, by scanning."""
        return self._with_reference(self.engine.refresh().placement)

    def _with_reference(self, placement: Placement) -> Placement:
        if self._reference is not None and self._reference.nbytes():
            return placement.evolve(**{Component.REFERENCE: Tier.HOST})
        return placement

    def sizes(self) -> dict[str, int]:
        """Bytes of each component, wherever they are."""
        nbytes = {name: sum(tiers.values()) for name, tiers in self.engine.refresh().nbytes.items()}
        if self._reference is not None:
            nbytes[Component.REFERENCE.value] += self._reference.nbytes()
        return nbytes

    def component_names(self) -> list[str]:
        """The names of every component, registered extras included."""
        return self.engine.ledger.component_names()

    def memory(self) -> dict[str, Any]:
        """Bytes of each component by tier, what is clean, what is not covered, and the host pool."""
        snapshot = self.engine.refresh(deep=True)
        nbytes = {name: {tier.value: n for tier, n in tiers.items()} for name, tiers in snapshot.nbytes.items()}
        if self._reference is not None and self._reference.nbytes():
            nbytes[Component.REFERENCE] = {Tier.HOST.value: self._reference.nbytes()}
        return {
            "components": nbytes,
            "clean": self.engine.clean_bytes(snapshot),
            "dirty": {name: dirty for name, (_, dirty) in self.engine.on_device(snapshot).items() if dirty},
            "uncovered": dict(snapshot.inventory.uncovered.values()),
            "device_bytes": self.engine.device.resident_bytes,
            "device_free": self.engine.device.free_bytes(),
            "host_in_use": self.engine.pool.in_use_bytes,
            "host_held": self.engine.pool.held_bytes,
        }

    def set_flags(self, flags: Flags) -> None:
        """What the configuration says of live gradients."""
        self._trainer.discards = flags.live_gradients == "discard"

    # -- what hooks tell -----------------------------------------------------------------------------------------

    def _loaded(self) -> None:
        self.engine.forget_snapshots()

    def _caller_works(self) -> None:
        """Somebody forwards or steps; at rest that is the caller, who is in charge until the next transition.

        Barriers come down at once and not one by one, under whatever kernels and threads the work has.
        """
        if self.engine.watch.stance is Stance.AT_REST:
            self.engine.expose()

    def _step_begins(self) -> None:
        self._caller_works()
        self._trainer.step_begins()

    def _forwarded_in_train(self) -> None:
        self._buffers_written = True
        if any(self.engine.nbytes.get(Component.BUFFERS, {}).values()):
            self.engine.watch.changed()

    def _distrust(self, snapshot: Snapshot) -> None:
        """Before a move: no host copy stands for what the caller could write until now."""
        if self.engine.watch.stance is Stance.EXPOSED:
            self.engine.mark_dirty()
        self._distrust_buffers(snapshot)

    def _distrust_buffers(self, snapshot: Snapshot) -> None:
        """After a forward in train mode, in whatever mode of ours, no host copy of a buffer stands for it."""
        if self._buffers_written:
            for key, found in snapshot.inventory.storages.items():
                if Component.BUFFERS in found.components and snapshot.units[key].tier is Tier.DEVICE:
                    snapshot.units[key].host_valid = False
        self._buffers_written = False

    def _stepped(self) -> None:
        if self.engine.device.is_told:
            self.engine.refresh()  # gradients and new state are there together only now: the peak of a step
        self._trainer.step_ended()

    # -- compute -------------------------------------------------------------------------------------------------

    def _share(self, batch: Any, call: str, mbs: int | None = None) -> Share:
        """What this rank has of a batch: a share, or a plain batch; wrong on one rank, it is refused on all."""
        if self.ranks.count == 1 and not isinstance(batch, Share):
            checked = check_batch(batch, call)
            return Share(checked, (size(checked),))
        with self.ranks.together(call):
            share = own_share(batch, self.ranks.count, call)
            self.forward.checked(share.batch, call)
            if mbs is not None:
                positive("mbs", mbs)
        return share

    @contextmanager
    def _computing(self, call: str) -> Iterator[None]:
        """A call that all ranks make; FSDP2 is left sharded, and ready for the next forward after an error."""
        try:
            with self.ranks.together(call):
                yield
        except BaseException:
            self.sources.shards.reset()
            raise
        self.sources.shards.reshard()

    def _compute(
        self, call: str, batch: Any, run: Callable[[Batch], dict[str, Tensor]], mbs: int | None = None
    ) -> dict[str, Tensor]:
        """Run a call on this rank's rows; the result has an entry for each row of its own."""
        named = self.forward.named(call)
        share = self._share(batch, named, mbs)
        with self._computing(named):
            result = run(share.batch)
        return _own_rows(result, share)

    def get_logprobs(self, batch: Any, temperature: float | None = None, mbs: int | None = None) -> CallResult:
        """Log-probabilities of the tokens under the live weights."""

        def run(own: Batch) -> dict[str, Tensor]:
            return compute.get_logprobs(self.forward, own, temperature=temperature, mbs=mbs)

        return CallResult(self._compute("get_logprobs()", batch, run, mbs))

    def get_reference_policy_logprobs(
        self, batch: Any, temperature: float | None = None, mbs: int | None = None
    ) -> CallResult:
        """Log-probabilities of the tokens under the reference weights; the live ones come back by an exception too.

        Raises:
            UnsupportedError: The policy has no reference.
        """
        call = self.forward.named("get_reference_policy_logprobs()")
        share = self._share(batch, call, mbs)
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
        with _telling(swaps), ExitStack() as stack:
            with self.ranks.together(call):  # one that has no room for the swap must not leave the others computing
                module = stack.enter_context(self._reference.active(stays_valid=stays_valid, swaps=swaps))
            forward = attrs.evolve(self.forward, module=module)
            with self._computing(call):
                value = compute.get_logprobs(
                    forward, share.batch, temperature=temperature, mbs=mbs, key="reference_logprobs"
                )
        return CallResult(_own_rows(value, share), notes=_notes(swaps))

    def get_topk_logits(self, batch: Any, k: int, mbs: int | None = None) -> CallResult:
        """The k largest next-token logits."""

        def run(own: Batch) -> dict[str, Tensor]:
            return compute.get_topk_logits(self.forward, own, k, mbs=mbs)

        return CallResult(self._compute("get_topk_logits()", batch, run, mbs))

    def score(self, batch: Any) -> CallResult:
        """One score a sequence."""
        return CallResult(self._compute("score()", batch, lambda own: compute.score(self.forward, own)))

    def get_values(self, batch: Any) -> CallResult:
        """One value a token."""
        return CallResult(self._compute("get_values()", batch, lambda own: compute.get_values(self.forward, own)))

    def generate(self, batch: Any, params: SamplingParams, stream: int) -> CallResult:
        """Continue prompts with the live weights; ``stream`` numbers the calls of one seeded engine.

        Several ranks make as many forwards each, whenever their sequences end: a forward may take all of them.
        """
        call = self.forward.named("generate()")
        share = self._share(batch, call)
        options: dict[str, Any] = {"forward_fn": self.spec.forward_fn, "stream": stream}
        if self.ranks.count > 1:
            options.update(lockstep=True, first_row=min(share.rows, default=0))
        num = num_micro_batches(share.batch, params.mbs)
        longest = self.ranks.greatest(num)
        with self._computing(call):
            there = to_device(share.batch, self.engine.device.torch_device)
            value = sample(self.spec.model, there, params, **options)
            for _ in range(longest - num):
                sample(self.spec.model, to_device(share.filler, self.engine.device.torch_device), params, **options)
        return CallResult(_own_rows(value, share))

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

    def hold_mode(self, mode: Literal["train", "eval"] | None) -> str:
        """Leave every submodule in train or eval, as legacy calls do; submodules frozen in eval stay so.

        Args:
            mode: Which; None only asks.

        Returns:
            What the root is in, before.
        """
        was = "train" if self.module.training else "eval"
        if mode == "eval" and was == "train":
            self._frozen = [part for part in self.module.modules() if not part.training]
            self.module.eval()
        elif mode == "train" and was == "eval":
            self.module.train()
            for part in self._frozen:
                part.training = False
        return was

    def away(self, components: Sequence[str]) -> list[str]:
        """Those of ``components`` with bytes that are not on the device."""
        self.engine.refresh()
        return self.engine.away(components)

    def learning_rate(self) -> float | None:
        """That of the optimizer's first group; None without an optimizer."""
        optimizer = self.spec.optimizer
        return None if optimizer is None else float(optimizer.param_groups[0]["lr"])

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
        self._trainer.end_step()
        self.engine.settle()
        self._gather_on_host()
        path = path or (self._keeper.last_checkpoint if self._trainer.is_torn else None)
        if path is not None:
            self.load_checkpoint(path)
            self._trainer.is_torn = False
            return f"checkpoint {path}"
        if self._trainer.is_torn:
            label, facts = self.engine.explain()
            raise FaultedError(
                f"{label}: recover() without a checkpoint",
                (*facts, "a failed optimizer step left parameters part old, part new, and none was saved or loaded"),
                "policy.load_checkpoint(path)",
            )
        return "host copies"

    def _gather_on_host(self) -> None:
        """Bring everything to the host: a failure half-way left parts of components here and there."""
        snapshot = self.engine.refresh()
        self.engine.move(snapshot, Placement(dict.fromkeys(self.component_names(), Tier.HOST)))

    def register_extra(self, name: str, value: Any) -> CallResult:
        """Add something tensors can be found in as a component of its own.

        Raises:
            ConfigError: No tensor is found in it.
        """
        if not has_tensors(value):
            label, facts = self.engine.explain()
            raise ConfigError(
                f"{label}: register({name!r}): no tensor is found in {type(value).__name__}",
                facts,
                f"policy.register({name!r}, module)  # or a list, dictionary or object that holds tensors",
            )
        with self._trainer.accounted() as changed:
            self.sources.extras[name] = value
        return CallResult(None, tuple(changed))

    def add_cache_hook(self, hook: Callable[[nn.Module], None]) -> None:
        """Run ``hook(module)`` whenever bytes leave the device."""
        self.engine.cache_hooks.append(hook)

    def end_step(self) -> CallResult:
        """Forget the open step, if one is open, and drop every gradient: another rank lost its part of them."""
        with self._trainer.accounted() as changed:
            self._trainer.end_step()
        return CallResult(None, tuple(changed))

    def drop(self) -> None:
        """Let everything go as it is: the model was built for this worker, and ends with it."""
        self._guard.remove()
        if self._reference is not None:
            self._reference.close()
        self.engine.abandon()
        self.engine.pool.trim()
        self.ranks.close()

    def detach(self) -> None:
        """Give model and optimizer back whole and take every hook off."""
        self.engine.settle()  # what a failure left half-way, the weights behind a reference first of all
        self.engine.let_go()
        self._guard.remove()
        if self._reference is not None:
            self._reference.close()
        self.engine.pool.trim()
        self.ranks.close()


def _stance_of(request: TransitionRequest) -> Stance:
    """Who may write once a transition is made."""
    if not MODE_TABLE[request.mode].read_only:
        return Stance.EXPOSED
    if request.leaves_library or request.mode is Mode.OFFLOADED:
        return Stance.AT_REST  # the library does nothing there, and anything else may
    return Stance.PROTECTED


def _own_rows(result: dict[str, Tensor], share: Share) -> dict[str, Tensor]:
    """A result without the row that a rank without rows ran."""
    return result if share.num_rows else {name: value[:0] for name, value in result.items()}


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
