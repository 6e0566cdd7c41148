"""What a path through a function knows of each tenant. Values only.

A path is a set of facts and one small state a tenant. Where a tenant is unknown, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import attrs
import libcst as cst

from rl_session.lifecycle import Mode
from rl_session_migrate.lint.facts import Facts
from rl_session_migrate.receivers import Identity
from rl_session_migrate.rules import Tenant
from rl_session_migrate.sites import HelperSite, Site

__all__ = ["At", "OpenScope", "Path", "Side", "State", "Step", "at_mode", "at_woken"]


class At(StrEnum):
    """Where a tenant is."""

    UNKNOWN = "unknown"
    TRAINING = "training"
    LOGPROB = "logprob"
    REFIT = "refit"
    OFF = "offloaded"
    PARKED = "parked"
    """Parameters on the host, gradients and optimizer state where they were (``finish_inference``)."""
    RESTING = "resting"
    """Outside every scope of this library, with ``base="offloaded"``."""
    SWITCHED = "switched"
    """Where ``switch`` put it, which mode the source does not say, or none that is checked."""
    AWAKE = "awake"
    WEIGHTS = "weights"
    """Of an engine, the weights are awake and the KV cache is not."""
    KV_CACHE = "kv_cache"
    """The other way round."""
    ASLEEP = "asleep"

    @property
    def is_away(self) -> bool:
        """Whether the parameters are not on the device."""
        return self in (At.OFF, At.PARKED)


_OF_MODE: Mapping[Mode, At] = {
    Mode.TRAINING: At.TRAINING,
    Mode.LOGPROB: At.LOGPROB,
    Mode.REFIT: At.REFIT,
    Mode.OFFLOADED: At.OFF,
    Mode.GENERATION: At.AWAKE,
}


def at_mode(mode: Mode) -> At:
    """Where entering a mode puts a tenant."""
    return _OF_MODE.get(mode, At.UNKNOWN)


def at_woken(before: At, tags: frozenset[str] | None) -> At:
    """Where waking some parts of an engine puts it; None wakes all of it, or parts the source does not say.

    Nobody wakes the weights of an engine that is awake, so that where it is unknown nothing else is; the cache is woken last.
    """
    if tags == frozenset({"weights"}):
        return At.AWAKE if before in (At.AWAKE, At.KV_CACHE) else At.WEIGHTS
    if tags == frozenset({"kv_cache"}):
        return At.KV_CACHE if before in (At.ASLEEP, At.KV_CACHE) else At.AWAKE
    return At.AWAKE


@attrs.frozen
class OpenScope:
    """A scope of this library that is open on this path.

    Attributes:
        mode: Its mode.
        line: Where it was entered.
        method: What made it: ``logprob_mode``.
        outer: The state to go back to.
        outer_by: What had put it there.
    """

    mode: Mode
    line: int
    method: str
    outer: At
    outer_by: Site | HelperSite | None = attrs.field(default=None, eq=False)


@attrs.frozen
class Side:
    """One side of a weight transfer that is started, while the other side is not.

    Attributes:
        tenant: Whose side.
        is_awaited: Whether the path waited for it already.
        node: Where it waited.
        wait: How that is written, to read.
        path: The path, there.
    """

    tenant: Tenant
    is_awaited: bool = False
    node: cst.CSTNode | None = attrs.field(default=None, eq=False)
    wait: str = attrs.field(default="", eq=False)
    path: Path | None = attrs.field(default=None, eq=False)


@attrs.frozen
class State:
    """One tenant on one path.

    Attributes:
        at: Where it is.
        by: The site that put it there; None where that is not in sight.
        is_used: Whether anything used it since.
        is_idle: Whether no tenant did anything since it left the device.
        step: The site that opened a train step which is still open.
        ended: The call that ended the last step; None if none is known to have ended, or one was opened since.
        is_eval: Whether an inference call left eval mode inside the open step.
        scopes: The open scopes, outermost first.
        pending: Names that hold futures of a transfer, with the line it was started on.
        side: The side of a transfer that it started, until the other side is started too.
        saving: The checkpoint that may still be in flight.
        is_alias: Whether the name stands for another tenant on this path: ``policy_generation = policy``.
    """

    at: At = At.UNKNOWN
    # Two ways to the same state are one: which of the two calls a finding names does not matter.
    by: Site | HelperSite | None = attrs.field(default=None, eq=False)
    is_used: bool = False
    is_idle: bool = False
    step: Site | None = None
    ended: Site | None = None
    is_eval: bool = False
    scopes: tuple[OpenScope, ...] = ()
    pending: tuple[tuple[str, int], ...] = ()
    side: Side | None = None
    saving: Site | None = None
    is_alias: bool = False

    @property
    def line(self) -> int:
        """The line that put it where it is; 0 where that is not in sight."""
        return self.by.position.line if self.by is not None else 0


@attrs.frozen(eq=False)
class Step:
    """One step of a trail: a test and its outcome, or a site.

    Attributes:
        node: The test, or the call.
        within: The statement that the test decides on; None for a site.
        outcome: How the test came out.
    """

    node: cst.CSTNode
    within: cst.CSTNode | None = None
    outcome: bool = True


@attrs.frozen
class Path:
    """What one way to a place knows.

    Attributes:
        facts: How tests came out.
        tenants: The state of each tenant that is not simply unknown.
        trail: The last sites it passed, and how the tests in between came out.
        is_vague: Whether something was forgotten to keep the number of paths down: nothing is said about it.
    """

    facts: Facts = frozenset()
    tenants: frozenset[tuple[Identity, State]] = frozenset()
    # To read, not to tell paths apart.
    trail: tuple[Step, ...] = attrs.field(default=(), eq=False)
    is_vague: bool = False

    def of(self, identity: Identity) -> State:
        """The state of a tenant."""
        for found, state in self.tenants:
            if found == identity:
                return state
        return State()

    def put(self, identity: Identity, state: State) -> Path:
        """The path with another state of one tenant."""
        rest = frozenset(item for item in self.tenants if item[0] != identity)
        return attrs.evolve(self, tenants=rest if state == State() else rest | {(identity, state)})

    def step(self, step: Step) -> Path:
        """The path one step further."""
        return attrs.evolve(self, trail=(*self.trail[-15:], step))

    def put_all(self, states: Mapping[Identity, State]) -> Path:
        """The path with these states and no others."""
        return attrs.evolve(self, tenants=frozenset((i, s) for i, s in states.items() if s != State()))
