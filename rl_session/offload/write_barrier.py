"""A barrier that the first write to a storage takes down: how bytes at rest are known not to have been written.

torch marks a storage as copy-on-write when a lazy clone of it is made. The mark stays when the clone is gone, and goes at
the moment when anything asks for a pointer that it may write through. That is below every operator, so it holds for all
threads, for C++ extensions, collectives, fused optimizers and compiled code, and for every tensor over the storage: views,
``.data``, aliases nobody told us of. Nothing is copied when the mark goes, and no address changes, because nobody else
shares the bytes any more. Reads through const pointers (those of torch's own operators) leave the barrier up; whoever
takes a pointer that could be written (``data_ptr()``, ``numpy()``, pickle, Triton) takes it down, written or not.

Not seen: writes through a raw pointer taken before the barrier was put up (ctypes, DLPack, ``__array_interface__``).
While a barrier is up, ``Tensor.record_stream`` does nothing for the storage on CUDA (the allocator does not know the
pointer as its own), so whoever frees it has to wait for every stream first; see :meth:`Device.drain`. Two threads that
take the barrier of one storage down at the same time, neither holding the interpreter's lock, race inside torch.

Call everything here under :func:`~rl_session.offload.tensors.library_access`. Nothing about CUDA has been measured by this
project yet. Knows nothing of units, modes or policies.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rl_session.offload.tensors import library_access

__all__ = ["is_up", "put_up", "take_down"]


def put_up(alias: Tensor) -> bool:
    """Put the barrier up around the storage of a plain tensor; whether that was possible.

    It is not where torch does not own the memory (mapped files, numpy arrays, memory shared between processes, pluggable
    allocators), nor where this torch does not do what the text above says.
    """
    return _works_on(alias.device) and _mark(alias)


def is_up(alias: Tensor) -> bool:
    """Whether the barrier around the storage of a tensor stands."""
    return bool(torch._C._is_cow_tensor(alias))  # type: ignore[attr-defined]


def take_down(alias: Tensor) -> None:
    """Take the barrier down, as a write would; idempotent."""
    alias.data_ptr()


def _mark(alias: Tensor) -> bool:
    try:
        torch._lazy_clone(alias)
    except RuntimeError:  # the memory is not of a kind that torch can mark
        return False
    return True


@functools.cache
def _works_on(device: torch.device) -> bool:
    """Whether this torch does on ``device`` what the text above says; where it does not, nothing is trusted at rest."""
    if not (hasattr(torch, "_lazy_clone") and hasattr(torch._C, "_is_cow_tensor")):
        return False
    with library_access():
        tensor = torch.ones(4, device=device)
        view, address = tensor[:2], tensor.data_ptr()
        if not _mark(tensor):
            return False
        tensor.sum()
        stood = is_up(tensor)
        view.mul_(2.0)
        return stood and not is_up(tensor) and tensor.data_ptr() == address and tensor.tolist() == [2.0, 2.0, 1.0, 1.0]
