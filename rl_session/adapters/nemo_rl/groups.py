"""A NeMo-RL object behind the worker group protocol: transitions become legacy calls, and only those that are needed.

To the driver it is a group of one rank, so that scopes, nesting, ownership and the log are the library's own. What the object
holds cannot be looked at: a group keeps what is *known* of it, and believes nothing after a failure. Knows nothing of
scopes; who else uses the same GPUs is :mod:`rl_session.adapters.nemo_rl.sharing`'s business.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from rl_session.adapters.nemo_rl.calls import LEGACY_CALLS
from rl_session.adapters.nemo_rl.sharing import Sharing
from rl_session.adapters.nemo_rl.traits import Kind
from rl_session.audit import events
from rl_session.errors import ClosedError
from rl_session.lifecycle import Mode, Placement, Tier
from rl_session.offload.guard import Explain
from rl_session.offload.reports import Notice
from rl_session.planning import Moved
from rl_session.workers.replies import (
    CallResult,
    Description,
    Failed,
    Ok,
    Reply,
    Room,
    TransitionReply,
    TransitionRequest,
)

__all__ = ["LegacyGroup", "Wish"]

Tell = Callable[[events.Event], None]


@attrs.frozen(kw_only=True)
class Wish:
    """What a scope asks for beyond its mode.

    Attributes:
        keep: ``keep_train_buffers``; None to find out.
        tags: What of an engine to wake; None for all of it.
    """

    keep: bool | None = None
    tags: tuple[str, ...] | None = None


class LegacyGroup(ABC):
    """One NeMo-RL object as a group of one rank.

    Args:
        legacy: The object; held weakly.
        name: Its name in the log.
        kind: "policy", "value" or "engine".
        nbytes: Component to bytes, where the user knows them.
    """

    num_ranks = 1
    logs_moves = False
    is_joined = False

    def __init__(self, legacy: object, name: str, kind: Kind, nbytes: Mapping[str, int]) -> None:
        self._legacy = weakref.ref(legacy)
        self.name = name
        self.kind = kind
        self.label = label = f"{kind} {name!r}"
        self.nbytes = dict(nbytes)
        self.mode = Mode.OFFLOADED
        self.wish = Wish()
        self.hold = False
        """Whether the way out of the scope that is being left may leave everything where it is."""
        self.sharing: Sharing | None = None
        self.explain: Explain = lambda: (label, ())
        self.tell: Tell = lambda event: None
        self._logged: dict[str, Tier] = {}
        self._own: dict[str, Callable[..., Any]] = {
            "transition": self._transition,
            "placement": self.placement,
            "memory": self.memory,
            "sizes": self._sizes,
            "component_names": lambda: list(self.known()),
            "room": lambda request: Room(onload=0, freed=0, reserve=0),
            "holdings": lambda modes, flags: [],
            "has_open_step": lambda: False,
            "recover": self._recover,
            "detach": self._detach,
        }

    # -- the protocol --------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """Serve a call of the driver's, or make it on the object. Interrupts are not replies: they propagate."""
        try:
            if method in LEGACY_CALLS:
                return [Ok(self._compute(method, *args, **kwargs))]
            return [Ok(self._own[method](*args, **kwargs))]
        except Exception as error:
            return [Failed(error)]

    def close(self) -> None:
        """Let the object go; it is the caller's."""
        self._own = {}

    @property
    def legacy(self) -> Any:
        """The object.

        Raises:
            ClosedError: It is gone.
        """
        legacy = self._legacy()
        if legacy is None:
            raise ClosedError(f"{self.label}: the object is gone", (), "scopes(policy)  # of an object that is alive")
        return legacy

    @property
    def is_alive(self) -> bool:
        """Whether the object still exists."""
        return self._legacy() is not None

    def _compute(self, method: str, *args: Any, **kwargs: Any) -> CallResult:
        return CallResult(getattr(self.legacy, method)(*args, **kwargs))

    # -- what is known -------------------------------------------------------------------------------------------

    @abstractmethod
    def known(self) -> Mapping[str, Tier | None]:
        """Component to tier; None where nobody can know."""

    @abstractmethod
    def forget(self) -> None:
        """Believe nothing of where anything is."""

    @property
    @abstractmethod
    def is_released(self) -> bool:
        """Whether nothing more could be taken off the device."""

    @abstractmethod
    def _go(self, request: TransitionRequest) -> tuple[Notice, ...]:
        """Make the calls that ``request`` needs, all or none."""

    def describe(self, mode: Mode) -> Description:
        """The object as it was found."""
        self._logged = {name: tier for name, tier in self.known().items() if tier is not None}
        self.mode = mode
        return Description(mode=mode, placement=self.placement(), nbytes=self._sizes(), notices=())

    def placement(self) -> Placement:
        """Where each component is, as far as the log knows; what was never known is left out."""
        return Placement(self._logged)

    def _sizes(self) -> dict[str, int]:
        return {name: self.nbytes.get(name, 0) for name, tier in self._logged.items() if tier is not Tier.NONE}

    def memory(self) -> dict[str, Any]:
        """Bytes of each component by tier, as far as sizes were given."""
        sizes = self._sizes()
        return {
            "components": {name: {self._logged[name].value: nbytes} for name, nbytes in sizes.items()},
            "device_bytes": self._bytes_at(Tier.DEVICE),
            "unknown": [name for name, tier in self.known().items() if tier is None],
        }

    def _bytes_at(self, tier: Tier) -> int:
        return sum(self.nbytes.get(name, 0) for name, found in self._logged.items() if found is tier)

    # -- transitions ---------------------------------------------------------------------------------------------

    def _transition(self, request: TransitionRequest) -> TransitionReply:
        before = self.placement()
        start = time.perf_counter()
        notices: tuple[Notice, ...] = ()
        if request.explicit is None:  # else close(): the object stays as it is
            if self.sharing is not None:
                with self.sharing.admitted(self, request):
                    notices = self._go(request)
            else:
                notices = self._go(request)
            self.mode = request.mode
        return self._reply(before, time.perf_counter() - start, notices)

    def _reply(self, before: Placement, seconds: float, notices: tuple[Notice, ...]) -> TransitionReply:
        moved = self._log_moves()
        dropped = sum(m.nbytes for m in moved if m.component == "grads" and m.to_tier is Tier.NONE)
        return TransitionReply(
            before=before,
            placement=self.placement(),
            moved=moved,
            seconds=tuple(seconds / len(moved) for _ in moved),
            dropped_bytes=dropped,
            live_dropped=False,
            device_bytes=self._bytes_at(Tier.DEVICE),
            host_bytes=self._bytes_at(Tier.HOST),
            notices=notices,
        )

    def _log_moves(self) -> tuple[Moved, ...]:
        """What differs from what the log was told last; what is not known is told when it is."""
        moved = []
        for name, tier in self.known().items():
            if tier is None:
                continue
            source = self._logged.get(name, Tier.NONE)
            if source is not tier:
                copied = source is not Tier.NONE and tier is not Tier.NONE
                moved.append(Moved(name, source, tier, self.nbytes.get(name, 0), 1, elided=not copied))
            self._logged[name] = tier
        return tuple(moved)

    def _recover(self, path: str | None) -> str:
        """After a failure nothing is believed: the way to rest is made from anywhere."""
        del path
        self.forget()
        return "unknown: every component is placed anew"

    def _detach(self) -> None:  # noqa: B027 (a trainer stays as it is)
        """End the use of the object."""
