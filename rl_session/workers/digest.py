"""A short fingerprint of the tensors in a result, to tell whether two runs computed the same. Knows nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["digest_of"]


def digest_of(value: Any) -> str | None:
    """The fingerprint of every tensor in a result: names, dtypes, shapes and bytes, whatever the order of keys.

    Numbers beside the tensors (metrics) are not in it: two loops that compute the same may report them differently.

    Args:
        value: A tensor, or nested mappings, lists and tuples.

    Returns:
        16 hexadecimal digits; None when there is no tensor.
    """
    found = hashlib.blake2b(digest_size=8)
    num = 0
    for name, tensor in _tensors("", value):
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{name}|{plain.dtype}|{list(plain.shape)}|".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        num += 1
    return found.hexdigest() if num else None


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)
