"""What runs inside a vLLM worker: it takes weights, and says how many bytes what is awake takes.

vLLM mixes :class:`WorkerExtension` into its worker class (``worker_extension_cls``), so ``self`` has the worker's attributes.
A bucket comes as :func:`packed` made it: by reference within one process, through CUDA IPC from another process on the same
GPU, or as bytes when it is in host memory. What crosses is plain strings, numbers and bytes, which vLLM's own channel takes
without being told to trust pickles. Imports vLLM only where it runs inside it.

The worker's attributes and ``process_weights_after_loading`` are used as vLLM's own RLHF examples use them. Nothing in this file
has been run inside vLLM, and the CUDA IPC branch has not been run at all.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

__all__ = ["EXTENSION", "Packed", "WorkerExtension", "packed", "plain", "rebuilt", "unpacked"]

EXTENSION = f"{__name__}.WorkerExtension"
"""What ``vllm.LLM(worker_extension_cls=...)`` is given."""

_STORAGES = {"TypedStorage": torch.storage.TypedStorage, "UntypedStorage": torch.UntypedStorage}
_HERE: dict[int, dict[str, Tensor]] = {}
"""Buckets on their way to a worker in this very process, by ticket."""
_TICKETS = itertools.count(1)


class Packed:
    """A bucket on its way; the block of a ``with`` keeps it deliverable."""

    def __init__(self, bucket: Mapping[str, Tensor]) -> None:
        self._bucket = dict(bucket)
        self._ticket = next(_TICKETS)

    def __enter__(self) -> dict[str, Any]:
        _HERE[self._ticket] = self._bucket
        # Clones: safetensors takes no two tensors over one storage, and host copies and ties are just that.
        host = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in self._bucket.items()
            if tensor.device.type == "cpu"
        }
        away = {n: plain(reduce_tensor(t.detach())[1]) for n, t in self._bucket.items() if t.device.type != "cpu"}
        return {
            "pid": os.getpid(),
            "ticket": self._ticket,
            "host": safetensors.torch.save(host),
            "ipc": away,
        }

    def __exit__(self, *_: object) -> None:
        del _HERE[self._ticket]


def packed(bucket: Mapping[str, Tensor]) -> Packed:
    """A context manager that gives a bucket in a form that can cross a process boundary, valid inside the block."""
    return Packed(bucket)


def plain(arguments: Sequence[Any]) -> list[Any]:
    """What ``reduce_tensor`` gives of a CUDA tensor, with names in place of classes and dtypes."""
    _, size, stride, offset, storage, dtype, *rest = arguments
    return [list(size), list(stride), offset, storage.__name__, str(dtype).removeprefix("torch."), *rest]


def rebuilt(arguments: Sequence[Any], device_index: int | None) -> Tensor:
    """The tensor of another process on the same GPU, which this process may know under another index."""
    size, stride, offset, storage, dtype, _, *rest = arguments
    home = _STORAGES[storage]
    tensor: Tensor = rebuild_cuda_tensor(
        Tensor, torch.Size(size), tuple(stride), offset, home, getattr(torch, dtype), device_index, *rest
    )
    return tensor


def unpacked(payload: Mapping[str, Any], device_index: int | None) -> dict[str, Tensor]:
    """The tensors of a payload, in the process that received it.

    Args:
        payload: What ``with packed(bucket) as payload`` gave.
        device_index: The index of the GPU in this process; the sender may see it under another one.
    """
    if payload["pid"] == os.getpid():
        return _HERE[payload["ticket"]]
    tensors: dict[str, Tensor] = safetensors.torch.load(payload["host"])
    for name, arguments in payload["ipc"].items():
        tensors[name] = rebuilt(arguments, device_index)
    return tensors


class WorkerExtension:
    """Methods that :class:`rl_session.VLLMEngine` calls in each worker with ``collective_rpc``."""

    model_runner: Any
    model_config: Any
    device: torch.device

    def rl_session_load(self, payload: Mapping[str, Any]) -> int:
        """Write a bucket into the model; returns how many weights it had."""
        tensors = unpacked(payload, self.device.index)
        self.model_runner.model.load_weights(weights=list(tensors.items()))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the sender may free the bucket when this returns
        return len(tensors)

    def rl_session_loaded(self) -> None:
        """After the last bucket: what vLLM does to weights once they are loaded, such as a change of layout."""
        try:
            from vllm.model_executor.model_loader.utils import process_weights_after_loading
        except ImportError:  # not inside vLLM, or a version without it
            return
        process_weights_after_loading(self.model_runner.model, self.model_config, self.device)
        torch.cuda.synchronize(self.device)

    def rl_session_sizes(self) -> dict[str, int]:
        """Bytes of device memory by tag, awake or asleep, as vLLM's sleep-mode allocator has them; empty without one."""
        try:
            from vllm.device_allocator.cumem import CuMemAllocator
        except ImportError:
            return {}
        sizes: dict[str, int] = {}
        for data in CuMemAllocator.get_instance().pointer_to_data.values():
            sizes[data.tag] = sizes.get(data.tag, 0) + int(data.handle[1])
        return sizes
