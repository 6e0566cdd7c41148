"""The books of one policy: every storage it reaches, and where the bytes of each are.

A refresh scans and matches what is found with the records (:class:`Unit`), which live on the device so that policies can
share storages. Nothing is moved here. Knows components and tiers, not modes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from rl_session.errors import UnsupportedError
from rl_session.lifecycle import Component, Placement, Tier
from rl_session.offload import tensors
from rl_session.offload.device import Device, EmulatedDevice
from rl_session.offload.fingerprint import Gathered, gather
from rl_session.offload.gradients import GradientStamps
from rl_session.offload.guard import AwayNote, Explain, hide, hide_all, note_with, reveal, reveal_all
from rl_session.offload.inventory import Found, Inventory, Sources, scan, scan_gradients
from rl_session.offload.snapshot import Groups, Memory, Snapshot, grouped
from rl_session.offload.tensors import library_access
from rl_session.offload.unit import Unit
from rl_session.offload.watch import Watch
from rl_session.planning import StorageFacts

__all__ = ["Explain", "Ledger", "Snapshot"]

_DIRTY = (Tier.DEVICE, False, Tier.NONE)
_CLEAN = (Tier.DEVICE, True, Tier.NONE)
_AWAY = (Tier.HOST, False, Tier.NONE)
"""Where a storage can be that no other policy needs: tier, whether its host copy is good, the floor."""


class Ledger:
    """Records of the storages of one policy.

    Args:
        sources: What to scan.
        device: The device, which holds the records.
        explain: Gives the label of the policy and facts for messages.
    """

    def __init__(self, sources: Sources, device: Device, explain: Explain) -> None:
        self.sources = sources
        self.device = device
        self.explain = explain
        self.stamps = GradientStamps()
        self.watch = Watch(self)
        self.placement = Placement({})
        """Where each component is, as of the last look or move."""
        self.nbytes: dict[str, dict[Tier, int]] = {}
        """Bytes of each component by tier, as of the last look or move."""
        self._away: dict[str, int] = {}
        self._own: dict[int, Unit] = {}
        """Every record of this policy, by storage."""
        self._memory: Memory | None = None
        note_with(self)
        self.is_stale = False
        """Whether another policy has moved storages of this one since the last look."""

    # -- looking -------------------------------------------------------------------------------------------------

    def refresh(self, *, deep: bool = False) -> Snapshot:
        """Find everything, match it with the records, and say where it is.

        Raises:
            UnsupportedError: Something was found that cannot be managed; it is named.
        """
        with library_access():
            snapshot = self._scan(deep=True) if deep else self._recall_or_scan()
            self.watch.look(snapshot)
            return self.look(snapshot)

    def _recall_or_scan(self) -> Snapshot:
        """What the last scan found, if nothing has changed since; else another scan."""
        gathered = gather(self.sources)
        snapshot = self._recall(gathered) if gathered is not None else None
        if snapshot is None:
            self._memory = None
            snapshot = self._scan(deep=False)
            if gathered is not None:
                self._memory = Memory.of(snapshot, gathered)
        return snapshot

    def _recall(self, gathered: Gathered) -> Snapshot | None:
        memory = self._memory
        snapshot = memory.recall(gathered, self._own.copy()) if memory is not None else None
        if snapshot is None or memory is None:
            return None
        if not gathered.has_gradients and len(self._own) == len(memory):
            return snapshot
        gradients = scan_gradients(self.sources)
        inventory = memory.beside(gradients)
        if inventory is None:
            return None
        self._match_all(gradients)
        return self._matched(inventory, [*gathered.tensors, *gradients.alive])

    def _scan(self, *, deep: bool) -> Snapshot:
        inventory = scan(self.sources, deep=deep)
        self._match_all(inventory)
        alive, inventory.alive = inventory.alive, []
        return self._matched(inventory, alive)

    def _match_all(self, inventory: Inventory) -> None:
        self.device.adopt([found.storage for found in inventory.storages.values() if self._match(found)])

    def _matched(self, inventory: Inventory, alive: list[Tensor]) -> Snapshot:
        orphans = self._forget_vanished(inventory)
        units = self._own.copy()
        self._meet_partners(units)
        return Snapshot(inventory, units, grouped(inventory, units), orphans, alive)

    # -- records -------------------------------------------------------------------------------------------------

    def _match(self, found: Found) -> bool:
        """Update the record of a storage; whether the device has to take note of it."""
        record = self.device.units.get(found.key)
        is_new = record is None
        unit = record if record is not None else self._new_unit(found)
        if unit.tier is Tier.DEVICE and (nbytes := found.storage.nbytes()) != unit.nbytes:
            if nbytes < unit.nbytes:
                self._refuse_foreign_offload(found.name)
            self._grow(unit, nbytes)
            is_new = True
        is_hidden = unit.storage is not None and (unit.host is not None or unit.tier is Tier.NONE)
        wrappers = found.wrappers
        is_known = unit.aliases.keys() >= found.known.keys() and unit.wrappers.keys() >= {*map(id, wrappers)}
        unit.remember_aliases(found.known, wrappers)
        if is_hidden and not is_known:
            self.hide([unit])
        unit.needs.setdefault(self, unit.tier)
        self._own[found.key] = unit
        return is_new and unit.tier is Tier.DEVICE

    @staticmethod
    def _grow(unit: Unit, nbytes: int) -> None:
        """Somebody has resized a storage in place: no host copy is of that size."""
        unit.lower_barrier()
        unit.release_host()
        unit.bytes_alias = None
        unit.nbytes = nbytes

    def _new_unit(self, found: Found) -> Unit:
        for entry in found.entries:
            tensors.check_supported(entry.tensor, entry.name)
        if found.storage.nbytes() == 0:
            self._refuse_foreign_offload(found.name)
        resident = self.device.is_resident(found.storage) and not self._is_placed_elsewhere(found.components)
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

    def _is_placed_elsewhere(self, components: tuple[str, ...]) -> bool:
        return self.sources.placed_elsewhere.issuperset(components)

    def _refuse_foreign_offload(self, name: str) -> NoReturn:
        label, facts = self.explain()
        raise UnsupportedError(
            f"{label}: {name} has no bytes: something else has offloaded it (its storage has size 0)",
            facts,
            "bring the model back to its device with the tool that offloaded it, and let one owner move it",
        )

    def _forget_vanished(self, inventory: Inventory) -> list[Unit]:
        """Drop records of storages that nobody reaches any more; those that are away and a user still holds are kept.

        Returns:
            The ones kept.
        """
        orphans: list[Unit] = []
        for key in [key for key in self._own if key not in inventory.storages]:
            unit = self._own[key]
            if unit.tier is not Tier.DEVICE and unit.live_aliases():
                orphans.append(unit)
            else:
                self.forget(unit)
        return orphans

    def _meet_partners(self, units: dict[int, Unit]) -> None:
        for unit in units.values():
            if len(unit.needs) > 1:
                self.watch.meet(ledger.watch for ledger in unit.needs if isinstance(ledger, Ledger))

    def look(self, snapshot: Snapshot) -> Snapshot:
        """Say where everything is; :meth:`away` answers from the last look."""
        nbytes: dict[str, dict[Tier, int]] = {name: {} for name in self.component_names()}
        away = dict.fromkeys(nbytes, 0)
        freed: set[str] = set()
        highest: dict[tuple[str, ...], Tier] = {}
        for components, units in snapshot.groups.items():
            held, num_away = _bytes_by_tier(units)
            highest[components] = (
                self._highest(units) if Tier.DEVICE in held else max(held, key=_height, default=Tier.NONE)
            )
            counted = nbytes[components[0]]
            for tier, size in held.items():
                counted[tier] = counted.get(tier, 0) + size
            if num_away and not self._is_placed_elsewhere(components):
                for component in components:
                    away[component] += num_away
                freed.update(components if Tier.NONE in held else ())
        self._hide_empty_shards(snapshot.inventory, away)
        self._away = away
        self.placement, self.nbytes, self.is_stale = self._placement(snapshot.groups, highest), nbytes, False
        snapshot.placement, snapshot.nbytes = self.placement, nbytes
        snapshot.live_gradients, snapshot.freed_in_place = self._live_gradients(snapshot), frozenset(freed)
        return snapshot

    def _live_gradients(self, snapshot: Snapshot) -> list[Tensor]:
        storages = snapshot.inventory.storages
        units = (
            unit for components, group in snapshot.groups.items() if Component.GRADS in components for unit in group
        )
        entries = (entry for unit in units for entry in storages[unit.key].entries)
        return [e.tensor for e in entries if e.component == Component.GRADS and self.stamps.is_live(e.tensor)]

    def _placement(self, groups: Groups, highest: dict[tuple[str, ...], Tier]) -> Placement:
        """The tier of each component: the highest of the storages that are its alone, else of those it shares."""
        alone: dict[str, Tier] = {}
        shared: dict[str, Tier] = {}
        for components, units in groups.items():
            tiers = shared if len(components) > 1 else alone
            for component in components if units else ():
                tiers[component] = max(tiers.get(component, Tier.NONE), highest[components], key=_height)
        return Placement({name: alone.get(name, shared.get(name, Tier.NONE)) for name in self.component_names()})

    def _highest(self, units: list[Unit]) -> Tier:
        """The highest tier of some storages. One that is on the device only for another policy counts where this put it."""
        highest = Tier.NONE
        for unit in units:
            tier = unit.tier
            if tier is Tier.DEVICE and len(unit.needs) > 1 and unit.floor_for(self) is Tier.DEVICE:
                tier = unit.needs[self]
            if tier is Tier.DEVICE:
                return tier
            if tier is Tier.HOST:
                highest = tier
        return highest

    def _hide_empty_shards(self, inventory: Inventory, away: dict[str, int]) -> None:
        """A rank with nothing of a tensor refuses what the others refuse: alone it would wait for them in a collective."""
        for entry in inventory.empty_shards:
            for tensor in (entry.tensor, entry.wrapper):
                assert tensor is not None
                if away[entry.component]:
                    hide(tensor, AwayNote(entry.name, entry.component, "on the host", self.explain))
                else:
                    reveal(tensor)

    def tell_others(self, unit: Unit) -> None:
        """Another policy reaches a storage of which something may have changed here: it has to look again."""
        for ledger in unit.needs:
            if ledger is not self and isinstance(ledger, Ledger):
                ledger.is_stale = True

    def component_names(self) -> list[str]:
        """The standard components, then the registered extras."""
        names = [Component.PARAMS, Component.BUFFERS, Component.GRADS, Component.OPTIMIZER, Component.REFERENCE]
        return [*(str(name) for name in names), *self.sources.extras]

    def away(self, components: Iterable[str]) -> list[str]:
        """Those of ``components`` with bytes that are not on the device, as of the last move of anybody.

        O(components), except after another policy has moved storages of this one.
        """
        if self.is_stale:
            self.refresh()
        return [name for name in components if self._away.get(str(name))]

    def facts(self, snapshot: Snapshot) -> list[StorageFacts]:
        """What planning needs to know, by position; the key of each is those of its storages.

        Call below ``__torch_function__``.
        """
        facts: list[StorageFacts] = []
        for components, units in snapshot.groups.items():
            if not self._is_placed_elsewhere(components):
                for (tier, clean, floor), lot in self._by_position(units).items():
                    keys, nbytes = tuple([unit.key for unit in lot]), sum([unit.nbytes for unit in lot])
                    facts.append(StorageFacts(keys, components[0], components, nbytes, tier, clean, floor, len(lot)))
        return facts + [self._orphan_facts(unit) for unit in snapshot.orphans]

    def _by_position(self, units: list[Unit]) -> dict[tuple[Tier, bool, Tier], list[Unit]]:
        """Storages by tier, whether their host copy is good, and the tier another policy needs them at."""
        if units and True not in [len(unit.needs) > 1 for unit in units]:
            tiers = [unit.tier for unit in units]
            if tiers.count(Tier.HOST) == len(units):
                return {_AWAY: units}
            if tiers.count(Tier.DEVICE) == len(units) and True not in [unit.host_valid for unit in units]:
                return {_DIRTY: units}
        return self._by_each_position(units)

    def _by_each_position(self, units: list[Unit]) -> dict[tuple[Tier, bool, Tier], list[Unit]]:
        """The same, one by one."""
        lots: defaultdict[tuple[Tier, bool, Tier], list[Unit]] = defaultdict(list)
        dirty, clean, away = lots[_DIRTY], lots[_CLEAN], lots[_AWAY]  # nearly all, so the loop is short for those
        for unit in units:
            if len(unit.needs) > 1 or unit.tier is Tier.NONE:
                is_clean = unit.tier is Tier.DEVICE and unit.is_clean()
                lots[unit.tier, is_clean, unit.floor_for(self)].append(unit)
            elif unit.tier is Tier.HOST:
                away.append(unit)
            elif unit.host_valid and unit.is_clean():
                clean.append(unit)
            else:
                dirty.append(unit)
        return {position: lot for position, lot in lots.items() if lot}

    def _orphan_facts(self, unit: Unit) -> StorageFacts:
        """What was away when the policy let go of it, and a user still holds: it comes home with the parameters."""
        floor = max(unit.floor_for(self), Tier.HOST, key=lambda tier: tier.height)
        follows = (Component.PARAMS,)
        return StorageFacts((unit.key,), unit.component, follows, unit.nbytes, unit.tier, clean=False, floor=floor)

    def rekey(self, unit: Unit, home: torch.UntypedStorage, snapshot: Snapshot) -> None:
        """Move a record to another storage that holds the same bytes now."""
        if isinstance(self.device, EmulatedDevice):
            self.device.forget([unit.key])
        del self.device.units[unit.key]
        key = home._cdata
        snapshot.rekey(unit, key)
        for ledger in unit.needs:
            if isinstance(ledger, Ledger):
                ledger.rename(unit.key, key)
        unit.key, unit.weak = key, tensors.weak_storage(home)
        unit.is_armed = unit.was_touched = False
        unit.bytes_alias = None
        self.device.units[key] = unit
        self.device.adopt([home])

    def rename(self, old: int, new: int) -> None:
        """A record is of another storage; should its tensors go back to the old one, the last scan holds no more."""
        self._own[new] = self._own.pop(old)
        self._memory = None

    def lose(self, key: int, *, is_remembered: bool) -> None:
        """A record is gone; of gradients, which are found afresh each time, the last scan remembers nothing."""
        self._own.pop(key, None)
        if is_remembered:
            self._memory = None

    def own_units(self) -> list[Unit]:
        """Every record of this policy."""
        return list(self._own.values())

    def owners_of_gradients(self) -> list[Tensor]:
        """Every tensor whose ``.grad`` belongs to this policy."""
        optimizer = self.sources.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        own = (parameter for _, parameter in self.sources.shards.parameters(self.sources.module))
        return [*own, *(p for g in groups for p in g["params"]), *self.sources.masters]

    def hide(self, units: Sequence[Unit]) -> None:
        """Make every known tensor over storages refuse to be touched; :meth:`note_of` is what errors then say."""
        hide_all(_known_tensors(units))

    def reveal(self, units: Sequence[Unit]) -> None:
        """Undo :meth:`hide`."""
        reveal_all(_known_tensors(units))

    def note_of(self, key: int) -> AwayNote | None:
        """What to say of a tensor over a storage that is away; None where this policy does not know it."""
        unit = self._own.get(key)
        if unit is None or unit.tier is Tier.DEVICE:
            return None
        return AwayNote(unit.name, unit.component, "on the host" if unit.tier is Tier.HOST else "freed", self.explain)

    def discard(self, keys: Sequence[int], snapshot: Snapshot) -> None:
        """Forget storages that were let go of, whoever else knew them."""
        for key in keys:
            unit = self.device.units.pop(key)
            unit.release_host()
            unit.bytes_alias = None
            for ledger in unit.needs:
                if isinstance(ledger, Ledger):
                    ledger.lose(key, is_remembered=ledger is not self)
        snapshot.discard(keys)

    def forget(self, unit: Unit) -> None:
        """Stop keeping a record; the last policy to do so gives its host buffer back."""
        del unit.needs[self], self._own[unit.key]
        unit.resters.discard(self)
        if not unit.needs:
            unit.release_host()
            unit.bytes_alias = None
            del self.device.units[unit.key]

    def close(self) -> None:
        """Nothing is away any more, and nothing is watched."""
        self._away = {}
        self._memory = None
        self.watch.close()


def _height(tier: Tier) -> int:
    return tier.height


def _known_tensors(units: Sequence[Unit]) -> list[Tensor]:
    """The known tensors over some storages that still exist, and the wrappers around them."""
    known = [tensor for unit in units for ref in unit.aliases.values() if (tensor := ref()) is not None]
    for unit in [unit for unit in units if unit.wrappers]:
        known += [tensor for ref in unit.wrappers.values() if (tensor := ref()) is not None]
    return known


def _bytes_by_tier(units: list[Unit]) -> tuple[dict[Tier, int], int]:
    """Bytes of some storages by tier, and how many of them are not on the device."""
    tiers = [unit.tier for unit in units]
    num_on_device = tiers.count(Tier.DEVICE)
    if units and tiers.count(tiers[0]) == len(units):  # nearly always, and the sum is then a loop without a test
        return {tiers[0]: sum([unit.nbytes for unit in units])}, len(units) - num_on_device
    held: dict[Tier, int] = {}
    for unit in units:
        held[unit.tier] = held.get(unit.tier, 0) + unit.nbytes
    return held, len(units) - num_on_device
