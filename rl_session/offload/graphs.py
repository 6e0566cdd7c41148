"""Captured CUDA graphs that a model keeps: each replays with the addresses that it was captured with.

Looks where graphs are kept: in attributes of modules, inside containers and plain objects, and behind the ``forward`` that
``torch.cuda.make_graphed_callables`` puts in place of a module's own. A graph that only the caller's code holds cannot be
found. Not meant are the graphs of ``torch.compile``: those are recorded anew where an address has changed (by the sources
of torch 2.13). Knows nothing of devices or moves. Tested without CUDA, with graphs that replay nothing.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda import CUDAGraph

from rl_session.offload.inventory import is_internal

__all__ = ["captured_graph"]

_MAX_DEPTH = 8
_LEAVES = (Tensor, nn.Module, str, bytes, int, float, bool, type(None), torch.dtype, torch.device, types.ModuleType)


def captured_graph(module: nn.Module) -> str | None:
    """The name of the attribute through which a module, or one inside it, reaches a CUDA graph; None where none does."""
    seen: set[int] = set()
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            if not is_internal(name) and _reaches_graph(value, seen, 0):
                return f"{path}.{name}" if path else name
    return None


def _reaches_graph(value: Any, seen: set[int], depth: int) -> bool:
    if isinstance(value, CUDAGraph):
        return True
    if isinstance(value, _LEAVES) or id(value) in seen or depth > _MAX_DEPTH:
        return False
    seen.add(id(value))
    return any(_reaches_graph(inner, seen, depth + 1) for inner in _inside(value))


def _inside(value: Any) -> Iterator[Any]:
    """What a container, a function, a class of autograd or an object holds."""
    if isinstance(value, Mapping):
        yield from list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from list(value)
    elif isinstance(value, types.FunctionType):
        yield from _closure(value)
    elif isinstance(value, staticmethod):
        yield value.__func__
    elif not isinstance(value, type) or issubclass(value, torch.autograd.Function):
        yield from list(getattr(value, "__dict__", {}).values())


def _closure(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
