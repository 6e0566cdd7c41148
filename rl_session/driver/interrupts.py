"""Ctrl-C waits until a transition has ended. Knows nothing of transitions.

It is on every scope's way: ``signal.signal()`` turns numbers into enum members and back, at ten times the cost of
``_signal.signal()``.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType, TracebackType
from typing import Self

__all__ = ["DeferredInterrupt"]


_MAIN = threading.main_thread().ident
_SIGINT: int = _signal.SIGINT
_get_ident, _handler, _set_handler = threading.get_ident, _signal.getsignal, _signal.signal


class DeferredInterrupt:
    """A block in which SIGINT is remembered, and handed to the handler there was when the block has ended.

    Only the main thread receives signals; elsewhere, and where no Python handler is installed, it does nothing. Inside
    another such block neither: the outer one remembers.
    """

    __slots__ = ("_frame", "_previous", "_signum", "fired")
    _outermost: DeferredInterrupt | None = None
    """The block that remembers now; only the main thread ever sets it."""

    @staticmethod
    def is_active() -> bool:
        """Whether this thread is in such a block already."""
        return DeferredInterrupt._outermost is not None and threading.get_ident() == _MAIN

    @staticmethod
    def is_waiting() -> bool:
        """Whether an interrupt arrived in the block that this thread is in: what waits for somebody else should give up."""
        outermost = DeferredInterrupt._outermost
        return outermost is not None and threading.get_ident() == _MAIN and outermost.fired

    def __enter__(self) -> Self:
        self._previous: object = None
        if DeferredInterrupt._outermost is None and _get_ident() == _MAIN:
            previous = _handler(_SIGINT)
            if callable(previous):
                self.fired = False
                self._previous = previous
                DeferredInterrupt._outermost = self
                _set_handler(_SIGINT, self._remember)
        return self

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.fired, self._signum, self._frame = True, signum, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        previous = self._previous
        if previous is None:
            return
        DeferredInterrupt._outermost = None
        _set_handler(_SIGINT, previous)
        if self.fired and callable(previous):
            previous(self._signum, self._frame)
