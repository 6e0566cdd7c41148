"""The way back: what to change in live state so that it says what a skeleton says, planned first and done at once.

State that lives and has the recorded structure is written in place; what is missing is made anew; what is in excess
goes. Planning changes nothing and collects everything that does not fit. Knows nothing of files.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from rl_session.workers.checkpoint.skeleton import (
    MAPPINGS,
    SEQUENCES,
    Node,
    attributes_of,
    class_name,
    inner_tensors,
    nbytes_of,
)

__all__ = ["ABSENT", "Home", "Plan", "empty_like"]

ABSENT: Final = object()
"""What stands for a live value that is not there (None is a value)."""


class Home:
    """The parameter that a value is the state of, and where torch would put its step counter.

    Args:
        parameter: The live parameter; only its metadata are read.
        options: Hyperparameters of its group, as they will be.
    """

    def __init__(self, parameter: Tensor, options: Mapping[str, Any]) -> None:
        self.parameter = parameter
        self.steps_on_device = bool(options.get("capturable") or options.get("fused"))

    def device_for(self, node: Node, *, is_step: bool) -> torch.device:
        """The device for a tensor made anew."""
        device = self.parameter.device
        if is_step and self.steps_on_device:
            return device
        if node.get("on") == "host" or (is_step and "on" not in node):
            return torch.device("cpu")
        return device


def _write(view: Tensor, value: Tensor) -> None:
    """Copy values in; of an expanded tensor, whose elements share memory, one element a repeated axis."""
    repeated = [axis for axis, step in enumerate(view.stride()) if step == 0 and view.shape[axis] > 1]
    for axis in repeated:
        view, value = view.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    view.copy_(value)


class Plan:
    """What restoring will do.

    Args:
        table: Tensor key to shape and dtype.
        loaded: Tensor key to values on the CPU, or None to find out only whether everything fits.
    """

    def __init__(self, table: Mapping[str, Mapping[str, Any]], loaded: Mapping[str, Tensor] | None = None) -> None:
        self.problems: list[str] = []
        self.actions: list[Callable[[], None]] = []
        """What to do after the copies; none of it can fail by what it is about."""
        self.layouts: dict[str, DTensor] = {}
        """Tensor key to a live tensor that is sharded as that key has to be; a key without one is loaded whole."""
        self._table = table
        self._loaded = loaded
        self._copies: dict[int, tuple[Tensor, str]] = {}
        self._made: dict[str, Tensor] = {}

    def commit(self, write: Callable[[Tensor], Tensor]) -> None:
        """Do it.

        Args:
            write: Gives, for a live tensor, one through which its values may be overwritten wherever its bytes are.
        """
        assert self._loaded is not None
        assert not self.problems
        views = [(_shard(write(live)), _shard(self._loaded[key])) for live, key in self._copies.values()]
        with torch.no_grad():
            for view, value in views:
                _write(view, value)
        for action in self.actions:
            action()

    # -- planning: what a node will be, given what is there now --------------------------------------------------------

    def build(self, node: Node, live: Any, path: str, home: Home | None = None) -> Any:
        """The value that a node stands for: ``live`` itself wherever it can be kept.

        Args:
            node: From the skeleton.
            live: What is there now, or ``ABSENT``.
            path: The way to it.
            home: The parameter it is the state of.
        """
        if not isinstance(node, dict):
            return node
        kind = node["kind"]
        if kind == "float":
            return float(node["value"])
        if kind == "dtype":
            return getattr(torch, node["name"])
        if kind == "device":
            return torch.device(node["name"])
        return self._builders[kind](self, node, live, path, home)

    def _tensor(self, node: Node, live: Any, path: str, home: Home | None) -> Any:
        key = node["key"]
        is_step = path.endswith("/step") and not self._table[key]["shape"]
        if self._fits(live, key) and not (is_step and home is not None and self._misplaced(live, home)):
            known = self._copies.setdefault(id(live), (live, key))
            if known[1] == key and isinstance(live, DTensor):
                self.layouts.setdefault(key, live)
            if known[1] == key:
                self._made.setdefault(key, live)
                return live
        self._lay_out(node, key, path, home)
        if self._loaded is None:
            return ABSENT
        if key not in self._made:
            device = live.device if home is None and isinstance(live, Tensor) else torch.device("cpu")
            if home is not None:
                device = home.device_for(node, is_step=is_step)
            self._made[key] = _fresh(self._loaded[key], device, home)
        return self._made[key]

    def _lay_out(self, node: Node, key: str, path: str, home: Home | None) -> None:
        """State that is made anew is sharded as its parameter is, where it has the shape of it."""
        if home is None or not isinstance(home.parameter, DTensor):
            return
        if list(home.parameter.shape) == self._table[key]["shape"]:
            self.layouts.setdefault(key, home.parameter)
        elif node.get("sharded"):
            self.problems.append(f"{path}: it was sharded in a way of its own, which only your optimizer can make")

    def _fits(self, live: Any, key: str) -> bool:
        table = self._table[key]
        return (
            isinstance(live, Tensor)
            and (inner_tensors(live) is None or isinstance(live, DTensor))
            and list(live.shape) == table["shape"]
            and str(live.dtype) == f"torch.{table['dtype']}"
        )

    @staticmethod
    def _misplaced(live: Tensor, home: Home) -> bool:
        return home.steps_on_device and live.device != home.parameter.device

    def _wrapper(self, node: Node, live: Any, path: str, home: Home | None) -> Any:
        """A tensor subclass around others: its parts are restored in place, or it is made like its parameter."""
        inner = inner_tensors(live) if isinstance(live, Tensor) and class_name(live) == node["type"] else None
        if inner is None:
            return self._wrapper_like(node, path, home)
        for name, part in node["attributes"].items():
            if self.build(part, inner.get(name, ABSENT), f"{path}/{name}") is not inner.get(name, ABSENT):
                self.problems.append(f"{path}: {name} inside the {node['type']} has another shape or dtype")
        return live

    def _wrapper_like(self, node: Node, path: str, home: Home | None) -> Any:
        like = home.parameter if home is not None else None
        if like is None or not _same_wrapper(like, node):
            return self._missing(node, path)
        parts = {name: self.build(part, ABSENT, f"{path}/{name}") for name, part in node["attributes"].items()}
        if self._loaded is None:
            return ABSENT
        names, context = like.__tensor_flatten__()  # type: ignore[attr-defined]
        made = {name: parts[name].to(like.device) if name in parts else getattr(like, name) for name in names}
        unflatten = type(like).__tensor_unflatten__  # type: ignore[attr-defined]
        return unflatten(made, context, like.shape, like.stride()).detach()

    def _dict(self, node: Node, live: Any, path: str, home: Home | None) -> Any:
        cls = MAPPINGS[node["type"]]
        kept = live if isinstance(live, dict) and type(live) is cls else None
        pairs = self._pairs(node, kept or {}, path, home)
        if kept is None:
            return cls(pairs)
        self.actions.append(partial(_refill, kept, pairs))
        return kept

    def _pairs(self, node: Node, live: Mapping[Any, Any], path: str, home: Home | None) -> dict[Any, Any]:
        pairs = {}
        for key_node, inner in node["pairs"]:
            key = self._key(key_node, path)
            pairs[key] = self.build(inner, live.get(key, ABSENT), f"{path}/{key if isinstance(key, str) else ''}", home)
        return pairs

    def _key(self, node: Node, path: str) -> Any:
        if isinstance(node, dict) and node["kind"] == "tensor":
            if node["key"] not in self._made:
                self.problems.append(f"{path}: the parameter that is a key of it is not there")
            return self._made.get(node["key"])
        return self.build(node, ABSENT, path)

    def _items(self, node: Node, live: Any, path: str, home: Home | None) -> Any:
        cls = SEQUENCES[node["type"]]
        kept = live if type(live) is cls and not isinstance(live, set | frozenset) else None
        values = self._elements(node, kept if kept is not None else (), path, home)
        if isinstance(kept, list):
            self.actions.append(partial(_replace_items, kept, values))
            return kept
        if isinstance(kept, collections.deque) and kept.maxlen == node["maxlen"]:
            self.actions.append(partial(_replace_items, kept, values))
            return kept
        return collections.deque(values, node["maxlen"]) if cls is collections.deque else cls(values)

    def _elements(self, node: Node, live: Any, path: str, home: Home | None) -> list[Any]:
        there = [*live, *[ABSENT] * len(node["items"])]
        return [self.build(inner, there[index], f"{path}/{index}", home) for index, inner in enumerate(node["items"])]

    def _namedtuple(self, node: Node, live: Any, path: str, home: Home | None) -> Any:
        if live is ABSENT or class_name(live) != node["type"] or len(live) != len(node["items"]):
            return self._missing(node, path)
        return type(live)._make(self._elements(node, live, path, home))

    def _object(self, node: Node, live: Any, path: str, home: Home | None) -> Any:
        if live is ABSENT or class_name(live) != node["type"]:
            return self._missing(node, path)
        there = attributes_of(live)
        attributes = {
            name: self.build(inner, there.get(name, ABSENT), f"{path}/{name}", home)
            for name, inner in node["attributes"].items()
        }
        if "pairs" in node:
            self.actions.append(partial(_refill, live, self._pairs(node, live, path, home)))
        if "items" in node:
            self.actions.append(partial(_replace_items, live, self._elements(node, live, path, home)))
        self.actions.append(partial(_set_attributes, live, attributes, there))
        return live

    def _code(self, node: Node, live: Any, path: str, home: Home | None) -> Any:
        return self._missing(node, path) if live is ABSENT else live

    def _missing(self, node: Node, path: str) -> Any:
        self.problems.append(f"{path}: the checkpoint has a {node['type']} here, which only your program can make")
        return ABSENT

    _builders: Final[dict[str, Callable[..., Any]]] = {
        "tensor": _tensor,
        "wrapper": _wrapper,
        "dict": _dict,
        "items": _items,
        "namedtuple": _namedtuple,
        "object": _object,
        "code": _code,
    }

    def nbytes(self) -> int:
        """Bytes of the tensors that restoring writes or makes, each once."""
        assert self._loaded is not None
        keys = {key for _, key in self._copies.values()} | set(self._made)
        return sum(nbytes_of(self._loaded[key]) for key in keys)


def _same_wrapper(parameter: Tensor, node: Node) -> bool:
    return bool(class_name(parameter) == node["type"] and list(parameter.shape) == node["shape"])


def empty_like(shape: Sequence[int], dtype: torch.dtype, layout: DTensor | None) -> Tensor:
    """A tensor on the CPU to read into: whole, or the shard of one that is sharded as ``layout`` is."""
    if layout is None:
        return torch.empty(shape, dtype=dtype)
    spec = layout._spec
    whole = TensorMeta(torch.Size(shape), tuple(layout.stride()), dtype)
    shard = torch.empty(layout._local_tensor.shape, dtype=dtype)
    return DTensor(shard, dataclasses.replace(spec, tensor_meta=whole), requires_grad=False)


def _shard(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _fresh(value: Tensor, device: torch.device, home: Home | None) -> Tensor:
    """A new tensor with these values, laid out in memory as its parameter: fused optimizers insist on it."""
    if isinstance(value, DTensor):
        return DTensor(value._local_tensor.to(device), value._spec, requires_grad=False)
    like = home.parameter if home is not None else None
    if like is None or like.shape != value.shape or inner_tensors(like) is not None or like.is_contiguous():
        return value.to(device)
    return torch.empty_strided(value.shape, like.stride(), dtype=value.dtype, device=device).copy_(value)


def _refill(live: Any, pairs: dict[Any, Any]) -> None:
    for key in [key for key in live if key not in pairs]:
        del live[key]
    for key, value in pairs.items():
        live[key] = value


def _replace_items(live: Any, values: list[Any]) -> None:
    live.clear()
    live.extend(values)


def _set_attributes(live: Any, attributes: dict[str, Any], there: dict[str, Any]) -> None:
    # Past any __setattr__ of the class (frozen dataclasses): the values were read past it, too.
    for name, value in attributes.items():
        if value is not there.get(name, ABSENT):
            object.__setattr__(live, name, value)
    for name in there:
        if name not in attributes:
            object.__delattr__(live, name)
