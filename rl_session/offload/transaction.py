"""One move, from the first copy to the last, and the way back from any point of it.

The order is fixed: copy out what is not clean, wait, free; drop; allocate, copy in, wait. The host copy is complete before
the device copy is freed, so that at every instant each byte exists somewhere. Knows nothing of why bytes move.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import NoReturn, cast

import torch
from torch import Tensor

from rl_session.errors import FaultedError, IntegrityError
from rl_session.lifecycle import Tier
from rl_session.offload import tensors
from rl_session.offload.device import CopyPair
from rl_session.offload.host_pool import HostPool
from rl_session.offload.inventory import Found
from rl_session.offload.ledger import Ledger, Snapshot
from rl_session.offload.reports import Notice
from rl_session.offload.unit import Unit
from rl_session.planning import Move, Moved, Plan

__all__ = ["Transaction"]

_Key = tuple[str, Tier, Tier, bool]


class _Lot:
    """The storages of one move, in the same position all of them."""

    __slots__ = ("move", "storages", "units")

    def __init__(self, move: Move, units: list[Unit]) -> None:
        self.move = move
        self.units = units
        self.storages: list[torch.UntypedStorage] = []

    def pairs(self) -> list[CopyPair]:
        """What to copy, and where to."""
        if True in [unit.bytes_alias is None for unit in self.units]:
            for unit, storage in zip(self.units, self.storages, strict=True):
                unit.device_bytes(storage)
        return [(unit.bytes_alias, unit.host.data) for unit in self.units]  # type: ignore[misc, union-attr]


_WRITE_WHERE_ALLOWED = "with policy.training_mode(): ...  # write weights there; the next attempt copies this storage"
_COPY_AGAIN = "the same call again: the bytes are still on the device"
_LOAD = "policy.load_checkpoint(path)  # the host copy was damaged"


class Transaction:
    """What has been done so far of a plan, in a form that can be undone.

    Args:
        ledger: The records of the policy.
        snapshot: A fresh look; re-homed storages are replaced in it.
        todo: The plan.
        pool: Where host buffers come from.
        verify: Whether contents are compared.
        pin: Whether host buffers are page-locked on CUDA.
    """

    def __init__(
        self, ledger: Ledger, snapshot: Snapshot, todo: Plan, pool: HostPool, *, verify: bool, pin: bool
    ) -> None:
        self.ledger = ledger
        self.device = ledger.device
        self.snapshot = snapshot
        self.todo = todo
        self.pool = pool
        self.verify = verify
        self.pin = pin
        self.notices: list[Notice] = []
        self.onloaded: list[Unit] = []
        """Units that came, or were coming, to the device."""
        self._freed: list[Unit] = []
        self._emptied: list[Unit] = []
        self._buffered: list[Unit] = []
        self._copied: list[Unit] = []
        self._swapped: list[tuple[Tensor, Tensor]] = []
        self._homes: list[torch.UntypedStorage] = []
        self._seconds: dict[_Key, float] = {}

    def run(self) -> None:
        """Carry the plan out. After an exception call :meth:`undo`."""
        self._offload()
        self._drop([move for move in self.todo.drops if move.from_tier is Tier.DEVICE])
        self._onload()
        # Nothing can fail any more: gradients on the host are given up only now.
        self._drop([move for move in self.todo.drops if move.from_tier is not Tier.DEVICE])

    def seconds_of(self, moved: Moved) -> float:
        """Wall time of the copies of one line of the report."""
        return self._seconds.get((moved.component, moved.from_tier, moved.to_tier, moved.elided), 0.0)

    # -- device to host ------------------------------------------------------------------------------------------

    def _offload(self) -> None:
        lots = [_Lot(move, self._units(move)) for move in self.todo.offloads]
        if not lots:
            return
        for lot in lots:
            lot.storages = self.snapshot.storages_of(lot.units)
        self.notices += self._unknown_holders(lots)
        for lot in lots:
            self._make_resizable(lot)
        copied = [lot for lot in lots if not lot.move.elided]
        self._acquire([unit for lot in copied for unit in lot.units])
        for lot in copied:
            start = time.perf_counter()
            self.device.copy_out(lot.pairs())
            self._note(lot.move, time.perf_counter() - start)
        self.device.synchronize()
        if True in [unit.is_armed for lot in lots for unit in lot.units]:
            self.device.drain()
        if self.verify:
            for lot in lots:
                self._verify_offload(lot)
        for lot in lots:
            self._let_leave(lot)
        for lot in lots:
            self.device.free(lot.storages)

    def _let_leave(self, lot: _Lot) -> None:
        """The host copies are complete: nobody may touch the tensors from now on."""
        for unit in [unit for unit in lot.units if unit.is_armed]:
            unit.lower_barrier()
        for unit, storage in zip(lot.units, lot.storages, strict=True):
            unit.host_valid = True
            unit.storage = storage
            unit.tier = Tier.HOST
        self._freed += lot.units
        self.ledger.hide(lot.units)

    def _units(self, move: Move) -> list[Unit]:
        units = self.snapshot.units
        return [units[key] for key in _keys(move)]

    def _unknown_holders(self, lots: Sequence[_Lot]) -> list[Notice]:
        """Storages that a view or a live graph we cannot see also holds: touching those cannot be caught."""
        units = [unit for lot in lots for unit in lot.units]
        counts = tensors.holder_counts([unit.key for unit in units])
        # At least one known tensor lives, or the storage would not have been found: more need be counted for few only.
        many = [pair for pair in zip(units, counts, strict=True) if pair[1] > 1 + (pair[0].bytes_alias is not None)]
        held = [unit.nbytes for unit, count in many if count > unit.num_known_holders()]
        if not held:
            return []
        message = "moved storages that something else holds too (a detached view, a live autograd graph)"
        return [Notice("unknown_holders", message, sum(held), len(held))]

    def _make_resizable(self, lot: _Lot) -> None:
        """Re-home the storages that cannot be resized (mapped files, numpy arrays)."""
        if not all(map(torch.UntypedStorage.resizable, lot.storages)):
            for index in [index for index, storage in enumerate(lot.storages) if not storage.resizable()]:
                storage = lot.storages[index]
                unit = lot.units[index]
                lot.storages[index] = home = tensors.rehome(storage, unit.live_aliases())
                self.ledger.rekey(unit, home, self.snapshot)

    def _acquire(self, units: Sequence[Unit]) -> None:
        """Give every unit a host buffer; those that have one from before keep it."""
        needy = [unit for unit in units if unit.host is None]
        buffers = self.pool.acquire([unit.nbytes for unit in needy], self.device, pin=self.pin) if needy else []
        for unit, buffer in zip(needy, buffers, strict=True):
            unit.host, unit.pool = buffer, self.pool
        self._buffered += needy
        for unit in units:
            unit.host_valid = unit.is_snapshot = False
        self._copied += units

    def _verify_offload(self, lot: _Lot) -> None:
        elided = lot.move.elided
        for unit, storage in zip(lot.units, lot.storages, strict=True):
            found = self.device.checksum(storage)
            expected = unit.checksum if elided else self.device.host_checksum(unit.host_bytes())
            if expected is not None and found != expected:
                unit.host_valid = False
                what = "changed in a mode that must not write it" if elided else "was not copied faithfully"
                self._integrity_error(unit, what, _WRITE_WHERE_ALLOWED if elided else _COPY_AGAIN)
            unit.checksum = found

    def _integrity_error(self, unit: Unit, what: str, remedy: str) -> NoReturn:
        label, facts = self.ledger.explain()
        raise IntegrityError(
            f"{label}: {unit.name} ({unit.nbytes} bytes) {what}",
            facts,
            remedy,
        )

    # -- nowhere -------------------------------------------------------------------------------------------------

    def _drop(self, moves: Sequence[Move]) -> None:
        """Let go of gradients: by ``p.grad = None``, or in place where views of a flat buffer live on.

        The frees come first, because they can fail. A later failure brings a flat buffer back as zeros, and no ``p.grad``:
        what is dropped was consumed, or the user said to discard it.
        """
        in_slots: list[int] = []
        for key in (key for move in moves for key in _keys(move)):
            found = self.snapshot.inventory.storages[key]
            if self._is_in_slots(found, self.snapshot.units[key].nbytes):
                in_slots.append(key)
            else:
                self._free_in_place(self.snapshot.units[key], found)
        if in_slots:
            self._clear_slots({alias for key in in_slots for alias in self.snapshot.inventory.storages[key].known})
            self.ledger.discard(in_slots, self.snapshot)

    @staticmethod
    def _is_in_slots(found: Found, nbytes: int) -> bool:
        """Whether ``p.grad = None`` lets go of a storage: nothing but ``.grad`` is over it, and it is no flat buffer.

        A gradient that has its storage to itself is let go of also when the user has a view of it: the view keeps the bytes.
        """
        slots = {id(entry.tensor): entry.tensor for entry in found.entries if entry.is_grad_slot}
        # FSDP cuts the gradients of a module out of one buffer, which it does not keep: nobody else looks at it.
        buffers = (e.tensor._base for e in found.entries if e.is_grad_slot and e.wrapper is not None)
        slots.update({id(buffer): buffer for buffer in buffers if buffer is not None})
        if slots.keys() != found.aliases.keys():
            return False
        is_alone = len(slots) == 1 and found.entries[0].tensor.nbytes == nbytes
        return is_alone or tensors.num_holders(found.storage) == len(slots)

    def _clear_slots(self, gone: set[int]) -> None:
        for parameter in self.ledger.owners_of_gradients():
            gradient = parameter.grad
            if gradient is not None and any(id(inner) in gone for inner in tensors.plain_tensors(gradient)):
                parameter.grad = None

    def _free_in_place(self, unit: Unit, found: Found) -> None:
        was, unit.tier, unit.storage = unit.tier, Tier.NONE, found.storage
        # The zeros that come back are nobody's gradients.
        self.ledger.stamps.consume(entry.tensor for entry in found.entries)
        self.ledger.hide([unit])
        if was is Tier.DEVICE:
            self._emptied.append(unit)
            self.device.free([found.storage])
        unit.release_host()

    # -- host to device ------------------------------------------------------------------------------------------

    def _onload(self) -> None:
        lots = [_Lot(move, self._units(move)) for move in self.todo.onloads]
        if not lots:
            return
        for lot in lots:
            foreign = {unit for unit in lot.units if unit.host is None and self._bring_in_foreign(unit)}
            lot.units = [unit for unit in lot.units if unit not in foreign] if foreign else lot.units
            self.onloaded += lot.units
            lot.storages = self.snapshot.storages_of(lot.units)
        self._collect_if_short(self.todo.nbytes_onload)
        for lot in lots:
            self.device.allocate(lot.storages, [unit.nbytes for unit in lot.units])
        for lot in lots:
            if lot.move.from_tier is Tier.HOST and lot.units:
                start = time.perf_counter()
                self.device.copy_in(lot.pairs())
                self._note(lot.move, time.perf_counter() - start)
        self.device.synchronize()
        for lot in lots:
            if lot.move.from_tier is Tier.NONE:
                for storage in lot.storages:
                    tensors.byte_alias(storage).zero_()
            elif self.verify:
                self._verify_onload(lot)

    def _verify_onload(self, lot: _Lot) -> None:
        for unit, storage in zip(lot.units, lot.storages, strict=True):
            if unit.checksum is not None and self.device.checksum(storage) != unit.checksum:
                self._integrity_error(unit, "came back with other bytes than it left with", _LOAD)

    def _collect_if_short(self, nbytes: int) -> None:
        """Look for garbage that holds device memory when there is not room for ``nbytes`` more."""
        free = self.device.free_bytes()
        if free is not None and free < nbytes:
            gc.collect()
            self.device.empty_cache()

    def _bring_in_foreign(self, unit: Unit) -> bool:
        """Move tensors that were built on the CPU onto a CUDA device, once; afterwards their storage lives there.

        Returns:
            Whether they are such, and are there now.
        """
        if unit.tier is not Tier.HOST or unit.host is not None:
            return False
        storage = self.snapshot.storage(unit)
        fresh = torch.empty(unit.nbytes, dtype=torch.uint8, device=self.device.torch_device)
        fresh.copy_(tensors.byte_alias(storage))
        home = fresh.untyped_storage()
        self._homes.append(home)
        for alias in unit.live_aliases():
            self._swapped.append((alias, alias.detach()))
            alias.data = tensors.fresh_view(alias, home)
        self.ledger.rekey(unit, home, self.snapshot)
        unit.arrive()
        self.onloaded.append(unit)
        return True

    # -- the way back --------------------------------------------------------------------------------------------

    def undo(self, cause: BaseException) -> None:
        """Put everything back: first give memory back, then bring in what was freed."""
        try:
            self.device.synchronize()  # no copy may still be under way into memory that is freed next
            for alias, old in self._swapped:
                alias.data = old
            taken = [u for u in self.onloaded if u.storage is not None and u.storage.nbytes() > 0]
            self.device.free([*(u.storage for u in taken if u.storage is not None), *self._homes])
            gone = {u: u.storage for u in self._freed if u.storage is not None and u.storage.nbytes() == 0}
            empty = {u: u.storage for u in self._emptied if u.storage is not None and u.storage.nbytes() == 0}
            self.device.allocate([*gone.values(), *empty.values()], [u.nbytes for u in (*gone, *empty)])
            self.device.copy_in([(storage, unit.host_bytes()) for unit, storage in gone.items()])
            for storage in empty.values():
                tensors.byte_alias(storage).zero_()
            self.device.synchronize()
        except BaseException as second:
            label, facts = self.ledger.explain()
            raise FaultedError(
                f"{label}: a transition failed, and putting things back failed too",
                (*facts, f"first: {type(cause).__name__}: {cause}", "every byte is safe in a host buffer"),
                "policy.recover()",
                f"{type(second).__name__}: {second}",
            ) from cause
        for unit in (*self._freed, *self._emptied):
            unit.arrive()
        self.ledger.reveal((*self._freed, *self._emptied))
        for unit in self._copied:
            unit.host_valid = False  # what stands again may be written at any time
        for unit in self._buffered:
            unit.release_host()

    def _note(self, move: Move, elapsed: float) -> None:
        key = (move.component, move.from_tier, move.to_tier, move.elided)
        self._seconds[key] = self._seconds.get(key, 0.0) + elapsed


def _keys(move: Move) -> tuple[int, ...]:
    """The storages of a move: :meth:`Ledger.facts` made its key of them."""
    return cast("tuple[int, ...]", move.key)
