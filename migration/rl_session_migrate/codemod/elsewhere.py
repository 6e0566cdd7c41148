"""What is known of functions that a module imports. An interface, and its answer when nothing is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import libcst as cst

from rl_session_migrate.tree import dotted

if TYPE_CHECKING:
    from rl_session_migrate.codemod.program import Event, Program

__all__ = ["NOWHERE", "Elsewhere", "imported_name"]


class Elsewhere(Protocol):
    """Answers about functions of other modules, by the dotted names they are imported under."""

    def carries(self, name: str) -> bool:
        """Whether a function pushes weights through refit blocks only."""
        ...

    def moves(self, name: str) -> bool:
        """Whether a function moves a policy or value, by hand or in scopes."""
        ...

    def is_safe(self, name: str) -> bool:
        """Whether everything that a function does with a policy or value stands in scopes."""
        ...

    @property
    def has_steps(self) -> bool:
        """Whether any other module keeps train steps open between calls."""
        ...

    def opens_step_around(self, function: str) -> str:
        """Who, of another module, calls a function of this one while a train step is open, in words; "" if nobody does."""
        ...


class _Nowhere:
    has_steps = False

    def carries(self, name: str) -> bool:
        del name
        return False

    moves = is_safe = carries

    def opens_step_around(self, function: str) -> str:
        del function
        return ""


NOWHERE: Elsewhere = _Nowhere()
"""Nothing is known."""


def imported_name(program: Program, event: Event) -> str:
    """The dotted name of the imported function that an event calls; "" for anything else."""
    path = dotted(event.node.func) if isinstance(event.node, cst.Call) else None
    first, _, rest = (path or "").partition(".")
    full = program.module.outline.imports.get(first, "")
    return full + (f".{rest}" if rest and full else "")
