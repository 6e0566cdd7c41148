"""Room on a device that participants share: who must leave so that somebody can come in.

Nothing leaves unless room is short. Then what is releasable goes, in the order of
:func:`rl_session.planning.choose_evictions`; if that is not enough, the entry fails before anything moves, and the error says
who holds the bytes. Knows participants only as seats: who they are, what they hold, and how to ask them to let go.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from rl_session.errors import DeviceMemoryError
from rl_session.lifecycle import Mode
from rl_session.offload.device import Device
from rl_session.planning import Holding, choose_evictions

__all__ = ["Arbiter", "Seat", "Wish"]

_MARGIN = 0.05
"""Part of a measured budget that is left alone, for activations and fragmentation."""


class Seat(Protocol):
    """A participant, as far as making room goes."""

    name: str
    label: str

    @property
    def device(self) -> Device | None:
        """Where it holds bytes; None for one that has devices of its own, which has no seat."""
        ...

    @property
    def lock(self) -> threading.RLock:
        """Held while it is at work."""
        ...

    @property
    def outside_bytes(self) -> int:
        """Bytes it holds on the device that the device's own records do not know: an engine's."""
        ...

    def holdings(self, entering: Mode | None = None) -> list[Holding]:
        """What it has on its device; ``entering`` is the row of the mode it is on its way to."""
        ...

    def evict(self, components: Sequence[str], reason: str) -> None:
        """Send components away."""
        ...

    def where(self) -> str:
        """In words: the scope it is in, or where it rests."""
        ...

    def occupant(self) -> str:
        """The open scope that works on the device, in words; "" where there is none."""
        ...


class Wish(NamedTuple):
    """Room that is asked for.

    Attributes:
        nbytes: Bytes that must be free, after what the newcomer gives back itself.
        reserve: Bytes that will be made later, as far as can be told.
    """

    nbytes: int
    reserve: int = 0


class Arbiter:
    """Keeps the participants of a run within the budget of each device.

    Args:
        budget: Bytes that participants may hold on a device together; None: an emulated device's capacity, or on CUDA
            what is free when the first participant comes, less a margin of 5%.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self._seats: list[Seat] = []
        self._measured: dict[int, int | None] = {}
        self._lock = threading.RLock()
        self._clock = itertools.count(1)

    def join(self, seat: Seat) -> None:
        """A participant comes.

        What is measured counts everything that is free or ours; an engine that came awake may have taken its memory before
        or after the first measure, so the larger one stands.
        """
        device = seat.device
        assert device is not None, f"{seat.label} shares no device"
        key = id(device)
        self._seats.append(seat)
        if key not in self._measured or seat.outside_bytes:
            found, before = self._measure(device), self._measured.get(key)
            self._measured[key] = found if before is None or found is None else max(found, before)

    def part(self, seat: Seat) -> None:
        """A participant leaves."""
        if seat in self._seats:
            self._seats.remove(seat)

    def tick(self) -> int:
        """The time of a use, on a clock all participants share."""
        return next(self._clock)

    def _measure(self, device: Device) -> int | None:
        free = device.free_bytes() if device.capacity is None else None  # a capacity may be set anew at any time
        return None if free is None else int((self.in_use(device) + free) * (1 - _MARGIN))

    def seats_on(self, device: Device) -> list[Seat]:
        """The participants that share ``device``."""
        return [seat for seat in self._seats if seat.device is device]

    def in_use(self, device: Device) -> int:
        """Bytes that participants and awake engines hold on ``device``."""
        return device.held_bytes + sum(seat.outside_bytes for seat in self._seats if seat.device is device)

    def free(self, device: Device) -> int | None:
        """Bytes of the budget that nobody holds, or None for no limit."""
        budget = self.budget_of(device)
        return None if budget is None else max(0, budget - self.in_use(device))

    def budget_of(self, device: Device) -> int | None:
        """Bytes that participants may hold on ``device`` together; None for no limit."""
        if self.budget is None and device.capacity is not None:
            return device.capacity
        return self.budget if self.budget is not None else self._measured.get(id(device))

    def usage(self, device: Device) -> dict[str, int | None]:
        """``budget`` and ``in_use`` of a device, in bytes."""
        return {"budget": self.budget_of(device), "in_use": self.in_use(device)}

    @contextmanager
    def steady(self, device: Device) -> Iterator[int | None]:
        """A block in which nobody else takes room; yields what is free of the budget of ``device`` (None: no limit)."""
        with self._lock:
            budget = self.budget_of(device)
            yield None if budget is None else budget - self.in_use(device)

    @contextmanager
    def admit(self, seat: Seat, mode: Mode | None, ask: Callable[[], Wish], reason: str) -> Iterator[tuple[str, ...]]:
        """Make room, and keep it until the block has used it.

        Args:
            seat: Who comes in.
            mode: The row of the mode it is on its way to; None for an engine.
            ask: How much room it needs.
            reason: For records and messages.

        Yields:
            Components of the newcomer itself that must leave in the same move.

        Raises:
            DeviceMemoryError: There is no room even if everything releasable leaves; nothing was moved.
        """
        device = seat.device
        budget = self.budget_of(device) if device is not None else None
        if device is None or budget is None:
            yield ()
            return
        with self._lock:
            yield self._make_room(device, ask(), budget, f"{seat.label}: {reason}", (seat, mode))

    def make_room(self, device: Device, nbytes: int) -> None:
        """Evict until ``nbytes`` more fit on ``device``.

        Raises:
            DeviceMemoryError: They do not, even if everything releasable leaves; nothing was moved.
        """
        budget = self.budget_of(device)
        with self._lock:
            if budget is not None:
                self._make_room(device, Wish(nbytes), budget, f"session: make_room({nbytes})", None)

    def _make_room(
        self, device: Device, wish: Wish, budget: int, attempted: str, coming: tuple[Seat, Mode | None] | None
    ) -> tuple[str, ...]:
        if self.in_use(device) + wish.nbytes + wish.reserve <= budget:
            return ()
        newcomer, mode = coming if coming is not None else (None, None)
        with self._free_to_ask(device, newcomer) as seats:
            holdings = [h for seat in seats for h in seat.holdings(mode if seat is newcomer else None)]
            missing = self.in_use(device) + wish.nbytes - budget
            available = sum(h.nbytes for h in holdings if h.releasable)
            # The reserve is an estimate: it may send others away, never refuse an entry.
            chosen = choose_evictions(max(missing, min(missing + wish.reserve, available)), holdings)
            if chosen is None:
                raise self._no_room(device, wish.nbytes, budget, attempted, holdings)
            leaving = {seat: [h.component for h in chosen if h.participant == seat.label] for seat in seats}
            for seat, components in leaving.items():
                if components and seat is not newcomer:
                    seat.evict(components, f"evicted for {attempted}")
            return tuple(leaving.get(newcomer, ())) if newcomer is not None else ()

    @contextmanager
    def _free_to_ask(self, device: Device, newcomer: Seat | None) -> Iterator[list[Seat]]:
        """The participants on ``device`` that nobody is at work on; they stay so for the block."""
        held: list[Seat] = []
        try:
            for seat in self._seats:
                if seat.device is device and (seat is newcomer or seat.lock.acquire(blocking=False)):
                    held += [seat]
            yield held
        finally:
            for seat in held:
                if seat is not newcomer:
                    seat.lock.release()

    def _no_room(
        self, device: Device, nbytes: int, budget: int, attempted: str, holdings: Sequence[Holding]
    ) -> DeviceMemoryError:
        facts = [f"needed: {nbytes} bytes; budget: {budget}, in use: {self.in_use(device)}"]
        if nbytes > budget:
            remedy = (
                f"Session(device_budget={nbytes}) or more  # it is larger than the whole budget: nobody's leaving helps"
            )
            return DeviceMemoryError(f"{attempted}: no room on the device", tuple(facts), remedy)
        for seat in self._seats:
            parts = [h for h in holdings if h.participant == seat.label and h.nbytes]
            told = ", ".join(f"{h.component} {h.nbytes}{' (releasable)' if h.releasable else ''}" for h in parts)
            if told:
                facts.append(f"{seat.label} ({seat.where()}): {told}")
        remedy = "other.offload()  # of who holds the bytes, after its scopes; or unpin, or Session(device_budget=...)"
        return DeviceMemoryError(f"{attempted}: no room on the device", tuple(facts), remedy)
