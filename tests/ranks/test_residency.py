"""FSDP2 and DDP on real ranks: shards leave and come back bit for bit, and nothing stale is ever computed with."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worker import MIXED, RankWorker, batch, cycle, loss_fn, made, made_model, shard_of, whole
from spawned import run
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

from rl_session.errors import OpenStepError, UnsupportedError
from rl_session.lifecycle import Component, Mode, Tier
from rl_session.offload import swap
from rl_session.workers import compute
from rl_session.workers.shares import split

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def same(left: RankWorker, right: RankWorker) -> None:
    """Weights and optimizer state are equal bit for bit; both are in TRAINING."""
    for name, value in left.full().items():
        assert torch.equal(value, right.full()[name]), name
    assert all(torch.equal(a, b) for a, b in zip(left.full_state(), right.full_state(), strict=True))


# -- the judge: twenty scoped steps ----------------------------------------------------------------------------------


def _twenty_steps(rank: int, folder: Path) -> None:
    moving = made(reference="copy", max_grad_norm=0.5)
    still = made(reference="copy", max_grad_norm=0.5, release="never")
    alone = made(None, solo=True, reference="copy", max_grad_norm=0.5)
    for index in range(20):
        given = batch(3 + index % 4, seed=index)
        results = []
        for worker in (moving, still, alone):
            worker.go(Mode.LOGPROB)
            logprobs = worker.call("get_logprobs", given, mbs=1)["logprobs"]
            reference = worker.call("get_reference_policy_logprobs", given, mbs=2)["reference_logprobs"]
            worker.go(Mode.OFFLOADED)
            assert worker is still or worker.away_bytes() == worker.device.resident_bytes == 0
            worker.go(Mode.TRAINING)
            trained = worker.train(given, mbs=2)
            worker.go(Mode.OFFLOADED)
            results.append({**trained, "logprobs": logprobs, "reference": reference})
        ours, theirs, solo = results
        for key in ("loss", "grad_norm", "logprobs", "reference"):
            assert torch.equal(ours[key], theirs[key]), (index, key)
            assert torch.allclose(ours[key], solo[key], atol=2e-5, rtol=1e-4), (index, key)
        assert ours["metrics"] == theirs["metrics"]
        assert ours["metrics"] == pytest.approx(solo["metrics"], rel=1e-4, abs=1e-5)
        if index % 7 == 6:  # away, saved from host copies, and read back into an away model
            moving.worker.save_checkpoint(str(folder / "moving"))
            moving.worker.load_checkpoint(str(folder / "moving"))
            assert moving.away_bytes() == 0
    for worker in (moving, still, alone):
        worker.go(Mode.TRAINING)
    same(moving, still)
    for name, value in alone.full().items():
        assert torch.allclose(moving.full()[name], value, atol=2e-5), name
    assert moving.device.bytes_out > 0


def test_two_ranks_train_twenty_scoped_steps_as_if_nothing_ever_moved_and_as_one_rank_does(tmp_path: Path) -> None:
    run(_twenty_steps, 2, tmp_path, timeout=150)


# -- every way of FSDP2 and DDP --------------------------------------------------------------------------------------


def _bit_identical(rank: int, how: Any, options: dict[str, Any]) -> None:
    moving, still = made(how, options=options), made(how, options=options, release="never")
    before = {id(p): shard_of(p).untyped_storage()._cdata for p in moving.parameters()}
    for index in range(3):
        given = batch(5, seed=index)
        ours, theirs = cycle(moving, given, mbs=1), cycle(still, given, mbs=1)
        assert torch.equal(ours["logprobs"], theirs["logprobs"])
        assert torch.equal(ours["loss"], theirs["loss"])
        assert moving.away_bytes() == 0
        assert moving.device.resident_bytes == 0
        assert not moving.worker.sources.shards.gathered()
        assert moving.tiers()[Component.GRADS] is Tier.NONE
    moving.go(Mode.LOGPROB)
    moving.call("get_logprobs", batch(4))
    assert not moving.worker.sources.shards.gathered(), "a call leaves the model sharded"
    moving.go(Mode.OFFLOADED)
    assert not moving.worker.sources.shards.gathered(), "a forward without a backward leaves something behind"
    assert {id(p): shard_of(p).untyped_storage()._cdata for p in moving.parameters()} == before
    moving.go(Mode.TRAINING)
    still.go(Mode.TRAINING)
    same(moving, still)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"mp_policy": MIXED},
        {"mp_policy": MIXED, "reshard_after_forward": False},
    ],
    ids=["resharded", "kept gathered", "mixed precision", "mixed, kept"],
)
def test_fsdp2_is_bit_identical_in_every_way_of_resharding(options: dict[str, Any]) -> None:
    run(_bit_identical, 2, "fsdp2", options)


def test_fsdp2_resharding_to_a_smaller_group_is_bit_identical_and_keeps_nothing() -> None:
    run(_bit_identical, 4, "fsdp2", {"reshard_after_forward": 2})


def test_a_replicated_model_is_bit_identical() -> None:
    run(_bit_identical, 2, None, {})


def _ddp(rank: int) -> None:
    _bit_identical(rank, "ddp", {})
    worker = made("ddp")
    worker.go(Mode.TRAINING)
    worker.train(batch(4))
    worker.train(batch(4))  # the reducer makes its buckets anew after the first backward
    grads = [p.grad for p in worker.parameters() if p.grad is not None]
    assert grads  # views of the reducer's buckets, zeroed
    buckets = {g.untyped_storage()._cdata: g.untyped_storage() for g in grads}
    assert all(bucket.nbytes() > 0 for bucket in buckets.values())
    worker.go(Mode.OFFLOADED)
    assert all(bucket.nbytes() == 0 for bucket in buckets.values()), "the buckets stay on the device"
    assert worker.device.resident_bytes == 0
    worker.go(Mode.TRAINING)
    expected = made("ddp")
    expected.go(Mode.TRAINING)
    expected.train(batch(4))
    expected.train(batch(4))
    again, other = worker.train(batch(4, seed=1)), expected.train(batch(4, seed=1))
    assert torch.equal(again["loss"], other["loss"])
    assert [p.grad.untyped_storage()._cdata for p in worker.parameters() if p.grad is not None] == [
        g.untyped_storage()._cdata for g in grads
    ]
    same(worker, expected)


def test_ddp_is_bit_identical_and_its_buckets_leave_with_the_gradients() -> None:
    run(_ddp, 2)


# -- what is gathered must never be older than its shards ------------------------------------------------------------


def _stale(rank: int, folder: Path) -> None:
    worker, other = made(reference="copy"), made(model=made_model(3))
    other.worker.save_checkpoint(str(folder / "other"))
    worker.go(Mode.RESIDENT)
    with torch.no_grad():
        before = worker.model(IDS).clone()
    assert worker.worker.sources.shards.gathered(), "the root is expected to stay gathered: else this proves nothing"
    worker.worker.load_checkpoint(str(folder / "other"))
    with torch.no_grad():
        after = worker.model(IDS)
        assert torch.equal(after, other.model(IDS))
        assert not torch.equal(after, before)
        # Gathered again now, with the other weights: neither the reference nor what follows it may see them.
        given = batch(4)
        pristine = compute.get_logprobs(compute.Forward(made_model()), given)["logprobs"]
        reference = worker.call("get_reference_policy_logprobs", given)["reference_logprobs"]
        assert torch.allclose(reference, pristine, atol=1e-5)
        assert torch.equal(worker.model(IDS), after)
        # A forward of anybody's while the reference is in, such as one that its caller makes by hand.
        engine, kept = worker.worker.engine, worker.worker._reference._copy  # type: ignore[union-attr]
        with swap.replaced(engine, kept, (Component.PARAMS, Component.BUFFERS), stays_valid=False):
            assert torch.allclose(worker.model(IDS), made_model()(IDS), atol=1e-5)
        assert torch.equal(worker.model(IDS), after)
        worker.go(Mode.TRAINING)
    # Between the gradients and their step.
    worker.worker.begin_step(None, None)
    worker.call("forward_backward", batch(4), loss_fn, mbs=None)
    with torch.no_grad():
        worker.model(IDS)
    assert worker.worker.sources.shards.gathered()
    worker.worker.commit()
    fresh = made_model()
    with torch.no_grad():
        after = worker.model(IDS)
        fresh.load_state_dict(worker.full())
        assert torch.equal(after, fresh(IDS))
        # And moving: the bytes that leave are those of the shards.
        worker.go(Mode.OFFLOADED)
        assert not worker.worker.sources.shards.gathered()
        worker.go(Mode.LOGPROB)
        assert torch.equal(worker.model(IDS), after)


def test_nothing_gathered_outlives_a_load_a_reference_swap_or_a_move(tmp_path: Path) -> None:
    run(_stale, 2, tmp_path)


def _looked_at(rank: int) -> None:
    worker = made()
    worker.go(Mode.LOGPROB)
    with torch.no_grad():
        first = worker.model(IDS)
    if rank == 0:  # a rank that reshards alone would wait for an all-gather that the other rank does not make
        memory = worker.worker.memory()
        assert memory["uncovered"]["embed.weight (gathered)"] > 0
        assert worker.worker.placement()[Component.PARAMS] is Tier.DEVICE
        assert worker.tiers()[Component.OPTIMIZER] is Tier.NONE
        names = {e.name for e in worker.worker.engine.refresh().inventory.entries(Component.PARAMS)}
        assert "embed.weight" in names
    with torch.no_grad():
        assert torch.equal(worker.model(IDS), first)


def test_one_rank_may_look_without_the_others() -> None:
    run(_looked_at, 2)


# -- gradients -------------------------------------------------------------------------------------------------------


def _live_gradients(rank: int) -> None:
    worker = made()
    worker.go(Mode.TRAINING)
    worker.model(IDS).sum().backward()
    grads = {id(p): p.grad for p in worker.parameters() if p.grad is not None}
    values = {key: shard_of(grad).clone() for key, grad in grads.items()}
    whole_before = [whole(grad) for grad in grads.values()]
    worker.go(Mode.LOGPROB)
    assert worker.tiers()[Component.GRADS] is Tier.DEVICE
    reply = worker.go(Mode.OFFLOADED)
    assert not reply.live_dropped
    assert worker.tiers()[Component.GRADS] is Tier.HOST
    assert all(shard_of(grad).untyped_storage().nbytes() == 0 for grad in grads.values())
    with pytest.raises(OpenStepError):
        worker.train(batch(4))
    worker.go(Mode.TRAINING)
    assert all(p.grad is grads[id(p)] for p in worker.parameters() if id(p) in grads)
    assert all(torch.equal(shard_of(grads[key]), value) for key, value in values.items())
    assert all(torch.equal(whole(g), b) for g, b in zip(grads.values(), whole_before, strict=True))
    with pytest.raises(OpenStepError):
        worker.train(batch(4))
    worker.optimizer.step()  # consumed: they go with the next move, all of them
    del grads
    worker.go(Mode.OFFLOADED)
    assert all(p.grad is None for p in worker.parameters())
    gc.collect()  # the errors above have frames in which gradients are named
    assert worker.device.resident_bytes == 0


def test_sharded_gradients_of_an_open_step_travel_bit_for_bit_and_consumed_ones_are_dropped() -> None:
    run(_live_gradients, 2)


def _hidden_gradients(rank: int) -> None:
    worker = made(options={"mp_policy": MIXED})
    worker.go(Mode.TRAINING)
    worker.model.set_requires_gradient_sync(False)  # type: ignore[operator]
    with pytest.raises(UnsupportedError, match="unreduced"):
        worker.worker.begin_step(None, None)
    worker.model(IDS).sum().backward()
    assert all(p.grad is None for p in worker.parameters()), "a gradient shows: nothing is hidden"
    reply = worker.go(Mode.LOGPROB)
    (notice,) = [notice for notice in reply.notices if notice.code == "uncovered"]
    assert "not reduced" in notice.message
    assert (notice.nbytes or 0) > 0
    worker.go(Mode.TRAINING)
    worker.model.set_requires_gradient_sync(True)  # type: ignore[operator]
    with pytest.raises(OpenStepError, match="has not reduced") as caught:
        worker.train(batch(4))
    assert "set_requires_gradient_sync(True)" in caught.value.remedy
    worker.model(IDS).sum().backward()
    worker.optimizer.step()
    worker.optimizer.zero_grad()
    worker.train(batch(4))


def test_gradients_that_fsdp_has_not_reduced_are_refused_or_reported() -> None:
    run(_hidden_gradients, 2)


# -- FSDP's own CPU offload ------------------------------------------------------------------------------------------


def _cpu_offload(rank: int) -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    worker = made(options={"offload_policy": policy}, reference="copy")
    plain = made()
    buffers = sum(buffer.nbytes for buffer in worker.model.buffers())
    flags: dict[str, Any] = {"weights_move": False}
    assert worker.tiers()[Component.PARAMS] is Tier.HOST
    for index in range(2):
        given = batch(5, seed=index)
        worker.go(Mode.OFFLOADED, **flags)
        assert worker.device.resident_bytes == 0
        assert worker.away_bytes() > 0
        moved = worker.device.bytes_in, worker.device.bytes_out
        worker.go(Mode.TRAINING, **flags)
        assert (worker.device.bytes_in - moved[0], worker.device.bytes_out - moved[1]) == (buffers, 0)
        assert worker.device.resident_bytes == buffers
        ours = worker.train(given)
        plain.go(Mode.TRAINING)
        assert torch.equal(ours["loss"], plain.train(given)["loss"])
        moved = worker.device.bytes_in, worker.device.bytes_out
        worker.go(Mode.OFFLOADED, **flags)
        assert (worker.device.bytes_in - moved[0], worker.device.bytes_out - moved[1]) == (0, buffers)
    worker.go(Mode.LOGPROB, **flags)
    given = batch(4)
    pristine = compute.get_logprobs(compute.Forward(made_model()), given)["logprobs"]
    reference = worker.call("get_reference_policy_logprobs", given)["reference_logprobs"]
    assert torch.allclose(reference, pristine, atol=1e-5)
    live = worker.call("get_logprobs", given)["logprobs"]
    plain.go(Mode.LOGPROB)
    assert torch.equal(live, plain.call("get_logprobs", given)["logprobs"])
    worker.go(Mode.TRAINING, **flags)
    worker.train(given)  # what the swap kept on the host must not stand for the weights any more
    state = worker.worker.state_dict()
    expected = worker.full()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    worker.worker.detach()
    assert all(shard_of(p).untyped_storage().nbytes() > 0 for p in worker.parameters() if shard_of(p).numel())


def test_under_cpu_offload_only_buffers_move() -> None:
    run(_cpu_offload, 2)


# -- the rest --------------------------------------------------------------------------------------------------------


def _records(rank: int) -> None:
    worker = made()
    first = worker.worker.start.__self__.engine.refresh()  # type: ignore[attr-defined]
    padded = sum(p._sharded_param_data.nbytes for p in worker.worker.sources.shards._parameters())
    assert sum(first.nbytes[Component.PARAMS].values()) == padded
    replies = [worker.go(mode) for mode in (Mode.OFFLOADED, Mode.LOGPROB, Mode.TRAINING, Mode.OFFLOADED)]
    assert not [notice for reply in replies for notice in reply.notices]
    assert worker.device.bytes_in == sum(
        move.nbytes for reply in replies for move in reply.moved if not move.elided and move.to_tier is Tier.DEVICE
    )
    worker.worker.detach()
    assert worker.worker.engine.pool.in_use_bytes == 0
    logits: Tensor = worker.model(IDS)
    assert torch.equal(logits, made().model(IDS))


def test_padding_is_counted_no_holder_is_unknown_and_detach_gives_the_model_back() -> None:
    run(_records, 2)


def test_the_loss_of_the_tests_needs_the_whole_batch() -> None:
    """Otherwise equality with one rank would prove little: rows weigh differently."""
    parts = split(batch(6), 2)
    losses = [
        loss_fn(made_model()(part.batch["input_ids"]), part.batch, torch.tensor(1.0), torch.tensor(1.0))[0]
        for part in parts
    ]
    assert abs(float((losses[0] - losses[1]).detach())) > 0.1
