"""What is remembered of an open scope, and of the engine beside it. Knows nothing of who opens and closes them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import attrs

from rl_session.lifecycle import Mode, Placement, may_nest

__all__ = ["Companion", "Frame", "after", "may_nest_in"]


class Companion(Protocol):
    """An external engine beside a scope: awake while it is open."""

    def enter(self, holder: Any, call_site: str, scope_id: int) -> None:
        """Wake, after the policy has made its move."""
        ...

    def leave(self) -> None:
        """Let go, before the policy moves back."""
        ...


@attrs.define(eq=False)
class Frame:
    """What is remembered of an open scope.

    Attributes:
        scope_id: Its number in the log.
        mode: Its mode.
        row: The row of the mode table that decides what is where and what may be called: that of its mode, unless an
            external engine generates.
        spelling: How the user wrote it, such as ``training_mode()``.
        placement: The placement reached at entry, with conditional cells decided: what inner scopes come back to.
        outer_mode: The mode it was entered from.
        call_site: Where it was entered.
        holder: The user's scope object, weakly: when it is gone, the scope is an orphan.
        moved: Whether entry was a transition (it is not when the mode was in effect already).
        engine: The name of the in-process engine that the scope opened, if it opened one.
        companion: The external engine that is awake while the scope is open, if one is.
        undo: Restores what entry set for the user's own forwards, if anything.
        entered_at: ``time.perf_counter()`` at entry.
    """

    scope_id: int
    mode: Mode
    row: Mode
    spelling: str
    placement: Placement
    outer_mode: Mode
    call_site: str
    holder: weakref.ref[Any]
    moved: bool
    engine: str = ""
    companion: Companion | None = None
    undo: Callable[[], None] | None = None
    entered_at: float = attrs.field(factory=time.perf_counter)

    def describe(self) -> str:
        """For messages."""
        return f"{self.spelling} at {self.call_site}"


def may_nest_in(outer: Frame, mode: Mode) -> bool:
    """The nesting table; inside an external engine's scope, that of the row it has the policy in holds too."""
    if not may_nest(outer.mode, mode):
        return False
    return outer.row is outer.mode or mode is outer.mode or may_nest(outer.row, mode)


@contextmanager
def after(companion: Companion) -> Iterator[None]:
    """Let an engine go, then run the block whatever came of it; the engine's error is on top of the block's."""
    failure: BaseException | None = None
    try:
        companion.leave()
    except BaseException as error:
        failure = error
    try:
        yield
    except BaseException as error:
        if failure is None:
            raise
        failure.add_note(f"and then: {error}")
    if failure is not None:
        raise failure
