"""How the driver talks to the ranks of a policy: one call, one reply a rank.

A reply is a value (ok, failed, lost), never an exception, so that the driver decides with all of them in hand. The
in-process group has one rank and calls it directly. Knows nothing of what is called.
"""

from __future__ import annotations

from typing import Any, Protocol

from rl_session.workers.replies import Failed, Ok, Reply
from rl_session.workers.worker import Worker

__all__ = ["LocalGroup", "WorkerGroup"]


class WorkerGroup(Protocol):
    """A group of ranks with one contract: methods are those of :class:`Worker`."""

    num_ranks: int

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """Call ``method`` on every rank; one reply a rank, in rank order."""
        ...

    def close(self) -> None:
        """Let the ranks go."""
        ...


class LocalGroup:
    """The group of one in-process rank."""

    num_ranks = 1

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """Call ``method`` of the worker here and now. Interrupts are not replies: they propagate."""
        try:
            return [Ok(getattr(self.worker, method)(*args, **kwargs))]
        except Exception as error:
            return [Failed(error)]

    def close(self) -> None:
        """Nothing to let go: the worker's objects are the caller's."""
