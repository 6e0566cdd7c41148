"""The reference model of a policy, in three kinds with one interface.

"copy": a deep copy of parameters and buffers as they were at attach, held on the host and swapped in through the clean
host copy of the live weights. A module: weights of its own, brought in for the call. "adapter-off": the base of a PEFT
model, with its adapters switched off. All of them give back what they found, by an exception too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import attrs
import torch
from torch import nn

from rl_session.errors import UnsupportedError
from rl_session.lifecycle import Component, Tier
from rl_session.offload.engine import Engine
from rl_session.offload.host_pool import HostBuffer
from rl_session.offload.swap import capture, replaced

__all__ = ["AdapterOffReference", "CopyReference", "ModuleReference", "Reference", "Swap", "make_reference"]

_SWAPPED = (Component.PARAMS, Component.BUFFERS)


@attrs.frozen
class Swap:
    """One direction of a swap, for its record: "in" or "out", bytes copied, wall seconds."""

    direction: str
    kind: str
    nbytes: int
    seconds: float


class Reference(Protocol):
    """Makes the reference model the one that a forward sees.

    Attributes:
        kind: Which of the three.
        seconds: Wall time of making it.
    """

    kind: str
    seconds: float

    def active(self, *, stays_valid: bool, swaps: list[Swap]) -> Any:
        """A context manager that yields the module to call; what it copied is appended to ``swaps``."""
        ...

    def nbytes(self) -> int:
        """Bytes of host memory held for it."""
        ...

    def close(self) -> None:
        """Give its host memory back."""
        ...


class CopyReference:
    """A deep copy held on the host, swapped in place of the live weights."""

    kind = "copy"

    def __init__(self, engine: Engine, module: nn.Module) -> None:
        self._engine = engine
        self._module = module
        start = time.perf_counter()
        self._copy: dict[str, HostBuffer] = capture(engine, _SWAPPED)
        self.seconds = time.perf_counter() - start

    @contextmanager
    def active(self, *, stays_valid: bool, swaps: list[Swap]) -> Iterator[nn.Module]:
        """The live module, with the reference's bytes in it."""
        start = time.perf_counter()
        swap = replaced(self._engine, self._copy, _SWAPPED, stays_valid=stays_valid)
        try:
            with swap as nbytes:
                swaps.append(Swap("in", self.kind, nbytes, time.perf_counter() - start))
                try:
                    yield self._module
                finally:
                    start = time.perf_counter()
        finally:
            if swaps:
                swaps.append(Swap("out", self.kind, self.nbytes(), time.perf_counter() - start))

    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(buffer.nbytes for buffer in self._copy.values())

    def export(self) -> dict[str, bytes]:
        """The bytes of the copy, by tensor."""
        return {name: buffer.data.clone().numpy().tobytes() for name, buffer in self._copy.items()}

    def restore(self, contents: Mapping[str, bytes]) -> None:
        """Make the copy what another one was."""
        for name, content in contents.items():
            self._copy[name].data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def close(self) -> None:
        """Give the copy's buffers back."""
        self._engine.pool.release(list(self._copy.values()))
        self._copy = {}


class ModuleReference:
    """A module of its own; on the device only while it is called."""

    kind = "module"
    seconds = 0.0

    def __init__(self, engine: Engine, module: nn.Module) -> None:
        self._engine = engine
        self._module = module

    @contextmanager
    def active(self, *, stays_valid: bool, swaps: list[Swap]) -> Iterator[nn.Module]:
        """The reference module, brought in and sent back where it was."""
        del stays_valid  # it is never written: its host copy stays valid by itself
        before = self._engine.refresh().placement[Component.REFERENCE]
        if before is Tier.HOST:
            self._bring(Tier.DEVICE, "in", swaps)
        try:
            yield self._module
        finally:
            if before is Tier.HOST:
                self._bring(Tier.HOST, "out", swaps)

    def _bring(self, tier: Tier, direction: str, swaps: list[Swap]) -> None:
        start = time.perf_counter()
        snapshot = self._engine.refresh()
        report = self._engine.move(snapshot, snapshot.placement.evolve(**{Component.REFERENCE: tier}))
        swaps.append(Swap(direction, self.kind, report.bytes_moved, time.perf_counter() - start))

    def nbytes(self) -> int:
        """None of its own: its storages are the component REFERENCE."""
        return 0

    def close(self) -> None:
        """Nothing held."""


class AdapterOffReference:
    """The same module with its adapters switched off: no bytes at all."""

    kind = "adapter-off"
    seconds = 0.0

    def __init__(self, module: nn.Module, label: str) -> None:
        disable = getattr(module, "disable_adapter", None)
        if not callable(disable):
            raise UnsupportedError(
                f"{label}: reference='adapter-off' needs a model with adapters",
                (f"{type(module).__name__} has no disable_adapter()",),
                'wrap it with peft.get_peft_model(...), or use reference="copy"',
            )
        self._module = module
        self._disable: Callable[[], Any] = disable

    @contextmanager
    def active(self, *, stays_valid: bool, swaps: list[Swap]) -> Iterator[nn.Module]:
        """The base model."""
        del stays_valid
        swaps.append(Swap("in", self.kind, 0, 0.0))
        with self._disable():
            yield self._module
        swaps.append(Swap("out", self.kind, 0, 0.0))

    def nbytes(self) -> int:
        """None."""
        return 0

    def close(self) -> None:
        """Nothing held."""


def make_reference(
    reference: str | nn.Module | None, engine: Engine, module: nn.Module, label: str
) -> Reference | None:
    """The reference that ``attach(reference=...)`` asked for.

    Raises:
        UnsupportedError: Not one of None, "copy", "adapter-off" or a module.
    """
    if reference is None:
        return None
    if isinstance(reference, nn.Module):
        return ModuleReference(engine, reference)
    if reference == "copy":
        return CopyReference(engine, module)
    if reference == "adapter-off":
        return AdapterOffReference(module, label)
    raise UnsupportedError(
        f"{label}: reference={reference!r} is not a reference",
        ("it can be None, 'copy', 'adapter-off' or a module",),
        'attach(..., reference="copy")',
    )
