"""Log-probabilities, top-k logits, scores and values, against naive references."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2ForSequenceClassification, LlamaConfig, LlamaForCausalLM

from rl_session.errors import ArgumentError, BatchError, NonFiniteError, UnsupportedError
from rl_session.workers import compute
from rl_session.workers.compute import Forward, get_logprobs, get_topk_logits, get_values, module_mode, score

VOCABULARY = 17


class Tiny(nn.Module):
    """An embedding and a linear layer; logits of a position depend on its token alone."""

    def __init__(self, outputs: int = VOCABULARY, *, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, outputs, bias=bias)

    def forward(self, input_ids: Tensor) -> Any:
        return self.head(self.dropout(self.embed(input_ids)))


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).eval()


def batch(num: int = 4, length: int = 7) -> dict[str, Any]:
    torch.manual_seed(num * 100 + length)
    lengths = torch.randint(1, length + 1, (num,))
    lengths[0] = length
    return {"input_ids": torch.randint(0, VOCABULARY, (num, length)), "input_lengths": lengths}


def naive_logprobs(logits: Tensor, given: dict[str, Any], temperature: float = 1.0) -> Tensor:
    logprobs = torch.log_softmax(logits.detach().float() / temperature, dim=-1)
    ids = given["input_ids"]
    result = torch.zeros(ids.shape)
    result[:, 1:] = logprobs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return result * (torch.arange(ids.shape[1]) < given["input_lengths"][:, None])


class Watch(TorchDispatchMode):
    """Remembers the size of every float32 storage made, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in before:
                self.sizes.append(tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num", "length"), [(4, 7), (1, 1), (3, 2), (2, 3), (5, 16)])
def test_logprobs_are_bit_identical_to_a_naive_log_softmax(
    num: int, length: int, dtype: torch.dtype, temperature: float
) -> None:
    model, given = Tiny().to(dtype).eval(), batch(num, length)
    expected = naive_logprobs(model(given["input_ids"]), given, temperature)
    result = get_logprobs(Forward(model), given, temperature=temperature)["logprobs"]
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)


@pytest.mark.parametrize("elements", [1, 40, 400, 2**30])
def test_the_size_of_chunks_changes_no_bit(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(compute, "_CHUNK_ELEMENTS", elements)
    model, given = Tiny().eval(), batch(3, 11)
    result = get_logprobs(Forward(model, temperature=1.3), given)["logprobs"]
    assert torch.equal(result, naive_logprobs(model(given["input_ids"]), given, 1.3))


def test_a_wide_vocabulary_is_bit_identical_too() -> None:
    logits = torch.randn(2, 5, 3001)
    given = batch(2, 5)
    result = get_logprobs(Forward(nn.Identity(), forward_fn=lambda model, batch: logits), given)["logprobs"]
    assert torch.equal(result, naive_logprobs(logits, given))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num", "length"), [(4, 2), (4, 3), (2, 9), (1, 64)])
def test_nothing_as_large_as_the_logits_is_allocated_beside_them(
    num: int, length: int, dtype: torch.dtype, temperature: float
) -> None:
    given = batch(num, length)
    logits = torch.randn(num, length, 499, dtype=dtype)
    forward = Forward(nn.Identity(), forward_fn=lambda model, batch: logits)
    with Watch() as watch:
        get_logprobs(forward, given, temperature=temperature)
    assert watch.sizes
    assert max(watch.sizes) < logits.numel() * 4


def test_temperature_leaves_the_models_own_tensor_as_it_was() -> None:
    logits = torch.randn(2, 5, VOCABULARY)
    kept = logits.clone()
    forward = Forward(nn.Identity(), forward_fn=lambda model, batch: logits, temperature=0.3)
    get_logprobs(forward, batch(2, 5))
    get_topk_logits(forward, batch(2, 5), 2)
    forward.logits(batch(2, 5))
    assert torch.equal(logits, kept)


def test_a_temperature_given_to_the_call_wins() -> None:
    model, given = Tiny().eval(), batch()
    result = get_logprobs(Forward(model, temperature=5.0), given, temperature=2.0)["logprobs"]
    assert torch.equal(result, naive_logprobs(model(given["input_ids"]), given, 2.0))


def test_the_first_entry_and_the_padding_are_zero() -> None:
    given = batch(6, 9)
    result = get_logprobs(Forward(Tiny()), given)["logprobs"]
    beyond = torch.arange(9) >= given["input_lengths"][:, None]
    assert not result[:, 0].any()
    assert not result[beyond].any()
    assert (result[~beyond][1:] <= 0).all()


def test_micro_batches_come_back_in_the_order_of_the_caller() -> None:
    model, given = llama(), batch(7, 6)
    whole = get_logprobs(Forward(model), given)["logprobs"]
    for mbs in (1, 2, 3, 100):
        assert torch.allclose(get_logprobs(Forward(model), given, mbs=mbs)["logprobs"], whole, atol=1e-6)


def test_the_key_of_the_result_can_be_chosen() -> None:
    assert list(get_logprobs(Forward(Tiny()), batch(), key="reference_logprobs")) == ["reference_logprobs"]


def test_a_hugging_face_model_gets_the_padding_and_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = llama(), batch(3, 5)
    seen: dict[str, Any] = {}
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    result = get_logprobs(Forward(model), given)["logprobs"]
    handle.remove()
    assert torch.equal(seen["attention_mask"], (torch.arange(5) < given["input_lengths"][:, None]).long())
    assert seen["use_cache"] is False
    logits = model(input_ids=given["input_ids"], attention_mask=seen["attention_mask"], use_cache=False).logits
    assert torch.equal(result, naive_logprobs(logits, given))


def test_padding_does_not_reach_the_tokens_before_it() -> None:
    model, given = llama(), batch(3, 6)
    padded = {**given, "input_ids": given["input_ids"].clone()}
    padded["input_ids"][torch.arange(6) >= given["input_lengths"][:, None]] = 0
    assert torch.equal(
        get_logprobs(Forward(model), given)["logprobs"], get_logprobs(Forward(model), padded)["logprobs"]
    )


def test_peft_is_looked_through_for_the_signature_and_called_as_given() -> None:
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    given, calls = batch(2, 5), []
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    adapted = get_logprobs(Forward(model), given)["logprobs"]
    handle.remove()
    assert sorted(calls[0]) == ["attention_mask", "input_ids", "use_cache"]
    with model.disable_adapter():
        assert not torch.equal(get_logprobs(Forward(model), given)["logprobs"], adapted)


def test_a_compiled_wrapper_is_called_and_not_what_is_inside() -> None:
    model, given = Tiny().eval(), batch()
    wrapper = torch.compile(model, backend="eager")
    calls: list[int] = []
    wrapper.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(args) + len(kwargs)), with_kwargs=True
    )
    result = get_logprobs(Forward(wrapper), given)["logprobs"]
    assert calls == [1]
    assert torch.equal(result, get_logprobs(Forward(model), given)["logprobs"])


