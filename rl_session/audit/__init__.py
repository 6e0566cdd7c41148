"""The audit log: what happened to every policy, one record per state change.

Told by the rest of the library, it reads no state of its own, and imports neither torch nor ray: a log can be
read on a laptop. Here is what writes and reads one; what makes sense of it is imported by its module:

    from rl_session.audit.replay import replay, state_at     the placement of every policy at every instant
    from rl_session.audit.spans import spans                 scopes, transitions, calls and steps with their times
    from rl_session.audit.check import check                 whether the log is whole and makes sense
    from rl_session.audit.schema import schema               JSON Schema of a line
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_session.audit.envelope import SCHEMA
    from rl_session.audit.events import (
        EVENTS,
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
    from rl_session.audit.log import AuditLog
    from rl_session.audit.naming import sibling_path
    from rl_session.audit.reader import AuditReader, Place, read_audit
    from rl_session.audit.records import Record

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


_HOME_OF = {
    "AuditLog": "log",
    "AuditReader": "reader",
    "Place": "reader",
    "Record": "records",
    "SCHEMA": "envelope",
    "read_audit": "reader",
    "sibling_path": "naming",
}
"""Where the names are that are neither events nor made of them."""


def __getattr__(name: str) -> Any:
    """Load a name when it is asked for: a reader of plain dictionaries needs neither the writer nor the events."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF.get(name, 'events')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
