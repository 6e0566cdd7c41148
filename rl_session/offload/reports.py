"""What a move says afterwards: plain values. Knows nothing of how bytes move."""

from __future__ import annotations

import attrs

from rl_session.lifecycle import Placement
from rl_session.planning import Moved

__all__ = ["MoveReport", "Notice"]


@attrs.frozen
class Notice:
    """Something worth a ``warning`` record: a stable code, a message, and how much it concerns."""

    code: str
    message: str
    nbytes: int | None = None
    count: int | None = None


@attrs.frozen
class MoveReport:
    """What a move did.

    Attributes:
        placement: Where each component is now.
        moved: One entry for each component, pair of tiers, and copied or elided.
        seconds: Wall time of each entry of ``moved``, copies only.
        dropped_bytes: Bytes of gradients dropped.
        notices: What to warn about.
    """

    placement: Placement
    moved: tuple[Moved, ...]
    seconds: tuple[float, ...]
    dropped_bytes: int
    notices: tuple[Notice, ...]

    @property
    def bytes_moved(self) -> int:
        """Bytes copied, both ways."""
        return sum(item.nbytes for item in self.moved if not item.elided)

    @property
    def bytes_elided(self) -> int:
        """Bytes that changed tier without a copy."""
        return sum(item.nbytes for item in self.moved if item.elided)
