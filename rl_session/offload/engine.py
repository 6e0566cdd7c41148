"""The offload engine: brings the storages of one policy to a placement, all of them or none.

A move has a fixed order: copy out what is not clean, wait, free; drop; allocate, copy in, wait. The host copy is complete
before the device copy is freed, so that at every instant each byte exists somewhere and any failure can be undone. Facts
about what moved are returned; nothing is logged here. Knows components and tiers, not modes, scopes or policies.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import attrs
import torch
from torch import Tensor

from rl_session.errors import (
    DeviceMemoryError,
    FaultedError,
    IntegrityError,
    RLSessionError,
    TransitionError,
    UnsupportedError,
)
from rl_session.lifecycle import Component, Placement, Tier
from rl_session.offload import tensors
from rl_session.offload.caches import CacheHook, run_cache_hooks
from rl_session.offload.device import Device, EmulatedDevice
from rl_session.offload.gradients import GradientStamps
from rl_session.offload.guard import AwayNote, hide, reveal
from rl_session.offload.host_pool import HostPool
from rl_session.offload.inventory import Found, Inventory, Sources, scan
from rl_session.offload.tensors import library_access
from rl_session.offload.unit import Unit
from rl_session.planning import Move, Moved, Plan, StorageFacts, plan, summarise

__all__ = ["Engine", "MoveReport", "Notice", "Snapshot"]


_YOUNG = 1
"""The oldest generation that every release collects: reference cycles of the last step are that young."""


@attrs.frozen
class Notice:
    """Something worth a ``warning`` record: a stable code, a message, and how much it concerns."""

    code: str
    message: str
    nbytes: int | None = None
    count: int | None = None


@attrs.frozen
class MoveReport:
    """What a move did.

    Attributes:
        placement: Where each component is now.
        moved: One entry for each component, pair of tiers, and copied or elided.
        seconds: Wall time of each entry of ``moved``, copies only.
        dropped_bytes: Bytes of gradients dropped.
        notices: What to warn about.
    """

    placement: Placement
    moved: tuple[Moved, ...]
    seconds: tuple[float, ...]
    dropped_bytes: int
    notices: tuple[Notice, ...]

    @property
    def bytes_moved(self) -> int:
        """Bytes copied, both ways."""
        return sum(item.nbytes for item in self.moved if not item.elided)

    @property
    def bytes_elided(self) -> int:
        """Bytes that changed tier without a copy."""
        return sum(item.nbytes for item in self.moved if item.elided)


@attrs.define(eq=False)
class Snapshot:
    """A scan matched against the engine's records.

    Attributes:
        inventory: What was found.
        placement: Where each component is. What is held up only by another policy's need does not count.
        live_gradients: Gradients that no optimizer step has consumed.
        freed_in_place: Components with storages that come back as zeros.
        nbytes: Bytes of each component, by tier.
    """

    inventory: Inventory
    units: dict[int, Unit]
    placement: Placement
    live_gradients: list[Tensor]
    freed_in_place: frozenset[str]
    nbytes: dict[str, dict[Tier, int]]

    def orphans(self) -> list[Unit]:
        """Records of storages that are away and that no component reaches any more, though a user holds them."""
        return [unit for key, unit in self.units.items() if key not in self.inventory.storages]


@attrs.define
class _Transaction:
    """What has been done so far, in a form that can be undone."""

    freed: list[Unit] = attrs.field(factory=list)
    emptied: list[Unit] = attrs.field(factory=list)
    onloaded: list[Unit] = attrs.field(factory=list)
    buffered: list[Unit] = attrs.field(factory=list)
    copied: list[Unit] = attrs.field(factory=list)
    swapped: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)
    homes: list[torch.UntypedStorage] = attrs.field(factory=list)


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
        explain: Callable[[], tuple[str, tuple[str, ...]]] = lambda: ("policy", ()),
    ) -> None:
        self.sources = sources
        self.device = device
        self.pool = pool
        self.verify = verify
        self.pin = pin
        self.stamps = GradientStamps()
        self.cache_hooks: list[CacheHook] = []
        self.snapshots_intact = True
        self.unrestored: list[Unit] = []
        """Units on the device whose live bytes are only on the host, because a swap could not be undone."""
        self.placement = Placement({})
        """Where each component is, as of the last look or move."""
        self.nbytes: dict[str, dict[Tier, int]] = {}
        """Bytes of each component by tier, as of the last look or move."""
        self.explain = explain
        self._away: dict[str, int] = {}

    # -- looking -------------------------------------------------------------------------------------------------

    def refresh(self, *, deep: bool = False) -> Snapshot:
        """Scan, match what is found with the records, and say where everything is.

        Raises:
            UnsupportedError: Something was found that cannot be managed; it is named.
        """
        inventory = scan(self.sources, deep=deep)
        with library_access():
            self.device.adopt([found.storage for found in inventory.storages.values() if self._match(found)])
            units = self._forget_vanished(inventory)
            return self._snapshot(inventory, units)

    def _match(self, found: Found) -> bool:
        """Update the record of a storage; whether the device has to take note of it."""
        record = self.device.units.get(found.key)
        is_new = record is None
        unit = record if record is not None else self._new_unit(found)
        if unit.tier is Tier.DEVICE and found.storage.nbytes() < unit.nbytes:
            self._refuse_foreign_offload(found.name)
        is_hidden = unit.storage is not None and (unit.host is not None or unit.tier is Tier.NONE)
        if is_hidden and not unit.aliases.keys() >= found.aliases.keys():
            unit.remember_aliases(found.aliases.values())
            self._hide(unit, found.components[0])
        unit.remember_aliases(found.aliases.values())
        unit.needs.setdefault(self, unit.tier)
        return is_new and unit.tier is Tier.DEVICE

    def _new_unit(self, found: Found) -> Unit:
        for entry in found.entries:
            tensors.check_supported(entry.tensor, entry.name)
        if found.storage.nbytes() == 0:
            self._refuse_foreign_offload(found.name)
        resident = self.device.is_resident(found.storage)
        unit = Unit(
            key=found.key,
            nbytes=found.storage.nbytes(),
            weak=tensors.weak_storage(found.storage),
            name=found.name,
            component=found.components[0],
            tier=Tier.DEVICE if resident else Tier.HOST,
            storage=None if resident else found.storage,
        )
        self.device.units[found.key] = unit
        return unit

    def _refuse_foreign_offload(self, name: str) -> NoReturn:
        label, facts = self.explain()
        raise UnsupportedError(
            f"{label}: {name} has no bytes: something else has offloaded it (its storage has size 0)",
            facts,
            "bring the model back to its device with the tool that offloaded it, and let one owner move it",
        )

    def _forget_vanished(self, inventory: Inventory) -> dict[int, Unit]:
        """Drop records of storages that nobody reaches any more, and keep those that are away and a user still holds."""
        mine: dict[int, Unit] = {}
        for key, record in list(self.device.units.items()):
            if self not in record.needs:
                continue
            held = record.tier is not Tier.DEVICE and bool(record.live_aliases())
            if key in inventory.storages or held:
                mine[key] = record
                continue
            del record.needs[self]
            if not record.needs:
                record.release_host()
                del self.device.units[key]
        return mine

    def _snapshot(self, inventory: Inventory, units: dict[int, Unit]) -> Snapshot:
        live = [e.tensor for e in inventory.entries(Component.GRADS) if self.stamps.is_live(e.tensor)]
        nbytes: dict[str, dict[Tier, int]] = {name: {} for name in self._component_names()}
        freed: set[str] = set()
        for key, found in inventory.storages.items():
            unit = units[key]
            components = found.components
            counted = nbytes[components[0]]
            counted[unit.tier] = counted.get(unit.tier, 0) + unit.nbytes
            for component in components:
                if unit.tier is Tier.NONE:
                    freed.add(component)
        self._away = {
            name: sum(
                1
                for key, f in inventory.storages.items()
                if name in f.components and units[key].tier is not Tier.DEVICE
            )
            for name in nbytes
        }
        self.placement, self.nbytes = Placement(self._tiers(inventory, units)), nbytes
        return Snapshot(inventory, units, self.placement, live, frozenset(freed), nbytes)

    def _tiers(self, inventory: Inventory, units: dict[int, Unit]) -> dict[str, Tier]:
        """The tier of each component: the highest of the storages that are its alone, else of those it shares.

        A storage that is on the device only because another policy needs it counts where this one put it.
        """
        alone: dict[str, Tier] = {}
        shared: dict[str, Tier] = {}
        for key, found in inventory.storages.items():
            unit = units[key]
            held_by_other = unit.tier is Tier.DEVICE and unit.floor_for(self) is Tier.DEVICE
            tier = unit.needs[self] if held_by_other else unit.tier
            components = found.components
            tiers = shared if len(components) > 1 else alone
            for component in components:
                tiers[component] = max(tiers.get(component, Tier.NONE), tier, key=lambda t: t.height)
        return {name: alone.get(name, shared.get(name, Tier.NONE)) for name in self._component_names()}

    def _component_names(self) -> list[str]:
        names = [Component.PARAMS, Component.BUFFERS, Component.GRADS, Component.OPTIMIZER, Component.REFERENCE]
        return [*(str(name) for name in names), *self.sources.extras]

    def away(self, components: Iterable[str]) -> list[str]:
        """Those of ``components`` with bytes that are not on the device, as of the last move. O(components)."""
        return [name for name in components if self._away.get(str(name))]

    # -- moving --------------------------------------------------------------------------------------------------

    def move(self, snapshot: Snapshot, target: Placement) -> MoveReport:
        """Bring every component to its tier in ``target``.

        Args:
            snapshot: A fresh :meth:`refresh`.
            target: Component to tier.

        Returns:
            What moved.

        Raises:
            DeviceMemoryError: The device has no room; everything is where it was.
            HostMemoryError: The host or its budget has no room; everything is where it was.
            IntegrityError: Contents differ from what they were known to be; everything is where it was.
            TransitionError: Anything else went wrong; everything is where it was.
            FaultedError: It went wrong, and so did putting things back.
        """
        with library_access():
            todo = plan(self._facts(snapshot), target)
            notices: list[Notice] = []
            seconds: dict[tuple[str, Tier, Tier, bool], float] = {}
            transaction = _Transaction()
            try:
                self._offload(todo, snapshot, transaction, seconds, notices)
                self._drop([move for move in todo.drops if move.from_tier is Tier.DEVICE], snapshot, transaction)
                self._onload(todo, snapshot, transaction, seconds)
                # Nothing can fail any more: gradients on the host are given up only now.
                self._drop([move for move in todo.drops if move.from_tier is not Tier.DEVICE], snapshot, transaction)
            except BaseException as error:
                self._undo(transaction, error)
                self._reraise(error, todo)
            self._commit(snapshot, target, transaction)
        if todo.offloads or todo.drops:
            notices += self._give_back()
        moved = summarise(todo.moves)
        times = tuple(seconds.get((m.component, m.from_tier, m.to_tier, m.elided), 0.0) for m in moved)
        dropped = sum(move.nbytes for move in todo.drops)
        return MoveReport(self.placement, moved, times, dropped, tuple(notices))

    def _facts(self, snapshot: Snapshot) -> list[StorageFacts]:
        return [
            StorageFacts(
                key=key,
                component=found.components[0],
                components=found.components,
                nbytes=unit.nbytes,
                tier=unit.tier,
                clean=unit.tier is Tier.DEVICE and unit.is_clean(),
                floor=unit.floor_for(self),
            )
            for key, found in snapshot.inventory.storages.items()
            for unit in (snapshot.units[key],)
        ] + [self._orphan_facts(unit) for unit in snapshot.orphans()]

    def _orphan_facts(self, unit: Unit) -> StorageFacts:
        """What was away when the policy let go of it, and a user still holds: it comes home with the parameters."""
        floor = max(unit.floor_for(self), Tier.HOST, key=lambda tier: tier.height)
        follows = (Component.PARAMS,)
        return StorageFacts(unit.key, unit.component, follows, unit.nbytes, unit.tier, clean=False, floor=floor)

    def _offload(
        self,
        todo: Plan,
        snapshot: Snapshot,
        transaction: _Transaction,
        seconds: dict[tuple[str, Tier, Tier, bool], float],
        notices: list[Notice],
    ) -> None:
        if not todo.offloads:
            return
        notices += self._unknown_holders(todo, snapshot)
        units = [self._ensure_resizable(move.key, snapshot) for move in todo.offloads]
        storages = [self._storage(unit, snapshot) for unit in units]
        copied = [index for index, move in enumerate(todo.offloads) if not move.elided]
        self._acquire([units[index] for index in copied], transaction)
        for group in _runs([todo.offloads[index] for index in copied], copied):
            start = time.perf_counter()
            self.device.copy_out([(storages[index], _host(units[index])) for index in group])
            _note(seconds, todo.offloads[group[0]], time.perf_counter() - start)
        self.device.synchronize()
        if self.verify:
            self._verify_offload(todo.offloads, units, storages)
        for unit in units:
            unit.validate_host()
        for unit, storage, move in zip(units, storages, todo.offloads, strict=True):
            unit.storage = storage
            transaction.freed.append(unit)
            unit.tier = Tier.HOST
            self._hide(unit, move.component)
        self.device.free(storages)

    def _unknown_holders(self, todo: Plan, snapshot: Snapshot) -> list[Notice]:
        """Storages that a view or a live graph we cannot see also holds: touching those cannot be caught."""
        nbytes = count = 0
        for move in todo.offloads:
            unit = snapshot.units[move.key]
            known = len(unit.live_aliases())
            if tensors.num_holders(self._storage(unit, snapshot)) > known:
                nbytes += unit.nbytes
                count += 1
        if not count:
            return []
        message = "moved storages that something else holds too (a detached view, a live autograd graph)"
        return [Notice("unknown_holders", message, nbytes, count)]

    def _storage(self, unit: Unit, snapshot: Snapshot) -> torch.UntypedStorage:
        if unit.storage is not None:
            return unit.storage
        return snapshot.inventory.storages[unit.key].storage

    def _ensure_resizable(self, key: int, snapshot: Snapshot) -> Unit:
        """The unit of a storage, re-homed first when it cannot be resized (mapped files, numpy arrays)."""
        unit = snapshot.units[key]
        found = snapshot.inventory.storages[key]
        if found.storage.resizable():
            return unit
        aliases = unit.live_aliases()
        home = tensors.rehome(found.storage, aliases)
        self._rekey(unit, found, home, snapshot)
        return unit

    def _rekey(self, unit: Unit, found: Found, home: torch.UntypedStorage, snapshot: Snapshot) -> None:
        """Move a record to another storage that holds the same bytes now."""
        if isinstance(self.device, EmulatedDevice):
            self.device.forget([found.storage])
        del self.device.units[unit.key], snapshot.inventory.storages[unit.key], snapshot.units[unit.key]
        found.storage = home
        snapshot.inventory.storages[home._cdata] = found
        snapshot.units[home._cdata] = unit
        unit.key, unit.weak = home._cdata, tensors.weak_storage(home)
        found.key = home._cdata
        self.device.units[home._cdata] = unit
        self.device.adopt([home])

    def _acquire(self, units: Sequence[Unit], transaction: _Transaction) -> None:
        """Give every unit a host buffer; those that have one from before keep it."""
        needy = [unit for unit in units if unit.host is None]
        buffers = self.pool.acquire([unit.nbytes for unit in needy], self.device, pin=self.pin)
        for unit, buffer in zip(needy, buffers, strict=True):
            unit.host, unit.pool = buffer, self.pool
            transaction.buffered.append(unit)
        for unit in units:
            unit.host_valid = unit.is_snapshot = False
        transaction.copied += units

    def _verify_offload(
        self, moves: Sequence[Move], units: Sequence[Unit], storages: Sequence[torch.UntypedStorage]
    ) -> None:
        for move, unit, storage in zip(moves, units, storages, strict=True):
            found = self.device.checksum(storage)
            expected = unit.checksum if move.elided else self.device.host_checksum(_host(unit))
            if expected is not None and found != expected:
                unit.host_valid = False
                what = "changed in a mode that must not write it" if move.elided else "was not copied faithfully"
                self._integrity_error(unit, what)
            unit.checksum = found

    def _integrity_error(self, unit: Unit, what: str) -> NoReturn:
        label, facts = self.explain()
        raise IntegrityError(
            f"{label}: {unit.name} ({unit.nbytes} bytes) {what}",
            facts,
            "change weights in training_mode() or through the optimizer; the next attempt copies this storage",
        )

    def _drop(self, moves: Sequence[Move], snapshot: Snapshot, transaction: _Transaction) -> None:
        """Let go of gradients: by ``p.grad = None``, or in place where views of a flat buffer live on.

        The frees come first, because they can fail. A later failure brings a flat buffer back as zeros, and no ``p.grad``:
        what is dropped was consumed, or the user said to discard it.
        """
        in_slots = {move.key for move in moves if self._is_in_slots(move, snapshot)}
        for move in moves:
            if move.key not in in_slots:
                self._free_in_place(snapshot.units[move.key], snapshot.inventory.storages[move.key], transaction)
        for key in in_slots:
            self._clear_slots(snapshot.inventory.storages.pop(key))
            snapshot.units.pop(key).release_host()
            del self.device.units[key]

    def _is_in_slots(self, move: Move, snapshot: Snapshot) -> bool:
        """Whether ``p.grad = None`` lets go of a storage: nothing but ``.grad`` is over it, and it is no flat buffer.

        A gradient that has its storage to itself is let go of also when the user has a view of it: the view keeps the bytes.
        """
        found = snapshot.inventory.storages[move.key]
        slots = {id(entry.tensor): entry.tensor for entry in found.entries if entry.is_grad_slot}
        if slots.keys() != found.aliases.keys():
            return False
        is_alone = len(slots) == 1 and found.entries[0].tensor.nbytes == move.nbytes
        return is_alone or tensors.num_holders(found.storage) == len(slots)

    def _clear_slots(self, found: Found) -> None:
        for parameter in self._owners_of_gradients():
            if parameter.grad is not None and id(parameter.grad) in found.aliases:
                parameter.grad = None

    def _owners_of_gradients(self) -> list[Tensor]:
        optimizer = self.sources.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        return [*self.sources.module.parameters(), *(p for g in groups for p in g["params"]), *self.sources.masters]

    def _free_in_place(self, unit: Unit, found: Found, transaction: _Transaction) -> None:
        was, unit.tier, unit.storage = unit.tier, Tier.NONE, found.storage
        self.stamps.consume(entry.tensor for entry in found.entries)  # the zeros that come back are nobody's gradients
        self._hide(unit, Component.GRADS)
        if was is Tier.DEVICE:
            transaction.emptied.append(unit)
            self.device.free([found.storage])
        unit.release_host()

    def _onload(
        self,
        todo: Plan,
        snapshot: Snapshot,
        transaction: _Transaction,
        seconds: dict[tuple[str, Tier, Tier, bool], float],
    ) -> None:
        if not todo.onloads:
            return
        units = [snapshot.units[move.key] for move in todo.onloads]
        for unit in units:
            if unit.tier is Tier.HOST and unit.host is None:
                self._bring_in_foreign(unit, snapshot, transaction)
        home = [unit for unit in units if unit not in transaction.onloaded]
        for unit in home:
            transaction.onloaded.append(unit)
        storages = [self._storage(unit, snapshot) for unit in home]
        self._collect_if_short(todo.nbytes_onload)
        self.device.allocate(storages, [unit.nbytes for unit in home])
        copied = [index for index, unit in enumerate(home) if unit.tier is Tier.HOST]
        moves = {move.key: move for move in todo.onloads}
        for group in _runs([moves[home[index].key] for index in copied], copied):
            start = time.perf_counter()
            self.device.copy_in([(storages[index], _host(home[index])) for index in group])
            _note(seconds, moves[home[group[0]].key], time.perf_counter() - start)
        self.device.synchronize()
        for unit, storage in zip(home, storages, strict=True):
            if unit.tier is Tier.NONE:
                tensors.byte_alias(storage).zero_()
            elif self.verify and unit.checksum is not None and self.device.checksum(storage) != unit.checksum:
                self._integrity_error(unit, "came back with other bytes than it left with")

    def _collect_if_short(self, nbytes: int) -> None:
        """Look for garbage that holds device memory when there is not room for ``nbytes`` more."""
        free = self.device.free_bytes()
        if free is not None and free < nbytes:
            gc.collect()
            self.device.empty_cache()

    def _bring_in_foreign(self, unit: Unit, snapshot: Snapshot, transaction: _Transaction) -> None:
        """Move tensors that were built on the CPU onto a CUDA device, once; afterwards their storage lives there."""
        found = snapshot.inventory.storages[unit.key]
        fresh = torch.empty(unit.nbytes, dtype=torch.uint8, device=self.device.torch_device)
        fresh.copy_(tensors.byte_alias(found.storage))
        home = fresh.untyped_storage()
        transaction.homes.append(home)
        for alias in unit.live_aliases():
            transaction.swapped.append((alias, alias.detach()))
            alias.data = tensors.fresh_view(alias, home)
        self._rekey(unit, found, home, snapshot)
        unit.tier, unit.storage = Tier.DEVICE, None
        transaction.onloaded.append(unit)

    # -- ending a move -------------------------------------------------------------------------------------------

    def _commit(self, snapshot: Snapshot, target: Placement, transaction: _Transaction) -> None:
        for unit in transaction.onloaded:
            found = snapshot.inventory.storages.get(unit.key)
            unit.tier, unit.storage = Tier.DEVICE, None
            self._reveal(unit)
            if found is None or found.components == (Component.GRADS,):
                unit.release_host()  # gradients change every step: their buffers are worth more to the next one
            elif unit.host is not None:
                unit.validate_host()
                unit.is_snapshot = True
        for key, found in snapshot.inventory.storages.items():
            unit = snapshot.units[key]
            unit.needs[self] = max((target[c] for c in found.components), key=lambda t: t.height)
        self._snapshot(snapshot.inventory, snapshot.units)  # refreshes what away() answers from

    def _undo(self, transaction: _Transaction, cause: BaseException) -> None:
        """Put everything back: first give memory back, then bring in what was freed."""
        try:
            self.device.synchronize()  # no copy may still be under way into memory that is freed next
            for alias, old in transaction.swapped:
                alias.data = old
            taken = [u for u in transaction.onloaded if u.storage is not None and u.storage.nbytes() > 0]
            self.device.free([*(u.storage for u in taken if u.storage is not None), *transaction.homes])
            gone = {u: u.storage for u in transaction.freed if u.storage is not None and u.storage.nbytes() == 0}
            empty = {u: u.storage for u in transaction.emptied if u.storage is not None and u.storage.nbytes() == 0}
            self.device.allocate([*gone.values(), *empty.values()], [u.nbytes for u in (*gone, *empty)])
            self.device.copy_in([(storage, _host(unit)) for unit, storage in gone.items()])
            for storage in empty.values():
                tensors.byte_alias(storage).zero_()
            self.device.synchronize()
        except BaseException as second:
            label, facts = self.explain()
            raise FaultedError(
                f"{label}: a transition failed, and putting things back failed too",
                (*facts, f"first: {type(cause).__name__}: {cause}", "every byte is safe in a host buffer"),
                "policy.recover()",
                f"{type(second).__name__}: {second}",
            ) from cause
        for unit in (*transaction.freed, *transaction.emptied):
            unit.tier, unit.storage = Tier.DEVICE, None
            self._reveal(unit)
        for unit in transaction.copied:
            unit.host_valid = False  # what stands again may be written at any time
        for unit in transaction.buffered:
            unit.release_host()

    def _reraise(self, error: BaseException, todo: Plan) -> NoReturn:
        if isinstance(error, RLSessionError) or not isinstance(error, Exception):
            raise error
        label, facts = self.explain()
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError):
            needed = f"needed: {todo.nbytes_onload} bytes, after giving back {todo.nbytes_freed}"
            free = self.device.free_bytes()
            now = f"free now: {'no limit known' if free is None else f'{free} bytes'}"
            remedy = "offload another policy first (other.offload()), or offload more of this one (OffloadConfig)"
            raise DeviceMemoryError(f"{label}: no room on the device", (*facts, needed, now), remedy, cause) from error
        raise TransitionError(
            f"{label}: a transition failed and was rolled back", facts, "remove the cause and try again", cause
        ) from error

    def _give_back(self) -> list[Notice]:
        """After something was freed: run the cache hooks, collect young garbage once, return cached blocks once.

        A full collection walks every object of the process (0.1 to 0.2 s beside transformers): it runs only when room is
        short, before an onload.
        """
        problems = run_cache_hooks(self.sources.module, self.cache_hooks)
        gc.collect(_YOUNG)
        self.device.empty_cache()
        return [Notice("cache_hook_failed", problem) for problem in problems]

    # -- guarding ------------------------------------------------------------------------------------------------

    def _hide(self, unit: Unit, component: str) -> None:
        where = "on the host" if unit.tier is Tier.HOST else "freed"
        note = AwayNote(unit.name, component, where, self.explain)
        for tensor in unit.live_aliases():
            hide(tensor, note)

    def _reveal(self, unit: Unit) -> None:
        for tensor in unit.live_aliases():
            reveal(tensor)

    # -- what happened outside ------------------------------------------------------------------------------------

    def mark_dirty(self) -> None:
        """Device copies may change from now on: no host copy can stand in for one."""
        for unit in self._own_units():
            if unit.tier is Tier.DEVICE:
                unit.host_valid = False

    def forget_snapshots(self) -> None:
        """The weights have moved on since the device copies were made: they cannot be restored from the host."""
        self.snapshots_intact = False
        self.mark_dirty()

    def begin_snapshots(self) -> None:
        """From now on the host copies of what is on the device are a snapshot that a failed step can fall back on."""
        with library_access():
            for unit in self._own_units():
                kept = unit.is_snapshot and self.snapshots_intact
                unit.is_snapshot = unit.tier is Tier.DEVICE and (kept or unit.is_clean())
        self.snapshots_intact = True

    def _own_units(self) -> list[Unit]:
        return [unit for unit in self.device.units.values() if self in unit.needs]

    def restore_snapshot(self, components: Iterable[str]) -> bool:
        """Write the host copies of ``components`` back over the device copies.

        Returns:
            Whether that was possible: every storage has the copy it was brought in from, and no step was made since.
        """
        if not self.snapshots_intact:
            return False
        wanted = set(components)
        with library_access():
            snapshot = self.refresh()
            units = [
                snapshot.units[key]
                for key, found in snapshot.inventory.storages.items()
                if wanted.intersection(found.components) and snapshot.units[key].tier is Tier.DEVICE
            ]
            if not all(unit.is_snapshot and unit.host is not None for unit in units):
                return False
            self.device.copy_in([(self._storage(u, snapshot), _host(u)) for u in units])
            self.device.synchronize()
        return True

    # -- reading -------------------------------------------------------------------------------------------------

    def readable(self, tensor: Tensor) -> Tensor:
        """A tensor with the same values that may be read now: itself, or a view of its host buffer.

        The result shares memory with what it reads from; clone it to keep it.
        """
        with library_access():
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
            unit = self.device.units.get(tensors.storage_of(tensor)._cdata)
            if unit is None:
                return tensor.detach()
            unit.host_valid, unit.checksum = False, None
            return self.readable(tensor)

    def clean_bytes(self, snapshot: Snapshot) -> int:
        """Bytes on the device that could be freed without a copy."""
        with library_access():
            units = [snapshot.units[key] for key in snapshot.inventory.storages]
            return sum(unit.nbytes for unit in units if unit.tier is Tier.DEVICE and unit.is_clean())

    def settle(self) -> None:
        """After a failure that could not be undone: make every record agree with where its bytes really are.

        A freed storage is on the host; a storage that has memory and a host copy from the failed move is filled from it.
        """
        with library_access():
            for unit in self._own_units():
                storage = unit.storage
                if storage is None:
                    continue
                if unit.tier is Tier.NONE:
                    self.device.free([storage])
                elif unit.host is None:
                    continue
                elif storage.nbytes() > 0:
                    self._refill(unit, storage)
                    self._reveal(unit)
                else:
                    unit.tier = Tier.HOST
            snapshot = self.refresh()
            for unit in self.unrestored:
                self._refill(unit, self._storage(unit, snapshot))
            self.unrestored = []

    def _refill(self, unit: Unit, storage: torch.UntypedStorage) -> None:
        self.device.copy_in([(storage, _host(unit))])
        self.device.synchronize()
        unit.tier, unit.storage, unit.host_valid = Tier.DEVICE, None, False

    # -- leaving -------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Give the tensors back whole, on the device where there is room and else in plain CPU memory; forget them."""
        snapshot = self.refresh()
        up = Placement(dict.fromkeys(self._component_names(), Tier.DEVICE))
        try:
            self.move(snapshot, up)
        except DeviceMemoryError:
            with library_access():
                self._rehome_on_host(snapshot)
        for unit in self._own_units():
            del unit.needs[self]
            if not unit.needs:
                unit.release_host()
                del self.device.units[unit.key]
        self._away = {}

    def _rehome_on_host(self, snapshot: Snapshot) -> None:
        for unit in snapshot.units.values():
            if unit.tier is Tier.DEVICE or unit.storage is None or unit.storage.nbytes() > 0:
                continue  # also what was built on the CPU and never moved
            home = torch.empty(unit.nbytes, dtype=torch.uint8)
            home.copy_(_host(unit)) if unit.tier is Tier.HOST else home.zero_()
            for alias in unit.live_aliases():
                alias.data = tensors.fresh_view(alias, home.untyped_storage())
                reveal(alias)
            unit.tier = Tier.DEVICE


def _host(unit: Unit) -> Tensor:
    assert unit.host is not None, f"{unit.name} has no host buffer"
    return unit.host.data


def _runs(moves: Sequence[Move], indices: Sequence[int]) -> list[list[int]]:
    """``indices`` grouped by the component of their moves, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for move, index in zip(moves, indices, strict=True):
        groups.setdefault(move.component, []).append(index)
    return list(groups.values())


def _note(seconds: dict[tuple[str, Tier, Tier, bool], float], move: Move, elapsed: float) -> None:
    key = (move.component, move.from_tier, move.to_tier, move.elided)
    seconds[key] = seconds.get(key, 0.0) + elapsed
