"""The books of one policy: every storage it reaches, and where the bytes of each are.

A refresh scans and matches what is found with the records (:class:`Unit`), which live on the device so that policies can
share storages. Nothing is moved here. Knows components and tiers, not modes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import attrs
import torch
from torch import Tensor

from rl_session.errors import UnsupportedError
from rl_session.lifecycle import Component, Placement, Tier
from rl_session.offload import tensors
from rl_session.offload.device import Device, EmulatedDevice
from rl_session.offload.gradients import GradientStamps
from rl_session.offload.guard import AwayNote, Explain, hide, reveal
from rl_session.offload.inventory import Found, Inventory, Sources, scan
from rl_session.offload.tensors import library_access
from rl_session.offload.unit import Unit
from rl_session.offload.watch import Watch
from rl_session.planning import StorageFacts

__all__ = ["Explain", "Ledger", "Snapshot"]


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
        self.is_stale = False
        """Whether another policy has moved storages of this one since the last look."""

    def refresh(self, *, deep: bool = False) -> Snapshot:
        """Scan, match what is found with the records, and say where everything is.

        Raises:
            UnsupportedError: Something was found that cannot be managed; it is named.
        """
        inventory = scan(self.sources, deep=deep)
        with library_access():
            self.device.adopt([found.storage for found in inventory.storages.values() if self._match(found)])
            units = self._forget_vanished(inventory)
            self._meet_partners(units)
            self.watch.look(inventory, units)
            return self.look(inventory, units)

    def _match(self, found: Found) -> bool:
        """Update the record of a storage; whether the device has to take note of it."""
        record = self.device.units.get(found.key)
        is_new = record is None
        unit = record if record is not None else self._new_unit(found)
        if unit.tier is Tier.DEVICE and found.storage.nbytes() < unit.nbytes:
            self._refuse_foreign_offload(found.name)
        is_hidden = unit.storage is not None and (unit.host is not None or unit.tier is Tier.NONE)
        is_known = unit.aliases.keys() >= found.aliases.keys() and unit.wrappers.keys() >= {*map(id, found.wrappers)}
        unit.remember_aliases(found.aliases.values(), found.wrappers)
        if is_hidden and not is_known:
            self.hide(unit, found.components[0])
        unit.needs.setdefault(self, unit.tier)
        return is_new and unit.tier is Tier.DEVICE

    def _new_unit(self, found: Found) -> Unit:
        for entry in found.entries:
            tensors.check_supported(entry.tensor, entry.name)
        if found.storage.nbytes() == 0:
            self._refuse_foreign_offload(found.name)
        resident = self.device.is_resident(found.storage) and not self._is_placed_elsewhere(found)
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

    def _is_placed_elsewhere(self, found: Found) -> bool:
        return self.sources.placed_elsewhere.issuperset(found.components)

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
            self.forget(record)
        return mine

    def _meet_partners(self, units: dict[int, Unit]) -> None:
        for unit in units.values():
            if len(unit.needs) > 1:
                self.watch.meet(ledger.watch for ledger in unit.needs if isinstance(ledger, Ledger))

    def look(self, inventory: Inventory, units: dict[int, Unit]) -> Snapshot:
        """Say where everything is, from a scan and its records; :meth:`away` answers from the last look."""
        live = [e.tensor for e in inventory.entries(Component.GRADS) if self.stamps.is_live(e.tensor)]
        nbytes: dict[str, dict[Tier, int]] = {name: {} for name in self.component_names()}
        away: dict[str, int] = dict.fromkeys(nbytes, 0)
        freed: set[str] = set()
        placed_elsewhere = self.sources.placed_elsewhere
        for key, found in inventory.storages.items():
            unit = units[key]
            components = found.components
            counted = nbytes[components[0]]
            counted[unit.tier] = counted.get(unit.tier, 0) + unit.nbytes
            if unit.tier is Tier.DEVICE or placed_elsewhere.issuperset(components):
                continue
            for component in components:
                away[component] += 1
                if unit.tier is Tier.NONE:
                    freed.add(component)
        self._hide_empty_shards(inventory, away)
        self._away = away
        self.placement, self.nbytes = Placement(self._tiers(inventory, units)), nbytes
        self.is_stale = False
        return Snapshot(inventory, units, self.placement, live, frozenset(freed), nbytes)

    def _hide_empty_shards(self, inventory: Inventory, away: dict[str, int]) -> None:
        """A rank with nothing of a tensor refuses what the others refuse: alone it would wait for them in a collective."""
        for entry in inventory.empty_shards:
            for tensor in (entry.tensor, entry.wrapper):
                assert tensor is not None
                if away[entry.component]:
                    hide(tensor, AwayNote(entry.name, entry.component, "on the host", self.explain))
                else:
                    reveal(tensor)

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
        return {name: alone.get(name, shared.get(name, Tier.NONE)) for name in self.component_names()}

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
        """What planning needs to know of every storage. Call below ``__torch_function__``."""
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
            if not self._is_placed_elsewhere(found)
            for unit in (snapshot.units[key],)
        ] + [self._orphan_facts(unit) for unit in snapshot.orphans()]

    def _orphan_facts(self, unit: Unit) -> StorageFacts:
        """What was away when the policy let go of it, and a user still holds: it comes home with the parameters."""
        floor = max(unit.floor_for(self), Tier.HOST, key=lambda tier: tier.height)
        follows = (Component.PARAMS,)
        return StorageFacts(unit.key, unit.component, follows, unit.nbytes, unit.tier, clean=False, floor=floor)

    def storage(self, unit: Unit, snapshot: Snapshot) -> torch.UntypedStorage:
        """The storage of a record, held by it or found by the scan."""
        if unit.storage is not None:
            return unit.storage
        return snapshot.inventory.storages[unit.key].storage

    def rekey(self, unit: Unit, found: Found, home: torch.UntypedStorage, snapshot: Snapshot) -> None:
        """Move a record to another storage that holds the same bytes now."""
        if isinstance(self.device, EmulatedDevice):
            self.device.forget([found.storage])
        del self.device.units[unit.key], snapshot.inventory.storages[unit.key], snapshot.units[unit.key]
        found.storage = home
        snapshot.inventory.storages[home._cdata] = found
        snapshot.units[home._cdata] = unit
        unit.key, unit.weak = home._cdata, tensors.weak_storage(home)
        unit.is_armed = unit.was_touched = False
        found.key = home._cdata
        self.device.units[home._cdata] = unit
        self.device.adopt([home])

    def own_units(self) -> list[Unit]:
        """Every record of this policy."""
        return [unit for unit in self.device.units.values() if self in unit.needs]

    def owners_of_gradients(self) -> list[Tensor]:
        """Every tensor whose ``.grad`` belongs to this policy."""
        optimizer = self.sources.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        own = (parameter for _, parameter in self.sources.shards.parameters(self.sources.module))
        return [*own, *(p for g in groups for p in g["params"]), *self.sources.masters]

    def hide(self, unit: Unit, component: str) -> None:
        """Make every known tensor over a storage refuse to be touched."""
        where = "on the host" if unit.tier is Tier.HOST else "freed"
        note = AwayNote(unit.name, component, where, self.explain)
        for tensor in unit.live_tensors():
            hide(tensor, note)

    def reveal(self, unit: Unit) -> None:
        """Undo :meth:`hide`."""
        for tensor in unit.live_tensors():
            reveal(tensor)

    def forget(self, unit: Unit) -> None:
        """Stop keeping a record; the last policy to do so gives its host buffer back."""
        del unit.needs[self]
        unit.resters.discard(self)
        if not unit.needs:
            unit.release_host()
            del self.device.units[unit.key]

    def close(self) -> None:
        """Nothing is away any more, and nothing is watched."""
        self._away = {}
        self.watch.close()
