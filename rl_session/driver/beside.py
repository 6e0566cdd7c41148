"""Policies and external engines on one device: who may be at work beside whom, and who makes room first.

A policy that needs the device and an engine that is in a scope of its own exclude each other. Knows nothing of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_session.driver.room import needs_device
from rl_session.errors import NestingError
from rl_session.lifecycle import Mode

if TYPE_CHECKING:
    from rl_session.driver.core import Core
    from rl_session.driver.engine_control import EngineControl

__all__ = ["quiet_engines", "refuse_beside_engine", "refuse_beside_policies"]


def _colocated(control: Core) -> Iterator[EngineControl]:
    """The engines on the policy's device, but for one that is being refitted from it."""
    for engine in control.run.engines:
        if engine.device is control.device and engine.refitting is not control:
            yield engine


def refuse_beside_engine(control: Core, row: Mode, spelling: str, call_site: str) -> None:
    """Refuse a scope, or a resting mode, of a policy that needs the device while a scope of an engine on it is open.

    Judged by the row of the mode table: that of an external engine's generation is OFFLOADED's.

    Raises:
        NestingError: The message names both scopes and where they were opened.
    """
    if not needs_device(row):
        return
    for engine in _colocated(control):
        scope = engine.occupant()
        if scope:
            raise NestingError(
                f"{control.label}: {spelling} at {call_site} beside {scope} of {engine.label}",
                (*control.explain()[1], f"{engine.label} and {control.label} share {control.device!r}"),
                f"policy.{spelling}  # after the block of {scope} has ended; inside it, only policy.offloaded()",
            )


def refuse_beside_policies(engine: EngineControl, spelling: str, call_site: str) -> None:
    """Refuse a scope of an engine while a policy is at work on its device.

    Raises:
        NestingError: The message names both scopes and where they were opened.
    """
    if engine.device is None:
        return
    for seat in engine.run.arbiter.seats_on(engine.device):
        scope = seat.occupant()
        if scope and seat not in engine.run.engines:
            raise NestingError(
                f"{engine.label}: {spelling} at {call_site} beside {scope} of {seat.label}",
                (*engine.explain()[1], f"{seat.label} and {engine.label} share {engine.device!r}"),
                f"with engine.{spelling}: ...  # after the block of {scope} has ended",
            )


def quiet_engines(control: Core, row: Mode, reason: str) -> None:
    """Put idle engines to sleep before a policy on their device goes where its weights are needed.

    Those that release eagerly, and those whose sleep is pending; what another thread is at work on, and what a legacy call woke,
    is left to the arbiter.

    Raises:
        EngineError: An engine would not sleep; the policy has not moved.
    """
    if not needs_device(row):
        return
    for engine in _colocated(control):
        if engine.lock.acquire(blocking=False):
            try:
                eager = engine.release == "eager" and not engine.rests
                if engine.is_idle and (eager or engine.pending):
                    engine.put_to_sleep(f"{control.label}: {reason}")
            finally:
                engine.lock.release()
