"""What is known of functions that a module imports. An interface, and its answer when nothing is known."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NOWHERE", "Elsewhere"]


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


class _Nowhere:
    def carries(self, name: str) -> bool:
        del name
        return False

    moves = is_safe = carries


NOWHERE: Elsewhere = _Nowhere()
"""Nothing is known."""
