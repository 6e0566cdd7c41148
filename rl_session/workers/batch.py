"""What a batch must be, and how it is cut, moved and counted.

A batch is a mapping with one batch axis: ``input_ids [B, S]`` int64, right-padded, ``input_lengths [B]``, optional
``token_mask [B, S]`` and ``sample_mask [B]``, and whatever the loss or the model needs. Everything whose first axis has
B entries (tensors, arrays, tensordicts, lists) is cut along it; everything else is carried as it is. Knows nothing of
models, losses or devices of policies.

Shape suffixes: B sequences, S positions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rl_session.errors import BatchError

__all__ = [
    "Batch",
    "check_batch",
    "counts",
    "global_batches",
    "micro_batches",
    "num_micro_batches",
    "positive",
    "size",
    "slice_batch",
    "take_rows",
    "to_device",
    "valid_mask",
]

Batch = dict[str, Any]

_EXAMPLE = '{"input_ids": ids [B, S] int64, "input_lengths": lengths [B], "token_mask": [B, S], "sample_mask": [B]}'

_KNOWN = frozenset({"input_ids", "input_lengths", "token_mask", "sample_mask"})
"""Keys with a meaning of their own: never a misspelling of another."""

_PER_SEQUENCE = frozenset({"advantages", "returns", "rewards", "values"}) | {
    f"{kind}_logprobs" for kind in ("generation", "prev", "reference", "reference_policy")
}
"""Keys that loops agree on: one row a sequence. A wrong length here would broadcast or shift rows without a word."""

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_batch(batch: Any, call: str, *, needs_loss_masks: bool = False) -> Batch:
    """Check a batch before anything is computed with it.

    Args:
        batch: A mapping, or anything with ``keys()`` and item access (TensorDict, BatchEncoding, UserDict).
        call: The call it was given to, for messages: ``"get_logprobs()"``.
        needs_loss_masks: Whether ``token_mask`` and ``sample_mask`` have to be there.

    Returns:
        A new dict with the same values.

    Raises:
        BatchError: It is no mapping, misses a key, has a wrong dtype or shape, is empty, has a length outside of 1 to
            S, a negative token id, tensors on different devices, or a mask that is not finite.
    """
    checked = _as_dict(batch, call)
    required = ["input_ids", "input_lengths", *(["token_mask", "sample_mask"] if needs_loss_masks else [])]
    for key in required:
        _check_present(checked, key, call)
    _check_input_ids(checked, call)
    _check_input_lengths(checked, call)
    for key, axes in (("token_mask", 2), ("sample_mask", 1)):
        if key in checked:
            _check_mask(checked, key, axes, call)
    _check_rows(checked, call)
    _check_one_device(checked, call)
    return checked


def size(batch: Mapping[str, Any]) -> int:
    """B, the number of sequences of a checked batch."""
    return len(batch["input_ids"])


def slice_batch(batch: Mapping[str, Any], start: int, stop: int) -> Batch:
    """The sequences ``start`` to ``stop`` of a checked batch; tensors are views."""
    num = size(batch)
    return {key: value[start:stop] if _num_rows(value) == num else value for key, value in batch.items()}


def take_rows(batch: Mapping[str, Any], rows: Sequence[int]) -> Batch:
    """The sequences of a checked batch at ``rows``, in that order; tensors are copies."""
    num = size(batch)
    return {key: _taken(value, list(rows)) if _num_rows(value) == num else value for key, value in batch.items()}


def _taken(value: Any, rows: list[int]) -> Any:
    if isinstance(value, list | tuple):
        taken = [value[row] for row in rows]
        return taken if isinstance(value, list) else tuple(taken)
    return value[rows]


def global_batches(batch: Mapping[str, Any], gbs: int | None, mbs: int | None, call: str) -> list[Batch]:
    """Cut a checked batch into one batch an optimizer step.

    Args:
        batch: The batch.
        gbs: Sequences in one optimizer step; None for all. B has to be a multiple of it.
        mbs: Sequences in one forward; None for all of a step. ``gbs`` has to be a multiple of it.
        call: For messages.

    Raises:
        BatchError: It cannot be cut evenly.
    """
    num = size(batch)
    each = num if gbs is None else positive("gbs", gbs)
    if num % each:
        facts = (f"the batch has {num} sequences, gbs is {each}: {num % each} would be left over",)
        raise BatchError(f"{call}: the batch cannot be cut into global batches", facts, _divisor("gbs", num, each))
    if mbs is not None and each % positive("mbs", mbs):
        facts = (f"gbs is {each}, mbs is {mbs}: {each % mbs} would be left over",)
        raise BatchError(f"{call}: a global batch cannot be cut into micro-batches", facts, _divisor("mbs", each, mbs))
    return [slice_batch(batch, start, start + each) for start in range(0, num, each)]


def _divisor(name: str, whole: int, wanted: int) -> str:
    """What to write instead of ``wanted``: the largest size up to it that divides the whole."""
    best = next(size for size in range(min(wanted, whole), 0, -1) if whole % size == 0)
    return f"{name}={best}   (a divisor of {whole})"


def micro_batches(batch: Mapping[str, Any], mbs: int | None) -> Iterator[Batch]:
    """Cut a checked batch into micro-batches of ``mbs`` sequences; the last one may be smaller.

    Args:
        batch: The batch.
        mbs: Sequences in a micro-batch; None for all at once.

    Raises:
        BatchError: ``mbs`` is no positive whole number.
    """
    num = size(batch)
    each = num if mbs is None else positive("mbs", mbs)
    return (slice_batch(batch, start, start + each) for start in range(0, num, each))


def num_micro_batches(batch: Mapping[str, Any], mbs: int | None) -> int:
    """How many micro-batches :func:`micro_batches` makes of a checked batch."""
    num = size(batch)
    return -(-num // (num if mbs is None else mbs))


def positive(name: str, value: Any) -> int:
    """Check a batch size given as an argument.

    Raises:
        BatchError: It is no positive whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BatchError(f"cutting a batch with {name}={value!r}", (), f"{name}=8, or any whole number of at least 1")
    return value


