"""What a replay says: the state of every policy at one instant, as values that do not change.

Knows nothing of records. Modes, tiers and components are the lower-case strings of the log.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

__all__ = ["OpenCall", "OpenScope", "OpenStep", "OpenTransition", "PolicyState", "State"]

_HEIGHT = {"none": 0, "host": 1, "device": 2}


@attrs.frozen
class OpenScope:
    """A scope that was entered and not left.

    Attributes:
        scope_id: Its number, unique in its source.
        mode: Its mode.
        outer_mode: The mode it was entered from.
        depth: How many scopes were open around it.
        call_site: Where it was entered.
        source: Who wrote it.
        seq: Of its record.
        time_ns: Of its record.
    """

    scope_id: int | None
    mode: str
    outer_mode: str
    depth: int
    call_site: str
    source: str
    seq: int
    time_ns: int


@attrs.frozen
class OpenTransition:
    """A transition that was started and has no end.

    Attributes:
        transition_id: Its number, unique in its source.
        from_mode: The mode in effect.
        to_mode: The mode wanted.
        reason: Why.
        scope_id: The scope it belongs to, if any.
        source: Who wrote it.
        seq: Of its record.
        time_ns: Of its record.
    """

    transition_id: int | None
    from_mode: str
    to_mode: str
    reason: str
    scope_id: int | None
    source: str
    seq: int
    time_ns: int


@attrs.frozen
class OpenStep:
    """A train step that was opened, and neither committed nor aborted."""

    source: str
    seq: int
    time_ns: int


@attrs.frozen
class OpenCall:
    """A call that has written what it did and not yet its end; a call writes nothing when it begins."""

    method: str
    source: str
    seq: int
    time_ns: int


@attrs.frozen
class PolicyState:
    """One policy at one instant.

    Attributes:
        name: Its name.
        health: ``"ok"``, ``"faulted"`` or ``"closed"``.
        mode: The mode in effect.
        components: Component to tier to bytes, summed over the ranks; a component without bytes has no tier.
        scopes: Open scopes, the outermost first.
        transition: The transition under way, if one is.
        open_step: The open train step, if one is.
        open_call: A call under way, as far as it can be known.
        weights_version: Of the last publication; None before the first.
        reference_in: Whether the reference stands in for the live weights.
        is_certain: False from a failure that could not be undone until the log says again where everything is.
        source: Of the record that created it.
        seq: Likewise.
    """

    name: str
    health: str
    mode: str
    components: Mapping[str, Mapping[str, int]]
    scopes: tuple[OpenScope, ...] = ()
    transition: OpenTransition | None = None
    open_step: OpenStep | None = None
    open_call: OpenCall | None = None
    weights_version: int | None = None
    reference_in: bool = False
    is_certain: bool = True
    source: str = ""
    seq: int = -1

    @property
    def placement(self) -> dict[str, str]:
        """Component to tier: the highest that bytes of it lie at."""
        return {name: _highest(tiers) for name, tiers in self.components.items()}

    def nbytes(self, tier: str) -> int:
        """Bytes at a tier."""
        return sum(tiers.get(tier, 0) for tiers in self.components.values())


@attrs.frozen
class State:
    """Everything at one instant: after the record with this ``source`` and ``seq``.

    Attributes:
        source: Of the record.
        seq: Of the record.
        time_ns: Of the record.
        step: The session's step number, if any.
        policies: Name to state, closed ones included.
    """

    source: str
    seq: int
    time_ns: int
    step: int | None
    policies: Mapping[str, PolicyState]


def _highest(tiers: Mapping[str, int]) -> str:
    return max(tiers, key=lambda tier: _HEIGHT.get(tier, 0), default="none")
