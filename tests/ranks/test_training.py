"""Compute across ranks: the numbers of one rank, for any batch size; and one decision when something fails on one of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_worker import RankWorker, batch, loss_fn, made, made_model, shard_of
from spawned import run
from torch import Tensor, nn

from rl_session.errors import (
    ArgumentError,
    BatchError,
    FaultedError,
    NonFiniteError,
    OptimizerStepError,
    StepClosedError,
    WorldError,
)
from rl_session.lifecycle import Mode
from rl_session.workers.sampling import SamplingParams, sample
from rl_session.workers.shares import split

WAYS = ["fsdp2", "ddp", None]


def close(left: RankWorker, right: RankWorker) -> None:
    ours, theirs = left.full(), right.full()
    for name, value in theirs.items():
        found = ours[name] if name in ours else ours[f"module.{name}"]
        assert torch.allclose(found, value, atol=1e-5), name


# -- the numbers -----------------------------------------------------------------------------------------------------


def _sizes(rank: int, how: Any) -> None:
    ranks, alone = made(how, max_grad_norm=0.1), made(None, solo=True, max_grad_norm=0.1)
    for worker in (ranks, alone):
        worker.go(Mode.TRAINING)
    for num in (1, 2, 3, 5, 7):  # also fewer rows than ranks, and uneven numbers of micro-batches
        given = batch(num, seed=num)
        for method in ("get_logprobs", "get_topk_logits"):
            arguments = (3,) if method == "get_topk_logits" else ()
            ours = ranks.call(method, given, *arguments, mbs=1)
            theirs = alone.call(method, given, *arguments, mbs=2)
            for key, value in theirs.items():
                assert ours[key].shape == value.shape
                assert torch.allclose(ours[key], value, atol=1e-4), (num, method, key)
        for eval_mode in (True, False):
            ours = ranks.train(given, mbs=2, eval_mode=eval_mode)
            theirs = alone.train(given, eval_mode=eval_mode)
            assert torch.allclose(ours["loss"], theirs["loss"], rtol=1e-4), (num, eval_mode)
            assert torch.allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-3)
            assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4)
    given = batch(6)
    ours, theirs = ranks.train(given, gbs=3, mbs=1), alone.train(given, gbs=3)
    assert torch.allclose(ours["loss"], theirs["loss"], rtol=1e-4)
    assert len(ours["loss"]) == 2
    close(ranks, alone)
    everyone = ranks.worker.ranks.gather_objects(ours)
    assert all(
        torch.equal(each["grad_norm"], ours["grad_norm"]) and each["metrics"] == ours["metrics"] for each in everyone
    )


@pytest.mark.parametrize("how", WAYS)
def test_two_ranks_compute_what_one_does_for_any_number_of_rows(how: Any) -> None:
    run(_sizes, 2, how)


def test_three_ranks_do_too_where_no_factor_is_exact() -> None:
    run(_sizes, 3, "ddp")
    run(_sizes, 3, "fsdp2")


def _open_step(rank: int, how: Any) -> None:
    for counts in ((None, None), (5.0, 11.0)):
        ranks, alone = made(how, max_grad_norm=0.1), made(None, solo=True, max_grad_norm=0.1)
        for worker in (ranks, alone):
            worker.go(Mode.TRAINING)
            worker.worker.begin_step(*counts)
            for index, num in enumerate((3, 1, 4)):
                worker.call("forward_backward", batch(num, seed=index), loss_fn, mbs=1)
                worker.go(Mode.LOGPROB)  # the step stays open across modes, its gradients with it
                worker.call("get_logprobs", batch(2))
                worker.go(Mode.OFFLOADED)
                worker.go(Mode.TRAINING)
        ours, theirs = ranks.worker.commit().value, alone.worker.commit().value
        assert torch.allclose(ours["loss"], theirs["loss"], rtol=1e-4)
        assert torch.allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-4)
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4)
        close(ranks, alone)


@pytest.mark.parametrize("how", WAYS)
def test_an_open_step_divides_by_what_all_ranks_counted(how: Any) -> None:
    run(_open_step, 2, how)


def _own_batches(rank: int) -> None:
    ranks, alone = made(), made(None, solo=True)
    whole = batch(6)
    own = {key: value[rank * 3 : rank * 3 + 3] for key, value in whole.items()}
    for worker in (ranks, alone):
        worker.go(Mode.TRAINING)
    logprobs = ranks.worker.get_logprobs(own).value["logprobs"]
    assert torch.allclose(logprobs, alone.call("get_logprobs", whole)["logprobs"][rank * 3 : rank * 3 + 3], atol=1e-5)
    ours = ranks.worker.train(own, loss_fn, 6, 1, False).value
    assert torch.allclose(ours["loss"], alone.train(whole)["loss"])
    close(ranks, alone)
    with pytest.raises(BatchError, match="different lengths"):
        ranks.worker.train({key: value[: 2 + rank] for key, value in own.items()}, loss_fn, 2, None, False)


def test_a_program_on_every_rank_trains_on_the_rows_it_has() -> None:
    run(_own_batches, 2)


class _Sometimes(nn.Module):
    """Uses a parameter only for texts that begin with token 1, as routed experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = made_model()
        self.rare = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids)
        return logits * self.rare if bool((input_ids[:, 0] == 1).all()) else logits


