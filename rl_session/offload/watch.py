"""Who may write the tensors of one policy now, and whether its weights may have changed: the weights epoch.

Three stances. *Exposed*: the caller is in charge (TRAINING, RESIDENT), nothing on the device is known. *Protected*: a
scope of a read-only mode, in which only the library works, and only reads. *At rest*: outside every scope in a read-only
mode, where anything may write but hardly anything does; what is clean stays clean behind a write barrier until something
touches it. Knows nothing of modes and moves nothing.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from torch import Tensor

from rl_session.lifecycle import Tier
from rl_session.offload.snapshot import WEIGHTS, Snapshot
from rl_session.offload.tensors import library_access
from rl_session.offload.unit import Unit

if TYPE_CHECKING:
    from rl_session.offload.ledger import Ledger

__all__ = ["Stance", "Watch"]

_CLOCK = itertools.count(1)
"""Gives every epoch its number: a number that was read once never comes again, in whatever order threads store them."""


class Stance(Enum):
    """Who may write."""

    EXPOSED = "the caller, at any time"
    PROTECTED = "nobody"
    AT_REST = "anybody, and it is noticed"


class Watch:
    """Watches over the tensors of one policy.

    Args:
        ledger: Its books.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.stance = Stance.EXPOSED
        self.number = next(_CLOCK)
        self._is_asked = False
        """Whether anybody ever read the epoch: until then what is dirty need not be watched."""
        self.partners: weakref.WeakSet[Watch] = weakref.WeakSet()
        """Watches of policies that share storages with this one."""
        self._marks: list[tuple[object, ...]] | None = None
        """What every parameter and buffer looked like at the last look: its place in its storage, its version. None as long
        as nobody asked."""
        self._weights: frozenset[int] = frozenset()
        """The storages of parameters and buffers at the last look."""

    # -- stances -------------------------------------------------------------------------------------------------

    def expose(self) -> None:
        """From now on the caller may write; host copies are the engine's to distrust."""
        with library_access():
            self._leave_rest(hands_over=True)
        self.stance = Stance.EXPOSED
        self.changed()

    def protect(self) -> None:
        """From now on only the library works, and only reads."""
        self._end_exposure()
        with library_access():
            self._leave_rest(hands_over=False)
        self.stance = Stance.PROTECTED

    def rest(self) -> None:
        """From now on anybody may write: put barriers up around what is worth it, and distrust the rest."""
        self._end_exposure()
        with library_access():
            self._lay_to_rest(self._ledger.own_units())
        self.stance = Stance.AT_REST

    def _lay_to_rest(self, units: Sequence[Unit]) -> None:
        ledger = self._ledger
        for unit in units:
            unit.resters.add(ledger)
        for unit in [unit for unit in units if unit.host is None or unit.tier is Tier.DEVICE]:
            if unit.has_live_bytes:
                self.cover(unit)

    def _end_exposure(self) -> None:
        if self.stance is Stance.EXPOSED:
            self.changed()

    def _leave_rest(self, *, hands_over: bool) -> None:
        """Judge what was at rest. A barrier that a partner at rest needs stays, unless it ``hands_over`` to a writer."""
        is_changed = False
        ledger = self._ledger
        for unit in ledger.own_units():
            if ledger in unit.resters:
                is_changed |= unit.has_live_bytes and not self._is_intact(unit)
                unit.resters.discard(ledger)
            if unit.is_armed and (hands_over or not unit.resters):
                unit.lower_barrier()
        if is_changed:
            self.changed()

    def _is_intact(self, unit: Unit) -> bool:
        """Whether a unit on the device that somebody has at rest is known to hold the weights it held."""
        return (unit.is_armed and unit.look_at_barrier()) or not (unit.key in self._weights or len(unit.needs) > 1)

    def cover(self, unit: Unit) -> None:
        """Put a barrier up around a unit at rest, or distrust its host copy."""
        is_wanted = unit.host_valid or (self._is_asked and unit.key in self._weights)
        if unit.look_at_barrier() or not is_wanted or not unit.has_live_bytes:
            return
        if not unit.raise_barrier():
            unit.host_valid = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A block in which the library itself reads, by whatever road: that is no touch."""
        with library_access():
            intact = [unit for unit in self._ledger.own_units() if unit.look_at_barrier()]
        try:
            yield
        finally:
            with library_access():
                for unit in intact:
                    unit.restore_barrier()

    # -- the weights epoch ---------------------------------------------------------------------------------------

    def epoch(self) -> int:
        """See :attr:`rl_session.offload.engine.Engine.weights_epoch`."""
        if not self._is_asked:
            self._is_asked = True
            self._ledger.refresh()  # what later looks compare with
        circle = [self, *self.partners]
        if any(watch.stance is Stance.EXPOSED for watch in circle):
            self.number = next(_CLOCK)
        elif any(watch.stance is Stance.AT_REST for watch in circle):
            self._poll()
        return self.number

    def _poll(self) -> None:
        snapshot = self._ledger.refresh()  # counts what was touched, and what was not watched
        with library_access():
            for key in self._weights:
                if snapshot.units[key].resters:
                    self.cover(snapshot.units[key])

    def changed(self) -> None:
        """The weights may differ from now on from what they were; those of partners too."""
        for watch in (self, *self.partners):
            watch.number = next(_CLOCK)

    def look(self, snapshot: Snapshot) -> None:
        """Compare with the last look: a storage touched at rest, a parameter that is another, a version that moved on.

        Call under :func:`~rl_session.offload.tensors.library_access`.
        """
        found = list(snapshot.found())
        awake = [unit for unit in found if unit.resters and (unit.tier is Tier.DEVICE or unit.host is None)]
        touched = [unit for unit in awake if unit.has_live_bytes and not self._is_intact(unit)]
        if self.stance is Stance.AT_REST:
            ledger = self._ledger
            self._lay_to_rest([unit for unit in found if ledger not in unit.resters])
        before = self._marks
        self.note(snapshot)
        if touched or self._marks != before:
            self.changed()

    def note(self, snapshot: Snapshot) -> None:
        """Take what is there now as what the next look compares with."""
        self._weights = snapshot.weights()
        if self._is_asked:
            storages = snapshot.inventory.storages
            self._marks = [
                (entry.name, key, *_mark(entry.tensor))
                for key in storages
                if key in self._weights
                for entry in storages[key].entries
                if entry.component in WEIGHTS
            ]

    # -- partners ------------------------------------------------------------------------------------------------

    def meet(self, others: Iterable[Watch]) -> None:
        """Policies that share storages with this one."""
        for other in others:
            if other is not self:
                self.partners.add(other)
                other.partners.add(self)

    def close(self) -> None:
        """Partners need not mind this policy any more; its barriers were taken down by :meth:`expose`."""
        for partner in self.partners:
            partner.partners.discard(self)
        self.partners.clear()


def _mark(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