def test_a_module_whose_argument_has_another_name_is_called_by_position() -> None:
    model, given = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)), batch()
    result = get_logprobs(Forward(model), given)["logprobs"]
    assert torch.equal(result, naive_logprobs(model(given["input_ids"]), given))


@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, lambda x: {"logits": x}, lambda x: SimpleNamespace(logits=x)],
    ids=["tensor", "mapping", "attribute"],
)
def test_logits_are_found_in_whatever_a_model_returns(wrap: Any) -> None:
    model, given = Tiny(), batch()
    forward = Forward(model, forward_fn=lambda model, batch: wrap(model(batch["input_ids"])))
    assert torch.equal(get_logprobs(forward, given)["logprobs"], get_logprobs(Forward(model), given)["logprobs"])


@pytest.mark.parametrize(
    "output",
    [
        None,
        (torch.zeros(4, 7, 3),),
        {"scores": torch.zeros(4)},
        torch.zeros(4, 7),
        torch.zeros(4, 6, 3),
        torch.zeros(28, 3),
        torch.zeros(4, 7, 3, dtype=torch.int64),
    ],
)
def test_what_is_no_logits_is_refused_with_the_way_out(output: Any) -> None:
    forward = Forward(Tiny(), forward_fn=lambda model, batch: output, label="policy 'actor'")
    with pytest.raises(UnsupportedError, match="policy 'actor': forward_fn returned") as caught:
        get_logprobs(forward, batch())
    assert "forward_fn=" in caught.value.remedy


def test_nan_is_an_error_that_names_the_rows() -> None:
    given = batch(4, 5)
    given["input_lengths"] = torch.tensor([5, 1, 5, 5])
    logits = torch.zeros(4, 5, VOCABULARY)
    logits[1:3] = math.nan  # row 1 has no entry that counts
    with pytest.raises(NonFiniteError) as caught:
        get_logprobs(Forward(nn.Identity(), forward_fn=lambda model, batch: logits), given)
    assert caught.value.facts == ("1 of 4 rows hold NaN: 2",)
    assert "weights" in caught.value.remedy


def test_nan_in_the_padding_is_no_error() -> None:
    given = batch(2, 5)
    given["input_lengths"] = torch.tensor([3, 3])
    logits = torch.zeros(2, 5, VOCABULARY)
    logits[:, 3:] = math.nan
    result = get_logprobs(Forward(nn.Identity(), forward_fn=lambda model, batch: logits), given)["logprobs"]
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf, "1", True])
def test_a_temperature_that_cannot_divide_is_refused(temperature: Any) -> None:
    with pytest.raises(ArgumentError, match="temperature"):
        Forward(Tiny(), temperature=temperature)
    with pytest.raises(ArgumentError, match="temperature"):
        get_logprobs(Forward(Tiny()), batch(), temperature=temperature)