def _missing_gradients(rank: int) -> None:
    ranks, alone = made(None, model=_Sometimes()), made(None, solo=True, model=_Sometimes())
    given = batch(4)
    given["input_ids"][:, 0] = torch.tensor([1, 1, 2, 2])
    for worker in (ranks, alone):
        worker.go(Mode.TRAINING)
        worker.train(given, mbs=2)
    assert float(ranks.full()["rare"]) != 1.0
    close(ranks, alone)


def test_a_gradient_that_one_rank_does_not_have_counts_as_zeros() -> None:
    run(_missing_gradients, 2)


def _generates(rank: int, how: Any) -> None:
    worker = made(how)
    worker.go(Mode.GENERATION)
    prompts = {key: batch(3)[key] for key in ("input_ids", "input_lengths")}
    params = SamplingParams(max_new_tokens=6, stop_ids=tuple(range(8)), temperature=1.0, seed=7, mbs=1)
    parts = split(prompts, 2)
    own = worker.worker.generate(parts[rank], params, 0).value
    alone = sample(made_model(), prompts, params)
    ends = [int(alone["generation_lengths"][list(part.rows)].sum()) for part in parts]
    assert ends[0] != ends[1] + params.max_new_tokens, "ranks would make as many forwards by chance"
    assert torch.equal(own["generation_lengths"], alone["generation_lengths"][list(parts[rank].rows)])
    width = own["output_ids"].shape[1]
    assert torch.equal(own["output_ids"], alone["output_ids"][list(parts[rank].rows), :width])


def test_ranks_sample_the_texts_that_one_does_though_they_end_at_different_times() -> None:
    run(_generates, 2, "fsdp2")


# -- failing together ------------------------------------------------------------------------------------------------


def _works_afterwards(worker: RankWorker, before: dict[str, Tensor]) -> None:
    """The weights are as before, the ranks agree, and the next step is as if nothing had been."""
    assert all(torch.equal(value, before[name]) for name, value in worker.full().items())
    assert all(p.grad is None or not torch.any(shard_of(p.grad)) for p in worker.parameters())
    fresh = made("ddp" if any(name.startswith("module.") for name in before) else "fsdp2")
    fresh.go(Mode.TRAINING)
    assert torch.equal(worker.train(batch(5))["loss"], fresh.train(batch(5))["loss"])
    for name, value in fresh.full().items():
        assert torch.equal(worker.full()[name], value), name


