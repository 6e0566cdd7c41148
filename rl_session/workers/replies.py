"""What a worker is asked, and what it answers: plain values that can cross a process boundary.

Knows nothing of who asks.
"""

from __future__ import annotations

from typing import Any

import attrs

from rl_session.errors import RLSessionError
from rl_session.lifecycle import Cells, Flags, Mode, Placement, Tier
from rl_session.offload.reports import Notice
from rl_session.planning import Moved

__all__ = [
    "CallResult",
    "Changed",
    "Description",
    "Failed",
    "Held",
    "Ok",
    "Reply",
    "Room",
    "Stamp",
    "TransitionReply",
    "TransitionRequest",
]


@attrs.define(slots=False)
class Ok:
    """The rank did it; ``value`` is its answer."""

    value: object


@attrs.define(slots=False)
class Failed:
    """The rank could not, and is where it was before.

    Attributes:
        error: What it raised.
        traceback: The traceback as text, where the error itself has lost it on the way.
        placement: Where each component is now, by scan, where the rank said so.
    """

    error: BaseException
    traceback: str = ""
    placement: Placement | None = None


@attrs.define(slots=False)
class Lost:
    """The rank did not answer: it died, or it was killed past its deadline. It stays lost until the group is restarted."""

    cause: str


Reply = Ok | Failed | Lost


@attrs.define(slots=False)
class Stamp:
    """What every call to a rank carries, so that it can be judged without asking anybody.

    Attributes:
        handle: The number of the handle that calls; 0 is the session's own.
        epoch: The lease as that handle knows it; it grows whenever the lease goes to another handle.
        mode: The mode that the caller judged the call by, when it does not hold the lease.
    """

    handle: int = 0
    epoch: int = 1
    mode: Mode | None = None


@attrs.define(slots=False, kw_only=True)
class TransitionRequest:
    """Go to a mode.

    Attributes:
        mode: The mode to reach.
        flags: What decides the conditional cells.
        stored: On the way out, the placement of the outer scope; None on the way in.
        explicit: Tiers for components, whatever the mode says; it wins over everything.
        cells: What is asked of each component instead of the mode's row: a legacy call's placement.
        evict: Components that must leave in the same move, to make room for the rest.
        leaves_library: Whether the caller is outside every scope afterwards, where anything may write.
        headroom: The most device memory that it may take, gradients to come included; a rank that needs more says how much
            (:class:`Room`) and moves nothing. None where room was made before.
        transition_id: Its number in the log; ranks that write records of their own put it on them.
        scope_id: The scope it belongs to, for the same.
        step: The session's step number, for the same.
    """

    mode: Mode
    flags: Flags
    stored: Placement | None = None
    explicit: Placement | None = None
    cells: Cells | None = None
    evict: tuple[str, ...] = ()
    leaves_library: bool = False
    headroom: int | None = None
    transition_id: int | None = None
    scope_id: int | None = None
    step: int | None = None


@attrs.define(slots=False, kw_only=True)
class TransitionReply:
    """What a transition did on one rank.

    Attributes:
        before: Where each component was, by scan.
        placement: Where each component is now, by scan.
        moved: What moved, with the seconds of each entry in ``seconds``.
        dropped_bytes: Bytes of gradients dropped.
        live_dropped: Whether some of them belonged to an open step.
        device_bytes: Bytes of all participants on the device afterwards.
        host_bytes: Bytes of host buffers in use afterwards.
        notices: What to warn about.
    """

    before: Placement
    placement: Placement
    moved: tuple[Moved, ...]
    seconds: tuple[float, ...]
    dropped_bytes: int
    live_dropped: bool
    device_bytes: int
    host_bytes: int
    notices: tuple[Notice, ...]


@attrs.define(slots=False, kw_only=True)
class Room:
    """What a transition would take on one rank, found without moving anything.

    Attributes:
        onload: Bytes that it brings to the device, and gradients that training is sure to make.
        freed: Bytes that it gives back before.
        reserve: Bytes that the mode will make beyond that, as far as can be told: the first optimizer state.
    """

    onload: int
    freed: int
    reserve: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.onload - self.freed + self.reserve


@attrs.define(slots=False)
class Held:
    """A component on the device of one rank.

    Attributes:
        component: Which one.
        nbytes: Its bytes there.
        dirty_nbytes: Those that must be copied to leave.
        releasable: Whether it may leave.
        disposable: Whether it is gradients that a step has consumed.
    """

    component: str
    nbytes: int
    dirty_nbytes: int
    releasable: bool
    disposable: bool


@attrs.define(slots=False)
class Changed:
    """Bytes of a component that appeared or vanished in a call: what it has now, at the tier it is at."""

    component: str
    tier: Tier
    nbytes: int


@attrs.define(slots=False)
class CallResult:
    """The answer of a compute call, what bytes it made or freed, and facts for records of their own."""

    value: object
    changed: tuple[Changed, ...] = ()
    notes: tuple[tuple[str, dict[str, object]], ...] = ()
    device_bytes: int = 0
    """Bytes of all participants on the device afterwards, where another process has to be told."""


@attrs.define(slots=False, kw_only=True)
class Description:
    """A rank as found at attach."""

    mode: Mode
    placement: Placement
    nbytes: dict[str, int]
    notices: tuple[Notice, ...]
    device_capacity: int | None = None
    device_free: int | None = None
    device_bytes: int = 0
    moved: tuple[dict[str, Any], ...] = ()
    """Fields of ``component.moved`` records: what attaching itself copied (a reference kept on the host)."""


def error_of(reply: Failed) -> BaseException:
    """The error of a failed reply, with the remote traceback as a note when there is one."""
    error = reply.error
    if reply.traceback and isinstance(error, RLSessionError):
        error.add_note(reply.traceback)
    return error
