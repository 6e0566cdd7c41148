"""The engine's record of one storage: where its bytes are, its host copy, and whether that copy can be trusted.

Units live on the device, not in one engine: policies that share a storage share its unit, and each declares the tier it
needs it at. Knows nothing of how bytes are copied.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rl_session.lifecycle import Component, Tier
from rl_session.offload import write_barrier
from rl_session.offload.host_pool import HostBuffer, HostPool
from rl_session.offload.tensors import byte_alias, find_storage, num_holders

__all__ = ["Unit", "arrive", "validate_hosts"]

_PLAIN = (Tensor, torch.nn.Parameter)
_KEPT_BELOW = 1 << 18
"""Of storages smaller than this many bytes the byte alias is kept, not made anew for every move."""


@attrs.define(eq=False)
class Unit:
    """One storage.

    Attributes:
        key: Identity of the storage; cannot be reused while ``weak`` exists.
        nbytes: Size in bytes while on the device.
        weak: Weak reference to the storage.
        name: Name of the first tensor found over it, for messages.
        component: The component of that tensor.
        tier: Where its bytes are. NONE: freed in place, to come back as zeros.
        storage: Held strongly while its bytes are away (it costs nothing then), so that identity survives.
        host: Its host buffer, kept as a mirror while the bytes are on the device.
        pool: Where ``host`` came from.
        host_valid: Whether ``host`` has the same bytes as the device, as far as read-only modes go.
        is_snapshot: Whether ``host`` still has the bytes it had when the device copy was made from it.
        versions: Version counters of the known tensors when ``host`` was valid.
        checksum: Of the bytes in ``host``, when contents are verified.
        aliases: Known tensors over it, weakly, by ``id``.
        wrappers: DTensors around those, weakly, by ``id``; they have no bytes of their own.
        needs: The tier each engine needs it at.
        resters: The owners that are outside every scope in a read-only mode, where anybody may write.
        is_armed: Whether a write barrier was put up around it, and nobody found it down.
        was_touched: Whether somebody wrote it at rest, or took a pointer to, since its bytes came to the device.
        bytes_alias: A uint8 tensor over all of it, made by the first move. It owns the storage: of a small one it is kept
            while a known tensor lives, of others while the bytes are away.
    """

    key: int
    nbytes: int
    weak: StorageWeakRef
    name: str
    component: str
    tier: Tier
    storage: torch.UntypedStorage | None = None
    host: HostBuffer | None = None
    pool: HostPool | None = None
    host_valid: bool = False
    is_snapshot: bool = False
    versions: dict[int, int] = attrs.field(factory=dict)
    checksum: int | None = None
    aliases: dict[int, weakref.ref[Tensor]] = attrs.field(factory=dict)
    wrappers: dict[int, weakref.ref[Tensor]] = attrs.field(factory=dict)
    needs: dict[object, Tier] = attrs.field(factory=dict)
    resters: set[object] = attrs.field(factory=set)
    is_armed: bool = False
    was_touched: bool = False
    bytes_alias: Tensor | None = None
    _mourner: Callable[[object], None] = attrs.field(init=False)
    """Called when a known tensor dies."""

    @_mourner.default
    def _make_mourner(self) -> Callable[[object], None]:
        return functools.partial(_let_bytes_go, weakref.ref(self))

    def device_bytes(self, storage: torch.UntypedStorage) -> Tensor:
        """A uint8 tensor over all of its storage. Call below ``__torch_function__``."""
        if self.bytes_alias is None:
            self.bytes_alias = byte_alias(storage)
        return self.bytes_alias

    def arrive(self) -> None:
        """Its bytes are on the device; what only served while they were away is let go."""
        arrive((self,))

    def num_known_holders(self) -> int:
        """Owners of the storage that are accounted for: known tensors, and the alias of ours."""
        known = 0 if self.bytes_alias is None else 1
        for ref in self.aliases.values():
            if ref() is not None:
                known += 1
        return known

    def host_bytes(self) -> Tensor:
        """The host copy, a uint8 tensor; there must be one."""
        assert self.host is not None, f"{self.name} has no host buffer"
        return self.host.data

    def live_aliases(self) -> list[Tensor]:
        """The known tensors that still exist."""
        return [tensor for ref in self.aliases.values() if (tensor := ref()) is not None]

    def live_tensors(self) -> list[Tensor]:
        """The known tensors that still exist, and the wrappers around them."""
        return [*self.live_aliases(), *(tensor for ref in self.wrappers.values() if (tensor := ref()) is not None)]

    def remember_aliases(self, known: Mapping[int, weakref.ref[Tensor]], wrappers: Iterable[Tensor] = ()) -> None:
        """Take note of tensors over the storage, and of wrappers around those; the dead ones are forgotten."""
        aliases = {key: ref for key, ref in self.aliases.items() if ref() is not None}
        for key, ref in known.items():
            tensor = ref()
            if tensor is not None and key not in aliases:
                aliases[key] = weakref.ref(tensor, self._mourner)
        self.aliases = aliases
        live = [tensor for ref in self.wrappers.values() if (tensor := ref()) is not None]
        self.wrappers = {id(t): weakref.ref(t) for t in (*live, *wrappers)}

    def is_clean(self) -> bool:
        """Whether the host copy can stand in for the device copy. Call below ``__torch_function__``.

        A known tensor that was not there when the copy was made counts as a change, and at rest so does everything that
        is not behind a write barrier that still stands.
        """
        if not self.host_valid or self.host is None:
            return False
        if self.resters and not self.look_at_barrier():
            return False
        versions = self.versions
        for key, ref in self.aliases.items():
            tensor = ref()
            if tensor is not None and versions.get(key) != tensor._version:
                return False
        return True

    def validate_host(self) -> None:
        """Declare the host copy equal to the device copy. Call below ``__torch_function__``."""
        validate_hosts((self,))

    @property
    def has_live_bytes(self) -> bool:
        """Whether user code that touches a tensor over it reaches its bytes."""
        return self.tier is Tier.DEVICE or (self.tier is Tier.HOST and self.host is None)

    # -- the write barrier; call below ``__torch_function__`` ------------------------------------------------------

    def raise_barrier(self) -> bool:
        """Put a write barrier up; whether that was possible.

        It is not around what something unknown holds too: it may be a pointer, which no barrier stops. Nor after a touch,
        until the bytes come anew: who touched it may have kept a pointer.
        """
        alias = None if self.was_touched else self._alias()
        self.is_armed = alias is not None and not self._is_held_by_others(alias) and write_barrier.put_up(alias)
        return self.is_armed

    def look_at_barrier(self) -> bool:
        """Whether the barrier stands. Where somebody took it down, the host copy is worthless from now on."""
        if self.is_armed:
            alias = self._alias()
            if alias is None or not write_barrier.is_up(alias):
                self.is_armed, self.was_touched = False, True
                self.host_valid = self.is_snapshot = False
        return self.is_armed

    def lower_barrier(self) -> None:
        """Take the barrier down; what was written until now is the caller's to know."""
        alias = self._alias() if self.is_armed else None
        if alias is not None:
            write_barrier.take_down(alias)
        self.is_armed = False

    def restore_barrier(self) -> None:
        """Put the barrier up again after the library itself, reading, took it down."""
        alias = self._alias() if self.is_armed else None
        if alias is None or not write_barrier.put_up(alias):
            self.is_armed = self.host_valid = False

    def _alias(self) -> Tensor | None:
        """A plain tensor that is over the storage now, or None when the storage is gone."""
        if self.bytes_alias is not None:
            return self.bytes_alias
        for ref in self.aliases.values():
            tensor = ref()
            # A subclass might dispatch; and setting .data may have given a known tensor another storage.
            if tensor is not None and type(tensor) in _PLAIN and tensor.untyped_storage()._cdata == self.key:
                return tensor
        storage = find_storage(self.weak)
        return None if storage is None else byte_alias(storage)

    def _is_held_by_others(self, alias: Tensor) -> bool:
        """Whether something holds the storage beside known tensors and ``alias``, which may have been made to look."""
        over = {id(tensor) for tensor in self.live_aliases() if tensor.untyped_storage()._cdata == self.key}
        return num_holders(alias.untyped_storage()) > len(over | {id(alias)})

    def floor_for(self, engine: object) -> Tier:
        """The highest tier that engines other than ``engine`` need it at."""
        others = [tier for owner, tier in self.needs.items() if owner is not engine]
        return max(others, key=lambda tier: tier.height, default=Tier.NONE)

    def release_host(self) -> None:
        """Give the host buffer back to its pool."""
        if self.host is not None and self.pool is not None:
            self.pool.release([self.host])
        self.host = self.pool = None
        self.host_valid = self.is_snapshot = False
        self.checksum = None


def arrive(units: Sequence[Unit]) -> None:
    """:meth:`Unit.arrive` for many."""
    for unit in units:
        unit.tier = Tier.DEVICE
        unit.storage = None
    for unit in [unit for unit in units if unit.nbytes >= _KEPT_BELOW or unit.component == Component.GRADS]:
        unit.bytes_alias = None


def validate_hosts(units: Sequence[Unit]) -> None:
    """:meth:`Unit.validate_host` for many."""
    for unit in units:
        unit.host_valid = True
        unit.versions = {key: tensor._version for key, ref in unit.aliases.items() if (tensor := ref()) is not None}


def _let_bytes_go(weak: weakref.ref[Unit], dead: object) -> None:
    """No known tensor is left over the storage: whoever let the last one go expects the memory back."""
    del dead
    unit = weak()
    if unit is not None and all(ref() is None for ref in unit.aliases.values()):
        unit.bytes_alias = None
