"""Objects on the same GPUs: one is in at a time, and who comes in sends the others away.

Sizes are not known here, so there is no budget: whoever else holds anything leaves, least recently used first, before the
newcomer's first legacy call. Knows nothing of which calls that takes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

from rl_session.errors import NestingError
from rl_session.lifecycle import Mode
from rl_session.workers.replies import TransitionRequest

if TYPE_CHECKING:
    from rl_session.adapters.nemo_rl.groups import LegacyGroup

__all__ = ["Sharing", "Tenant"]


class Tenant(Protocol):
    """One of the objects, as far as making room goes."""

    @property
    def group(self) -> LegacyGroup:
        """Its group."""
        ...

    def open_scope(self) -> str:
        """Its innermost scope in words, if that needs the device; else nothing."""
        ...

    def evict(self, reason: str) -> None:
        """Leave the device, whatever the release policy."""
        ...


class Sharing:
    """Tenants of the same GPUs.

    Args:
        release: "lazy" or "eager": what leaving a scope does.
    """

    def __init__(self, release: Literal["lazy", "eager"] = "lazy") -> None:
        self.release = release
        self._tenants: list[Tenant] = []
        self._used: dict[int, int] = {}
        self._clock = itertools.count(1)
        self._lock = threading.RLock()

    @property
    def num_tenants(self) -> int:
        """How many there are that are alive."""
        return sum(tenant.group.is_alive for tenant in self._tenants)

    def join(self, tenant: Tenant) -> None:
        """A tenant comes; nothing is moved."""
        self._tenants.append(tenant)
        tenant.group.sharing = self

    def part(self, group: LegacyGroup) -> None:
        """A tenant leaves."""
        self._tenants = [tenant for tenant in self._tenants if tenant.group is not group]
        group.sharing = None

    @contextmanager
    def admitted(self, group: LegacyGroup, request: TransitionRequest) -> Iterator[None]:
        """Send the others away, and keep them away until the block has moved its bytes.

        Raises:
            NestingError: Another tenant is in a scope of its own that needs the device; nothing was moved.
            RLSessionError: Another tenant could not be sent away.
        """
        if request.mode is Mode.OFFLOADED:
            yield
            return
        with self._lock:
            self._tenants = [tenant for tenant in self._tenants if tenant.group.is_alive]
            others = [tenant for tenant in self._tenants if tenant.group is not group]
            others = [tenant for tenant in others if not _fits_beside(tenant.group, group)]
            for tenant in others:
                _check_free(tenant, group, request.mode)
            for tenant in sorted(others, key=self._order):
                if not tenant.group.is_released:
                    tenant.evict(f"evicted for {group.label}, which enters {request.mode} mode")
            self._used[id(group)] = next(self._clock)
            yield

    def _order(self, tenant: Tenant) -> tuple[bool, int]:
        """An engine first: one that serves the training weights must sleep before they leave."""
        return tenant.group.kind != "engine", self._used.get(id(tenant.group), 0)


def _fits_beside(there: LegacyGroup, coming: LegacyGroup) -> bool:
    """Whether two are meant to be in together: a policy in refit mode, and the weights of the engine it pushes to."""
    wakes_weights = coming.wish.tags is not None and "kv_cache" not in coming.wish.tags
    return there.mode is Mode.REFIT and wakes_weights


def _check_free(tenant: Tenant, coming: LegacyGroup, mode: Mode) -> None:
    scope = tenant.open_scope()
    if scope:
        raise NestingError(
            f"{coming.label}: {mode} mode beside {tenant.group.label} on the same GPUs",
            (f"open: {scope}", *coming.explain()[1]),
            "end that block first: tenants that were shared are in one at a time",
        )
