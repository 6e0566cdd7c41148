"""Who gets which rows of a batch, and results back in the caller's order. Pure: nothing is computed or sent here.

The driver splits, so that each rank is sent its own rows only; a rank takes a :class:`Share`, or a plain batch, which then
is what this rank has (a program that runs on every rank with a batch of its own). Every rank gets a batch it can run: all
of them have to take part in the collectives of a sharded model, so one without rows gets a row to run and to drop.

Rows of one optimizer step stay together: a step of ``gbs`` sequences is cut into contiguous, equally long parts, the
first ranks getting one more where it does not come out even.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from rl_session.errors import BatchError
from rl_session.workers.batch import Batch, check_batch, global_batches, positive, size, slice_batch, take_rows

__all__ = ["Share", "join", "own_share", "split"]


@attrs.define(slots=False, eq=False)
class Share:
    """What one rank has of a batch.

    Attributes:
        batch: Its rows, step by step; without any, one row of the batch, to run and to drop. A checked batch.
        steps: How many of its rows belong to each optimizer step, 0 for none.
        rows: Where each row is in the caller's batch; nothing for a rank without rows.
    """

    batch: Batch
    steps: tuple[int, ...]
    rows: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """How many rows are its own."""
        return sum(self.steps)

    @property
    def filler(self) -> Batch:
        """One row to run where a rank has nothing of its own."""
        return slice_batch(self.batch, 0, 1)

    def of_step(self, index: int) -> Batch | None:
        """Its rows of one optimizer step; None for none."""
        start = sum(self.steps[:index])
        return slice_batch(self.batch, start, start + self.steps[index]) if self.steps[index] else None


def split(
    batch: Any,
    num_ranks: int,
    call: str = "splitting a batch",
    *,
    gbs: int | None = None,
    mbs: int | None = None,
    needs_loss_masks: bool = False,
) -> list[Share]:
    """Cut a batch into one share a rank; checked as a whole, so that a bad batch reaches no rank.

    Args:
        batch: The batch.
        num_ranks: How many ranks there are.
        call: The call it was given to, for messages.
        gbs: Sequences in one optimizer step, over all ranks; None for all.
        mbs: Sequences in one forward of one rank; checked only: ``gbs`` has to be a multiple of it.
        needs_loss_masks: As for :func:`~rl_session.workers.batch.check_batch`.

    Returns:
        Shares in rank order.

    Raises:
        BatchError: The batch is wrong, or cannot be cut evenly into steps.
    """
    checked = check_batch(batch, call, needs_loss_masks=needs_loss_masks)
    global_batches(checked, gbs, mbs, call)
    each = size(checked) if gbs is None else gbs
    starts = range(0, size(checked), each)
    shares = []
    for rank in range(num_ranks):
        parts = [_part(start, each, rank, num_ranks) for start in starts]
        rows = [row for part in parts for row in part]
        shares.append(Share(take_rows(checked, rows or [0]), tuple(map(len, parts)), tuple(rows)))
    return shares


def _part(start: int, num: int, rank: int, num_ranks: int) -> range:
    """The rows of one rank among ``num`` rows from ``start``."""
    each, more = divmod(num, num_ranks)
    first = start + rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def join(
    results: Sequence[Mapping[str, Tensor]], shares: Sequence[Share], *, fill: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """Results of ranks, one row a row of its share, as one result in the order of the batch.

    Args:
        results: What each rank returned: tensors whose first axis has as many entries as the rank has rows of its own.
        shares: What :func:`split` gave.
        fill: What a shorter second axis is filled up with, by key (generated texts differ in length); 0 by default.

    Returns:
        Tensors ``[B, ...]``.
    """
    order = [row for share in shares for row in share.rows]
    place = torch.empty(len(order), dtype=torch.int64)
    place[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order))
    having = [result for result, share in zip(results, shares, strict=True) if share.num_rows]
    return {
        key: torch.cat(_even([result[key] for result in having], (fill or {}).get(key, 0)))[place] for key in having[0]
    }


def _even(parts: list[Tensor], fill: float) -> list[Tensor]:
    """Tensors of one length in their second axis."""
    if parts[0].ndim < 2 or len({part.shape[1] for part in parts}) == 1:
        return parts
    longest = max(part.shape[1] for part in parts)
    made = [part.new_full((part.shape[0], longest, *part.shape[2:]), fill) for part in parts]
    for whole, part in zip(made, parts, strict=True):
        whole[:, : part.shape[1]] = part
    return made


def own_share(batch: Any, num_ranks: int, call: str, *, gbs: int | None = None) -> Share:
    """The share of a rank that was given one, or a plain batch of rows that are all its own.

    Args:
        batch: A :class:`Share`, or a batch.
        num_ranks: How many ranks there are.
        call: The call it was given to, for messages.
        gbs: Sequences in one optimizer step, over all ranks. Of a plain batch each rank has an equal part of a step.

    Raises:
        BatchError: It is neither, or a plain batch cannot be cut evenly into steps.
    """
    if isinstance(batch, Share):
        return batch
    checked = check_batch(batch, call)
    num = size(checked)
    each = num
    if gbs is not None:
        each, left = divmod(positive("gbs", gbs), num_ranks)
        if left or not each:
            facts = (f"gbs is {gbs}, over {num_ranks} ranks that each have rows of their own",)
            raise BatchError(f"{call}: a global batch cannot be cut evenly", facts, f"gbs={max(1, each) * num_ranks}")
    if num % each:
        facts = (f"this rank has {num} sequences, its part of gbs={gbs} is {each}: {num % each} would be left over",)
        raise BatchError(f"{call}: the batch cannot be cut into global batches", facts, f"gbs={num * num_ranks}")
    return Share(checked, (each,) * (num // each), tuple(range(num)))
