"""Finding every tensor of a policy by scanning, never by name.

A scan walks the module, the gradients, everything reachable from ``optimizer.state.items()`` and the registered extras,
and groups what it finds by storage. What holds tensors but is not part of any component is reported in bytes, not ignored.
Knows nothing of devices or of where bytes should be.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_session.lifecycle import Component
from rl_session.offload.shards import Shards
from rl_session.offload.tensors import check_supported, library_access, plain_tensors, storage_of

__all__ = ["Entry", "Found", "Inventory", "Sources", "has_tensors", "reachable_tensors", "scan", "scan_gradients"]

_MAX_DEPTH = 16


@attrs.define(eq=False)
class Sources:
    """What a scan starts from.

    Attributes:
        module: The trainable module.
        optimizer: Its optimizer, or None.
        masters: Optimizer parameters that are not the module's (fp32 masters), part of OPTIMIZER.
        reference: A separate reference module, or None.
        extras: Registered extras: name to anything tensors can be found in.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    masters: list[Tensor] = attrs.field(factory=list)
    reference: nn.Module | None = None
    extras: dict[str, Any] = attrs.field(factory=dict)
    shards: Shards = attrs.field(init=False)

    @shards.default
    def _find_shards(self) -> Shards:
        return Shards(module for module in (self.module, self.reference) if module is not None)

    @property
    def placed_elsewhere(self) -> frozenset[str]:
        """Components that FSDP's ``CPUOffloadPolicy`` keeps on the host, and no move of ours touches."""
        return _PLACED_BY_FSDP if self.shards.is_placed_by_fsdp else frozenset()


_PLACED_BY_FSDP = frozenset({str(Component.PARAMS), str(Component.GRADS), str(Component.OPTIMIZER)})


class Entry:
    """One tensor found: the component it belongs to and a name for messages. It is not kept alive.

    Attributes:
        component: The component.
        name: The name.
        is_grad_slot: Whether it is the ``.grad`` of a parameter, which can be dropped by setting it to None.
    """

    __slots__ = ("_tensor", "_wrapper", "component", "is_grad_slot", "name")

    def __init__(self, component: str, name: str, tensor: Tensor, is_grad_slot: bool, wrapper: Tensor | None) -> None:
        self.component = component
        self.name = name
        self.is_grad_slot = is_grad_slot
        self._tensor = weakref.ref(tensor)
        self._wrapper = weakref.ref(wrapper) if wrapper is not None else None

    @property
    def tensor(self) -> Tensor:
        """The tensor, which must still exist: whoever looks holds the :class:`Snapshot` that the scan was made for."""
        tensor = self._tensor()
        assert tensor is not None, f"{self.name} is gone"
        return tensor

    @property
    def wrapper(self) -> Tensor | None:
        """The tensor subclass around it, which is what users hold (a DTensor around its shard)."""
        return self._wrapper() if self._wrapper is not None else None


