"""One look at a policy: what was found, matched with the records; and what of it is remembered for the next look.

Knows nothing of where anything should be, and changes nothing on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import attrs
import torch
from torch import Tensor

from rl_session.lifecycle import Component, Placement, Tier
from rl_session.offload.fingerprint import Fingerprint, Gathered
from rl_session.offload.inventory import Inventory
from rl_session.offload.unit import Unit

__all__ = ["WEIGHTS", "Groups", "Memory", "Snapshot", "grouped"]

WEIGHTS = frozenset({Component.PARAMS, Component.BUFFERS})
"""The components that make up the weights."""

Groups = dict[tuple[str, ...], list[Unit]]
"""The records of what was found, by the components that reach it, in scanning order."""


def grouped(inventory: Inventory, units: dict[int, Unit]) -> Groups:
    """Records by the components of what was found."""
    groups: Groups = {}
    for key, found in inventory.storages.items():
        groups.setdefault(found.components, []).append(units[key])
    return groups


@attrs.define(eq=False)
class Snapshot:
    """A scan matched against the engine's records; what was found lives as long as it does.

    Attributes:
        inventory: What was found.
        units: Every record of the policy.
        groups: The records of what was found, by the components that reach it.
        orphans: Records of storages that are away and that no component reaches any more, though a user holds them.
        alive: The tensors found.
        placement: Where each component is. What is held up only by another policy's need does not count.
        live_gradients: Gradients that no optimizer step has consumed.
        freed_in_place: Components with storages that come back as zeros.
        nbytes: Bytes of each component, by tier.
    """

    inventory: Inventory
    units: dict[int, Unit]
    groups: Groups
    orphans: list[Unit]
    alive: list[Tensor]
    placement: Placement = attrs.field(factory=lambda: Placement({}))
    live_gradients: list[Tensor] = attrs.field(factory=list)
    freed_in_place: frozenset[str] = frozenset()
    nbytes: dict[str, dict[Tier, int]] = attrs.field(factory=dict)
    _weights: frozenset[int] | None = None
    _storages: dict[int, torch.UntypedStorage] = attrs.field(factory=dict)
    """Storages that were looked up already."""

    def found(self) -> Iterator[Unit]:
        """The records of what was found."""
        return itertools.chain.from_iterable(self.groups.values())

    def storage(self, unit: Unit) -> torch.UntypedStorage:
        """The storage of a record, held by it or found by the scan."""
        storage = unit.storage if unit.storage is not None else self._storages.get(unit.key)
        return storage if storage is not None else self.inventory.storages[unit.key].storage

    def storages_of(self, units: Sequence[Unit]) -> list[torch.UntypedStorage]:
        """The storage of each of some records."""
        known = self._storages
        return [
            unit.storage if unit.storage is not None else known[unit.key] if unit.key in known else self.storage(unit)
            for unit in units
        ]

    def weights(self) -> frozenset[int]:
        """The storages of parameters and buffers."""
        if self._weights is None:
            mine = (units for components, units in self.groups.items() if not WEIGHTS.isdisjoint(components))
            self._weights = frozenset(unit.key for units in mine for unit in units)
        return self._weights

    def rekey(self, unit: Unit, key: int) -> None:
        """A record is of another storage from now on."""
        found = self.inventory.storages.pop(unit.key)
        del self.units[unit.key]
        found.key = key
        self.inventory.storages[key] = found
        self.units[key] = unit
        self._weights = None

    def discard(self, keys: Iterable[int]) -> None:
        """Storages are let go of, and their records with them."""
        gone = {key: self.inventory.storages.pop(key).components for key in keys}
        for components in set(gone.values()):
            self.groups[components] = [unit for unit in self.groups[components] if unit.key not in gone]
        for key in gone:
            del self.units[key]


class Memory:
    """The last scan without its gradients, to be used again while nothing has changed. It keeps no tensor alive.

    Made by :meth:`of`.
    """

    def __init__(self, fingerprint: Fingerprint, snapshot: Snapshot, first: list[tuple[Unit, int]]) -> None:
        whole = snapshot.inventory
        kept = {unit.key: whole.storages[unit.key] for unit, _ in first}
        self._fingerprint = fingerprint
        self._first = first
        """Each record, and which tensor of the walk is the first over its storage."""
        self._inventory = Inventory(kept, whole.uncovered)
        self._groups = {components: units.copy() for components, units in snapshot.groups.items()}
        self._groups.pop((Component.GRADS,), None)
        self._weights = snapshot.weights()

    @classmethod
    def of(cls, snapshot: Snapshot, gathered: Gathered) -> Memory | None:
        """Remember a scan, if the walk made beside it has seen all that is to be compared the next time."""
        found = snapshot.inventory.storages
        is_mixed = any(len(components) > 1 and Component.GRADS in components for components in snapshot.groups)
        if snapshot.orphans or snapshot.inventory.empty_shards or is_mixed:
            return None
        fingerprint = Fingerprint(gathered)
        places: dict[int, int] = {}
        for index, address in enumerate(fingerprint.addresses):
            places.setdefault(address, index)
        kept = [unit for unit in snapshot.found() if unit.component != Component.GRADS]
        walked = set(map(id, gathered.tensors))
        for unit in kept:
            if unit.key not in places or any(id(entry.tensor) not in walked for entry in found[unit.key].entries):
                return None
        return cls(fingerprint, snapshot, [(unit, places[unit.key]) for unit in kept])

    def __len__(self) -> int:
        return len(self._first)

    def recall(self, gathered: Gathered, units: dict[int, Unit]) -> Snapshot | None:
        """The scan as it was, without gradients, if all of it still holds; None where it has to be made again."""
        if not self._fingerprint.matches(gathered):
            return None
        tensors = gathered.tensors
        on_device = [(unit, tensors[index]) for unit, index in self._first if unit.tier is Tier.DEVICE]
        there = [tensor.untyped_storage() for _, tensor in on_device]
        if list(map(torch.UntypedStorage.nbytes, there)) != [unit.nbytes for unit, _ in on_device]:
            return None  # somebody has resized one
        storages = dict(zip([unit.key for unit, _ in on_device], there, strict=True))
        inventory = Inventory(self._inventory.storages.copy(), self._inventory.uncovered)
        groups = {components: group.copy() for components, group in self._groups.items()}
        return Snapshot(inventory, units, groups, [], gathered.tensors, weights=self._weights, storages=storages)

    def beside(self, gradients: Inventory) -> Inventory | None:
        """The whole inventory, with gradients where a scan has them; None where those are no storages of their own."""
        if not gradients.storages.keys().isdisjoint(self._fingerprint.addresses):
            return None
        kept = self._inventory.storages
        weights = {key: found for key, found in kept.items() if found.components[0] in WEIGHTS}
        return Inventory({**weights, **gradients.storages, **kept}, self._inventory.uncovered)
