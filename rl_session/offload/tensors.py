"""Storages under tensors: identity, what can be moved, and aliases of raw bytes.

Everything here works below ``__torch_function__`` so that it may touch tensors whose bytes are away. Knows nothing of
components or devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rl_session.errors import UnsupportedError

__all__ = [
    "AWAY_TYPES",
    "byte_alias",
    "check_supported",
    "find_storage",
    "fresh_view",
    "holder_counts",
    "library_access",
    "local_nbytes",
    "num_holders",
    "plain_tensors",
    "rehome",
    "storage_of",
    "weak_storage",
]


AWAY_TYPES: set[type] = set()
"""The classes that tensors have while their bytes are away (:mod:`rl_session.offload.guard` makes them)."""


@contextmanager
def library_access() -> Iterator[None]:
    """Run below ``__torch_function__``, without autograd and outside inference mode.

    Outside inference mode, because tensors made inside it cannot be used by autograd afterwards.
    """
    with torch.inference_mode(mode=False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage under a plain tensor, also while its bytes are away."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def weak_storage(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A weak reference that also keeps the identity (``_cdata``) from being reused."""
    return StorageWeakRef(storage)


def find_storage(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference, or None when it is gone."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return storage


def byte_alias(storage: torch.UntypedStorage) -> Tensor:
    """A fresh uint8 tensor over the whole storage.

    Writes go through such aliases only: writing through a parameter or a view of it bumps its version counter, and a
    live autograd graph then refuses to run backward. Call under :func:`library_access`.
    """
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def fresh_view(
    like: Tensor, storage: torch.UntypedStorage, offset: int | None = None, device: torch.device | None = None
) -> Tensor:
    """A tensor of the dtype, shape and strides of ``like`` over ``storage``, with a version counter of its own.

    Args:
        like: Gives dtype, shape and strides; only its metadata is read.
        storage: The bytes to look at.
        offset: In elements; that of ``like`` by default.
        device: Where the storage is; the device of ``storage`` by default.
    """
    view = torch.empty(0, dtype=like.dtype, device=device or storage.device)
    start = like.storage_offset() if offset is None else offset
    view = view.set_(storage, start, like.size(), like.stride())
    if like.is_conj():  # a lazy conjugate is a bit on the tensor, not in its bytes
        view = view.conj()
    return torch._neg_view(view) if like.is_neg() else view  # noqa: SLF001 (the only door to that bit)


def num_holders(storage: torch.UntypedStorage) -> int:
    """How many C++ owners the storage has besides the Python object: one for each tensor, view or graph over it."""
    return holder_counts([storage._cdata])[0]


def holder_counts(keys: Sequence[int]) -> list[int]:
    """:func:`num_holders` of storages by identity; a Python object of each must exist."""
    return [count - 1 for count in map(torch._C._storage_Use_Count, keys)]


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold the bytes of ``tensor``: itself, or the inner ones of a wrapper subclass."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten(tensor)
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):
            yield from plain_tensors(inner)


def local_nbytes(tensor: Tensor) -> int:
    """Bytes of the values of a tensor in this process: of a sharded one, those of its shard."""
    return sum(inner.numel() * inner.element_size() for inner in plain_tensors(tensor))


def check_supported(tensor: Tensor, label: str) -> None:
    """Refuse, by name, what cannot be moved without corrupting it.

    Raises:
        UnsupportedError: A meta, sparse, mkldnn, nested or quantized tensor, one made in inference mode, or one in shared
            memory.
    """
    reason = remedy = ""
    if tensor.is_meta:
        reason, remedy = "is a meta tensor: it has no bytes", "load or initialise the weights first, then attach"
    elif tensor.layout is not torch.strided:
        reason, remedy = f"has layout {tensor.layout}", "keep sparse tensors outside the model, or densify them"
    elif tensor.is_quantized or (tensor.is_nested and not hasattr(type(tensor), "__tensor_flatten__")):
        reason = f"is a {'quantized' if tensor.is_quantized else 'nested'} tensor, with metadata outside its bytes"
        remedy = "keep it outside the model, or use a plain tensor"
    elif tensor.is_inference():
        reason, remedy = "was made under torch.inference_mode()", "build the model outside inference_mode()"
    elif tensor.device.type == "cpu" and storage_of(tensor).is_shared():
        reason, remedy = "is in memory shared with another process", "clone it before attach: p.data = p.data.clone()"
    if reason:
        raise UnsupportedError(
            f"cannot manage {label} (shape {tuple(tensor.shape)}, {tensor.dtype})", (f"it {reason}",), remedy
        )


def rehome(storage: torch.UntypedStorage, aliases: list[Tensor]) -> torch.UntypedStorage:
    """Give every alias of a storage that cannot be resized a resizable one with the same bytes; return the new one.

    ``Tensor.data`` is set, not ``set_``: it keeps version counters and identity. Holders unknown to us keep the old
    bytes, which stay as they were, and so do arrays that ``Tensor.numpy()`` gave: they own an alias of their own (torch
    2.13). Call under :func:`library_access`.
    """
    fresh = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
    fresh.copy_(byte_alias(storage))
    home = fresh.untyped_storage()
    for alias in aliases:
        alias.data = fresh_view(alias, home)
    return home
