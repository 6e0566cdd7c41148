"""The batch type of legacy loops: a dictionary of tensors (and lists) with one batch axis.

Has the methods that loops use. The legacy class itself, or any mapping, is accepted wherever this one is. Knows nothing of
models or losses.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from rl_session.errors import BatchError

__all__ = ["BatchedDataDict"]


class BatchedDataDict(UserDict[str, Any]):
    """Tensors and lists with one batch axis; item access, ``get``, ``update`` and ``in`` as in a dict.

    May be written with the type of its contents, ``BatchedDataDict[LossData]({...})``, which says nothing at run time.
    """

    @classmethod
    def __class_getitem__(cls, contents: Any) -> type[Self]:
        """The class itself."""
        del contents
        return cls

    @property
    def size(self) -> int:
        """Sequences in the batch; 0 when it has no rows at all."""
        return next((len(value) for value in self.data.values() if _has_rows(value)), 0)

    def to(self, device: torch.device | str) -> Self:
        """Move the tensors to ``device``, in place; returns the batch itself."""
        for name, value in self.data.items():
            if isinstance(value, Tensor):
                self.data[name] = value.to(device)
        return self

    def slice(self, start: int, end: int) -> Self:
        """The sequences ``start`` to ``end``; tensors are views.

        Raises:
            BatchError: There are no such sequences.
        """
        if not 0 <= start < end:
            facts = (f"the batch has {self.size} sequences",)
            raise BatchError(f"batch.slice({start}, {end})", facts, "batch.slice(0, batch.size)")
        return type(self)({name: value[start:end] if _has_rows(value) else value for name, value in self.data.items()})

    def select_indices(self, indices: Sequence[int] | Tensor) -> Self:
        """The sequences of these indices, in their order."""
        rows = torch.as_tensor(indices)
        return type(self)({name: _pick(value, rows) for name, value in self.data.items()})

    def repeat_interleave(self, num_repeats: int, **options: Any) -> Self:
        """Each sequence ``num_repeats`` times, the copies beside each other; ``options`` are about media, and not used."""
        del options
        rows = torch.arange(self.size).repeat_interleave(num_repeats)
        return type(self)({name: _pick(value, rows) for name, value in self.data.items()})

    def chunk(self, rank: int, chunks: int) -> Self:
        """The ``rank``-th of ``chunks`` equal parts.

        Raises:
            BatchError: The batch cannot be cut evenly.
        """
        each, left = divmod(self.size, chunks)
        if left:
            facts = (f"the batch has {self.size} sequences: {left} would be left over",)
            raise BatchError(f"batch.chunk({rank}, {chunks})", facts, "a number of chunks that divides the batch")
        return self.slice(rank * each, (rank + 1) * each)

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        """Parts of ``microbatch_size`` sequences; the last one may be smaller."""
        for start in range(0, self.size, microbatch_size):
            yield self.slice(start, min(start + microbatch_size, self.size))

    def get_multimodal_dict(self, as_tensors: bool = False, **options: Any) -> dict[str, Any]:
        """What of the batch is images, sound or video: nothing; such inputs go through the policy's ``forward_fn``."""
        del as_tensors, options
        return {}

    def get_dict(self) -> dict[str, Any]:
        """The plain dict."""
        return dict(self.data)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None, **options: Any
    ) -> Self:
        """Put batches together along the batch axis, padding rows to the longest.

        Args:
            batches: At least one; each with the same keys.
            pad_value_dict: Key to the value its rows are padded with; 0 for the rest.
            **options: About media; taken and not used.

        Raises:
            BatchError: There is no batch.
        """
        del options
        if not batches:
            raise BatchError("from_batches() of no batch", (), "from_batches([batch, ...])")
        pads = pad_value_dict or {}
        return cls({name: _join([batch[name] for batch in batches], pads.get(name, 0)) for name in batches[0]})


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or bool(isinstance(value, Tensor) and value.ndim)


def _pick(value: Any, rows: Tensor) -> Any:
    if isinstance(value, list):
        return [value[row] for row in rows.tolist()]
    return value[rows.to(value.device)] if _has_rows(value) else value


def _join(values: Sequence[Any], pad: float) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if not isinstance(values[0], Tensor):
        return values[0]
    if values[0].ndim < 2:
        return torch.cat([value.reshape(-1) for value in values])
    longest = max(value.shape[1] for value in values)
    return torch.cat([_padded(value, longest, pad) for value in values])


def _padded(value: Tensor, length: int, pad: float) -> Tensor:
    missing = length - value.shape[1]
    if not missing:
        return value
    filler = value.new_full((value.shape[0], missing, *value.shape[2:]), pad)
    return torch.cat([value, filler], dim=1)
