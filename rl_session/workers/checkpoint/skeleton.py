"""From live state to JSON and a flat table of tensors, without pickle.

None, bools, numbers and strings stand for themselves. Everything else is a *node*, a JSON object whose ``kind`` says
what it is: ``float`` (not finite), ``dtype``, ``device``, ``tensor`` (its key in the table; ``sharded`` if it was a
DTensor, of which the whole is written), ``wrapper`` (another tensor subclass around others), ``dict``, ``items`` (list,
tuple, set, deque ...), ``namedtuple``, ``object`` (class name and attributes; filled in where it lives), ``code`` (a
function: not saved, kept as it is).

Reads only metadata of tensors. Knows nothing of files, nor of the way back (:mod:`.restoring`).
"""

from __future__ import annotations

import collections
import enum
import functools
import math
import numbers
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_session.errors import CheckpointWriteError

__all__ = [
    "CODE",
    "MAPPINGS",
    "SEQUENCES",
    "Encoder",
    "Node",
    "attributes_of",
    "class_name",
    "identity_of",
    "inner_tensors",
    "nbytes_of",
    "tensor_keys",
]

Node = Any
"""JSON: a scalar, or a dict with a ``kind``."""

MAPPINGS: Final[dict[str, type]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}
"""Mappings that can be made anew; any other is an object with pairs."""

SEQUENCES: Final[dict[str, type]] = {
    "list": list,
    "tuple": tuple,
    "Size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
"""Collections that can be made anew."""

CODE: Final = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, functools.partial),
    weakref.ref,
)
"""What is code rather than state."""

_MAX_DEPTH: Final = 16


