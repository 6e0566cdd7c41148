"""One handle's side of the lease: whether it may change the policy, and what it knows of it.

The session's own handle holds the lease from the start and for ever, until the policy is pickled: from then on it lets go
between scopes, so that handles in other processes get their turn. Who holds it may skip a message because it knows the
answer; who does not has to ask. Of scopes it hands on whether one is open.
"""

from __future__ import annotations

import time
from typing import Any

from rl_session.errors import FaultedError, OwnershipError, StaleHandleError, UnsupportedError
from rl_session.lifecycle import Mode
from rl_session.workers.group import SharedGroup
from rl_session.workers.lease import Grant, PolicyState
from rl_session.workers.replies import Failed, Lost, Ok, Reply, Stamp

__all__ = ["READS", "LeaseClient"]

READS = frozenset(
    {
        "get_logprobs",
        "get_reference_policy_logprobs",
        "get_topk_logits",
        "score",
        "get_values",
        "generate",
        "state_dict",
    }
)
"""Calls that change nothing, and may be made by a handle that does not hold the lease."""

_POLL_SECONDS = 0.02


class LeaseClient:
    """The lease of one policy, seen from one handle.

    Args:
        group: The ranks; the first one grants.
        source: How this process is called in the log.
        handle: The number of this handle; None for one that has to ask for it.
    """

    def __init__(self, group: SharedGroup, source: str, handle: int | None = 0) -> None:
        self._group = group
        self.source = source
        self.handle = handle
        self.epoch = 1
        self.is_held = handle == 0
        self.is_shared = handle != 0
        """Whether another handle may exist, which then gets the lease between scopes."""
        self.has_looked = False
        """Whether this handle has ever asked what is."""
        self._scope = ""
        """What the first rank was told of the scope that is open here."""
        self.is_revoked = False
        """Whether somebody took it away from this handle while it held it."""

    def _first(self, method: str, *args: Any, **kwargs: Any) -> Any:
        reply: Reply = self._group.call_on([0], method, *args, **kwargs)[0]
        if isinstance(reply, Failed):
            raise reply.error
        if isinstance(reply, Lost) and self.handle == 0:
            raise FaultedError(
                f"{method}(): the first rank, which grants the lease, is lost", (), "policy.recover()", reply.cause
            )
        if isinstance(reply, Lost):
            raise OwnershipError(
                f"{method}(): the first rank, which grants the lease, is lost",
                (reply.cause,),
                "policy.recover()  # in the process that made the policy; then pickle it again",
            )
        assert isinstance(reply, Ok)
        return reply.value

    def number(self) -> int:
        """The number of this handle."""
        if self.handle is None:
            self.handle = int(self._first("connect"))
        return self.handle

    def take(self, what: str, timeout: float | None = None, *, scope: str = "", force: bool = False) -> Grant:
        """Get the lease.

        Args:
            what: What it is for, for the messages of others.
            timeout: Seconds to wait while another handle holds it; None to give up at once.
            scope: The scope that is entered, in words; "" where it is for something shorter.
            force: Take it from whoever holds it.

        Raises:
            OwnershipError: Another handle holds it.
        """
        deadline = time.monotonic() + (timeout or 0.0)
        while True:
            try:
                held_by = f"{self.source}: {what}"
                grant: Grant = self._first("acquire", self.number(), held_by, scope=scope, force=force)
            except OwnershipError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_SECONDS)
                continue
            self.epoch, self.is_held, self.is_revoked, self.has_looked = grant.epoch, True, False, True
            self._scope = scope
            self._group.stamp = Stamp(grant.handle, grant.epoch)
            return grant

    def note_scope(self, scope: str) -> None:
        """Tell the others which scope is open here, in words, or that none is; no message where they know."""
        if self.is_held and self.is_shared and scope != self._scope:
            self._scope = scope
            reply = self._group.call_on([0], "note_scope", self.handle, scope)[0]
            del reply  # a lost rank is noticed by the next call

    def give_up(self, state: PolicyState) -> None:
        """Let go of it, and leave the state for the next holder."""
        self.is_held, self._scope = False, ""
        reply = self._group.call_on([0], "release", self.handle, state)[0]
        del reply  # a lost rank is noticed by the next call

    def view(self) -> dict[str, Any]:
        """What the first rank says: epoch, who holds the lease in which scope, the last holder's state, the mode."""
        seen: dict[str, Any] = self._first("view")
        self.epoch, self.has_looked = int(seen["epoch"]), True
        return seen

    def was_taken(self) -> bool:
        """Whether somebody took the lease from this handle; asked of the first rank where other handles may exist."""
        if self.is_held and self.is_shared:
            try:
                taken = int(self._first("view")["epoch"]) != self.epoch
            except (OwnershipError, FaultedError):  # lost: what comes next says so
                taken = False
            self.is_held, self.is_revoked = not taken, taken
        return self.is_revoked

    def begin_anew(self) -> None:
        """The ranks were built anew, and know of no other handle than the session's."""
        self.epoch, self.is_held, self.is_revoked, self._scope = 1, True, False, ""
        self._group.stamp = Stamp()

    def read(self, method: str, mode: Mode, *args: Any, **kwargs: Any) -> Any:
        """Make a call that changes nothing, on the first rank, judged by ``mode``.

        Raises:
            StaleHandleError: The mode is another one, or the lease went on.
            UnsupportedError: The ranks hold shards: a call needs all of them, in the same order as those of the holder.
        """
        if self._group.is_sharded:
            raise UnsupportedError(
                f"{method}() from a process that does not hold the lease, on ranks that hold shards of the model",
                ("such a call meets those of the lease's holder in another order on each rank, and would never end",),
                "make the call in the process that opened the scope",
            )
        self._group.stamp = Stamp(self.number(), self.epoch, mode)
        return self._first(method, *args, **kwargs)

    def revoke(self, error: BaseException) -> None:
        """Take note that a call was refused because somebody else has the lease now."""
        if isinstance(error, StaleHandleError) and self.is_held:
            self.is_held, self.is_revoked = False, True