def test_a_token_beyond_the_vocabulary_is_refused_before_the_forward() -> None:
    given = batch(3, 5)
    given["input_ids"][1, 2] = VOCABULARY
    with pytest.raises(BatchError, match=f"vocabulary of {VOCABULARY}") as caught:
        get_logprobs(Forward(llama()), given)
    assert "row 1" in caught.value.facts[0]
    assert "resize_token_embeddings" in caught.value.remedy


@pytest.mark.parametrize(
    "call", [get_logprobs, get_values, score, lambda forward, bad: get_topk_logits(forward, bad, 1)]
)
def test_every_call_checks_its_batch(call: Any) -> None:
    with pytest.raises(BatchError, match="input_lengths"):
        call(Forward(Tiny()), {"input_ids": torch.zeros(1, 2, dtype=torch.int64)})


def test_inference_uses_no_autograd_makes_no_inference_tensors_and_puts_dropout_back() -> None:
    model, given = Tiny().train(), batch()
    seen: list[tuple[bool, bool, bool]] = []
    model.head.register_forward_hook(
        lambda module, args, out: seen.append(
            (module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        )
    )
    first = get_logprobs(Forward(model), given)["logprobs"]
    with torch.inference_mode():
        second = get_logprobs(Forward(model), given)["logprobs"]
    assert seen == [(False, False, False)] * 2
    assert torch.equal(first, second)  # no dropout
    assert not second.is_inference()
    assert all(part.training for part in model.modules())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("mbs", [None, 1, 3])
def test_top_k_logits_predict_the_next_token(mbs: int | None) -> None:
    model, given = Tiny().eval(), batch(4, 6)
    result = get_topk_logits(Forward(model, temperature=2.0), given, 3, mbs)
    expected = torch.topk(model(given["input_ids"]).detach()[:, :-1] / 2.0, 3, dim=-1)
    assert torch.equal(result["topk_indices"], expected.indices)
    assert torch.equal(result["topk_logits"], expected.values)
    assert (result["topk_logits"].dtype, result["topk_indices"].dtype) == (torch.float32, torch.int64)


def test_top_k_of_a_single_position_is_empty() -> None:
    assert get_topk_logits(Forward(Tiny()), batch(2, 1), 3)["topk_logits"].shape == (2, 0, 3)


@pytest.mark.parametrize("k", [0, -1, VOCABULARY + 1, 2.5, "3", True])
def test_k_out_of_range_is_refused(k: Any) -> None:
    with pytest.raises(ArgumentError, match=f"k={k!r} is out of range") as caught:
        get_topk_logits(Forward(Tiny()), batch(), k)
    assert "k=" in caught.value.remedy


def test_nan_among_top_k_logits_is_an_error_where_a_token_follows() -> None:
    given = batch(2, 5)
    given["input_lengths"] = torch.tensor([5, 2])
    logits = torch.zeros(2, 5, VOCABULARY)
    logits[1, 1:] = math.nan
    forward = Forward(nn.Identity(), forward_fn=lambda model, batch: logits)
    assert get_topk_logits(forward, given, 2)["topk_indices"].shape == (2, 4, 2)
    logits[0, 2, 4] = math.nan
    with pytest.raises(NonFiniteError, match="hold NaN: 0"):
        get_topk_logits(forward, given, 2)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_scores_are_one_number_a_sequence(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(4.0)
    forward = Forward(nn.Identity(), forward_fn=lambda model, batch: numbers.reshape(shape))
    assert torch.equal(score(forward, batch(4, 5))["scores"], numbers)


def test_a_score_for_each_token_is_read_at_the_last_valid_one() -> None:
    given = batch(4, 6)
    grid = torch.arange(24.0).reshape(4, 6, 1)
    forward = Forward(nn.Identity(), forward_fn=lambda model, batch: grid)
    expected = grid[torch.arange(4), given["input_lengths"] - 1, 0]
    assert torch.equal(score(forward, given)["scores"], expected)


def test_a_hugging_face_reward_model_scores_in_micro_batches() -> None:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=16, num_labels=1, pad_token_id=0
    )
    model, given = GPT2ForSequenceClassification(config).eval(), batch(5, 6)
    whole = score(Forward(model), given)["scores"]
    assert whole.shape == (5,)
    assert torch.allclose(score(Forward(model), given, 2)["scores"], whole, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1)])
