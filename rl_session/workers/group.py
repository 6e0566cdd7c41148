"""How the driver talks to the ranks of a policy: one call, one reply a rank.

A reply is a value (ok, failed, lost), never an exception, so that the driver decides with all of them in hand. Every group
keeps one contract, held by one test suite; here is the group of one rank in this process. Knows nothing of what is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rl_session.errors import ClosedError, UnsupportedError
from rl_session.workers.replies import Failed, Ok, Reply, Stamp
from rl_session.workers.worker import Worker

__all__ = ["LocalGroup", "RankGroup", "SharedGroup", "WorkerGroup"]


class WorkerGroup(Protocol):
    """Ranks with one contract; methods are those of :class:`Worker`.

    - One reply a rank, in rank order; what a rank raises is a :class:`Failed`, never an exception here.
    - A rank that does not answer in time, or died, is :class:`Lost`, and so at once in every later call.
    - After :meth:`close` every call fails with ``ClosedError``; closing twice is as closing once.

    Attributes:
        num_ranks: How many.
        logs_moves: Whether the ranks write ``component.moved`` themselves.
        is_joined: Whether a process group joins them: each computes on its own share of a batch, and their gradients are one.
    """

    num_ranks: int
    logs_moves: bool
    is_joined: bool

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """Call ``method`` on every rank; one reply a rank, in rank order."""
        ...

    def close(self) -> None:
        """Let the ranks go. Idempotent."""
        ...


class RankGroup(WorkerGroup, Protocol):
    """A group of several ranks, which can be asked one by one and made anew."""

    def call_on(self, ranks: Iterable[int], method: str, *args: Any, **kwargs: Any) -> dict[int, Reply]:
        """Call ``method`` on some ranks only."""
        ...

    def call_each(self, firsts: Sequence[Any], method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """As ``call``, where each rank has a first argument of its own, which is sent to no other."""
        ...

    def restart(self) -> list[Reply]:
        """End every rank that still lives and build all anew; one reply a rank, a ``Description`` where it worked."""
        ...


class SharedGroup(RankGroup, Protocol):
    """A group that handles in several processes can reach; it can be pickled.

    Attributes:
        stamp: What every call carries.
        is_sharded: Whether a rank alone cannot answer for the model.
    """

    stamp: Stamp
    is_sharded: bool

    def whoami(self) -> str:
        """How this process is called in the log."""
        ...


class LocalGroup:
    """The group of one in-process rank.

    Args:
        worker: The rank.
        is_built: Whether it was built for this group, and ends with it.
    """

    num_ranks = 1
    logs_moves = False
    is_joined = False

    def __init__(self, worker: Worker, *, is_built: bool = False) -> None:
        self.worker = worker
        self._is_built = is_built
        self._closed = False

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """Call ``method`` of the worker here and now. Interrupts are not replies: they propagate."""
        try:
            if self._closed:
                raise ClosedError(f"{method}() of a worker group after close()")
            return [Ok(getattr(self.worker, method)(*args, **kwargs))]
        except Exception as error:
            return [Failed(error)]

    def call_on(self, ranks: Iterable[int], method: str, *args: Any, **kwargs: Any) -> dict[int, Reply]:
        """As :meth:`call`, where the one rank is among ``ranks``."""
        return {0: self.call(method, *args, **kwargs)[0]} if 0 in set(ranks) else {}

    def call_each(self, firsts: Sequence[Any], method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """As :meth:`call` with the one first argument."""
        return self.call(method, *firsts, *args, **kwargs)

    def restart(self) -> list[Reply]:
        """Refused: a rank in this process cannot be lost while the process lives."""
        return [Failed(UnsupportedError("restart() of a worker in this process", (), "policy.recover()"))]

    def close(self) -> None:
        """Let the model go where it was built here; else the worker's objects are the caller's."""
        if not self._closed and self._is_built:
            self.worker.drop()
        self._closed = True
