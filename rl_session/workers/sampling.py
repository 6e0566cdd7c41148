"""Sampling: prompts in; prompts with responses, and the log-probability of each sampled token, out.

Hugging Face causal language models run with a key-value cache over left-padded prompts; any other module, or one with a
``forward_fn``, computes its whole right-padded sequences again for each token. Both sample the same distribution. Works
on a module whose bytes are on its device. Knows nothing of placements, policies, scopes or ranks.

Shape suffixes: B sequences of a batch, b of a micro-batch, r of those still running, S positions, T sampled tokens, V
vocabulary, K candidates.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

import attrs
import torch
from torch import Tensor, nn

from rl_session.errors import BatchError, ConfigError, NonFiniteError
from rl_session.workers import compute
from rl_session.workers.batch import Batch, micro_batches, size, to_device, valid_mask

__all__ = ["SamplingParams", "sample"]

_CALL = "generate()"

_CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls the key-value cache, as argument and in outputs; it renamed the second to the first."""

_WEIGHT_OF_ONE = 2.0**52
"""Probabilities become whole numbers of this unit: their sums are exact in any order, on any device."""


def _refuse(name: str, value: object, fact: str, remedy: str) -> NoReturn:
    raise ConfigError(f"sampling: {name}={value!r} is not a value it can have", (fact,), remedy)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(least: int, meaning: str, remedy: str, *, optional: bool = False) -> Any:
    def check(_: object, attribute: Any, value: object) -> None:
        if not (_is_whole(value, least) or (optional and value is None)):
            fact = f"{meaning}: a whole number of at least {least}{', or None' if optional else ''}"
            _refuse(attribute.name, value, fact, remedy)

    return check


def _temperature(_: object, attribute: Any, value: Any) -> None:
    if not _is_number(value) or value < 0:
        fact = "logits are divided by it: a positive number, or 0 for the likeliest token"
        _refuse(
            attribute.name,
            value,
            fact,
            "InProcessEngine(policy, temperature=1.0), or temperature=0 for greedy decoding",
        )


def _top_p(_: object, attribute: Any, value: Any) -> None:
    if value is not None and not (_is_number(value) and 0 < value <= 1):
        fact = "a share of the probability: above 0 and at most 1, or None"
        _refuse(attribute.name, value, fact, "InProcessEngine(policy, top_p=0.95), or top_p=None to cut nothing off")


