"""The public fault injector: every target fails at the point that was named, in the way that was named, and once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from rig import Net, adamw, make_batch

import rl_session as rs
from rl_session.offload.device import Point
from rl_session.testing import EmulatedDevice, FakeEngine, FakeWorkers, inject_fault

POINTS = get_args(Point)


@pytest.fixture
def session() -> Iterator[rs.Session]:
    with rs.Session(verify="checksum", timeout_seconds=5) as session:
        yield session


def attached(session: rs.Session) -> Any:
    model = Net()
    policy = session.attach(model, adamw(model), device=EmulatedDevice())
    policy.offload()
    return policy


def on_ranks(session: rs.Session) -> Any:
    policy = session.policy("ranks", model=Net, workers=FakeWorkers(2))  # type: ignore[arg-type]
    policy.offload()
    return policy


@pytest.mark.parametrize("make", [attached, on_ranks], ids=["in process", "on ranks"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    ("kind", "error"),
    [("exception", rs.TransitionError), ("out of memory", rs.DeviceMemoryError)],
    ids=["exception", "oom"],
)
def test_a_move_fails_where_it_was_told_and_can_be_tried_again(
    session: rs.Session, make: Any, point: Point, kind: Any, error: Any
) -> None:
    policy = make(session)
    before = policy.placement
    with inject_fault(policy, "copy_in", k=2, point=point, kind=kind) as fault:
        assert not fault.fired
        with pytest.raises(error, match="injected"), policy.logprob_mode():
            pytest.fail("entered")
        assert fault.fired
    assert policy.placement == before
    with policy.logprob_mode():
        assert policy.get_logprobs(make_batch())["logprobs"].isfinite().all()


@pytest.mark.parametrize("make", [attached, on_ranks], ids=["in process", "on ranks"])
def test_what_has_not_happened_by_the_end_of_the_block_is_taken_back(session: rs.Session, make: Any) -> None:
    policy = make(session)
    with inject_fault(policy, "copy_in", k=1000) as fault, policy.logprob_mode():
        pass
    assert not fault.fired
    with policy.logprob_mode():
        pass


def test_an_error_of_your_own_is_the_cause(session: rs.Session) -> None:
    policy = attached(session)
    mine = KeyError("mine")
    with inject_fault(policy.device, "allocate", error=mine), pytest.raises(rs.TransitionError) as raised:
        policy.switch("resident")
    assert raised.value.__cause__ is mine


def test_of_several_ranks_the_named_one_fails(session: rs.Session) -> None:
    policy = on_ranks(session)
    with inject_fault(policy, "copy_in", rank=1), pytest.raises(rs.TransitionError, match="rank 1") as raised:
        policy.switch("resident")
    assert "rank 1" in str(raised.value)
    assert policy.health == "ok"


@pytest.mark.parametrize(("kind", "said"), [("hang", "did not answer"), ("kill", "died in")])
def test_a_rank_that_hangs_or_dies_faults_the_policy(session: rs.Session, kind: Any, said: str) -> None:
    policy = on_ranks(session)
    with inject_fault(policy, "copy_in", k=2, point="half", kind=kind, rank=1) as fault:
        with pytest.raises(rs.FaultedError, match=said), policy.logprob_mode():
            pytest.fail("entered")
        assert fault.fired
    assert policy.health == "faulted"
    with pytest.raises(rs.FaultedError, match="on a faulted policy"):
        policy.offload()


def test_a_hang_in_this_process_ends_with_the_block(session: rs.Session) -> None:
    policy = attached(session)
    errors: list[Exception] = []

    def move() -> None:
        try:
            policy.switch("resident")
        except rs.TransitionError as error:
            errors.append(error)

    with inject_fault(policy, "copy_in", kind="hang") as fault:
        thread = threading.Thread(target=move)
        thread.start()
        while not fault.fired:
            thread.join(0.01)
            assert thread.is_alive()
        with pytest.raises(rs.OwnershipError):
            policy.switch("logprob")
    thread.join()
    assert "a hang that has ended" in str(errors[0])
    assert policy.mode is rs.Mode.OFFLOADED


@pytest.mark.parametrize("through", ["the engine", "its handle"])
@pytest.mark.parametrize("kind", ["exception", "refusal"])
def test_an_engine_fails_too(session: rs.Session, through: str, kind: Any) -> None:
    fake = FakeEngine(EmulatedDevice())
    handle = session.engine("fake", fake)
    target = fake if through == "the engine" else handle
    with inject_fault(target, "wake", kind=kind) as fault, pytest.raises(rs.EngineError), handle.awake():
        pytest.fail("awake")
    assert fault.fired
    with handle.awake():
        assert handle.state == "awake"


def test_what_cannot_fail_so_is_refused(session: rs.Session) -> None:
    policy = attached(session)
    ranks = on_ranks(session)
    for target, options in (
        (policy, {"kind": "kill"}),
        (policy, {"kind": "sulk"}),
        (policy, {"operation": "generate"}),
        (policy, {"point": "late"}),
        (ranks, {"rank": 2}),
        (ranks, {"kind": "refusal"}),
        (FakeEngine(), {"operation": "wake", "kind": "hang"}),
        (FakeEngine(), {"operation": "generate", "kind": "refusal"}),
        (torch.nn.Linear(1, 1), {}),
    ):
        with pytest.raises(rs.ConfigError), inject_fault(target, **{"operation": "copy_in", **options}):  # type: ignore[arg-type]
            pytest.fail("armed")
    with policy.logprob_mode(), ranks.logprob_mode():
        pass


@pytest.mark.parametrize("point", POINTS)
def test_an_allocation_that_failed_holds_nothing(point: Point) -> None:
    device = EmulatedDevice()
    with inject_fault(device, "allocate", point=point), pytest.raises(RuntimeError, match="injected") as raised:
        device.occupy(100)
    assert raised.value is not None, "the error is kept, and with it the frame that allocated"
    assert device.resident_bytes == 0


@pytest.mark.parametrize("point", POINTS)
def test_an_engine_whose_memory_would_not_be_freed_knows_what_it_has_left(session: rs.Session, point: Point) -> None:
    fake = FakeEngine(EmulatedDevice(), weights=64, kv_nbytes=32)
    before = fake.fingerprint
    handle = session.engine("fake", fake)
    with inject_fault(fake.device, "free", k=2, point=point), pytest.raises(rs.EngineError), handle.awake():  # type: ignore[arg-type]
        pass
    assert fake.device is not None
    assert fake.device.resident_bytes == fake.occupied
    handle.sleep()
    assert (fake.device.resident_bytes, fake.fingerprint) == (0, before)
