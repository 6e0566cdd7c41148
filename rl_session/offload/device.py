"""Devices: where bytes live when they are needed. One interface; CUDA is real, the CPU is emulated.

The emulated device runs the same code path as CUDA with real copies and real frees, counts every byte it copies, can be
given a capacity, and can be made to fail, to delay copies until they are awaited, and to poison freed memory. It never
reads the audit log, so its counters can contradict it. Knows nothing of components, policies or transitions.

Nothing about CUDA has been measured by this project yet: ``CudaDevice`` is written against torch's public API.
"""

from __future__ import annotations

import ctypes
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rl_session.errors import ConfigError, UnsupportedError
from rl_session.lifecycle import Tier
from rl_session.offload.tensors import byte_alias, library_access, weak_storage

if TYPE_CHECKING:
    from rl_session.offload.unit import Unit

__all__ = [
    "CopyPair",
    "CudaDevice",
    "Device",
    "EmulatedDevice",
    "Fault",
    "InjectedFault",
    "Operation",
    "Point",
    "as_device",
]

CopyPair = tuple[torch.UntypedStorage | Tensor, Tensor]
"""A device storage (or a uint8 tensor over all of it, which saves making one), and the host tensor, uint8 and as long, that
its bytes go to or come from."""

Operation = Literal["copy_out", "copy_in", "allocate", "free", "synchronize"]
Point = Literal["before", "half", "after"]
_OPERATIONS = ("copy_out", "copy_in", "allocate", "free", "synchronize")
_POINTS = ("before", "half", "after")

_POISON = 0xFF
"""Fill byte of freed or not yet written memory: NaN as a float of any width, -1 as a signed integer."""


