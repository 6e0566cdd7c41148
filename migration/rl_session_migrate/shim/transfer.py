"""Weights on their way, the legacy way: one side is told to send, the other to receive, and both are waited for together.

Whichever side is told second makes the push, in its own thread; the first has a future by then. Knows nothing of who sends what
where: the engine's own push does it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import attrs

from rl_session.driver.control import Control
from rl_session.driver.engine_control import EngineControl
from rl_session.driver.refit import refit
from rl_session.driver.run import Run
from rl_session.errors import ModeError
from rl_session.lifecycle import Component, Mode, may_call
from rl_session_migrate.shim.effects import AS_IT_IS

__all__ = ["Transfer", "push", "receive", "send"]

TIMEOUT_SECONDS = 120.0
"""How long one side waits for the other, as in legacy."""


class Transfer(Future[bool]):
    """What one side of a transfer waits for: True when the weights have arrived."""

    def result(self, timeout: float | None = None) -> bool:
        """Wait for the other side.

        Args:
            timeout: Seconds; 120 by default, as in legacy.

        Raises:
            TimeoutError: The other side was not told in time: tell both, then wait for both.
            RLSessionError: The push failed.
        """
        return super().result(TIMEOUT_SECONDS if timeout is None else timeout)


@attrs.define
class _Meeting:
    """What is waiting in one session."""

    senders: list[tuple[Callable[[EngineControl], None], Transfer]] = attrs.field(factory=list)
    receivers: list[tuple[EngineControl, Transfer]] = attrs.field(factory=list)


_meetings: weakref.WeakKeyDictionary[Run, _Meeting] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def send(control: Control, site: str, bucket_nbytes: int | None, turn: Callable[[], Any]) -> Transfer:
    """A policy sends its weights to the engine that is told to receive.

    Args:
        control: The policy.
        site: Where the user asked.
        bucket_nbytes: The most bytes in a bucket; None for what is free.
        turn: Makes a block in which this thread alone changes the policy.

    Raises:
        ModeError: The weights are away.
    """
    check_weights(control, "stream_weights_via_ipc_zmq()", site)

    def deliver(engine: EngineControl) -> None:
        with turn():
            push(control, engine, site, bucket_nbytes)

    mine = Transfer()
    with _lock:
        meeting = _meetings.setdefault(control.run, _Meeting())
        if not meeting.receivers:
            meeting.senders.append((deliver, mine))
            return mine
        engine, theirs = meeting.receivers.pop(0)
    _deliver(deliver, engine, mine, theirs)
    return mine


def receive(engine: EngineControl) -> Transfer:
    """An engine receives the weights of the policy that is told to send."""
    mine = Transfer()
    with _lock:
        meeting = _meetings.setdefault(engine.run, _Meeting())
        if not meeting.senders:
            meeting.receivers.append((engine, mine))
            return mine
        deliver, theirs = meeting.senders.pop(0)
    _deliver(deliver, engine, theirs, mine)
    return mine


def _deliver(deliver: Callable[[EngineControl], None], engine: EngineControl, *waiting: Transfer) -> None:
    """Make the push, and tell both sides how it went; the error belongs to those who wait, not to who is told second."""
    try:
        deliver(engine)
    except BaseException as error:
        for transfer in waiting:
            transfer.set_exception(error)
        if not isinstance(error, Exception):
            raise
        return
    for transfer in waiting:
        transfer.set_result(True)


def check_weights(control: Control, call: str, site: str) -> None:
    """Refuse to send what is away.

    Raises:
        ModeError: The message names the missing legacy call and the scope.
    """
    away = control.ask("away", (Component.PARAMS, Component.BUFFERS))
    if away:
        raise ModeError(
            f"{control.label}: {call} at {site} needs {', '.join(away).upper()} on the device, but they are away",
            (*control.explain()[1], "the legacy call that brings them in was not made: prepare_for_lp_inference()"),
            "policy.prepare_for_lp_inference()  # before; or, in scopes: with policy.refit_mode(): ..., or policy.refit(engine)",
        )


def push(control: Control, engine: EngineControl, site: str, bucket_nbytes: int | None) -> int:
    """Push the weights from where they are; nothing else moves. The caller has the policy's turn.

    Returns:
        The version that the engine has now.

    Raises:
        ModeError: The weights are away.
        EngineError, DeviceMemoryError: The engine failed, or there is no room for its weights.
    """
    check_weights(control, "a push", site)
    if may_call(control.mode, "iter_weights"):
        return refit(control, engine, site, bucket_nbytes=bucket_nbytes, in_place=True)
    rested, cells = control.resting_mode, control.resting_cells
    control.switch(Mode.REFIT, "a push of weights", site, cells=AS_IT_IS)  # legacy moved nothing here
    try:
        return refit(control, engine, site, bucket_nbytes=bucket_nbytes, in_place=True)
    finally:
        control.switch(rested, "a push of weights", site, cells=cells)
