"""Ctrl-C waits until a transition has ended. Knows nothing of transitions."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

__all__ = ["DeferredInterrupt"]


class DeferredInterrupt:
    """A block in which SIGINT is remembered, and handed to the handler there was when the block has ended.

    Only the main thread receives signals; elsewhere, and where no Python handler is installed, it does nothing.
    ``fired`` tells the block that an interrupt is waiting, so that it can undo what it did.
    """

    __slots__ = ("_frame", "_previous", "_signum", "fired")

    def __init__(self) -> None:
        self.fired = False
        self._previous: object = None
        self._signum = 0
        self._frame: FrameType | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._remember)
        return self

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.fired, self._signum, self._frame = True, signum, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        previous = self._previous
        if not callable(previous):
            return
        signal.signal(signal.SIGINT, previous)
        if self.fired:
            previous(self._signum, self._frame)
