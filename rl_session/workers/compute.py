"""Forwards, and what is read off them: log-probabilities, top-k logits, scores and values.

Works on a module whose bytes are on its device. Each call sets train or eval and the grad mode itself and restores what
it found. Knows nothing of placements, optimizers or policies; of ranks, that they make forwards together.

Shape suffixes: b sequences of a micro-batch, B of a batch, S positions, C positions of a chunk, V vocabulary, k best.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import attrs
import torch
from torch import Tensor, nn

from rl_session.errors import ArgumentError, BatchError, NonFiniteError, UnsupportedError
from rl_session.workers.batch import (
    Batch,
    check_batch,
    micro_batches,
    num_micro_batches,
    slice_batch,
    to_device,
    valid_mask,
)
from rl_session.workers.ranks import SOLO, Ranks

__all__ = [
    "Forward",
    "ForwardFn",
    "get_logprobs",
    "get_topk_logits",
    "get_values",
    "grad_mode",
    "module_mode",
    "score",
]

ForwardFn = Callable[[nn.Module, Batch], Any]

_CHUNK_ELEMENTS = 2**25
"""Most elements of one float32 chunk of logits (128 MiB; two are alive at a time)."""

_KEEPS_NO_RESULT = frozenset(
    {"UnsafeViewBackward0", "MmBackward0", "AddmmBackward0", "BmmBackward0", "ToCopyBackward0"}
)
"""Autograd nodes that do not need their own output in backward, so that it may be overwritten."""

_FORWARD_REMEDY = "attach(..., forward_fn=lambda model, batch: model(batch['input_ids']).logits)"


@contextmanager
def module_mode(module: nn.Module, mode: Literal["train", "eval"]) -> Iterator[None]:
    """Put a module in train or eval, and every submodule back as it was on the way out.

    For "train", submodules that are in eval under a root in train were frozen on purpose and stay; under a root in eval
    everything goes to train. For "eval" everything goes to eval.

    Args:
        module: The root, or a wrapper around it.
        mode: What to set.
    """
    found = [(part, part.training) for part in module.modules()]
    try:
        if mode == "eval":
            module.eval()
        elif not module.training:
            module.train()
        yield
    finally:
        # Set, not .train(): that would walk, and overwrite what children were. Only what changed: a compiled module
        # guards on the flag.
        for part, was in found:
            if part.training != was:
                part.training = was


@contextmanager
def grad_mode(*, enabled: bool) -> Iterator[None]:
    """Autograd on or off, whatever the caller's mode; never ``inference_mode``, whose tensors autograd refuses."""
    with torch.inference_mode(mode=False), torch.set_grad_enabled(enabled):
        yield


