"""Compute and state calls: judged by mode, serialised, recorded; of handles without the lease, only those that read.

Knows nothing of what a call computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rl_session.audit import events
from rl_session.driver.lease import READS
from rl_session.driver.run import error_text
from rl_session.driver.scopes import Scopes
from rl_session.errors import ModeError, StaleHandleError
from rl_session.lifecycle import CALL_NEEDS, Component, Tier, may_call, may_nest, modes_allowing, scope_to_write
from rl_session.workers.digest import digest_of
from rl_session.workers.replies import CallResult

__all__ = ["Calls"]


class Calls(Scopes):
    """Makes calls to the ranks."""

    def call(
        self,
        method: str,
        *args: Any,
        gate: str | None = None,
        needs_owner: bool = False,
        then: Callable[[CallResult], events.Event] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make a compute or state call: judged by mode, serialised, recorded.

        Args:
            method: The worker's method, and the name in the record.
            *args: Handed on.
            gate: The name in the mode table, when it is not ``method``; "" for a call legal everywhere.
            needs_owner: Whether only the owner may make it.
            then: Makes one more event of the result, written after the call's own record.
            **kwargs: Handed on.

        Raises:
            ModeError: It is not legal in the mode in effect.
            RLSessionError: What the call itself raised.
        """
        gate = method if gate is None else gate
        self.ownership.check_process(f"{method}()")
        if self.lease is not None and not self.lease.is_held:
            return self._call_elsewhere(method, args, gate, needs_owner=needs_owner, then=then, **kwargs)
        if needs_owner:
            self.close_orphans()  # their owner may be gone with them
            self.ownership.check(f"{method}()")
        with self._serialised():
            self.ready(f"{method}()")
            if gate in CALL_NEEDS:
                self._retry_release(f"{method}()")
            self.check_mode(gate)
            self.last_used = self.run.arbiter.tick()
            mode, start = self.mode, time.perf_counter()
            try:
                result = self.ranks.call(method, *args, **kwargs)
            except BaseException as error:
                changed = getattr(error, "rl_changed", ())
                self.journal.notes(getattr(error, "rl_notes", ()))
                self.journal.called(method, mode, start, error_text(error), changed)
                self._note_fault(error)
                raise
            self.device.hold(self.name, result.device_bytes)
            self.journal.notes(result.notes)
            digest = digest_of(result.value) if self.digests else None
            self.journal.called(method, mode, start, None, result.changed, digest=digest)
            if then is not None:
                self._record(then(result))
            return result.value

    def _call_elsewhere(self, method: str, args: tuple[Any, ...], gate: str, **kwargs: Any) -> Any:
        """A call by a handle that does not hold the lease: one that only reads is made as things are, others take it."""
        if method not in READS:
            with self.lock:
                self._take_lease(f"{method}()")
                try:
                    return self.call(method, *args, gate=gate, **kwargs)
                finally:
                    self._release()
        for named in ("needs_owner", "then"):
            kwargs.pop(named, None)
        return self._read(method, gate, *args, **kwargs).value

    def _read(self, method: str, gate: str, *args: Any, **kwargs: Any) -> Any:
        """Read from a rank, judged by what this handle knows; what turns out to be stale is looked at anew, once."""
        assert self.lease is not None
        with self._serialised():
            for is_last in (False, True):
                if is_last or not self.lease.has_looked:
                    self.look()
                self.ready(f"{method}()")
                if gate and not may_call(self.mode, gate) and not is_last:
                    continue
                self.check_mode(gate)
                try:
                    with self._noting_loss():
                        return self._read_once(method, *args, **kwargs)
                except StaleHandleError:
                    if is_last:
                        raise
        raise AssertionError

    def _read_once(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert self.lease is not None
        mode, start = self.mode, time.perf_counter()
        try:
            value = self.lease.read(method, mode, *args, **kwargs)
        except StaleHandleError:
            raise
        except BaseException as error:
            self.journal.called(method, mode, start, error_text(error), ())
            raise
        self.journal.called(method, mode, start, None, ())
        return value

    def call_plain(self, method: str, *args: Any) -> Any:
        """As :meth:`call`, for a method that is legal everywhere and returns its value as it is."""
        self.ownership.check_process(f"{method}()")
        if self.lease is not None and not self.lease.is_held:
            return self._read(method, "", *args)
        with self._serialised():
            self.ready(f"{method}()")
            mode, start = self.mode, time.perf_counter()
            value = self.ranks.ask(method, *args)
            self.journal.called(method, mode, start, None, ())
            return value

    @contextmanager
    def _serialised(self) -> Iterator[None]:
        with self.lock:
            self._calls += 1
            try:
                yield
            finally:
                self._calls -= 1

    def check_mode(self, gate: str) -> None:
        """Refuse a call that is not legal in the mode in effect.

        Raises:
            ModeError: The message names the modes in which it is, and the scope to write.
        """
        if not gate or (may_call(self.mode, gate) and (self.row is self.mode or may_call(self.row, gate))):
            return
        needs = CALL_NEEDS.get(gate, (Component.PARAMS,))
        self._record(events.GuardRejected(method=gate, mode=self.mode.value, needs=[n.value for n in needs]))
        shown = gate if gate.endswith(")") else f"{gate}()"
        listed = ", ".join(str(mode) for mode in modes_allowing(gate) if mode is not self.mode)
        raise ModeError(
            f"{self.label}: {shown} {self._why_not(needs)}",
            (*self.explain()[1], f"legal in: {listed}"),
            self._where_to_call(gate, shown.replace("()", "(...)")),
        )

    def _where_to_call(self, gate: str, shown: str) -> str:
        """What to write for a call: the scope it belongs in, and where that scope may stand."""
        scope = f"{self.kind}.{scope_to_write(gate, self.kind)}()"
        code = f"with {scope} as p: p.{shown}" if gate == "generate" else f"with {scope}: {self.kind}.{shown}"
        outer = self.frames[-1] if self.frames else None
        may_stand = outer is None or (
            outer.row is outer.mode and any(may_nest(outer.mode, mode) for mode in modes_allowing(gate))
        )
        if outer is None or may_stand:
            return code
        return f"{code}  # after the block of {outer.spelling} has ended"

    def _why_not(self, needs: tuple[Component, ...]) -> str:
        """In words: what is missing, where it is; or only that the mode does not allow it."""
        placement = self.ask("placement")
        away = [need for need in needs if placement[need] is Tier.HOST]
        if not away:
            return f"is not legal in {self.mode} mode"
        return f"needs {', '.join(need.name for need in away)} on the device, but they are on the host"
