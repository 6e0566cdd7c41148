"""A policy's seat at the arbiter: what it holds on its device, what of that may leave, and how it is told to.

Asks the ranks; decides nothing about who leaves (see :mod:`rl_session.driver.arbiter`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from rl_session.driver.arbiter import Wish
from rl_session.errors import ConfigError
from rl_session.lifecycle import MODE_TABLE, Cell, Mode, Placement, Tier
from rl_session.offload.device import Device
from rl_session.planning import Holding
from rl_session.workers.replies import Room, TransitionRequest

if TYPE_CHECKING:
    from rl_session.driver.control import Control

__all__ = ["PolicySeat", "needs_device"]


def needs_device(row: Mode) -> bool:
    """Whether a row of the mode table wants the weights on the device."""
    return MODE_TABLE[row].weights is Cell.DEVICE


class PolicySeat:
    """A policy, as far as room on a shared device goes.

    Args:
        control: The policy.
    """

    outside_bytes = 0
    """All its bytes are in the device's own records."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.name = control.name
        self.label = control.label

    @property
    def device(self) -> Device:
        """Its device."""
        return self._control.device

    @property
    def lock(self) -> threading.RLock:
        """Held while the policy is at work."""
        return self._control.lock

    def wish(self, request: TransitionRequest) -> Wish:
        """Room on the device that ``request`` needs, on the rank that needs most."""
        rooms: list[Room] = self._control.ask_all("room", request)
        return max(Wish(room.onload - room.freed, room.reserve) for room in rooms)

    def holdings(self, entering: Mode | None = None) -> list[Holding]:
        """What it has on its device; ``entering`` is the row of the mode it is on its way to."""
        control = self._control
        rows = [control.row] if entering is None else [control.row, entering]
        held = control.ranks.ask("holdings", rows, control.flags)
        busy = control.fault is not None or (entering is None and control.is_busy)
        return [
            Holding(
                self.label,
                h.component,
                h.nbytes,
                h.dirty_nbytes,
                control.last_used,
                h.releasable and not busy,
                h.disposable,
            )
            for h in held
        ]

    def evict(self, components: Sequence[str], reason: str) -> None:
        """Send components to the host, or nowhere where they are consumed gradients; the mode stays.

        Raises:
            RLSessionError: It failed and was rolled back.
        """
        self._control.send_away(Placement(dict.fromkeys(components, Tier.HOST)), reason)

    def pin(self, components: Sequence[str], *, on: bool) -> None:
        """Change which components stay on the device.

        Raises:
            ConfigError: There is no such component.
        """
        control = self._control
        known = set(control.ask("component_names"))
        unknown = sorted(str(name) for name in components if str(name) not in known)
        if unknown:
            listed = ", ".join(sorted(known))
            raise ConfigError(
                f"{self.label}: {'pin' if on else 'unpin'}({unknown[0]!r}): there is no such component",
                (f"components: {listed}",),
                f'policy.{"pin" if on else "unpin"}("params")',
            )
        names = frozenset(str(name) for name in components)
        with control.lock:
            pinned = control.flags.pinned | names if on else control.flags.pinned - names
            control.flags = attrs.evolve(control.flags, pinned=pinned)

    def where(self) -> str:
        """In words: the scope it is in, or where it rests."""
        frames = self._control.frames
        told = f"in {frames[-1].describe()}" if frames else f"rests {self._control.resting_mode}"
        pinned = ", ".join(sorted(self._control.flags.pinned))
        return f"{told}; pinned: {pinned}" if pinned else told

    def occupant(self) -> str:
        """The open scope that works on the device, in words; "" where there is none.

        REFIT is none: its weights are there to be pushed into an engine.
        """
        frames = self._control.frames
        lost = bool(frames) and frames[-1].holder() is None
        if not frames or lost or frames[-1].mode is Mode.REFIT or not needs_device(frames[-1].row):
            return ""
        return frames[-1].describe()
