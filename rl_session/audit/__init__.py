"""The audit log: what happened to every policy, one record per state change.

Told by the rest of the library, it reads no state of its own, and imports neither torch nor ray: a log can be
read on a laptop. Here is what writes and reads one; what makes sense of it is imported by its module:

    from rl_session.audit.replay import replay, state_at     the placement of every policy at every instant
    from rl_session.audit.spans import spans                 scopes, transitions, calls and steps with their times
    from rl_session.audit.check import check                 whether the log is whole and makes sense
    from rl_session.audit.schema import schema               JSON Schema of a line
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_session.audit.events import (
    EVENTS,
    SCHEMA,
    CallFinished,
    Change,
    CheckpointLoaded,
    CheckpointSaved,
    ComponentMoved,
    EngineSlept,
    EngineWoken,
    Event,
    GradientsDropped,
    GuardRejected,
    PolicyClosed,
    PolicyCreated,
    PolicyFaulted,
    PolicyRecovered,
    RankReported,
    ReferenceSwapped,
    ScopeEntered,
    ScopeExited,
    SessionClosed,
    SessionOpened,
    StepAborted,
    StepCommitted,
    StepOpened,
    TransitionCommitted,
    TransitionFailed,
    TransitionRolledBack,
    TransitionStarted,
    UnknownEvent,
    WarningIssued,
    WeightsPublished,
    WorkerLost,
)
from rl_session.audit.naming import sibling_path
from rl_session.audit.reader import AuditReader, Place, read_audit
from rl_session.audit.records import Record

if TYPE_CHECKING:
    from rl_session.audit.log import AuditLog

__all__ = [
    "EVENTS",
    "SCHEMA",
    "AuditLog",
    "AuditReader",
    "CallFinished",
    "Change",
    "CheckpointLoaded",
    "CheckpointSaved",
    "ComponentMoved",
    "EngineSlept",
    "EngineWoken",
    "Event",
    "GradientsDropped",
    "GuardRejected",
    "Place",
    "PolicyClosed",
    "PolicyCreated",
    "PolicyFaulted",
    "PolicyRecovered",
    "RankReported",
    "Record",
    "ReferenceSwapped",
    "ScopeEntered",
    "ScopeExited",
    "SessionClosed",
    "SessionOpened",
    "StepAborted",
    "StepCommitted",
    "StepOpened",
    "TransitionCommitted",
    "TransitionFailed",
    "TransitionRolledBack",
    "TransitionStarted",
    "UnknownEvent",
    "WarningIssued",
    "WeightsPublished",
    "WorkerLost",
    "read_audit",
    "sibling_path",
]


def __getattr__(name: str) -> Any:
    """Load the writer when it is asked for: with structlog it takes longer than all else, and readers need neither."""
    if name == "AuditLog":
        from rl_session.audit.log import AuditLog

        globals()[name] = AuditLog
        return AuditLog
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
