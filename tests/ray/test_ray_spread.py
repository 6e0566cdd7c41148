"""One model spread over Ray actors with FSDP2 or DDP: the numbers of one process, through the scopes of the session."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from rank_rig import Deep, forward_or_fail, make_batch, make_optimizer, nll
from torch import Tensor

import rl_session as rs
from rl_session.audit.check import check
from rl_session.testing import EmulatedDevice, FakeEngine, rank_device
from rl_session.workers import ray_group
from rl_session.workers.shares import Share

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 120.0


@attrs.define(eq=False)
class Spread:
    """Two policies of one session, each on two Ray actors that share bundles: one moves, one never does."""

    session: rs.Session
    moving: Any
    still: Any
    start: Path
    """A checkpoint of the first weights, with no optimizer state."""
    weights: dict[str, Tensor]

    def alone(self) -> Any:
        """The same model in this process, on one rank."""
        model = Deep()
        model.load_state_dict(self.weights)
        return rs.attach(model, make_optimizer(model.parameters()), reference="copy", max_grad_norm=0.1)

    def resident(self, policy: Any) -> list[int]:
        return [rank_device(policy, rank).resident_bytes for rank in range(2)]


@pytest.fixture(scope="module")
def shared(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    folder = tmp_path_factory.mktemp("spread")
    session = rs.Session(folder / "run.jsonl", verify="checksum")
    workers = rs.RayWorkers(2, resources={"CPU": 0.5}, timeout_seconds=TIMEOUT_SECONDS)
    beside = rs.RayWorkers(2, placement=workers, timeout_seconds=TIMEOUT_SECONDS)
    options: dict[str, Any] = {
        "model": Deep,
        "optimizer": make_optimizer,
        "device": EmulatedDevice(),
        "reference": "copy",
        "max_grad_norm": 0.1,
        "forward_fn": forward_or_fail,
    }
    moving = session.policy("moving", workers=workers, **options)
    still = session.policy("still", workers=beside, offload=rs.OffloadConfig(release="never"), **options)
    moving.offload()
    still.offload()
    moving.save_checkpoint(folder / "start")
    yield Spread(session, moving, still, folder / "start", moving.state_dict())
    session.close()
    assert not check(folder / "run.jsonl").findings


@pytest.fixture
def spread(shared: Spread) -> Spread:
    """Both at their first weights, at rest."""
    for policy in (shared.moving, shared.still):
        assert (policy.health, policy.mode) == ("ok", "offloaded")
        policy.load_checkpoint(shared.start)
    return shared


# -- the numbers -----------------------------------------------------------------------------------------------------


def _step(policy: Any, index: int) -> list[Tensor]:
    batch = make_batch(4 if index % 2 else 3)
    with policy.logprob_mode():
        found = [policy.get_logprobs(batch)["logprobs"]]
        found.append(policy.get_reference_policy_logprobs(batch)["reference_logprobs"])
    with policy.training_mode():
        if index % 4 == 3:
            with policy.begin_step() as step:
                step.forward_backward(make_batch(1), nll)
                step.forward_backward(batch, nll, mbs=1)
            return found
        result = policy.train(batch, nll, gbs=2 if index % 2 else None, mbs=1)
    return [*found, result["loss"], result["grad_norm"], torch.tensor(result["metrics"]["nll"])]


def _twenty_steps(policy: Any, folder: Path) -> list[list[Tensor]]:
    found = []
    for index in range(20):
        found.append(_step(policy, index))
        if index % 10 == 4:
            policy.save_checkpoint(folder)
        if index % 10 == 6:  # back by two steps, in whatever the optimizer had then
            policy.load_checkpoint(folder)
    found.append(list(policy.state_dict().values()))
    return found


def test_twenty_scoped_steps_are_those_of_ranks_that_never_move_and_of_one_rank(spread: Spread, tmp_path: Path) -> None:
    before = [sum(rank_device(spread.moving, rank).bytes_in for rank in range(2))]
    ours = _twenty_steps(spread.moving, tmp_path / "ours")
    assert rank_device(spread.moving, 1).bytes_in + rank_device(spread.moving, 0).bytes_in > before[0]
    assert spread.resident(spread.moving) == [0, 0]
    theirs = _twenty_steps(spread.still, tmp_path / "theirs")
    assert all(spread.resident(spread.still))
    alone = spread.alone()
    single = _twenty_steps(alone, tmp_path / "single")
    alone.close()
    for index, (left, right, one) in enumerate(zip(ours, theirs, single, strict=True)):
        assert len(left) == len(right) == len(one)
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True)), f"step {index}"
        assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(left, one, strict=True)), f"step {index}"


def test_each_rank_is_sent_its_own_rows_and_results_come_back_in_order(
    spread: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, sent = spread.moving._control.group, []

    def call_each(firsts: list[Share], method: str, *args: Any, **kwargs: Any) -> Any:
        sent.append([share.num_rows for share in firsts])
        assert all(len(share.batch["input_ids"]) == max(1, share.num_rows) for share in firsts)
        return original(firsts, method, *args, **kwargs)

    original = group.call_each
    monkeypatch.setattr(group, "call_each", call_each)
    alone = spread.alone()
    with spread.moving.logprob_mode(), alone.logprob_mode():
        for num in (1, 2, 5):  # also fewer rows than ranks
            batch = make_batch(num)
            for ask in (
                lambda policy, batch=batch: policy.get_logprobs(batch, mbs=1)["logprobs"],
                lambda policy, batch=batch: policy.get_topk_logits(batch, 3)["topk_logits"],
                lambda policy, batch=batch: policy.train(batch, nll, eval_mode=True)["loss"],
            ):
                ours, one = ask(spread.moving), ask(alone)
                assert ours.shape == one.shape
                assert torch.allclose(ours, one, atol=1e-5)
    alone.close()
    assert sent == [[1, 0]] * 3 + [[1, 1]] * 3 + [[3, 2]] * 3


def test_a_bad_batch_reaches_no_rank(spread: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    def call_each(*_: Any) -> Any:
        raise AssertionError("it was sent")

    monkeypatch.setattr(spread.moving._control.group, "call_each", call_each)
    with spread.moving.training_mode():
        with pytest.raises(rs.BatchError, match="policy 'moving': train"):
            spread.moving.train(make_batch(5), nll, gbs=2)


def test_texts_of_several_ranks_are_those_of_one(spread: Spread) -> None:
    alone = spread.alone()
    found = []
    for policy in (spread.moving, alone):
        engine = rs.InProcessEngine(policy, max_new_tokens=4, stop_ids=(1, 2, 3), pad_id=7, seed=5, mbs=2)
        with policy.generation_mode(engine):
            found.append(engine.generate(make_batch(3)))
        policy._engines.clear()
    alone.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("output_ids", "generation_lengths"))


def test_ddp_trains_as_one_process_does_and_a_survivor_has_all(cluster: None, tmp_path: Path) -> None:
    with rs.Session(tmp_path / "ray.jsonl", verify="checksum") as session:
        workers = rs.RayWorkers(2, resources={"CPU": 0.5}, timeout_seconds=TIMEOUT_SECONDS, parallelize="ddp")
        policy: Any = session.policy(
            "actor", model=Deep, optimizer=make_optimizer, workers=workers, device=EmulatedDevice(), reference="copy"
        )
        model = Deep()
        model.load_state_dict(policy.state_dict())
        alone = rs.attach(model, make_optimizer(model.parameters()), reference="copy")
        for index in range(4):
            ours, one = _step(policy, index), _step(alone, index)
            assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(ours, one, strict=True)), f"step {index}"
        policy.save_checkpoint(tmp_path / "saved")
        policy.load_checkpoint(tmp_path / "saved")
        expected = policy.state_dict()
        rank_device(policy, 1).die("copy_in", 1, "half")
        with pytest.raises(rs.FaultedError, match="rank 1: lost"), policy.training_mode():
            pass
        policy.recover()
        assert all(torch.equal(value, expected[name]) for name, value in policy.state_dict().items())
        (record,) = [r for r in rs.read_audit(tmp_path / "ray.jsonl") if r.name == "policy.recovered"]
        assert record.event.origin == "host copies of rank 0"
        with policy.training_mode():
            policy.train(make_batch(4), nll)


# -- weights for an engine -------------------------------------------------------------------------------------------


def _tensors_of(engine: FakeEngine, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the engine has, cut and shaped as the weights are."""
    held = engine._blocks.get("weights", engine._host)
    assert held is not None
    found = {}
    for name, tensor in like.items():
        start = engine._places[name]
        found[name] = held[start : start + tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
    return found


@pytest.mark.parametrize("from_host", [False, True])
@pytest.mark.parametrize("release", ["eager", "lazy"])
def test_an_engine_gets_the_whole_weights_of_all_shards_and_nothing_stays(
    spread: Spread, release: Any, from_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = spread.moving
    monkeypatch.setattr(policy._control, "flags", attrs.evolve(policy._control.flags, release=release))
    with policy.training_mode():
        policy.train(make_batch(4), nll)
    if release == "lazy":
        assert all(spread.resident(policy))
    expected = policy.state_dict()
    total = sum(tensor.nbytes for tensor in expected.values())
    fake = FakeEngine(weights=total, accepts_host_weights=from_host, requires_refit=True)
    engine = spread.session.engine(f"{release}-{from_host}", fake)
    before = [rank_device(policy, rank).bytes_in for rank in range(2)]
    resident = spread.resident(policy)
    policy.refit(engine, bucket_nbytes=300)
    assert fake.num_buckets[0] > 2
    found = _tensors_of(fake, expected)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert spread.resident(policy) == resident
    came = [rank_device(policy, rank).bytes_in - was for rank, was in enumerate(before)]
    assert all(came) == (release == "eager" and not from_host)
    policy.offload()
    assert spread.resident(policy) == [0, 0]
    assert (policy.mode, policy.health) == ("offloaded", "ok")
    engine.close()


# -- failing in the middle of a forward --------------------------------------------------------------------------------


@pytest.mark.parametrize(("trouble", "said"), [("no forward here", "no forward here"), ("die", "rank 1: lost")])
def test_a_rank_that_leaves_a_forward_ends_the_wait_of_the_others_long_before_the_deadline(
    spread: Spread, trouble: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_group, "_GRACE_SECONDS", 1.0)
    policy = spread.moving
    with policy.training_mode():
        policy.train(make_batch(4), nll)
    policy.save_checkpoint(spread.start.parent / "before")
    expected = policy.state_dict()
    start = time.monotonic()
    with pytest.raises(rs.FaultedError, match=said) as caught, policy.training_mode():
        policy.train({**make_batch(4), "trouble": trouble}, nll)
    assert time.monotonic() - start < TIMEOUT_SECONDS / 2
    if trouble != "die":
        assert "rank 0: lost" in str(caught.value)
        assert "rank 1: OSError: no forward here" in str(caught.value)
    assert policy.health == "faulted"
    monkeypatch.undo()
    policy.recover()
    assert all(torch.equal(value, expected[name]) for name, value in policy.state_dict().items())
    with policy.training_mode():
        policy.train(make_batch(4), nll)