@attrs.define(eq=False)
class Forward:
    """How to run a model on a micro-batch.

    By default the module is called with ``input_ids`` and, where its signature (seen through ``torch.compile``, PEFT
    and data-parallel wrappers) accepts them, ``attention_mask`` and ``use_cache=False``. It is the given wrapper that
    is called. The result may be a tensor, an object with ``.logits``, or a mapping with ``"logits"``.

    Attributes:
        module: The model, or the wrapper through which it is called.
        forward_fn: ``forward_fn(module, batch) -> logits`` instead of the default.
        temperature: What logits are divided by.
        device: Where micro-batches go; None for where the module's parameters are.
        label: Who computes, for messages, such as ``"policy 'actor'"``.
        ranks: Who makes each forward together with this rank.
    """

    module: nn.Module
    forward_fn: ForwardFn | None = None
    temperature: float = attrs.field(default=1.0)
    device: torch.device | None = attrs.field(default=None, converter=attrs.converters.optional(torch.device))
    label: str = attrs.field(default="", kw_only=True)
    ranks: Ranks = attrs.field(default=SOLO, kw_only=True)
    _accepted: frozenset[str] | None = attrs.field(default=None, init=False)

    @temperature.validator
    def _check_temperature(self, attribute: Any, value: float) -> None:
        del attribute
        checked_temperature(value)

    @property
    def bare(self) -> nn.Module:
        """The module under a compiled wrapper."""
        module: nn.Module = getattr(self.module, "_orig_mod", self.module)
        return module

    def named(self, call: str) -> str:
        """The call with who makes it, for messages."""
        return f"{self.label}: {call}" if self.label else call

    def home(self) -> torch.device:
        """Where micro-batches go."""
        if self.device is not None:
            return self.device
        tensors = (tensor for group in (self.module.parameters(), self.module.buffers()) for tensor in group)
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def checked(self, batch: Any, call: str) -> Batch:
        """Check a batch, and that the model has an embedding for each token: on CUDA that would kill the process.

        Raises:
            BatchError: See :func:`~rl_session.workers.batch.check_batch`, or a token id is beyond the vocabulary.
        """
        checked = check_batch(batch, call)
        vocabulary = None if self.forward_fn is not None else _vocabulary_of(unwrapped(self.module))
        if vocabulary is not None:
            _check_vocabulary(checked["input_ids"], vocabulary, call)
        return checked

    def output(self, batch: Batch) -> Any:
        """Whatever the model, or ``forward_fn``, returns for a micro-batch on its device."""
        if self.forward_fn is not None:
            return self.forward_fn(self.module, batch)
        if self._accepted is None:
            self._accepted = _accepted_arguments(self.module)
        extras: dict[str, Any] = {}
        if "attention_mask" in self._accepted:
            extras["attention_mask"] = valid_mask(batch).long()
        if "use_cache" in self._accepted:
            extras["use_cache"] = False
        if "input_ids" in self._accepted:
            return self.module(input_ids=batch["input_ids"], **extras)
        return self.module(batch["input_ids"], **extras)

    def raw_logits(self, batch: Batch) -> Tensor:
        """Logits ``[b, S, V]`` as the model gives them, before the temperature.

        Raises:
            UnsupportedError: The model returned something else.
        """
        logits_bSV = self.tensor(self.output(batch), ("logits",))
        wanted = tuple(batch["input_ids"].shape)
        if logits_bSV.ndim != 3 or tuple(logits_bSV.shape[:2]) != wanted or not logits_bSV.is_floating_point():
            raise self.refusal(
                f"{logits_bSV.dtype} of shape {list(logits_bSV.shape)}", f"logits [{wanted[0]}, {wanted[1]}, V]"
            )
        return logits_bSV

    def logits(self, batch: Batch) -> Tensor:
        """Logits ``[b, S, V]`` divided by the temperature, for a loss.

        In place where nothing else can need the undivided ones; else for a moment there are two.

        Raises:
            UnsupportedError: The model returned something else.
        """
        logits_bSV = self.raw_logits(batch)
        if self.temperature == 1.0:
            return logits_bSV
        node = logits_bSV.grad_fn
        if self.forward_fn is None and node is not None and node.name() in _KEEPS_NO_RESULT:
            return logits_bSV.div_(self.temperature)
        return logits_bSV / self.temperature

    def tensor(self, output: Any, names: tuple[str, ...]) -> Tensor:
        """The tensor in a model's output: itself, an attribute or an entry of one of these names.

        Raises:
            UnsupportedError: There is none.
        """
        is_mapping = isinstance(output, Mapping)
        named = (output.get(name) if is_mapping else getattr(output, name, None) for name in names)
        for candidate in (output, *named):
            if isinstance(candidate, Tensor):
                return candidate
        raise self.refusal(f"a {type(output).__name__}", f"a tensor, or something with {' or '.join(names)}")

    def refusal(self, got: str, wanted: str) -> UnsupportedError:
        """The error for an output that cannot be used."""
        who = "forward_fn" if self.forward_fn is not None else f"the model ({type(unwrapped(self.module)).__name__})"
        return UnsupportedError(self.named(f"{who} returned {got}"), (f"what is needed is {wanted}",), _FORWARD_REMEDY)


def checked_temperature(value: Any) -> float:
    """Check a temperature.

    Raises:
        ArgumentError: It is no positive finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        facts = ("logits are divided by it",)
        raise ArgumentError(f"using temperature={value!r}", facts, "temperature=1.0, or any positive number")
    return float(value)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module under ``torch.compile``, data-parallel and PEFT wrappers: its signature is the one that counts."""
    for _ in range(8):
        if isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        elif isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif callable(get_base_model := getattr(module, "get_base_model", None)):
            module = cast("nn.Module", get_base_model())
        else:
            break
    return module