def class_name(value: Any) -> str:
    """The name under which the class of an object is recorded."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes an object holds itself, in ``__dict__`` and in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{cls.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def inner_tensors(tensor: Tensor) -> dict[str, Tensor] | None:
    """The tensors inside a wrapper subclass (a DTensor, a quantized tensor), or None for a plain one.

    A DTensor is saved and loaded as the whole that it is a part of, not as a wrapper.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    parts = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}  # a DTensor also gives its mesh


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of the values of a tensor, which may be away."""
    return tensor.numel() * tensor.element_size()


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that show the same bytes in the same way."""
    inner = inner_tensors(tensor)
    if inner is not None:
        return tuple((name, identity_of(part)) for name, part in inner.items())
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class Encoder:
    """Turns state into nodes and collects its tensors, each once.

    Args:
        attempted: What is being done, for the error.
    """

    def __init__(self, attempted: str) -> None:
        self.attempted = attempted
        self.tensors: dict[str, Tensor] = {}
        """Key to tensor. Holding them keeps identities from being reused."""
        self._keys: dict[tuple[Any, ...], str] = {}

    def table(self) -> dict[str, dict[str, Any]]:
        """Key to shape and dtype of every tensor met, as JSON."""
        return {
            key: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for key, tensor in self.tensors.items()
        }

    def encode(self, value: Any, path: str, home: Tensor | None = None, depth: int = 0) -> Node:
        """The node of a value.

        Args:
            value: Anything.
            path: The way to it, for tensor keys and for messages.
            home: The parameter that the value is the state of.
            depth: How deep ``value`` is nested.

        Raises:
            CheckpointWriteError: Something in it cannot be written without pickle.
        """
        if depth > _MAX_DEPTH:
            raise self._refuse(path, f"it refers to itself, or nests deeper than {_MAX_DEPTH}")
        if isinstance(value, Tensor):
            return self._tensor(value, path, home, depth)
        if value is None or isinstance(value, _PLAIN):
            return _plain(value)
        if isinstance(value, CODE):
            return {"kind": "code", "type": class_name(value)}
        return self._compound(value, path, home, depth)

    def _compound(self, value: Any, path: str, home: Tensor | None, depth: int) -> Node:
        cls: type = type(value)
        kind = cls.__name__
        if MAPPINGS.get(kind) is cls:
            return {"kind": "dict", "type": kind, "pairs": self._pairs(value, path, home, depth)}
        if SEQUENCES.get(kind) is cls:
            node = {"kind": "items", "type": kind, "items": self._items(value, path, home, depth)}
            return {**node, "maxlen": value.maxlen} if kind == "deque" else node
        return self._object(value, path, home, depth)

    def _pairs(self, value: Mapping[Any, Any], path: str, home: Tensor | None, depth: int) -> list[list[Node]]:
        pairs = []
        for key, inner in value.items():
            if isinstance(key, Tensor):
                if identity_of(key) not in self._keys:
                    raise self._refuse(path, "a tensor that is no parameter is a key of it")
                pairs.append([self.encode(key, path), self.encode(inner, f"{path}/parameter", key, depth + 1)])
            else:
                pairs.append(
                    [self.encode(key, path, None, depth + 1), self.encode(inner, f"{path}/{key}", home, depth + 1)]
                )
        return pairs

    def _items(self, value: Any, path: str, home: Tensor | None, depth: int) -> list[Node]:
        return [self.encode(inner, f"{path}/{index}", home, depth + 1) for index, inner in enumerate(value)]

    def _object(self, value: Any, path: str, home: Tensor | None, depth: int) -> Node:
        node: dict[str, Node] = {"kind": "object", "type": class_name(value)}
        if isinstance(value, dict):
            node["pairs"] = self._pairs(value, path, home, depth)
        elif isinstance(value, list | collections.deque):
            node["items"] = self._items(value, path, home, depth)
        elif isinstance(value, tuple) and hasattr(value, "_make"):
            return {**node, "kind": "namedtuple", "items": self._items(value, path, home, depth)}
        elif isinstance(value, _OPAQUE) or not (hasattr(value, "__dict__") or _has_slots(value)):
            raise self._refuse(path, f"a {class_name(value)} cannot be written without pickle")
        node["attributes"] = {
            name: self.encode(inner, f"{path}/{name}", home, depth + 1) for name, inner in attributes_of(value).items()
        }
        return node

    def _tensor(self, tensor: Tensor, path: str, home: Tensor | None, depth: int) -> Node:
        inner = inner_tensors(tensor)
        if inner is not None and not isinstance(tensor, DTensor):
            parts = {name: self.encode(part, f"{path}/{name}", None, depth + 1) for name, part in inner.items()}
            return {"kind": "wrapper", "type": class_name(tensor), "shape": list(tensor.shape), "attributes": parts}
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise self._refuse(path, f"a tensor with layout {tensor.layout} on {tensor.device} cannot be written")
        identity = identity_of(tensor)
        key = self._keys.get(identity)
        if key is None:
            key, number = path, 2
            while key in self.tensors:
                key, number = f"{path}#{number}", number + 1
            self._keys[identity] = key
            self.tensors[key] = tensor
        node: dict[str, Node] = {"kind": "tensor", "key": key}
        if isinstance(tensor, DTensor):
            node["sharded"] = True
        if home is not None and home.device.type != "cpu":
            # Saved on a CPU it could be either; restoring then goes by torch's own rules.
            node["on"] = "host" if tensor.device.type == "cpu" else "device"
        return node

    def _refuse(self, path: str, why: str) -> CheckpointWriteError:
        return CheckpointWriteError(
            self.attempted,
            (f"{path}: {why}", "nothing was written"),
            "keep it out of that state, or keep it there as tensors, numbers, strings and containers of these",
        )


_PLAIN: Final = (bool, str, numbers.Integral, numbers.Real, torch.dtype, torch.device)
_OPAQUE: Final = (nn.Module, torch.optim.Optimizer, enum.Enum, set, frozenset, tuple, bytes, bytearray, BaseException)


def _plain(value: Any) -> Node:
    if isinstance(value, torch.dtype):
        return {"kind": "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"kind": "device", "name": str(value)}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else {"kind": "float", "value": repr(number)}


def _has_slots(value: Any) -> bool:
    return any("__slots__" in cls.__dict__ for cls in type(value).__mro__)


def tensor_keys(node: Node) -> Iterator[str]:
    """The keys of the tensors that a node needs."""
    if isinstance(node, dict):
        if node.get("kind") == "tensor":
            yield node["key"]
        for inner in node.values():
            yield from tensor_keys(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from tensor_keys(inner)
