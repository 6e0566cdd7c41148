"""A policy handed to other processes on a real cluster: actors that train it, wait for it, and die with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_rig import Learner, Rig, Tiny, make_batch, make_optimizer, nll

import rl_session as rs
from rl_session.audit.check import check
from rl_session.testing import EmulatedDevice
from rl_session_migrate import LegacyPolicy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rig(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    path = tmp_path_factory.mktemp("handles") / "run.jsonl"
    session = rs.Session(path, verify="checksum")
    workers = rs.RayWorkers(2, resources={"CPU": 0.5}, timeout_seconds=60, parallelize=None)
    policy = session.policy("actor", model=Tiny, optimizer=make_optimizer, workers=workers, device=EmulatedDevice())
    with policy.training_mode():
        policy.train(make_batch(), nll)
    yield Rig(session, policy, path)
    session.close()
    assert not check(path).findings


@pytest.fixture
def learner(rig: Rig, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An actor with a handle; a recovery that starts the ranks anew leaves older handles behind."""
    import ray

    actor = ray.remote(num_cpus=0)(Learner).options(name=request.node.name).remote(rig.policy)
    yield actor
    ray.kill(actor)


def test_an_actor_trains_the_policy_and_the_driver_goes_on(
    rig: Rig, learner: Any, request: pytest.FixtureRequest
) -> None:
    import ray

    before = rig.policy.state_dict()["head.weight"]
    result = ray.get(learner.learn.remote())
    assert result["loss"].isfinite().all()
    assert not torch.equal(rig.policy.state_dict()["head.weight"], before)
    with rig.policy.training_mode():
        rig.train()
    sources = {record.source for record in rig.records("scope.entered")}
    assert {"driver", f"driver:{request.node.name}"} <= sources


def test_an_actor_is_refused_or_waits_while_the_driver_is_at_work(rig: Rig, learner: Any) -> None:
    import ray

    with rig.policy.logprob_mode():
        with pytest.raises(rs.OwnershipError, match="driver: logprob_mode"):
            ray.get(learner.learn.remote())
        expected = rig.policy.get_logprobs(rig.batch)["logprobs"]
        assert torch.equal(ray.get(learner.logprobs.remote()), expected)
        waiting = learner.learn.remote(60.0)
        assert ray.wait([waiting], timeout=0.3)[0] == []
    assert ray.get(waiting)["loss"].isfinite().all()


def test_an_actor_knows_the_mode_without_being_told(rig: Rig, learner: Any) -> None:
    import ray

    with rig.policy.training_mode():
        assert ray.get(learner.mode.remote()) == "training"
        with rig.policy.logprob_mode():
            assert ray.get(learner.mode.remote()) == "logprob"
    assert ray.get(learner.mode.remote()) == "offloaded"


def test_two_actors_that_race_for_a_policy_take_turns_or_are_told(rig: Rig, learner: Any) -> None:
    import ray

    actors = [learner, ray.remote(num_cpus=0)(Learner).options(name="racer").remote(rig.policy)]
    start = len(rig.records())
    waiting = ray.get([actor.learn.remote(30.0) for actor in actors for _ in range(3)])
    assert all(result["loss"].isfinite().all() for result in waiting)
    outcomes: list[str] = []
    for _ in range(3):
        refs = [actor.learn.remote() for actor in actors]
        for ref in refs:
            try:
                ray.get(ref)
                outcomes.append("won")
            except rs.OwnershipError as error:
                assert "owner: driver:" in error.facts[0]
                outcomes.append("told")
    assert outcomes.count("won") >= 3
    ray.kill(actors[1])
    records = [r for r in rig.records()[start:] if r.name in ("scope.entered", "scope.exited")]
    by_time = [r.name for r in sorted(records, key=lambda r: r.mono_ns)]
    assert by_time == ["scope.entered", "scope.exited"] * (len(by_time) // 2), "two were inside at once"
    assert len(by_time) == 2 * (6 + outcomes.count("won"))


def test_a_policy_left_by_an_actor_that_died_can_be_taken_over(rig: Rig) -> None:
    import ray

    other = ray.remote(num_cpus=0)(Learner).remote(rig.policy)
    pid = ray.get(other.enter_and_stay.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(rs.OwnershipError, match="training_mode"), rig.policy.training_mode():
        pass
    rig.policy.recover()
    assert rig.policy.mode == "offloaded"
    with rig.policy.training_mode():
        rig.train()


def test_a_rank_dies_while_an_actor_trains(rig: Rig, learner: Any) -> None:
    import ray

    os.kill(ray.get(rig.group.actors[1].pid.remote()), signal.SIGKILL)
    with pytest.raises(rs.FaultedError, match="rank 1: lost"):
        ray.get(learner.learn.remote())
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    rig.policy.recover()
    with rig.policy.training_mode():
        rig.train()


def test_a_handle_from_before_a_recovery_says_what_to_do(rig: Rig, learner: Any) -> None:
    import ray

    ray.get(learner.learn.remote())
    os.kill(ray.get(rig.group.actors[0].pid.remote()), signal.SIGKILL)
    with pytest.raises(rs.RLSessionError), rig.policy.training_mode():
        pass
    rig.policy.recover()
    with pytest.raises(rs.RLSessionError, match="pickle it again"):
        ray.get(learner.learn.remote())
    with rig.policy.training_mode():
        rig.train()


@pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")
def test_a_legacy_handle_goes_to_an_actor_and_both_know_what_the_other_called(rig: Rig) -> None:
    import ray

    class Half:
        """One half of a legacy loop."""

        def __init__(self, legacy: LegacyPolicy) -> None:
            self.legacy = legacy

        def call(self, name: str, *arguments: Any) -> Any:
            return getattr(self.legacy, name)(*arguments)

    legacy = LegacyPolicy(rig.policy, backend="megatron")
    other = ray.remote(num_cpus=0)(Half).remote(legacy)
    call = lambda *arguments: ray.get(other.call.remote(*arguments))  # noqa: E731 (a verb for this test)
    batch, placement = make_batch(), lambda: dict(legacy.placement)
    try:
        legacy.prepare_for_training()
        legacy.prepare_for_lp_inference()
        expected = legacy.get_logprobs(batch)["logprobs"]
        assert torch.equal(call("get_logprobs", batch)["logprobs"], expected)
        with pytest.raises(rs.ModeError, match="needs GRADS"):  # freed by a call in another process
            call("train", batch, nll)
        call("prepare_for_training")
        assert (legacy.mode, placement()["optimizer"]) == ("training", rs.Tier.DEVICE)
        assert legacy.train(batch, nll)["loss"].isfinite().all()
        call("finish_inference")
        assert (placement()["params"], placement()["optimizer"]) == (rs.Tier.HOST, rs.Tier.DEVICE)
        with pytest.raises(rs.ModeError, match="needs PARAMS"):
            legacy.get_logprobs(batch)
        with rig.policy.training_mode():
            rig.train()
        assert placement()["params"] is rs.Tier.HOST, "the scope comes back to where the other process left it"
    finally:
        ray.kill(other)
        legacy.offload_to_cpu()
        rig.policy.switch("offloaded")
