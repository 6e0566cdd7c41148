"""Why something stays, in words: what the report, the comments and the tests say alike. Data only."""

from __future__ import annotations

from rl_session_migrate.sites import Shape

__all__ = ["CALLBACK", "COROUTINES", "OPEN_STEP", "SHAPES"]

OPEN_STEP = "a train step stays open here between calls"
COROUTINES = "its lifecycle methods are awaited, and a scope calls them without awaiting"
CALLBACK = "it stands in a callback: who runs it, and when, is not in sight"
SHAPES = {
    Shape.AWAITED: "it is awaited",
    Shape.TO_THREAD: "the method is passed as a value and runs in a thread",
    Shape.SUBMITTED: "the method is passed as a value and runs in another thread or task",
    Shape.VALUE: "the method is passed as a value: who calls it, and when, is not in sight",
    Shape.STRING: "the method is named in a string",
}
