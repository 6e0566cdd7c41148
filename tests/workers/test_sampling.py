"""Sampling: cached against recomputed, drawn against counted, and every way to ask for the impossible."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rl_session.errors import BatchError, ConfigError, NonFiniteError, UnsupportedError
from rl_session.workers import sampling
from rl_session.workers.compute import Forward, get_logprobs
from rl_session.workers.sampling import SamplingParams, sample

VOCABULARY = 31
POSITIONS = 64


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,  # tokens are told apart by more than rounding
        use_cache=False,  # what training sets; the call asks for a cache all the same
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, initializer_range=0.3
    )
    return GPT2LMHeadModel(config)


class Bigram(nn.Module):
    """Logits that depend on the last token alone, from a table."""

    def __init__(self, table: Tensor | None = None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY) if table is None else table)
        self.dropout = nn.Dropout(0.5)
        self.widths: list[tuple[int, int]] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        self.widths.append(tuple(input_ids.shape))
        return self.dropout(self.table[input_ids])


def counting(stop: int = 3) -> Bigram:
    """The next token is one more, up to ``stop`` and then 0 again: greedy responses are known."""
    table = torch.full((VOCABULARY, VOCABULARY), -5.0)
    for token in range(VOCABULARY):
        table[token, token + 1 if token < stop else 0] = 5.0
    return Bigram(table)


def prompts(num: int = 6, length: int = 9) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(num)
    lengths = torch.randint(1, length + 1, (num,), generator=rng)
    lengths[0], lengths[-1] = length, 1 if num > 1 else length
    return {"input_ids": torch.randint(0, VOCABULARY, (num, length), generator=rng), "input_lengths": lengths}


def rows_of(batch: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {key: value[rows] for key, value in batch.items()}


def recompute(module: nn.Module, batch: dict[str, Any]) -> Tensor:
    logits: Tensor = module(batch["input_ids"], use_cache=False).logits
    return logits


def responses(result: dict[str, Tensor]) -> list[list[int]]:
    parts = zip(result["output_ids"], result["generation_lengths"], result["unpadded_sequence_lengths"], strict=True)
    return [row[int(end - num) : int(end)].tolist() for row, num, end in parts]


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for key in ("output_ids", "generation_lengths", "unpadded_sequence_lengths"):
        assert torch.equal(left[key], right[key]), key
    torch.testing.assert_close(left["logprobs"], right["logprobs"], atol=1e-4, rtol=1e-4)


@pytest.fixture(params=[llama, gpt2], ids=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    built: nn.Module = request.param()
    return built


# -- results -----------------------------------------------------------------------------------------------------------


def test_a_result_is_prompt_then_response_then_padding_on_the_cpu_in_the_callers_order() -> None:
    batch = {"input_ids": torch.tensor([[9, 0], [7, 2], [1, 9]]), "input_lengths": torch.tensor([1, 2, 1])}

    result = sample(counting(), batch, SamplingParams(temperature=0, max_new_tokens=4, stop_ids=[3], pad_id=77))

    assert result["output_ids"].tolist() == [[9, 0, 1, 2, 3], [7, 2, 3, 77, 77], [1, 2, 3, 77, 77]]
    assert result["generation_lengths"].tolist() == [4, 1, 2]
    assert result["unpadded_sequence_lengths"].tolist() == [5, 3, 3]
    dtypes = {key: value.dtype for key, value in result.items()}
    assert dtypes.pop("logprobs") == torch.float32
    assert set(dtypes.values()) == {torch.int64}
    assert all(value.device.type == "cpu" for value in result.values())
    assert (result["logprobs"] != 0).tolist() == [
        [False, True, True, True, True],
        [False, False, True, False, False],
        [False, True, True, False, False],
    ]


def test_the_callers_batch_is_left_as_it_is() -> None:
    batch = prompts()
    batch["input_lengths"] = batch["input_lengths"].to(torch.int32)
    before = {key: value.clone() for key, value in batch.items()}

    sample(llama(), batch, SamplingParams(max_new_tokens=5, seed=1))
    sample(Bigram(), batch, SamplingParams(max_new_tokens=5, seed=1))

    assert all(torch.equal(batch[key], before[key]) for key in before)


@pytest.mark.parametrize("temperature", [0, 1.0], ids=["greedy", "sampled"])
def test_cached_equals_recomputed_for_prompts_of_mixed_lengths(model: nn.Module, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=16, stop_ids=(4, 5), seed=3)

    cached = sample(model, prompts(), params)
    recomputed = sample(model, prompts(), params, forward_fn=recompute)

    assert_same(cached, recomputed)
    assert cached["generation_lengths"].min() < cached["generation_lengths"].max(), (
        "some stop early, or it shows little"
    )


def test_a_cached_forward_sees_the_prompt_once_and_then_one_token_of_each_running_row() -> None:
    shapes: list[tuple[int, ...]] = []
    module = llama()
    module.model.embed_tokens.register_forward_hook(lambda _, args, __: shapes.append(tuple(args[0].shape)))

    result = sample(module, prompts(), SamplingParams(temperature=0, max_new_tokens=16, stop_ids=(4, 5)))

    lengths = result["generation_lengths"]
    running = [int((lengths > step).sum()) for step in range(16)]
    assert shapes == [(6, 9), *[(num, 1) for num in running[1:] if num]]


def test_one_prompt_gives_what_it_gives_among_others(model: nn.Module) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=8, stop_ids=(4, 5))
    together = responses(sample(model, prompts(), params))

    alone = [responses(sample(model, rows_of(prompts(), slice(row, row + 1)), params))[0] for row in range(6)]

    assert alone == together


def test_one_new_token_takes_one_forward() -> None:
    module = counting()
    result = sample(module, prompts(num=1), SamplingParams(temperature=0, max_new_tokens=1))

    assert module.widths == [(1, 9)]
    assert result["output_ids"].shape == (1, 10)
    assert result["generation_lengths"].tolist() == [1]


def test_prompts_without_padding_are_sampled_too(model: nn.Module) -> None:
    batch = prompts() | {"input_lengths": torch.full((6,), 9)}
    params = SamplingParams(temperature=0, max_new_tokens=8)

    assert_same(sample(model, batch, params), sample(model, batch, params, forward_fn=recompute))


def test_columns_that_are_padding_in_every_row_are_not_computed() -> None:
    module = counting()
    batch = {"input_ids": torch.zeros(2, 50, dtype=torch.int64), "input_lengths": torch.tensor([1, 3])}

    result = sample(module, batch, SamplingParams(temperature=0, max_new_tokens=2))

    assert module.widths == [(2, 3), (2, 4)]
    assert result["output_ids"].shape == (2, 5)


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "temperature"),
    [
        (SamplingParams(), 1.0),
        (SamplingParams(temperature=0.6), 0.6),
        (SamplingParams(temperature=1.7, stop_ids=(4, 5)), 1.7),
        (SamplingParams(temperature=0), 1.0),
        (SamplingParams(temperature=0.6, top_k=5, top_p=0.5), 0.6),
    ],
    ids=["plain", "cold", "hot", "greedy is at 1", "before top_k and top_p"],
)
def test_logprobs_are_those_a_policy_computes_for_the_result(
    model: nn.Module, params: SamplingParams, temperature: float
) -> None:
    result = sample(model, prompts(), attrs.evolve(params, max_new_tokens=12, seed=5))

    full = {"input_ids": result["output_ids"], "input_lengths": result["unpadded_sequence_lengths"]}
    computed = get_logprobs(Forward(model.eval()), full, temperature=temperature)["logprobs"]

    positions = torch.arange(computed.shape[1])
    response = (positions >= prompts()["input_lengths"][:, None]) & (
        positions < result["unpadded_sequence_lengths"][:, None]
    )
    torch.testing.assert_close(result["logprobs"], computed * response, atol=1e-4, rtol=1e-4)


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_a_row_ends_with_the_first_stop_token_it_samples_and_a_stop_token_in_a_prompt_ends_nothing() -> None:
    batch = {"input_ids": torch.tensor([[3, 0, 1], [2, 3, 3]]), "input_lengths": torch.tensor([3, 2])}

    result = sample(counting(), batch, SamplingParams(temperature=0, max_new_tokens=9, stop_ids=(20, 3)))

    assert responses(result) == [[2, 3], [0, 1, 2, 3]]


def test_sampling_ends_when_all_rows_have_and_rows_that_ended_are_not_computed() -> None:
    module = counting()
    batch = {"input_ids": torch.tensor([[0], [2], [1]]), "input_lengths": torch.ones(3, dtype=torch.int64)}

    sample(module, batch, SamplingParams(temperature=0, max_new_tokens=50, stop_ids=(3,)))

    assert module.widths == [(3, 1), (2, 2), (1, 3)]


def test_in_lockstep_every_forward_is_made_and_the_result_is_the_same() -> None:
    module, params = counting(), SamplingParams(temperature=0, max_new_tokens=8, stop_ids=(3,))
    batch = {"input_ids": torch.tensor([[0], [2]]), "input_lengths": torch.ones(2, dtype=torch.int64)}

    in_step = sample(module, batch, params, lockstep=True)

    assert len(module.widths) == 8
    assert_same(in_step, sample(module, batch, params))
    cached = attrs.evolve(params, stop_ids=tuple(range(VOCABULARY)))
    assert_same(sample(llama(), batch, cached, lockstep=True), sample(llama(), batch, cached))


# -- drawing -----------------------------------------------------------------------------------------------------------


def test_top_k_of_1_and_a_tiny_top_p_equal_greedy(model: nn.Module) -> None:
    greedy = sample(model, prompts(), SamplingParams(temperature=0, max_new_tokens=8))

    one = sample(model, prompts(), SamplingParams(top_k=1, max_new_tokens=8, seed=1))
    tiny = sample(model, prompts(), SamplingParams(top_p=1e-9, max_new_tokens=8, seed=1))
    both = sample(model, prompts(), SamplingParams(top_k=7, top_p=1e-9, max_new_tokens=8, seed=1))

    assert_same(one, greedy)
    assert_same(tiny, greedy)
    assert_same(both, greedy)


def test_ties_go_to_the_first_token_however_greedy_is_asked_for() -> None:
    module = Bigram(torch.zeros(VOCABULARY, VOCABULARY))
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_p=1e-9)):
        assert responses(sample(module, prompts(num=3), attrs.evolve(params, max_new_tokens=2))) == [[0, 0]] * 3


PROBABILITIES = (0.4, 0.3, 0.2, 0.1)


def frequencies(params: SamplingParams, num: int = 20_000) -> list[float]:
    """How often each of four tokens is drawn from PROBABILITIES, in the odd order 2, 0, 3, 1."""
    probabilities = torch.tensor([PROBABILITIES[place] for place in (2, 0, 3, 1)])
    module = Bigram(probabilities.log().expand(4, 4).clone())
    batch = {"input_ids": torch.zeros(num, 1, dtype=torch.int64), "input_lengths": torch.ones(num, dtype=torch.int64)}
    drawn = sample(module, batch, attrs.evolve(params, max_new_tokens=2, seed=11))["output_ids"][:, 1:]
    counted = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
    return [float(counted[place]) for place in (1, 3, 0, 2)]


@pytest.mark.parametrize(
    ("params", "weights"),
    [
        (SamplingParams(), PROBABILITIES),
        (SamplingParams(top_k=9, top_p=1), PROBABILITIES),
        (SamplingParams(temperature=0.5), tuple(p**2 for p in PROBABILITIES)),
        (SamplingParams(top_k=2), (0.4, 0.3, 0, 0)),
        (SamplingParams(top_p=0.69), (0.4, 0.3, 0, 0)),
        (SamplingParams(top_p=0.71), (0.4, 0.3, 0.2, 0)),
        (SamplingParams(top_k=3, top_p=0.75), (0.4, 0.3, 0, 0)),  # of 0.9, 0.7 is enough
        (SamplingParams(top_k=3, top_p=0.8), (0.4, 0.3, 0.2, 0)),
    ],
    ids=["plain", "off", "temperature", "top_k", "top_p below", "top_p above", "both below", "both above"],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(
    params: SamplingParams, weights: tuple[float, ...]
) -> None:
    expected = [weight / sum(weights) for weight in weights]

    drawn = frequencies(params)

    assert drawn == pytest.approx(expected, abs=0.01)  # four standard deviations of 40,000 draws
    assert [share == 0 for share in drawn] == [share == 0 for share in expected]


def test_a_token_of_probability_zero_is_never_drawn_even_at_the_ends_of_the_unit_interval() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    logprobs = torch.log_softmax(logits, dim=-1).expand(3, 5)
    noise = torch.tensor([0.0, 0.5, 1 - 2**-52], dtype=torch.float64)

    drawn = [
        sampling._draw(logprobs, noise, params).tolist()
        for params in (SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(top_k=4))
    ]

    assert drawn == [[1, 3, 3]] * 3


def test_the_random_numbers_are_those_of_splitmix64() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]  # seed 0

    assert [value % 2**64 for value in sampling._mix(torch.arange(4)).tolist()] == published


def test_random_numbers_are_uniform_and_neither_rows_nor_positions_nor_streams_resemble_each_other() -> None:
    noise = torch.stack([sampling._noise(sampling._key(SamplingParams(seed=0), None, n), 0, 300, 300) for n in (0, 1)])

    assert noise.min() >= 0
    assert noise.max() < 1
    assert torch.histc(noise.float(), bins=10, min=0, max=1) / noise.numel() == pytest.approx(0.1, abs=0.003)
    assert noise.unique().numel() == noise.numel()
    for other in (noise.roll(1, dims=0), noise.roll(1, dims=1), noise.roll(1, dims=2)):
        assert abs(float(torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1])) < 0.01


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_whatever_the_global_generator_and_leaves_it_alone(model: nn.Module) -> None:
    params = SamplingParams(max_new_tokens=8, seed=7)
    torch.manual_seed(1)
    first = sample(model, prompts(), params)
    torch.manual_seed(2)
    before = torch.get_rng_state()

    second = sample(model, prompts(), params)

    assert torch.equal(torch.get_rng_state(), before)
    assert_same(first, second)
    assert torch.equal(first["logprobs"], second["logprobs"])
    assert responses(first) != responses(sample(model, prompts(), attrs.evolve(params, seed=8)))
    assert responses(first) != responses(sample(model, prompts(), attrs.evolve(params, seed=7 + 2**32)))


def test_without_a_seed_the_global_generator_decides() -> None:
    module, params = Bigram(), SamplingParams(max_new_tokens=8)
    torch.manual_seed(1)
    first, other = sample(module, prompts(), params), sample(module, prompts(), params)
    torch.manual_seed(1)

    assert responses(sample(module, prompts(), params)) == responses(first) != responses(other)


def test_greedy_decoding_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state(), torch.get_rng_state()

    sample(counting(), prompts(), SamplingParams(temperature=0, max_new_tokens=2), generator=generator)
    sample(counting(), prompts(), SamplingParams(temperature=0, max_new_tokens=2))

    assert torch.equal(generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_calls_with_one_generator_continue_its_stream_and_a_new_one_repeats_it() -> None:
    module, params = Bigram(), SamplingParams(max_new_tokens=8, seed=1)
    generator = torch.Generator().manual_seed(1)
    calls = [responses(sample(module, prompts(), params, generator=generator)) for _ in range(2)]
    generator.manual_seed(1)

    assert calls == [responses(sample(module, prompts(), params, generator=generator)) for _ in range(2)]
    assert calls[0] != calls[1]
    assert calls[0] != responses(sample(module, prompts(), params)), "a generator goes before the seed"


def test_each_stream_of_a_seed_is_another_and_repeatable() -> None:
    module, params = Bigram(), SamplingParams(max_new_tokens=8, seed=1)
    streams = [responses(sample(module, prompts(), params, stream=stream)) for stream in range(5)]

    assert streams == [responses(sample(module, prompts(), params, stream=stream)) for stream in range(5)]
    assert len({str(each) for each in streams}) == 5
    assert streams[0] == responses(sample(module, prompts(), params))


def test_equal_prompts_get_different_responses() -> None:
    batch = {"input_ids": torch.zeros(50, 2, dtype=torch.int64), "input_lengths": torch.full((50,), 2)}

    drawn = responses(sample(Bigram(), batch, SamplingParams(max_new_tokens=20, seed=0)))

    assert len({tuple(response) for response in drawn}) == 50


def test_a_rows_response_depends_neither_on_the_other_rows_nor_on_micro_batches(model: nn.Module) -> None:
    params = SamplingParams(max_new_tokens=8, seed=7, stop_ids=(4, 5))
    whole = sample(model, prompts(), params)

    for mbs in (1, 4, 100):
        assert_same(sample(model, prompts(), attrs.evolve(params, mbs=mbs)), whole)
    fewer = responses(sample(model, rows_of(prompts(), slice(0, 3)), params))
    assert fewer == responses(whole)[:3]
    rest = responses(sample(model, rows_of(prompts(), slice(3, 6)), params, first_row=3))
    assert rest == responses(whole)[3:], "a part of a batch draws what it draws in the whole"


def test_a_shorter_limit_gives_a_beginning_of_the_longer_response() -> None:
    module = Bigram()
    long, short = (
        responses(sample(module, prompts(), SamplingParams(max_new_tokens=limit, seed=7))) for limit in (8, 3)
    )

    assert short == [response[:3] for response in long]


# -- the module's own state ----------------------------------------------------------------------------------------------


class Failing(Bigram):
    def forward(self, input_ids: Tensor) -> Tensor:
        raise LookupError("inside the model")


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_runs_in_eval_and_every_training_flag_is_restored(fails: bool) -> None:
    module = nn.Sequential(Failing() if fails else Bigram()).train()
    module[0].dropout.eval()  # frozen on purpose
    seen: list[bool] = []
    module.register_forward_pre_hook(lambda m, _: seen.append(any(part.training for part in m.modules())))
    before = [part.training for part in module.modules()]

    if fails:
        with pytest.raises(LookupError):
            sample(module, prompts(), SamplingParams(max_new_tokens=3))
    else:
        sample(module, prompts(), SamplingParams(max_new_tokens=3))

    assert not any(seen)
    assert [part.training for part in module.modules()] == before == [True, True, False]
    assert torch.is_grad_enabled()


def test_results_and_model_are_good_for_autograd_afterwards_even_under_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        result = sample(model, prompts(), SamplingParams(max_new_tokens=4, seed=1))

    assert not any(value.is_inference() for value in result.values())
    model(input_ids=result["output_ids"]).logits.sum().backward()
    assert all(not parameter.is_inference() for parameter in model.parameters())
    assert sum(parameter.grad is not None for parameter in model.parameters()) > 0


def test_no_gradient_and_no_graph_is_made(model: nn.Module) -> None:
    result = sample(model, prompts(), SamplingParams(max_new_tokens=4, seed=1))

    assert not any(value.requires_grad for value in result.values())
    assert all(parameter.grad is None for parameter in model.parameters())


# -- kinds of modules ------------------------------------------------------------------------------------------------------


def test_a_generic_module_is_recomputed_and_agrees_with_its_logprobs() -> None:
    module = Bigram()
    result = sample(module, prompts(), SamplingParams(max_new_tokens=5, seed=2))

    full = {"input_ids": result["output_ids"], "input_lengths": result["unpadded_sequence_lengths"]}
    computed = get_logprobs(Forward(module), full)["logprobs"]
    at = result["logprobs"] != 0
    torch.testing.assert_close(result["logprobs"][at], computed[at])
    assert int(at.sum()) == 30


def test_a_forward_fn_gets_its_own_columns_of_the_rows_that_still_run() -> None:
    seen: list[dict[str, Any]] = []

    def forward_fn(module: nn.Module, batch: dict[str, Any]) -> Tensor:
        seen.append(batch)
        return module(batch["input_ids"])

    batch = {
        "input_ids": torch.tensor([[2, 9], [0, 1]]),
        "input_lengths": torch.tensor([1, 2]),
        "attention_mask": torch.tensor([[1, 0], [1, 1]]),
        "token_mask": torch.ones(2, 2),
        "images": torch.tensor([[1.0], [2.0]]),
        "array": np.array([1, 2]),
        "names": ["stops", "runs"],
        "scale": 3,
    }

    sample(
        counting(),
        batch,
        SamplingParams(temperature=0, max_new_tokens=2, stop_ids=(3,)),
        forward_fn=forward_fn,
    )

    assert all("token_mask" not in each and each["scale"] == 3 for each in seen)
    assert [each["attention_mask"].tolist() for each in seen] == [[[1, 0], [1, 1]], [[1, 1, 1]]]
    assert [each["names"] for each in seen] == [["stops", "runs"], ["runs"]]
    assert [each["images"].flatten().tolist() for each in seen] == [[1, 2], [2]]
    assert [each["array"].tolist() for each in seen] == [[1, 2], [2]]
    assert seen[1]["input_ids"].tolist() == [[0, 1, 2]]
    assert seen[1]["input_lengths"].tolist() == [3]


def assert_samples_like_the_model_inside(wrapper: nn.Module, inner: nn.Module, max_new_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=max_new_tokens)
    widths: list[int] = []
    inner.model.register_forward_hook(lambda *args: widths.append(args[-1].last_hidden_state.shape[1]))

    assert_same(sample(wrapper, prompts(), params), sample(llama(), prompts(), params))

    assert widths == [9] + [1] * (max_new_tokens - 1), "the cache is used"


def test_a_peft_wrapper_is_called_with_a_cache() -> None:
    wrapper = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))

    assert_samples_like_the_model_inside(wrapper, wrapper.get_base_model(), max_new_tokens=8)


def test_a_compiled_wrapper_is_called_with_a_cache() -> None:
    inner = llama()
    calls: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return run

    wrapper = torch.compile(inner, backend=backend, dynamic=True)

    result = sample(wrapper, prompts(), SamplingParams(temperature=0, max_new_tokens=2))

    assert calls, "what was compiled has run"
    assert_same(result, sample(llama(), prompts(), SamplingParams(temperature=0, max_new_tokens=2)))


class Cached(nn.Module):
    """A cache under the name it had before transformers renamed it, a running sum, and no positions argument."""

    def __init__(self, keep: bool = True, axes: int = 3) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY))
        self.keeps, self.axes = keep, axes

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Any = None, use_cache: bool = False
    ) -> Any:
        sums = (self.table[input_ids] * attention_mask[:, -input_ids.shape[1] :, None]).cumsum(dim=1)
        if past_key_values is not None:
            sums = sums + past_key_values.sums
        cache = SimpleNamespace(sums=sums[:, -1:])
        cache.reorder_cache = lambda rows: setattr(cache, "sums", cache.sums[rows])
        logits = sums if self.axes == 3 else sums[:, -1]
        return SimpleNamespace(logits=logits, past_key_values=cache if self.keeps else None)


def test_a_cache_is_found_under_its_older_name_too() -> None:
    module = Cached()
    params = SamplingParams(max_new_tokens=12, seed=2, stop_ids=(4, 5, 6))

    cached = sample(module, prompts(), params)

    assert_same(cached, sample(module, prompts(), params, forward_fn=lambda m, b: m(b["input_ids"], mask_of(b))))


def mask_of(batch: dict[str, Any]) -> Tensor:
    return (torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]).long()


def test_transformers_models_are_asked_by_names_they_do_not_warn_about(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sample(model, prompts(), SamplingParams(max_new_tokens=4, stop_ids=(4, 5), seed=1))

    assert not caplog.records


def test_a_padding_token_outside_of_the_vocabulary_never_reaches_the_model(model: nn.Module) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=8, stop_ids=(4, 5), pad_id=10**6)

    padded = sample(model, prompts(), params)["output_ids"]

    assert int(padded.max()) == 10**6
    plain = sample(model, prompts(), attrs.evolve(params, pad_id=0))["output_ids"]
    assert torch.equal(padded.where(padded < 10**6, 0), plain)


# -- errors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_that_names_the_rows(bad: float) -> None:
    module = counting()
    module.table.data[7, 5] = bad
    batch = {"input_ids": torch.tensor([[0], [7], [1], [7], [7]]), "input_lengths": torch.ones(5, dtype=torch.int64)}

    for params in (SamplingParams(temperature=0), SamplingParams(top_p=0.5), SamplingParams(top_k=3), SamplingParams()):
        with pytest.raises(NonFiniteError) as caught:
            sample(module, batch, attrs.evolve(params, max_new_tokens=2, mbs=3))
        assert "1 of 3 running rows: 1" in str(caught.value)
        assert "isfinite" in caught.value.remedy
    batch["input_ids"][1] = 0
    with pytest.raises(NonFiniteError, match="2 of 2 running rows: 3, 4"):
        sample(module, batch, SamplingParams(temperature=0, max_new_tokens=2, mbs=3))


def test_rows_are_named_as_the_caller_counts_them_also_in_a_part_of_a_batch() -> None:
    module = Bigram(torch.full((VOCABULARY, VOCABULARY), math.nan))

    with pytest.raises(NonFiniteError, match=r"12 of 12 running rows: 0, 1, 2, 3, 4, 5, 6, 7, \.\.\."):
        sample(module, prompts(num=12), SamplingParams(max_new_tokens=2), first_row=100)


def test_minus_infinity_masks_a_token_and_only_a_row_of_nothing_else_is_an_error() -> None:
    module = counting()
    module.table.data[:, 10:] = -math.inf
    sample(module, prompts(), SamplingParams(max_new_tokens=4, seed=1))

    module.table.data[:] = -math.inf
    with pytest.raises(NonFiniteError):
        sample(module, prompts(), SamplingParams(max_new_tokens=4, seed=1))


def test_a_nan_after_a_row_has_stopped_does_not_matter() -> None:
    module = counting()
    module.table.data[3] = math.nan
    batch = {"input_ids": torch.tensor([[0], [2]]), "input_lengths": torch.ones(2, dtype=torch.int64)}

    result = sample(module, batch, SamplingParams(temperature=0, max_new_tokens=9, stop_ids=(3,)), lockstep=True)

    assert responses(result) == [[1, 2, 3], [3]]


def test_what_does_not_fit_the_models_positions_is_refused_before_anything_is_drawn(model: nn.Module) -> None:
    before = torch.get_rng_state()
    with pytest.raises(BatchError) as caught:
        sample(model, prompts(), SamplingParams(max_new_tokens=POSITIONS - 8))
    assert "9 + 56 tokens" in str(caught.value)
    assert "row 0 is the longest prompt: 9 tokens" in str(caught.value)
    assert caught.value.remedy == "max_new_tokens=55 or less, or shorter prompts"
    assert torch.equal(torch.get_rng_state(), before)

    full = {"input_ids": torch.zeros(1, POSITIONS, dtype=torch.int64), "input_lengths": torch.tensor([POSITIONS])}
    with pytest.raises(BatchError, match="prompts of less than 64 tokens"):
        sample(model, full, SamplingParams(max_new_tokens=1))


def test_the_last_position_of_a_model_can_be_used(model: nn.Module) -> None:
    result = sample(model, prompts(), SamplingParams(max_new_tokens=POSITIONS - 9, temperature=0))

    assert result["output_ids"].shape == (6, POSITIONS)


def test_a_wrong_batch_is_refused_in_the_name_of_the_call(model: nn.Module) -> None:
    with pytest.raises(BatchError, match=r"generate\(\)"):
        sample(model, {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, SamplingParams())
    with pytest.raises(BatchError, match="vocabulary"):
        sample(model, prompts() | {"input_ids": torch.full((6, 9), VOCABULARY)}, SamplingParams())


@pytest.mark.parametrize(
    ("module", "returned"),
    [(Cached(keep=False), "past_key_values=NoneType"), (Cached(axes=2), "logits of shape [6, 31]")],
    ids=["no cache", "no positions"],
)
def test_models_that_give_no_cache_or_other_logits_are_refused_with_the_way_around(
    module: nn.Module, returned: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        sample(module, prompts(), SamplingParams(max_new_tokens=2))

    assert returned in caught.value.attempted
    assert "forward_fn" in caught.value.remedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", None),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("top_p", "0.9"),
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.0),
        ("max_new_tokens", None),
        ("stop_ids", 2),
        ("stop_ids", None),
        ("stop_ids", ("ab",)),
        ("stop_ids", (-1,)),
        ("stop_ids", (1, None)),
        ("pad_id", -100),
        ("pad_id", None),
        ("seed", -1),
        ("seed", 0.5),
        ("mbs", 0),
        ("mbs", "all"),
    ],
)
def test_a_value_out_of_range_is_refused_at_construction_with_what_to_write(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})

    assert f"{field}={value!r}" in caught.value.attempted
    assert caught.value.facts
    assert caught.value.remedy.startswith(f"InProcessEngine(policy, {field}=")


def test_sampling_parameters_are_frozen_and_equal_by_value() -> None:
    assert SamplingParams(stop_ids=[1, 2]) == SamplingParams(stop_ids=(1, 2))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]
