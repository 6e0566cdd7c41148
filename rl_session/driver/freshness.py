"""Whether a policy's weights can have changed since they were pushed. One function, :func:`stamp_of`, answers for all.

Conservative: what is not known to be unchanged has changed. Weights are unchanged while every move of them was clean, nothing
but read-only modes was in effect, nothing was loaded, and they lie on the host now, where nobody writes. The epoch is the run's,
not the policy's, because participants may share storages. Knows nothing of tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_session.lifecycle import MODE_TABLE, Component, Mode, Placement, Tier

if TYPE_CHECKING:
    from rl_session.driver.control import Control
    from rl_session.workers.replies import TransitionReply

__all__ = ["Freshness", "on_host", "stamp_of"]

_WEIGHTS = (Component.PARAMS, Component.BUFFERS)
_WRITES = frozenset({"load_checkpoint", "recover"})
"""Calls that write weights in a read-only mode; those of TRAINING and RESIDENT need not be named."""


class Freshness:
    """Counts occasions on which weights of the run may have been written."""

    def __init__(self) -> None:
        self.epoch = 0

    def moved(self, reply: TransitionReply, was: Mode, row: Mode, *, rests: bool) -> None:
        """A transition was made, from row ``was`` to ``row``; ``rests`` if it ended outside every scope."""
        writable = not (MODE_TABLE[was].read_only and MODE_TABLE[row].read_only)
        dirty = any(m.component in _WEIGHTS and m.from_tier is Tier.DEVICE and not m.elided for m in reply.moved)
        if writable or dirty or (rests and not on_host(reply.placement)):
            self.epoch += 1

    def called(self, method: str) -> None:
        """A call was made, well or not."""
        if method in _WRITES:
            self.epoch += 1


def on_host(placement: Placement) -> bool:
    """Whether no weight is on the device."""
    return all(placement[component] is not Tier.DEVICE for component in _WEIGHTS)


def stamp_of(control: Control) -> int | None:
    """What equals an earlier :attr:`Freshness.epoch` only if the weights are the same; None where that is not known."""
    return control.run.freshness.epoch if on_host(control.ask("placement")) else None