class Device(ABC):
    """What the engine needs of a device. Every method takes many storages, so that small ones can be packed.

    Attributes:
        is_told: Whether the device knows only of storages it is told of, and so has to be told of gradients while they live.
        wants_pinned: Whether copies are faster from and to page-locked host memory.
        replays_graphs: Whether captured graphs may read its memory by address.
    """

    is_told = False
    wants_pinned = False
    replays_graphs = False
    capacity: int | None = None
    """The most bytes it holds, where that is fixed from the start."""

    def hold(self, policy: str, nbytes: int) -> None:  # noqa: B027 (a device in this process knows by itself)
        """Take note of what a policy has on it, where that is known only by what its ranks report."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.units: dict[int, Unit] = {}
        """The engine's records of storages on this device, by identity: policies that share a storage share the record."""

    @property
    def held_bytes(self) -> int:
        """Bytes of participants on the device, by the engine's records; what they share counts once."""
        return sum(unit.nbytes for unit in self.units.values() if unit.tier is Tier.DEVICE)

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes on the device that belong to participants (emulated), or that are allocated (CUDA)."""

    @abstractmethod
    def adopt(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Take note of storages with bytes on the device that somebody else allocated."""

    @abstractmethod
    def allocate(self, storages: Sequence[torch.UntypedStorage], nbytes: Sequence[int]) -> None:
        """Give freed storages their memory back, with undefined contents.

        Raises:
            torch.OutOfMemoryError: There is not enough; storages before the one that failed have their memory.
        """

    @abstractmethod
    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Free the memory of storages, keeping their identity (``resize_(0)``)."""

    @abstractmethod
    def copy_out(self, pairs: Sequence[CopyPair]) -> None:
        """Start copying device bytes to the host; complete after :meth:`synchronize`."""

    @abstractmethod
    def copy_in(self, pairs: Sequence[CopyPair]) -> None:
        """Start copying host bytes to the device; complete after :meth:`synchronize`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for every copy started before."""

    @abstractmethod
    def checksum(self, storage: torch.UntypedStorage) -> int:
        """A checksum of the bytes of a storage on the device, equal to :meth:`host_checksum` of the same bytes."""

    @abstractmethod
    def host_checksum(self, host: Tensor) -> int:
        """A checksum of host bytes (a uint8 tensor)."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated, or None when there is no limit."""

    def pin(self, block: Tensor) -> bool:
        """Page-lock a host block for fast copies; False when this device has no use for it or it failed."""
        del block
        return False

    def unpin(self, block: Tensor) -> None:
        """Undo :meth:`pin`."""
        del block

    def empty_cache(self) -> None:  # noqa: B027 (a device without a cache has nothing to do)
        """Give cached memory back to the device."""

    def drain(self) -> None:  # noqa: B027 (on a device without streams nothing is under way)
        """Wait for everything that was started on the device, on whatever stream."""

    def is_resident(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage's bytes are on this device, found by looking at it."""
        return storage.device.type == self.torch_device.type and storage.nbytes() > 0


class InjectedFault(RuntimeError):  # noqa: N818 (a fault is what it is; an error is what it causes)
    """What :meth:`EmulatedDevice.fail` raises unless told otherwise."""


@attrs.define
class Fault:
    """A failure to come, armed by :meth:`EmulatedDevice.fail`.

    Attributes:
        operation: The device operation that will fail.
        k: Which storage of that operation, counted from 1 since the fault was armed.
        point: "before" its bytes are touched, "half" way through them, or "after" it is complete.
        error: What is raised.
        fired: Whether it has happened.
    """

    operation: Operation
    k: int
    point: Point
    error: BaseException
    fired: bool = False
    seen: int = 0

    def happen(self) -> BaseException:
        """It is due: what is raised."""
        return self.error

    def next_is_due(self, operation: Operation) -> bool:
        """Count one storage of ``operation``; whether this is the one to fail."""
        if self.fired or operation != self.operation:
            return False
        self.seen += 1
        return self.seen == self.k


class EmulatedDevice(Device):
    """A device made of CPU memory: real copies, real frees, honest counters, and faults on demand.

    Args:
        capacity: Bytes the device has; None for no limit. An allocation beyond it raises ``torch.OutOfMemoryError``.

    Attributes:
        bytes_in: Bytes copied host to device since it was made.
        bytes_out: Bytes copied device to host.
        num_copies: Number of storages copied, both ways.
        peak: The highest ``resident_bytes`` seen, at moves and right after optimizer steps.
    """

    is_told = True

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(torch.device("cpu"))
        if not (capacity is None or (type(capacity) is int and capacity >= 0)):
            raise ConfigError(
                f"EmulatedDevice(capacity={capacity!r}): not a number of bytes", (), "EmulatedDevice(capacity=2**30)"
            )
        self.capacity = capacity
        self.bytes_in = 0
        self.bytes_out = 0
        self.num_copies = 0
        self.peak = 0
        self._resident: dict[int, int] = {}
        """Bytes of each storage on the device, by identity."""
        self._known: dict[int, StorageWeakRef] = {}
        """Every storage that it has had, weakly: what dies is not on the device any more."""
        self._total = 0
        """Sum of ``_resident``: what died since the last purge included."""
        self._faults: list[Fault] = []
        self._pending: list[Callable[[], None]] = []
        self._delays = False
        self._poisons = False

    def __reduce__(self) -> tuple[type[EmulatedDevice], tuple[int | None]]:
        """A copy, here or in another process, is another device: weak references to storages cannot be copied."""
        return type(self), (self.capacity,)

    def __repr__(self) -> str:
        return f"EmulatedDevice(capacity={self.capacity}, resident_bytes={self.resident_bytes})"

    # -- what tests ask of it ------------------------------------------------------------------------------------

    def fail(
        self,
        operation: Operation,
        k: int = 1,
        point: Point = "before",
        error: BaseException | type[BaseException] | None = None,
    ) -> Fault:
        """Make the k-th storage (from 1) of ``operation`` fail once, ``point`` in its course.

        Args:
            operation: "copy_out", "copy_in", "allocate", "free" or "synchronize".
            k: Which storage, counted from 1 from now on.
            point: "before", "half" (half of the bytes are done) or "after" (all are, and still it fails).
            error: What to raise, an exception or a class; by default :class:`InjectedFault`.

        Raises:
            ConfigError: An unknown operation or point, or ``k`` below 1.
        """
        if operation not in _OPERATIONS or point not in _POINTS or k < 1:
            raise ConfigError(
                f"EmulatedDevice.fail({operation!r}, k={k}, point={point!r})",
                (f"operations: {', '.join(_OPERATIONS)}", f"points: {', '.join(_POINTS)}", "k counts from 1"),
                'device.fail("copy_in", k=2, point="half")',
            )
        if error is None:
            error = InjectedFault(f"injected: {operation} of storage {k}, {point}")
        elif isinstance(error, type):
            error = error(f"injected: {operation} of storage {k}, {point}")
        return self.arm(Fault(operation, k, point, error))

    def arm(self, fault: Fault) -> Fault:
        """Have a fault of one's own making, once it is due."""
        self._faults.append(fault)
        return fault

    def disarm(self, fault: Fault) -> None:
        """Take a fault back; nothing where it has happened."""
        self._faults = [each for each in self._faults if each is not fault]

    @property
    def num_armed(self) -> int:
        """Faults that have not happened yet."""
        return len(self._faults)

    def heal(self) -> None:
        """Disarm every fault that has not fired."""
        self._faults.clear()

    def delay(self, on: bool = True) -> None:
        """From now on copies happen only when they are awaited; until then their targets hold poison."""
        self._delays = on
        if not on:
            self.synchronize()

    def poison(self, on: bool = True) -> None:
        """From now on freed and newly allocated memory is filled with 0xFF (NaN as a float)."""
        self._poisons = on

    def occupy(self, nbytes: int) -> Tensor:
        """Take bytes for something that is no participant, such as a generation engine.

        They count against the capacity, in ``resident_bytes`` and in ``peak``, and may fail as any allocation does.

        Args:
            nbytes: How many.

        Returns:
            A uint8 tensor over them; they are given back by :meth:`vacate`, or when nothing refers to them any more.

        Raises:
            torch.OutOfMemoryError: The device has not so many.
            ConfigError: ``nbytes`` is negative.
        """
        if nbytes < 0:
            raise ConfigError(f"EmulatedDevice.occupy({nbytes})", (), "EmulatedDevice.occupy(2**20)")
        block = torch.empty(0, dtype=torch.uint8)
        storage = block.untyped_storage()
        try:
            self.allocate([storage], [nbytes])
        except BaseException:  # it may have come after the bytes did, and whoever keeps the error keeps the block
            storage.resize_(0)
            self._leave(storage._cdata)
            raise
        return block.set_(storage, 0, (nbytes,))  # type: ignore[call-overload,no-any-return]

    def vacate(self, block: Tensor) -> None:
        """Give back what :meth:`occupy` took; views of it read nothing from now on."""
        storage = block.untyped_storage()
        if storage._cdata in self._resident:
            self.free([storage])

    # -- the device interface ------------------------------------------------------------------------------------

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device that belong to participants, or that :meth:`occupy` took, exact at the time of the call."""
        return self._purge()

    def _purge(self) -> int:
        for key in [key for key, weak in self._known.items() if weak.expired()]:
            del self._known[key]
            self._total -= self._resident.pop(key, 0)
        return self._total

    def _enter(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weak_storage(storage)
        total = self._total = self._total + nbytes - self._resident.get(key, 0)
        self._resident[key] = nbytes
        if total > self.peak:  # noqa: PLR1730 (max() costs three times as much, for every storage)
            self.peak = total

    def _enter_all(self, storages: Sequence[torch.UntypedStorage], nbytes: Sequence[int]) -> None:
        keys = [storage._cdata for storage in storages]
        known, resident = self._known, self._resident
        if True in [key not in known for key in keys]:
            for storage, key in zip(storages, keys, strict=True):
                if key not in known:
                    known[key] = weak_storage(storage)
        was = 0 if resident.keys().isdisjoint(keys) else sum([resident.get(key, 0) for key in keys])
        self._total += sum(nbytes) - was
        resident.update(zip(keys, nbytes, strict=True))
        self.peak = max(self.peak, self._total)

    def _leave(self, key: int) -> None:
        self._total -= self._resident.pop(key, 0)

    def adopt(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Label storages as resident. Adoption never fails: their bytes are there already."""
        if storages:
            self._purge()
        for storage in storages:
            self._enter(storage, storage.nbytes())

    def forget(self, keys: Sequence[int]) -> None:
        """Take the label off storages that leave the library with their bytes."""
        for key in keys:
            self._leave(key)

    def allocate(self, storages: Sequence[torch.UntypedStorage], nbytes: Sequence[int]) -> None:
        """Resize storages to their size, within the capacity."""
        limit = self.peak if self.capacity is None else min(self.peak, self.capacity)
        wanted = self._total + sum(nbytes)
        if wanted > limit:  # else what died meanwhile makes no difference
            self._purge()
        if self._faults or self._poisons or (self.capacity is not None and wanted > self.capacity):
            self._allocate_each(storages, nbytes)
        else:
            self._allocate_all(storages, nbytes)

    def _allocate_all(self, storages: Sequence[torch.UntypedStorage], nbytes: Sequence[int]) -> None:
        """Where none is to fail on purpose; each loop goes over all, which costs half of one loop that does everything."""
        try:
            for storage, size in zip(storages, nbytes, strict=True):
                storage.resize_(size)
        except BaseException:
            there = [storage for storage in storages if storage.nbytes()]
            self._enter_all(there, [storage.nbytes() for storage in there])
            raise
        self._enter_all(storages, nbytes)

    def _allocate_each(self, storages: Sequence[torch.UntypedStorage], nbytes: Sequence[int]) -> None:
        for storage, size in zip(storages, nbytes, strict=True):
            fault = self._due("allocate") if self._faults else None
            if fault and fault.point == "before":
                raise fault.happen()
            if self.capacity is not None:
                self._check_capacity(self._total, size)
            storage.resize_(size)
            if self._poisons:
                with library_access():
                    byte_alias(storage).fill_(_POISON)
            self._enter(storage, size)
            if fault:
                raise fault.happen()

    def _check_capacity(self, resident: int, size: int) -> None:
        assert self.capacity is not None
        if resident + size > self.capacity:
            message = (
                f"emulated device out of memory: tried to allocate {size} bytes, "
                f"{resident} of {self.capacity} bytes are in use"
            )
            raise torch.OutOfMemoryError(message)

    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Resize storages to nothing, poisoning their bytes first when asked to."""
        if not (self._faults or self._poisons):
            for storage in storages:
                storage.resize_(0)
            resident = self._resident
            self._total -= sum([resident.pop(storage._cdata, 0) for storage in storages])
            return
        for storage in storages:
            fault = self._due("free") if self._faults else None
            if fault and fault.point == "before":
                raise fault.happen()
            if self._poisons:
                with library_access():
                    byte_alias(storage).fill_(_POISON)
            storage.resize_(0)
            self._leave(storage._cdata)
            if fault:
                raise fault.happen()

    def copy_out(self, pairs: Sequence[CopyPair]) -> None:
        """Copy device bytes to the host, at once or when awaited."""
        self._copy("copy_out", pairs)

    def copy_in(self, pairs: Sequence[CopyPair]) -> None:
        """Copy host bytes to the device, at once or when awaited."""
        self._copy("copy_in", pairs)

    def _copy(self, operation: Literal["copy_out", "copy_in"], pairs: Sequence[CopyPair]) -> None:
        with library_access():
            if not (self._delays or any(fault.operation == operation for fault in self._faults)):
                if pairs:
                    theres, hosts = zip(*pairs, strict=True)
                    aliases = theres if {*map(type, theres)} == {Tensor} else tuple(map(_as_bytes, theres))
                    self._count(operation, len(pairs), sum(map(Tensor.numel, hosts)))
                    targets, sources = (hosts, aliases) if operation == "copy_out" else (aliases, hosts)
                    torch._foreach_copy_(targets, sources)
                return
            for there, host in pairs:
                self._copy_one(operation, _as_bytes(there), host)

    def _copy_one(self, operation: Literal["copy_out", "copy_in"], there: Tensor, host: Tensor) -> None:
        fault = self._due(operation)
        if fault and fault.point == "before":
            raise fault.happen()
        size = host.numel() // 2 if fault and fault.point == "half" else host.numel()
        self._count(operation, 1, size)
        if self._delays:
            (host if operation == "copy_out" else there).fill_(_POISON)
            self._pending.append(lambda: _copy_prefix(operation, there, host, size))
        else:
            _copy_prefix(operation, there, host, size)
        if fault:
            raise fault.happen()

    def _count(self, operation: Operation, num_copies: int, nbytes: int) -> None:
        self.num_copies += num_copies
        if operation == "copy_out":
            self.bytes_out += nbytes
        else:
            self.bytes_in += nbytes

    def _due(self, operation: Operation) -> Fault | None:
        for fault in self._faults:
            if fault.next_is_due(operation):
                fault.fired = True
                self._faults.remove(fault)
                return fault
        return None

    def synchronize(self) -> None:
        """Carry out every delayed copy, in order."""
        fault = self._due("synchronize")
        if fault and fault.point == "before":
            raise fault.happen()
        pending, self._pending = self._pending, []
        if fault and fault.point == "half":
            pending = pending[: len(pending) // 2]
        with library_access():
            for copy in pending:
                copy()
        if fault:
            raise fault.happen()

    def checksum(self, storage: torch.UntypedStorage) -> int:
        """CRC-32 of the storage's bytes."""
        with library_access():
            return self.host_checksum(byte_alias(storage))

    def host_checksum(self, host: Tensor) -> int:
        """CRC-32 of host bytes.

        Through the address, because ``Tensor.numpy()`` would make the storage one that cannot be resized any more.
        """
        return zlib.crc32((ctypes.c_char * host.numel()).from_address(host.data_ptr()))

    def free_bytes(self) -> int | None:
        """Capacity less what is resident."""
        return None if self.capacity is None else self.capacity - self.resident_bytes


def _as_bytes(there: torch.UntypedStorage | Tensor) -> Tensor:
    return there if isinstance(there, Tensor) else byte_alias(there)


def _copy_prefix(operation: Operation, there: Tensor, host: Tensor, size: int) -> None:
    """Copy the first ``size`` bytes. A storage freed before its delayed copy ran leaves the poison where it was."""
    size = min(size, there.untyped_storage().nbytes())
    device_bytes, host_bytes = there[:size], host[:size]
    if operation == "copy_out":
        host_bytes.copy_(device_bytes)
    else:
        device_bytes.copy_(host_bytes)


_CHECKSUM_CHUNK = 1 << 24
_CHECKSUM_PRIME = 65521


class CudaDevice(Device):
    """One CUDA device. Copies run on a side stream, frees and allocations on the current one.

    Args:
        index: The CUDA device index.
    """

    wants_pinned = True
    replays_graphs = True

    def __init__(self, index: int) -> None:
        super().__init__(torch.device("cuda", index))
        self._stream = torch.cuda.Stream(self.torch_device)
        self._ended: torch.cuda.Event | None = None

    def __repr__(self) -> str:
        return f"CudaDevice({self.torch_device})"

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated on the device by this process."""
        return torch.cuda.memory_allocated(self.torch_device)

    def adopt(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Nothing to note: the caching allocator keeps the account."""

    def allocate(self, storages: Sequence[torch.UntypedStorage], nbytes: Sequence[int]) -> None:
        """Resize storages on the compute stream."""
        with torch.cuda.device(self.torch_device):
            for storage, size in zip(storages, nbytes, strict=True):
                storage.resize_(size)

    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Resize storages to nothing; the engine has synchronized before."""
        for storage in storages:
            storage.resize_(0)

    def copy_out(self, pairs: Sequence[CopyPair]) -> None:
        """Start copies to the host on the side stream, after all work queued on the current one."""
        self._copy(pairs, out=True)

    def copy_in(self, pairs: Sequence[CopyPair]) -> None:
        """Start copies to the device on the side stream."""
        self._copy(pairs, out=False)

    def _copy(self, pairs: Sequence[CopyPair], *, out: bool) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with library_access(), torch.cuda.stream(self._stream):
            for there, host in pairs:
                alias = _as_bytes(there)
                if out:
                    host.copy_(alias, non_blocking=True)
                else:
                    alias.copy_(host, non_blocking=True)
        self._ended = torch.cuda.Event()
        self._ended.record(self._stream)

    def synchronize(self) -> None:
        """Wait for the copies, and let the compute stream see them."""
        if self._ended is not None:
            self._ended.synchronize()
            torch.cuda.current_stream(self.torch_device).wait_event(self._ended)
            self._ended = None

    def drain(self) -> None:
        """Wait for every stream."""
        torch.cuda.synchronize(self.torch_device)

    def checksum(self, storage: torch.UntypedStorage) -> int:
        """A position-weighted sum of the bytes, computed on the device."""
        with library_access():
            return _weighted_sum(byte_alias(storage))

    def host_checksum(self, host: Tensor) -> int:
        """The same sum, computed on the host."""
        with library_access():
            return _weighted_sum(host)

    def free_bytes(self) -> int | None:
        """Free memory of the device plus what this process has cached and not allocated."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + cached

    def pin(self, block: Tensor) -> bool:
        """Register a host block with CUDA; the caching host allocator would round its size to a power of two."""
        status = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)
        return int(status) == 0

    def unpin(self, block: Tensor) -> None:
        """Unregister a host block."""
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())

    def empty_cache(self) -> None:
        """Return cached blocks to the driver, for other processes on the device."""
        torch.cuda.empty_cache()