def _failing_losses(rank: int, how: Any) -> None:
    worker = made(how)
    worker.go(Mode.OFFLOADED)
    worker.go(Mode.TRAINING)
    before = worker.full()

    class Unpicklable(Exception):  # noqa: N818
        pass

    def not_finite(logits: Tensor, given: Any, seqs: Tensor, tokens: Tensor) -> Any:
        return logits.sum() * (math.nan if rank == 1 else 1.0), {}

    def lacks(logits: Tensor, given: Any, seqs: Tensor, tokens: Tensor) -> Any:
        return logits.sum() + (given["returns_of_old"] if rank == 0 else 0.0), {}

    def raises(logits: Tensor, given: Any, seqs: Tensor, tokens: Tensor) -> Any:
        if rank == 1:
            raise Unpicklable("only here")
        return logits.sum(), {}

    for index, (loss, error) in enumerate(((not_finite, NonFiniteError), (lacks, BatchError), (raises, Exception))):
        with pytest.raises(error) as caught:
            worker.train(batch(4), loss, mbs=1)
        notes = getattr(caught.value, "__notes__", [])
        if rank != (0 if index == 1 else 1):
            assert any(f"raised on rank {0 if index == 1 else 1} of 2" in note for note in notes), notes
        if index == 2:
            assert isinstance(caught.value, Unpicklable if rank == 1 else WorldError)
            assert "only here" in str(caught.value)
    _works_afterwards(worker, before)


@pytest.mark.parametrize("how", ["fsdp2", "ddp"])
def test_a_loss_that_fails_on_one_rank_fails_on_all_and_nothing_was_stepped(how: Any) -> None:
    run(_failing_losses, 2, how)


def _bad_arguments(rank: int) -> None:
    worker = made()
    worker.go(Mode.TRAINING)
    before = worker.full()
    parts = split(batch(4), 2)
    own = {key: value for key, value in batch(2).items() if key != "input_lengths" or rank == 0}
    for call in (
        lambda: worker.worker.get_logprobs(own),
        lambda: worker.worker.train(own, loss_fn, None, None, False),
        lambda: worker.worker.train(parts[rank], "no loss" if rank else loss_fn, None, None, False),
        lambda: worker.worker.get_topk_logits(parts[rank], 3 if rank == 0 else -1),
    ):
        with pytest.raises(ArgumentError):
            call()  # type: ignore[no-untyped-call]
    worker.worker.begin_step(None, None)
    with pytest.raises(BatchError):
        worker.worker.forward_backward(own, loss_fn, None)
    assert worker.worker.has_open_step(), "a chunk that was refused before the forward leaves the step open"
    worker.worker.abort()
    _works_afterwards(worker, before)


def test_an_argument_that_is_wrong_on_one_rank_is_refused_on_all_before_any_forward() -> None:
    run(_bad_arguments, 2)


def _failing_forward(rank: int) -> None:
    worker = made()
    worker.go(Mode.OFFLOADED)
    worker.go(Mode.TRAINING)
    before = worker.full()
    layer: Any = worker.model.layers[1]  # type: ignore[index]

    def fails(*_: Any) -> None:
        raise OSError("in the middle of a forward, on every rank")

    for call in (
        lambda: worker.call("get_logprobs", batch(4)),
        lambda: worker.train(batch(4)),
        lambda: worker.train(batch(4), eval_mode=True),
    ):
        handle = layer.down.register_forward_hook(fails)
        with pytest.raises(OSError, match="in the middle"):
            call()  # type: ignore[no-untyped-call]
        handle.remove()
        assert not worker.worker.sources.shards.gathered()
        assert torch.isfinite(worker.call("get_logprobs", batch(4))["logprobs"]).all()
    _works_afterwards(worker, before)


def test_after_a_forward_that_failed_on_every_rank_the_next_one_is_right() -> None:
    run(_failing_forward, 2)


def _inf_gradient(rank: int) -> None:
    worker = made()
    worker.go(Mode.TRAINING)
    before = worker.full()

    class Blow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 (autograd gives it)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004 (autograd gives it)
            return grad * (math.inf if rank == 1 else 1.0)

    def loss(logits: Tensor, given: Any, seqs: Tensor, tokens: Tensor) -> Any:
        blown: Tensor = Blow.apply(logits)
        return blown.square().sum(), {}

    with pytest.raises(NonFiniteError, match="not finite"):
        worker.train(batch(4), loss)
    _works_afterwards(worker, before)


def test_gradients_that_are_not_finite_stop_the_step_on_every_rank() -> None:
    run(_inf_gradient, 2)