def test_values_are_one_number_a_token_and_zero_beyond(shape: tuple[int, ...]) -> None:
    given = batch(4, 5)
    forward = Forward(nn.Identity(), forward_fn=lambda model, batch: torch.full(shape, 2.0, dtype=torch.bfloat16))
    values = get_values(forward, given)["values"]
    assert values.dtype == torch.float32
    assert torch.equal(values, 2.0 * (torch.arange(5) < given["input_lengths"][:, None]))


def test_values_of_a_critic_come_in_micro_batches() -> None:
    model, given = Tiny(outputs=1).eval(), batch(5, 6)
    expected = model(given["input_ids"]).detach().squeeze(-1) * (torch.arange(6) < given["input_lengths"][:, None])
    assert torch.allclose(get_values(Forward(model), given, 2)["values"], expected, atol=1e-7)


@pytest.mark.parametrize("call", [score, get_values])
def test_logits_are_neither_scores_nor_values(call: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"the model \(Tiny\) returned shape \[4, 7, 17\]") as caught:
        call(Forward(Tiny()), batch())
    assert "forward_fn=" in caught.value.remedy


@pytest.mark.parametrize(("call", "shape"), [(score, (4,)), (get_values, (4, 7))])
def test_nan_scores_and_values_are_errors(call: Any, shape: tuple[int, ...]) -> None:
    forward = Forward(nn.Identity(), forward_fn=lambda model, batch: torch.full(shape, math.nan))
    with pytest.raises(NonFiniteError, match="4 of 4 rows"):
        call(forward, batch())


@pytest.mark.parametrize(("bias", "in_place"), [(False, True), (True, False)])
def test_training_logits_are_divided_in_place_where_nothing_else_needs_them(*, bias: bool, in_place: bool) -> None:
    model, given = Tiny(bias=bias).eval(), batch(2, 5)
    returned: list[Tensor] = []
    model.register_forward_hook(lambda module, args, out: returned.append(out))
    expected = (model(given["input_ids"]) / 0.7).detach()
    logits = Forward(model, temperature=0.7).logits(given)
    assert torch.equal(logits, expected)
    assert (logits is returned[-1]) is in_place
    logits.sum().backward()
    weight_grad = model.head.weight.grad
    model.zero_grad()
    (model(given["input_ids"]) / 0.7).sum().backward()
    assert weight_grad is not None
    assert torch.equal(weight_grad, model.head.weight.grad)


def test_a_model_that_needs_its_output_in_backward_keeps_it() -> None:
    class Capped(Tiny):
        def forward(self, input_ids: Tensor) -> Tensor:
            return torch.tanh(super().forward(input_ids))

    Forward(Capped(), temperature=0.7).logits(batch()).sum().backward()


def test_train_keeps_frozen_submodules_frozen_and_restores_each_module() -> None:
    model = Tiny().train()
    model.dropout.eval()
    with module_mode(model, "train"):
        assert (model.training, model.head.training, model.dropout.training) == (True, True, False)
    assert (model.training, model.head.training, model.dropout.training) == (True, True, False)


def test_train_wakes_everything_under_a_root_in_eval() -> None:
    model = Tiny().eval()
    model.head.train()
    with module_mode(model, "train"):
        assert all(part.training for part in model.modules())
    assert [part.training for part in (model, model.embed, model.dropout, model.head)] == [False, False, False, True]


def test_eval_reaches_everything_and_is_undone_by_an_error_too() -> None:
    model = Tiny().train()
    model.dropout.eval()
    with pytest.raises(KeyError):
        with module_mode(model, "eval"):
            assert not any(part.training for part in model.modules())
            raise KeyError
    assert [part.training for part in (model, model.embed, model.dropout, model.head)] == [True, True, False, True]


def test_the_mode_of_a_compiled_wrapper_is_restored() -> None:
    model = Tiny().train()
    wrapper = torch.compile(model, backend="eager")
    with module_mode(wrapper, "eval"):
        assert not model.training
    assert model.training
    assert model.dropout.training


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_results_come_back_on_the_cpu_and_memory_is_bounded(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 512, 32_000, dtype=dtype, device="cuda")
    given = batch(4, 512)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward = Forward(nn.Identity(), forward_fn=lambda model, batch: logits, device="cuda")
    result = get_logprobs(forward, given, temperature=0.9)["logprobs"]
    extra = torch.cuda.max_memory_allocated() - before
    assert result.device.type == "cpu"
    assert extra < logits.numel() * 4
    expected = torch.log_softmax(logits.float() / 0.9, dim=-1)[:, :-1].cpu()
    picked = expected.gather(-1, given["input_ids"][:, 1:, None]).squeeze(-1)
    mask = torch.arange(512)[1:] < given["input_lengths"][:, None]
    assert torch.equal(result[:, 1:], picked * mask)