def _weighted_sum(data: Tensor) -> int:
    total = 0
    for start in range(0, data.numel(), _CHECKSUM_CHUNK):
        chunk = data[start : start + _CHECKSUM_CHUNK].to(torch.int64)
        weights = torch.arange(start, start + chunk.numel(), device=data.device) % _CHECKSUM_PRIME + 1
        total = (total + int((chunk * weights).sum())) & 0x7FFF_FFFF_FFFF_FFFF
    return total


def as_device(device: Device | torch.device | str | int | None, found: torch.device) -> Device:
    """The device to use for what the user wrote, ``found`` being where the model's parameters are.

    Raises:
        UnsupportedError: A kind of device that is neither CUDA nor the CPU.
        ConfigError: Not a device at all, or a CUDA device where there is none.
    """
    if isinstance(device, Device):
        return device
    try:
        wanted = found if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is not a device", (), 'device="cuda:0"', str(error)) from error
    if wanted.type == "cpu":
        return EmulatedDevice()
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={device!r}: there is no CUDA device here",
                (f"torch {torch.__version__}, CUDA available: False",),
                'device="cpu"  # an emulated device; or a CUDA build of torch on a machine with a GPU',
            )
        return CudaDevice(torch.cuda.current_device() if str(wanted) == "cuda" else wanted.index)
    raise UnsupportedError(
        f"device {wanted} is not supported", ("devices: cuda, cpu (emulated)",), 'device="cpu" or device="cuda"'
    )
