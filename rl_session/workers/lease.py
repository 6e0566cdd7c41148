"""Who may change the state of a policy whose ranks several processes can reach: a lease with an epoch.

The first rank grants it; every rank checks each call against it in O(1). The epoch is a fencing token: a call of an
earlier holder that arrives late carries a smaller one and is refused. Knows of scopes only what the holder says of them.
"""

from __future__ import annotations

import threading
from typing import Any

import attrs

from rl_session.errors import OwnershipError, RLSessionError, StaleHandleError
from rl_session.lifecycle import Cells, Flags, Mode, Placement
from rl_session.workers.replies import Stamp

__all__ = ["FREE", "Grant", "Lease", "PolicyState"]

_SOMEBODY = -2
FREE = -1
"""The holder of a lease that nobody holds."""


@attrs.define(slots=False, kw_only=True)
class PolicyState:
    """What whoever holds the lease knows of a policy, and the next holder has to know.

    Attributes:
        mode: The mode in effect.
        row: The row of the mode table in effect.
        resting_mode: The mode outside every scope.
        resting: The placement there.
        resting_cells: What the resting placement asks of each component, where that is no mode's row.
        pending_release: Whether a way out failed and has to be made up for.
        fault: What could not be undone, if anything.
        flags: What decides placements.
        last_move: What moved last, for messages.
        last_checkpoint: What was saved or loaded last.
        closed: How it was closed, if it was.
    """

    mode: Mode
    row: Mode
    resting_mode: Mode
    resting: Placement
    resting_cells: Cells | None = None
    pending_release: bool = False
    fault: RLSessionError | None = None
    flags: Flags
    last_move: str = ""
    last_checkpoint: str | None = None
    closed: str = ""


@attrs.define(slots=False)
class Grant:
    """The lease went to a handle: its epoch, and the state as the last holder left it (None: nobody said)."""

    handle: int
    epoch: int
    state: PolicyState | None


class Lease:
    """The lease as one rank knows it. Only the first rank grants."""

    def __init__(self, label: str) -> None:
        self._label = label
        self.epoch = 1
        self.holder = 0
        self.held_by = "the session that made the policy"
        self.scope = ""
        """The outermost scope that the holder has open, or is entering, in words; "" when it is at something shorter."""
        self.state: PolicyState | None = None
        self._num_handles = 0
        # Questions are answered on a thread of their own, while the rank computes on another.
        self._lock = threading.Lock()

    def check(self, stamp: Stamp, mode: Mode | None, method: str) -> None:
        """Refuse a call that was judged by what is no longer so. O(1).

        Args:
            stamp: What the call carries.
            mode: The mode this rank is in.
            method: For messages.

        Raises:
            StaleHandleError: Another handle has the lease, or the mode is not the one the call was judged by.
        """
        if stamp.epoch > self.epoch:  # granted by the first rank since; a reader only knows of it
            self.epoch, self.holder = stamp.epoch, stamp.handle if stamp.mode is None else _SOMEBODY
            self.held_by = f"handle {stamp.handle}"
        elif stamp.epoch == self.epoch and self.holder == _SOMEBODY and stamp.mode is None:
            self.holder = stamp.handle
        if stamp.epoch == self.epoch and (stamp.handle == self.holder or (stamp.mode is mode and mode is not None)):
            return
        raise StaleHandleError(
            f"{self._label}: {method}() by handle {stamp.handle} with epoch {stamp.epoch}",
            (f"the lease has epoch {self.epoch} and is held by {self.describe()}; the mode is {mode}",),
            "the same call again",
        )

    def describe(self) -> str:
        """Who holds it, in words."""
        return "nobody" if self.holder == FREE else self.held_by

    def connect(self) -> int:
        """A number for one more handle."""
        with self._lock:
            self._num_handles += 1
            return self._num_handles

    def acquire(self, handle: int, held_by: str, *, scope: str = "", force: bool = False) -> Grant:
        """Give the lease to a handle, if nobody holds it.

        Args:
            handle: Its number.
            held_by: How it describes itself: its source, and what it is entering.
            scope: The scope it is entering, in words.
            force: Take it from whoever holds it: a process that is known to be gone.

        Raises:
            OwnershipError: Another handle holds it.
        """
        with self._lock:
            if self.holder not in (FREE, handle) and not force:
                raise OwnershipError(
                    f"{self._label}: {held_by}, while another process owns the policy",
                    (f"owner: {self.describe()} (epoch {self.epoch})",),
                    "with policy.training_mode(acquire_timeout=60): ...  # waits; policy.recover() where the owner is gone",
                )
            if self.holder != handle:
                self.epoch += 1
            self.holder, self.held_by, self.scope = handle, held_by, scope
            return Grant(handle, self.epoch, self.state)

    def note_scope(self, handle: int, scope: str) -> None:
        """The holder has opened its outermost scope, or has left it and goes on without one."""
        with self._lock:
            if handle == self.holder:
                self.scope = scope

    def release(self, handle: int, state: PolicyState | None) -> None:
        """Let go of it, and leave the state for the next holder. Nothing happens when another handle holds it."""
        with self._lock:
            if handle == self.holder:
                self.holder, self.state, self.scope = FREE, state, ""

    def view(self) -> dict[str, Any]:
        """For a handle that does not hold it: epoch, who holds it, and the scope that is open."""
        return {
            "epoch": self.epoch,
            "held_by": self.describe(),
            "is_free": self.holder == FREE,
            "scope": self.scope,
            "state": self.state,
        }