class FailsOnce(torch.optim.AdamW):
    """Fails half-way through a step, on one rank, once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.armed = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.armed and dist.get_rank() == 1:
            self.armed = False
            raise OSError("the step failed here")
        return result


def _step_fails(rank: int, trained_before: bool) -> None:
    worker, fresh = made(optimizer=FailsOnce), made()
    for each in (worker, fresh):
        each.go(Mode.TRAINING)
        if trained_before:
            each.train(batch(4))
        each.go(Mode.OFFLOADED)
        each.go(Mode.TRAINING)
    before = worker.full()
    worker.optimizer.armed = True  # type: ignore[attr-defined]
    with pytest.raises(OptimizerStepError) as caught:
        worker.train(batch(5))
    assert ("the step failed here" if rank == 1 else "on another rank") in caught.value.cause
    assert all(torch.equal(value, before[name]) for name, value in worker.full().items())
    worker.optimizer.armed = False  # type: ignore[attr-defined]
    assert torch.equal(worker.train(batch(5))["loss"], fresh.train(batch(5))["loss"])
    assert all(torch.equal(value, worker.full()[name]) for name, value in fresh.full().items())
    assert all(torch.equal(a, b) for a, b in zip(worker.full_state(), fresh.full_state(), strict=True))


@pytest.mark.parametrize("trained_before", [False, True])
def test_a_step_that_fails_on_one_rank_is_undone_on_every_rank(trained_before: bool) -> None:
    run(_step_fails, 2, trained_before)


def _step_fails_for_good(rank: int) -> None:
    worker = made(optimizer=FailsOnce)
    worker.go(Mode.OFFLOADED)
    worker.go(Mode.TRAINING)
    worker.train(batch(4))  # now the host copies of entry are old
    worker.optimizer.armed = True  # type: ignore[attr-defined]
    with pytest.raises(FaultedError):
        worker.train(batch(4))
    with pytest.raises(FaultedError, match="without a checkpoint"):
        worker.worker.recover()


def test_a_step_that_cannot_be_undone_everywhere_faults_every_rank() -> None:
    run(_step_fails_for_good, 2)


def _closed_step(rank: int) -> None:
    worker = made()
    worker.go(Mode.TRAINING)
    with pytest.raises(StepClosedError):
        worker.worker.commit()
    worker.worker.begin_step(None, None)
    worker.worker.abort()
    worker.worker.begin_step(None, None)
    with pytest.raises(ArgumentError, match="empty"):
        worker.worker.commit()
    worker.train(batch(4))


def test_steps_end_on_all_ranks_alike() -> None:
    run(_closed_step, 2)


def _says_so(rank: int) -> list[str]:
    worker = made()
    worker.go(Mode.TRAINING)
    said: list[str] = []
    worker.worker.ranks.on_failure = lambda error: said.append(type(error).__name__)

    def loss(logits: Tensor, *_: Any) -> Any:
        if rank == 1:
            raise OSError("only here")
        return logits.sum(), {}

    with pytest.raises(OSError, match="only here"):
        worker.train(batch(4), loss)
    return said


def test_a_rank_that_fails_says_so_before_it_tells_the_others_and_once_they_know() -> None:
    assert run(_says_so, 2) == [[], ["OSError", "NoneType"]]


def _alone(rank: int) -> Tensor:
    worker = made(None)
    worker.go(Mode.LOGPROB)
    given = batch(3)
    if rank == 1:
        with worker.worker.ranks.alone():  # the other rank makes no call at all
            logprobs: Tensor = worker.worker.get_logprobs(given).value["logprobs"]
    else:
        solo = made(None, solo=True)
        solo.go(Mode.LOGPROB)
        logprobs = solo.worker.get_logprobs(given).value["logprobs"]
    assert (worker.worker.ranks.index, worker.worker.ranks.count) == (rank, 2)
    return logprobs


def test_a_rank_with_a_whole_copy_can_do_without_the_others() -> None:
    left, right = run(_alone, 2)
    assert torch.allclose(left, right, atol=1e-6)
