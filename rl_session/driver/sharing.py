"""Handles of one policy in several processes: who has the lease, and what the next holder has to know.

Knows nothing of scopes beyond whether one is open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rl_session.driver.core import Core
from rl_session.driver.ownership import Token
from rl_session.errors import FaultedError, OwnershipError, StaleHandleError
from rl_session.workers.lease import PolicyState

__all__ = ["Sharing"]


class Sharing(Core):
    """Takes the lease, gives it up, and brings what is known up to date."""

    def state(self) -> PolicyState:
        """What the next holder of the lease has to know."""
        return PolicyState(
            mode=self.mode,
            row=self.row,
            resting_mode=self.resting_mode,
            resting=self.resting,
            resting_cells=self.resting_cells,
            pending_release=self._pending_release,
            fault=self.fault,
            flags=self.flags,
            last_move=self.last_move,
            last_checkpoint=self.ranks.last_checkpoint,
            closed=self.closed,
        )

    def adopt(self, state: PolicyState | None) -> None:
        """Know what the last holder of the lease knew."""
        if state is None:
            return
        self.mode, self.row = state.mode, state.row
        self.resting_mode, self.resting = state.resting_mode, state.resting
        self.resting_cells, self._pending_release = state.resting_cells, state.pending_release
        self.fault, self.flags, self.closed = state.fault, state.flags, state.closed
        self.last_move, self.ranks.last_checkpoint = state.last_move, state.last_checkpoint

    def share(self) -> None:
        """From now on handles elsewhere get the lease whenever nobody is at work here."""
        if self.lease is None:
            return
        with self.lock:
            self.lease.is_shared = True
            if self.frames:
                self.lease.note_scope(self.frames[0].describe())
            if not (self.frames or self._calls or self._moving or self.closed):
                self._release()

    def look(self) -> None:
        """Bring what is known up to date, where another process may have changed it."""
        lease = self.lease
        if lease is None or lease.is_held or self.closed or self.frames:
            return
        with self.lock:
            try:
                with self._noting_loss():
                    seen = lease.view()
            except FaultedError:
                return
            if seen["is_free"]:
                self.adopt(seen["state"])
            elif seen["mode"] is not None:
                self.mode = self.row = seen["mode"]

    def scope_elsewhere(self) -> str:
        """The scope that another process has open, in words; "" where none has."""
        lease = self.lease
        if lease is None or lease.is_held:
            return ""
        with self.lock, self._noting_loss():
            scope: str = lease.view()["scope"]
            return scope

    def _release(self, token: Token | None = None) -> None:
        """Nobody owns it from now on, in this process and, where others have handles, in any."""
        lease = self.lease
        if lease is not None and lease.is_held and lease.is_shared:
            if self.step is None:
                lease.give_up(self.state())
            else:
                lease.note_scope("")
        self.ownership.release(token)

    def _take_lease(self, what: str, timeout: float | None = None, *, scope: str = "") -> None:
        assert self.lease is not None
        if self.lease.is_revoked and self.frames:
            raise self._revoked(what)
        with self._noting_loss():
            grant = self.lease.take(what, timeout, scope=scope)
        self.adopt(grant.state)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """A block that asks the rank which grants the lease; where that is lost, the policy is faulted."""
        try:
            yield
        except FaultedError as error:
            self.ranks.note_lost(0, error.cause)
            self._note_fault(error)
            raise

    def _take_lease_by_force(self, what: str) -> None:
        """Get the lease from whoever has it, where the rank that grants it lives; else all will be built anew."""
        if self.lease is not None and not self.lease.is_held and 0 not in self.ranks.lost:
            with suppress(OwnershipError):
                self.adopt(self.lease.take(what, force=True).state)

    def _revoked(self, what: str) -> StaleHandleError:
        return StaleHandleError(
            f"{self.label}: {what}, after another process took the policy over",
            self.explain()[1],
            "leave the open scopes, and enter new ones",
        )
