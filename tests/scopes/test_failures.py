"""A transition that fails: entry is undone, exit closes the scope and is made up for later. No byte is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rl_session as rs
from rl_session.testing import Fault, InjectedFault

SCOPES = ["training", "logprob", "refit", "generation", "offloaded"]
OPERATIONS = ["copy_out", "copy_in", "allocate", "free", "synchronize"]
POINTS = ["before", "half", "after"]
NEVER = 10**6


def count(rig: Any, operation: str, action: Callable[[], Any]) -> int:
    """How often ``action`` does ``operation``."""
    fault: Fault = rig.device.fail(operation, k=NEVER)
    action()
    rig.device.heal()
    return fault.seen


def places(num: int) -> list[int]:
    """First, middle and last of ``num``."""
    return sorted({1, (num + 1) // 2, num}) if num else []


def once(rig: Any, name: str) -> None:
    with rig.scope(name):
        pass


@pytest.mark.parametrize("base", ["offloaded", "resident"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", SCOPES)
def test_an_entry_that_fails_anywhere_is_as_if_it_had_not_been_tried(
    name: str, operation: str, base: str, make: Callable[..., Any]
) -> None:
    rig = make(base=base)
    scope = rig.scope(name)
    num = count(rig, operation, scope.__enter__)
    scope.__exit__(None, None, None)
    before = rig.state()
    for k in places(num):
        for point in POINTS:
            rig.device.fail(operation, k=k, point=point)
            with pytest.raises(rs.TransitionError) as caught, rig.scope(name):
                pytest.fail("the block ran")
            assert isinstance(caught.value.__cause__, InjectedFault)
            assert rig.state() == before
            assert rig.policy.health == "ok"
            assert [r.name for r in rig.records()[-2:]] == ["transition.started", "transition.rolled_back"]
            with rig.scope(name):  # retry
                assert rig.policy.mode == name
                assert rig.contents() == before[3]
            assert rig.state() == before


@pytest.mark.parametrize("base", ["offloaded", "resident"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", SCOPES)
def test_an_exit_that_fails_anywhere_closes_the_scope_and_is_made_up_for_by_the_next_entry(
    name: str, operation: str, base: str, make: Callable[..., Any]
) -> None:
    rig = make(base=base)
    before = rig.state()
    scope = rig.scope(name)
    scope.__enter__()
    num = count(rig, operation, lambda: scope.__exit__(None, None, None))
    for k in places(num):
        for point in POINTS:
            with pytest.raises(rs.TransitionError), rig.scope(name):
                inside = rig.seen()
                rig.device.fail(operation, k=k, point=point)
            after = rig.state()
            assert after[0] == before[0], "the outer mode is in effect"
            assert after[2] == inside, "the placement stays"
            assert after[3:] == before[3:], "no byte changed, nothing is open, nothing is owned"
            assert rig.policy.health == "ok"
            assert rig.records()[-1].event.error.startswith("TransitionError")
            with rig.policy.logprob_mode():
                assert rig.seen()["params"] == "device"
                assert rig.seen()["optimizer"] == before[2]["optimizer"]
            assert rig.state() == before


@pytest.mark.parametrize("name", SCOPES)
def test_the_error_of_the_body_wins_over_one_on_the_way_out(name: str, make: Callable[..., Any]) -> None:
    rig = make(base="resident" if name == "offloaded" else "offloaded")
    operation = "copy_in" if name == "offloaded" else "free"
    for kind in (ValueError, KeyboardInterrupt, SystemExit, GeneratorExit):
        error = kind("mine")
        with pytest.raises(kind) as caught:
            with rig.scope(name):
                rig.device.fail(operation)
                raise error
        assert caught.value is error
        assert "and while leaving" in error.__notes__[0]
        assert "injected" in error.__notes__[0]
        once(rig, "training")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_failure_that_is_no_exception_leaves_the_same_state(
    kind: type[BaseException], make: Callable[..., Any]
) -> None:
    rig = make()
    before = rig.state()
    rig.device.fail("copy_in", k=3, point="half", error=kind)
    with pytest.raises(kind), rig.policy.training_mode():
        pytest.fail("the block ran")
    assert rig.state() == before
    with pytest.raises(kind), rig.policy.training_mode():
        rig.device.fail("copy_out", k=3, point="half", error=kind)
    assert rig.policy.mode is rs.Mode.OFFLOADED
    assert rig.seen()["params"] == "device"
    once(rig, "logprob")
    assert rig.state() == before


def test_an_inner_entry_that_fails_leaves_the_outer_scope_at_work(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        inside = rig.state()
        rig.device.fail("copy_out", k=2)
        with pytest.raises(rs.TransitionError), rig.policy.refit_mode():
            pytest.fail("the block ran")
        assert rig.state() == inside
        rig.train()
        with rig.policy.refit_mode():
            assert rig.seen()["optimizer"] == "host"
        rig.train()


def test_an_inner_exit_that_fails_is_made_up_for_before_the_next_call(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        with pytest.raises(rs.TransitionError), rig.policy.refit_mode():
            rig.device.fail("copy_in")
        assert rig.policy.mode is rs.Mode.TRAINING
        assert rig.seen()["optimizer"] == "host"
        rig.train()
        assert rig.seen()["optimizer"] == "device"
        started = rig.records("transition.started")[-1].event
        assert started.reason == "pending release, before train()"
    assert rig.seen()["params"] == "host"


def test_while_a_release_fails_again_the_entry_fails_and_it_stays_pending(make: Callable[..., Any]) -> None:
    rig = make()
    with pytest.raises(rs.TransitionError), rig.policy.training_mode():
        rig.device.fail("copy_out")
    rig.device.fail("copy_out")
    with pytest.raises(rs.TransitionError), rig.policy.logprob_mode():
        pytest.fail("the block ran")
    assert rig.policy.mode is rs.Mode.OFFLOADED
    assert rig.policy._control.ownership._token is None
    once(rig, "logprob")
    assert rig.seen()["params"] == "host"
    with pytest.raises(rs.TransitionError), rig.policy.training_mode():
        rig.device.fail("copy_out")
    rig.policy.offload()
    assert rig.seen()["params"] == "host"


def test_what_a_failed_release_left_on_the_device_may_be_written_by_the_user(make: Callable[..., Any]) -> None:
    """Outside every scope a host copy proves nothing, also when the bytes should not be on the device any more."""
    rig = make(release="eager")
    with pytest.raises(rs.TransitionError), rig.policy.logprob_mode():
        rig.device.fail("free")
    rig.model.head.weight.data.fill_(7.0)  # no version counter notices
    once(rig, "training")
    assert bool((rig.policy.state_dict()["head.weight"] == 7.0).all())


def test_no_room_is_an_error_that_counts_bytes_and_leaves_the_outer_mode(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    rig.device.capacity = 100
    with pytest.raises(rs.DeviceMemoryError, match="needed: ") as caught, rig.policy.training_mode():
        pytest.fail("the block ran")
    assert isinstance(caught.value, MemoryError)
    assert rig.state() == before
    rig.device.capacity = None
    once(rig, "training")
    assert rig.state() == before


# -- two failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["training", "logprob", "refit", "generation"])
def test_when_undoing_an_exit_fails_the_policy_is_faulted_until_recovered(name: str, make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    with pytest.raises(rs.FaultedError) as caught, rig.scope(name):
        rig.device.fail("free", k=3)
        rig.device.fail("allocate", k=2)
    _assert_faulted_and_recoverable(rig, caught.value, before)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", ["training", "logprob", "refit", "generation"])
def test_when_undoing_an_entry_fails_the_policy_is_faulted_until_recovered(
    name: str, k: int, make: Callable[..., Any]
) -> None:
    rig = make()
    before = rig.state()
    rig.device.fail("copy_in", k=3, point="half")
    rig.device.fail("free", k=k)
    with pytest.raises(rs.FaultedError) as caught, rig.scope(name):
        pytest.fail("the block ran")
    _assert_faulted_and_recoverable(rig, caught.value, before)


def _assert_faulted_and_recoverable(rig: Any, error: rs.FaultedError, before: Any) -> None:
    policy = rig.policy
    assert policy.health == "faulted"
    assert policy._control.ownership._token is None
    assert error.remedy == "policy.recover()"
    calls: list[Callable[[], Any]] = [
        rig.train,
        policy.state_dict,
        policy.offload,
        policy.begin_step,
        lambda: policy.get_logprobs(rig.batch),
        lambda: policy.switch("resident"),
        lambda: policy.training_mode().__enter__(),
        lambda: policy.save_checkpoint("unused"),
        lambda: next(policy.iter_weights()),
    ]
    for call in calls:
        with pytest.raises(rs.FaultedError, match="on a faulted policy") as again:
            call()
        assert error.attempted in str(again.value), "the cause is named"
        assert "policy.recover()" in again.value.remedy
    assert policy._control.ownership._token is None
    policy.recover()
    assert policy.health == "ok"
    assert rig.state() == before
    with policy.training_mode():
        assert rig.seen()["params"] == "device"
        rig.train()
    names = [r.name for r in rig.records()]
    assert names.count("policy.faulted") == names.count("policy.recovered") == 1
    assert names.count("transition.failed") == 1


def test_a_fault_inside_nested_scopes_is_recovered_at_rest_and_the_late_exits_do_nothing(
    make: Callable[..., Any],
) -> None:
    rig = make()
    before = rig.state()
    with rig.policy.training_mode():
        rig.device.fail("free", k=2)
        rig.device.fail("allocate", k=1)
        with pytest.raises(rs.FaultedError), rig.policy.offloaded():
            pytest.fail("the block ran")
        assert rig.policy.health == "faulted"
        rig.policy.recover()
        assert rig.state()[:4] == before[:4]
    assert rig.state()[:4] == before[:4]
    assert rig.records()[-1].event.code == "scope_already_closed"
    once(rig, "training")


def test_a_recovery_that_fails_can_be_repeated(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    rig.device.fail("copy_in", k=3)
    rig.device.fail("free", k=2)
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pytest.fail("the block ran")
    rig.device.fail("copy_out")
    with pytest.raises(rs.TransitionError):
        rig.policy.recover()
    assert rig.policy.health == "faulted"
    rig.policy.recover()
    assert rig.policy.health == "ok"
    assert rig.policy.mode is rs.Mode.OFFLOADED
    once(rig, "training")
    assert rig.state() == before


def test_a_recovery_that_fails_on_its_way_home_is_made_up_for(make: Callable[..., Any]) -> None:
    rig = make(base="resident")
    before = rig.state()
    rig.device.fail("copy_out", k=3)
    rig.device.fail("synchronize", k=2)
    with pytest.raises(rs.FaultedError):
        rig.policy.offload()
    rig.device.fail("copy_in")
    with pytest.raises(rs.TransitionError):
        rig.policy.recover()
    assert rig.policy.health == "ok"
    once(rig, "training")
    assert rig.state() == before


def test_a_cache_hook_cannot_move_the_policy_in_the_middle_of_a_move(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    refused: list[BaseException] = []

    def hook(module: Any) -> None:
        try:
            rig.policy.switch("resident")
        except rs.ScopeError as error:
            refused.append(error)

    rig.policy.add_cache_hook(hook)
    once(rig, "training")
    assert "while a transition is running" in str(refused[0])
    assert rig.state() == before
