"""One owner at a time: a thread, task or process holds a policy while it has a scope open.

Ownership is a token with a lock. Context variables only *find* the token: they are inherited by child tasks and copied
into ``asyncio.to_thread``, so having one proves nothing, and they are never reset. Knows nothing of scopes.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextvars import ContextVar
from types import MappingProxyType

import attrs

from rl_session.errors import OwnershipError

__all__ = ["Ownership", "Token"]


@attrs.define(eq=False)
class Token:
    """Proof of ownership, as long as it is the one that :class:`Ownership` holds."""

    thread: int
    thread_name: str
    task: asyncio.Task[object] | None
    call_site: str

    def describe(self) -> str:
        """Who holds it, for messages."""
        if self.task is not None:
            return f"task {self.task.get_name()!r} (entered at {self.call_site})"
        return f"thread {self.thread_name!r} (entered at {self.call_site})"

    def is_mine(self, found: Token | None) -> bool:
        """Whether the caller is the owner, or a thread that works for it with its context (``asyncio.to_thread``)."""
        if self.task is None and threading.get_ident() == self.thread:
            return True
        task = current_task()
        return (self.task is not None and task is self.task) or (task is None and found is self)


_num_forks = 0
"""How often this process was forked off from one that had loaded this module; asking for its number is a system call."""


def _count_fork() -> None:
    global _num_forks  # noqa: PLW0603 (it belongs to the process)
    _num_forks += 1


os.register_at_fork(after_in_child=_count_fork)

_found: ContextVar[MappingProxyType[int, Token]] = ContextVar("rl_session_tokens", default=MappingProxyType({}))


def current_task() -> asyncio.Task[object] | None:
    """The running asyncio task of this thread, or None outside of one."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


class Ownership:
    """Who owns one policy.

    Args:
        label: How messages name the policy.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._changed = threading.Condition()
        self._token: Token | None = None
        self._pid = os.getpid()
        self._num_forks = _num_forks

    @property
    def token(self) -> Token | None:
        """What the owner holds; None where there is none."""
        return self._token

    def check_process(self, attempted: str) -> None:
        """Refuse use in a forked child.

        Raises:
            OwnershipError: This is another process than the one that made the policy.
        """
        if self._num_forks != _num_forks:
            raise OwnershipError(
                f"{self._label}: {attempted} in process {os.getpid()}",
                (f"the policy belongs to process {self._pid}",),
                "policy = rs.attach(model, optimizer)  # in the process that uses it",
            )

    def acquire(self, attempted: str, call_site: str, timeout: float | None = None) -> Token:
        """Become the owner, or stay it.

        Args:
            attempted: For messages.
            call_site: Where the user asked.
            timeout: Seconds to wait while another owner holds it; None to give up at once.

        Raises:
            OwnershipError: Another thread, task or process holds it.
        """
        self.check_process(attempted)
        token = self._token
        if (
            token is None or token.task is not None or token.thread != threading.get_ident()
        ):  # else only we could end it
            token = self._wait_for(attempted, call_site, timeout)
        tokens = _found.get()
        if tokens.get(id(self)) is not token:
            _found.set(MappingProxyType({**tokens, id(self): token}))
        return token

    def _wait_for(self, attempted: str, call_site: str, timeout: float | None) -> Token:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._token is not None and not self._token.is_mine(_found.get().get(id(self))):
                remaining = 0.0 if deadline is None else deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    self._refuse(attempted, self._token, timeout)
            if self._token is None:
                thread = threading.current_thread()
                self._token = Token(threading.get_ident(), thread.name, current_task(), call_site)
            return self._token

    def check(self, attempted: str) -> None:
        """Refuse what only the owner may do; with no owner anybody may.

        Raises:
            OwnershipError: Another thread, task or process holds it.
        """
        self.check_process(attempted)
        with self._changed:
            if self._token is not None and not self._token.is_mine(_found.get().get(id(self))):
                self._refuse(attempted, self._token, None)

    def _refuse(self, attempted: str, holder: Token, timeout: float | None) -> None:
        waited = "" if timeout is None else f", waited {timeout:g} s"
        raise OwnershipError(
            f"{self._label}: {attempted} from another owner{waited}",
            (f"owner: {holder.describe()}", f"you: {_describe_caller()}"),
            f"with policy.{_waiting(attempted)}: ...  # waits until the owner leaves its scope",
        )

    def release(self, token: Token | None = None) -> None:
        """End an ownership, and wake those who wait.

        Args:
            token: Which one; nothing happens when it is over already. None for whichever there is.
        """
        with self._changed:
            if token is None or token is self._token:
                self._token = None
                self._changed.notify_all()


def _waiting(attempted: str) -> str:
    """The scope that was attempted, told to wait; one with everything on the device for what is no scope."""
    is_scope = attempted.endswith("_mode()") or attempted == "offloaded()"
    return f"{attempted[:-2] if is_scope else 'training_mode'}(acquire_timeout=60)"


def _describe_caller() -> str:
    task = current_task()
    if task is not None:
        return f"task {task.get_name()!r}"
    return f"thread {threading.current_thread().name!r}"
