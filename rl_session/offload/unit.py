"""The engine's record of one storage: where its bytes are, its host copy, and whether that copy can be trusted.

Units live on the device, not in one engine: policies that share a storage share its unit, and each declares the tier it
needs it at. Knows nothing of how bytes are copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rl_session.lifecycle import Tier
from rl_session.offload.host_pool import HostBuffer, HostPool

__all__ = ["Unit"]


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

    def remember_aliases(self, tensors: Iterable[Tensor], wrappers: Iterable[Tensor] = ()) -> None:
        """Take note of tensors over the storage, and of wrappers around those; the dead ones are forgotten."""
        self.aliases = {id(t): weakref.ref(t) for t in (*self.live_aliases(), *tensors)}
        known = [tensor for ref in self.wrappers.values() if (tensor := ref()) is not None]
        self.wrappers = {id(t): weakref.ref(t) for t in (*known, *wrappers)}

    def current_versions(self) -> dict[int, int]:
        """Version counters now. Call below ``__torch_function__``."""
        return {id(tensor): tensor._version for tensor in self.live_aliases()}

    def is_clean(self) -> bool:
        """Whether the host copy can stand in for the device copy. Call below ``__torch_function__``.

        A known tensor that was not there when the copy was made counts as a change.
        """
        if not self.host_valid or self.host is None:
            return False
        return all(self.versions.get(key) == version for key, version in self.current_versions().items())

    def validate_host(self) -> None:
        """Declare the host copy equal to the device copy. Call below ``__torch_function__``."""
        self.host_valid = True
        self.versions = self.current_versions()

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
