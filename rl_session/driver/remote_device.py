"""The device of ranks that live elsewhere, as the driver knows it: by what they report.

Policies whose ranks share GPUs share one of these, so that making room works for them as it does in one process. Of
several ranks the fullest counts. Nothing can be moved through it; ranks do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from rl_session.errors import UnsupportedError
from rl_session.offload.device import CopyPair, Device

__all__ = ["RemoteDevice"]


class RemoteDevice(Device):
    """What several ranks have for a device.

    Args:
        capacity: The least capacity of any of them; None where it is not fixed.
        free: The fewest free bytes of any of them when they were built; None where there is no limit.
    """

    def __init__(self, capacity: int | None = None, free: int | None = None) -> None:
        super().__init__(torch.device("meta"))
        self.capacity = capacity
        self._free = free
        self._held: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"RemoteDevice(capacity={self.capacity}, held_bytes={self.held_bytes})"

    def hold(self, policy: str, nbytes: int) -> None:
        """A policy reports what it has on the device of its fullest rank; 0 when it has gone."""
        self._held[policy] = nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all policies on it, at most: the fullest rank of each."""
        return sum(self._held.values())

    @property
    def resident_bytes(self) -> int:
        """As :attr:`held_bytes`: what else is there is not reported."""
        return self.held_bytes

    def free_bytes(self) -> int | None:
        """Capacity less what is held, or what was free when the ranks were built."""
        return self._free if self.capacity is None else self.capacity - self.held_bytes

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            "a device of ranks in other processes cannot be used from this one",
            (repr(self),),
            "policy.training_mode() and the other scopes, which ask the ranks",
        )

    def adopt(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Refused."""
        self._refuse()

    def allocate(self, storages: Sequence[torch.UntypedStorage], nbytes: Sequence[int]) -> None:
        """Refused."""
        self._refuse()

    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Refused."""
        self._refuse()

    def copy_out(self, pairs: Sequence[CopyPair]) -> None:
        """Refused."""
        self._refuse()

    def copy_in(self, pairs: Sequence[CopyPair]) -> None:
        """Refused."""
        self._refuse()

    def synchronize(self) -> None:
        """Refused."""
        self._refuse()

    def checksum(self, storage: torch.UntypedStorage) -> int:
        """Refused."""
        self._refuse()

    def host_checksum(self, host: Tensor) -> int:
        """Refused."""
        self._refuse()
