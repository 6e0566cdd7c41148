"""What the driver knows of one policy, and how its ranks are asked: the ground the layers above it stand on.

``Control`` is built in layers, each in a module of its own, each using only those below it: :class:`Core` (state, facts,
questions), :class:`Sharing` (handles in other processes), :class:`Transitions` (from one mode to the next),
:class:`Scopes` (the stack of frames), :class:`Calls` (compute and state calls), and ``Control`` (resting mode, recovery, end).
This layer changes no mode.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl_session.audit import events
from rl_session.driver.frames import Frame
from rl_session.driver.interrupts import DeferredInterrupt
from rl_session.driver.journal import Journal
from rl_session.driver.lease import LeaseClient
from rl_session.driver.ownership import Ownership
from rl_session.driver.ranks import Ranks
from rl_session.driver.room import PolicySeat
from rl_session.driver.run import Run
from rl_session.errors import ClosedError, FaultedError, RLSessionError
from rl_session.lifecycle import Cells, Flags, Mode
from rl_session.offload.device import Device
from rl_session.workers.group import WorkerGroup
from rl_session.workers.replies import Description

__all__ = ["Core"]


class Core:
    """State of one policy on the driver.

    Args:
        name: The policy's name.
        kind: "policy" or "value", for messages.
        group: Its ranks.
        run: What the run shares.
        flags: Its configuration, as far as placements go.
        first: What was found at attach.
        base: The mode outermost exits go to.
        device: Where its bytes are when they are needed.
        is_built: Whether the session built the model, which then ends with the policy.
        lease: Where handles in other processes may have the policy too.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        group: WorkerGroup,
        run: Run,
        flags: Flags,
        first: Description,
        base: Mode,
        device: Device,
        *,
        is_built: bool = False,
        lease: LeaseClient | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.label = f"{kind} {name!r}"
        self.group = group
        self.run = run
        self.flags = flags
        self.mode = first.mode
        self.row = first.mode
        """The row of the mode table in effect; another than the mode's own while an external engine generates."""
        self.resting_mode = base
        self.resting = first.placement
        self.frames: list[Frame] = []
        self.fault: RLSessionError | None = None
        self.closed = ""
        self.ownership = Ownership(self.label)
        self.lock = threading.RLock()
        self.device = device
        self.last_used = run.arbiter.tick()
        self.last_move = "nothing has moved since attach"
        self.step: Any = None
        """The user's open train step, if one is open."""
        self.digests = run.verify == "checksum"
        """Whether records of calls carry a digest of the result."""
        self.resting_cells: Cells | None = None
        """What the resting placement asks of each component, where that is no mode's row (a legacy call's).

        A scope of the resting mode is entered by a transition then: its own row may want something else.
        """
        self._pending_release = False
        self._calls = 0
        self._moving = ""
        """The reason of the transition that is running, if one is."""
        self.seat = PolicySeat(self)  # type: ignore[arg-type]  # what is made is a Control
        self.journal = Journal(name, run, ranks_write=group.logs_moves)
        self._record = self.journal.write
        self.ranks = Ranks(group, self.label, self.explain, self._record)
        self._is_built = is_built
        self.lease = lease
        if lease is None or lease.is_held:  # another process wrote it before it handed the policy on
            self.journal.created(first, group.num_ranks)

    def explain(self) -> tuple[str, tuple[str, ...]]:
        """The label of the policy, and the facts that every message gives."""
        scopes = " > ".join(frame.describe() for frame in self.frames) or "none"
        facts = [f"mode: {self.mode}, open scopes: {scopes}", f"last moved by: {self.last_move}"]
        if self._moving:
            facts.append(f"attempted: {self._moving}")
        if self.step is not None:
            facts.append(f"open step: {self.step!r}")
        return self.label, tuple(facts)

    @property
    def health(self) -> str:
        """One of "ok", "faulted" or "closed"."""
        return "closed" if self.closed else "faulted" if self.fault is not None else "ok"

    def _refuse_closed(self, attempted: str) -> None:
        if self.closed:
            facts = (f"mode: {self.mode}, open scopes: none", f"last moved by: {self.last_move}")
            raise ClosedError(
                f"{self.label}: {attempted} after {self.closed}", facts, "policy = rs.attach(model, optimizer)"
            )

    @property
    def is_busy(self) -> bool:
        """Whether a call or a transition is running."""
        return bool(self._calls or self._moving)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A block that changes modes: alone, and not broken off by Ctrl-C. Waiting for the others may be."""
        with self.lock, DeferredInterrupt():
            yield

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Ask rank 0 something that is no compute call (not recorded).

        Raises:
            ClosedError: The policy was closed.
        """
        self._refuse_closed(method)
        with self.lock:
            return self.ranks.ask(method, *args, **kwargs)

    def ask_all(self, method: str, *args: Any) -> list[Any]:
        """Ask every rank something that moves nothing and is no compute call (not recorded)."""
        return self.ranks.ask_each(method, *args)

    def record(self, event: events.Event, *, scope_id: int | None = None) -> None:
        """Write an event of this policy."""
        self._record(event, scope_id=scope_id)

    def end_step(self, why: str = "") -> None:
        """Forget the open step; with ``why``, it was aborted."""
        if self.step is not None and why:
            self._record(events.StepAborted(reason=why))
        self.step = None

    def _note_fault(self, error: BaseException) -> None:
        """Remember a failure that could not be undone; after a recovery that failed the cause is the one before."""
        if not isinstance(error, FaultedError) or self.fault is not None:
            return
        self.fault = error
        self.end_step("the policy is faulted")
        self._record(events.PolicyFaulted(cause=f"{error.attempted}: {error.cause}", remedy=error.remedy))
