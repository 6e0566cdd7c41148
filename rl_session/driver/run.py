"""What all participants of one run share: the log, the host pool, counters and defaults.

Knows nothing of policies.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from os import PathLike
from typing import TYPE_CHECKING

from rl_session.audit import AuditLog
from rl_session.audit.events import Event
from rl_session.config import Verify
from rl_session.driver.arbiter import Arbiter
from rl_session.driver.interrupts import DeferredInterrupt
from rl_session.lifecycle import Release
from rl_session.offload.host_pool import HostPool

if TYPE_CHECKING:
    from rl_session.driver.engine_control import EngineControl

__all__ = ["Run", "error_text"]


class Run:
    """Shared state of a run.

    Args:
        log: Where records go.
        pool: Where host buffers come from.
        release: The release policy of participants that set none.
        verify: The verification of participants that set none.
        device_budget: Bytes that participants may hold on a device together.
        timeout_seconds: How long to wait for somebody else, such as an engine that has requests in flight.
    """

    def __init__(
        self,
        log: AuditLog,
        pool: HostPool,
        *,
        release: Release = "eager",
        verify: Verify = "off",
        device_budget: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.log = log
        self.pool = pool
        self.arbiter = Arbiter(device_budget)
        self.release: Release = release
        self.verify: Verify = verify
        self.timeout_seconds = timeout_seconds
        self.engines: list[EngineControl] = []
        """The external engines of the run."""
        self.step: int | None = None
        self.lock = threading.RLock()
        self.log_path: str | PathLike[str] | None = log.path
        """The session's own file; that of another process lies beside it."""
        self._scope_ids: Iterator[int] = itertools.count(1)
        self._transition_ids: Iterator[int] = itertools.count(1)

    def count_from(self, scope_ids: Iterator[int], transition_ids: Iterator[int]) -> None:
        """Take numbers from elsewhere: those of another process must not be the same."""
        self._scope_ids, self._transition_ids = scope_ids, transition_ids

    def next_scope_id(self) -> int:
        """A new number for a scope."""
        return next(self._scope_ids)

    def next_transition_id(self) -> int:
        """A new number for a transition."""
        return next(self._transition_ids)

    def recorder(self, policy: str | None) -> Callable[..., int]:
        """A function that writes an event of ``policy``, None for what is of none, with the current step filled in."""
        log = self.log

        def write(event: Event, *, scope_id: int | None = None, transition_id: int | None = None) -> int:
            if DeferredInterrupt.is_active():
                return log.write(event, policy=policy, scope_id=scope_id, transition_id=transition_id, step=self.step)
            with DeferredInterrupt():  # or a record could be lost between its number and its line
                return log.write(event, policy=policy, scope_id=scope_id, transition_id=transition_id, step=self.step)

        return write


def error_text(error: BaseException | None) -> str | None:
    """An error in one line, as records have it."""
    if error is None:
        return None
    try:
        first = (str(error).splitlines() or [""])[0]
    except Exception:  # an error of the user's that cannot even be printed must not keep a scope open
        first = ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