class Found:
    """One storage found, with every known tensor over it; neither is kept alive.

    Attributes:
        key: Identity of the storage.
        entries: The tensors of components over it.
        known: Every known tensor over it by ``id``, those that belong to no component included.
    """

    def __init__(self, key: int) -> None:
        self.key = key
        self.entries: list[Entry] = []
        self.known: dict[int, weakref.ref[Tensor]] = {}

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage."""
        return storage_of(self.entries[0].tensor)

    @property
    def aliases(self) -> dict[int, Tensor]:
        """Every known tensor over it that still exists, by ``id``."""
        return {key: tensor for key, ref in self.known.items() if (tensor := ref()) is not None}

    @property
    def wrappers(self) -> list[Tensor]:
        """The DTensors around what is over it."""
        return [wrapper for entry in self.entries if isinstance(wrapper := entry.wrapper, DTensor)]

    @cached_property
    def components(self) -> tuple[str, ...]:
        """The components that reach it, in scanning order, without repeats."""
        return tuple(dict.fromkeys(entry.component for entry in self.entries))

    @property
    def name(self) -> str:
        """A name for messages: that of the first tensor found."""
        return self.entries[0].name


@attrs.define(eq=False)
class Inventory:
    """The result of a scan."""

    storages: dict[int, Found]
    uncovered: dict[int, tuple[str, int]]
    """Storages that hold tensors of no component: identity to (name, bytes)."""
    empty_shards: list[Entry] = attrs.field(factory=list)
    """DTensors of which this rank has nothing; the other ranks have the rest."""
    alive: list[Tensor] = attrs.field(factory=list)
    """What was found, so that it lives while somebody looks at it; a cached inventory has none of it."""

    def entries(self, component: str) -> Iterator[Entry]:
        """Every entry of one component."""
        for found in self.storages.values():
            for entry in found.entries:
                if entry.component == component:
                    yield entry


def has_tensors(value: Any) -> bool:
    """Whether an extra holds anything that can be moved."""
    if isinstance(value, nn.Module):
        return any(True for _ in (*value.parameters(), *value.buffers()))
    return any(True for _ in reachable_tensors(value, ""))


def reachable_tensors(
    value: Any, name: str, depth: int = 0, seen: set[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside nested containers and tensor-bearing objects, with a name that says the way to it.

    Walks mappings, sequences, sets and the attributes of objects, each object once; skips modules, classes and functions.
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    if value is None or isinstance(value, _LEAVES) or depth > _MAX_DEPTH:
        return
    seen = seen if seen is not None else set()
    if id(value) in seen:
        return
    seen.add(id(value))
    for key, inner in _children(value):
        yield from reachable_tensors(inner, f"{name}{key}", depth + 1, seen)


_LEAVES = (
    *(str, bytes, int, float, complex, bool, type, Enum, nn.Module, torch.dtype, torch.device, weakref.ref),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in list(value.items()):
            yield f"[{key!r}]", inner
    elif isinstance(value, Sequence | AbstractSet):
        for index, inner in enumerate(list(value)):
            yield f"[{index}]", inner
    else:
        for attribute, inner in _attributes(value):
            yield f".{attribute}", inner
        if hasattr(type(value), "__iter__") and hasattr(type(value), "__len__"):  # deques and the like
            for index, inner in enumerate(list(value)):
                yield f"[{index}]", inner


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                yield slot, getattr(value, slot)


def scan(sources: Sources, *, deep: bool = False) -> Inventory:
    """Find every tensor of a policy, grouped by storage.

    Args:
        sources: Where to start.
        deep: Also walk into arbitrary objects held by submodules, to find bytes that no component covers.

    Raises:
        UnsupportedError: A tensor without a storage of its own (meta, sparse, mkldnn); it is named.
    """
    inventory = Inventory({}, {})
    with library_access():
        for seen in _sightings(sources):
            _see(inventory, seen)
        for name, tensor in _side_tensors(sources, deep=deep):
            _add_alias(inventory, name, tensor)
    return inventory


def scan_gradients(sources: Sources) -> Inventory:
    """The part of a :func:`scan` that is another after every backward. Call under ``library_access()``."""
    inventory = Inventory({}, {})
    for seen in _gradient_sightings(_trainables(sources)):
        _see(inventory, seen)
    return inventory


class _Sighting(NamedTuple):
    """A tensor that the scan came across."""

    component: str
    name: str
    tensor: Tensor
    is_grad_slot: bool = False


def _see(inventory: Inventory, seen: _Sighting) -> None:
    for index, tensor in enumerate(plain_tensors(seen.tensor)):
        _add(inventory, _entry(seen, tensor, index), tensor)
        inventory.alive += (tensor, seen.tensor)


def _entry(seen: _Sighting, tensor: Tensor, index: int) -> Entry:
    """The entry of a tensor, or of a plain one inside a wrapper subclass: those are told apart by name."""
    if seen.tensor is tensor:
        return Entry(seen.component, seen.name, tensor, seen.is_grad_slot, None)
    name = seen.name if isinstance(seen.tensor, DTensor) else f"{seen.name}.{index}"  # that one has one inside
    return Entry(seen.component, name, tensor, seen.is_grad_slot, seen.tensor)


def _add(inventory: Inventory, entry: Entry, tensor: Tensor) -> None:
    if _has_no_storage(tensor):
        check_supported(tensor, entry.name)
        if isinstance(entry.wrapper, DTensor):
            inventory.empty_shards.append(entry)
        return
    key = storage_of(tensor)._cdata
    found = inventory.storages.get(key)
    if found is None:
        found = inventory.storages[key] = Found(key)
    elif id(tensor) not in found.known or all(e.component != entry.component for e in found.entries):
        pass
    elif entry.wrapper is None or any(e.wrapper is entry.wrapper for e in found.entries):
        return  # tied: the same tensor once more, and not another DTensor around the same shard
    found.entries.append(entry)
    _know(inventory, found, tensor)


def _know(inventory: Inventory, found: Found, tensor: Tensor) -> None:
    """Note an alias, and the tensor that it is a view of."""
    for alias in (tensor, tensor._base):
        if alias is not None:
            found.known[id(alias)] = weakref.ref(alias)
            inventory.alive.append(alias)


def _has_no_storage(tensor: Tensor) -> bool:
    if tensor.is_meta or tensor.layout is not torch.strided:
        return True
    # An empty shard may lie in a storage of padding, or of other shards' gradients, and keeps it alive.
    return tensor.numel() == 0 and storage_of(tensor).nbytes() == 0


def _add_alias(inventory: Inventory, name: str, tensor: Tensor) -> None:
    for plain in plain_tensors(tensor):
        if _has_no_storage(plain):
            continue
        storage = storage_of(plain)
        found = inventory.storages.get(storage._cdata)
        if found is not None:
            _know(inventory, found, plain)
        elif storage.nbytes() > _SCALAR_BYTES:
            inventory.uncovered.setdefault(storage._cdata, (name, storage.nbytes()))


_SCALAR_BYTES = 16
"""Uncovered tensors of up to one complex double are counters and the like, not worth a warning."""


def _sightings(sources: Sources) -> Iterator[_Sighting]:
    shards = sources.shards
    yield from _module_sightings(sources.module, Component.PARAMS, Component.BUFFERS, "", shards)
    parameters = _trainables(sources)
    yield from _gradient_sightings(parameters)
    yield from _optimizer_sightings(sources)
    for name, extra in sources.extras.items():
        if isinstance(extra, nn.Module):
            yield from _module_sightings(extra, name, name, f"{name}.")
        else:
            for path, tensor in reachable_tensors(extra, name):
                yield _Sighting(name, path, tensor)
    if sources.reference is not None:
        yield from _module_sightings(sources.reference, Component.REFERENCE, Component.REFERENCE, "reference.", shards)


def _module_sightings(
    module: nn.Module, params: str, buffers: str, prefix: str, shards: Shards | None = None
) -> Iterator[_Sighting]:
    stand_ins = shards.unsharded() if shards else {}
    padded = shards.padded() if shards else {}
    for path, submodule in module.named_modules(remove_duplicate=True):
        dot = f"{prefix}{path}." if path else prefix
        for name, parameter in submodule._parameters.items():
            if parameter is None:
                continue
            shard = stand_ins.get(id(parameter), parameter)
            yield _Sighting(params, f"{dot}{name}", shard)
            if id(shard) in padded:
                yield _Sighting(params, f"{dot}{name}", padded[id(shard)])
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                yield _Sighting(buffers, f"{dot}{name}", buffer)


def _trainables(sources: Sources) -> list[tuple[str, Tensor]]:
    """Module parameters, then optimizer parameters that are not the module's, each once."""
    named: dict[int, tuple[str, Tensor]] = {id(p): (name, p) for name, p in sources.shards.parameters(sources.module)}
    if sources.optimizer is not None:
        for index, group in enumerate(sources.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                named.setdefault(id(parameter), (f"param_groups[{index}][{position}]", parameter))
    for index, master in enumerate(sources.masters):
        named.setdefault(id(master), (f"masters[{index}]", master))
    return list(named.values())


def trainables_beside(sources: Sources) -> list[Tensor]:
    """What may have gradients beside the parameters of the module: all that the optimizer steps, and masters."""
    groups = sources.optimizer.param_groups if sources.optimizer is not None else ()
    return [*(parameter for group in groups for parameter in group["params"]), *sources.masters]


def _gradient_sightings(parameters: list[tuple[str, Tensor]]) -> Iterator[_Sighting]:
    for name, parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            yield _Sighting(Component.GRADS, f"{name}.grad", gradient, is_grad_slot=True)
        for attribute, value in parameter.__dict__.items():
            if isinstance(value, Tensor) and "grad" in attribute:
                yield _Sighting(Component.GRADS, f"{name}.{attribute}", value)


def _optimizer_sightings(sources: Sources) -> Iterator[_Sighting]:
    if sources.optimizer is None:
        return
    own = {id(p) for _, p in sources.shards.parameters(sources.module)}
    foreign = [p for group in sources.optimizer.param_groups for p in group["params"] if id(p) not in own]
    for index, tensor in enumerate([*foreign, *sources.masters]):
        yield _Sighting(Component.OPTIMIZER, f"optimizer master {index}", tensor)
    # items() and values() only: indexing a defaultdict would create state for parameters that have none.
    for index, state in enumerate(list(sources.optimizer.state.values())):
        for path, tensor in reachable_tensors(state, f"optimizer.state[{index}]"):
            # torch keeps 0-dim scalars such as Adam's step on the host unless asked otherwise; they stay where they are.
            if tensor.dim() > 0:
                yield _Sighting(Component.OPTIMIZER, path, tensor)


def _side_tensors(sources: Sources, *, deep: bool) -> Iterator[tuple[str, Tensor]]:
    """Tensors held as plain attributes: aliases of what was found, or bytes that no component covers."""
    for path, submodule in sources.module.named_modules():
        for name, value in submodule.__dict__.items():
            if not is_internal(name) and (deep or isinstance(value, SIDE_CONTAINERS)):
                yield from reachable_tensors(value, f"{path}.{name}" if path else name, SIDE_DEPTH)
    if deep:
        yield from sources.shards.gathered()
        yield from sources.shards.hidden_gradients()
    for name, parameter in sources.shards.parameters(sources.module):
        for attribute, value in parameter.__dict__.items():
            yield from reachable_tensors(value, f"{name}.{attribute}", SIDE_DEPTH)
    if sources.optimizer is not None:
        for attribute, value in vars(sources.optimizer).items():
            if attribute not in COVERED_BY_SCAN and "hook" not in attribute:
                yield from reachable_tensors(value, f"optimizer.{attribute}", SIDE_DEPTH)


def is_internal(attribute: str) -> bool:
    """Whether an attribute of a module is torch's own, and holds what the scan finds in another way."""
    return attribute in _MODULE_INTERNALS or attribute.startswith(_FSDP_STATE)


SIDE_CONTAINERS = (Tensor, list, tuple, dict)
SIDE_DEPTH = _MAX_DEPTH - 3
_FSDP_STATE = "__composable_api_state_key"
"""How the attribute begins where torch keeps what ``fully_shard`` knows; :mod:`rl_session.offload.shards` reads that."""
_MODULE_INTERNALS = frozenset({*nn.Module().__dict__})
COVERED_BY_SCAN = frozenset({"state", "param_groups", "defaults"})
