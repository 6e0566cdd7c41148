"""Whatever an engine does wrong, where both sides are is known, the first error is on top, and trying again works."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_rig import ONE, Model, Rig, prompts

import rl_session as rs
from rl_session.testing import FakeEngine, InjectedFault

Make = Callable[..., Rig]
ERRORS: dict[str, Any] = {"raises": InjectedFault, "false": False, "interrupt": KeyboardInterrupt}


def step(rig: Rig) -> None:
    """One refit and one rollout; what is served is what the policy has."""
    rig.policy.refit(rig.engine)
    with rig.policy.generation_mode(rig.engine) as policy:
        found = policy.generate(prompts())
    assert int(found["fingerprint"][0]) == rig.weights_crc()
    assert not torch.isnan(found["logprobs"]).any()


def assert_settled(rig: Rig) -> None:
    """Nobody is in a scope or owns anything, and the bytes are counted: as there, until a sleep that failed is made up for."""
    assert rig.policy.mode is rig.policy.resting_mode
    assert (rig.policy.health, rig.engine.health) == ("ok", "ok")
    for control in (rig.policy._control, rig.engine._control):
        assert control.frames == []
        assert control.ownership._token is None
    in_use = rig.session.memory()["devices"][0]["in_use"]
    assert in_use >= rig.device.resident_bytes if rig.engine._control.pending else in_use == rig.device.resident_bytes
    assert rig.device.peak <= 4 * ONE


MOVES = [("wake", 1), ("wake", 2), ("bucket", 1), ("bucket", 3), ("update_weights", 1), ("sleep", 1)]
FAILURES = [
    *(
        (operation, k, point, error)
        for operation, k in MOVES
        for point in ("before", "half", "after")
        for error in ERRORS
    ),
    ("generate", 1, "before", "raises"),  # it answers with a mapping, and not with False
    ("generate", 1, "before", "interrupt"),
]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("release", ["eager", "lazy"])
@pytest.mark.parametrize(("operation", "k", "point", "error"), FAILURES)
def test_after_any_failure_in_a_step_the_next_step_is_right(
    operation: Any, k: int, point: Any, error: str, release: str, level: int, make: Make
) -> None:
    rig = make(capacity=4 * ONE, release=release, sleep_level=level)
    rig.train()
    fault = rig.fake.fail(operation, k, point, ERRORS[error])
    expected: Any = KeyboardInterrupt if error == "interrupt" else rs.EngineError
    with pytest.raises(expected) as caught:
        rig.policy.refit(rig.engine, bucket_nbytes=1)
        with rig.policy.generation_mode(rig.engine) as policy:
            policy.generate(prompts())
        rig.engine.sleep() if release == "lazy" else None
        pytest.fail(f"nothing failed: {rig.fake.calls}")
    assert fault.fired
    if error == "raises":
        assert isinstance(caught.value.__cause__, InjectedFault)
        assert "InjectedFault: injected" in caught.value.cause
    assert_settled(rig)
    assert rig.policy.placement["params"] is not rs.Tier.DEVICE or release == "lazy"
    rig.train()
    step(rig)
    assert_settled(rig)


# -- waking ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["raises", "false", "interrupt"])
@pytest.mark.parametrize("point", ["before", "half", "after"])
def test_an_engine_that_does_not_wake_is_put_back_to_sleep_and_the_log_says_so(
    point: Any, error: str, make: Make
) -> None:
    rig = make()
    before = rig.fake.fingerprint
    rig.fake.fail("wake", 1, point, ERRORS[error])
    expected: Any = KeyboardInterrupt if error == "interrupt" else rs.EngineError
    with pytest.raises(expected), rig.policy.generation_mode():
        pytest.fail("entered")
    assert rig.fake.calls == ["wake weights kv_cache", "sleep 1"]
    assert (rig.engine.state, rig.engine_bytes, rig.fake.fingerprint) == ("asleep", 0, before)
    assert rig.warnings() == ["engine_wake_failed"]
    assert rig.told() == []
    exited = rig.records("scope.exited")[-1].event
    assert (exited.mode, exited.restored_mode) == ("generation", "offloaded")
    assert exited.error
    with rig.policy.generation_mode() as policy:
        policy.generate(prompts())


def test_the_second_tag_that_does_not_wake_sends_both_to_sleep(make: Make) -> None:
    rig = make(release="lazy")
    with rig.engine.awake(tags=["weights"]):
        rig.fake.fail("wake", 1, "before", error=False)
        with pytest.raises(rs.EngineError, match=r"wake\(\['kv_cache'\]\) returned False"), rig.engine.awake():
            pytest.fail("entered")
        assert rig.engine.state == "asleep"
        assert rig.told() == ["woken weights", "slept 1"]
        with rig.engine.awake():
            rig.engine.generate(prompts())


def test_an_engine_that_would_neither_wake_nor_sleep_is_faulted_until_it_recovers(make: Make) -> None:
    rig = make(capacity=4 * ONE)
    rig.fake.fail("wake", 1, "half")
    rig.fake.fail("sleep", 1, "before", OSError("no"))
    with pytest.raises(rs.EngineError) as caught, rig.policy.generation_mode():
        pytest.fail("entered")
    assert "and while putting engine 'vllm' back to sleep: no" in caught.value.__notes__
    assert rig.engine.health == "faulted"
    assert rig.policy.mode is rs.Mode.OFFLOADED
    for attempt in (rig.engine.awake, rig.policy.generation_mode):
        with pytest.raises(rs.FaultedError, match="it would neither wake nor sleep"), attempt():
            pytest.fail("entered")
    with pytest.raises(rs.FaultedError, match=r"engine\.recover\(\)"):
        rig.policy.refit(rig.engine)
    with pytest.raises(rs.DeviceMemoryError):  # what it holds is not known, so all of it counts
        rig.session.make_room(4 * ONE)
    rig.fake.fail("sleep", 1, error=False)
    with pytest.raises(rs.EngineError):
        rig.engine.recover()
    assert rig.engine.health == "faulted"
    rig.engine.recover()
    assert (rig.engine.health, rig.engine.state, rig.engine_bytes) == ("ok", "asleep", 0)
    with rig.engine.awake(), pytest.raises(rs.StaleWeightsError):
        rig.engine.generate(prompts())
    step(rig)
    assert rig.warnings() == ["engine_wake_failed", "engine_faulted", "engine_recovered"]
    rig.engine.recover()


# -- leaving --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["raises", "false"])
@pytest.mark.parametrize("point", ["before", "half", "after"])
def test_a_scope_closes_though_the_engine_does_not_sleep_and_the_next_entry_makes_up_for_it(
    point: Any, error: str, make: Make
) -> None:
    rig = make(capacity=4 * ONE)
    rig.fake.fail("sleep", 1, point, ERRORS[error])
    with pytest.raises(rs.EngineError, match="sleep"), rig.policy.generation_mode():
        pass
    assert rig.policy.mode is rs.Mode.OFFLOADED
    assert rig.warnings() == ["engine_sleep_failed"]
    assert "pending sleep: leaving generation_mode() at test_failures.py" in str(rig.engine._control.explain())
    rig.fake.fail("sleep", 1, "before", ERRORS[error])
    with pytest.raises(rs.EngineError), rig.policy.training_mode():
        pytest.fail("entered")
    assert rig.policy.mode is rs.Mode.OFFLOADED
    rig.train()
    assert (rig.engine.state, rig.engine_bytes) == ("asleep", 0)
    step(rig)


def test_an_error_of_the_block_stays_on_top_of_one_on_the_way_out(make: Make) -> None:
    rig = make()
    rig.fake.fail("sleep")
    with pytest.raises(ValueError, match="mine") as caught, rig.policy.generation_mode():
        raise ValueError("mine")
    assert any("sleep(1) failed" in note for note in caught.value.__notes__)
    rig.engine.sleep()
    rig.fake.fail("sleep")
    with pytest.raises(ValueError, match="mine") as caught, rig.engine.awake():
        raise ValueError("mine")
    assert any("while leaving awake(): [RLS308]" in note for note in caught.value.__notes__)


def test_an_engine_and_a_policy_that_both_fail_on_the_way_out_leave_two_errors_and_no_scope(make: Make) -> None:
    rig = make(base="resident")
    rig.fake.fail("sleep")
    rig.device.fail("copy_in")
    with pytest.raises(rs.EngineError) as caught, rig.policy.generation_mode():
        pass
    assert any("and then: [RLS" in note for note in caught.value.__notes__)
    assert rig.policy.mode is rs.Mode.RESIDENT
    rig.device.heal()
    with rig.policy.logprob_mode() as policy:
        policy.get_logprobs(prompts())
    assert rig.engine_bytes == 0


def test_a_pending_sleep_is_tried_again_by_make_room_and_by_the_engines_own_entry(make: Make) -> None:
    rig = make(capacity=4 * ONE)
    rig.fake.fail("sleep", 1, "half")
    with pytest.raises(rs.EngineError), rig.engine.awake():
        pass
    rig.session.make_room(4 * ONE)
    assert rig.engine_bytes == 0
    rig.fake.fail("sleep", 1, "half")
    with pytest.raises(rs.EngineError), rig.engine.awake():
        pass
    with rig.engine.awake():  # half asleep: it sleeps first, or generate would touch what is gone
        rig.engine.generate(prompts())
    rig.fake.fail("sleep", 1, "after", error=False)
    with pytest.raises(rs.EngineError), rig.engine.awake():
        pass
    with rig.engine.awake():  # it said False and sleeps all the same
        rig.engine.generate(prompts())
    rig.fake.begin_requests()
    rig.engine._control.drain._timeout = 0
    with pytest.raises(rs.EngineError, match="in flight"), rig.engine.awake():
        pass
    calls = len(rig.fake.calls)
    with rig.engine.awake():  # it was never asked, and is as awake as it was
        rig.engine.generate(prompts())
        rig.fake.finish_requests()
    assert rig.fake.calls[calls:] == ["generate", "sleep 1"]


def test_an_eviction_that_fails_fails_the_entry_that_wanted_the_room(make: Make) -> None:
    rig = make(capacity=4 * ONE, release="lazy")
    with rig.engine.awake():
        pass
    rig.fake.fail("sleep", 1, "before")
    with pytest.raises(rs.EngineError, match=r"evicted for policy 'actor': entering training_mode\(\)"):
        rig.train()
    assert rig.policy.mode is rs.Mode.OFFLOADED
    rig.train()


# -- serving --------------------------------------------------------------------------------------------------------------


def test_a_call_that_fails_leaves_the_engine_awake(make: Make) -> None:
    rig = make()
    with rig.engine.awake():
        rig.fake.fail("generate", error=OSError("the network"))
        with pytest.raises(rs.EngineError, match="generate\\(\\) failed") as caught:
            rig.engine.generate(prompts())
        assert caught.value.cause == "OSError: the network"
        assert rig.engine.in_flight == 0
        rig.fake.fail("generate", error=rs.BatchError("mine"))
        with pytest.raises(rs.BatchError, match="mine"):
            rig.engine.generate(prompts())
        rig.engine.generate(prompts())
    errors = [r.event.error for r in rig.records("call.finished")]
    assert [bool(error) for error in errors] == [True, True, False]


def test_an_engine_that_calls_back_into_the_session_gets_an_error(make: Make) -> None:
    rig = make()
    wake = rig.fake.wake

    def meddling(tags: Any) -> Any:
        wake(tags)
        rig.engine.sleep()

    rig.fake.wake = meddling  # type: ignore[method-assign]
    with pytest.raises(rs.ScopeError, match=r"sleep\(\) while wake\(\) is running"), rig.engine.awake():
        pytest.fail("entered")
    rig.fake.wake = wake  # type: ignore[method-assign]
    assert rig.engine.state == "asleep"
    with rig.engine.awake():
        rig.engine.generate(prompts())


def test_an_engine_that_is_gone_is_named_by_every_error_and_kept_from_nobody(make: Make) -> None:
    rig = make(capacity=4 * ONE)

    class Gone(FakeEngine):
        @property
        def in_flight(self) -> int:
            raise ConnectionError("the engine's process is gone")

        def wait_for_idle(self, timeout_seconds: float) -> bool:
            raise ConnectionError("the engine's process is gone")

        sleep = wake = generate = update_weights = wait_for_idle  # type: ignore[assignment]

        def bytes_needed(self, tags: Any) -> int:
            raise ConnectionError("the engine's process is gone")

    for name in ("entered", "refitted"):
        gone = rig.session.engine(name, Gone(rig.device), bytes_needed={"weights": ONE, "kv_cache": 0})
        with pytest.raises(rs.EngineError, match="wake") as caught:
            gone.awake().__enter__() if name == "entered" else rig.policy.refit(gone)
        assert caught.value.cause == "ConnectionError: the engine's process is gone"
        assert (gone.health, rig.policy.mode) == ("faulted", rs.Mode.OFFLOADED)
        with pytest.raises(rs.EngineError, match="in_flight cannot be read"):
            _ = gone.in_flight
        with pytest.raises(rs.EngineError):
            gone.recover()
        gone.close()
    silent = rig.session.engine("silent", Gone(rig.device))
    told = rig.session.memory()["engines"]["silent"]
    assert (told["asleep"], told["in_flight"]) == ({"weights": None, "kv_cache": None}, None)
    silent.close()
    step(rig)


def test_a_wait_that_fails_leaves_the_sleep_pending(make: Make) -> None:
    rig = make()

    def broken(timeout_seconds: float) -> bool:
        raise OSError("no answer")

    with pytest.raises(rs.EngineError, match="waiting for it failed") as caught:
        with rig.engine.awake():
            rig.fake.begin_requests()
            rig.fake.wait_for_idle = broken  # type: ignore[method-assign]
    assert caught.value.cause == "OSError: no answer"
    rig.fake.finish_requests()
    rig.train()
    assert rig.engine_bytes == 0


# -- closing in the middle ------------------------------------------------------------------------------------------------


def test_a_policy_that_is_closed_in_generation_lets_the_engine_go(make: Make) -> None:
    rig = make()
    scope = rig.policy.generation_mode()
    scope.__enter__()
    rig.policy.close()
    assert (rig.engine.state, rig.engine_bytes) == ("asleep", 0)
    scope.__exit__(None, None, None)
    other = rig.session.attach(Model(2), name="other", device=rig.device)
    other.offload()
    with other.generation_mode(rig.engine) as policy:
        policy.generate(prompts())


def test_a_policy_that_was_pushed_and_closed_is_let_go(make: Make) -> None:
    rig = make()
    model = Model(3)
    other = rig.session.attach(model, name="other", device=rig.device)
    other.offload()
    other.refit(rig.engine)
    other.close()
    weak = weakref.ref(model)
    del model, other
    gc.collect()
    assert weak() is None
