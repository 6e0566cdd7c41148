"""One optimizer step: gradients, normalisation, clipping, and what is left after each failure."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rl_session import metrics as rs
from rl_session.errors import ArgumentError, BatchError, NonFiniteError, StepClosedError
from rl_session.metrics import MetricSum
from rl_session.workers.batch import counts, slice_batch
from rl_session.workers.compute import Forward
from rl_session.workers.train_step import OptimizerStepFailed, TrainStep, evaluate, train

VOCABULARY = 11


class Tiny(nn.Module):
    """An embedding and a linear layer, and a frozen parameter that no optimizer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.dropout(self.embed(input_ids)))
        return out


def batch(num: int = 8, length: int = 5) -> dict[str, Any]:
    torch.manual_seed(num)
    token_mask = (torch.rand(num, length) > 0.3).long()
    token_mask[:, 1] = 1
    return {
        "input_ids": torch.randint(0, VOCABULARY, (num, length)),
        "input_lengths": torch.full((num,), length),
        "token_mask": token_mask,
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0])[:num],
    }


def nll_per_token(logits: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    picked = logprobs.gather(-1, given["input_ids"][:, 1:, None]).squeeze(-1)
    return -picked, given["token_mask"][:, 1:] * given["sample_mask"][:, None]


def token_loss(logits: Tensor, given: dict[str, Any], seqs: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
    nll, mask = nll_per_token(logits, given)
    loss = (nll * mask).sum() / tokens
    return loss, {"nll": loss.detach(), "rows": len(mask), "worst": rs.max(nll.max()), "mean": rs.mean(nll.mean(), 2)}


class SequenceLoss:
    """Normalised by sequences, and says so."""

    class LossType(Enum):
        """As the loops have it."""

        SEQUENCE_LEVEL = "sequence_level"

    loss_type = LossType.SEQUENCE_LEVEL

    def __call__(
        self, logits: Tensor, given: dict[str, Any], seqs: Tensor, tokens: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        nll, mask = nll_per_token(logits, given)
        loss = (nll * mask).mean(dim=1).sum() / seqs
        return loss, {"nll": loss.detach()}


def made(lr: float = 0.1) -> tuple[Tiny, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tiny()
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor], atol: float = 0.0) -> bool:
    return all(torch.allclose(a[name], b[name], atol=atol, rtol=0) for name in a)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def naive_gradients(model: nn.Module, given: dict[str, Any], loss_fn: Any) -> dict[str, Tensor]:
    """Those of one big batch, normalised by its own counts."""
    twin = copy.deepcopy(model)
    seqs, tokens = counts(given)
    loss, _ = loss_fn(twin(given["input_ids"]), given, torch.tensor(seqs), torch.tensor(tokens))
    loss.backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


class Spy(torch.optim.SGD):
    """Keeps the gradients it stepped with."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None]
        return super().step(closure)


@pytest.mark.parametrize("mbs", [None, 1, 2, 8])
@pytest.mark.parametrize("loss_fn", [token_loss, SequenceLoss()], ids=["token", "sequence"])
def test_the_gradients_of_micro_batches_are_those_of_one_big_batch(loss_fn: Any, mbs: int | None) -> None:
    model, _ = made()
    given, spy = batch(), Spy(model.parameters(), lr=0.1)
    expected = naive_gradients(model, given, loss_fn)
    result = train(Forward(model), spy, given, loss_fn, mbs=mbs)
    for seen, name in zip(spy.seen, expected, strict=True):
        assert torch.allclose(seen, expected[name], atol=1e-6)
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in expected.values()]))
    assert torch.allclose(result["grad_norm"], norm.reshape(1), atol=1e-6)


def test_train_reports_one_loss_and_one_norm_a_step_and_merged_metrics() -> None:
    model, optimizer = made(lr=0.0)
    given = batch()
    result = train(Forward(model), optimizer, given, token_loss, gbs=4, mbs=2)
    expected = []
    for start in (0, 4):
        part = slice_batch(given, start, start + 4)
        seqs, tokens = counts(part)
        logits = model(part["input_ids"]).detach()
        expected.append(token_loss(logits, part, torch.tensor(seqs), torch.tensor(tokens))[0])
    assert torch.allclose(result["loss"], torch.stack(expected), atol=1e-6)
    assert (result["loss"].dtype, result["loss"].device.type) == (torch.float32, "cpu")
    assert result["grad_norm"].shape == (2,)
    assert (result["grad_norm"] > 0).all()
    nll, _ = nll_per_token(model(given["input_ids"]).detach(), given)
    assert result["metrics"]["nll"] == pytest.approx(float(sum(expected)), abs=1e-5)
    assert result["metrics"]["rows"] == 8
    assert result["metrics"]["worst"] == pytest.approx(float(nll.max()), abs=1e-6)
    assert result["metrics"]["mean"] == pytest.approx(float(nll.mean()), abs=1e-6)


def test_each_global_batch_is_a_step_of_its_own() -> None:
    model, optimizer = made()
    given = batch()
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    train(Forward(model), optimizer, given, token_loss, gbs=4)
    for start in (0, 4):
        grads = naive_gradients(twin, slice_batch(given, start, start + 4), token_loss)
        for name, parameter in twin.named_parameters():
            parameter.grad = grads[name]
        twin_optimizer.step()
    assert same(weights(model), weights(twin), atol=1e-6)


def test_a_hugging_face_model_learns() -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [float(train(Forward(model), optimizer, batch(), token_loss, mbs=4)["loss"]) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_the_scheduler_steps_once_a_call() -> None:
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(Forward(model), optimizer, batch(), token_loss, gbs=2, scheduler=scheduler)
    assert scheduler.get_last_lr() == [0.05]


def test_gradients_are_gone_afterwards() -> None:
    model, optimizer = made()
    train(Forward(model), optimizer, batch(), token_loss)
    assert gradients(model) == [None] * 3


def test_gradients_of_parameters_the_optimizer_does_not_know_go_too_and_do_not_count() -> None:
    model, _ = made()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    before = weights(model)
    result = train(Forward(model), optimizer, batch(), token_loss)
    expected = naive_gradients(model_of(before), batch(), token_loss)
    norm = math.sqrt(sum(float(g.pow(2).sum()) for name, g in expected.items() if name.startswith("head")))
    assert float(result["grad_norm"]) == pytest.approx(norm, abs=1e-6)
    assert torch.equal(model.embed.weight, before["embed.weight"])
    assert gradients(model) == [None] * 3


def model_of(state: dict[str, Tensor]) -> Tiny:
    model = Tiny()
    model.load_state_dict(state)
    return model


def test_clipping_bounds_the_step_and_reports_the_norm_before() -> None:
    model, _ = made()
    spy = Spy(model.parameters(), lr=0.1)
    result = train(Forward(model), spy, batch(), token_loss, max_grad_norm=0.01)
    clipped = math.sqrt(sum(float(g.pow(2).sum()) for g in spy.seen))
    assert clipped == pytest.approx(0.01, rel=1e-3)
    assert float(result["grad_norm"]) > 0.01


def test_without_any_gradient_the_norm_is_zero() -> None:
    model, optimizer = made()
    twin = copy.deepcopy(model)
    result = train(Forward(twin), optimizer, batch(), token_loss, max_grad_norm=1.0)  # it steps another model
    assert torch.equal(result["grad_norm"], torch.zeros(1))
    assert gradients(twin) == [None] * 3


def test_the_temperature_reaches_the_loss() -> None:
    model, optimizer = made(lr=0.0)
    given = batch()
    seqs, tokens = (torch.tensor(count) for count in counts(given))
    expected = token_loss(model(given["input_ids"]) / 0.5, given, seqs, tokens)[0].detach()
    result = train(Forward(model, temperature=0.5), optimizer, given, token_loss)
    assert float(result["loss"]) == pytest.approx(float(expected), abs=1e-6)


def test_the_loss_gets_its_arguments_by_position_and_counts_of_its_global_batch() -> None:
    model, optimizer = made()
    seen: list[tuple[Any, ...]] = []

    def loss_fn(*args: Any) -> tuple[Tensor, dict[str, Any]]:
        seen.append((tuple(args[0].shape), sorted(args[1]), args[2], args[3]))
        return args[0].sum() * 0, {}

    train(Forward(model), optimizer, batch(), loss_fn, gbs=4, mbs=2)
    expected = [counts(slice_batch(batch(), start, start + 4)) for start in (0, 0, 4, 4)]
    assert [(float(seqs), float(tokens)) for _, _, seqs, tokens in seen] == expected
    assert {shape for shape, *_ in seen} == {(2, 5, VOCABULARY)}
    assert all(t.dtype == torch.float32 and t.ndim == 0 for *_, seqs, tokens in seen for t in (seqs, tokens))


def test_training_runs_in_train_with_autograd_and_restores_what_it_found() -> None:
    model, optimizer = made()
    model.eval()
    seen: list[tuple[bool, bool]] = []
    model.dropout.register_forward_hook(lambda module, *_: seen.append((module.training, torch.is_grad_enabled())))
    with torch.no_grad():
        train(Forward(model), optimizer, batch(), token_loss)
    with torch.inference_mode():
        train(Forward(model), optimizer, batch(), token_loss)
    evaluate(Forward(model), batch(), token_loss)
    assert seen == [(True, True), (True, True), (False, False)]
    assert not any(part.training for part in model.modules())


def test_a_step_under_inference_mode_leaves_state_that_the_next_one_can_update() -> None:
    model, _ = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.inference_mode():
        train(Forward(model), optimizer, batch(), token_loss, max_grad_norm=1.0)
    train(Forward(model), optimizer, batch(), token_loss, max_grad_norm=1.0)
    assert not any(value.is_inference() for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("mbs", [None, 2])
def test_evaluation_reports_what_training_would_and_touches_nothing(mbs: int | None) -> None:
    model, optimizer = made(lr=0.0)
    trained = train(Forward(model), optimizer, batch(), token_loss, gbs=4, mbs=2)
    before = weights(model)
    result = evaluate(Forward(model), batch(), token_loss, gbs=4, mbs=mbs)
    assert torch.allclose(result["loss"], trained["loss"], atol=1e-6)
    assert torch.equal(result["grad_norm"], torch.zeros(2))
    assert result["metrics"]["nll"] == pytest.approx(trained["metrics"]["nll"], abs=1e-6)
    assert same(weights(model), before)
    assert gradients(model) == [None] * 3


def test_metrics_can_be_summed_where_ranks_are_merged() -> None:
    model, optimizer = made(lr=0.0)
    total = MetricSum()
    halves = [slice_batch(batch(), 0, 4), slice_batch(batch(), 4, 8)]
    for half in halves:
        train(Forward(model), optimizer, half, token_loss, metrics=total)
    evaluate(Forward(model), halves[0], token_loss, metrics=total)
    assert total.result()["rows"] == 12


@pytest.mark.parametrize(
    ("gbs", "mbs", "fact"),
    [
        (3, None, "2 would be left over"),
        (16, None, "8 sequences, gbs is 16"),
        (4, 3, "gbs is 4, mbs is 3: 1 would be left over"),
        (4, 8, "gbs is 4, mbs is 8"),
        (None, 3, "gbs is 8, mbs is 3"),
    ],
)
def test_a_remainder_is_refused_before_anything_is_computed(gbs: int | None, mbs: int | None, fact: str) -> None:
    model, optimizer = made()
    before = weights(model)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: train(Forward(model), optimizer, batch(), token_loss, gbs=gbs, mbs=mbs),
        lambda: evaluate(Forward(model), batch(), token_loss, gbs, mbs),
    )
    for call in calls:
        with pytest.raises(BatchError, match=fact) as caught:
            call()
        assert "a divisor of" in caught.value.remedy
    assert same(weights(model), before)


@pytest.mark.parametrize(("gbs", "mbs"), [(0, None), (None, 0), (-1, None), (2.0, None)])
def test_sizes_must_be_positive_whole_numbers(gbs: Any, mbs: Any) -> None:
    model, optimizer = made()
    with pytest.raises(BatchError, match=r"gbs|mbs"):
        train(Forward(model), optimizer, batch(), token_loss, gbs=gbs, mbs=mbs)


# -- what a loss must not return --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returns", "fact", "remedy"),
    [
        (lambda logits: logits.sum(), "a Tensor, not a pair", "return loss, {"),
        (lambda logits: None, "a NoneType, not a pair", "return loss, {"),
        (lambda logits: (logits.sum(), {}, 1), "a tuple, not a pair", "return loss, {"),
        (lambda logits: (1.0, {}), "a loss of type float", "return loss, {"),
        (lambda logits: (logits.sum(-1), {}), "a loss of shape [8, 5]", ".sum() / global_valid_tokens"),
        (lambda logits: (logits.sum().reshape(1), {}), "a loss of shape [1]", ".sum() / global_valid_tokens"),
        (lambda logits: (torch.tensor(1), {}), "torch.int64", ".sum() / global_valid_tokens"),
        (lambda logits: (logits.sum().detach(), {}), "no gradient", "logits.sum() * 0"),
        (lambda logits: (logits.sum(), [1]), "metrics of type list", "return loss, {"),
        (lambda logits: (logits.sum(), None), "metrics of type NoneType", "return loss, {"),
        (lambda logits: (logits.sum(), {"x": "high"}), "str", "rs.mean"),
    ],
    ids=["bare", "none", "triple", "float", "matrix", "vector", "integer", "detached", "list", "no-metrics", "text"],
)
def test_a_loss_that_returns_something_else_is_refused_with_what_to_return(
    returns: Callable[[Tensor], Any], fact: str, remedy: str
) -> None:
    model, optimizer = made()
    before = weights(model)
    with pytest.raises(ArgumentError) as caught:
        train(Forward(model), optimizer, batch(), lambda logits, *_: returns(logits))
    assert fact in caught.value.facts[0]
    assert remedy in caught.value.remedy
    assert same(weights(model), before)
    assert gradients(model) == [None] * 3


def test_evaluation_needs_no_gradient_but_the_rest_of_the_contract() -> None:
    model, _ = made()
    assert evaluate(Forward(model), batch(), lambda logits, *_: (logits.sum().detach(), {}))["loss"].shape == (1,)
    with pytest.raises(ArgumentError, match="not a pair"):
        evaluate(Forward(model), batch(), lambda logits, *_: logits.sum())  # type: ignore[arg-type,return-value]


# -- NaN --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_before_backward(bad: float) -> None:
    model, optimizer = made()
    before, backward = weights(model), []
    model.head.weight.register_hook(lambda grad: backward.append(1))
    with pytest.raises(NonFiniteError, match="the loss is not finite") as caught:
        train(Forward(model), optimizer, batch(), lambda logits, *_: (logits.sum() * bad, {}))
    assert not backward
    assert caught.value.remedy
    assert same(weights(model), before)
    assert gradients(model) == [None] * 3
    with pytest.raises(NonFiniteError):
        evaluate(Forward(model), batch(), lambda logits, *_: (logits.sum() * bad, {}))


def test_a_loss_over_nothing_says_that_nothing_counted() -> None:
    model, optimizer = made()
    masked = {**batch(), "sample_mask": torch.zeros(8)}
    with pytest.raises(NonFiniteError, match="global_valid_tokens is 0"):
        train(Forward(model), optimizer, masked, token_loss)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_gradient_that_is_not_finite_stops_before_the_optimizer(make: Any) -> None:
    model, _ = made()
    optimizer = make(model.parameters(), lr=0.1)
    train(Forward(model), optimizer, batch(), token_loss)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    handle = model.head.weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(NonFiniteError, match=r"the first is that of head\.weight") as caught:
        train(Forward(model), optimizer, batch(), token_loss, max_grad_norm=1.0)
    handle.remove()
    assert caught.value.facts[0] == "the gradient norm is nan"
    assert "1 gradients hold NaN" in caught.value.facts[1]
    assert same(weights(model), before)
    assert str(optimizer.state_dict()) == str(state)
    assert gradients(model) == [None] * 3


def test_steps_before_a_failed_one_stand_and_the_error_says_how_many() -> None:
    model, optimizer = made()
    twin, twin_optimizer = made()
    calls: list[int] = []

    def loss_fn(logits: Tensor, given: dict[str, Any], seqs: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        calls.append(1)
        loss, metrics = token_loss(logits, given, seqs, tokens)
        return loss * (math.nan if len(calls) == 2 else 1.0), metrics

    with pytest.raises(NonFiniteError) as caught:
        train(Forward(model), optimizer, batch(), loss_fn, gbs=4)
    assert caught.value.__notes__ == ["in optimizer step 2 of 2; the 1 before it stand"]
    train(Forward(twin), twin_optimizer, slice_batch(batch(), 0, 4), token_loss)
    assert same(weights(model), weights(twin))


# -- a step held open -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", [token_loss, SequenceLoss()], ids=["token", "sequence"])
@pytest.mark.parametrize("given_counts", [True, False], ids=["counts-given", "counts-summed"])
def test_a_step_of_uneven_chunks_equals_one_big_batch(loss_fn: Any, *, given_counts: bool) -> None:
    model, _ = made()
    whole, spy = batch(), Spy(model.parameters(), lr=0.1)
    expected = naive_gradients(model, whole, loss_fn)
    seqs, tokens = counts(whole)
    reference = evaluate(Forward(model), whole, loss_fn)
    options = {"global_valid_seqs": seqs, "global_valid_tokens": tokens} if given_counts else {}
    step = TrainStep(Forward(model), spy, **options)
    for start, stop, mbs in ((0, 3, 2), (3, 4, None), (4, 8, 3)):
        step.forward_backward(slice_batch(whole, start, stop), loss_fn, mbs)
    result = step.commit()
    for seen, name in zip(spy.seen, expected, strict=True):
        assert torch.allclose(seen, expected[name], atol=1e-6)
    assert torch.allclose(result["loss"], reference["loss"], atol=1e-6)
    assert result["metrics"]["nll"] == pytest.approx(reference["metrics"]["nll"], abs=1e-6)
    assert result["grad_norm"].shape == (1,)


def test_without_global_counts_sums_are_divided_and_marked_metrics_are_not() -> None:
    model, optimizer = made()
    seen: list[float] = []

    def loss_fn(logits: Tensor, given: Any, seqs: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        seen.extend((float(seqs), float(tokens)))
        return logits.sum() * 0, {"sum": 6.0, "mean": rs.mean(6.0), "min": rs.min(6.0), "max": rs.max(6.0)}

    step = TrainStep(Forward(model), optimizer)
    step.forward_backward(batch(), loss_fn)
    _, tokens = counts(batch())
    assert step.commit()["metrics"] == {"sum": pytest.approx(6.0 / tokens), "mean": 6.0, "min": 6.0, "max": 6.0}
    assert seen == [1.0, 1.0]


@pytest.mark.parametrize("loss_type", ["sequence_level", "SEQUENCE", SequenceLoss.loss_type])
def test_the_level_of_a_loss_is_read_off_strings_and_enums(loss_type: Any) -> None:
    model, optimizer = made()
    loss_fn = SequenceLoss()
    loss_fn.loss_type = loss_type
    step = TrainStep(Forward(model), optimizer)
    step.forward_backward(batch(), loss_fn)
    expected = evaluate(Forward(model), batch(), loss_fn)
    assert torch.allclose(step.commit()["loss"], expected["loss"], atol=1e-6)


def test_a_step_over_nothing_that_counts_changes_nothing() -> None:
    model, optimizer = made()
    before = weights(model)
    step = TrainStep(Forward(model), optimizer)
    step.forward_backward({**batch(), "sample_mask": torch.zeros(8)}, token_loss)
    assert not step.commit()["grad_norm"].any()
    assert same(weights(model), before)


def test_losses_of_two_levels_in_one_step_are_refused() -> None:
    model, optimizer = made()
    step = TrainStep(Forward(model), optimizer)
    step.forward_backward(batch(), token_loss)
    with pytest.raises(ArgumentError, match="normalised by tokens, this one is by sequences") as caught:
        step.forward_backward(batch(), SequenceLoss())
    assert "global_valid_seqs" in caught.value.remedy


def test_a_loss_that_uses_a_count_that_was_not_given_fails_loudly() -> None:
    model, optimizer = made()
    step = TrainStep(Forward(model), optimizer, global_valid_tokens=4.0)
    step.forward_backward(batch(), token_loss)
    with pytest.raises(NonFiniteError, match="global_valid_seqs was not given"):
        step.forward_backward(batch(), SequenceLoss())


def test_the_scheduler_of_a_commit_can_be_left_out() -> None:
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step_scheduler, lr in ((False, 0.1), (True, 0.05)):
        step = TrainStep(Forward(model), optimizer, scheduler=scheduler)
        step.forward_backward(batch(), token_loss)
        step.commit(step_scheduler)
        assert scheduler.get_last_lr() == [lr]


def test_abort_discards_gradients_and_leaves_weights_and_optimizer() -> None:
    model, optimizer = made()
    before = weights(model)
    step = TrainStep(Forward(model), optimizer)
    step.forward_backward(batch(), token_loss)
    assert all(grad is not None for grad in gradients(model))
    step.abort()
    step.abort()
    assert gradients(model) == [None] * 3
    assert same(weights(model), before)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_closed_step_refuses_more(end: str) -> None:
    model, optimizer = made()
    step = TrainStep(Forward(model), optimizer)
    step.forward_backward(batch(), token_loss)
    getattr(step, end)()
    for call in (lambda: step.forward_backward(batch(), token_loss), step.commit):
        with pytest.raises(StepClosedError, match=r"commit|abort") as caught:
            call()
        assert "begin_step" in caught.value.remedy


def test_abort_after_a_commit_does_nothing() -> None:
    model, optimizer = made()
    step = TrainStep(Forward(model), optimizer)
    step.forward_backward(batch(), token_loss)
    step.commit()
    model.head.weight.grad = torch.ones_like(model.head.weight)  # of somebody else's backward
    step.abort()
    assert model.head.weight.grad is not None


def test_a_step_with_half_a_chunk_cannot_be_committed() -> None:
    model, optimizer = made()
    calls: list[int] = []

    def loss_fn(logits: Tensor, *_: Any) -> tuple[Tensor, dict[str, Any]]:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return logits.sum(), {}

    step = TrainStep(Forward(model), optimizer)
    with pytest.raises(ZeroDivisionError):
        step.forward_backward(batch(), loss_fn, 4)
    for call in (lambda: step.forward_backward(batch(), token_loss), step.commit):
        with pytest.raises(StepClosedError, match="incomplete"):
            call()
    step.abort()
    assert gradients(model) == [None] * 3


def test_a_bad_batch_does_not_cost_the_step() -> None:
    model, optimizer = made()
    step = TrainStep(Forward(model), optimizer)
    with pytest.raises(BatchError):
        step.forward_backward({"input_ids": 1}, token_loss)
    with pytest.raises(BatchError):
        step.forward_backward(batch(), token_loss, 0)
    step.forward_backward(batch(), token_loss)
    step.commit()


def test_an_empty_step_cannot_be_committed() -> None:
    model, optimizer = made()
    with pytest.raises(ArgumentError, match="empty train step"):
        TrainStep(Forward(model), optimizer).commit()


# -- masters, and an optimizer that fails -----------------------------------------------------------------------------


def mastered() -> tuple[Tiny, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Tiny().to(torch.bfloat16)
    return model, [(p, p.detach().float().requires_grad_()) for p in model.parameters()]


def test_masters_are_stepped_in_float32_and_written_back() -> None:
    model, masters = mastered()
    spy = Spy([master for _, master in masters], lr=0.1)
    before = [master.clone() for _, master in masters]
    expected = naive_gradients(model, batch(), token_loss)
    result = train(Forward(model), spy, batch(), token_loss, masters=masters)
    assert [grad.dtype for grad in spy.seen] == [torch.float32] * 3
    for seen, want in zip(spy.seen, expected.values(), strict=True):
        assert torch.equal(seen, want.float())
    for (parameter, master), old, grad in zip(masters, before, spy.seen, strict=True):
        assert torch.allclose(master, old - 0.1 * grad, atol=1e-7, rtol=0)  # far below what bfloat16 resolves
        assert torch.equal(parameter, master.to(torch.bfloat16))
        assert parameter.grad is None
        assert master.grad is None
    assert float(result["grad_norm"]) > 0


def test_the_gradient_of_a_master_is_named_by_its_parameter() -> None:
    model, masters = mastered()
    optimizer = torch.optim.SGD([master for _, master in masters], lr=0.1)
    model.embed.weight.register_hook(lambda grad: grad * math.inf)
    before = weights(model)
    with pytest.raises(NonFiniteError, match=r"embed\.weight"):
        train(Forward(model), optimizer, batch(), token_loss, masters=masters)
    assert same(weights(model), before)
    assert all(master.grad is None for _, master in masters)


@pytest.mark.parametrize("error", [ValueError("half-way"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_optimizer_that_fails_half_way_is_told_apart(error: BaseException) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)
            raise error

    model, _ = made()
    optimizer = Failing(model.parameters(), lr=0.1)
    with pytest.raises(OptimizerStepFailed) as caught:
        train(Forward(model), optimizer, batch(), token_loss)
    assert caught.value.cause is error
    assert caught.value.__cause__ is error
    assert gradients(model) == [None] * 3


def test_a_scheduler_that_fails_comes_after_a_step_that_stands() -> None:
    class Failing:
        def step(self) -> None:
            raise ValueError("no more rates")

    model, optimizer = made()
    before = weights(model)
    with pytest.raises(ValueError, match="no more rates"):
        train(Forward(model), optimizer, batch(), token_loss, scheduler=Failing())
    assert not same(weights(model), before)
    assert gradients(model) == [None] * 3


@pytest.mark.gpu
def test_on_a_gpu_a_cpu_batch_trains_as_on_the_cpu() -> None:
    model, optimizer = made()
    twin = copy.deepcopy(model).cuda()
    fused = torch.optim.SGD(twin.parameters(), lr=0.1, fused=True)
    here = train(Forward(model), optimizer, batch(), token_loss, gbs=4, mbs=2, max_grad_norm=1.0)
    there = train(Forward(twin), fused, batch(), token_loss, gbs=4, mbs=2, max_grad_norm=1.0)
    assert there["loss"].device.type == "cpu"
    assert torch.allclose(here["loss"], there["loss"], atol=1e-5)
    assert torch.allclose(here["grad_norm"], there["grad_norm"], atol=1e-5)
    assert same(weights(model), weights(twin.cpu()), atol=1e-5)
