"""Waiting until an engine has nothing in flight: what we sent it, and what it says itself.

Nothing spins: our own calls wake the waiter when they end, the engine is asked to wait where it can and polled where it
cannot, ever more rarely. Ctrl-C ends the wait. Knows nothing of why one waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rl_session.driver.interrupts import DeferredInterrupt
from rl_session.generation.protocol import num_in_flight_of

__all__ = ["Drain"]

_SLICE_SECONDS = 0.5
"""The longest single wait: an interrupt that was deferred is noticed after it."""
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.005, 0.25


class Drain:
    """Counts the calls in flight of one engine.

    Args:
        engine: The engine.
        timeout_seconds: How long to wait at most.
        refuses: Whether to give up at once instead.
    """

    def __init__(self, engine: object, timeout_seconds: float, *, refuses: bool) -> None:
        self._engine = engine
        self._timeout = timeout_seconds
        self._refuses = refuses
        self._changed = threading.Condition()
        self._num_calls = 0

    def begin(self) -> None:
        """A call of ours begins."""
        with self._changed:
            self._num_calls += 1

    def end(self) -> None:
        """A call of ours has ended."""
        with self._changed:
            self._num_calls -= 1
            self._changed.notify_all()

    def num_in_flight(self) -> int:
        """What the engine says, or what we know of where that is more.

        Raises:
            TypeError: The engine says what is no number.
            Exception: Whatever it raised instead.
        """
        return max(self._num_calls, num_in_flight_of(self._engine))

    def known_in_flight(self) -> int | None:
        """The same for messages, which must not fail for an engine that is gone: None where it cannot be read."""
        try:
            return self.num_in_flight()
        except Exception:
            return None

    def wait(self) -> str:
        """Wait until nothing is in flight.

        Returns:
            "" when nothing is; else in words why the wait ended before.

        Raises:
            Exception: The engine cannot say what is in flight, or failed at waiting; then something may be.
        """
        num = self.num_in_flight()
        if not num:
            return ""
        if self._refuses:
            return f"{num} requests in flight (on_busy='refuse')"
        remaining, poll = self._timeout, _FIRST_POLL_SECONDS
        while remaining > 0:
            if DeferredInterrupt.is_waiting():
                return f"interrupted while {num} requests were in flight"
            remaining -= self._wait_a_little(min(remaining, _SLICE_SECONDS), poll)
            poll = min(2 * poll, _LAST_POLL_SECONDS)
            num = self.num_in_flight()
            if not num:
                return ""
        return f"{num} requests still in flight after {self._timeout:g} s"

    def _wait_a_little(self, longest: float, poll: float) -> float:
        """Wait for our own calls first, then for the engine's; returns the seconds to charge for it."""
        with self._changed:
            if self._num_calls:
                start = time.monotonic()
                self._changed.wait(longest)
                return time.monotonic() - start
        wait_for_idle: Callable[[float], object] | None = getattr(self._engine, "wait_for_idle", None)
        if wait_for_idle is not None:
            wait_for_idle(longest)
            return longest  # an engine that returns at once must not be asked for ever
        pause = min(longest, poll)
        time.sleep(pause)
        return pause
