"""What of a policy travels to another process, and how it becomes a handle there.

A handle elsewhere has the ranks, the lease to ask for, and a log of its own beside the session's. It has no session: it
makes no room on shared devices, and ends with its process. Knows nothing of what users hold.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, cast

import attrs

from rl_session.audit import AuditLog, sibling_path
from rl_session.config import Verify
from rl_session.driver.control import Control
from rl_session.driver.lease import LeaseClient
from rl_session.driver.remote_device import RemoteDevice
from rl_session.driver.run import Run
from rl_session.errors import UnsupportedError
from rl_session.lifecycle import Release
from rl_session.offload.host_pool import HostPool
from rl_session.workers.group import SharedGroup
from rl_session.workers.lease import PolicyState
from rl_session.workers.replies import Description

__all__ = ["Passport"]

_IDS_PER_HANDLE = 1_000_000
"""Scopes and transitions of a handle are numbered from its own number times this: ranks join records by them."""

_logs: dict[tuple[str, str], AuditLog] = {}
"""Logs of this process by run and source: handles that come one after the other write one file."""


@attrs.define(slots=False, kw_only=True)
class Passport:
    """A policy on its way to another process.

    Attributes:
        name: Its name.
        kind: "policy" or "value".
        group: Its ranks.
        state: What is known of it.
        path: The session's log, or None.
        run_id: The run's.
        release: The session's.
        verify: The session's.
        capacity: Of the devices of its ranks.
        step: The session's step number.
    """

    name: str
    kind: str
    group: SharedGroup
    state: PolicyState
    path: str | None
    run_id: str
    release: Release
    verify: Verify
    capacity: int | None
    step: int | None

    @classmethod
    def of(cls, control: Control) -> Passport:
        """Of a policy whose ranks others can reach; from now on its lease is free between scopes.

        Raises:
            UnsupportedError: Its model is in this process.
        """
        if control.lease is None:
            raise UnsupportedError(
                f"{control.label}: it cannot be pickled or copied",
                ("its model is in this process",),
                "session.policy(name, model=make_model, workers=rs.RayWorkers(1)), which other processes can reach",
            )
        control.share()
        run = control.run
        return cls(
            name=control.name,
            kind=control.kind,
            group=cast("SharedGroup", control.group),
            state=control.state(),
            path=None if run.log_path is None else str(run.log_path),
            run_id=run.log.run_id,
            release=run.release,
            verify=run.verify,
            capacity=control.device.capacity,
            step=run.step,
        )

    def open(self) -> Control:
        """A handle's control, in this process.

        Raises:
            OwnershipError: The ranks cannot be reached.
        """
        source = f"driver:{self._own_name()}"
        lease = LeaseClient(self.group, source, handle=None)
        first = lease.number() * _IDS_PER_HANDLE + 1
        run = Run(self._log(source), HostPool(None, lambda _: None), release=self.release, verify=self.verify)
        run.log_path, run.step = self.path, self.step
        run.count_from(itertools.count(first), itertools.count(first))
        state = self.state
        found = Description(mode=state.mode, placement=state.resting, nbytes={}, notices=())
        device = RemoteDevice(self.capacity)
        control = Control(
            self.name,
            self.kind,
            self.group,
            run,
            state.flags,
            found,
            state.resting_mode,
            device,
            is_built=True,
            lease=lease,
        )
        control.adopt(state)
        return control

    def _own_name(self) -> str:
        """The actor, or the number of the process; with the number where another process had the name before."""
        name = self.group.whoami()
        known = (self.run_id, f"driver:{name}") in _logs
        is_taken = self.path is not None and sibling_path(self.path, f"driver:{name}").exists()
        return f"{name}.{os.getpid()}" if is_taken and not known else name

    def _log(self, source: str) -> AuditLog:
        key = (self.run_id, source)
        if key not in _logs:
            path = None if self.path is None else sibling_path(self.path, source)
            _logs[key] = AuditLog(path, run_id=self.run_id, source=source)
        return _logs[key]


def rebuild(kind: Any, passport: Passport) -> Any:
    """A handle of a policy that was pickled."""
    control = passport.open()
    return kind(control, control.device, lambda _: None)
