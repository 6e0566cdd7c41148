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
