"""What strikes from outside, in the middle of any device operation of any transition: signals, timeouts, cancellation.

A strike comes before the n-th storage that the device copies, allocates or frees, or before a synchronisation. Afterwards the
mode and the placement are those of one end of the transition, every byte is what it was, the same again succeeds, and the
suite's own fixture finds the log consistent.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from rig import Make, Net, Rig, adamw
from transitions import SCOPES, THOROUGH, Case, cases, ready

import rl_session as rs
from rl_session.audit.check import check
from rl_session.testing import EmulatedDevice, Fault

LIMIT = 30.0
"""Seconds after which a wait is given up; nothing is decided by it."""
CASES = list(cases())


class Struck(EmulatedDevice):
    """A device that calls ``strike`` in the middle of its n-th operation on a storage from now."""

    def __init__(self) -> None:
        super().__init__()
        self.strike: Callable[[], object] = lambda: None
        self.at = -1
        self.seen = 0

    def strike_at(self, at: int, strike: Callable[[], object]) -> None:
        self.at, self.strike, self.seen = at, strike, 0

    def disarm(self) -> bool:
        """Whether it struck."""
        struck, self.at = self.at < self.seen, -1
        return struck

    def _due(self, operation: Any) -> Fault | None:
        self.seen += 1
        if self.seen - 1 == self.at:
            self.strike()
        return super()._due(operation)

    def one_by_one(self) -> None:
        """Storages are copied one by one where a fault is armed; this one never fires."""
        for operation in ("copy_out", "copy_in"):
            self.fail(operation, k=10**9)  # type: ignore[arg-type]


def struck_rig(make: Make) -> Rig:
    rig = ready(make, device=Struck())
    rig.device.one_by_one()  # type: ignore[attr-defined]
    return rig


def points(offset: int) -> Iterator[int]:
    """Which operations are struck: all, or every third from one that differs by case; until one is never reached."""
    return itertools.count(0 if THOROUGH else offset % 3, 1 if THOROUGH else 3)


# -- signals -----------------------------------------------------------------------------------------------------------


class WatchdogError(TimeoutError):
    """What a watchdog's signal raises."""


def _watchdog(signum: int, frame: Any) -> None:
    raise WatchdogError


def _terminated(signum: int, frame: Any) -> None:
    raise SystemExit(143)


def _interrupt() -> None:
    raise KeyboardInterrupt


STRIKES: dict[str, tuple[Callable[[], object], type[BaseException] | tuple[type[BaseException], ...]]] = {
    "ctrl-c": (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
    "an interrupt that nothing defers": (_interrupt, KeyboardInterrupt),
    "the timeout of a watchdog": (lambda: signal.raise_signal(signal.SIGUSR1), rs.TransitionError),
    "SIGTERM with a handler": (lambda: signal.raise_signal(signal.SIGTERM), SystemExit),
}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    wanted = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGUSR1: _watchdog,
        signal.SIGTERM: _terminated,
    }
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) is wanted[number], "a handler was not put back"
        signal.signal(number, handler)


def assert_settled(rig: Rig, contents: list[bytes], modes: set[Any], frames: int) -> None:
    assert rig.policy.health == "ok"
    assert rig.policy.mode in modes
    assert len(rig.policy._control.frames) == frames
    assert rig.contents() == contents
    declared = {str(name): tier.value for name, tier in rig.policy.placement.items()}
    weights = [t.untyped_storage().nbytes() > 0 for t in (*rig.model.parameters(), *rig.model.buffers())]
    assert weights == [declared["params"] == "device"] * len(weights)
    moments = [t.untyped_storage().nbytes() > 0 for t in rig.optimizer_tensors()]
    assert moments == [declared["optimizer"] == "device"] * len(moments)


def way_in_struck(rig: Rig, case: Case, at: int, kind: str) -> bool:
    """Strike in one operation of a way in, look, and do it again; whether there was such an operation."""
    strike, raised = STRIKES[kind]
    device: Any = rig.device
    with ExitStack() as outer:
        case.prepare(rig, outer)
        frames, contents, modes = len(rig.policy._control.frames), rig.contents(), {rig.policy.mode}
        if case.name.startswith("switch") and kind == "ctrl-c":  # it is deferred: the switch is made
            modes = {rs.Mode(case.name.split()[-1])}
        with ExitStack() as inner:
            device.strike_at(at, strike)
            error: BaseException | None = None
            try:
                case.make(rig, inner)
            except BaseException as caught:
                error = caught
            if not device.disarm():
                assert error is None
                return False
            assert isinstance(error, raised), repr(error)
            assert_settled(rig, contents, modes, frames)
            case.make(rig, inner)
            assert rig.contents() == contents
    return True


@pytest.mark.parametrize("kind", STRIKES)
def test_a_strike_in_any_operation_of_a_way_in_ends_where_it_began(make: Make, kind: str) -> None:
    rig = struck_rig(make)
    num_struck = 0
    for number, case in enumerate(CASES):
        for at in points(number):
            if not way_in_struck(rig, case, at, kind):
                break
            num_struck += 1
    assert num_struck >= 50


