"""Host buffers: allocated once, reused for ever, counted against a budget, given back on close.

Every host byte this library holds comes from here, so that nothing is pinned without a budget. Buffers are exact in size
(no rounding to powers of two); the small ones that one transition asks for are cut from one block. Knows nothing of what
is kept in them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rl_session.errors import HostMemoryError
from rl_session.offload.device import Device

__all__ = ["HostBuffer", "HostPool"]

_ALIGN = 64
_PAGE = 4096
_SHARED_BELOW = 1 << 20
"""Buffers smaller than this many bytes that are asked for together share one block."""


class _Block:
    """One allocation, cut into buffers; pinned as a whole when the device wants it."""

    __slots__ = ("base", "num_buffers", "pinned_by", "span")

    def __init__(self, nbytes: int, device: Device | None) -> None:
        self.pinned_by: Device | None = None
        self.num_buffers = 0
        pad = _PAGE if device is not None and device.torch_device.type == "cuda" else 0
        self.base = torch.empty(nbytes + pad, dtype=torch.uint8)
        start = -self.base.data_ptr() % _PAGE if pad else 0
        self.span = self.base[start : start + nbytes]

    def pin(self, device: Device) -> bool:
        if device.pin(self.span):
            self.pinned_by = device
            return True
        return False

    def release(self) -> None:
        if self.pinned_by is not None:
            self.pinned_by.unpin(self.span)
            self.pinned_by = None


class HostBuffer:
    """Host memory for one storage: ``data`` is a uint8 tensor exactly as long as the storage."""

    __slots__ = ("block", "data", "nbytes")

    def __init__(self, data: Tensor, block: _Block) -> None:
        self.data = data
        self.nbytes = data.numel()
        self.block = block
        block.num_buffers += 1


class HostPool:
    """Reusable host buffers with a budget.

    Args:
        budget: The most bytes to hold, in use and idle together; None for no limit.
        warn: Told once, with a message, when pinning fails and the pool falls back to pageable memory.
    """

    def __init__(self, budget: int | None = None, warn: Callable[[str], None] | None = None) -> None:
        self.budget = budget
        self.num_allocations = 0
        self._warn = warn
        self._idle: dict[int, list[HostBuffer]] = defaultdict(list)
        self._held_bytes = 0
        self._idle_bytes = 0
        self._lock = threading.Lock()
        self._pin_failed = False
        self.before_pin: Callable[[], None] | None = None
        """Called once, before the first pinned allocation (CPU affinity belongs there)."""

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory held, in use and idle."""
        return self._held_bytes

    @property
    def in_use_bytes(self) -> int:
        """Bytes of host memory that hold something."""
        return self._held_bytes - self._idle_bytes

    def acquire(self, sizes: Sequence[int], device: Device | None = None, *, pin: bool = True) -> list[HostBuffer]:
        """Buffers of the given sizes in bytes: idle ones of exactly that size first, new ones cut from one block.

        Raises:
            HostMemoryError: The budget or the host has no room; nothing was acquired.
        """
        with self._lock:
            taken: list[HostBuffer | None] = [self._take_idle(size) for size in sizes]
            missing = [size for size, buffer in zip(sizes, taken, strict=True) if buffer is None]
            try:
                fresh = iter(self._allocate(missing, device, pin=pin))
            except BaseException:
                for buffer in taken:
                    if buffer is not None:
                        self._put_idle(buffer)
                raise
            return [buffer if buffer is not None else next(fresh) for buffer in taken]

    def release(self, buffers: Sequence[HostBuffer]) -> None:
        """Give buffers back for reuse."""
        with self._lock:
            for buffer in buffers:
                self._put_idle(buffer)

    def trim(self) -> int:
        """Free the idle buffers; returns the bytes given back to the host."""
        with self._lock:
            return self._trim()

    def _take_idle(self, size: int) -> HostBuffer | None:
        idle = self._idle.get(size)
        if not idle:
            return None
        self._idle_bytes -= size
        return idle.pop()

    def _put_idle(self, buffer: HostBuffer) -> None:
        self._idle[buffer.nbytes].append(buffer)
        self._idle_bytes += buffer.nbytes

    def _trim(self) -> int:
        """Drop the buffers of blocks that are idle as a whole: a block in part use frees nothing."""
        idle_of: dict[int, int] = defaultdict(int)
        for buffer in self._all_idle():
            idle_of[id(buffer.block)] += 1
        doomed = [b for b in self._all_idle() if idle_of[id(b.block)] == b.block.num_buffers]
        for block in {id(b.block): b.block for b in doomed}.values():
            block.release()
        gone = {id(b) for b in doomed}
        for size, idle in self._idle.items():
            self._idle[size] = [b for b in idle if id(b) not in gone]
        freed = sum(b.nbytes for b in doomed)
        self._held_bytes -= freed
        self._idle_bytes -= freed
        return freed

    def _all_idle(self) -> Iterator[HostBuffer]:
        for idle in self._idle.values():
            yield from idle

    def _allocate(self, sizes: Sequence[int], device: Device | None, *, pin: bool) -> list[HostBuffer]:
        if not sizes:
            return []
        self._check_budget(sum(sizes))
        small = [size for size in sizes if size < _SHARED_BELOW]
        blocks: list[_Block] = []
        try:
            shared = iter(self._cut(small, blocks, device, pin=pin))
            buffers = [
                next(shared) if size < _SHARED_BELOW else self._cut([size], blocks, device, pin=pin)[0]
                for size in sizes
            ]
        except BaseException as error:
            for block in blocks:
                block.release()
            if not isinstance(error, RuntimeError | MemoryError):
                raise
            raise HostMemoryError(
                f"host pool: the host has no room for {sum(sizes)} more bytes", (), "free host memory", str(error)
            ) from error
        self._held_bytes += sum(sizes)
        return buffers

    def _check_budget(self, wanted: int) -> None:
        if self.budget is None or self._held_bytes + wanted <= self.budget:
            return
        self._trim()
        if self._held_bytes + wanted > self.budget:
            raise HostMemoryError(
                f"host pool: {wanted} more bytes do not fit",
                (f"budget: {self.budget} bytes", f"held: {self._held_bytes} bytes"),
                "raise host_budget, or keep more on the device",
            )

    def _cut(self, sizes: Sequence[int], blocks: list[_Block], device: Device | None, *, pin: bool) -> list[HostBuffer]:
        """One block, cut into buffers of the given sizes; it is added to ``blocks``."""
        if not sizes:
            return []
        padded = [-(-size // _ALIGN) * _ALIGN for size in sizes]
        block = _Block(sum(padded), device)
        blocks.append(block)
        self.num_allocations += 1
        if pin and device is not None:
            self._pin(block, device)
        pieces = block.span.split(padded)
        return [HostBuffer(piece[:size], block) for piece, size in zip(pieces, sizes, strict=True)]

    def _pin(self, block: _Block, device: Device) -> None:
        if not device.wants_pinned or self._pin_failed:
            return
        if self.before_pin is not None:
            self.before_pin()
            self.before_pin = None
        if not block.pin(device):
            self._pin_failed = True
            if self._warn is not None:
                self._warn("page-locking host memory failed; falling back to pageable memory (check ulimit -l)")
