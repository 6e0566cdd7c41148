"""A policy in several hands: a lease that goes from one to the next, handles that know when they are out of date.

The other process is played by a second handle in this one, on the same scripted ranks; ``test_ray_handles.py`` has real ones.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_rig import Rig

import rl_session as rs
from rl_session.audit.check import check
from rl_session.testing import FakeWorkers
from rl_session_migrate import LegacyPolicy
from rl_session_migrate.shim import handle as shim_handle

MakeRig = Callable[..., Rig]


def other_handle(policy: rs.Policy) -> rs.Policy:
    found: rs.Policy = pickle.loads(pickle.dumps(policy))
    return found


@pytest.fixture
def rig(make: MakeRig) -> Rig:
    return make(FakeWorkers(2))


def test_a_handle_elsewhere_opens_scopes_and_trains(rig: Rig) -> None:
    other = other_handle(rig.policy)
    before = rig.policy.state_dict()
    with other.training_mode():
        other.train(rig.batch, rig.loss)
        assert rig.placements()[0]["optimizer"] == "device"
    assert rig.placements()[0]["optimizer"] == "host"
    after = rig.policy.state_dict()
    assert not torch.equal(before["head.weight"], after["head.weight"])
    with rig.policy.training_mode():
        rig.train()


def test_only_one_of_them_may_have_a_scope(rig: Rig) -> None:
    other = other_handle(rig.policy)
    with rig.policy.logprob_mode():
        with pytest.raises(rs.OwnershipError, match="driver: logprob_mode") as caught, other.training_mode():
            pass
        assert "acquire_timeout" in str(caught.value)
        assert rig.policy.mode == "logprob"
        rig.policy.get_logprobs(rig.batch)
    with other.logprob_mode():
        with pytest.raises(rs.OwnershipError, match="driver:"), rig.policy.training_mode():
            pass
    with rig.policy.training_mode():
        pass


def test_a_handle_waits_for_its_turn(rig: Rig) -> None:
    other = other_handle(rig.policy)
    entered = threading.Event()
    done: list[str] = []

    def work() -> None:
        entered.set()
        with other.training_mode(acquire_timeout=20):
            done.append("other")

    with rig.policy.logprob_mode():
        thread = threading.Thread(target=work)
        thread.start()
        entered.wait(20)
        done.append("first")
    thread.join(20)
    assert done == ["first", "other"]


def test_whoever_holds_the_lease_asks_nobody(rig: Rig) -> None:
    other = other_handle(rig.policy)
    with other.logprob_mode():
        rig.fake.calls.clear()
        with other.logprob_mode():
            pass
        assert rig.fake.calls == []


def test_before_it_is_pickled_a_policy_never_asks_for_its_lease(rig: Rig) -> None:
    rig.policy.switch("resident")
    rig.fake.calls.clear()
    for _ in range(3):
        with rig.policy.training_mode():
            pass
    assert {method for method, _ in rig.fake.calls} == {"transition"}
    rig.policy.switch("offloaded")


def test_a_shared_policy_asks_the_first_rank_only(rig: Rig) -> None:
    other_handle(rig.policy)
    with rig.policy.logprob_mode():
        pass
    rig.fake.calls.clear()
    with rig.policy.logprob_mode():
        pass
    asked = [(method, ranks) for method, ranks in rig.fake.calls if method != "transition"]
    assert asked == [("acquire", (0,)), ("view", (0,)), ("release", (0,))]


def test_a_call_that_reads_is_served_in_the_mode_in_effect(rig: Rig) -> None:
    other = other_handle(rig.policy)
    with rig.policy.logprob_mode():
        expected = rig.policy.get_logprobs(rig.batch)["logprobs"]
        assert torch.equal(other.get_logprobs(rig.batch)["logprobs"], expected)
    with pytest.raises(rs.ModeError, match="get_logprobs"):
        other.get_logprobs(rig.batch)


def test_a_handle_that_is_out_of_date_looks_once_and_goes_on(rig: Rig) -> None:
    other = other_handle(rig.policy)
    assert other.mode == "offloaded"
    with rig.policy.logprob_mode():
        other.get_logprobs(rig.batch)
    with rig.policy.training_mode():
        rig.fake.calls.clear()
        other.get_logprobs(rig.batch)
        assert [method for method, _ in rig.fake.calls] == ["get_logprobs", "view", "get_logprobs"]
        assert other.mode == "training"
        rig.fake.calls.clear()
        other.get_logprobs(rig.batch)
        assert [method for method, _ in rig.fake.calls][-1] == "get_logprobs"
        assert "view" not in [method for method, _ in rig.fake.calls]


def test_a_call_that_changes_the_policy_needs_the_lease(rig: Rig) -> None:
    other = other_handle(rig.policy)
    with rig.policy.training_mode():
        with pytest.raises(rs.OwnershipError):
            other.train(rig.batch, rig.loss)
        rig.train()


def test_the_resting_mode_that_one_sets_is_the_resting_mode_of_all(rig: Rig) -> None:
    other = other_handle(rig.policy)
    other.switch("resident")
    assert (rig.policy.mode, rig.policy.resting_mode) == ("resident", "resident")
    with rig.policy.training_mode():
        rig.train()
    assert other.mode == "resident"
    rig.policy.switch("offloaded")
    assert other.mode == "offloaded"


def test_a_fault_of_one_is_known_to_all(rig: Rig) -> None:
    other = other_handle(rig.policy)
    rig.fake.script(1, "transition", "oom")
    rig.fake.script(0, "undo", "fail")
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    with pytest.raises(rs.FaultedError, match="faulted policy"), other.training_mode():
        pass
    rig.policy.recover()
    with other.training_mode():
        pass


def test_a_handle_that_is_gone_can_be_relieved(rig: Rig) -> None:
    other = other_handle(rig.policy)
    scope = other.training_mode()
    scope.__enter__()
    with pytest.raises(rs.OwnershipError, match="training_mode"), rig.policy.logprob_mode():
        pass
    rig.policy.recover()
    assert rig.policy.mode == "offloaded"
    assert rig.placements()[0]["params"] == "host"
    with rig.policy.training_mode():
        rig.train()
    with pytest.raises(rs.StaleHandleError, match="took the policy over"):
        scope.__exit__(None, None, None)
    with other.logprob_mode():  # and it may come back
        other.get_logprobs(rig.batch)


def test_a_call_by_who_lost_the_lease_is_refused(rig: Rig) -> None:
    other = other_handle(rig.policy)
    scope = other.training_mode()
    scope.__enter__()
    rig.policy.recover()
    with pytest.raises(rs.StaleHandleError):
        other.train(rig.batch, rig.loss)
    with pytest.raises(rs.StaleHandleError):
        scope.__exit__(None, None, None)


def test_closing_a_handle_leaves_the_policy(rig: Rig) -> None:
    other = other_handle(rig.policy)
    other.close()
    assert other.health == "closed"
    with pytest.raises(rs.ClosedError), other.training_mode():
        pass
    with rig.policy.training_mode():
        rig.train()


def test_closing_the_policy_is_known_to_its_handles(rig: Rig) -> None:
    other = other_handle(rig.policy)
    rig.policy.close()
    with pytest.raises(rs.RLSessionError), other.training_mode():
        pass


def test_a_policy_in_this_process_cannot_be_pickled() -> None:
    model = torch.nn.Linear(2, 2)
    policy = rs.attach(model)
    with pytest.raises(rs.UnsupportedError, match="RayWorkers"):
        pickle.dumps(policy)
    policy.close()


def test_the_log_of_all_handles_is_one_log(rig: Rig) -> None:
    other = other_handle(rig.policy)
    with other.training_mode():
        other.train(rig.batch, rig.loss)
    with rig.policy.logprob_mode():
        other.get_logprobs(rig.batch)
    rig.session.close()
    found = check(rig.path)
    assert not found.findings, found.findings
    sources = {record.source for record in rig.records()}
    (theirs,) = [source for source in sources if source.startswith("driver:")]
    own = [record for record in rig.records() if record.source == theirs]
    assert [record.seq for record in own] == list(range(len(own)))
    assert {"scope.entered", "transition.committed", "call.finished"} <= {record.name for record in own}


def test_numbers_of_scopes_and_transitions_are_those_of_one_handle(rig: Rig) -> None:
    other = other_handle(rig.policy)
    with other.logprob_mode():
        pass
    with rig.policy.logprob_mode():
        pass
    started: list[Any] = rig.records("transition.started")
    numbers = [record.transition_id for record in started]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("method", ["acquire", "view"])
def test_the_loss_of_the_rank_that_grants_faults_a_shared_policy(rig: Rig, method: str) -> None:
    other = other_handle(rig.policy)
    with other.logprob_mode():
        pass
    expected = rig.policy.state_dict()
    rig.fake.script(0, method, "lost")
    if method == "view":
        assert rig.policy.health == "faulted"
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    assert [record.event.rank for record in rig.records("worker.lost")] == [0]
    rig.policy.recover()
    assert (rig.policy.health, rig.policy.mode) == ("ok", "offloaded")
    assert all(torch.equal(value, expected[name]) for name, value in rig.policy.state_dict().items())
    with rig.policy.training_mode():
        rig.train()


# -- legacy handles: a lifecycle call has no place inside a scope, wherever that is open --------------------------------


@pytest.fixture
def legacy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> LegacyPolicy:
    """The handle of another process, of a loop that still makes legacy calls; it gives up at the second refusal."""
    monkeypatch.setattr(shim_handle, "_PATIENCE_SECONDS", 0.0)
    return LegacyPolicy(other_handle(rig.policy))


@pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")
def test_a_legacy_call_is_refused_at_once_while_another_process_has_a_scope_open(
    rig: Rig, legacy: LegacyPolicy
) -> None:
    with rig.policy.training_mode(), rig.policy.logprob_mode():
        with pytest.raises(
            rs.ShimInScopeError, match=r"offload_after_refit\(\).*inside training_mode\(\) at .*"
        ) as caught:
            legacy.offload_after_refit()
        assert "in another process" in caught.value.attempted
        assert "after the block of training_mode()" in caught.value.remedy
        assert rig.placements()[0]["params"] == "device"
        expected = rig.policy.get_logprobs(rig.batch)["logprobs"]
        assert torch.equal(legacy.get_logprobs(rig.batch)["logprobs"], expected), "what only reads is served"
    legacy.prepare_for_lp_inference()
    assert rig.placements()[0]["params"] == "device"
    legacy.offload_after_refit()
    assert rig.placements()[0]["params"] == "host"


@pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")
def test_a_scope_that_was_open_before_others_could_reach_the_policy_is_known_to_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim_handle, "_PATIENCE_SECONDS", 0.0)
    with rig.policy.logprob_mode():
        late = LegacyPolicy(other_handle(rig.policy))
        with pytest.raises(rs.ShimInScopeError, match="logprob_mode"):
            late.prepare_for_training()
    late.prepare_for_training()
    late.offload_after_refit()


@pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")
def test_a_legacy_call_waits_for_an_open_step_and_is_refused_only_while_its_owner_is_in_a_scope(
    rig: Rig, legacy: LegacyPolicy
) -> None:
    with rig.policy.training_mode():
        step = rig.policy.begin_step()
        step.forward_backward(rig.batch, rig.loss)
    with pytest.raises(rs.OwnershipError, match="another process owns the policy"):
        legacy.prepare_for_training()
    with rig.policy.training_mode():
        with pytest.raises(rs.ShimInScopeError, match="training_mode"):
            legacy.prepare_for_training()
        step.commit()
    legacy.prepare_for_training()
    legacy.offload_after_refit()
