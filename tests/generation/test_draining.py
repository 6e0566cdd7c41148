"""A sleep waits for what is in flight, or refuses to; nothing spins, and no test waits for time to pass."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from engine_rig import ONE, Rig, prompts

import rl_session as rs
from rl_session.driver import drain

Make = Callable[..., Rig]


@pytest.fixture
def no_sleeping(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between polls are written down instead of made."""
    pauses: list[float] = []
    monkeypatch.setattr(drain.time, "sleep", pauses.append)
    return pauses


def unwaiting(rig: Rig) -> None:
    """An engine that offers no way to wait: it is polled."""
    rig.fake.wait_for_idle = None  # type: ignore[assignment, method-assign]


def test_an_exit_waits_until_nothing_is_in_flight(make: Make) -> None:
    rig = make()
    with rig.engine.awake():
        rig.fake.drain_in(3)
    assert rig.fake.in_flight == 0, "nobody would look at it any more"
    assert (rig.engine.state, rig.engine_bytes) == ("asleep", 0)


def test_an_engine_that_cannot_be_waited_for_is_polled_ever_more_rarely(make: Make, no_sleeping: list[float]) -> None:
    rig = make()
    unwaiting(rig)
    with rig.engine.awake():
        rig.fake.drain_in(12)
    assert rig.engine.state == "asleep"
    assert 5 <= len(no_sleeping) <= 12
    assert no_sleeping == sorted(no_sleeping)
    assert no_sleeping[0] > 0
    assert no_sleeping[-1] <= 0.25


def test_in_flight_may_be_a_method(make: Make, no_sleeping: list[float]) -> None:
    rig = make()
    counts = iter([2, 1, 0])

    class Counting(type(rig.fake)):  # type: ignore[misc]
        wait_for_idle = None

        def in_flight(self) -> int:  # type: ignore[override]
            return next(counts, 0)

    handle = rig.session.engine("counting", Counting(rig.device, weights=ONE))
    with handle.awake():
        pass
    assert handle.state == "asleep"
    assert len(no_sleeping) == 2


def test_a_wait_ends_after_its_time_and_the_sleep_stays_pending(make: Make, no_sleeping: list[float]) -> None:
    rig = make(capacity=4 * ONE, drain_timeout_seconds=1.5)
    unwaiting(rig)
    rig.fake.begin_requests(2)
    with pytest.raises(rs.EngineError, match=r"2 requests still in flight after 1\.5 s") as caught:
        with rig.policy.generation_mode():
            pass
    assert sum(no_sleeping) == pytest.approx(1.5)
    assert "drain_timeout_seconds" in caught.value.remedy
    assert (rig.policy.mode, rig.engine.state) == (rs.Mode.OFFLOADED, "awake")
    assert rig.warnings() == ["engine_busy"]
    with pytest.raises(rs.EngineError), rig.policy.logprob_mode():
        pytest.fail("entered beside requests in flight")
    assert rig.policy.mode is rs.Mode.OFFLOADED
    rig.fake.finish_requests()
    with rig.policy.logprob_mode():
        assert rig.engine_bytes == 0


def test_refusing_does_not_wait_at_all(make: Make, no_sleeping: list[float]) -> None:
    rig = make(on_busy="refuse")
    unwaiting(rig)
    rig.fake.begin_requests()
    with pytest.raises(rs.EngineError, match=r"1 requests in flight \(on_busy='refuse'\)"), rig.engine.awake():
        pass
    assert no_sleeping == []
    with rig.engine.awake():  # what is as awake as before is simply entered again
        rig.engine.generate(prompts())
        rig.fake.finish_requests()
    assert rig.engine.state == "asleep"


def test_the_time_is_the_sessions_unless_the_engine_has_its_own(make: Make) -> None:
    session = rs.Session(timeout_seconds=12)
    rig = make()
    for arguments, expected in (({}, 12), ({"drain_timeout_seconds": 3}, 3)):
        handle = session.engine(f"engine{expected}", type(rig.fake)(), **arguments)
        assert handle._control.drain._timeout == expected
    session.close()
    with pytest.raises(rs.ConfigError, match="timeout_seconds"):
        rs.Session(timeout_seconds=-1)


def test_a_scope_that_ends_while_another_thread_generates_waits_for_it(make: Make) -> None:
    rig = make()
    inside, go_on = threading.Event(), threading.Event()
    order: list[str] = []
    generate, sleep = rig.fake.generate, rig.fake.sleep

    def slow(batch: Any, **kwargs: Any) -> Any:
        inside.set()
        assert go_on.wait(20)
        result = generate(batch, **kwargs)
        order.append("generated")
        return result

    def slept(level: int) -> Any:
        order.append("slept")
        return sleep(level)

    rig.fake.generate, rig.fake.sleep = slow, slept  # type: ignore[method-assign, assignment]
    with rig.engine.awake():
        thread = threading.Thread(target=rig.engine.generate, args=(prompts(),))
        thread.start()
        assert inside.wait(20)
        assert rig.engine.in_flight == 1
        waiting = rig.engine._control.drain._changed.wait

        def then_go_on(timeout: float | None = None) -> bool:
            go_on.set()
            return waiting(timeout)

        rig.engine._control.drain._changed.wait = then_go_on  # type: ignore[method-assign]
    thread.join()
    assert order == ["generated", "slept"]


def test_a_push_waits_too(make: Make) -> None:
    rig = make(release="lazy", drain_timeout_seconds=0)
    with rig.engine.awake():
        rig.fake.begin_requests()
        with pytest.raises(rs.EngineError, match=r"update_weights\(\): 1 requests still in flight"):
            rig.policy.refit(rig.engine)
        assert rig.engine.version == 0
        rig.fake.finish_requests()
        rig.policy.refit(rig.engine)
        rig.engine.generate(prompts())


def test_ctrl_c_ends_a_wait_and_is_raised_when_everything_is_in_place(make: Make) -> None:
    rig = make()
    unwaiting(rig)
    rig.fake.begin_requests()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        with rig.policy.generation_mode():
            rig.fake.in_flight  # noqa: B018
            monkey_interrupt(rig)
    assert time.monotonic() - started < 60  # and not the ten minutes of the session
    assert rig.policy.mode is rs.Mode.OFFLOADED
    assert rig.engine._control.pending
    rig.fake.finish_requests()
    rig.train()
    assert rig.engine_bytes == 0


def monkey_interrupt(rig: Rig) -> None:
    """SIGINT arrives at the first look at what is in flight, inside the exit."""
    looks = iter([True])
    control = rig.engine._control
    wait = control.drain.wait

    def interrupted() -> str:
        if next(looks, False):
            os.kill(os.getpid(), signal.SIGINT)
        return wait()

    control.drain.wait = interrupted  # type: ignore[method-assign]