def _vocabulary_of(module: nn.Module) -> int | None:
    """How many tokens a Hugging Face model has embeddings for; None where a model does not tell."""
    try:
        size = getattr(module.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return size if isinstance(size, int) else None


def _check_vocabulary(ids_BS: Tensor, vocabulary: int, call: str) -> None:
    greatest = int(ids_BS.max())
    if greatest >= vocabulary:
        facts = (f"token id {greatest} is in row {int(ids_BS.max(dim=1).values.argmax())}",)
        remedy = "model.resize_token_embeddings(len(tokenizer)) before attach, or the tokenizer of this model"
        raise BatchError(f"{call}: a token id is beyond the model's vocabulary of {vocabulary}", facts, remedy)


def _accepted_arguments(module: nn.Module) -> frozenset[str]:
    parameters = inspect.signature(unwrapped(module).forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        # A forward that hands on what it is given: the model inside wants the same.
        names |= {"attention_mask", "use_cache"}
    return frozenset(names)


@contextmanager
def _inference(forward: Forward) -> Iterator[None]:
    with grad_mode(enabled=False), module_mode(forward.module, "eval"):
        yield


def get_logprobs(
    forward: Forward,
    batch: Any,
    *,
    temperature: float | None = None,
    mbs: int | None = None,
    key: str = "logprobs",
) -> dict[str, Tensor]:
    """Log-probability of each token given the ones before.

    Entry t of a row belongs to token t; entry 0 is 0, and so is what lies beyond ``input_lengths``. The values are
    bit-identical to ``log_softmax(logits.float() / temperature)``, but only a chunk of positions is ever in float32.

    Args:
        forward: The model.
        batch: The batch, see :func:`~rl_session.workers.batch.check_batch`.
        temperature: Instead of the forward's own.
        mbs: Sequences in one forward; None for all.
        key: The key of the result.

    Returns:
        ``{key: [B, S]}``, float32 on the CPU, in the order of the batch.

    Raises:
        BatchError: The batch, or ``mbs``, is wrong.
        NonFiniteError: A log-probability is NaN.
        UnsupportedError: The model gives no logits.
    """
    call = forward.named(_CALL_OF_KEY.get(key, f"computing {key}"))
    scale = forward.temperature if temperature is None else checked_temperature(temperature)
    checked = forward.checked(batch, call)

    def read(micro: Batch) -> dict[str, Tensor]:
        return {key: _logprobs(forward.raw_logits(micro), micro, scale)}

    result = _collect(forward, checked, mbs, read)
    _check_no_nan(result[key].isnan(), call)
    return result


_CALL_OF_KEY = {"logprobs": "get_logprobs()", "reference_logprobs": "get_reference_policy_logprobs()"}


def get_topk_logits(forward: Forward, batch: Any, k: int, mbs: int | None = None) -> dict[str, Tensor]:
    """The k greatest logits, divided by the temperature, that predict each next token, greatest first.

    Entries at and beyond the last token of a row are whatever the model says about padding.

    Args:
        forward: The model.
        batch: The batch.
        k: How many; at most the vocabulary.
        mbs: Sequences in one forward; None for all.

    Returns:
        ``{"topk_logits": [B, S-1, k] float32, "topk_indices": [B, S-1, k] int64}`` on the CPU; entry t is about token
        t + 1.

    Raises:
        ArgumentError: ``k`` is out of range.
        BatchError: The batch, or ``mbs``, is wrong.
        NonFiniteError: A logit at a valid position is NaN.
        UnsupportedError: The model gives no logits.
    """
    call = forward.named("get_topk_logits()")
    checked = forward.checked(batch, call)
    if type(k) is not int or k < 1:
        raise ArgumentError(
            f"{call}: k={k!r} is out of range", ("k counts logits",), "k=64, or any whole number of at least 1"
        )

    def read(micro: Batch) -> dict[str, Tensor]:
        logits_bSV = forward.raw_logits(micro)
        if k > logits_bSV.shape[-1]:
            facts = (f"the model has {logits_bSV.shape[-1]} logits a position",)
            raise ArgumentError(f"{call}: k={k} is out of range", facts, f"k={logits_bSV.shape[-1]} or less")
        return _topk(logits_bSV, k, forward.temperature)

    result = _collect(forward, checked, mbs, read)
    _check_no_nan(result["topk_logits"].isnan().any(dim=-1) & valid_mask(checked)[:, 1:].cpu(), call)
    return result


def score(forward: Forward, batch: Any, mbs: int | None = None) -> dict[str, Tensor]:
    """One number a sequence, as a reward model gives.

    Args:
        forward: A model that returns ``[b]`` or ``[b, 1]``, or ``[b, S, 1]``, of which the last token's counts.
        batch: The batch.
        mbs: Sequences in one forward; None for all.

    Returns:
        ``{"scores": [B]}``, float32 on the CPU.

    Raises:
        BatchError: The batch, or ``mbs``, is wrong.
        NonFiniteError: A score is NaN.
        UnsupportedError: The model gives no scores.
    """
    call = forward.named("score()")
    checked = forward.checked(batch, call)
    result = _collect(forward, checked, mbs, lambda micro: {"scores": _scores(forward, micro)})
    _check_no_nan(result["scores"].isnan()[:, None], call)
    return result


def get_values(forward: Forward, batch: Any, mbs: int | None = None) -> dict[str, Tensor]:
    """One number a token, as a critic gives; 0 beyond ``input_lengths``.

    Args:
        forward: A model that returns ``[b, S]`` or ``[b, S, 1]``.
        batch: The batch.
        mbs: Sequences in one forward; None for all.

    Returns:
        ``{"values": [B, S]}``, float32 on the CPU.

    Raises:
        BatchError: The batch, or ``mbs``, is wrong.
        NonFiniteError: A value is NaN.
        UnsupportedError: The model gives no values.
    """
    call = forward.named("get_values()")
    checked = forward.checked(batch, call)
    result = _collect(forward, checked, mbs, lambda micro: {"values": _values(forward, micro)})
    _check_no_nan(result["values"].isnan(), call)
    return result


def _collect(
    forward: Forward, batch: Batch, mbs: int | None, read: Callable[[Batch], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Read each micro-batch and put the parts together on the CPU, in order.

    All ranks make as many forwards as the one with most rows: a forward of a sharded model takes all of them.
    """
    home = forward.home()
    micros = micro_batches(batch, mbs)
    longest = forward.ranks.greatest(num_micro_batches(batch, mbs))
    with _inference(forward):
        parts = [{name: value.cpu() for name, value in read(to_device(micro, home)).items()} for micro in micros]
        for _ in range(longest - len(parts)):
            read(to_device(slice_batch(batch, 0, 1), home))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _chunks(logits_bSV: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of the positions that predict a token: never more than half of them at once, unless there is only one."""
    num, length, vocabulary = logits_bSV.shape
    positions = length - 1
    each = max(1, min(_CHUNK_ELEMENTS // max(1, num * vocabulary), (positions + 1) // 2))
    return ((start, min(start + each, positions)) for start in range(0, positions, each))


def _logprobs(logits_bSV: Tensor, batch: Batch, temperature: float) -> Tensor:
    ids_bS = batch["input_ids"]
    result_bS = torch.zeros(ids_bS.shape, dtype=torch.float32, device=logits_bSV.device)
    for start, stop in _chunks(logits_bSV):
        chunk_bCV = logits_bSV[:, start:stop].float()
        if temperature != 1.0:
            chunk_bCV = chunk_bCV / temperature  # not in place: of float32 logits the chunk is a view
        logprobs_bCV = torch.log_softmax(chunk_bCV, dim=-1)
        next_bC1 = ids_bS[:, start + 1 : stop + 1, None]
        result_bS[:, start + 1 : stop + 1] = logprobs_bCV.gather(-1, next_bC1).squeeze(-1)
        del chunk_bCV, logprobs_bCV  # before the next chunk is made, not after
    return result_bS.masked_fill_(~valid_mask(batch), 0.0)


def _topk(logits_bSV: Tensor, k: int, temperature: float) -> dict[str, Tensor]:
    num, length, _ = logits_bSV.shape
    logits_bSk = torch.empty(num, length - 1, k, dtype=torch.float32, device=logits_bSV.device)
    indices_bSk = torch.empty(num, length - 1, k, dtype=torch.int64, device=logits_bSV.device)
    for start, stop in _chunks(logits_bSV):
        best = torch.topk(logits_bSV[:, start:stop], k, dim=-1)
        logits_bSk[:, start:stop] = best.values.float() / temperature
        indices_bSk[:, start:stop] = best.indices
    return {"topk_logits": logits_bSk, "topk_indices": indices_bSk}


def _scores(forward: Forward, batch: Batch) -> Tensor:
    scores = forward.tensor(forward.output(batch), ("scores", "logits")).float()
    num, length = batch["input_ids"].shape
    if tuple(scores.shape) == (num, length, 1):
        last_b = batch["input_lengths"].long() - 1
        return scores[torch.arange(num, device=scores.device), last_b.to(scores.device), 0]
    if tuple(scores.shape) not in ((num,), (num, 1)):
        raise forward.refusal(f"shape {list(scores.shape)}", f"scores [{num}] or [{num}, 1], one for each sequence")
    return scores.reshape(num)


def _values(forward: Forward, batch: Batch) -> Tensor:
    values = forward.tensor(forward.output(batch), ("values", "logits")).float()
    wanted = tuple(batch["input_ids"].shape)
    if tuple(values.shape) not in (wanted, (*wanted, 1)):
        raise forward.refusal(
            f"shape {list(values.shape)}", f"values {list(wanted)} or {[*wanted, 1]}, one for each token"
        )
    return values.reshape(wanted).masked_fill(~valid_mask(batch), 0.0)


def _check_no_nan(nan_BS: Tensor, call: str) -> None:
    bad_B = nan_BS.any(dim=1)
    if not bool(bad_B.any()):
        return
    rows = bad_B.nonzero().flatten().tolist()
    shown = ", ".join(str(row) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
    facts = (f"{len(rows)} of {len(bad_B)} rows hold NaN: {shown}",)
    remedy = "check the weights (torch.isfinite on each parameter) and what was loaded or refitted last"
    raise NonFiniteError(f"{call}: the model's output is NaN", facts, remedy)
