"""The offload engine: brings the storages of one policy to a placement, all of them or none.

The ledger says what is where, planning says what has to move, a transaction moves it or puts everything back. Here is also
what the host copies are worth, and reading and writing tensors wherever their bytes are. Facts about what moved are
returned; nothing is logged here. Knows components and tiers, not modes, scopes or policies.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_session.errors import DeviceMemoryError, HostMemoryError, RLSessionError, TransitionError, UnsupportedError
from rl_session.lifecycle import Component, Placement, Tier
from rl_session.offload import tensors
from rl_session.offload.caches import CacheHook, run_cache_hooks
from rl_session.offload.device import Device
from rl_session.offload.gradients import GradientStamps
from rl_session.offload.graphs import captured_graph
from rl_session.offload.host_pool import HostPool
from rl_session.offload.inventory import Sources
from rl_session.offload.ledger import Explain, Ledger, Snapshot
from rl_session.offload.reports import MoveReport, Notice
from rl_session.offload.shards import Shards
from rl_session.offload.snapshot import WEIGHTS
from rl_session.offload.tensors import library_access
from rl_session.offload.transaction import Transaction
from rl_session.offload.unit import Unit, arrive, validate_hosts
from rl_session.offload.watch import Stance, Watch
from rl_session.planning import Plan, plan, summarise

__all__ = ["Engine", "MoveReport", "Notice", "Snapshot"]

_YOUNG = 1
"""The oldest generation that every release collects: reference cycles of the last step are that young."""


class Engine:
    """Moves the storages of one policy.

    Args:
        sources: What to scan.
        device: The device.
        pool: Where host buffers come from.
        verify: Whether contents are compared at every move.
        pin: Whether host buffers are page-locked on CUDA.
        explain: Gives the label of the policy and facts for messages.
    """

    def __init__(
        self,
        sources: Sources,
        device: Device,
        pool: HostPool,
        *,
        verify: bool = False,
        pin: bool = True,
        explain: Explain = lambda: ("policy", ()),
    ) -> None:
        self.ledger = Ledger(sources, device, explain)
        self.pool = pool
        self.verify = verify
        self.pin = pin
        self.cache_hooks: list[CacheHook] = []
        self.snapshots_intact = True
        self.unrestored: list[Unit] = []
        """Units on the device whose live bytes are only on the host, because a swap could not be undone."""

    # -- looking -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """The device."""
        return self.ledger.device

    @property
    def explain(self) -> Explain:
        """Gives the label of the policy and facts for messages."""
        return self.ledger.explain

    @property
    def stamps(self) -> GradientStamps:
        """Which gradients an optimizer step has consumed."""
        return self.ledger.stamps

    @property
    def placement(self) -> Placement:
        """Where each component is, as of the last look or move."""
        return self.ledger.placement

    @property
    def nbytes(self) -> dict[str, dict[Tier, int]]:
        """Bytes of each component by tier, as of the last look or move."""
        return self.ledger.nbytes

    @property
    def shards(self) -> Shards:
        """What FSDP2 keeps behind the module; empty for a module without it."""
        return self.ledger.sources.shards

    @property
    def watch(self) -> Watch:
        """Who may write, and whether something was written."""
        return self.ledger.watch

    @property
    def weights_epoch(self) -> int:
        """A number that another one replaces whenever the bytes of PARAMS or BUFFERS may have changed.

        Two equal readings mean that the weights are the same, bit for bit, as far as the contract of read-only scopes
        holds; two different ones mean nothing. While the caller is in charge (TRAINING, RESIDENT) every reading differs.
        O(1) inside scopes; at rest, where anybody may write, each reading looks at every storage.
        """
        return self.watch.epoch()

    def refresh(self, *, deep: bool = False) -> Snapshot:
        """Scan, and say where everything is; see :meth:`Ledger.refresh`. FSDP2 modules stay as they are: one rank may look."""
        return self.ledger.refresh(deep=deep)

    def away(self, components: Iterable[str]) -> list[str]:
        """Those of ``components`` with bytes that are not on the device, as of the last move. O(components)."""
        return self.ledger.away(components)

    # -- moving --------------------------------------------------------------------------------------------------

    def move(self, snapshot: Snapshot, target: Placement, *, then: Stance | None = None) -> MoveReport:
        """Bring every component to its tier in ``target``.

        Args:
            snapshot: A fresh :meth:`refresh`.
            target: Component to tier.
            then: The stance that the caller takes right afterwards, if it takes another one.

        Returns:
            What moved.

        Raises:
            DeviceMemoryError: The device has no room; everything is where it was.
            HostMemoryError: The host or its budget has no room; everything is where it was.
            IntegrityError: Contents differ from what they were known to be; everything is where it was.
            TransitionError: Anything else went wrong; everything is where it was.
            FaultedError: It went wrong, and so did putting things back.
            UnsupportedError: A captured CUDA graph reads what would leave; nothing was done.
        """
        with library_access():
            self.shards.reshard()
            todo = self.plan(snapshot, target)
            if self.device.replays_graphs:
                self._refuse_under_graph(todo)
            transaction = Transaction(self.ledger, snapshot, todo, self.pool, verify=self.verify, pin=self.pin)
            try:
                transaction.run()
            except BaseException as error:
                transaction.undo(error)
                self._reraise(error, todo)
            self._commit(snapshot, target, transaction, then)
        notices = transaction.notices
        if todo.offloads or todo.drops:
            notices += self._give_back()
        moved = summarise(todo.moves)
        seconds = tuple(transaction.seconds_of(line) for line in moved)
        dropped = sum(move.nbytes for move in todo.drops)
        return MoveReport(self.placement, moved, seconds, dropped, tuple(notices))

    def _refuse_under_graph(self, todo: Plan) -> None:
        """Weights that come back have other addresses, and a graph goes on reading those it was captured with."""
        leaving = [move.component for move in todo.offloads if move.component in WEIGHTS]
        where = captured_graph(self.ledger.sources.module) if leaving else None
        if where is not None:
            label, facts = self.explain()
            raise UnsupportedError(
                f"{label}: {leaving[0]} cannot leave the device: a captured CUDA graph reads them by address",
                (*facts, f"the graph is held by {where} of the model"),
                f"del model.{where}  # and capture anew in the next scope; or OffloadConfig(release='never')",
            )

    def _commit(self, snapshot: Snapshot, target: Placement, transaction: Transaction, then: Stance | None) -> None:
        self._receive(transaction.onloaded, snapshot, then)
        if transaction.todo:
            self.watch.note(snapshot)  # storages that were re-homed hold what they held
        ledger = self.ledger
        for components, units in snapshot.groups.items():
            wanted = max((target[c] for c in components), key=lambda t: t.height)
            for unit in units:
                unit.needs[ledger] = wanted
            for unit in [unit for unit in units if len(unit.needs) > 1]:
                ledger.tell_others(unit)
        ledger.look(snapshot)  # refreshes what away() answers from

    def _receive(self, units: Sequence[Unit], snapshot: Snapshot, then: Stance | None) -> None:
        """What came to the device is there, and its host copies are as good until somebody writes."""
        ledger, found = self.ledger, snapshot.inventory.storages
        ledger.reveal(units)
        arrive(units)
        for unit in [unit for unit in units if unit.component == Component.GRADS or unit.key not in found]:
            unit.release_host()  # gradients change every step: their buffers are worth more to the next one
        for unit in [unit for unit in units if unit.was_touched]:
            unit.was_touched = False  # whoever kept a pointer has one to what was freed
        copied = [unit for unit in units if unit.host is not None]
        for unit in copied:
            unit.is_snapshot = True
        # Where the caller may write from here on no copy stands for anything; begin_snapshots() asks if a step was made.
        if then is not Stance.EXPOSED or not self.snapshots_intact:
            validate_hosts(copied)
        if then in (Stance.EXPOSED, Stance.PROTECTED):
            for unit in [unit for unit in units if unit.resters]:
                unit.resters.discard(ledger)
        for unit in [unit for unit in units if unit.resters]:
            self.watch.cover(unit)

    def _reraise(self, error: BaseException, todo: Plan) -> NoReturn:
        label, facts = self.explain()
        if isinstance(error, HostMemoryError) and not error.attempted.startswith(label):
            raise HostMemoryError(f"{label}: {error.attempted}", (*facts, *error.facts), error.remedy) from error
        if isinstance(error, RLSessionError) or not isinstance(error, Exception):
            raise error
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError):
            needed = f"needed: {todo.nbytes_onload} bytes, after giving back {todo.nbytes_freed}"
            free = self.device.free_bytes()
            now = f"free now: {'no limit known' if free is None else f'{free} bytes'}"
            remedy = "offload another policy first (other.offload()), or offload more of this one (OffloadConfig)"
            raise DeviceMemoryError(f"{label}: no room on the device", (*facts, needed, now), remedy, cause) from error
        raise TransitionError(
            f"{label}: a transition failed and was rolled back",
            facts,
            "the same call again, once the cause is gone",
            cause,
        ) from error

    def _give_back(self) -> list[Notice]:
        """After something was freed: run the cache hooks, collect young garbage once, return cached blocks once.

        A full collection walks every object of the process (0.1 to 0.2 s beside transformers): it runs only when room is
        short, before an onload.
        """
        problems = run_cache_hooks(self.ledger.sources.module, self.cache_hooks)
        notices = [Notice("cache_hook_failed", problem) for problem in problems]
        try:
            gc.collect(_YOUNG)
            self.device.empty_cache()
        except Exception as error:  # the move is committed: what follows must not undo it
            notices.append(Notice("empty_cache_failed", f"{type(error).__name__}: {error}"))
        return notices

    # -- what happened outside ------------------------------------------------------------------------------------

    def mark_dirty(self) -> None:
        """Device copies may change from now on: no host copy can stand in for one."""
        trusted = [unit for unit in self.ledger.own_units() if unit.host_valid or unit.is_armed]
        for unit in trusted:
            if unit.tier is Tier.DEVICE:
                if unit.is_armed:
                    unit.lower_barrier()
                unit.host_valid = False
        self.watch.changed()

    def expose(self) -> None:
        """The caller is in charge from now on and may write at any time."""
        self.watch.expose()
        self.mark_dirty()

    def protect(self) -> None:
        """Only the library works from now on, and only reads: a scope of a read-only mode."""
        self.watch.protect()

    def rest(self) -> None:
        """Outside every scope in a read-only mode: what is clean stays so until something touches it."""
        self.watch.rest()

    def forget_snapshots(self) -> None:
        """The weights have moved on since the device copies were made: they cannot be restored from the host."""
        self.snapshots_intact = False
        self.mark_dirty()

    def begin_snapshots(self) -> None:
        """From now on the host copies of what is on the device are a snapshot that a failed step can fall back on."""
        with library_access():
            for unit in self.ledger.own_units():
                kept = unit.is_snapshot and self.snapshots_intact
                unit.is_snapshot = unit.tier is Tier.DEVICE and (kept or unit.is_clean())
        self.snapshots_intact = True

    def restore_snapshot(self, components: Iterable[str]) -> bool:
        """Write the host copies of ``components`` back over the device copies.

        Returns:
            Whether that was possible: every storage has the copy it was brought in from, and no step was made since.
        """
        if not self.has_snapshot(components):
            return False
        with library_access():
            self.shards.reshard()
            snapshot, units = self._snapshot_units(components)
            self.device.copy_in([(snapshot.storage(u), u.host_bytes()) for u in units])
            self.device.synchronize()
        return True

    def has_snapshot(self, components: Iterable[str]) -> bool:
        """Whether :meth:`restore_snapshot` could do it."""
        if not self.snapshots_intact:
            return False
        with library_access():
            _, units = self._snapshot_units(components)
        return all(unit.is_snapshot and unit.host is not None for unit in units)

    def _snapshot_units(self, components: Iterable[str]) -> tuple[Snapshot, list[Unit]]:
        wanted = set(components)
        snapshot = self.refresh()
        units = [
            snapshot.units[key]
            for key, found in snapshot.inventory.storages.items()
            if wanted.intersection(found.components) and snapshot.units[key].tier is Tier.DEVICE
        ]
        return snapshot, units

    # -- reading -------------------------------------------------------------------------------------------------

    def readable(self, tensor: Tensor) -> Tensor:
        """A tensor with the same values that may be read now: itself, or a view of its host buffer.

        The result shares memory with what it reads from; clone it to keep it. A DTensor gives a DTensor of the same spec.
        """
        with library_access():
            if isinstance(tensor, DTensor):
                return _like(tensor, self.readable(tensor._local_tensor))
            inner = list(tensors.plain_tensors(tensor))
            if len(inner) != 1 or inner[0] is not tensor:
                return tensor
            unit = self.device.units.get(tensors.storage_of(tensor)._cdata)
            if unit is None or unit.tier is Tier.DEVICE or unit.host is None:
                return tensors.fresh_view(tensor, tensors.storage_of(tensor))
            start = unit.host.data.storage_offset() // tensor.element_size() + int(tensor.storage_offset())
            return tensors.fresh_view(tensor, unit.host.data.untyped_storage(), start)

    def writable(self, tensor: Tensor) -> Tensor:
        """A tensor through which the values of ``tensor`` may be overwritten wherever its bytes are.

        No version counter changes. Call :meth:`forget_snapshots` afterwards: host copies are not compared any more.
        """
        with library_access():
            if isinstance(tensor, DTensor):
                return _like(tensor, self.writable(tensor._local_tensor))
            unit = self.device.units.get(tensors.storage_of(tensor)._cdata)
            if unit is None:
                return tensor.detach()
            unit.lower_barrier()
            unit.host_valid, unit.checksum = False, None
            return self.readable(tensor)

    def plan(self, snapshot: Snapshot, target: Placement) -> Plan:
        """The moves that :meth:`move` would make."""
        with library_access():
            return plan(self.ledger.facts(snapshot), target)

    def on_device(self, snapshot: Snapshot) -> dict[str, tuple[int, int]]:
        """Bytes on the device of each component that has some, and how many of them must be copied to leave.

        A storage that several components share counts under the first; one that another policy needs too, not at all.
        """
        held: dict[str, tuple[int, int]] = {}
        with library_access():
            for key, found in snapshot.inventory.storages.items():
                unit = snapshot.units[key]
                if unit.tier is not Tier.DEVICE or unit.floor_for(self.ledger) is Tier.DEVICE:
                    continue
                nbytes, dirty = held.get(found.components[0], (0, 0))
                held[found.components[0]] = nbytes + unit.nbytes, dirty + (0 if unit.is_clean() else unit.nbytes)
        return held

    def clean_bytes(self, snapshot: Snapshot) -> int:
        """Bytes on the device that could be freed without a copy."""
        with library_access():
            units = [snapshot.units[key] for key in snapshot.inventory.storages]
            return sum(unit.nbytes for unit in units if unit.tier is Tier.DEVICE and unit.is_clean())

    def settle(self) -> None:
        """After a failure that could not be undone: make every record agree with where its bytes really are.

        A freed storage is on the host; a storage that has memory and a host copy from the failed move is filled from it.
        """
        self.watch.expose()
        with library_access():
            for unit in self.ledger.own_units():
                storage = unit.storage
                if storage is None:
                    continue
                if unit.tier is Tier.NONE:
                    self.device.free([storage])
                elif unit.host is None:
                    continue
                elif storage.nbytes() > 0:
                    self._refill(unit, storage)
                    self.ledger.reveal([unit])
                else:
                    unit.tier = Tier.HOST
            snapshot = self.refresh()
            for unit in self.unrestored:
                self._refill(unit, snapshot.storage(unit))
            self.unrestored = []

    def _refill(self, unit: Unit, storage: torch.UntypedStorage) -> None:
        self.device.copy_in([(storage, unit.host_bytes())])
        self.device.synchronize()
        unit.arrive()
        unit.host_valid = False

    # -- leaving -------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Give the tensors back whole, on the device where there is room and else in plain CPU memory; forget them."""
        self.watch.expose()
        snapshot = self.refresh()
        up = Placement(dict.fromkeys(self.ledger.component_names(), Tier.DEVICE))
        try:
            self.move(snapshot, up)
        except DeviceMemoryError:
            with library_access():
                self._rehome_on_host(snapshot)
        for unit in self.ledger.own_units():
            self.ledger.forget(unit)
        self.ledger.close()

    def abandon(self) -> None:
        """Forget every tensor where it is, and give the host buffers back; what is away then cannot be read any more."""
        for unit in self.ledger.own_units():
            self.ledger.forget(unit)
        self.ledger.close()

    def _rehome_on_host(self, snapshot: Snapshot) -> None:
        for unit in snapshot.units.values():
            if unit.tier is Tier.DEVICE or unit.storage is None or unit.storage.nbytes() > 0:
                continue  # also what was built on the CPU and never moved
            home = torch.empty(unit.nbytes, dtype=torch.uint8)
            home.copy_(unit.host_bytes()) if unit.tier is Tier.HOST else home.zero_()
            for alias in unit.live_aliases():
                alias.data = tensors.fresh_view(alias, home.untyped_storage())
            self.ledger.reveal([unit])
            unit.tier, unit.bytes_alias = Tier.DEVICE, None


def _like(tensor: DTensor, shard: Tensor) -> DTensor:
    """A DTensor of the same spec around another shard, wherever that is: ``from_local`` would copy it to the mesh's device."""
    return DTensor(shard, tensor._spec, requires_grad=False)