def to_device(batch: Mapping[str, Any], device: torch.device | str) -> Batch:
    """The batch with its tensors on ``device``; what is there already is not copied."""
    return {key: _to_device(value, device) for key, value in batch.items()}


def valid_mask(batch: Mapping[str, Any]) -> Tensor:
    """Which positions hold a token, bool ``[B, S]``: those before ``input_lengths``."""
    ids_BS, lengths_B = batch["input_ids"], batch["input_lengths"]
    positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    return cast("Tensor", positions_S < lengths_B.to(ids_BS.device)[:, None])


def counts(batch: Mapping[str, Any]) -> tuple[float, float]:
    """What a loss over this batch is normalised by.

    Without a ``token_mask`` every token counts, without a ``sample_mask`` every sequence. The first token of a sequence
    is predicted by nothing and never counts.

    Returns:
        ``(valid_seqs, valid_tokens)``: ``sample_mask.sum()`` and ``(token_mask[:, 1:] * sample_mask[:, None]).sum()``.
    """
    tokens_BS = batch["token_mask"] if "token_mask" in batch else valid_mask(batch)
    ones_B = torch.ones(size(batch), dtype=torch.float64, device=tokens_BS.device)
    samples_B = batch["sample_mask"].to(torch.float64) if "sample_mask" in batch else ones_B
    valid_tokens = (tokens_BS[:, 1:].to(torch.float64) * samples_B[:, None]).sum()
    return float(samples_B.sum()), float(valid_tokens)


def _as_dict(batch: Any, call: str) -> Batch:
    if not (hasattr(batch, "keys") and hasattr(batch, "__getitem__")):
        raise BatchError(
            f"{call}: reading the batch", (f"it is a {type(batch).__name__}, not a mapping",), f"a dict: {_EXAMPLE}"
        )
    return {str(key): batch[key] for key in batch.keys()}  # noqa: SIM118 (a TensorDict iterates over its rows)


def _check_present(batch: Batch, key: str, call: str) -> None:
    if key in batch:
        return
    close = difflib.get_close_matches(key, [k for k in batch if k not in _KNOWN], n=1, cutoff=0.5)
    facts = [f"it has {', '.join(sorted(batch)) or 'no keys at all'}"]
    remedy = f'batch["{key}"] = ...; a batch is {_EXAMPLE}'
    if key == "input_lengths" and "attention_mask" in batch:
        remedy = 'batch["input_lengths"] = batch["attention_mask"].sum(-1)   (right-padded)'
    elif close:
        facts.append(f"{close[0]!r} looks like it")
        remedy = f'batch["{key}"] = batch.pop("{close[0]}")'
    raise BatchError(f"{call}: the batch has no {key!r}", tuple(facts), remedy)


def _check_tensor(batch: Batch, key: str, shape: str, call: str) -> Tensor:
    value = batch[key]
    if not isinstance(value, Tensor):
        remedy = f'batch["{key}"] = torch.as_tensor(batch["{key}"])   of shape {shape}'
        raise BatchError(f"{call}: {key} is no tensor", (f"it is a {type(value).__name__}",), remedy)
    if value.is_meta:
        raise BatchError(
            f"{call}: {key} is a meta tensor",
            (f"it has shape {list(value.shape)} and no values",),
            f'batch["{key}"] of real values',
        )
    return value