def _stop_ids(_: object, attribute: Any, value: Any) -> None:
    if not (isinstance(value, tuple) and all(_is_whole(stop_id, 0) for stop_id in value)):
        fact = "token ids: whole numbers of at least 0"
        _refuse(attribute.name, value, fact, "InProcessEngine(policy, stop_ids=(tokenizer.eos_token_id,))")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) else value  # anything else is for the validator to refuse


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How to sample.

    Attributes:
        temperature: What logits are divided by; 0 takes the likeliest token (greedy).
        top_k: Sample among the k likeliest tokens only; None for all.
        top_p: Sample among the fewest likeliest tokens that together hold this share of the probability (of what
            ``top_k`` left); None or 1 for all. Alone it sorts the vocabulary for each token, with ``top_k`` only k.
        max_new_tokens: Most tokens in a response.
        stop_ids: Tokens that end a response; the one sampled is its last token.
        pad_id: What fills results beyond the end of a row. The model never sees it.
        seed: Makes the result independent of torch's global generator, which then is not touched. None draws from it.
        mbs: Sequences in one forward; None for all.

    Raises:
        ConfigError: A value is out of range.
    """

    temperature: float = attrs.field(default=1.0, validator=_temperature)
    top_k: int | None = attrs.field(
        default=None,
        validator=_whole(
            1, "it counts tokens", "InProcessEngine(policy, top_k=None) to cut nothing off", optional=True
        ),
    )
    top_p: float | None = attrs.field(default=None, validator=_top_p)
    max_new_tokens: int = attrs.field(
        default=64, validator=_whole(1, "it counts tokens", "InProcessEngine(policy, max_new_tokens=64)")
    )
    stop_ids: tuple[int, ...] = attrs.field(default=(), converter=_as_tuple, validator=_stop_ids)
    pad_id: int = attrs.field(
        default=0, validator=_whole(0, "a token id", "InProcessEngine(policy, pad_id=tokenizer.pad_token_id)")
    )
    seed: int | None = attrs.field(
        default=None, validator=_whole(0, "a seed", "InProcessEngine(policy, seed=0)", optional=True)
    )
    mbs: int | None = attrs.field(
        default=None, validator=_whole(1, "it counts sequences", "InProcessEngine(policy, mbs=8)", optional=True)
    )

    @property
    def greedy(self) -> bool:
        """Whether there is nothing to draw: the likeliest token is taken."""
        return self.temperature == 0 or self.top_k == 1


def sample(
    module: nn.Module,
    batch: Any,
    params: SamplingParams,
    *,
    forward_fn: compute.ForwardFn | None = None,
    generator: torch.Generator | None = None,
    stream: int = 0,
    first_row: int = 0,
    lockstep: bool = False,
) -> dict[str, Tensor]:
    """Sample one response for each prompt.

    The log-probability of a token is that under the whole distribution at ``temperature`` (1 where that is 0), *before*
    ``top_k`` and ``top_p`` cut it: what ``get_logprobs(batch, temperature=...)`` gives for the result, up to rounding.
    Where something was cut it is therefore not the probability that the token was drawn with, but ratios against a
    policy's log-probabilities compare like with like.

    What a row draws depends on its seed and stream (or generator), its index and the position alone: not on the other
    rows, ``mbs``, ``max_new_tokens``, the device, or when rows stop. Logits may still differ in the last bits between
    shapes of forwards, and with them a draw at the very edge between two tokens. Greedy decoding draws nothing.

    Args:
        module: A Hugging Face causal language model, perhaps in a ``torch.compile`` or PEFT wrapper, or anything that
            gives logits ``[b, S, V]``.
        batch: ``input_ids [B, S]`` right-padded, ``input_lengths [B]``, and for a ``forward_fn`` what else it reads: it
            gets that as it is, but ``attention_mask`` made anew for the grown sequence, and no ``token_mask``.
        params: How to sample.
        forward_fn: ``forward_fn(module, batch) -> logits`` instead of calling the module; there is no cache then.
        generator: One number is drawn from it for the call, instead of using ``params.seed`` and ``stream``.
        stream: Which of the independent streams of ``params.seed`` to use: the number of the call.
        first_row: Index of the first row in a batch that several calls share, so that no two rows draw the same.
        lockstep: Make exactly ``max_new_tokens`` forwards for each micro-batch even when all rows have stopped, as a
            module whose forward is a collective (FSDP) needs it.

    Returns:
        On the CPU, in the order of the batch, with S' the longest prompt and response:
        ``output_ids [B, S']`` int64, each row its prompt, its response, then ``pad_id``;
        ``generation_lengths [B]`` int64, tokens of the response, the stop token included;
        ``unpadded_sequence_lengths [B]`` int64, tokens of prompt and response;
        ``logprobs [B, S']`` float32, 0 on prompt and padding.

    Raises:
        BatchError: The batch is wrong, or a row has no room for its response in the model's positions.
        NonFiniteError: Logits that make no distribution: NaN, plus infinity, or minus infinity throughout.
        UnsupportedError: The model gives no logits, or takes a cache and returns none.
    """
    forward = compute.Forward(module, forward_fn)
    checked = forward.checked(batch, _CALL)
    _check_room(module, checked, params)
    names = _cache_arguments(module) if forward_fn is None else None
    home = forward.home()
    parts: list[_Part] = []
    with compute.grad_mode(enabled=False), compute.module_mode(module, "eval"):
        key = _key(params, generator, stream)
        row = first_row
        for micro in micro_batches(checked, params.mbs):
            noise_bT = _noise(key, row, size(micro), params.max_new_tokens).to(home)
            here = to_device(micro, home)
            model = _Cached(forward, names, here, params) if names else _Recomputed(forward, here, params)
            parts.append(_run(model, noise_bT, params, row - first_row, lockstep=lockstep))
            row += size(micro)
        return _assemble(to_device(checked, "cpu"), parts, params)


def _check_room(module: nn.Module, batch: Batch, params: SamplingParams) -> None:
    config: Any = getattr(compute.unwrapped(module), "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return
    length, row = (int(found) for found in batch["input_lengths"].max(dim=0))
    if length + params.max_new_tokens <= limit:
        return
    facts = (
        f"the model has {limit} positions (max_position_embeddings)",
        f"row {row} is the longest prompt: {length} tokens, and max_new_tokens={params.max_new_tokens}",
    )
    room = limit - length
    remedy = (
        f"max_new_tokens={room} or less, or shorter prompts" if room > 0 else f"prompts of less than {limit} tokens"
    )
    raise BatchError(f"{_CALL}: {length} + {params.max_new_tokens} tokens do not fit the model", facts, remedy)


def _key(params: SamplingParams, generator: torch.Generator | None, stream: int) -> int:
    """What all random numbers of a call are made from."""
    if params.greedy:
        return 0
    if generator is None and params.seed is not None:
        return _mixed(_mixed(params.seed) + stream)
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))


def _mixed(value: int) -> int:
    return int(_mix(torch.tensor((value + 2**63) % 2**64 - 2**63)))


def _mix(z: Tensor) -> Tensor:
    """Output z of SplitMix64 seeded with 0 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    z = (z + 1) * -0x61C8864680B583EB  # the golden ratio: neighbours end up far apart
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    shifted: Tensor = (z >> by) & (2 ** (64 - by) - 1)  # torch shifts the sign in
    return shifted


def _noise(key: int, first_row: int, num: int, limit: int) -> Tensor:
    """One number in [0, 1) for each row and token, float64; a function of the key, the row and the position."""
    rows_b1 = _mix(torch.arange(first_row, first_row + num)[:, None] ^ key)
    bits_bT = _shifted(_mix(rows_b1 + torch.arange(limit)), 11)
    # Just below 1, so that its product with a total stays below the total, rounded too.
    return (bits_bT.double() * 2**-53).clamp_(max=1 - 2**-52)


class _Model(Protocol):
    """Running sequences, and the logits of their next tokens."""

    def next_logits(self, chosen_r: Tensor | None) -> Tensor:
        """Append the chosen tokens (None: nothing yet), and give the logits ``[r, V]`` of what follows."""

    def keep(self, kept_r: Tensor) -> None:
        """Go on with the sequences at these indices only."""


class _Cached:
    """Left-padded sequences over a key-value cache: each forward after the first sees one token a row."""

    def __init__(self, forward: compute.Forward, names: frozenset[str], batch: Batch, params: SamplingParams) -> None:
        self._forward = forward
        self._names = names
        self._cache_name = next(name for name in _CACHE_NAMES if name in names)
        self._cache: Any = None
        self._lengths_r = batch["input_lengths"].long()
        self._width = int(self._lengths_r.max())
        shift_r1 = self._width - self._lengths_r[:, None]
        positions_rS = torch.arange(self._width, device=shift_r1.device) - shift_r1
        real_rS = (positions_rS >= 0).long()
        self._positions_rS = positions_rS.clamp_(min=0)
        # Padding repeats the first token: always in the vocabulary, which pad_id may not be. The mask hides it.
        self._prompts_rS = batch["input_ids"].gather(1, self._positions_rS)
        self._mask_rS = torch.cat([real_rS, real_rS.new_ones(len(real_rS), params.max_new_tokens)], dim=1)

    def next_logits(self, chosen_r: Tensor | None) -> Tensor:
        if chosen_r is None:
            ids_rS, positions_rS = self._prompts_rS, self._positions_rS
        else:
            ids_rS, positions_rS = chosen_r[:, None], self._lengths_r[:, None]
            self._lengths_r = self._lengths_r + 1
            self._width += 1
        output = self._forward.module(
            input_ids=ids_rS,
            attention_mask=self._mask_rS[:, : self._width],
            use_cache=True,
            **self._extras(positions_rS),
        )
        self._cache = getattr(output, self._cache_name, None)
        if not hasattr(self._cache, "reorder_cache"):
            got = f"{type(output).__name__} with {self._cache_name}={type(self._cache).__name__}"
            raise self._forward.refusal(
                got, f"a transformers Cache in {self._cache_name}; a forward_fn samples without one"
            )
        logits_rSV = self._forward.tensor(output, ("logits",))
        if logits_rSV.ndim != 3 or len(logits_rSV) != len(ids_rS):
            raise self._forward.refusal(f"logits of shape {list(logits_rSV.shape)}", f"logits [{len(ids_rS)}, S, V]")
        return logits_rSV[:, -1]

    def _extras(self, positions_rS: Tensor) -> dict[str, Any]:
        extras = {"position_ids": positions_rS, "logits_to_keep": 1}
        # The model makes the first cache itself: it knows which kind each of its layers needs.
        given = {} if self._cache is None else {self._cache_name: self._cache}
        return given | {name: value for name, value in extras.items() if name in self._names}

    def keep(self, kept_r: Tensor) -> None:
        self._lengths_r = self._lengths_r[kept_r]
        self._mask_rS = self._mask_rS[kept_r]
        self._cache.reorder_cache(kept_r)


class _Recomputed:
    """Right-padded sequences, computed as a whole for each token."""

    def __init__(self, forward: compute.Forward, batch: Batch, params: SamplingParams) -> None:
        self._forward = forward
        keys = ("input_ids", "input_lengths") if forward.forward_fn is None else tuple(batch)
        self._batch: Batch = {key: batch[key] for key in keys if key != "token_mask"}
        self._lengths_r = batch["input_lengths"].long()
        self._width = int(self._lengths_r.max())
        prompts_rS = batch["input_ids"][:, : self._width]
        room_rT = prompts_rS.new_zeros(len(prompts_rS), params.max_new_tokens)
        self._ids_rS = torch.cat([prompts_rS, room_rT], dim=1)

    def next_logits(self, chosen_r: Tensor | None) -> Tensor:
        rows_r = torch.arange(len(self._ids_rS), device=self._ids_rS.device)
        if chosen_r is not None:
            self._ids_rS[rows_r, self._lengths_r] = chosen_r
            self._lengths_r = self._lengths_r + 1
            self._width += 1
        grown = self._batch | {"input_ids": self._ids_rS[:, : self._width], "input_lengths": self._lengths_r}
        if "attention_mask" in grown:
            grown["attention_mask"] = valid_mask(grown).long()
        return self._forward.raw_logits(grown)[rows_r, self._lengths_r - 1]

    def keep(self, kept_r: Tensor) -> None:
        self._batch = _take(self._batch, kept_r.tolist())
        self._lengths_r = self._lengths_r[kept_r]
        self._ids_rS = self._ids_rS[kept_r]


def _take(batch: Batch, rows: list[int]) -> Batch:
    """These rows of a batch; what has no row for each sequence is carried as it is."""
    num = size(batch)

    def take(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [value[row] for row in rows] if len(value) == num else value
        shape = getattr(value, "shape", None)
        return value[rows] if isinstance(shape, tuple) and shape and shape[0] == num else value

    return {key: take(value) for key, value in batch.items()}


def _cache_arguments(module: nn.Module) -> frozenset[str] | None:
    """The arguments of a forward that can run over a cache of left-padded rows; None if it cannot."""
    names = frozenset(inspect.signature(compute.unwrapped(module).forward).parameters)
    needed = {"input_ids", "attention_mask", "use_cache"}
    return names if needed <= names and names.intersection(_CACHE_NAMES) else None


@attrs.frozen(eq=False)
class _Part:
    """Responses of a micro-batch: ``lengths_b`` tokens for each row, one row after the other."""

    lengths_b: Tensor
    tokens: Tensor
    logprobs: Tensor


def _run(model: _Model, noise_bT: Tensor, params: SamplingParams, first_row: int, *, lockstep: bool) -> _Part:
    num, limit = noise_bT.shape
    device = noise_bT.device
    tokens_bT = torch.zeros(num, limit, dtype=torch.int64, device=device)
    logprobs_bT = torch.zeros(num, limit, dtype=torch.float32, device=device)
    lengths_b = torch.full((num,), limit, device=device)
    stop_ids = torch.tensor(params.stop_ids, dtype=torch.int64, device=device)
    rows_r = torch.arange(num, device=device)
    chosen_r: Tensor | None = None
    stopped = False
    for step in range(limit):
        logits_rV = model.next_logits(chosen_r)
        if stopped:
            continue  # in lockstep: other ranks still need this forward
        chosen_r, logprobs_r = _choose(logits_rV, noise_bT[rows_r, step], params)
        _check_finite(logprobs_r, rows_r + first_row, params)
        tokens_bT[rows_r, step] = chosen_r
        logprobs_bT[rows_r, step] = logprobs_r
        if not params.stop_ids:
            continue
        stops_r = torch.isin(chosen_r, stop_ids)
        kept_r = (~stops_r).nonzero().squeeze(-1)
        if len(kept_r) == len(rows_r):
            continue
        lengths_b[rows_r[stops_r]] = step + 1
        if len(kept_r):
            rows_r, chosen_r = rows_r[kept_r], chosen_r[kept_r]
            model.keep(kept_r)
        elif lockstep:
            stopped = True
        else:
            break
    sampled_bT = torch.arange(limit, device=device) < lengths_b[:, None]
    return _Part(lengths_b.cpu(), tokens_bT[sampled_bT].cpu(), logprobs_bT[sampled_bT].cpu())


def _choose(logits_rV: Tensor, noise_r: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability before anything is cut off."""
    scaled_rV = logits_rV.float()
    if params.temperature not in (0, 1):
        scaled_rV = scaled_rV / params.temperature
    logprobs_rV = torch.log_softmax(scaled_rV, dim=-1)
    chosen_r = scaled_rV.argmax(dim=-1) if params.greedy else _draw(logprobs_rV, noise_r, params)
    return chosen_r, logprobs_rV.gather(-1, chosen_r[:, None]).squeeze(-1)


def _draw(logprobs_rV: Tensor, noise_r: Tensor, params: SamplingParams) -> Tensor:
    """Draw by the inverse of the distribution function.

    In whole numbers: sums are then exact, so that neither threads nor devices change a draw, a token of weight 0 is
    never drawn, and CUDA's ``cumsum`` is deterministic.
    """
    candidates_rK, ids_rK = logprobs_rV, None
    if params.top_k is not None and params.top_k < logprobs_rV.shape[-1]:
        candidates_rK, ids_rK = logprobs_rV.topk(params.top_k)
    elif params.top_p is not None and params.top_p < 1:
        candidates_rK, ids_rK = logprobs_rV.sort(dim=-1, descending=True, stable=True)
    last = candidates_rK.shape[-1] - 1
    sums_rK = candidates_rK.exp().mul_(_WEIGHT_OF_ONE).long().cumsum_(dim=-1)
    total_r1 = sums_rK[:, -1:]
    if params.top_p is not None and params.top_p < 1:
        # Candidates are sorted: what stays is the shortest beginning whose sum reaches the share.
        share_r1 = (total_r1 * params.top_p).ceil().long().clamp_(min=1)
        total_r1 = sums_rK.gather(-1, torch.searchsorted(sums_rK, share_r1).clamp_(max=last))
    point_r1 = (noise_r[:, None] * total_r1).long()
    # Out of range only for weights that are NaN: the caller finds them, but the index must not reach a lookup.
    index_r1 = torch.searchsorted(sums_rK, point_r1, right=True).clamp_(max=last)
    return (index_r1 if ids_rK is None else ids_rK.gather(-1, index_r1)).squeeze(-1)


def _check_finite(logprobs_r: Tensor, rows_r: Tensor, params: SamplingParams) -> None:
    """A NaN or plus infinity anywhere in a row's logits makes all of its log-probabilities NaN."""
    bad_r = logprobs_r.isnan()
    if not bool(bad_r.any()):
        return
    rows = rows_r[bad_r].tolist()
    shown = ", ".join(str(row) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
    facts = (f"{len(rows)} of {len(rows_r)} running rows: {shown}", f"temperature: {params.temperature}")
    remedy = "check the weights (torch.isfinite on each parameter) and what was loaded or refitted last"
    raise NonFiniteError(f"{_CALL}: the model's logits are NaN or infinite", facts, remedy)


def _assemble(batch: Batch, parts: list[_Part], params: SamplingParams) -> dict[str, Tensor]:
    prompts_B = batch["input_lengths"].long()
    responses_B = torch.cat([part.lengths_b for part in parts])
    ends_B = prompts_B + responses_B
    width = int(ends_B.max())
    positions_S = torch.arange(width)
    prompt_BS = positions_S < prompts_B[:, None]
    response_BS = (positions_S < ends_B[:, None]) & ~prompt_BS
    output_ids_BS = torch.full(prompt_BS.shape, params.pad_id, dtype=torch.int64)
    output_ids_BS[prompt_BS] = batch["input_ids"][valid_mask(batch)]
    output_ids_BS[response_BS] = torch.cat([part.tokens for part in parts])
    logprobs_BS = torch.zeros(prompt_BS.shape, dtype=torch.float32)
    logprobs_BS[response_BS] = torch.cat([part.logprobs for part in parts])
    return {
        "output_ids": output_ids_BS,
        "generation_lengths": responses_B,
        "unpadded_sequence_lengths": ends_B,
        "logprobs": logprobs_BS,
    }
