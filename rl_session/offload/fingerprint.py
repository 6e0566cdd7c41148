"""Whether a policy is still made of what it was made of at the last scan: a walk without names, and a comparison.

A scan names and groups every tensor, at several microseconds each. Most of the time nothing has changed since the last
one, and that can be told at a fraction of the cost: the same containers hold the same tensors in the same order, and each
of those is over the storage it was over. The walk goes where :func:`~rl_session.offload.inventory.scan` goes and keeps
nothing alive. Where only a scan can tell (FSDP2 swaps parameters, wrapper subclasses hide their storages), it says so.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rl_session.offload.inventory import (
    COVERED_BY_SCAN,
    SIDE_CONTAINERS,
    SIDE_DEPTH,
    Sources,
    is_internal,
    reachable_tensors,
    trainables_beside,
)
from rl_session.offload.tensors import AWAY_TYPES

__all__ = ["Fingerprint", "Gathered", "gather"]

_PLAIN = (Tensor, nn.Parameter)
_SCALARS = (type(None), bool, int, float, str)


class Gathered:
    """What a walk came across.

    Attributes:
        tensors: Every tensor, in the order of the walk.
        layout: Where each container ends: a tensor that moved from one to the next is a change.
        parts: The submodules.
        has_gradients: Whether a parameter has a ``.grad``; that is not among the tensors.
    """

    __slots__ = ("has_gradients", "layout", "parts", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.layout: list[int] = []
        self.parts: list[nn.Module] = []
        self.has_gradients = False

    def add_module(self, module: nn.Module) -> list[nn.Module]:
        """Parameters and buffers of every submodule; returns the submodules."""
        parts = list(_parts(module))
        for part in parts:
            self.tensors += [tensor for tensor in part._parameters.values() if tensor is not None]
            self.layout.append(len(self.tensors))
            self.tensors += [tensor for tensor in part._buffers.values() if tensor is not None]
            self.layout.append(len(self.tensors))
        return parts

    def add_reachable(self, value: Any, depth: int = 0) -> None:
        """What a scan finds inside a value."""
        self.tensors += [tensor for _, tensor in reachable_tensors(value, "", depth)]
        self.layout.append(len(self.tensors))

    def add_state(self, state: Any) -> None:
        """The optimizer state of one parameter."""
        if type(state) is not dict:
            self.tensors += [tensor for _, tensor in reachable_tensors(state, "") if tensor.dim()]
        else:
            for value in state.values():
                if isinstance(value, Tensor):
                    if value.dim():
                        self.tensors.append(value)
                elif not isinstance(value, _SCALARS):
                    self.tensors += [tensor for _, tensor in reachable_tensors(value, "") if tensor.dim()]
        self.layout.append(len(self.tensors))


def gather(sources: Sources) -> Gathered | None:
    """Every tensor that a scan would find, gradients excepted; None where only a scan can tell.

    Call under :func:`~rl_session.offload.tensors.library_access`.
    """
    if sources.shards:
        return None
    found = Gathered()
    found.parts = found.add_module(sources.module)
    beside = trainables_beside(sources)
    if not _add_attributes(found, beside):
        return None
    found.tensors += beside
    found.has_gradients = True in [tensor.grad is not None for tensor in found.tensors]
    if sources.optimizer is not None:
        for state in list(sources.optimizer.state.values()):
            found.add_state(state)
    for extra in sources.extras.values():
        found.add_module(extra) if isinstance(extra, nn.Module) else found.add_reachable(extra)
    if sources.reference is not None:
        found.add_module(sources.reference)
    _add_side_tensors(found, sources)
    return found if all(map(_is_plain, set(map(type, found.tensors)))) else None


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [module]
    while waiting:
        part = waiting.pop()
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += part._modules.values()  # noqa: SLF001 (children() makes a set and a generator for each)


def _add_attributes(found: Gathered, beside: list[Tensor]) -> bool:
    """Tensors that parameters have as attributes; False where one of them is a gradient."""
    for tensor in [tensor for tensor in (*found.tensors, *beside) if tensor.__dict__]:
        if any("grad" in name and isinstance(value, Tensor) for name, value in tensor.__dict__.items()):
            return False
        for value in tensor.__dict__.values():
            found.add_reachable(value, SIDE_DEPTH)
    return True


def _add_side_tensors(found: Gathered, sources: Sources) -> None:
    """Tensors that submodules and the optimizer hold as plain attributes."""
    for part in found.parts:
        for name, value in part.__dict__.items():
            if isinstance(value, SIDE_CONTAINERS) and not is_internal(name):
                found.add_reachable(value, SIDE_DEPTH)
    if sources.optimizer is not None:
        for attribute, value in vars(sources.optimizer).items():
            if attribute not in COVERED_BY_SCAN and "hook" not in attribute:
                found.add_reachable(value, SIDE_DEPTH)


def _is_plain(kind: type) -> bool:
    return kind in _PLAIN or (kind in AWAY_TYPES and kind.__mro__[1] in _PLAIN)


class Fingerprint:
    """What a walk came across, to compare later ones with.

    Args:
        gathered: The walk, made right after the scan that it stands for.
    """

    __slots__ = ("_layout", "_refs", "addresses")

    def __init__(self, gathered: Gathered) -> None:
        self._layout = gathered.layout
        self._refs = list(map(weakref.ref, gathered.tensors))
        self.addresses = _addresses(gathered.tensors)
        """Identity of the storage of each tensor."""

    def matches(self, gathered: Gathered) -> bool:
        """Whether a walk came across the same tensors in the same places, over the same storages.

        Weak references tell a tensor from another that was made where it had been in memory.
        """
        return (
            len(gathered.tensors) == len(self._refs)
            and gathered.layout == self._layout
            and all(map(operator.is_, map(operator.call, self._refs), gathered.tensors))
            and _addresses(gathered.tensors) == self.addresses
        )


def _slow_address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


_address = getattr(torch._C, "_storage_address", _slow_address)
"""Identity of a storage (``_cdata``), without the Python object that ``untyped_storage()`` makes."""


def _addresses(tensors: list[Tensor]) -> list[int]:
    return list(map(_address, tensors))