def way_out_struck(rig: Rig, scope: str, at: int, kind: str) -> bool:
    """As :func:`way_in_struck`, of a way out to rest; what is pending afterwards is made up for."""
    strike, raised = STRIKES[kind]
    device: Any = rig.device
    placement, contents, rest = rig.policy.placement, rig.contents(), rig.policy.mode
    block = getattr(rig.policy, scope)()
    block.__enter__()
    device.strike_at(at, strike)
    error: BaseException | None = None
    try:
        block.__exit__(None, None, None)
    except BaseException as caught:
        error = caught
    was_struck = device.disarm()
    assert isinstance(error, raised) if was_struck else error is None, repr(error)
    assert_settled(rig, contents, {rest}, 0)
    with getattr(rig.policy, scope)():
        assert rig.contents() == contents
    assert rig.policy.placement == placement
    return was_struck


@pytest.mark.parametrize("kind", STRIKES)
def test_a_strike_in_any_operation_of_a_way_out_leaves_the_scope(make: Make, kind: str) -> None:
    rig = struck_rig(make)
    num_struck = 0
    for number, (scope, rest) in enumerate(itertools.product(SCOPES, ("offloaded", "resident"))):
        rig.policy.switch(rest)
        for at in points(number):
            if not way_out_struck(rig, scope, at, kind):
                break
            num_struck += 1
    assert num_struck >= 15


# -- tasks -------------------------------------------------------------------------------------------------------------


def delivered(loop: asyncio.AbstractEventLoop, act: Callable[[], object]) -> None:
    """From a thread that moves bytes: let the loop act, and go on once it has gone round a few times since."""
    seen = threading.Event()

    def rounds(left: int) -> None:
        loop.call_soon(rounds, left - 1) if left else seen.set()

    loop.call_soon_threadsafe(act)
    loop.call_soon_threadsafe(rounds, 5)
    assert seen.wait(LIMIT), "the event loop stands still"


async def enter_and_leave(rig: Rig, scope: str) -> None:
    async with getattr(rig.policy, scope)():
        pass


async def cancelled(rig: Rig, scope: str, at: int) -> bool:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(enter_and_leave(rig, scope))
    device: Any = rig.device
    device.strike_at(at, lambda: delivered(loop, task.cancel))
    await asyncio.wait([task])
    was_struck: bool = device.disarm()
    assert task.cancelled() == was_struck
    return was_struck


async def out_of_time(rig: Rig, scope: str, at: int) -> bool:
    loop = asyncio.get_running_loop()

    device: Any = rig.device
    is_late = False
    try:
        async with asyncio.timeout(None) as limit:
            device.strike_at(at, lambda: delivered(loop, lambda: limit.reschedule(loop.time())))
            await enter_and_leave(rig, scope)
    except TimeoutError:
        is_late = True
    assert is_late == device.disarm()
    return is_late


def end_in_every_operation(make: Make, rest: str, end: Callable[[Rig, str, int], Coroutine[Any, Any, bool]]) -> None:
    rig = struck_rig(make)
    rig.policy.switch(rest)
    placement, contents = rig.policy.placement, rig.contents()
    num_struck = 0
    for number, scope in enumerate(SCOPES):
        for at in points(number):
            was_struck = asyncio.run(end(rig, scope, at))
            assert_settled(rig, contents, {rs.Mode(rest)}, 0)
            assert rig.policy.placement == placement
            assert rig.policy._control.ownership.token is None
            if not was_struck:
                break
            num_struck += 1
        asyncio.run(enter_and_leave(rig, scope))
    assert num_struck >= 10


@pytest.mark.parametrize("rest", ["offloaded", "resident"])
def test_a_task_that_is_cancelled_in_any_operation_ends_where_it_began(make: Make, rest: str) -> None:
    end_in_every_operation(make, rest, cancelled)


@pytest.mark.parametrize("rest", ["offloaded", "resident"])
def test_a_timeout_that_runs_out_in_any_operation_ends_where_it_began(make: Make, rest: str) -> None:
    end_in_every_operation(make, rest, out_of_time)


# -- the end of the process --------------------------------------------------------------------------------------------


def die_in(path: Path, at: int) -> None:
    """In a forked process: SIGTERM, with nobody to handle it, in one operation of an entry."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    model, device = Net(), Struck()
    session = rs.Session(path, verify="checksum")
    policy = session.attach(model, adamw(model), device=device)
    policy.offload()
    device.one_by_one()
    device.strike_at(at, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with policy.training_mode():
        pass


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_process_that_is_terminated_in_a_move_leaves_every_record_it_wrote(tmp_path: Path, at: int) -> None:
    path = tmp_path / "run.jsonl"
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            die_in(path, at)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "it ended by itself"
    assert os.WTERMSIG(status) == signal.SIGTERM
    reader = rs.read_audit(path)
    records = list(reader)
    assert (reader.torn, reader.skipped) == (0, 0)
    assert [r.seq for r in records] == list(range(len(records)))
    assert records[-1].name == "transition.started", "the move that was under way is there, and has no end"
    assert [r.name for r in records].count("transition.committed") == 1
    result = check(path)
    assert result.is_consistent, result.findings
    assert "transition" in {left.kind for left in result.unfinished}, "and a reader is told that it is incomplete"