def _check_input_ids(batch: Batch, call: str) -> None:
    ids_BS = _check_tensor(batch, "input_ids", "[B, S]", call)
    if ids_BS.dtype != torch.int64:
        remedy = 'batch["input_ids"] = batch["input_ids"].long()'
        raise BatchError(f"{call}: input_ids has the wrong dtype", (f"it is {ids_BS.dtype}, not torch.int64",), remedy)
    if ids_BS.ndim != 2:
        remedy = "one right-padded row a sequence: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)"
        raise BatchError(f"{call}: input_ids has the wrong shape", (_shape(ids_BS, "[B, S]"),), remedy)
    if ids_BS.numel() == 0:
        facts = (f"input_ids has shape {list(ids_BS.shape)}: no {'sequences' if not len(ids_BS) else 'positions'}",)
        raise BatchError(f"{call}: the batch is empty", facts, "skip the call when there is nothing to compute")
    row = _first_row(ids_BS.min(dim=1).values < 0)
    if row is not None:
        facts = (f"row {row} has token id {int(ids_BS[row].min())}",)
        remedy = "pad input_ids with the pad token; a label of -100 belongs into token_mask (as 0)"
        raise BatchError(f"{call}: input_ids holds a negative token id", facts, remedy)


def _check_input_lengths(batch: Batch, call: str) -> None:
    lengths_B = _check_tensor(batch, "input_lengths", "[B]", call)
    num, longest = batch["input_ids"].shape
    if lengths_B.dtype not in _INTEGERS:
        facts = (f"it is {lengths_B.dtype}, not an integer dtype",)
        remedy = 'batch["input_lengths"] = batch["input_lengths"].long()'
        raise BatchError(f"{call}: input_lengths has the wrong dtype", facts, remedy)
    if tuple(lengths_B.shape) != (num,):
        facts = (_shape(lengths_B, f"[{num}], one length for each row of input_ids"),)
        raise BatchError(
            f"{call}: input_lengths has the wrong shape", facts, 'batch["input_lengths"] = token_mask.sum(-1)'
        )
    row = _first_row((lengths_B < 1) | (lengths_B > longest))
    if row is not None:
        facts = (f"row {row} has length {int(lengths_B[row])}; input_ids has {longest} positions",)
        remedy = "a length of 1 to S for each row; leave empty sequences out, or mask them with sample_mask"
        raise BatchError(f"{call}: input_lengths does not fit input_ids", facts, remedy)


def _check_mask(batch: Batch, key: str, axes: int, call: str) -> None:
    mask = _check_tensor(batch, key, "[B, S]" if axes == 2 else "[B]", call)
    wanted = tuple(batch["input_ids"].shape[:axes])
    if tuple(mask.shape) != wanted:
        remedy = f'batch["{key}"] of shape {list(wanted)}: 1 for what the loss counts, 0 for the rest'
        raise BatchError(f"{call}: {key} has the wrong shape", (_shape(mask, str(list(wanted))),), remedy)
    if mask.is_complex():
        facts = (f"it is {mask.dtype}, not bool, integer or float",)
        raise BatchError(f"{call}: {key} has the wrong dtype", facts, f'batch["{key}"] = batch["{key}"].real')
    row = _first_row(~torch.isfinite(mask).reshape(len(mask), -1).all(dim=1)) if mask.is_floating_point() else None
    if row is not None:
        remedy = f'batch["{key}"] = batch["{key}"].nan_to_num(0.0), if what made it cannot be mended'
        raise BatchError(f"{call}: {key} is not finite", (f"row {row} holds NaN or infinity",), remedy)


def _check_rows(batch: Batch, call: str) -> None:
    num = size(batch)
    for key in sorted(_PER_SEQUENCE & batch.keys()):
        value = batch[key]
        if isinstance(value, Tensor) and _num_rows(value) != num:
            facts = (f"it has shape {list(value.shape)}; input_ids has {num} rows",)
            remedy = f'batch["{key}"] with one row for each row of input_ids'
            raise BatchError(f"{call}: {key} has the wrong shape", facts, remedy)


def _check_one_device(batch: Batch, call: str) -> None:
    # A 0-dim CPU tensor is a number: torch lets it meet any device.
    devices = {key: value.device for key, value in batch.items() if isinstance(value, Tensor) and value.ndim}
    if len(set(devices.values())) > 1:
        home = devices["input_ids"]
        facts = tuple(f"{key} is on {device}" for key, device in devices.items() if device != home)
        remedy = "leave the whole batch on the CPU: each call moves its micro-batches itself"
        raise BatchError(f"{call}: the batch is on several devices", (f"input_ids is on {home}", *facts), remedy)


def _shape(value: Tensor, wanted: str) -> str:
    return f"it has shape {list(value.shape)}, not {wanted}"


def _first_row(bad_B: Tensor) -> int | None:
    return int(bad_B.nonzero()[0]) if bool(bad_B.any()) else None


def _num_rows(value: Any) -> int | None:
    """How many entries the first axis has: of a tensor, an array, a tensordict, a list; None for anything else."""
    if isinstance(value, list | tuple):
        return len(value)
    shape = getattr(value, "shape", None)
    return int(shape[0]) if isinstance(shape, tuple) and shape else None


def _to_device(value: Any, device: torch.device | str) -> Any:
    if not isinstance(value, Tensor):
        # A tensordict goes along; an array or a string stays.
        return value.to(device) if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "to") else value
    # Made under the caller's inference_mode, it could not be saved for a backward.
    return (
        value.clone().to(device) if value.is_inference() and not torch.is_inference_mode_enabled() else value.to(device)
    )
