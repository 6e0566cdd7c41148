"""Legacy loss objects as loss functions of this library.

A legacy loss is called with keywords, which ones its ``input_type`` says, and is told the counts of the global batch. The
adapter calls it so from inside a library loss function. Loops that have moved to scopes use it as well, so that a loss
object need not be rewritten with the loop: ``policy.train(batch, as_loss_fn(loss))``. Knows nothing of policies.

Shape suffixes: b sequences of a micro-batch, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_session.errors import UnsupportedError
from rl_session.metrics import each
from rl_session.workers.batch import counts
from rl_session_migrate.shim.batch import BatchedDataDict

__all__ = ["LegacyLoss", "as_loss_fn"]

_COUNT = "global_valid_seqs"
"""Reported by every micro-batch that counts: its list tells how many there were."""


def as_loss_fn(loss: Any) -> Any:
    """A loss function for ``policy.train`` and ``step.forward_backward`` from a legacy loss object.

    Args:
        loss: An object with ``input_type`` ("logprob" or "logit", or an enum of that name), called with keywords
            ``next_token_logprobs [b, S-1]`` or ``logits [b, S, V]``, and ``data``, ``global_valid_seqs``,
            ``global_valid_toks``; returns ``(loss, metrics)``. A callable without ``input_type`` is given back as it is.

    Returns:
        ``loss_fn(logits [b, S, V], batch, global_valid_seqs, global_valid_tokens) -> (loss, metrics)``; metrics are summed.

    Raises:
        UnsupportedError: Its ``input_type`` is another one.
    """
    return loss if getattr(loss, "input_type", None) is None else LegacyLoss(loss)


class LegacyLoss:
    """A legacy loss object as a loss function. It can be pickled where the object can.

    Args:
        loss: The object.
        num_global_batches: With a number, metrics are reported as legacy ``train`` does: each micro-batch's value in a
            list, divided by the number of global batches unless the name says minimum or maximum, and without micro-batches
            whose ``num_valid_samples`` is 0. None reports sums.
        is_counting: Whether global counts are not known: then each micro-batch reports its own.

    Raises:
        UnsupportedError: Its ``input_type`` is neither of the two.
    """

    def __init__(self, loss: Any, num_global_batches: int | None = None, *, is_counting: bool = False) -> None:
        self.loss = loss
        self.num_global_batches = num_global_batches
        self.is_counting = is_counting
        self.loss_type = getattr(loss, "loss_type", "token_level")
        """Which global count normalises: what the library asks where it counts itself."""
        self._input = _input_type(loss)

    def __repr__(self) -> str:
        return f"LegacyLoss({self.loss!r})"

    def __call__(self, logits_bSV: Tensor, batch: Mapping[str, Any], seqs: Tensor, toks: Tensor) -> tuple[Tensor, Any]:
        """Call the legacy object; see :func:`as_loss_fn`."""
        if self._input == "positional":
            loss, metrics = self.loss(logits_bSV, batch, seqs, toks)
        else:
            given = {"logits": logits_bSV}
            if self._input == "logprob":
                given = {"next_token_logprobs": _next_token_logprobs(logits_bSV, batch["input_ids"])}
            loss, metrics = self.loss(
                **given, data=BatchedDataDict(batch), global_valid_seqs=seqs, global_valid_toks=toks
            )
        if self.num_global_batches is None:
            return loss, metrics
        found = counts(batch) if self.is_counting else (seqs, toks)
        return loss, self._listed(metrics, *found)

    def _listed(self, metrics: Mapping[str, Any], seqs: Tensor | float, toks: Tensor | float) -> dict[str, Any]:
        assert self.num_global_batches is not None
        if float(metrics.get("num_valid_samples", 1)) == 0:
            return {}
        listed = {name: self._share(name, value) for name, value in metrics.items()}
        listed[_COUNT] = each(seqs, is_share=False)
        listed["global_valid_toks"] = each(toks, is_share=False)
        return listed

    def _share(self, name: str, value: Any) -> Any:
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if not is_number or "_min" in name or "_max" in name:
            return each(value, is_share=False)
        number = value.detach() if isinstance(value, Tensor) else value
        share = number / self.num_global_batches if self.num_global_batches not in (None, 1) else number
        return each(share, is_share=not name.startswith("num_"))  # a count is no share of the loss


def _input_type(loss: Any) -> str:
    kind = getattr(loss, "input_type", None)
    if kind is None:
        return "positional"
    text = str(getattr(kind, "name", kind)).lower()
    if text in ("logprob", "logit"):
        return text
    raise UnsupportedError(
        f"a loss of type {type(loss).__name__} with input_type={text!r}",
        ("served are LOGPROB (next_token_logprobs) and LOGIT (logits)",),
        "a loss function: loss_fn(logits, batch, global_valid_seqs, global_valid_tokens) -> (loss, metrics)",
    )


def _next_token_logprobs(logits_bSV: Tensor, ids_bS: Tensor) -> Tensor:
    """Log-probability of each token but the first, ``[b, S-1]`` float32, with its gradient."""
    logprobs_bSV = torch.log_softmax(logits_bSV[:, :-1].float(), dim=-1)
    return logprobs_bSV.gather(-1, ids_bS[:, 1:, None]).squeeze(-1)
