"""From a placement to a placement: the ordered moves between them, decided without touching a byte.

Pure: no torch, no ray. What moves is a *storage* (several tensors, components and even policies may share one); storages in
the same position are planned together, so that a plan is as long as there are positions and not as there are storages. It has
three phases in a fixed order that bounds the device's peak: offloads, then drops, then onloads; within the offloads the
clean ones come first because they free memory without copying.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import attrs

from rl_session.lifecycle import Placement, Tier

__all__ = ["Holding", "Move", "Moved", "Plan", "StorageFacts", "choose_evictions", "plan", "summarise"]


class StorageFacts(NamedTuple):
    """What planning knows of one storage, or of several in the same position.

    Attributes:
        key: Says which, to whoever asked; planning only hands it on.
        component: The component it is counted under (the first that reaches it).
        components: Every component of this policy that reaches it.
        nbytes: Size in bytes when on the device, all together.
        tier: Where the bytes are now.
        clean: Whether a host copy with the same bytes exists.
        floor: The highest tier another policy on the device needs it at.
        num_storages: How many storages.
    """

    key: Hashable
    component: str
    components: tuple[str, ...]
    nbytes: int
    tier: Tier
    clean: bool
    floor: Tier
    num_storages: int = 1


class Move(NamedTuple):
    """What changes tier: one storage, or ``num_storages`` in the same position; ``elided`` when no byte is copied for it."""

    key: Hashable
    component: str
    nbytes: int
    from_tier: Tier
    to_tier: Tier
    elided: bool
    num_storages: int = 1


class Moved(NamedTuple):
    """All moves of one component with the same ends, summed: what one ``component.moved`` record says."""

    component: str
    from_tier: Tier
    to_tier: Tier
    nbytes: int
    num_storages: int
    elided: bool


@attrs.frozen
class Plan:
    """Ordered moves: every offload, then every drop, then every onload."""

    offloads: tuple[Move, ...]
    drops: tuple[Move, ...]
    onloads: tuple[Move, ...]

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves in the order in which they are made."""
        return self.offloads + self.drops + self.onloads

    @property
    def nbytes_copied(self) -> int:
        """Bytes that this plan copies, both ways."""
        return sum(move.nbytes for move in self.moves if not move.elided)

    @property
    def nbytes_elided(self) -> int:
        """Bytes that change tier without being copied."""
        return sum(move.nbytes for move in self.moves if move.elided)

    @property
    def nbytes_onload(self) -> int:
        """Device memory that the onloads take."""
        return sum(move.nbytes for move in self.onloads)

    @property
    def nbytes_freed(self) -> int:
        """Device memory that offloads and drops give back before the first onload."""
        return sum(move.nbytes for move in (*self.offloads, *self.drops) if move.from_tier is Tier.DEVICE)

    def __bool__(self) -> bool:
        return bool(self.offloads or self.drops or self.onloads)


def plan(storages: Sequence[StorageFacts], target: Placement) -> Plan:
    """The moves that bring ``storages`` to ``target``.

    A storage goes to the highest tier that any of its components, or another policy, needs. Storages already there do
    not appear. Host storages whose gradient is dropped appear as drops too, so that their host buffers are given back.
    """
    offloads: list[Move] = []
    drops: list[Move] = []
    onloads: list[Move] = []
    for facts in storages:
        goal = _goal(facts, target)
        if goal is facts.tier:
            continue
        if goal is Tier.NONE:
            drops.append(_move(facts, goal, elided=True))
        elif goal is Tier.HOST and facts.tier is Tier.DEVICE:
            offloads.append(_move(facts, goal, elided=facts.clean))
        elif goal is Tier.DEVICE:
            onloads.append(_move(facts, goal, elided=facts.tier is Tier.NONE))
    offloads.sort(key=lambda move: not move.elided)  # stable: clean first, else in scanning order
    return Plan(tuple(offloads), tuple(drops), tuple(onloads))


def _goal(facts: StorageFacts, target: Placement) -> Tier:
    goal = facts.floor
    for component in facts.components:
        wanted = target[component]
        if wanted.height > goal.height:
            goal = wanted
    return goal


def _move(facts: StorageFacts, goal: Tier, *, elided: bool) -> Move:
    return Move(facts.key, facts.component, facts.nbytes, facts.tier, goal, elided, facts.num_storages)


def summarise(moves: Iterable[Move]) -> tuple[Moved, ...]:
    """Sum moves by component, ends and whether bytes were copied, in order of first appearance."""
    nbytes: dict[tuple[str, Tier, Tier, bool], int] = defaultdict(int)
    count: dict[tuple[str, Tier, Tier, bool], int] = defaultdict(int)
    for move in moves:
        key = (move.component, move.from_tier, move.to_tier, move.elided)
        nbytes[key] += move.nbytes
        count[key] += move.num_storages
    return tuple(
        Moved(component, from_tier, to_tier, total, count[component, from_tier, to_tier, elided], elided)
        for (component, from_tier, to_tier, elided), total in nbytes.items()
    )


class Holding(NamedTuple):
    """A component that a participant has on a device, as far as making room goes.

    Attributes:
        participant: Whose it is, as messages call it: a policy and an engine may have one name.
        component: Which one.
        nbytes: Device memory that evicting it frees.
        dirty_nbytes: How much of that must be copied out first.
        last_used: When the participant was used last, on a clock all participants share.
        releasable: Whether it may leave: neither needed where the participant is, nor pinned, nor busy.
        disposable: Whether it is gradients that a step has consumed, which are dropped and not copied.
    """

    participant: str
    component: str
    nbytes: int
    dirty_nbytes: int
    last_used: int
    releasable: bool
    disposable: bool


def choose_evictions(needed: int, holdings: Sequence[Holding]) -> tuple[Holding, ...] | None:
    """Which components leave so that ``needed`` more bytes fit; None when all that may leave is not enough.

    Whole components leave: disposable gradients first, then those of the participant that was used least recently, and of
    one participant the clean before the dirty. Nothing leaves beyond what is needed: where the last one chosen frees more than
    was missing, those before it that fit into the excess stay, the one that would have left latest first.
    """
    candidates = sorted(
        (holding for holding in holdings if holding.releasable and holding.nbytes),
        key=lambda h: (not h.disposable, h.last_used, h.dirty_nbytes > 0, h.dirty_nbytes),
    )
    chosen: list[Holding] = []
    freed = 0
    for holding in candidates:
        if freed >= needed:
            break
        chosen.append(holding)
        freed += holding.nbytes
    if freed < needed:
        return None
    for holding in reversed(tuple(chosen)):
        if not holding.disposable and freed - holding.nbytes >= needed:
            chosen.remove(holding)
            freed -= holding.nbytes
    return tuple(chosen)
