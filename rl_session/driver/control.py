"""The driver's side of one policy, whole: its resting mode, its recovery and its end, over the layers below.

The layers are :mod:`~rl_session.driver.core`, :mod:`~rl_session.driver.sharing`, :mod:`~rl_session.driver.transitions`,
:mod:`~rl_session.driver.scopes` and :mod:`~rl_session.driver.calls`. Knows nothing of tensors.
"""

from __future__ import annotations

from contextlib import suppress

import attrs

from rl_session.audit import events
from rl_session.driver.beside import refuse_beside_engine
from rl_session.driver.calls import Calls
from rl_session.driver.callsite import Speaker, speaker
from rl_session.driver.frames import Companion, Frame
from rl_session.errors import RLSessionError, ScopeError
from rl_session.lifecycle import Cells, Component, Mode, Placement, Tier
from rl_session.workers.replies import TransitionReply

__all__ = ["Companion", "Control", "Frame"]


class Control(Calls):
    """The driver's side of one policy; built as :class:`~rl_session.driver.core.Core` is."""

    def switch(
        self, mode: Mode, spelling: str, call_site: str, *, evict: bool = False, cells: Cells | None = None
    ) -> TransitionReply | None:
        """Change the resting mode.

        Args:
            mode: The mode to rest in.
            spelling: How the user wrote it.
            call_site: Where.
            evict: Whether bytes leave under a lazy release too.
            cells: What to ask of each component instead of the mode's row, now and whenever scopes end.

        Returns:
            What the transition did; None when nothing was to do.

        Raises:
            ScopeError: A scope is open.
            OwnershipError: Another owner is at work.
            RLSessionError: The transition failed and was rolled back; the resting mode stands.
        """
        held = self.ownership.token
        token = self.acquire(spelling, call_site)
        try:
            with self.changing():
                self.ready(spelling)
                self._check_outside(spelling, call_site)
                refuse_beside_engine(self, mode, spelling, call_site)
                same = mode is self.mode is self.resting_mode and cells is None is self.resting_cells
                if same and not self._pending_release and not evict:
                    return None
                lazy = evict and self.flags.release == "lazy"
                flags = attrs.evolve(self.flags, release="eager") if lazy else self.flags
                reason = f"{spelling} at {call_site}"
                said = speaker() or Speaker("switch", call_site)
                reply = self._transition(mode, reason, scope_id=None, cells=cells, flags=flags, rests=True, said=said)
                self.resting, self.resting_mode, self.resting_cells = reply.placement, mode, cells
                return reply
        finally:
            if token is not held:  # else whoever took it before has more to do
                self.let_go(token)

    def _check_outside(self, spelling: str, call_site: str) -> None:
        if self.frames or self._calls:
            inside = self.frames[-1].describe() if self.frames else "a running compute call"
            raise ScopeError(
                f"{self.label}: {spelling} at {call_site} inside {inside}",
                self.explain()[1],
                "with policy.offloaded(): ...  # or call it outside every scope",
            )

    def take_over(self) -> None:
        """Take the lease from a process that is gone with a scope open, and go to the resting mode.

        Raises:
            RLSessionError: The transition failed and was rolled back.
        """
        lease = self.lease
        if lease is None or lease.is_held:
            return
        with self.changing():
            seen = lease.view()
            if seen["is_free"]:
                return
            self.adopt(lease.take("recover()", force=True).state)
            self.mode = self.row = seen["mode"] or self.mode
            placement, nbytes = self.ask("placement"), self.ask("sizes")
            origin = f"what {seen['held_by']} left"
            self._record(events.PolicyRecovered(origin=origin, placement=placement.as_text(), nbytes=nbytes))
            try:
                self._go_outside(self.resting_mode, "recover()", None)
            finally:
                self._release()

    def recover(self, path: str | None = None) -> str:
        """Close open scopes, leave the faulted state and go to the resting mode; returns what it was restored from.

        Raises:
            FaultedError: There is nothing to restore from.
            CheckpointError: The checkpoint cannot be loaded.
        """
        with self.changing():
            self._take_lease_by_force("recover()")
            self.end_step("recover()")
            origin = self.ranks.recover(path, self.run.log_path)
            if self.lease is not None and self.ranks.is_new:
                self.lease.begin_anew()
            self.fault = None
            self._drop_frames("recovered")
            placement, nbytes = self.ask("placement"), self.ask("sizes")
            # All of it is on the host now: what came into being since the resting placement was noted was on the device.
            self.resting = Placement({n: t if t is not Tier.NONE else Tier.DEVICE for n, t in self.resting.items()})
            self._record(events.PolicyRecovered(origin=origin, placement=placement.as_text(), nbytes=nbytes))
            try:
                self._transition(
                    self.resting_mode,
                    "recover()",
                    scope_id=None,
                    stored=self.resting,
                    cells=self.resting_cells,
                    rests=True,
                )
            except BaseException:
                self._pending_release = True  # no scope ended: the mode stands until what comes next makes up for it
                raise
            finally:
                self._release()
            return origin

    def _close_handle(self, how: str) -> None:
        """End what this process has open; the policy is another's, and goes on."""
        while self.frames:
            self._try_close(self.frames[-1], how)
        self._release()
        self.group.close()
        self.closed = how

    def close(self, how: str) -> None:
        """Close open scopes, give the model back whole, and refuse everything from now on. Idempotent."""
        with self.changing():
            if self.closed:
                return
            if self.lease is not None and self.lease.handle != 0:
                self._close_handle(how)
                return
            self._drop_frames(how)
            self.end_step(how)
            if self.fault is None and not self._is_built:
                with suppress(RLSessionError):  # without room on the device, detach re-homes on the host
                    up = Placement(dict.fromkeys(map(str, Component), Tier.DEVICE))
                    self._transition(Mode.RESIDENT, how, scope_id=None, explicit=up, rests=True)
            if not self._is_built:
                self.ranks.ask("detach")
            self.ranks.fetch_records(self.run.log_path)
            self.group.close()
            self.closed = how
            self._record(events.PolicyClosed(reason=how))
