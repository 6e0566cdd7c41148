"""An engine for tests: it really occupies an emulated device, really holds the weights it was sent, and fails when told to.

What it generates is worked out from the bytes of its weights, so that stale, torn or discarded weights show in the result. It
knows nothing of sessions; public as ``rl_session.testing.FakeEngine``.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from rl_session.errors import ConfigError
from rl_session.offload.device import EmulatedDevice, InjectedFault
from rl_session.offload.tensors import library_access

__all__ = ["EngineFault", "FakeEngine"]

EngineOperation = Literal["wake", "sleep", "bucket", "update_weights", "generate", "reset_cache", "bytes_needed"]
EnginePoint = Literal["before", "half", "after"]
_OPERATIONS = ("wake", "sleep", "bucket", "update_weights", "generate", "reset_cache", "bytes_needed")
_POINTS = ("before", "half", "after")
_POISON = 0xFF


@attrs.define
class EngineFault:
    """A failure to come, armed by :meth:`FakeEngine.fail`.

    Attributes:
        operation: The call that will fail; "bucket" is one bucket of a push.
        k: Which such call, counted from 1 since the fault was armed.
        point: "before" it does anything, "half" way through, or "after" it is done.
        error: What is raised; False to return False instead.
        fired: Whether it has happened.
    """

    operation: str
    k: int
    point: str
    error: BaseException | Literal[False]
    fired: bool = False
    seen: int = 0


class FakeEngine:
    """A generation engine over an :class:`EmulatedDevice`.

    Args:
        device: Where it takes its memory; None for an engine with a device of its own, which has no limit.
        weights: Bytes of its weights; a mapping of tensors (or a module's ``state_dict()``) to begin with their content.
        kv_nbytes: Bytes of its KV cache.
        tags: The parts that can wake; the first holds the weights, the others share ``kv_nbytes``.
        accepts_host_weights: Whether it takes CPU tensors; otherwise pushed tensors that lie in no device storage are refused.
        requires_refit: Whether its first weights are placeholders.
        vocabulary: Token ids it generates are below this.

    Attributes:
        calls: What was called, in order: "wake weights", "sleep 1", "update_weights", "generate", ...
        pushed: CRC-32 of the weights after each push.
        num_buckets: Buckets of each push.
        declared: Bytes by tag that ``bytes_needed`` gives where they differ from the truth.
    """

    def __init__(
        self,
        device: EmulatedDevice | None = None,
        *,
        weights: int | Mapping[str, Tensor] = 1024,
        kv_nbytes: int = 1024,
        tags: Sequence[str] = ("weights", "kv_cache"),
        accepts_host_weights: bool = False,
        requires_refit: bool = False,
        vocabulary: int = 11,
    ) -> None:
        first = weights if isinstance(weights, Mapping) else {}
        self.device = device
        self.tags = tuple(tags)
        self.accepts_host_weights = accepts_host_weights
        self.requires_refit = requires_refit
        self.calls: list[str] = []
        self.pushed: list[int] = []
        self.num_buckets: list[int] = []
        self.declared: dict[str, int] = {}
        self._memory = device if device is not None else EmulatedDevice()
        self._vocabulary = vocabulary
        self._sizes = dict.fromkeys(self.tags, kv_nbytes)
        self._sizes[self.tags[0]] = weights if isinstance(weights, int) else sum(map(_size, first.values()))
        self._host: Tensor | None = torch.zeros(self._sizes[self.tags[0]], dtype=torch.uint8)
        self._blocks: dict[str, Tensor] = {}
        self._places: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        self._faults: list[EngineFault] = []
        self._busy = threading.Condition()
        self._num_requests = 0
        self._ends_by_itself = False
        for name, tensor in first.items():
            self._write(self._host, name, tensor)

    def __repr__(self) -> str:
        return f"FakeEngine(awake={list(self._blocks)}, pushes={len(self.pushed)})"

    # -- what tests ask of it ------------------------------------------------------------------------------------

    def fail(
        self,
        operation: EngineOperation,
        k: int = 1,
        point: EnginePoint = "before",
        error: BaseException | type[BaseException] | Literal[False] | None = None,
    ) -> EngineFault:
        """Make the k-th call (from 1) of ``operation`` fail once, ``point`` in its course.

        Args:
            operation: "wake", "sleep", "bucket" (one of a push), "update_weights", "generate", "reset_cache" or
                "bytes_needed". Half of a wake or sleep is the first of its tags; half of a bucket is half of its bytes.
            k: Which call, counted from 1 from now on.
            point: "before", "half" or "after".
            error: What to raise, an exception or a class; False to return False, where what is returned says whether it
                worked (not "generate" and "bytes_needed"); by default :class:`InjectedFault`.

        Raises:
            ConfigError: An unknown operation or point, ``k`` below 1, or False where it says nothing.
        """
        if operation not in _OPERATIONS or point not in _POINTS or k < 1:
            raise ConfigError(
                f"FakeEngine.fail({operation!r}, k={k}, point={point!r})",
                (f"operations: {', '.join(_OPERATIONS)}", f"points: {', '.join(_POINTS)}", "k counts from 1"),
                'engine.fail("bucket", k=2, point="half")',
            )
        if error is False and operation in ("generate", "bytes_needed"):
            what = f"FakeEngine.fail({operation!r}, error=False)"
            raise ConfigError(what, ("what it returns is a result, and no answer whether it worked",), "error=None")
        if error is None:
            error = InjectedFault(f"injected: {operation} {k}, {point}")
        elif isinstance(error, type):
            error = error(f"injected: {operation} {k}, {point}")
        fault = EngineFault(operation, k, point, error)
        self._faults.append(fault)
        return fault

    def disarm(self, fault: EngineFault) -> None:
        """Take a fault back; nothing where it has happened."""
        self._faults = [each for each in self._faults if each is not fault]

    def heal(self) -> None:
        """Disarm every fault that has not fired."""
        self._faults.clear()

    def begin_requests(self, num: int = 1) -> None:
        """From now on ``num`` more requests are in flight, until :meth:`finish_requests`."""
        with self._busy:
            self._num_requests += num

    def finish_requests(self) -> None:
        """Nothing is in flight any more."""
        with self._busy:
            self._num_requests, self._ends_by_itself = 0, False
            self._busy.notify_all()

    def drain_in(self, looks: int) -> None:
        """Requests that end by themselves: ``in_flight`` is one less each time it is looked at."""
        with self._busy:
            self._num_requests, self._ends_by_itself = looks, True

    @property
    def awake_tags(self) -> frozenset[str]:
        """What is awake."""
        return frozenset(self._blocks)

    @property
    def occupied(self) -> int:
        """Bytes it holds on its device, by looking at them."""
        return sum(block.untyped_storage().nbytes() for block in self._blocks.values())

    @property
    def fingerprint(self) -> int:
        """CRC-32 of its weights, awake or asleep; -1 where they are discarded."""
        block = self._blocks.get(self.tags[0], self._host)
        return -1 if block is None else self._memory.host_checksum(block)

    # -- the protocol --------------------------------------------------------------------------------------------

    def bytes_needed(self, tags: Sequence[str]) -> int:
        """Bytes of device memory that ``tags`` take."""
        fault = self._due("bytes_needed")
        if fault is not None:
            _answer(fault)
        return sum(self.declared.get(tag, self._sizes[tag]) for tag in tags)

    @property
    def in_flight(self) -> int:
        """Requests that are running or waiting."""
        with self._busy:
            num = self._num_requests
            if self._ends_by_itself and num:
                self._num_requests -= 1
            return num

    def wait_for_idle(self, timeout_seconds: float) -> bool:
        """Block until nothing is in flight; requests that end by themselves end at once."""
        with self._busy:
            if self._ends_by_itself:
                self._num_requests = 0
            return self._busy.wait_for(lambda: not self._num_requests, timeout_seconds)

    def wake(self, tags: Sequence[str]) -> bool | None:
        """Take memory for ``tags``; the weights come back from the host, or as poison where they were discarded."""
        self.calls.append(f"wake {' '.join(tags)}")
        fault = self._due("wake")
        if fault is not None and fault.point == "before":
            return _answer(fault)
        for position, tag in enumerate(tags):
            if fault is not None and fault.point == "half" and position == (len(tags) + 1) // 2:
                break
            if tag not in self._blocks:
                self._blocks[tag] = self._fill(tag, self._memory.occupy(self._sizes[tag]))
        return None if fault is None else _answer(fault)

    def _fill(self, tag: str, block: Tensor) -> Tensor:
        if tag == self.tags[0] and self._host is not None:
            block.copy_(self._host)
            self._host = None
        elif tag == self.tags[0]:
            block.fill_(_POISON)
        return block

    def sleep(self, level: int) -> bool | None:
        """Give the memory back; level 1 keeps the weights on the host."""
        self.calls.append(f"sleep {level}")
        fault = self._due("sleep")
        if fault is not None and fault.point == "before":
            return _answer(fault)
        for position, tag in enumerate(reversed(list(self._blocks))):  # the cache first
            if fault is not None and fault.point == "half" and position == 1:
                break
            block = self._blocks[tag]
            if tag == self.tags[0]:
                self._host = block.clone() if level == 1 else None
            try:
                self._memory.vacate(block)
            finally:
                if not block.untyped_storage().nbytes():  # also where the device fails after its bytes have gone
                    del self._blocks[tag]
        if level >= 2 and self.tags[0] not in self._blocks:
            self._host = None
        return None if fault is None else _answer(fault)

    def update_weights(self, buckets: Iterator[dict[str, Tensor]]) -> bool | None:
        """Write what comes over its weights."""
        self.calls.append("update_weights")
        block = self._blocks.get(self.tags[0])
        if block is None:
            raise RuntimeError("illegal memory access: weights were pushed to an engine that is asleep")
        fault = self._due("update_weights")
        if fault is not None and fault.point == "before":
            return _answer(fault)
        num = 0
        for bucket in buckets:
            num += 1
            problem = self._take(block, bucket)
            if problem is not None:
                return _answer(problem)
            if fault is not None and fault.point == "half":
                return _answer(fault)
        self.num_buckets.append(num)
        self.pushed.append(self.fingerprint)
        return None if fault is None else _answer(fault)

    def _take(self, block: Tensor, bucket: Mapping[str, Tensor]) -> EngineFault | None:
        """Write one bucket, or half of it; returns the fault that is to be answered with."""
        fault = self._due("bucket")
        if fault is not None and fault.point == "before":
            return fault
        items = list(bucket.items())
        for name, tensor in items:
            self._check_reachable(name, tensor)
            half = fault is not None and fault.point == "half" and name == items[-1][0]
            self._write(block, name, tensor, part=0.5 if half else 1.0)
        return fault

    def _check_reachable(self, name: str, tensor: Tensor) -> None:
        if self.device is None or self.accepts_host_weights:
            return
        with library_access():
            if tensor.untyped_storage()._cdata not in self.device.units:
                raise RuntimeError(f"illegal memory access: {name} is on the host, and this engine reads device memory")

    def _write(self, block: Tensor, name: str, tensor: Tensor, part: float = 1.0) -> None:
        with library_access():
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            start = self._places.setdefault(name, sum(self._lengths.values()))
            self._lengths.setdefault(name, data.numel())
            if start + data.numel() > block.numel():
                raise RuntimeError(f"{name} does not fit: the engine has {block.numel()} bytes of weights")
            length = int(data.numel() * part)
            block[start : start + length].copy_(data[:length])

    def reset_cache(self) -> bool | None:
        """Forget what is cached of older weights."""
        self.calls.append("reset_cache")
        fault = self._due("reset_cache")
        return None if fault is None else _answer(fault)

    def generate(self, batch: Mapping[str, Any], *, num_tokens: int = 1) -> dict[str, Any]:
        """Continue prompts with tokens worked out from the weights.

        Args:
            batch: ``input_ids [B, S]`` right-padded, ``input_lengths [B]``.
            num_tokens: How many tokens to add.

        Returns:
            ``output_ids [B, S + num_tokens]``, ``generation_lengths [B]``, ``unpadded_sequence_lengths [B]``, ``logprobs``
            float32 (NaN where the weights are poison), and ``fingerprint [B]`` int64.

        Raises:
            RuntimeError: A part of it is asleep.
        """
        self.calls.append("generate")
        fault = self._due("generate")
        if fault is not None and fault.error is not False:
            raise fault.error
        asleep = [tag for tag in self.tags if tag not in self._blocks]
        if asleep:
            raise RuntimeError(f"illegal memory access: {', '.join(asleep)} asleep")
        prompts, lengths = batch["input_ids"], batch["input_lengths"]
        num, width = prompts.shape
        output = torch.zeros(num, width + num_tokens, dtype=prompts.dtype)
        output[:, :width] = prompts
        value = float("nan") if self._is_poisoned() else -1.0
        logprobs = torch.zeros(output.shape, dtype=torch.float32)
        for row, length in enumerate(lengths.tolist()):
            for step in range(num_tokens):
                seed = f"{self.fingerprint} {row} {step} {output[row, :length].tolist()}"
                output[row, length + step] = zlib.crc32(seed.encode()) % self._vocabulary
                logprobs[row, length + step] = value
        return {
            "output_ids": output,
            "generation_lengths": torch.full((num,), num_tokens),
            "unpadded_sequence_lengths": lengths + num_tokens,
            "logprobs": logprobs,
            "fingerprint": torch.full((num,), self.fingerprint),
        }

    def _is_poisoned(self) -> bool:
        block = self._blocks[self.tags[0]]
        return bool(block.numel()) and bool((block == _POISON).all())

    def _due(self, operation: str) -> EngineFault | None:
        for fault in self._faults:
            if fault.operation == operation:
                fault.seen += 1
                if fault.seen == fault.k:
                    fault.fired = True
                    self._faults.remove(fault)
                    return fault
        return None


def _answer(fault: EngineFault) -> Literal[False]:
    """Fail as the fault says.

    Raises:
        BaseException: Its error, unless it is to answer False.
    """
    if fault.error is False:
        return False
    raise fault.error


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
